"""The last things that happened here, for whoever looks later.

Rules: rings of a fixed size, so it costs the same on a quiet night and in a storm; take-backs, of which a busy hour has
hundreds, have one of their own and push nothing else out; each entry has a number that is
never used again, so that whoever saw some can ask for the rest; a text tells what and why in words, and never holds a
prompt, an answer or a key. `at` is unix seconds, given by a clock that whoever makes the ring hands in.
"""

from collections import deque
from collections.abc import Callable, Iterator
from enum import StrEnum
from heapq import merge
from operator import attrgetter

import msgspec

MOST = 500
"""Entries that are kept, beside half as many take-backs."""
TEXT = 512
"""Most characters of a text: some of it is what a node said."""


class Topic(StrEnum):
    """What an entry is about."""

    NODE = "node"
    TAKE_BACK = "take_back"
    BATCH = "batch"
    RECYCLE = "recycle"
    SETTINGS = "settings"
    OPERATOR = "operator"


class Entry(msgspec.Struct, frozen=True):
    """One thing that happened. `node`, `model` and `caller` are empty where they do not apply."""

    number: int
    at: float
    topic: Topic
    text: str
    node: str = ""
    model: str = ""
    caller: str = ""


class Events:
    """The rings, as one. Anybody may add; `clock` gives unix seconds."""

    def __init__(self, clock: Callable[[], float], most: int = MOST) -> None:
        self._clock = clock
        self._entries: deque[Entry] = deque(maxlen=most)
        self._take_backs: deque[Entry] = deque(maxlen=max(1, most // 2))
        self.last = 0

    def __iter__(self) -> Iterator[Entry]:
        return merge(self._entries, self._take_backs, key=attrgetter("number"))

    def add(self, topic: Topic, text: str, *, node: str = "", model: str = "", caller: str = "") -> None:
        """Something happened now."""
        self.last += 1
        entry = Entry(self.last, self._clock(), topic, text[:TEXT], node, model[:TEXT], caller)
        (self._take_backs if topic is Topic.TAKE_BACK else self._entries).append(entry)
