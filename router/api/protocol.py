"""uvicorn's HTTP connection, with the bounds it leaves to whoever stands in front of it.

A request head must be whole within `HEAD_S` and within the size limit; a head that is not HTTP is told so in OpenAI's
shape. A connection on which nothing was ever sent is closed like one that is kept alive. The body's bounds are the
door's (it knows which path allows how much).
"""

import asyncio
from secrets import token_hex
from typing import ClassVar

import msgspec
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol

from router.api.terms import ABORT

HEAD_S = 10.0
"""Longest time from the first byte of a request to the end of its head."""


class Corked:
    """A transport that holds the head of an answer until the first bytes of its body follow.

    Both then leave in one write, and so in one packet. A head nothing follows leaves when the event loop turns.
    Whatever else uvicorn asks of its transport goes straight to it.
    """

    __slots__ = ("_head", "_loop", "_transport", "get_extra_info", "is_closing", "pause_reading", "resume_reading")

    def __init__(self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop) -> None:
        self._transport = transport
        self._loop = loop
        self._head = b""
        self.get_extra_info = transport.get_extra_info
        self.is_closing = transport.is_closing
        self.pause_reading = transport.pause_reading
        self.resume_reading = transport.resume_reading

    def write(self, data: bytes) -> None:
        """Send, or hold if it is a head. A body that looks like one is merely sent a moment later."""
        if self._head:
            self._transport.write(self._head + data)
            self._head = b""
        elif data.startswith(b"HTTP/1.1 ") and not data.startswith(b"HTTP/1.1 1"):
            self._head = data
            self._loop.call_soon(self._send_head)
        else:
            self._transport.write(data)

    def close(self) -> None:
        """Send what is held and close."""
        self._send_head()
        self._transport.close()

    def abort(self) -> None:
        """Close at once; what is held is lost."""
        self._head = b""
        self._transport.abort()

    def _send_head(self) -> None:
        if self._head:
            head, self._head = self._head, b""
            self._transport.write(head)


class FrontProtocol(HttpToolsProtocol):
    """One client connection. `head_limit` is the largest request head in bytes."""

    head_limit: ClassVar[int] = 65536

    _head_bytes = 0
    _in_head = True
    _head_timer: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(Corked(transport, self.loop))  # type: ignore[arg-type]
        self._head_timer = self.loop.call_later(self.timeout_keep_alive, self._too_slow)

    def connection_lost(self, exc: Exception | None) -> None:
        self._stop_timer()
        super().connection_lost(exc)

    def data_received(self, data: bytes) -> None:
        if self._in_head:
            if not self._head_bytes:
                self._stop_timer()
            self._head_bytes += len(data)
        super().data_received(data)
        if self._head_bytes and self._in_head and not self.transport.is_closing():
            if self._head_bytes > self.head_limit:
                self._refuse(431, "The request head is too large.", "request_header_fields_too_large")
            elif self._head_timer is None:
                self._head_timer = self.loop.call_later(HEAD_S, self._too_slow)

    def on_headers_complete(self) -> None:
        self._stop_timer()
        self._in_head = False
        if self._head_bytes > self.head_limit:
            size = len(self.url) + sum(len(name) + len(value) + 4 for name, value in self.headers)
            if size > self.head_limit:
                self._refuse(431, "The request head is too large.", "request_header_fields_too_large")
                return
        self.scope["extensions"] = {ABORT: {"now": self.transport.abort}}
        super().on_headers_complete()

    def on_message_complete(self) -> None:
        self._in_head = True
        self._head_bytes = 0
        if not self.transport.is_closing():
            super().on_message_complete()

    def on_body(self, body: bytes) -> None:
        if not self.transport.is_closing():
            super().on_body(body)

    def send_400_response(self, msg: str) -> None:
        self._refuse(400, msg, None)

    def _too_slow(self) -> None:
        self._head_timer = None
        if not self._head_bytes:
            self.transport.close()
        elif self.cycle is None or self.cycle.response_complete:
            self._refuse(408, "The request head did not arrive in time.", "request_timeout")

    def _refuse(self, status: int, message: str, code: str | None) -> None:
        """Answer and close. Nothing of the request has reached the app, or nothing more of it will."""
        if self.cycle is not None and self.cycle.response_started and not self.cycle.response_complete:
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

    def _stop_timer(self) -> None:
        if self._head_timer is not None:
            self._head_timer.cancel()
            self._head_timer = None


_PHRASES = {400: "Bad Request", 408: "Request Timeout", 431: "Request Header Fields Too Large"}
