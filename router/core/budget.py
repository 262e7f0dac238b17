"""The room of one node, and who holds it.

Rules:
- Room is KV tokens and sequences. A capacity that is unknown (None) does not limit; it is never read as zero.
- Room is taken when a Permit is made and given back when its block ends, or when the permit is taken back: then it is
  free at once, though its block has yet to end. There is no other way to give it back.
- Batch leaves the reserve alone: the part of each capacity that is kept for interactive calls. One batch call that is
  larger than the rest may run where no other batch call does, or it would never run.
- What others run on the node (seen in its metrics, not sent by us) is foreign room: it counts as taken by everybody.
- A permit tells its phase: in prefill until its first token, then in decode.
"""

import math
from collections.abc import Callable, Iterator
from enum import StrEnum
from types import TracebackType

import msgspec

from router.core.call import BATCH, INTERACTIVE, Call, Workload
from router.core.pace import Past


class Room(msgspec.Struct, frozen=True):
    """What a call needs on a node while it runs. KV tokens and sequences."""

    tokens: int
    sequences: int


NONE = Room(0, 0)


class Phase(StrEnum):
    """Of a running call: its prompt is read, or its answer is written."""

    PREFILL = "prefill"
    DECODE = "decode"


class Permit:
    """The right to hold room on one node for the length of a `with` block.

    `prompt_tokens` is what is read before the first token; `began_at` and `spoke_at` (the first token, None before
    it) are seconds of the node's clock. `call` is what runs. A `firm` permit is not taken back before `firm_until`.
    `left` is called, once, when it is. `past` is what earlier take-backs cost the call; `quiet` says that nothing
    else was read when it began, `chats` how many interactive calls ran, `took` that batch was taken back for it,
    `stalled_s` how long batch was read beside it, `reads_s` how long reading it was to take when it began beside chats.
    """

    __slots__ = (
        "_budget",
        "began_at",
        "call",
        "chats",
        "firm",
        "firm_until",
        "left",
        "past",
        "prompt_tokens",
        "quiet",
        "reads_s",
        "room",
        "spoke_at",
        "stalled_s",
        "taken",
        "took",
        "workload",
    )

    def __init__(
        self, budget: "Budget", room: Room, workload: Workload, prompt_tokens: int = 0, now: float = 0.0
    ) -> None:
        self._budget: Budget | None = budget
        self.room = room
        self.workload = workload
        self.prompt_tokens = prompt_tokens
        self.began_at = now
        self.spoke_at: float | None = None
        self.past: Past | None = None
        self.call: Call | None = None
        self.stalled_s = self.reads_s = 0.0
        self.firm = False
        self.firm_until = math.inf
        self.taken = False
        self.took = False
        self.left: Callable[[], None] | None = None
        self.quiet = not (budget.prefilling or budget.foreign.sequences)
        self.chats = budget.chats
        budget._add(self)

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        budget, self._budget = self._budget, None
        if budget is not None:
            budget._remove(self)
        self.left = None

    @property
    def phase(self) -> Phase:
        """Whether its first token is out."""
        return Phase.PREFILL if self.spoke_at is None else Phase.DECODE

    def spoke(self, now: float) -> None:
        """Its first token is here; later ones change nothing."""
        if self.spoke_at is None:
            self.spoke_at = now
            if self._budget is not None:
                self._budget._spoke(self)

    def take(self) -> None:
        """Take it back: its room is free now, and whoever holds the block is told to leave."""
        self.taken = True
        left = self.left
        self.__exit__(None, None, None)
        if left is not None:
            left()


