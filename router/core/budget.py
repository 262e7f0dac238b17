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
from collections import defaultdict
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


class Permit(msgspec.Struct, eq=False):
    """The right to hold room on one node for the length of a `with` block; `Budget.hold` makes it.

    `prompt_tokens` is what is read before the first token; `began_at` and `spoke_at` (the first token, None before
    it) are seconds of the node's clock. `budget` is None once the room is given back. `quiet` says that nothing else
    was read when it began, `chats` how many interactive calls ran. `call` is what runs, `past` what earlier take-backs
    cost it. A `firm` permit is not taken back before `firm_until`; `taken` says that it was, and `left` is called,
    once, when it is. `took` says that batch was taken back for it, `stalled_s` how long batch was read beside it,
    `reads_s` how long reading it was to take when it began beside chats.
    """

    budget: "Budget | None"
    room: Room
    workload: Workload
    prompt_tokens: int
    began_at: float
    quiet: bool
    chats: int
    spoke_at: float | None = None
    call: Call | None = None
    past: Past | None = None
    firm: bool = False
    firm_until: float = math.inf
    taken: bool = False
    took: bool = False
    left: Callable[[], None] | None = None
    stalled_s: float = 0.0
    reads_s: float = 0.0

    def __enter__(self) -> "Permit":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        if self.budget is not None:
            self.budget._give_back(self)

    @property
    def phase(self) -> Phase:
        """Whether its first token is out."""
        return Phase.PREFILL if self.spoke_at is None else Phase.DECODE

    def spoke(self, now: float) -> None:
        """Its first token is here; later ones change nothing."""
        if self.spoke_at is None:
            self.spoke_at = now
            if self.budget is not None:
                self.budget._read(self)

    def take(self) -> None:
        """Take it back: its room is free now, and whoever holds the block is told to leave."""
        self.taken = True
        left = self.left
        if self.budget is not None:
            self.budget._give_back(self)
        if left is not None:
            left()


class Budget:
    """Room of one node.

    `tokens` and `sequences` are capacities, None where the node does not tell. `reserve` is the share (0 to 1) of each
    that batch leaves to interactive calls; of a capacity of one sequence nothing can be kept. `taken_tokens` and
    `taken_sequences` are what permits and others hold of each. `chats` counts interactive permits, `reading` those of
    them in prefill and `unread` their prompt tokens; `batch` are the batch permits, oldest first, and `batch_reading`
    counts those in prefill. `lengths` are prompt tokens in prefill of any workload by length class (a power of two).
    """

    __slots__ = (
        "_batch_sequences",
        "_batch_tokens",
        "_foreign",
        "_permits",
        "batch",
        "batch_reading",
        "chats",
        "lengths",
        "reading",
        "reserve",
        "sequences",
        "taken_sequences",
        "taken_tokens",
        "tokens",
        "unread",
    )

    def __init__(self, tokens: int | None = None, sequences: int | None = None, reserve: float = 0.0) -> None:
        self.tokens = tokens
        self.sequences = sequences
        self.reserve = reserve
        self._foreign = NONE
        self.batch: dict[Permit, None] = {}
        self.chats = self.reading = self.unread = self.batch_reading = 0
        self.lengths: defaultdict[int, int] = defaultdict(int)
        self._permits: set[Permit] = set()
        self.taken_tokens = self.taken_sequences = 0
        self._batch_tokens = self._batch_sequences = 0

    def __iter__(self) -> Iterator[Permit]:
        return iter(self._permits)

    @property
    def foreign(self) -> Room:
        """What others hold."""
        return self._foreign

    @foreign.setter
    def foreign(self, room: Room) -> None:
        before, self._foreign = self._foreign, room
        self.taken_tokens += room.tokens - before.tokens
        self.taken_sequences += room.sequences - before.sequences

    def held(self, workload: Workload | None = None) -> Room:
        """Room held by permits, of one workload or of all."""
        if workload is BATCH:
            return Room(self._batch_tokens, self._batch_sequences)
        tokens, sequences = self.taken_tokens - self._foreign.tokens, self.taken_sequences - self._foreign.sequences
        if workload is INTERACTIVE:
            return Room(tokens - self._batch_tokens, sequences - self._batch_sequences)
        return Room(tokens, sequences)

    def reads_since(self) -> float:
        """When the newest batch call in prefill began; infinity if none is."""
        if not self.batch_reading:
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
        reserve = self.reserve if workload is BATCH else 0.0
        tokens, sequences = self.tokens, self.sequences
        return (
            tokens is None
            or _fits(room.tokens, self.taken_tokens - without.tokens, self._batch_tokens, tokens, reserve)
        ) and (
            sequences is None
            or _fits(
                room.sequences, self.taken_sequences - without.sequences, self._batch_sequences, sequences, reserve
            )
        )

    def hold(self, room: Room, workload: Workload, *, prompt_tokens: int = 0, now: float = 0.0) -> Permit:
        """Take room now, for the `with` block of the permit. The caller has asked `fits`."""
        capacity, places = self.tokens, self.sequences
        if (capacity is not None and room.tokens > capacity) or (places is not None and room.sequences > places):
            room = self.clamp(room)
        quiet = not (self.reading or self.batch_reading or self._foreign.sequences)
        permit = Permit(self, room, workload, prompt_tokens, now, quiet, self.chats)
        self._permits.add(permit)
        self.taken_tokens += room.tokens
        self.taken_sequences += room.sequences
        self.lengths[prompt_tokens.bit_length()] += prompt_tokens
        if workload is INTERACTIVE:
            self.chats += 1
            self.reading += 1
            self.unread += prompt_tokens
        else:
            self.batch[permit] = None
            self.batch_reading += 1
            self._batch_tokens += room.tokens
            self._batch_sequences += room.sequences
        return permit

    @property
    def told(self) -> bool:
        """Whether any capacity is known."""
        return self.tokens is not None or self.sequences is not None

    @property
    def prefilling(self) -> int:
        """Permits of any workload in prefill."""
        return self.reading + self.batch_reading

    def running(self) -> int:
        """Sequences on the node, ours and others'."""
        return self.taken_sequences

    def holds(self, permit: Permit | None) -> bool:
        """Whether that permit's block still lasts."""
        return permit in self._permits

    def used(self) -> float:
        """The fullest of the known capacities, 0 when empty; above 1 when foreign calls crowd the node."""
        tokens, sequences = self.tokens, self.sequences
        by_tokens = self.taken_tokens / tokens if tokens else 0.0
        by_sequences = self.taken_sequences / sequences if sequences else 0.0
        return by_tokens if by_tokens > by_sequences else by_sequences

    # What permits tell

    def _read(self, permit: Permit) -> None:
        """A permit that holds room is in prefill no longer."""
        tokens = permit.prompt_tokens
        self.lengths[tokens.bit_length()] -= tokens
        if permit.workload is INTERACTIVE:
            self.reading -= 1
            self.unread -= tokens
        else:
            self.batch_reading -= 1

    def _give_back(self, permit: Permit) -> None:
        """A permit holds its room no longer."""
        permit.budget = permit.left = None
        if permit.spoke_at is None:
            self._read(permit)
        room = permit.room
        self._permits.discard(permit)
        self.taken_tokens -= room.tokens
        self.taken_sequences -= room.sequences
        if permit.workload is INTERACTIVE:
            self.chats -= 1
        else:
            del self.batch[permit]
            self._batch_tokens -= room.tokens
            self._batch_sequences -= room.sequences


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
