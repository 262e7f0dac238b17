"""What the relay costs, and what it may cost in a day.

Rules:
- A day is the last 24 hours, in slots of ten minutes: a cap never begins anew for everybody at midnight.
- A call is charged its estimate when it goes out, and the difference once its usage is known. So what is under way
  counts, and what was under way when a router died stays counted.
- Lines of batches may use only a share of the cap; the rest is people's.
- Amounts are US dollars, `now` is unix seconds. What other routers at the same store spent comes in by `know`, what
  was spent here goes out by `take`.
"""

from collections.abc import Mapping
from enum import StrEnum

import msgspec

from router.core.call import Call, Reason, Usage

SLOT_S = 600
"""Length of a slot."""
SLOTS = 144
"""Slots of a day, beside the one that runs."""

Amounts = dict[tuple[int, bool], float]
"""Dollars by slot and whether lines of batches spent them."""


class Cap(StrEnum):
    """Which cap is reached. Metric label."""

    DAY = "day"
    BATCHES = "batches"


class Price(msgspec.Struct, frozen=True, kw_only=True):
    """Dollars for a million tokens."""

    input: float
    output: float

    def of(self, tokens: Usage) -> float:
        """What so many tokens cost."""
        return (self.input * max(0, tokens.prompt) + self.output * max(0, tokens.completion)) / 1e6


class Charge(msgspec.Struct, frozen=True):
    """What one call was charged when it went out."""

    slot: int
    batch: bool
    usd: float


class Spend:
    """The relay's account. `prices` by public model name; `usd_a_day` in all, of which batches get `batch_share`."""

    def __init__(self, prices: Mapping[str, Price], usd_a_day: float, batch_share: float = 1.0) -> None:
        self.usd_a_day = usd_a_day
        self.batch_share = batch_share
        self._prices = prices
        self._spent: Amounts = {}
        self._untold: Amounts = {}
        self._summed_at = -1
        self._sums = {False: 0.0, True: 0.0}

    def reprice(self, like: "Spend") -> None:
        """Go on with another's prices and cap a day; what was spent stays spent, and batches keep their share."""
        self.usd_a_day, self._prices = like.usd_a_day, like._prices

    def estimate(self, call: Call) -> float:
        """What a call would cost, by its own estimate."""
        if not call.sequences:
            return 0.0
        return self.cost(call.model, Usage(call.prompt_tokens, call.output_tokens * call.sequences))

    def cost(self, model: str, tokens: Usage) -> float:
        """What tokens of a model cost; 0 for one without a price."""
        price = self._prices.get(model)
        return 0.0 if price is None else price.of(tokens)

    def day(self, now: float, *, batch: bool = False) -> float:
        """What was spent in the last 24 hours, in all or by lines of batches."""
        slot = int(now) // SLOT_S
        if slot != self._summed_at:
            for amounts in (self._spent, self._untold):
                for key in [key for key in amounts if key[0] < slot - SLOTS]:
                    del amounts[key]
            self._summed_at = slot
            self._sum()
        return self._sums[True] if batch else self._sums[True] + self._sums[False]

    def reached(self, call: Call, now: float) -> Cap | None:
        """The cap that a call would break, None when it may go out."""
        usd = self.estimate(call)
        if self.day(now) + usd > self.usd_a_day:
            return Cap.DAY
        if call.reason is Reason.JOB and self.day(now, batch=True) + usd > self.usd_a_day * self.batch_share:
            return Cap.BATCHES
        return None

    def charge(self, call: Call, now: float) -> Charge:
        """A call goes out."""
        charge = Charge(int(now) // SLOT_S, call.reason is Reason.JOB, self.estimate(call))
        self._add(charge, charge.usd)
        return charge

    def settle(self, charge: Charge, usd: float) -> None:
        """It has cost `usd`."""
        self._add(charge, usd - charge.usd)

    def take(self) -> Amounts:
        """What was spent here since the last time, to be written down."""
        untold, self._untold = self._untold, {}
        return untold

    def put_back(self, untold: Amounts) -> None:
        """It could not be written down."""
        for key, usd in untold.items():
            self._untold[key] = self._untold.get(key, 0.0) + usd

    def know(self, written: Amounts) -> None:
        """What all routers have written down; what was spent here since then comes on top."""
        self._spent = dict(written)
        for key, usd in self._untold.items():
            self._spent[key] = self._spent.get(key, 0.0) + usd
        self._sum()

    def _add(self, charge: Charge, usd: float) -> None:
        key = charge.slot, charge.batch
        for amounts in (self._spent, self._untold):
            amounts[key] = amounts.get(key, 0.0) + usd
        self._sums[charge.batch] += usd

    def _sum(self) -> None:
        """Anew from the slots, so that rounding does not add up."""
        self._sums = {kind: sum(usd for (_, batch), usd in self._spent.items() if batch is kind) for kind in self._sums}
