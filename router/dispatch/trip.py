"""What is learnt of one call on its way: where it went, what came back, how it ended.

A Trip lives as long as the block of `Dispatcher.open`. The log line and the metrics of the call are made from it.
"""

from asyncio import CancelledError
from collections.abc import Callable

import msgspec

from router.core.account import Account
from router.core.budget import Permit
from router.core.call import Call, Outcome, Usage
from router.core.decision import Situation
from router.core.node import Node, Sign
from router.core.standing import GOOD
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


class Trip(msgspec.Struct, eq=False):
    """One call's way. Times are seconds of `clock`; `place` is a node's name, `relay`, or empty.

    A struct, as there is one for every request; none is equal to another. `outcome` is how it ends if nothing else is
    heard.
    """

    call: Call
    clock: Callable[[], float]
    began_at: float
    situation: Situation
    queued_s: float = 0.0
    sent_at: float = 0.0
    first_token_at: float | None = None
    node: Node | None = None
    permit: Permit | None = None
    place: str = ""
    asks_usage: bool = False
    asks_progress: bool = False
    legs: int = 0
    faults: int = 0
    committed: bool = False
    status: int = 0
    usage: Usage | None = None
    events: Events | None = None
    outcome: Outcome = Outcome.COMPLETED

    def leave(self, node: Node | None, permit: Permit | None, place: str) -> None:
        """A leg begins: room is held and the request goes out."""
        self.sent_at = now = self.clock()
        if not self.legs:
            self.queued_s = now - self.began_at
        self.legs += 1
        self.node, self.permit, self.place = node, permit, place

    def first_token(self) -> None:
        """The first thing a person would see is here: the node has shown that it works."""
        self.first_token_at = now = self.clock()
        node, permit = self.node, self.permit
        if node is not None and permit is not None:
            node.spoke(permit, now, streamed=self.call.stream)
            node.observe(GOOD, now, "answered")

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
        elif self.outcome is Outcome.COMPLETED:
            self.outcome = next(outcome for kind, outcome in _BROKEN if isinstance(error, kind))

    def sign(self, sign: Sign, cause: str) -> None:
        """Tell the node how it did; the relay keeps no such record."""
        if self.node is not None:
            self.node.observe(sign, self.clock(), cause)

    def counted(self) -> Usage | None:
        """Tokens the node says it used, if it said."""
        return self.usage if self.events is None else self.events.usage

    def account(self, now: float) -> Account:
        """What it came to. Asked once, when it has ended."""
        call, events, first_at = self.call, self.events, self.first_token_at
        usage = self.usage if events is None else events.usage
        written = 0
        if call.stream and usage is not None and self.outcome is Outcome.COMPLETED:
            written = usage.completion // max(1, call.sequences)
        return Account(
            call,
            self.outcome,
            self.place,
            self.legs,
            self.committed,
            self.status,
            self.queued_s,
            None if first_at is None else first_at - self.began_at,
            now - self.began_at,
            usage,
            written,
        )
