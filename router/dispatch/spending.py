"""Keeps what calls cost at the relay within its cap: charged when they go out, settled when they end.

A call that would break the cap is as if there were no relay. Why is told: counted for every such call, logged once in
a while.
"""

import time
from collections.abc import Callable, Iterator

import structlog

from router.core.call import Call, Outcome
from router.core.spend import Cap, Charge, Spend
from router.dispatch.trip import RELAY, Trip
from router.errors import Overloaded
from router.metrics import Family, Level

SAY_AGAIN_S = 600.0
"""A cap that stays reached is logged this often."""
_FREE = frozenset((Outcome.CALLER_ERROR, Outcome.FAILED, Outcome.REFUSED))
"""How calls end that the relay refused; without a token of an answer they cost nothing."""

log = structlog.get_logger()


class Spending:
    """Asked before a call goes to the relay, told when it goes and when it ends. `clock` is unix seconds."""

    def __init__(self, spend: Spend | None, clock: Callable[[], float] = time.time) -> None:
        self.spend = self._account = spend
        self._clock = clock
        self.out: dict[Trip, Charge] = {}
        """What calls were charged that have not ended: nobody else's end is of interest here."""
        self._said: dict[Cap, float] = {}
        self._usd = Family("relay_spend_usd", "US dollars calls have cost at the relay.", "workload")
        self._capped = Family("relay_capped", "Calls that could not use the relay: a spend cap was reached.", "cap")

    def take(self, spend: Spend | None) -> None:
        """Prices and cap from now on, None for no limit. What was spent stays spent, also while there is no limit."""
        if spend is not None and self._account is not None:
            self._account.reprice(spend)
        else:
            self._account = self._account or spend
        self.spend = None if spend is None else self._account

    def capped(self, call: Call) -> bool:
        """Whether a cap keeps a call from the relay; told to nobody."""
        return self.spend is not None and self.spend.reached(call, self._clock()) is not None

    def affords(self, call: Call) -> bool:
        """Whether the relay may answer a call as far as money goes."""
        if self.spend is None:
            return True
        cap = self.spend.reached(call, self._clock())
        if cap is not None:
            self._tell(cap, self.spend)
        return cap is None

    def begin(self, trip: Trip) -> None:
        """A call goes to the relay. Raises Overloaded when the cap was reached while it waited."""
        if self.spend is None:
            return
        if not self.affords(trip.call):
            raise Overloaded("The relay has cost as much as it may today.", retry_after_s=60)
        self.out[trip] = self.spend.charge(trip.call, self._clock())

    def end(self, trip: Trip) -> None:
        """A call ended. One that broke off without telling its usage is taken to have cost its estimate."""
        charge = self.out.pop(trip, None)
        if charge is None or self.spend is None:
            return
        usage, usd = trip.counted(), charge.usd
        if trip.place != RELAY:
            usd = 0.0
        elif usage is not None:
            usd = self.spend.cost(trip.call.model, usage)
        elif trip.first_token_at is None and trip.outcome in _FREE:
            usd = 0.0
        self.spend.settle(charge, usd)
        self._usd.add((trip.call.workload,), usd)

    def families(self) -> Iterator[Family]:
        """What a scrape shows."""
        if self.spend is not None:
            day = Level("relay_spend_day_usd", "US dollars of the last 24 hours, by all routers at the store.", "by")
            batches = self.spend.day(self._clock(), batch=True)
            day.set(max(0.0, self.spend.day(self._clock()) - batches), ("people",))
            day.set(max(0.0, batches), ("batches",))
            cap = Level("relay_spend_cap_usd", "US dollars the relay may cost in 24 hours.", "cap")
            cap.set(self.spend.usd_a_day, (Cap.DAY,))
            cap.set(self.spend.usd_a_day * self.spend.batch_share, (Cap.BATCHES,))
            yield from (self._usd, day, cap, self._capped)

    def _tell(self, cap: Cap, spend: Spend) -> None:
        self._capped.add((cap,))
        now = self._clock()
        if now - self._said.get(cap, float("-inf")) < SAY_AGAIN_S:
            return
        self._said[cap] = now
        log.warning(
            "calls cannot use the relay: its spend cap is reached",
            cap=str(cap),
            cap_usd=spend.usd_a_day * (spend.batch_share if cap is Cap.BATCHES else 1.0),
            day_usd=round(spend.day(now, batch=cap is Cap.BATCHES), 4),
        )
