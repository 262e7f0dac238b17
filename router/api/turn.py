"""One request of a client, and the answer to it.

A turn is ASGI's `receive` and `send` for whoever speaks ASGI, and beneath them what the paths that carry load use
straight: the body once it is whole, one write for a head and the bytes that follow it, a call when the client leaves.

Rules:
- A head never goes out alone if bytes follow it in the same step: both leave in one write, and so in one packet.
- Only whole writes are made: `drain` is awaited before a write, never inside one.
- Whatever else a header holds, it holds no line break: header lines are counted once more before they are sent.
"""

import asyncio
from collections.abc import Callable, Coroutine, Iterable, Sequence
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

import msgspec
import structlog
from starlette.types import Message, Scope

from router.api.terms import TURN

if TYPE_CHECKING:
    from router.api.protocol import FrontProtocol

BUFFERED_BYTES = 65536
"""So much of a request body is held before the client is made to wait."""

_STATUS = {one.value: b"HTTP/1.1 %d %b\r\n" % (one.value, one.phrase.encode()) for one in HTTPStatus}
_CONTROLS = bytes({*range(32), 127} - {9})
_BODYLESS = (204, 304)

log = structlog.get_logger()


class Turn(msgspec.Struct, eq=False):
    """A request and its answer. `path` and `query` as told; `headers` with names in lower case, in their order.

    `keep_alive`: the connection may be used again. `whole`: the body is all here. `started`, `complete`: of the
    answer. `gone`: the client's connection is lost; `left` is called when that happens before the answer is complete.
    `also` are header lines the answer carries whoever makes it; `task` serves the request. `parts` of the body, `size`
    bytes, have come and are not `told` yet; `news` wakes who waits for them. The connection adds to them.
    """

    connection: "FrontProtocol"
    headers: list[tuple[bytes, bytes]]
    method: str = ""
    path: str = ""
    raw_path: bytes = b""
    query: bytes = b""
    keep_alive: bool = True
    version: str = "1.1"
    whole: bool = False
    started: bool = False
    complete: bool = False
    gone: bool = False
    left: Callable[[], None] | None = None
    also: bytes | None = None
    task: asyncio.Task[None] | None = None
    told: bool = False
    parts: list[bytes] = []
    size: int = 0
    news: asyncio.Event | None = None
    _asked: bool = False
    _chunked: bool = False
    _head: bytes = b""
    _left_bytes: int | None = None

    @property
    def scope(self) -> Scope:
        """The request as ASGI tells it."""
        connection = self.connection
        return {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": "2.3"},
            "http_version": self.version,
            "method": self.method,
            "scheme": "http",
            "path": self.path,
            "raw_path": self.raw_path,
            "query_string": self.query,
            "root_path": "",
            "headers": self.headers,
            "client": connection.client,
            "server": connection.server,
            "state": {},
            "extensions": {TURN: self},
        }

    async def run(self, serving: Coroutine[Any, Any, None]) -> None:
        """Do what serves this request. An answer it leaves unfinished ends the connection."""
        try:
            await serving
        except Exception:
            log.error("request failed through a fault of ours", exc_info=True)
        finally:
            self.connection.tasks.discard(self.task)
            self.task = None
            if not (self.complete or self.gone):
                self.connection.transport.close()

    # The request

    async def receive(self) -> Message:
        """What ASGI says of it: more of the body, or that the client is gone (or has been answered)."""
        if not (self._asked or self.started or self.gone):
            self._asked = True
            if _waits_for_a_word(self.headers):
                self.connection.transport.write(b"HTTP/1.1 100 Continue\r\n\r\n")
        while not (self.gone or self.complete):
            if not self.told and (self.parts or self.whole):
                body = b"".join(self.parts)
                self.parts.clear()
                self.size = 0
                self.told = self.whole
                return {"type": "http.request", "body": body, "more_body": not self.whole}
            self.connection.resume_reading()
            if self.news is None:
                self.news = asyncio.Event()
            self.news.clear()
            await self.news.wait()
        return {"type": "http.disconnect"}

    # The answer

    async def send(self, message: Message) -> None:
        """Say a part of the answer in ASGI's words."""
        if self.connection.stuffed:
            await self.drain()
        if message["type"] == "http.response.start":
            self.head(message["status"], message["headers"])
            self.connection.loop.call_soon(self.flush)
        else:
            body = message.get("body", b"")
            if message.get("more_body", False):
                self.write(body)
            else:
                self.end(body)

    def head(self, status: int, headers: Iterable[tuple[bytes, bytes]]) -> None:
        """Begin the answer with any headers; those that frame it are sorted out. Raises ValueError like `lines`."""
        told, length = [], None
        for name, value in headers:
            if name == b"content-length":
                length = int(value)
            elif name == b"connection":
                self.keep_alive = self.keep_alive and value.lower() != b"close"
            elif name != b"transfer-encoding":
                told.append((name, value))
        self.begin(status, lines(told), length)

    def begin(self, status: int, said: bytes, length: int | None) -> None:
        """The head of the answer, held until the first bytes of its body. `said` are header lines (see `lines`)."""
        self.started = True
        if length is not None:
            framing = b"content-length: %d\r\n" % length
        elif status in _BODYLESS:
            framing, length = b"", 0
        elif self.version == "1.0":
            framing, self.keep_alive = b"", False
        else:
            framing, self._chunked = b"transfer-encoding: chunked\r\n", True
        if self.method == "HEAD":
            length, self._chunked = 0, False
        self._left_bytes = length
        self._head = self._framed(status, said, framing)

    def write(self, data: bytes) -> bool:
        """More of the body, with the head if that is still held. False once the client reads too slowly: `drain`."""
        if data and not self.gone:
            head, self._head = self._head, b""
            data = b"%b%x\r\n%b\r\n" % (head, len(data), data) if self._chunked else head + self._sized(data)
            self.connection.transport.write(data)
        return not self.connection.stuffed

    def end(self, data: bytes = b"") -> None:
        """The last of the body: the answer is complete."""
        if self.complete:
            return
        if self._chunked:
            last = b"%x\r\n%b\r\n0\r\n\r\n" % (len(data), data) if data else b"0\r\n\r\n"
            whole = True
        elif self._left_bytes == len(data):
            last, whole = data, True
        else:
            last = self._sized(data)
            whole = not self._left_bytes
        self.complete = True
        if not self.gone:
            if self._head or last:
                self.connection.transport.write(self._head + last)
            self._head = b""
            self.connection.answered(self, whole=whole)
        if self.news is not None:
            self.news.set()

    def answer(self, status: int, said: bytes, body: bytes) -> None:
        """The whole answer at once: `begin` and `end` in one."""
        self.started = self.complete = True
        head = self._framed(status, said, b"content-length: %d\r\n" % len(body))
        if not self.gone:
            self.connection.transport.write(head if self.method == "HEAD" else head + body)
            self.connection.answered(self, whole=True)
        if self.news is not None:
            self.news.set()

    def flush(self) -> None:
        """Send a head nothing followed."""
        if self._head and not self.gone:
            head, self._head = self._head, b""
            self.connection.transport.write(head)

    async def drain(self) -> None:
        """Wait until the client has read enough, or is gone."""
        await self.connection.drain()

    def abort(self) -> None:
        """End the connection at once, whatever is still unsent."""
        self._head = b""
        self.connection.transport.abort()

    def _framed(self, status: int, said: bytes, framing: bytes) -> bytes:
        """A head that says so, and what every answer says."""
        if self.also is not None:
            said = _without_permissions(said) + self.also
        connection = self.connection
        if connection.state.default_headers is not connection.dated:
            connection.date()
        close = b"\r\n" if self.keep_alive else b"connection: close\r\n\r\n"
        status_line = _STATUS.get(status) or b"HTTP/1.1 %d \r\n" % status
        return b"%b%b%b%b%b" % (status_line, connection.date_lines, said, framing, close)

    def _sized(self, data: bytes) -> bytes:
        """No more of the body than was announced, and nothing of it where there is none."""
        left = self._left_bytes
        if left is None:
            return data
        if self.method == "HEAD" or not left:
            return b""
        self._left_bytes = max(0, left - len(data))
        return data[:left]

    # What the connection says

    def lost(self) -> None:
        """The client is gone."""
        self.gone = True
        if self.news is not None:
            self.news.set()
        left, self.left = self.left, None
        if left is not None and not self.complete:
            left()


def lines(headers: Sequence[tuple[bytes, bytes]]) -> bytes:
    """Header lines as they are sent. Raises ValueError for one that holds a control character."""
    told = b"\r\n".join([*map(b": ".join, headers), b""])
    if len(told) - len(told.translate(None, _CONTROLS)) != 2 * len(headers):
        raise ValueError("a header holds a control character")
    return told


def _without_permissions(said: bytes) -> bytes:
    """A node's or relay's own permission for web pages is not ours."""
    return b"".join(line for line in said.splitlines(keepends=True) if not line.lower().startswith(b"access-control-"))


def _waits_for_a_word(headers: Iterable[tuple[bytes, bytes]]) -> bool:
    """Whether the client sends its body only when told to go on."""
    return any(name == b"expect" and value.lower() == b"100-continue" for name, value in headers)
