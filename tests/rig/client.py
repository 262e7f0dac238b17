"""A raw HTTP/1.1 client: it sees every byte and the time it came, and can leave as rudely as a client does.

Rules: answers are parsed by h11, which refuses what a strict client refuses (length mismatch, both framings, bad
chunks); one connection carries one exchange at a time; `reset` is a true RST, `close` a FIN, and not reading really
stops the peer (small receive buffer, nothing read behind our back).
"""

import asyncio
import json
import socket
import struct
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from time import monotonic
from typing import Any, Self

import h11

Headers = tuple[tuple[str, str], ...]
PATIENCE_S = 20.0


@dataclass(frozen=True)
class Event:
    """One SSE block as it came, without its blank line; `at` is `time.monotonic()`."""

    raw: bytes
    at: float

    @property
    def lines(self) -> list[bytes]:
        return self.raw.replace(b"\r\n", b"\n").split(b"\n")

    @property
    def comment(self) -> bool:
        return all(line.startswith(b":") for line in self.lines)

    @property
    def data(self) -> bytes:
        lines = [line[5:].removeprefix(b" ") for line in self.lines if line.startswith(b"data:")]
        return b"\n".join(lines)

    @property
    def json(self) -> Any:
        return json.loads(self.data)


@dataclass
class Reply:
    """A whole answer. `clean` is False when the connection ended inside it."""

    status: int
    headers: list[tuple[str, str]]
    body: bytes = b""
    clean: bool = True
    head_at: float = 0.0
    ended_at: float = 0.0
    arrivals: list[tuple[float, bytes]] = field(default_factory=list)

    def values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def header(self, name: str) -> str | None:
        values = self.values(name)
        assert len(values) <= 1, f"{name} came {len(values)} times"
        return values[0] if values else None

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def error(self) -> dict[str, Any]:
        return dict(self.json["error"])

    @property
    def events(self) -> list[Event]:
        """Every SSE block, with the time its last byte came."""
        found, pending = [], b""
        for at, piece in self.arrivals:
            *blocks, pending = (pending + piece).replace(b"\r\n", b"\n").split(b"\n\n")
            found += [Event(block, at) for block in blocks]
        return found

    @property
    def data(self) -> list[bytes]:
        """Data of the events, comments left out."""
        return [event.data for event in self.events if not event.comment]

    @property
    def text(self) -> str:
        """What a person reads of a chat stream."""
        parts = []
        for data in self.data:
            for choice in json.loads(data).get("choices", []) if data.startswith(b"{") else []:
                parts.append(choice.get("delta", {}).get("content") or choice.get("text") or "")
        return "".join(parts)


def request(path: str, body: Any = None, *, method: str = "POST", headers: Headers = (), host: str = "router") -> bytes:
    """The bytes of a request. A `body` that is not bytes is sent as JSON."""
    raw = b"" if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
    names = {name.lower() for name, _ in headers}
    lines = [f"{method} {path} HTTP/1.1", f"Host: {host}", *(f"{name}: {value}" for name, value in headers)]
    if body is not None and "content-type" not in names:
        lines.append("Content-Type: application/json")
    if method not in ("GET", "HEAD", "OPTIONS") and not names & {"content-length", "transfer-encoding"}:
        lines.append(f"Content-Length: {len(raw)}")
    return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1") + raw


class Connection:
    """One TCP connection to a server."""

    def __init__(self, peer: socket.socket) -> None:
        self._socket = peer
        self._loop = asyncio.get_running_loop()
        self._open = True

    @classmethod
    async def open(cls, port: int, *, receive_buffer: int | None = None) -> Self:
        peer = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        if receive_buffer is not None:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
        peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        peer.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(peer, ("127.0.0.1", port))
        except BaseException:
            peer.close()
            raise
        return cls(peer)

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        self.close()

    async def send(self, data: bytes) -> None:
        await self._loop.sock_sendall(self._socket, data)

    async def read(self, size: int = 65536) -> bytes:
        """Some bytes, or b"" at the end."""
        return await self._loop.sock_recv(self._socket, size)

    async def read_until(self, mark: bytes) -> bytes:
        """Everything up to and with `mark`, and what came with it."""
        seen = b""
        async with asyncio.timeout(PATIENCE_S):
            while mark not in seen:
                piece = await self.read()
                if not piece:
                    raise AssertionError(f"ended before {mark!r}: {seen!r}")
                seen += piece
        return seen

    async def ended(self) -> bool:
        """Whether the peer closes (what it still sends is thrown away)."""
        try:
            while await self.read():
                pass
        except ConnectionError:
            pass
        return True

    def close(self) -> None:
        if self._open:
            self._open = False
            self._socket.close()

    def reset(self) -> None:
        """RST."""
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        self.close()

    async def reply(self, method: str = "POST") -> Reply:
        """The next answer, to its end."""
        return [reply async for reply in self.watch(method)][-1]

    async def watch(self, method: str = "POST") -> AsyncIterator[Reply]:
        """The answer as it grows: yielded after the head and after every piece of body."""
        parser = h11.Connection(h11.CLIENT, max_incomplete_event_size=1 << 20)
        parser.send(h11.Request(method=method, target="/", headers=[("host", "x"), ("content-length", "0")]))
        parser.send(h11.EndOfMessage())
        reply: Reply | None = None
        ended = False
        while True:
            try:
                event = parser.next_event()
            except h11.RemoteProtocolError:
                if not ended:
                    raise
                if reply is None:
                    raise ConnectionResetError("closed without an answer") from None
                break
            if event is h11.NEED_DATA:
                data = await self._piece()
                ended = not data
                parser.receive_data(data)
            elif isinstance(event, h11.Response):
                pairs = [(name.decode("latin-1"), value.decode("latin-1")) for name, value in event.headers.raw_items()]
                reply = Reply(event.status_code, pairs, head_at=monotonic(), clean=False)
                yield reply
            elif isinstance(event, h11.Data):
                assert reply is not None
                reply.body += bytes(event.data)
                reply.arrivals.append((monotonic(), bytes(event.data)))
                yield reply
            elif isinstance(event, h11.EndOfMessage):
                assert reply is not None
                reply.clean = True
                break
        reply.ended_at = monotonic()
        yield reply

    async def _piece(self) -> bytes:
        async with asyncio.timeout(PATIENCE_S):
            try:
                return await self.read()
            except ConnectionError:
                return b""


async def converse(port: int, raw: bytes, method: str = "POST") -> Reply:
    """Send raw bytes on a connection of their own and read one answer."""
    async with await Connection.open(port) as line:
        await line.send(raw)
        return await line.reply(method)


async def ask(port: int, body: Any = None, path: str = "/v1/chat/completions", **options: Any) -> Reply:
    """One exchange on a connection of its own. Options as for `request`."""
    return await converse(port, request(path, body, **options), options.get("method", "POST"))


def chat(content: Any = "hello", *, model: str = "tiny", **fields: Any) -> dict[str, Any]:
    """A chat body."""
    return {"model": model, "messages": [{"role": "user", "content": content}], **fields}


def stream(content: Any = "hello", *, model: str = "tiny", **fields: Any) -> dict[str, Any]:
    """A streamed chat body."""
    return chat(content, model=model, stream=True, **fields)
