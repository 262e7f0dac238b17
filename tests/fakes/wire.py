"""One server-side HTTP/1.1 connection, read strictly and written exactly.

Rules: requests are parsed by hand and anything doubtful in their framing is noted in `faults` (a router must not send
it); the peer's leaving cancels the task that answers, which is how an engine learns to stop; what is written
goes out as one segment a write; `reset` is a true RST, `hang_up` a FIN after what was written.
"""

import asyncio
import socket
import struct
from collections.abc import Awaitable, Callable
from time import monotonic

from tests.fakes.seen import Seen

HEAD_LIMIT = 128 * 1024


class Gone(Exception):
    """The peer closed the connection."""


class Wire(asyncio.Protocol):
    """A connection. `serve(wire)` is run as a task for as long as it lives."""

    def __init__(self, serve: "Callable[[Wire], Awaitable[None]]", number: int, faults: list[str]) -> None:
        self._serve = serve
        self._faults = faults
        self._buffer = bytearray()
        self._news = asyncio.Event()
        self._writable = asyncio.Event()
        self._writable.set()
        self.number = number
        self.open = True
        self.idle_since = monotonic()
        self.task: asyncio.Task[None] | None = None
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self.transport = transport
        self.task = asyncio.create_task(self._run(), name=f"fake-wire-{self.number}")

    async def _run(self) -> None:
        try:
            await self._serve(self)
        except Gone:
            pass
        finally:
            self.transport.close()

    def data_received(self, data: bytes) -> None:
        self._buffer += data
        self._news.set()

    def eof_received(self) -> bool:
        return False

    def connection_lost(self, exc: Exception | None) -> None:
        self.open = False
        self._news.set()
        self._writable.set()
        if self.task is not None and self.task is not asyncio.current_task():
            self.task.cancel()

    def pause_writing(self) -> None:
        self._writable.clear()

    def resume_writing(self) -> None:
        self._writable.set()

    # reading

    async def _more(self) -> None:
        if not self.open:
            raise Gone
        self._news.clear()
        await self._news.wait()
        if not self.open and not self._buffer:
            raise Gone

    async def _until(self, mark: bytes) -> bytes:
        while (at := self._buffer.find(mark)) < 0:
            if len(self._buffer) > HEAD_LIMIT:
                raise Gone
            await self._more()
        taken = bytes(self._buffer[:at])
        del self._buffer[: at + len(mark)]
        return taken

    async def _exactly(self, size: int) -> bytes:
        while len(self._buffer) < size:
            await self._more()
        taken = bytes(self._buffer[:size])
        del self._buffer[:size]
        return taken

    async def request(self) -> Seen:
        """The next request, body and all."""
        self.idle_since = monotonic()
        head = (await self._until(b"\r\n\r\n")).decode("latin-1")
        line, *fields = head.split("\r\n")
        method, target, version = line.split(" ")
        headers = [(name, value.strip()) for name, _, value in (field.partition(":") for field in fields)]
        seen = Seen(connection=self.number, method=method, target=target, headers=headers)
        if version != "HTTP/1.1":
            self._faults.append(f"version {version}")
        await self._body(seen)
        return seen

    async def _body(self, seen: Seen) -> None:
        lengths, codings = seen.header_values("content-length"), seen.header_values("transfer-encoding")
        if len(seen.header_values("host")) != 1:
            self._faults.append(f"host headers: {seen.header_values('host')}")
        if len(lengths) + len(codings) > 1:
            self._faults.append(f"framing twice: {lengths} {codings}")
        if "100-continue" in seen.header_values("expect"):
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        if codings:
            seen.chunked = True
            seen.body = await self._chunks()
        elif lengths:
            seen.body = await self._exactly(int(lengths[0]))
        elif seen.method == "POST":
            self._faults.append("POST without framing")

    async def _chunks(self) -> bytes:
        body = bytearray()
        while size := int((await self._until(b"\r\n")).partition(b";")[0], 16):
            body += await self._exactly(size)
            await self._exactly(2)
        while await self._until(b"\r\n"):
            pass
        return bytes(body)

    # writing

    def write(self, data: bytes) -> None:
        if not self.open:
            raise Gone
        self.transport.write(data)

    async def send(self, data: bytes) -> None:
        """Writes, and waits while the peer does not take it."""
        self.write(data)
        await self._writable.wait()
        if not self.open:
            raise Gone

    async def chunk(self, data: bytes) -> None:
        await self.send(b"%x\r\n%b\r\n" % (len(data), data))

    def reset(self) -> None:
        """RST, now. What the kernel has not sent is lost."""
        peer = self.transport.get_extra_info("socket")
        if self.open and peer.fileno() >= 0:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.transport.abort()

    def hang_up(self) -> None:
        """FIN after everything written."""
        self.transport.close()
