"""What is written down when a call ends: metrics, one log line, and what its usage teaches the estimates."""

from collections.abc import Callable

from router import logs
from router.core.call import Call, Outcome, Usage
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

    def leg(self, trip: Trip, outcome: Outcome | type[NodeFailed]) -> None:
        """A leg of a trip ended: with an answer, or by a failure of the node."""
        word = outcome if isinstance(outcome, Outcome) else outcome.__name__
        self._metrics.leg(trip.place, word)
        if self.spans is not None:
            self.spans.leg(trip, word)
        if isinstance(outcome, Outcome):
            self._observe(trip.place, _heard(trip, self.clock()))
        elif not issubclass(outcome, NO_FAULT):
            self._observe(trip.place, Heard(prompt_tokens=trip.call.prompt_tokens, failed=True))

    def relayed(self, trip: Trip, cause: RelayCause) -> None:
        """A call goes to the relay. Raises Overloaded when it would cost too much."""
        self.spending.begin(trip)
        self._metrics.relayed(cause)

    def close(self, trip: Trip) -> None:
        """A call ended."""
        call = trip.call
        outcome = trip.outcome = trip.outcome or Outcome.COMPLETED
        self.spending.end(trip)
        if self.history is not None:
            self.history.ended(trip)
        usage = trip.counted()
        if usage is not None and trip.place != RELAY:
            self._learn(call, usage)
        if trip.committed:
            self.leg(trip, outcome)
        if self.spans is not None:
            self.spans.close(trip, outcome)
        self._count_flaws(trip, outcome)
        went = (trip.place or None, trip.queued_s, trip.first_token_s(), trip.duration_s())
        node, queued_s, first_token_s, duration_s = went
        self._gap(trip, first_token_s, duration_s)
        self._metrics.finished(
            call,
            outcome,
            node=node,
            queued_s=queued_s,
            first_token_s=first_token_s if call.stream else None,
            duration_s=duration_s,
            usage=usage,
        )
        logs.call_finished(
            call,
            outcome,
            status=trip.status,
            node=node,
            queued_s=queued_s,
            first_token_s=first_token_s,
            duration_s=duration_s,
            usage=usage,
            retries=max(0, trip.legs - 1),
        )

    def _count_flaws(self, trip: Trip, outcome: Outcome) -> None:
        if outcome is Outcome.CUT:
            self._metrics.truncated(trip.place)
        if trip.events is not None and trip.events.oversized:
            self._metrics.oversized_event()

    def _learn(self, call: Call, usage: Usage) -> None:
        one = Usage(usage.prompt, usage.completion // max(1, call.sequences))
        self._estimates.of(call.model).learn(call.counted, one, call.asked)

    def _gap(self, trip: Trip, first_token_s: float | None, duration_s: float) -> None:
        written = trip.written()
        if written > 1 and first_token_s is not None:
            self.gaps.see((duration_s - first_token_s) / (written - 1), (trip.call.workload, trip.place))


def _heard(trip: Trip, now: float) -> Heard:
    """What one answered call met. A call that was not streamed tells no times: its first token came with its last."""
    first, written = trip.first_token_at, trip.written()
    if first is None or not trip.call.stream:
        return Heard(prompt_tokens=trip.call.prompt_tokens, queued_s=trip.queued_s, failed=trip.outcome is Outcome.CUT)
    return Heard(
        prompt_tokens=trip.call.prompt_tokens,
        queued_s=trip.queued_s,
        first_token_s=first - trip.sent_at,
        gap_s=(now - first) / (written - 1) if written >= ENOUGH_TOKENS else None,
        failed=trip.outcome is Outcome.CUT,
    )
