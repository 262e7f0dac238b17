"""What calls did in the last hour, in slots of ten seconds.

Rules:
- A page that is opened has a past to show, so this is kept whether anybody looks or not. Its cost is one addition to a
  slot for each call that ends, and one look a second at who waits.
- It is bounded: so many slots, and in each so many kinds of calls; kinds beyond that are kept together as `other`.
- First tokens are counted in bins of 5 %, so a quantile over any slots is right within that.
- Times are unix seconds of `clock`.
"""

import math
from bisect import bisect_right
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Mapping, Sequence

import msgspec

from router.core.account import Account
from router.core.call import INTERACTIVE, Outcome, Workload
from router.dispatch.queue import Waiter
from router.dispatch.trip import RELAY

SLOT_S = 10
SLOTS = 360
RECENT = 30
"""Slots that "now" means: five minutes."""
MOST_KINDS = 48
OTHER = "other"
MOST_NAME = 128
"""Most characters of a model's name that are kept: callers may ask for anything."""
TRAIL_S = 60
"""A node's trail has a point for each minute."""
FAILED = frozenset((Outcome.REFUSED, Outcome.TIMED_OUT, Outcome.FAILED, Outcome.CUT))
"""Outcomes that are ours or a node's fault."""
_LEAST_S = 1e-4
_WIDER = 1.05
_BOUNDS_S = [_LEAST_S * _WIDER**bin_ for bin_ in range(1, 500)]
"""Where each bin of first tokens ends but the last: a tenth of a millisecond to weeks."""

Bins = defaultdict[int, int]


class Kind(msgspec.Struct, frozen=True):
    """Calls that are told together. `node` may be `relay`, and empty for calls that reached none."""

    workload: Workload
    model: str
    node: str
    caller: str


class Waiting(msgspec.Struct, frozen=True):
    """Waits that are told together."""

    workload: Workload
    model: str
    caller: str
    reason: str


ALL = Kind(INTERACTIVE, "", "", "")
"""The kind of a sum over several."""


class Tally:
    """What calls of one `kind` did in one slot. `first` counts first tokens by bin, `ends` those that failed by how."""

    __slots__ = ("calls", "ends", "failed", "first", "kind", "output_tokens")

    def __init__(self, kind: Kind = ALL) -> None:
        self.kind = kind
        self.calls = self.failed = self.output_tokens = 0
        self.first: Bins = defaultdict(int)
        self.ends: dict[str, int] = {}

    def add(self, other: "Tally") -> None:
        """Both together."""
        self.calls += other.calls
        self.failed += other.failed
        self.output_tokens += other.output_tokens
        for bin_, count in other.first.items():
            self.first[bin_] += count

    def quantile_s(self, share: float) -> float | None:
        """The first token that `share` of the calls did not exceed, in seconds; None without any."""
        wanted = share * sum(self.first.values())
        for bin_ in sorted(self.first):
            wanted -= self.first[bin_]
            if wanted <= 0:
                return _LEAST_S * math.pow(_WIDER, bin_ + 0.5)
        return None


class Slot:
    """Ten seconds. `waits` sums who waited at each look, `looks` counts looks; `lines` are lines left, by batch."""

    __slots__ = ("at", "kinds", "lines", "looks", "waits")

    def __init__(self, at: int) -> None:
        self.at = at
        self.kinds: dict[tuple[bool, str, str, str], Tally] = {}
        self.waits: dict[Waiting, int] = {}
        self.lines: Mapping[str, int] = {}
        self.looks = 0

    def tally(self, workload: Workload, model: str, node: str, caller: str) -> Tally:
        """Where such calls are counted."""
        chat = workload is INTERACTIVE  # an enum's own hash is slow
        found = self.kinds.get((chat, model, node, caller))
        if found is None:
            if len(self.kinds) >= MOST_KINDS:
                model = node = caller = OTHER
            tally = Tally(Kind(workload, model[:MOST_NAME], node, caller))
            found = self.kinds.setdefault((chat, model[:MOST_NAME], node, caller), tally)
        return found

    def sum(self, wanted: Callable[[Kind], bool]) -> Tally:
        """All kinds that are wanted, together."""
        whole = Tally()
        for tally in self.kinds.values():
            if wanted(tally.kind):
                whole.add(tally)
        return whole


