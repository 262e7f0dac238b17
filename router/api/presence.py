"""Whether a client is still there, and what is done when it is not.

Rules:
- Nobody else calls `receive`: two readers would each swallow what the other waits for.
- A client that leaves, reads nothing for too long, or has waited too long for a head, ends the call by cancelling the
  task that serves it, wherever it waits. The cancellation carries the `Outcome` as its message.
- A cancellation from outside passes through untouched.
- One timer looks at all calls. Nothing is done per event but counting, and nothing waits for a client to leave: its
  connection says so.
"""

import asyncio
import math
from collections.abc import Callable
from types import TracebackType

import msgspec

from router.api.terms import Terms
from router.api.turn import Turn
from router.core.call import Outcome
from router.errors import ClientLeft, RequestTimeout, TooLarge, UpstreamTimeout


class Watch:
    """Looks at every open call each `pace_s` of the terms, with one timer, and none while no call is open."""

    def __init__(self, terms: Terms) -> None:
        self.terms = terms
        self.present: set[Presence] = set()
        self.timer: asyncio.TimerHandle | None = None

    def begin(self, within_s: float = math.inf) -> None:
        """There are calls to look at, in `within_s` seconds if that is sooner than usual; no `timer` runs yet."""
        due_s = min(self.terms.pace_s, within_s)
        self.timer = asyncio.get_running_loop().call_later(due_s, self._look)

    def _look(self) -> None:
        self.timer = None
        if self.present:
            now = asyncio.get_running_loop().time()
            self.begin(min([presence.look(now) for presence in tuple(self.present)]))


class Presence(msgspec.Struct, eq=False):
    """One client during one request. Use as a block around everything that is done for it.

    `pending` is the outcome a wait for the client leads to if nothing moves, None while the client is not waited for;
    whoever waits sets it and adds to `moves` when the wait is over. `headed`: the head of the answer is out.
    `finishing`: the last bytes are about to be sent, so that a client leaving is no longer news. `beat` is called each
    `heartbeat_s` while it is set.
    """

    _turn: Turn
    _watch: Watch
    _asked_at: float = 0.0
    _beat_at: float = 0.0
    _moved_at: float = 0.0
    _seen: int = 0
    moves: int = 0
    pending: Outcome | None = None
    ended: Outcome | None = None
    headed: bool = False
    finishing: bool = False
    body_read: bool = False
    beat: Callable[[], None] | None = None

    def __enter__(self) -> "Presence":
        watch = self._watch
        self._asked_at = self._beat_at = self._moved_at = self._turn.connection.loop.time()
        watch.present.add(self)
        if watch.timer is None:
            watch.begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self._watch.present.discard(self)
        # a circle would wait for the garbage collector
        self._turn.left = self.beat = None
        if self.ended is not None:
            task = self._turn.task
            if task is not None and not task.uncancel() and kind is asyncio.CancelledError:
                raise self._meaning(self.ended) from error

    def whole_body(self, limit: int) -> bytes | None:
        """The request body if it is all here; else ask for `body`. Raises TooLarge over `limit` bytes."""
        turn = self._turn
        if not turn.whole or turn.told or turn.gone:
            return None
        turn.told, parts = True, turn.parts
        raw = parts[0] if len(parts) == 1 else b"".join(parts)
        if len(raw) > limit:
            raise too_large(limit)
        self.body_read = True
        turn.left = self._leave
        return raw

    async def body(self, limit: int) -> bytes:
        """The whole request body. Raises TooLarge over `limit` bytes, ClientLeft."""
        self.pending = Outcome.TIMED_OUT
        parts, size, more = [], 0, True
        while more:
            message = await self._turn.receive()
            if message["type"] == "http.disconnect":
                raise ClientLeft
            parts.append(message["body"])
            size += len(parts[-1])
            if size > limit:
                raise too_large(limit)
            more = message["more_body"]
            self.moves += 1
        self.pending, self.body_read = None, True
        self._asked_at = self._beat_at = self._turn.connection.loop.time()
        self._turn.left = self._leave
        return b"".join(parts)

    async def linger(self, seconds: float, most: int) -> None:
        """Read on and throw away, so that the client sees its answer before it sees the connection close."""
        try:
            async with asyncio.timeout(seconds):
                size = 0
                while size < most:
                    message = await self._turn.receive()
                    if message["type"] == "http.disconnect" or not message.get("more_body", False):
                        return
                    size += len(message.get("body", b""))
        except TimeoutError:
            return

    def abort(self) -> None:
        """End the connection at once, whatever is still unsent."""
        self._turn.abort()

    def look(self, now: float) -> float:
        """A moment has passed: end what takes too long, and beat while it may take longer. Seconds to the next beat."""
        terms = self._watch.terms
        if self.pending is None or self.moves != self._seen:
            self._seen, self._moved_at = self.moves, now
        elif now - self._moved_at >= self._bound_s() + terms.pace_s:
            self._stall()
            return math.inf
        if self.body_read and not self.headed and now - self._asked_at >= terms.head_s:
            self._end(Outcome.TIMED_OUT)
        elif self.beat is not None and now - self._beat_at >= terms.heartbeat_s:
            self._beat_at = now
            self.beat()
        return math.inf if self.beat is None else max(0.0, self._beat_at + terms.heartbeat_s - now)

    def _leave(self) -> None:
        if not self.finishing:
            self._end(Outcome.CLIENT_LEFT)

    def _end(self, outcome: Outcome) -> None:
        if self.ended is None and self._turn.task is not None:
            self.ended = outcome
            self._turn.task.cancel(outcome)

    def _bound_s(self) -> float:
        return self._watch.terms.body_s if self.pending is Outcome.TIMED_OUT else self._watch.terms.write_stall_s

    def _stall(self) -> None:
        assert self.pending is not None
        if self.pending is Outcome.CLIENT_STALLED:
            self.abort()
        self._end(self.pending)

    def _meaning(self, outcome: Outcome) -> Exception:
        if outcome is not Outcome.TIMED_OUT:
            return ClientLeft()
        if not self.body_read:
            return RequestTimeout(f"No part of the request body came for {self._watch.terms.body_s:g} seconds.")
        waited = f"No answer came within {self._watch.terms.head_s:g} seconds."
        return UpstreamTimeout(f"{waited} Ask with stream: true for what takes longer.", retry=False)


def too_large(limit: int) -> TooLarge:
    """The answer to a body over `limit` bytes."""
    return TooLarge(f"The request body is larger than {limit} bytes.")
