"""What is learnt of one call on its way: where it went, what came back, how it ended.

A Trip lives as long as the block of `Dispatcher.open`. The log line and the metrics of the call are made from it.
"""

from asyncio import CancelledError
from collections.abc import Callable

from router.core.budget import Permit
from router.core.call import Call, Outcome, Usage
from router.core.node import Node, Sign
from router.core.pace import Past
from router.core.placement import Situation
from router.dispatch.grant import Grant
from router.errors import (
    Answer,
    BadRequest,
    NodeFailed,
    NotFound,
    Overloaded,
    RequestTimeout,
    Stopped,
    TakenBack,
    UpstreamTimeout,
)
from router.upstream.sse import Events

RELAY = "relay"
CLIENT_CLOSED = 499
"""Status in the log of a call whose caller was not there to be told one; nginx's."""

_BROKEN: tuple[tuple[type[BaseException], Outcome], ...] = (
    (TakenBack, Outcome.TAKEN_BACK),
    (UpstreamTimeout, Outcome.TIMED_OUT),
    (RequestTimeout, Outcome.TIMED_OUT),
    (Overloaded, Outcome.REFUSED),
    (BadRequest, Outcome.CALLER_ERROR),
    (NotFound, Outcome.CALLER_ERROR),
    (Answer, Outcome.FAILED),
    (NodeFailed, Outcome.CUT),
    (BaseException, Outcome.CLIENT_LEFT),
)
"""The first kind that fits tells how a call ended whose block was left by an exception."""


class Trip:
    """One call's way. Times are seconds of the dispatcher's clock; `place` is a node's name, `relay`, or empty."""

    __slots__ = (
        "_clock",
        "asks_progress",
        "asks_usage",
        "began_at",
        "call",
        "committed",
        "events",
        "faults",
        "first_token_at",
        "legs",
        "node",
        "outcome",
        "permit",
        "place",
        "queued_s",
        "sent_at",
        "situation",
        "status",
        "usage",
    )

    def __init__(self, call: Call, clock: Callable[[], float], *, relay: bool, past: Past | None = None) -> None:
        self._clock = clock
        self.call = call
        self.began_at = clock()
        self.situation = Situation(relay=relay, past=past)
        self.permit: Permit | None = None
        self.node: Node | None = None
        self.place = ""
        self.asks_usage = self.asks_progress = False
        self.queued_s = 0.0
        self.sent_at = 0.0
        self.first_token_at: float | None = None
        self.legs = 0
        self.faults = 0
        self.status = 0
        self.committed = False
        self.usage: Usage | None = None
        self.events: Events | None = None
        self.outcome: Outcome | None = None

    def leave(self, place: str, grant: Grant | None, *, asks_usage: bool, asks_progress: bool) -> None:
        """A leg begins: room is held and the request goes out."""
        now = self._clock()
        if not self.legs:
            self.queued_s = now - self.began_at
        self.legs += 1
        self.sent_at = now
        self.place, self.asks_usage, self.asks_progress = place, asks_usage, asks_progress
        self.node, self.permit = (None, None) if grant is None else (grant.node, grant.permit)

    def first_token(self) -> None:
        """The first thing a person would see is here: the node has shown that it works."""
        self.first_token_at = now = self._clock()
        if self.node is not None and self.permit is not None:
            self.node.spoke(self.permit, now, streamed=self.call.stream)
        self.sign(Sign.GOOD, "answered")

    def heard(self) -> None:
        """More of the answer came: whoever sends is alive."""
        if self.node is not None:
            self.node.heard(self._clock())

    def ended(self, *, errored: bool = False) -> None:
        """The answer came to its own end."""
        self.outcome = Outcome.FAILED if errored else Outcome.COMPLETED

    def cut(self, error: NodeFailed) -> None:
        """The node failed inside the answer, or the router ended it."""
        if isinstance(error, Stopped):
            self.outcome = Outcome.SHUTDOWN
            return
        self.outcome = Outcome.CUT
        self.sign(Sign.FAULT, str(error))

    def broke(self, error: BaseException) -> None:
        """The block was left by an exception."""
        if isinstance(error, Answer):
            self.status = error.status
        elif isinstance(error, CancelledError):
            self.status = CLIENT_CLOSED
        told = error.args[0] if isinstance(error, CancelledError) and error.args else None
        if isinstance(told, Outcome):
            self.outcome = told
        elif self.outcome is None or self.outcome is Outcome.COMPLETED:
            self.outcome = next(outcome for kind, outcome in _BROKEN if isinstance(error, kind))

    def sign(self, sign: Sign, cause: str) -> None:
        """Tell the node how it did; the relay keeps no such record."""
        if self.node is not None:
            self.node.observe(sign, self._clock(), cause)

    def counted(self) -> Usage | None:
        """Tokens the node says it used, if it said."""
        return self.usage if self.events is None else self.events.usage

    def written(self) -> int:
        """Tokens of one sequence of an answer that was streamed to its end; 0 when it was not, or nobody counted."""
        usage = self.counted()
        if usage is None or not self.call.stream or self.outcome is not Outcome.COMPLETED:
            return 0
        return usage.completion // max(1, self.call.sequences)

    def first_token_s(self) -> float | None:
        """Seconds from the call's arrival to its first token."""
        return None if self.first_token_at is None else self.first_token_at - self.began_at

    def duration_s(self) -> float:
        """Seconds since the call arrived."""
        return self._clock() - self.began_at
