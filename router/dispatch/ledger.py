"""What is written down when a call ends: metrics, one log line, and what its usage teaches the estimates."""

from collections.abc import Callable

from router import logs
from router.core.account import Account
from router.core.call import Outcome, Usage
from router.core.estimate import Estimates
from router.core.placement import RelayCause
from router.core.signals import Heard
from router.dispatch.history import History
from router.dispatch.spans import Spans
from router.dispatch.spending import Spending
from router.dispatch.trip import RELAY, Trip
from router.errors import NodeFailed, NodeRefused, Stopped, TakenBack
from router.metrics import Metrics, Spread

GAP_S = (0.0025, 0.005, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.25, 0.5, 1, 2.5)

CUT = Outcome.CUT
ENOUGH_TOKENS = 8
"""An answer of fewer tokens tells no pace."""
NO_FAULT = (NodeRefused, Stopped, TakenBack)
"""Ends of a leg that say nothing against the node."""


def _nothing(place: str, heard: Heard) -> None:
    """Nobody wants to know."""


class Ledger:
    """`clock` gives seconds of a steady clock; the rest is told of every leg and every trip that ended.

    `spending` is asked what the relay may still cost; `observe` is told what each call met on a node or the relay.
    `gaps` are those between two tokens, each call's mean; `history`, if there is one, keeps the last hour.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        metrics: Metrics,
        estimates: Estimates,
        spending: Spending | None = None,
        observe: Callable[[str, Heard], None] = _nothing,
    ) -> None:
        self._observe = observe
        self.clock = clock
        self._metrics = metrics
        self._estimates = estimates
        self.spending = spending or Spending(None)
        self.spans: Spans | None = None
        self.history: History | None = None
        text = "Mean time between two tokens of one sequence of a streamed answer."
        self.gaps = Spread("token_gap_seconds", text, GAP_S, "workload", "node")

    def leg(self, trip: Trip, failure: type[NodeFailed]) -> None:
        """A leg of a trip ended by a failure of the node. One that began to answer ends with the call."""
        self._metrics.leg(trip.place, failure.__name__)
        if self.spans is not None:
            self.spans.leg(trip, failure.__name__)
        if not issubclass(failure, NO_FAULT):
            self._observe(trip.place, Heard(prompt_tokens=trip.call.prompt_tokens, failed=True))

    def relayed(self, trip: Trip, cause: RelayCause) -> None:
        """A call goes to the relay. Raises Overloaded when it would cost too much."""
        self.spending.begin(trip)
        self._metrics.relayed(cause)

    def close(self, trip: Trip) -> int:
        """A call ended. Returns the tokens of one sequence of an answer streamed to its end, 0 for any other."""
        account = trip.account(self.clock())
        call, usage, place = account.call, account.usage, account.place
        cut = account.outcome is CUT
        if self.spending.out:
            self.spending.end(trip)
        if self.history is not None:
            self.history.ended(account)
        if usage is not None and place != RELAY:
            one = usage if call.sequences <= 1 else Usage(usage.prompt, usage.completion // call.sequences)
            self._estimates.of(call.model).learn(call.counted, one, call.asked)
        if call.stream:
            self._streamed(trip, account)
        elif account.answered:  # its first token came with its last: no times
            self._observe(place, Heard(call.prompt_tokens, account.queued_s, failed=cut))
        if self.spans is not None:
            self.spans.close(trip, account)
        if cut:
            self._metrics.truncated(place)
        if trip.events is not None and trip.events.oversized:
            self._metrics.oversized_event()
        self._metrics.finished(account)
        logs.call_finished(account)
        return account.written

    def _streamed(self, trip: Trip, account: Account) -> None:
        """What a call tells that was to be streamed: the times it met, and the gaps of an answer that is whole."""
        call, written, first_s = account.call, account.written, account.first_token_s
        gap_s = (account.duration_s - first_s) / (written - 1) if written > 1 and first_s is not None else None
        if gap_s is not None:
            self.gaps.see(gap_s, (call.workload, account.place))
        if account.answered:
            heard = Heard(
                call.prompt_tokens,
                account.queued_s,
                first_token_s=None if trip.first_token_at is None else trip.first_token_at - trip.sent_at,
                gap_s=gap_s if written >= ENOUGH_TOKENS else None,
                failed=account.outcome is CUT,
            )
            self._observe(account.place, heard)