class Budget:
    """Room of one node.

    `tokens` and `sequences` are capacities, None where the node does not tell. `reserve` is the share (0 to 1) of each
    that batch leaves to interactive calls; of a capacity of one sequence nothing can be kept. `chats` counts
    interactive permits, `reading` those of them in prefill and `unread` their prompt tokens; `prefilling` counts
    permits of any workload in prefill and `lengths` their prompt tokens by length class (a power of two). `batch` are
    the batch permits, oldest first.
    """

    __slots__ = (
        "_all",
        "_held",
        "_permits",
        "batch",
        "chats",
        "foreign",
        "lengths",
        "prefilling",
        "reading",
        "reserve",
        "sequences",
        "tokens",
        "unread",
    )

    def __init__(self, tokens: int | None = None, sequences: int | None = None, reserve: float = 0.0) -> None:
        self.tokens = tokens
        self.sequences = sequences
        self.reserve = reserve
        self.foreign = Room(0, 0)
        self.batch: dict[Permit, None] = {}
        self.chats = self.reading = self.unread = self.prefilling = 0
        self.lengths: dict[int, int] = {}
        self._permits: set[Permit] = set()
        self._held = {workload: [0, 0] for workload in Workload}
        self._all = [0, 0]

    def __iter__(self) -> Iterator[Permit]:
        return iter(self._permits)

    def held(self, workload: Workload | None = None) -> Room:
        """Room held by permits, of one workload or of all."""
        return Room(*(self._all if workload is None else self._held[workload]))

    def reads_since(self) -> float:
        """When the newest batch call in prefill began; infinity if none is."""
        if self.prefilling == self.reading:
            return math.inf
        return next((permit.began_at for permit in reversed(self.batch) if permit.spoke_at is None), math.inf)

    def chatting(self) -> Iterator[Permit]:
        """The interactive permits."""
        return (permit for permit in self._permits if permit.workload is INTERACTIVE)

    def clamp(self, room: Room) -> Room:
        """The room a call takes at most: a node never gives one call more than it has."""
        tokens, sequences = self.tokens, self.sequences
        if (tokens is None or room.tokens <= tokens) and (sequences is None or room.sequences <= sequences):
            return room
        return Room(
            room.tokens if tokens is None else min(room.tokens, max(1, tokens)),
            room.sequences if sequences is None else min(room.sequences, max(1, sequences)),
        )

    def fits(self, room: Room, workload: Workload, without: Room = NONE) -> bool:
        """Whether a call of that room may start now, or once the room `without` of batch is free."""
        room = self.clamp(room)
        tokens, sequences = self._all
        foreign, batch = self.foreign, self._held[BATCH]
        reserve = self.reserve if workload is BATCH else 0.0
        tokens += foreign.tokens - without.tokens
        sequences += foreign.sequences - without.sequences
        return (self.tokens is None or _fits(room.tokens, tokens, batch[0], self.tokens, reserve)) and (
            self.sequences is None or _fits(room.sequences, sequences, batch[1], self.sequences, reserve)
        )

    def hold(self, room: Room, workload: Workload, *, prompt_tokens: int = 0, now: float = 0.0) -> Permit:
        """Take room now, for the `with` block of the permit. The caller has asked `fits`."""
        return Permit(self, self.clamp(room), workload, prompt_tokens, now)

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

    # What permits tell

    def _add(self, permit: Permit) -> None:
        tokens, lengths = permit.prompt_tokens, self.lengths
        length = tokens.bit_length()
        self._permits.add(permit)
        self.prefilling += 1
        lengths[length] = lengths.get(length, 0) + tokens
        if permit.workload is INTERACTIVE:
            self.chats += 1
            self.reading += 1
            self.unread += tokens
        else:
            self.batch[permit] = None
        self._count(permit, +1)

    def _remove(self, permit: Permit) -> None:
        self._permits.discard(permit)
        if permit.spoke_at is None:
            self._spoke(permit)
        if permit.workload is INTERACTIVE:
            self.chats -= 1
        else:
            del self.batch[permit]
        self._count(permit, -1)

    def _spoke(self, permit: Permit) -> None:
        self.prefilling -= 1
        self.lengths[permit.prompt_tokens.bit_length()] -= permit.prompt_tokens
        if permit.workload is INTERACTIVE:
            self.reading -= 1
            self.unread -= permit.prompt_tokens

    def _count(self, permit: Permit, sign: int) -> None:
        room = permit.room
        tokens, sequences = sign * room.tokens, sign * room.sequences
        held, everything = self._held[permit.workload], self._all
        held[0] += tokens
        held[1] += sequences
        everything[0] += tokens
        everything[1] += sequences


def kept_back(capacity: int, reserve: float) -> int:
    """How much of a capacity batch leaves alone: the reserve rounded up, but never all of it."""
    return min(capacity - 1, -int(-capacity * reserve // 1)) if reserve else 0


def _fits(need: int, taken: int, batch: int, capacity: int, reserve: float) -> bool:
    if taken + need > capacity:
        return False
    if not reserve:
        return True
    ceiling = capacity - kept_back(capacity, reserve)
    return batch + min(need, ceiling) <= ceiling
