"""A client's connection: HTTP/1.1 on httptools, for uvicorn's server.

A request head must be whole within `HEAD_S` and within the size limit; a head that is not HTTP is told so in OpenAI's
shape. A connection on which nothing was ever sent is closed like one that is kept alive. The body's bounds are the
door's (it knows which path allows how much).

Requests are answered in the order they came; one that comes before the answer to the last is read and waits. A
connection has one timer, armed for the nearest deadline and, when it rings too early, armed again: a request neither
makes nor cancels one.
"""

import asyncio
import math
from collections import deque
from secrets import token_hex
from typing import Any, ClassVar, cast
from urllib.parse import unquote

import httptools
import msgspec
from uvicorn.config import Config
from uvicorn.server import ServerState

from router.api.turn import BUFFERED_BYTES, Turn

HEAD_S = 10.0
"""Longest time from the first byte of a request to the end of its head."""


class FrontProtocol(asyncio.Protocol):
    """One client connection; uvicorn's `app` is called with each `Turn` and what it returns is awaited.

    `head_limit` is the largest request head in bytes; `stuffed`: the client reads slowly; `date_lines` are the headers
    uvicorn gives every answer, as they are sent."""

    head_limit: ClassVar[int] = 65536
    date_lines: ClassVar[bytes] = b""
    dated: ClassVar[object] = None  # what `date_lines` were made of

    def __init__(
        self,
        config: Config,
        server_state: ServerState,
        app_state: dict[str, Any],
        _loop: asyncio.AbstractEventLoop | None = None,
    ) -> None:
        self.loop = _loop or asyncio.get_running_loop()
        self.tasks = server_state.tasks
        self.transport: asyncio.Transport
        self.client: tuple[str, int] | None = None
        self.server: tuple[str, int] | None = None
        self.stuffed = False
        self._serve: Any = config.app
        self.state = server_state
        self._keep_alive_s = float(config.timeout_keep_alive)
        self._parser: Any = httptools.HttpRequestParser(self)
        self._parser.set_dangerous_leniencies(lenient_data_after_close=True)
        self._turn: Turn | None = None  # whose request is read, or was last
        self._answering: Turn | None = None
        self._waiting: deque[Turn] = deque()
        self._writable: asyncio.Event | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = self._deadline = math.inf
        self._paused = False
        self._in_head = True
        self._head_bytes = 0
        self._url = b""
        self._headers: list[tuple[bytes, bytes]] = []

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self.transport = cast("asyncio.Transport", transport)
        self.state.connections.add(self)  # type: ignore[arg-type]
        self.client = _address(transport.get_extra_info("peername"))
        self.server = _address(transport.get_extra_info("sockname"))
        self._until(self._keep_alive_s)

    def connection_lost(self, exc: Exception | None) -> None:
        self.state.connections.discard(self)
        if self._alarm is not None:
            self._alarm.cancel()
        self._parser = None  # it holds our methods: a cycle
        turn, self._answering, self._turn = self._answering, None, None
        waiting, self._waiting = self._waiting, deque()
        for one in (turn, *waiting):
            if one is not None:
                one.lost()
        self.resume_writing()

    def data_received(self, data: bytes) -> None:
        if self._parser is None:
            return
        if self._in_head:
            self._head_bytes += len(data)
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserUpgrade:
            pass  # nothing here is upgraded: the request is served as it stands
        except httptools.HttpParserError:
            self._refuse(400, "Invalid HTTP request received.", None)
            return
        if self._in_head and self._head_bytes and not self.transport.is_closing():
            if self._head_bytes > self.head_limit:
                self._refuse(431, "The request head is too large.", "request_header_fields_too_large")
            elif self._head_bytes == len(data):
                self._until(HEAD_S)

    def pause_writing(self) -> None:
        self.stuffed = True

    def resume_writing(self) -> None:
        self.stuffed = False
        if self._writable is not None:
            self._writable.set()

    async def drain(self) -> None:
        """Wait until the client has read enough, or is gone."""
        if self._writable is None:
            self._writable = asyncio.Event()
        while self.stuffed:
            self._writable.clear()
            await self._writable.wait()

    # What the parser says

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        if self._in_head:  # else it is a trailer: nothing here reads those
            self._headers.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        url, self._url = self._url, b""
        headers, self._headers = self._headers, []
        self._in_head, self._turn = False, None
        if self.transport.is_closing():
            return
        if self._head_bytes > self.head_limit:
            size = len(url) + sum(len(name) + len(value) + 4 for name, value in headers)
            if size > self.head_limit:
                self._refuse(431, "The request head is too large.", "request_header_fields_too_large")
                return
        if url.startswith(b"/") and b"#" not in url:
            raw_path, _, query = url.partition(b"?")
        else:
            parsed = httptools.parse_url(url)
            raw_path, query = parsed.path, parsed.query or b""
        path = raw_path.decode("ascii")
        if "%" in path:
            path = unquote(path)
        parser = self._parser
        method, keep_alive = parser.get_method().decode("ascii"), parser.should_keep_alive()
        self._turn = turn = Turn(self, headers, method, path, raw_path, query, keep_alive)
        if parser.get_http_version() != "1.1":
            turn.version, turn.keep_alive = parser.get_http_version(), False
        if self._answering is None:
            self._start(turn)
        else:
            self._pause_reading()
            self._waiting.append(turn)

    def on_body(self, body: bytes) -> None:
        turn = self._turn
        if turn is None:
            return
        if turn.complete:
            self._until(self._keep_alive_s)
            return
        turn.parts.append(body)
        turn.size += len(body)
        if turn.news is not None:
            turn.news.set()
        if turn.size > BUFFERED_BYTES:
            self._pause_reading()

    def on_message_complete(self) -> None:
        self._in_head, self._head_bytes = True, 0
        turn = self._turn
        if turn is not None:
            turn.whole = True
            if turn.news is not None:
                turn.news.set()

    # What a turn says

    def date(self) -> None:
        """A second has passed since `date_lines` were made."""
        FrontProtocol.dated = self.state.default_headers
        FrontProtocol.date_lines = b"".join(b"%b: %b\r\n" % pair for pair in self.state.default_headers)

    def answered(self, turn: Turn, *, whole: bool) -> None:
        """An answer is complete; one shorter than its head said is not `whole`, and ends the connection."""
        self.state.total_requests += 1
        self._answering = None
        if not (turn.keep_alive and whole):
            self.transport.close()
        elif not self.transport.is_closing():
            if self._paused:
                self.resume_reading()
            if self._waiting:
                self._start(self._waiting.popleft())
            else:
                self._until(HEAD_S if self._in_head and self._head_bytes else self._keep_alive_s)

    def resume_reading(self) -> None:
        """Whoever was made to wait may send again."""
        if self._paused and not self.transport.is_closing():
            self._paused = False
            self.transport.resume_reading()

    # What uvicorn says

    def shutdown(self) -> None:
        """Take no more requests: close now, or after the answer that is under way."""
        if self._answering is None:
            self.transport.close()
        else:
            self._answering.keep_alive = False

    def _start(self, turn: Turn) -> None:
        self._deadline = math.inf
        self._answering = turn
        turn.task = task = self.loop.create_task(turn.run(self._serve(turn)))
        self.tasks.add(task)

    def _pause_reading(self) -> None:
        if not self._paused:
            self._paused = True
            self.transport.pause_reading()

    def _until(self, seconds: float) -> None:
        self._deadline = deadline = self.loop.time() + seconds
        if self._alarm_at > deadline:
            self._arm(deadline)

    def _arm(self, at: float) -> None:
        if self._alarm is not None:
            self._alarm.cancel()
        self._alarm_at = at
        self._alarm = self.loop.call_at(at, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        if self._deadline > self.loop.time():
            if self._deadline < math.inf:
                self._arm(self._deadline)
        elif self._answering is not None:
            self._deadline = math.inf  # the head that is late has an answer before it
        elif self._in_head and self._head_bytes:
            self._refuse(408, "The request head did not arrive in time.", "request_timeout")
        else:
            self.transport.close()

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        """Answer and close. Nothing of the request has reached the app, or nothing more of it will."""
        turn = self._answering
        if turn is not None and turn.started:
            self.transport.abort()
            return
        kind = "timeout_error" if status == 408 else "invalid_request_error"
        error = {"message": message, "type": kind, "param": None, "code": code}
        body = msgspec.json.encode({"error": error})
        head = (
            f"HTTP/1.1 {status} {_PHRASES[status]}\r\ncontent-type: application/json\r\ncontent-length: {len(body)}\r\n"
            f"x-request-id: req_{token_hex(16)}\r\nconnection: close\r\n\r\n"
        )
        self.transport.write(head.encode() + body)
        self.transport.close()


def _address(told: object) -> tuple[str, int] | None:
    """Host and port of an end of the connection."""
    return (str(told[0]), int(told[1])) if isinstance(told, tuple) and len(told) >= 2 else None


_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