class History:
    """Told of every call that ended (`ended`) and asked to look at who waits (`look`), once a second."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._slots: deque[Slot] = deque(maxlen=SLOTS)
        self._trails: dict[str, deque[tuple[int, float | None]]] = {}
        self._slot = Slot(-SLOT_S)

    def ended(self, account: Account) -> None:
        """A call is over."""
        call, usage, first_s = account.call, account.usage, account.first_token_s
        slot = self._slot
        if not 0 <= self._clock() - slot.at < SLOT_S:
            slot = self.now()
        tally = slot.kinds.get((call.workload is INTERACTIVE, call.model, account.place, call.caller))
        if tally is None:
            tally = slot.tally(call.workload, call.model, account.place, call.caller)
        tally.calls += 1
        if account.outcome in FAILED:
            tally.failed += 1
            tally.ends[account.outcome] = tally.ends.get(account.outcome, 0) + 1
        if usage is not None and usage.completion > 0:
            tally.output_tokens += usage.completion
        if first_s is not None:
            tally.first[bisect_right(_BOUNDS_S, first_s)] += 1

    def look(self, waiters: Iterable[Waiter]) -> None:
        """See who waits, and why."""
        slot = self.now()
        slot.looks += 1
        waits = slot.waits
        for waiter in waiters:
            call = waiter.call
            wait = Waiting(call.workload, call.model[:MOST_NAME], call.caller, waiter.reason)
            if wait not in waits and len(waits) >= MOST_KINDS:
                wait = Waiting(call.workload, OTHER, OTHER, waiter.reason)
            waits[wait] = waits.get(wait, 0) + 1

    def left(self, lines: Mapping[str, int]) -> None:
        """Batches have so many lines left now."""
        self.now().lines = lines

    def now(self) -> Slot:
        """The slot that runs."""
        now = self._clock()
        if not 0 <= now - self._slot.at < SLOT_S:
            at = int(now) // SLOT_S * SLOT_S
            if self._slots and at <= self._slots[-1].at:  # the clock was set back
                return self._slot
            self._close(at)
            self._slot = Slot(at)
            self._slots.append(self._slot)
        return self._slot

    def slots(self) -> Sequence[Slot]:
        """The last hour, oldest first; slots in which nothing was seen are left out."""
        since = self._clock() - SLOTS * SLOT_S
        return [slot for slot in self._slots if slot.at > since]

    def recent(self) -> Sequence[Slot]:
        """The last five minutes."""
        since = self._clock() - RECENT * SLOT_S
        return [slot for slot in self._slots if slot.at > since]

    def trail(self, node: str) -> list[tuple[int, float | None]]:
        """Minutes of the last hour in which people's calls were answered there, with the median first token."""
        since = self._clock() - SLOTS * SLOT_S
        return [(at, seconds) for at, seconds in self._trails.get(node, ()) if at > since]

    def _close(self, at: int) -> None:
        """A minute that is over becomes a point of each node's trail."""
        if not self._slots or at // TRAIL_S == self._slots[-1].at // TRAIL_S:
            return
        minute = self._slots[-1].at // TRAIL_S * TRAIL_S
        nodes: dict[str, Tally] = {}
        for slot in self._slots:
            if slot.at >= minute:
                for tally in slot.kinds.values():
                    node = tally.kind.node
                    if tally.kind.workload is INTERACTIVE and node not in ("", RELAY, OTHER):
                        nodes.setdefault(node, Tally()).add(tally)
        for node, tally in nodes.items():
            trail = self._trails.setdefault(node, deque(maxlen=SLOTS * SLOT_S // TRAIL_S))
            trail.append((minute, tally.quantile_s(0.5)))
        gone = [node for node, trail in self._trails.items() if trail[-1][0] < at - SLOTS * SLOT_S]
        for node in gone:
            del self._trails[node]
