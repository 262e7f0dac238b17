"""The room of one node, and who holds it.

Rules:
- Room is KV tokens and sequences. A capacity that is unknown (None) does not limit; it is never read as zero.
- Room is taken when a Permit is made and given back when its block ends. There is no other way to give it back.
- Batch leaves the reserve alone: the part of each capacity that is kept for interactive calls. One batch call that is
  larger than the rest may run where no other batch call does, or it would never run.
- What others run on the node (seen in its metrics, not sent by us) is foreign room: it counts as taken by everybody.
"""

from collections.abc import Iterator
from types import TracebackType

import msgspec

from router.core.call import Workload


class Room(msgspec.Struct, frozen=True):
    """What a call needs on a node while it runs. KV tokens and sequences."""

    tokens: int
    sequences: int


class Permit:
    """The right to hold room on one node for the length of a `with` block."""

    __slots__ = ("_budget", "room", "workload")

    def __init__(self, budget: "Budget", room: Room, workload: Workload) -> None:
        self._budget: Budget | None = budget
        self.room = room
        self.workload = workload
        budget._permits.add(self)
        budget._count(self, +1)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._permits.discard(self)
            budget._count(self, -1)


class Budget:
    """Room of one node.

    `tokens` and `sequences` are capacities, None where the node does not tell. `reserve` is the share (0 to 1) of each
    that batch leaves to interactive calls; of a capacity of one sequence nothing can be kept.
    """

    __slots__ = ("_all", "_held", "_permits", "foreign", "reserve", "sequences", "tokens")

    def __init__(self, tokens: int | None = None, sequences: int | None = None, reserve: float = 0.0) -> None:
        self.tokens = tokens
        self.sequences = sequences
        self.reserve = reserve
        self.foreign = Room(0, 0)
        self._permits: set[Permit] = set()
        self._held = {workload: [0, 0] for workload in Workload}
        self._all = [0, 0]

    def __iter__(self) -> Iterator[Permit]:
        return iter(self._permits)

    def held(self, workload: Workload | None = None) -> Room:
        """Room held by permits, of one workload or of all."""
        return Room(*(self._all if workload is None else self._held[workload]))

    def clamp(self, room: Room) -> Room:
        """The room a call takes at most: a node never gives one call more than it has."""
        tokens = room.tokens if self.tokens is None else min(room.tokens, max(1, self.tokens))
        sequences = room.sequences if self.sequences is None else min(room.sequences, max(1, self.sequences))
        return Room(tokens, sequences)

    def fits(self, room: Room, workload: Workload) -> bool:
        """Whether a call of that room may start now."""
        room = self.clamp(room)
        tokens, sequences = self._all
        foreign, batch = self.foreign, self._held[Workload.BATCH]
        reserve = self.reserve if workload is Workload.BATCH else 0.0
        return _fits(room.tokens, tokens + foreign.tokens, batch[0], self.tokens, reserve) and _fits(
            room.sequences, sequences + foreign.sequences, batch[1], self.sequences, reserve
        )

    def hold(self, room: Room, workload: Workload) -> Permit:
        """Take room now, for the `with` block of the permit. The caller has asked `fits`."""
        return Permit(self, self.clamp(room), workload)

    @property
    def told(self) -> bool:
        """Whether any capacity is known."""
        return self.tokens is not None or self.sequences is not None

    def running(self) -> int:
        """Sequences on the node, ours and others'."""
        return self._all[1] + self.foreign.sequences

    def holds(self, permit: Permit | None) -> bool:
        """Whether that permit's block still lasts."""
        return permit in self._permits

    def used(self) -> float:
        """The fullest of the known capacities, 0 when empty; above 1 when foreign calls crowd the node."""
        tokens, sequences = self._all
        share = (tokens + self.foreign.tokens) / self.tokens if self.tokens else 0.0
        return max(share, (sequences + self.foreign.sequences) / self.sequences) if self.sequences else share

    def _count(self, permit: Permit, sign: int) -> None:
        for row in (self._held[permit.workload], self._all):
            row[0] += sign * permit.room.tokens
            row[1] += sign * permit.room.sequences


def kept_back(capacity: int, reserve: float) -> int:
    """How much of a capacity batch leaves alone: the reserve rounded up, but never all of it."""
    return min(capacity - 1, -int(-capacity * reserve // 1)) if reserve else 0


def _fits(need: int, taken: int, batch: int, capacity: int | None, reserve: float) -> bool:
    if capacity is None:
        return True
    if taken + need > capacity:
        return False
    if not reserve:
        return True
    ceiling = capacity - kept_back(capacity, reserve)
    return batch + min(need, ceiling) <= ceiling
