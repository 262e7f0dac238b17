"""One HTTP/1.1 connection to a node.

Strategy: the protocol object is the whole state; nothing runs beside it. One request at a time. llhttp frames the
answer; what it leaves open (a body that ends at EOF) is decided here. Body pieces of one read are joined once.
One timer serves every phase: it is armed for the nearest deadline and, when it rings too early, armed again, so a busy
connection neither makes nor cancels a timer per request. Whoever waits is woken by one future.
Whatever is not a fully read answer on a connection both sides may keep ends in `abort`: that is how an engine is told
to stop. A request therefore finds everything as a whole answer leaves it, and resets only what that moves.
"""

import asyncio
import math
from collections.abc import Callable
from typing import Any, Final, Protocol, cast

import httptools
import msgspec

from router.errors import BadAnswer, FirstByteTimeout, IdleTimeout, NodeFailed, Truncated

__all__ = ["Bounds", "Connection", "Owner"]

#: Phases of a connection.
IDLE: Final = 0
HEAD: Final = 1
BODY: Final = 2
LOST: Final = 3

#: Phases in which an answer is awaited.
ASKED: Final = frozenset((HEAD, BODY))

#: A body goes out in pieces of this many bytes, so an early answer is seen between them.
PIECE: Final = 262144
#: Interim (1xx) answers before the final one; 100 and a few 103 are all that servers send.
INTERIM: Final = 16


class Bounds(msgspec.Struct, frozen=True, kw_only=True):
    """Seconds and bytes. `keepalive_s` stays below the 5 s after which uvicorn, and so vLLM and SGLang, closes."""

    connect_s: float = 5.0
    first_byte_s: float = 120.0
    idle_s: float = 60.0
    keepalive_s: float = 4.0
    head_bytes: int = 65536
    buffer_bytes: int = 262144
    idle_connections: int = 256


class Owner(Protocol):
    """Who is told when a connection may no longer be picked, and when it is gone."""

    def withdrawn(self, connection: "Connection") -> None: ...
    def gone(self, connection: "Connection") -> None: ...


