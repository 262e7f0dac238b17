"""What is written down when a call ends: metrics, one log line, and what its usage teaches the estimates."""

from collections.abc import Callable

from router import logs
from router.core.call import Outcome, Usage
from router.core.estimate import Estimates
from router.core.placement import RelayCause
from router.core.signals import Heard
from router.dispatch.spending import Spending
from router.dispatch.trip import RELAY, Trip
from router.errors import NodeFailed, NodeRefused, Stopped, TakenBack
from router.metrics import Metrics

ENOUGH_TOKENS = 8
"""An answer of fewer tokens tells no pace."""
NO_FAULT = (NodeRefused, Stopped, TakenBack)
"""Ends of a leg that say nothing against the node."""


def _nothing(place: str, heard: Heard) -> None:
    """Nobody wants to know."""


class Ledger:
    """`clock` gives seconds of a steady clock; the rest is told of every leg and every trip that ended.

    `spending` is asked what the relay may still cost; `observe` is told what each call met on a node or the relay.
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

    def leg(self, trip: Trip, outcome: Outcome | type[NodeFailed]) -> None:
        """A leg of a trip ended: with an answer, or by a failure of the node."""
        if isinstance(outcome, Outcome):
            self._metrics.leg(trip.place, outcome)
            self._observe(trip.place, _heard(trip, self.clock()))
            return
        self._metrics.leg(trip.place, outcome.__name__)
        if not issubclass(outcome, NO_FAULT):
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
        usage = trip.counted()
        if usage is not None and trip.place != RELAY:
            one = Usage(usage.prompt, usage.completion // max(1, call.sequences))
            self._estimates.of(call.model).learn(call.counted, one, call.asked)
        if trip.committed:
            self.leg(trip, outcome)
        if outcome is Outcome.CUT:
            self._metrics.truncated(trip.place)
        if trip.events is not None and trip.events.oversized:
            self._metrics.oversized_event()
        went = (trip.place or None, trip.queued_s, trip.first_token_s(), trip.duration_s())
        node, queued_s, first_token_s, duration_s = went
        self._metrics.finished(
            call,
            outcome,
            node=node,
            queued_s=queued_s,
            first_token_s=first_token_s,
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
