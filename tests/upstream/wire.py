"""Raw servers that misbehave on command, and loops to meet them on.

A script is a coroutine over one accepted `Peer`; it writes exact bytes and decides when to close, reset or stay silent.
"""

import asyncio
import contextlib
import socket
import ssl
import struct
from collections.abc import AsyncIterator, Awaitable, Callable

from router.upstream.pool import Bounds, Pool
from router.upstream.target import Target

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"
GET = b"GET /v1/models HTTP/1.1\r\nHost: node\r\n\r\n"


def post(body: bytes) -> bytes:
    return b"POST /v1/chat/completions HTTP/1.1\r\nHost: node\r\nContent-Length: %d\r\n\r\n" % len(body)


class Peer:
    """The server's end of one connection. `number` counts connections from 0."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, number: int) -> None:
        self.reader = reader
        self.writer = writer
        self.number = number

    async def request(self) -> tuple[bytes, bytes]:
        head = await self.reader.readuntil(b"\r\n\r\n")
        length = 0
        for line in head.lower().split(b"\r\n"):
            if line.startswith(b"content-length:"):
                length = int(line.partition(b":")[2])
        return head, await self.reader.readexactly(length)

    async def send(self, *pieces: bytes) -> None:
        for piece in pieces:
            if self.writer.transport.is_closing():  # uvloop raises RuntimeError on a closed transport
                raise ConnectionResetError
            self.writer.write(piece)
            await self.writer.drain()

    def reset(self) -> None:
        sock = self.writer.get_extra_info("socket")
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.writer.transport.abort()

    async def gone(self) -> None:
        """Wait until the client has closed."""
        with contextlib.suppress(ConnectionError):
            while await self.reader.read(65536):
                pass


Script = Callable[[Peer], Awaitable[None]]


class Node:
    """A listening script. `accepted` connections in all, `requests` as the script notes them, `live` ones now."""

    def __init__(self, script: Script, tls: ssl.SSLContext | None = None, host: str = "127.0.0.1") -> None:
        self.script = script
        self.tls = tls
        self.host = host
        self.port = 0
        self.accepted = 0
        self.requests: list[bytes] = []
        self.live: set[asyncio.Task[None]] = set()
        self.faults: list[BaseException] = []

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self.live.add(task)
        number, self.accepted = self.accepted, self.accepted + 1
        try:
            await self.script(Peer(reader, writer, number))
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        except Exception as exc:  # noqa: BLE001 - told to the test at the end
            self.faults.append(exc)
        finally:
            self.live.discard(task)
            writer.close()

    @property
    def url(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{'https' if self.tls else 'http'}://{host}:{self.port}"

    @contextlib.asynccontextmanager
    async def listening(self) -> AsyncIterator["Node"]:
        server = await asyncio.start_server(self._serve, self.host, self.port, ssl=self.tls)
        self.port = server.sockets[0].getsockname()[1]
        try:
            yield self
        finally:
            server.close()
            live = list(self.live)
            for task in live:
                task.cancel()
            await asyncio.gather(*live, return_exceptions=True)
            await settled()
        assert not self.faults, self.faults


@contextlib.asynccontextmanager
async def joined(
    script: Script,
    bounds: Bounds | None = None,
    *,
    server_tls: ssl.SSLContext | None = None,
    client_tls: ssl.SSLContext | None = None,
    host: str = "127.0.0.1",
) -> AsyncIterator[tuple[Pool, Node]]:
    """A pool and the node it points at; both are closed and checked for leaks at the end."""
    async with Node(script, server_tls, host).listening() as node:
        pool = Pool(Target.parse(node.url, tls=client_tls), bounds or Bounds())
        try:
            yield pool, node
        finally:
            await pool.close()
            assert (pool.open, pool.idle) == (0, 0)


async def settled(turns: int = 10) -> None:
    """Let callbacks that are already due run."""
    for _ in range(turns):
        await asyncio.sleep(0)


async def until(true: Callable[[], bool], seconds: float = 5.0) -> None:
    """Wait for something that another end of a socket brings about."""
    async with asyncio.timeout(seconds):
        while not true():  # noqa: ASYNC110 - what is waited for happens at the far end of a socket
            await asyncio.sleep(0.002)


def answering(*pieces: bytes) -> Script:
    """Answer every request on a connection with the same bytes."""

    async def script(peer: Peer) -> None:
        while True:
            await peer.request()
            await peer.send(*pieces)

    return script


def once(*pieces: bytes, reset: bool = False) -> Script:
    """Answer one request with these bytes, then close or reset."""

    async def script(peer: Peer) -> None:
        await peer.request()
        await peer.send(*pieces)
        if reset:
            peer.reset()

    return script
