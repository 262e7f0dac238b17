"""KV blocks of one node, and the prefix cache in them, as vLLM V1 keeps them.

Rules:
- A block holds 16 tokens. Who runs holds the blocks of what it has computed; blocks of a prefix that others hold too
  are shared, not doubled.
- Who ends, however it ends, gives its blocks back; the full ones stay readable until somebody needs the space. Those
  given back longest ago go first, and of one sequence its last block first.
- So what is left of a prefix is always its beginning, and it is enough to know where it ends. Blocks are kept as runs,
  not one by one: a prompt of 30,000 tokens is one run, not 1,875 entries.

A prompt is a chain of `Part`s: blocks `[first, last)` that belong to `owner`. A prompt that shares nothing is one part;
a prompt that begins like an earlier one has that one's parts first and its own last.
"""

from collections import deque
from collections.abc import Hashable
from typing import NamedTuple

BLOCK = 16
ENDLESS = 1 << 60


class Part(NamedTuple):
    """Blocks `[first, last)` of a prompt, by the prompt that brought them."""

    owner: Hashable
    first: int
    last: int


class _Band:
    """Blocks `[low, high)` of an owner that nobody holds and that can still be read."""

    __slots__ = ("high", "low", "owner")

    def __init__(self, owner: "_Owner", low: int, high: int) -> None:
        self.owner = owner
        self.low = low
        self.high = high


class _Owner:
    """What there is of one owner's blocks: `[first, held)` is held, `[first, full)` can be read."""

    __slots__ = ("bands", "first", "full", "held", "key", "refs")

    def __init__(self, key: Hashable, first: int) -> None:
        self.key = key
        self.first = self.held = self.full = first
        self.refs: dict[object, int] = {}
        self.bands: list[_Band] = []


class Blocks:
    """`total` blocks. `held` of them are in use; the rest is free, `banded` of it still readable."""

    def __init__(self, total: int) -> None:
        self.total = total
        self.held = 0
        self.banded = 0
        self._owners: dict[Hashable, _Owner] = {}
        self._oldest: deque[_Band] = deque()

    @property
    def free(self) -> int:
        """Blocks nobody holds."""
        return self.total - self.held

    def hit(self, chain: tuple[Part, ...], tokens: int) -> int:
        """How many of the first `tokens` tokens need not be computed: whole blocks only."""
        found = 0
        most = tokens // BLOCK
        for key, first, last in chain:
            owner = self._owners.get(key)
            if owner is None or found < first:
                break
            found = min(owner.full, last)
            if found < last or found >= most:
                break
        return min(found, most) * BLOCK

    def cost(self, chain: tuple[Part, ...], blocks: int) -> int:
        """How many free blocks it takes to hold the first `blocks` of a chain."""
        taken = 0
        for key, first, last in chain:
            high = min(last, blocks)
            if high <= first:
                break
            owner = self._owners.get(key)
            taken += max(0, high - (first if owner is None else owner.held))
        return taken

    def hold(self, who: object, chain: tuple[Part, ...], blocks: int) -> None:
        """`who` holds the first `blocks` of its chain from now on. The caller has seen that they are free."""
        for key, first, last in chain:
            high = min(last, blocks)
            if high <= first:
                break
            owner = self._owners.get(key)
            if owner is None:
                owner = self._owners[key] = _Owner(key, first)
            owner.refs[who] = high
            if high > owner.held:
                self._take(owner, high)

    def filled(self, chain: tuple[Part, ...], tokens: int) -> None:
        """The first `tokens` of a chain, which somebody holds, have been computed and can be read by others."""
        full = tokens // BLOCK
        for key, first, last in chain:
            high = min(last, full)
            if high <= first:
                break
            owner = self._owners[key]
            if high > owner.full:
                owner.full = high

    def drop(self, who: object, chain: tuple[Part, ...], tokens: int) -> None:
        """`who` holds nothing any more; it had computed the first `tokens` of its chain."""
        full = tokens // BLOCK
        for key, _, last in reversed(chain):
            owner = self._owners.get(key)
            high = None if owner is None else owner.refs.pop(who, None)
            if owner is None or high is None:
                continue
            owner.full = max(owner.full, min(full, high, last))
            rest = max(owner.refs.values(), default=owner.first)
            if high <= rest:
                continue
            self.held -= high - rest
            owner.held = rest
            if owner.full > rest:
                self._band(owner, rest, min(high, owner.full))
            self._forget(owner)

    def _take(self, owner: _Owner, high: int) -> None:
        while owner.bands and owner.bands[0].low < high:
            band = owner.bands[0]
            self.banded -= min(high, band.high) - band.low
            band.low = min(high, band.high)
            if band.low < band.high:
                break
            owner.bands.pop(0)
        self.held += high - owner.held
        owner.held = high
        while self.banded > self.total - self.held:
            self._evict(self.banded - (self.total - self.held))

    def _band(self, owner: _Owner, low: int, high: int) -> None:
        band = _Band(owner, low, high)
        owner.bands.insert(0, band)
        self._oldest.append(band)
        self.banded += high - low

    def _evict(self, count: int) -> None:
        band = self._oldest[0]
        lost = min(count, band.high - band.low)
        if lost:
            band.high -= lost
            self.banded -= lost
            band.owner.full = band.high
        if band.low >= band.high:
            self._oldest.popleft()
            if band.owner.bands and band.owner.bands[-1] is band:
                band.owner.bands.pop()
            self._forget(band.owner)

    def _forget(self, owner: _Owner) -> None:
        if not owner.refs and not owner.bands and self._owners.get(owner.key) is owner:
            del self._owners[owner.key]
