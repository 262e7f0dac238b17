"""What is written down when a call ends: metrics, one log line, and what its usage teaches the estimates."""

from collections.abc import Callable

from router import logs
from router.core.call import Outcome, Usage
from router.core.estimate import Estimates
from router.core.placement import RelayCause
from router.dispatch.history import History
from router.dispatch.spending import Spending
from router.dispatch.trip import RELAY, Trip
from router.errors import NodeFailed
from router.metrics import Metrics


class Ledger:
    """`clock` gives seconds of a steady clock; the rest is told of every leg and every trip that ended.

    `spending` is asked what the relay may still cost, `history` keeps the last hour.
    """

    def __init__(
        self,
        clock: Callable[[], float],
        metrics: Metrics,
        estimates: Estimates,
        spending: Spending | None = None,
        history: History | None = None,
    ) -> None:
        self.clock = clock
        self._metrics = metrics
        self._estimates = estimates
        self.spending = spending or Spending(None)
        self._history = history

    def leg(self, trip: Trip, outcome: Outcome | type[NodeFailed]) -> None:
        """A leg of a trip ended: with an answer, or by a failure of the node."""
        self._metrics.leg(trip.place, outcome if isinstance(outcome, Outcome) else outcome.__name__)

    def relayed(self, trip: Trip, cause: RelayCause) -> None:
        """A call goes to the relay. Raises Overloaded when it would cost too much."""
        self.spending.begin(trip)
        self._metrics.relayed(cause)

    def close(self, trip: Trip) -> None:
        """A call ended."""
        call = trip.call
        outcome = trip.outcome = trip.outcome or Outcome.COMPLETED
        self.spending.end(trip)
        if self._history is not None:
            self._history.ended(trip)
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