class Connection(asyncio.Protocol):
    """One request after another.

    `touched`: a byte of the present answer has come; `status` is 0 until its head has, and `error` then says why it
    never will; `done`: its end has come.
    """

    __slots__ = (
        "_alarm", "_alarm_at", "_bodyless", "_bounds", "_buffered", "_chunks", "_deadline", "_fields", "_framing",
        "_halted", "_interim", "_loop", "_owner", "_parser", "_phase", "_rest", "_reusable", "_stuffed", "_surplus",
        "_take", "_transport", "_waiter", "done", "error", "headers", "on_body", "status", "touched",
    )  # fmt: skip

    def __init__(self, loop: asyncio.AbstractEventLoop, bounds: Bounds, owner: Owner) -> None:
        self._loop = loop
        self._bounds = bounds
        self._owner = owner
        self._phase = IDLE
        self._chunks: list[bytes] = []
        self._fields: list[tuple[bytes, bytes]] = []
        #: httptools calls this straight: no Python frame per body piece.
        self.on_body: Callable[[bytes], None] = self._chunks.append
        self._parser: Any = httptools.HttpResponseParser(self)
        self._waiter: asyncio.Future[None] | None = None
        self._take: Callable[[bytes], bool] | None = None
        self._alarm: asyncio.TimerHandle | None = None
        self._alarm_at = math.inf
        self._deadline = math.inf
        self._stuffed = False
        self._halted = False
        self._rest: memoryview | None = None
        self.status = self._interim = self._framing = self._buffered = self._surplus = 0
        self.touched = self.done = self._reusable = self._bodyless = False
        self.headers: list[tuple[bytes, bytes]] = []
        self.error: NodeFailed | None = None

    # What the pool asks

    @property
    def gone(self) -> bool:
        """Whether the transport is closed."""
        return self._parser is None

    def start(self, head: bytes, body: bytes, first_byte_s: float) -> asyncio.Future[None]:
        """Send a request. What is returned is done when the head of its answer is here, or never will be.

        Then `status` and `headers` are the answer's, or `error` is why there is none: FirstByteTimeout after
        `first_byte_s`, Truncated (`touched` is False if not a byte came), BadAnswer. Who stops waiting has to `abort`.
        """
        self.status = self._interim = self._buffered = 0
        self.touched = self.done = self._reusable = False
        self._waiter = waiter = self._loop.create_future()
        if self._phase == LOST:
            self.fail(Truncated("the connection ended before the request"))
            return waiter
        self._phase = HEAD
        self._bodyless = head.startswith(b"HEAD ")
        self._until(first_byte_s)
        if len(body) <= PIECE:
            self._transport.write(head + body if body else head)
        else:
            self._rest = memoryview(body)
            self._transport.write(head)
            self._push()
        return waiter

    async def read(self, idle_s: float | None = None) -> bytes:
        """The body bytes that have come, waiting at most `idle_s` (the bounds' if None); `b""` at the end of the body.

        Raises IdleTimeout, Truncated or BadAnswer once everything before the fault has been read.
        """
        chunks = self._chunks
        while not chunks:
            if self.done:
                return b""
            if self.error is not None:
                raise self.error
            self._resume()
            self._until(self._bounds.idle_s if idle_s is None else idle_s)
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = None
        return self.taken()

    async def flow(self, take: Callable[[bytes], bool]) -> bool:
        """Give `take` body bytes as they come, in the very callback that brought them, until it returns False.

        Returns whether more may come; waits and raises like `read`. `take` must not raise.
        """
        if self._chunks and not take(self.taken()):
            return not self.done
        if not self.done and self.error is None:
            self._resume()
            self._until(self._bounds.idle_s)
            self._take = take
            self._waiter = waiter = self._loop.create_future()
            try:
                await waiter
            finally:
                self._waiter = self._take = None
        if self.error is not None and not self._chunks and not self.done:
            raise self.error
        return not self.done or bool(self._chunks)

    def keep(self) -> bool:
        """Wait to be picked again, at most `keepalive_s`; whether it does.

        Only if the answer is fully read, the request fully sent, and both sides may keep the connection.
        """
        answered = self.done and self._reusable and self._phase == BODY and not self._chunks
        if not answered or self._rest is not None or self._stuffed or self._halted:
            return False
        self._phase = IDLE
        self._until(self._bounds.keepalive_s)
        return True

    def abort(self) -> None:
        """Close at once, unsent and unread bytes and all."""
        if self._phase == LOST:
            return
        if self._phase == IDLE:
            self._owner.withdrawn(self)
        self._phase = LOST
        self._rest = None
        self._transport.abort()

    def fail(self, error: NodeFailed) -> None:
        """Abort, and tell whoever waits why."""
        if not self.done and self.error is None:
            self.error = error
        self._wake()
        self.abort()

    def taken(self) -> bytes:
        """The body bytes that have come and were not taken yet."""
        chunks = self._chunks
        data = chunks[0] if len(chunks) == 1 else b"".join(chunks)
        chunks.clear()
        self._buffered = 0
        if self._halted:
            self._resume()
        return data

    # Waiting

    def _wake(self) -> None:
        waiter = self._waiter
        if waiter is not None and not waiter.done():
            waiter.set_result(None)

    def _until(self, seconds: float) -> None:
        self._deadline = deadline = self._loop.time() + seconds
        if self._alarm_at > deadline:
            if self._alarm is not None:
                self._alarm.cancel()
            self._alarm_at = deadline
            self._alarm = self._loop.call_at(deadline, self._ring)

    def _ring(self) -> None:
        self._alarm, self._alarm_at = None, math.inf
        if self._deadline > self._loop.time():
            self._alarm_at = self._deadline
            self._alarm = self._loop.call_at(self._deadline, self._ring)
        elif self._phase == IDLE:
            self.abort()
        elif self._waiter is not None and not self._waiter.done():
            # Without a waiter it is the reader who is slow, not the node.
            self.fail(
                IdleTimeout("nothing came for too long inside the answer")
                if self.status
                else FirstByteTimeout("no answer began within the bound")
            )

    # Flow

    def _push(self) -> None:
        rest = self._rest
        while rest and not self._stuffed and self.status < 400:
            self._transport.write(rest[:PIECE])
            rest = rest[PIECE:]
        self._rest = rest or None

    def _resume(self) -> None:
        self._buffered = 0
        if self._halted:
            self._halted = False
            if self._phase != LOST:  # uvloop raises on a closed transport
                self._transport.resume_reading()

    def pause_writing(self) -> None:
        self._stuffed = True

    def resume_writing(self) -> None:
        self._stuffed = False
        if self._rest is not None:
            self._push()

    # What the transport says

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast("asyncio.Transport", transport)

    def data_received(self, data: bytes) -> None:
        phase = self._phase
        if self.done or phase not in ASKED:
            self._unasked()
            return
        size = len(data)
        self.touched = True
        self._framing += size
        try:
            self._parser.feed_data(data)
        except (httptools.HttpParserError, httptools.HttpParserUpgrade) as exc:
            if not self.done:
                self.fail(_caused(BadAnswer(f"the answer is not HTTP/1.1: {exc}"), exc))
                return
            self._reusable = False
        if self.done:
            del self._chunks[self._surplus :]
        elif (not self._chunks or self._phase == HEAD) and not self._framed(phase):
            return
        self._framing = 0
        self._buffered += size
        if self._buffered > self._bounds.buffer_bytes and not (self._halted or self.done):
            self._halted = True
            self._transport.pause_reading()
        waiter = self._waiter
        if (self._take is None or not self._passed(self._take)) and waiter is not None and not waiter.done():
            waiter.set_result(None)

    def eof_received(self) -> None:
        self._ended(None)

    def connection_lost(self, exc: Exception | None) -> None:
        self._ended(exc)
        if self._alarm is not None:
            self._alarm.cancel()
            self._alarm = None
        self._parser = None  # it holds our methods: a cycle
        self._owner.gone(self)

    def _framed(self, phase: int) -> bool:
        """Hold what is no body to its bounds; whether the reader has something new: the head."""
        if self._framing > self._bounds.head_bytes or self._interim > INTERIM:
            self.fail(BadAnswer("the answer's head, trailers or chunk framing are over their bound"))
            return False
        return phase != self._phase

    def _passed(self, take: Callable[[bytes], bool]) -> bool:
        """Give what came to whoever takes it; whether they are to be left alone until more comes."""
        if self._chunks and not take(self.taken()):
            self._take = None
            return False
        self._deadline = self._loop.time() + self._bounds.idle_s
        return not self.done

    def _unasked(self) -> None:
        self._reusable = False
        if self._phase == IDLE:
            self.abort()

    def _ended(self, exc: Exception | None) -> None:
        if self._phase in (HEAD, BODY) and not self.done:
            if exc is None and self._phase == BODY and _ends_at_eof(self.headers):
                self.done = True
                self._wake()
            else:
                where = "inside the answer" if self.status else "before the answer"
                self.fail(_caused(Truncated(f"the connection ended {where}"), exc))
        self.abort()

    # What the parser says

    def on_message_begin(self) -> None:
        if self.done:
            self._reusable = False

    def on_header(self, name: bytes, value: bytes) -> None:
        self._fields.append((name.lower(), value))

    def on_headers_complete(self) -> None:
        if self._phase != HEAD:
            return
        fields, self._fields = self._fields, []
        status = self._parser.get_status_code()
        if status < 200:
            self._interim += 1
            return
        bound = self._bounds.head_bytes
        if self._framing > bound and sum(len(name) + len(value) + 4 for name, value in fields) > bound:
            return
        if self._interim > INTERIM:
            return
        self._phase = BODY
        self.status = status
        self.headers = fields
        if self._bodyless:
            self.done, self._surplus = True, 0

    def on_message_complete(self) -> None:
        if self._phase == BODY and not self.done:
            self.done = True
            self._surplus = len(self._chunks)
            self._reusable = self._parser.should_keep_alive()
        self._fields.clear()


def _ends_at_eof(headers: list[tuple[bytes, bytes]]) -> bool:
    """Whether a body framed by these headers ends where the connection does (RFC 9112 section 6.3)."""
    fields = dict(headers)
    coding = fields.get(b"transfer-encoding")
    if coding is not None:
        return not coding.lower().rstrip().endswith(b"chunked")
    return b"content-length" not in fields


def _caused(error: NodeFailed, cause: BaseException | None) -> NodeFailed:
    error.__cause__ = cause
    return error
