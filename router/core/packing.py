"""On how many nodes chat runs when batch wants the rest.

With several nodes, chat on the fewest that hold it leaves whole nodes to batch, and an engine that reads no long prompt
answers chat best. How many chats one node holds is learnt: the limit climbs while calls at it keep the objective and
falls when more than one in twenty does not. How many nodes that takes follows the highest number of chats at once of
the last while, with room for a burst; it goes up at once and down only after a while.
"""

import math
from collections import deque
from collections.abc import Sequence

__all__ = ["Bearing", "Packing"]

FIRST_LIMIT = 16.0
"""Chats at once a node is believed to bear before any evidence."""
WINDOW = 50
"""Calls near the limit that are judged together."""
MISSES = 0.02
"""Share of them that may miss the objective."""
NEAR = 0.6
"""A call counts as evidence when the node held at least this share of its limit."""
FIRST_WINDOW = 10
"""So many in time, and none late, are enough while the limit never fell."""
FALL = 0.9
FIRST_CLIMB = 1.25
"""Before it first fell a limit is a guess, and climbs to so many times what was borne."""
PEAK_S = 15.0
"""For so long the highest number of chats at once is remembered."""
DWELL_S = 10.0
"""So long fewer nodes must be enough before one is let go."""


class Bearing:
    """How many chats at once one node bears within the objective."""

    __slots__ = ("_fell", "_misses", "_most", "_seen", "limit")

    def __init__(self) -> None:
        self.limit = FIRST_LIMIT
        self._fell = False
        self._seen = self._misses = self._most = 0

    def judge(self, chats: int, *, kept: bool) -> None:
        """An interactive call ended that began beside so many; `kept` says whether it met the objective."""
        if chats + 1 < NEAR * self.limit:
            return
        self._seen += 1
        self._misses += not kept
        self._most = max(self._most, chats + 1)
        if self._misses > MISSES * WINDOW:
            self.limit = max(1.0, self.limit * FALL)
            self._fell = True
            self._forget()
        elif self._seen >= FIRST_WINDOW and not (self._fell or self._misses):
            self.limit = max(self.limit, min(self.limit, self._most) * FIRST_CLIMB)
            self._forget()
        elif self._seen >= WINDOW:
            self.limit += max(1.0, self.limit * (1.0 - FALL) / 2)
            self._forget()

    def _forget(self) -> None:
        self._seen = self._misses = self._most = 0


class Packing:
    """How many nodes, in their order, chat of one model is placed on."""

    __slots__ = ("_enough_since", "_peaks", "nodes")

    def __init__(self) -> None:
        self.nodes = 0
        self._peaks: deque[tuple[float, int]] = deque()
        self._enough_since: float | None = None

    def fit(self, chats: int, limits: Sequence[float], now: float) -> int:
        """The number of nodes for so many chats at once, with what each node bears. `now` in seconds."""
        peak = self._peak(chats, now)
        wanted = peak + math.sqrt(peak)
        count, held = 0, 0.0
        while held < wanted and count < len(limits):
            held += limits[count]
            count += 1
        if count >= self.nodes:
            self.nodes, self._enough_since = count, None
        elif self._enough_since is None:
            self._enough_since = now
        elif now - self._enough_since >= DWELL_S:
            self.nodes, self._enough_since = count, None
        return self.nodes

    def _peak(self, chats: int, now: float) -> int:
        peaks = self._peaks
        while peaks and (peaks[-1][1] <= chats or peaks[0][0] < now - PEAK_S):
            if peaks[0][0] < now - PEAK_S:
                peaks.popleft()
            else:
                peaks.pop()
        peaks.append((now, chats))
        return peaks[0][1]
