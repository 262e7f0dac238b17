"""The last numbers of a kind, and what most of them stayed within."""

from bisect import bisect_left, insort
from collections import deque

__all__ = ["Recent"]


class Recent:
    """The last `most` numbers, kept both in order of arrival and sorted."""

    __slots__ = ("_arrived", "_most", "_sorted")

    def __init__(self, most: int) -> None:
        self._most = most
        self._arrived: deque[float] = deque()
        self._sorted: list[float] = []

    def __len__(self) -> int:
        return len(self._sorted)

    def add(self, value: float) -> None:
        """Take in one more; the oldest is forgotten."""
        if len(self._arrived) == self._most:
            del self._sorted[bisect_left(self._sorted, self._arrived.popleft())]
        self._arrived.append(value)
        insort(self._sorted, value)

    def quantile(self, share: float) -> float:
        """The smallest number that at least `share` of all do not exceed. There must be one."""
        return self._sorted[min(len(self._sorted) - 1, int(share * len(self._sorted)))]
