"""Whether a client is still there, and what is done when it is not.

Rules:
- Nobody else calls `receive`: two readers would each swallow what the other waits for.
- A client that leaves, reads nothing for too long, or has waited too long for a head, ends the call by cancelling the
  task that serves it, wherever it waits. The cancellation carries the `Outcome` as its message.
- A cancellation from outside passes through untouched.
- A fast call pays for one timer. Only a call that outlives it is looked at again and gets a task that waits for the
  client's leaving. Nothing is done per event but counting.
"""

import asyncio
from collections.abc import Callable
from types import TracebackType
from typing import Any

from starlette.types import Receive, Scope

from router.api.terms import ABORT, Terms
from router.core.call import Outcome
from router.errors import ClientLeft, RequestTimeout, TooLarge, UpstreamTimeout

GRACE_S = 0.05
"""A call that ends before this is not watched: it costs less to finish it than to look whether anybody is there."""


class Presence:
    """One client during one request. Use as a block around everything that is done for it.

    `pending` is the outcome a wait for the client leads to if nothing moves, None while the client is not waited for;
    whoever waits sets it and adds to `moves` when the wait is over. `headed`: the head of the answer is out.
    `finishing`: the last bytes are about to be sent, so that a client leaving is no longer news. `beat` is called each
    `heartbeat_s` while it is set.
    """

    __slots__ = (
        "_abort", "_asked_at", "_beat_at", "_cancelling", "_loop", "_moved_at", "_receive", "_seen", "_task", "_terms",
        "_ticked", "_timer", "_watcher", "beat", "body_read", "ended", "finishing", "headed", "moves", "pending",
    )  # fmt: skip

    def __init__(self, scope: Scope, receive: Receive, terms: Terms) -> None:
        self._receive = receive
        self._terms = terms
        self._abort: Callable[[], None] | None = (scope.get("extensions") or {}).get(ABORT, {}).get("now")
        self._loop = asyncio.get_running_loop()
        task = asyncio.current_task()
        assert task is not None
        self._task: asyncio.Task[Any] = task
        self._cancelling = task.cancelling()
        self._watcher: asyncio.Task[None] | None = None
        self._ticked = False
        self._asked_at = self._beat_at = self._moved_at = self._loop.time()
        self._seen = 0
        self.moves = 0
        self.pending: Outcome | None = None
        self.ended: Outcome | None = None
        self.headed = self.finishing = self.body_read = False
        self.beat: Callable[[], None] | None = None

    def __enter__(self) -> "Presence":
        self._timer = self._loop.call_later(GRACE_S, self._tick)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._timer.cancel()
        if self._watcher is not None:
            self._watcher.cancel()
        # its cancellation holds a frame that holds us, as `beat` does: circles would wait for the garbage collector
        self._watcher = self.beat = None
        if self.ended is not None and self._task.uncancel() <= self._cancelling and kind is asyncio.CancelledError:
            raise self._meaning(self.ended) from error

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises TooLarge over `limit` bytes, ClientLeft."""
        self.pending = Outcome.TIMED_OUT
        message = await self._receive()
        first: bytes = message.get("body", b"")
        if message["type"] == "http.disconnect":
            raise ClientLeft
        if message.get("more_body", False):
            first = await self._rest(first, limit)
        elif len(first) > limit:
            raise too_large(limit)
        self.pending, self.body_read = None, True
        self._asked_at = self._beat_at = self._loop.time()
        if self._ticked:
            self._watch()
        return first

    async def _rest(self, first: bytes, limit: int) -> bytes:
        parts, size, more = [first], len(first), True
        while more:
            if size > limit:
                raise too_large(limit)
            self.moves += 1
            message = await self._receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message.get("body", b""))
            size += len(parts[-1])
            more = message.get("more_body", False)
        if size > limit:
            raise too_large(limit)
        return b"".join(parts)

    async def linger(self, seconds: float, most: int) -> None:
        """Read on and throw away, so that the client sees its answer before it sees the connection close."""
        try:
            async with asyncio.timeout(seconds):
                size = 0
                while size < most:
                    message = await self._receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    size += len(message.get("body", b""))
        except TimeoutError:
            return

    def abort(self) -> None:
        """End the connection at once, whatever is still unsent."""
        if self._abort is not None:
            self._abort()

    def _watch(self) -> None:
        self._watcher = self._loop.create_task(self._leave())

    async def _leave(self) -> None:
        while (await self._receive())["type"] != "http.disconnect":
            pass
        if not self.finishing:
            self._end(Outcome.CLIENT_LEFT)

    def _end(self, outcome: Outcome) -> None:
        if self.ended is None:
            self.ended = outcome
            self._task.cancel(outcome)

    def _tick(self) -> None:
        terms, now = self._terms, self._loop.time()
        due_s = terms.pace_s if self.beat is None else self._beat_at + terms.heartbeat_s - now
        self._timer = self._loop.call_later(due_s if 0 < due_s < terms.pace_s else terms.pace_s, self._tick)
        self._ticked = True
        if self.body_read and self._watcher is None:
            self._watch()
        if self.pending is None or self.moves != self._seen:
            self._seen, self._moved_at = self.moves, now
        elif now - self._moved_at >= self._bound_s() + terms.pace_s:
            self._stall()
            return
        if self.body_read and not self.headed and now - self._asked_at >= terms.head_s:
            self._end(Outcome.TIMED_OUT)
        elif self.beat is not None and now - self._beat_at >= terms.heartbeat_s:
            self._beat_at = now
            self.beat()

    def _bound_s(self) -> float:
        return self._terms.body_s if self.pending is Outcome.TIMED_OUT else self._terms.write_stall_s

    def _stall(self) -> None:
        assert self.pending is not None
        if self.pending is Outcome.CLIENT_STALLED:
            self.abort()
        self._end(self.pending)

    def _meaning(self, outcome: Outcome) -> Exception:
        if outcome is not Outcome.TIMED_OUT:
            return ClientLeft()
        if not self.body_read:
            return RequestTimeout(f"No part of the request body came for {self._terms.body_s:g} seconds.")
        waited = f"No answer came within {self._terms.head_s:g} seconds."
        return UpstreamTimeout(f"{waited} Ask with stream: true for what takes longer.", retry=False)


def too_large(limit: int) -> TooLarge:
    """The answer to a body over `limit` bytes."""
    return TooLarge(f"The request body is larger than {limit} bytes.")
