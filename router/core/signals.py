"""What was measured of one node over the last days, in rings of a fixed size.

Rules: None is unknown and never 0. A `Sample` holds totals as the node counts them; a bin holds what they grew by, and
a total that falls was begun anew. Of times a bin
holds the median of what was known, of levels the mean. A sample older than the
newest is dropped, so a clock that is set back loses samples and spoils none. Times are seconds of any one clock.

Size: 16 numbers of 4 bytes in 360 bins of a minute (6 hours) and 1,008 of ten (7 days) are 88 kB a node and 4.4 MB for
50 nodes, taken once.
"""

import math
from array import array
from collections.abc import Sequence
from typing import NamedTuple

import msgspec

from router.core.robust import median

HOUR_S = 3600.0
NAN = math.nan
NEVER = -(2**62)


class Counters(msgspec.Struct, frozen=True, kw_only=True):
    """Totals that an engine tells of itself, and its memory. None is unknown.

    `part_bytes` is the resident memory of one process of several: its growth tells something, its rest nothing.
    `started_at` is when that process began, in seconds of the node's own clock.
    """

    preemptions: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    part_bytes: float | None = None
    started_at: float | None = None


class Heard(msgspec.Struct, frozen=True, gc=False):
    """What one call told of the node it ran on. Seconds; None is unknown or never came.

    `first_token_s` is from sending to the first token, `gap_s` the mean between two tokens of a streamed answer.
    """

    prompt_tokens: int
    queued_s: float = 0.0
    first_token_s: float | None = None
    gap_s: float | None = None
    failed: bool = False


class Sample(msgspec.Struct, frozen=True, kw_only=True):
    """What was seen of a node at one time. None is unknown.

    `ttft_s` is seconds a prompt token from sending to the first token, `queue_s` the wait before sending, `gap_s`
    between two tokens of a call, `tokens_per_s` of one call; `errors` counts failed calls since the sample before;
    `preemptions`, `prefix_queries`, `prefix_hits` (tokens) and `restarts` are totals; `kv_used` is 0 to 1;
    `rss_bytes` is of the whole process tree; `running` and `waiting` are sequences.
    """

    at: float
    ttft_s: float | None = None
    queue_s: float | None = None
    gap_s: float | None = None
    tokens_per_s: float | None = None
    errors: float | None = None
    preemptions: float | None = None
    kv_used: float | None = None
    prefix_queries: float | None = None
    prefix_hits: float | None = None
    rss_bytes: float | None = None
    part_bytes: float | None = None
    gpu_bytes: float | None = None
    running: float | None = None
    waiting: float | None = None
    restarts: float | None = None


class Bin(NamedTuple):
    """One stretch of time that begins at `at`; NaN is unknown. Totals are what they grew by."""

    at: float
    ttft_s: float = NAN
    queue_s: float = NAN
    gap_s: float = NAN
    tokens_per_s: float = NAN
    errors: float = NAN
    preemptions: float = NAN
    kv_used: float = NAN
    prefix_queries: float = NAN
    prefix_hits: float = NAN
    rss_bytes: float = NAN
    part_bytes: float = NAN
    gpu_bytes: float = NAN
    running: float = NAN
    waiting: float = NAN
    restarts: float = NAN

    @property
    def queued(self) -> bool:
        """Whether calls waited inside the node, so that the time to their first token says nothing of its speed."""
        return self.waiting > 0.05 + 0.005 * (0.0 if math.isnan(self.running) else self.running)


CHANNELS = Bin._fields[1:]
TOTALS = frozenset(("preemptions", "prefix_queries", "prefix_hits", "restarts"))
ADDED = frozenset((*TOTALS, "errors"))
MIDDLED = frozenset(("ttft_s", "queue_s", "gap_s", "tokens_per_s"))
MOST_OPEN = 240
"""Values of one channel kept until a bin is closed; of more, the first."""
_MIDDLED = tuple(name in MIDDLED for name in CHANNELS)
_ADDED = tuple(name in ADDED for name in CHANNELS)


class Ring:
    """The last `length` bins of `step_s` seconds each. The newest is open and not shown."""

    __slots__ = ("_counts", "_length", "_middles", "_open", "_stamps", "_sums", "_values", "step_s")

    def __init__(self, step_s: float, length: int) -> None:
        self.step_s = step_s
        self._length = length
        self._values = [array("f", [NAN]) * length for _ in CHANNELS]
        self._stamps = array("q", [NEVER]) * length
        self._open: int | None = None
        self._middles: list[list[float]] = [[] for _ in CHANNELS]
        self._sums = [0.0] * len(CHANNELS)
        self._counts = [0] * len(CHANNELS)

    def add(self, at: float, values: Sequence[float]) -> None:
        """Take in one value a channel; NaN is unknown."""
        number = int(at // self.step_s)
        if self._open is None:
            self._open = number
        elif number > self._open:
            self._close(self._open)
            self._open = number
        for index, value in enumerate(values):
            if not math.isnan(value):
                self._sums[index] += value
                self._counts[index] += 1
                if _MIDDLED[index] and len(self._middles[index]) < MOST_OPEN:
                    self._middles[index].append(value)

    def bins(self, since: float = -math.inf) -> list[Bin]:
        """Closed bins that begin at `since` or later, oldest first. A stretch without samples has none."""
        if self._open is None:
            return []
        first = self._open - self._length
        if since > first * self.step_s:
            first = math.ceil(since / self.step_s)
        slots = [(number, number % self._length) for number in range(first, self._open)]
        return [
            Bin(number * self.step_s, *[channel[slot] for channel in self._values])
            for number, slot in slots
            if self._stamps[slot] == number
        ]

    def channel(self, name: str) -> list[tuple[float, float]]:
        """One channel of all closed bins, oldest first: when each began, and its value where one is known."""
        if self._open is None:
            return []
        values, stamps = self._values[CHANNELS.index(name)], self._stamps
        slots = ((number, number % self._length) for number in range(self._open - self._length, self._open))
        return [
            (number * self.step_s, values[slot])
            for number, slot in slots
            if stamps[slot] == number and not math.isnan(values[slot])
        ]

    @property
    def newest(self) -> int | None:
        """The number of the open bin: what is closed is the same as long as this is. None before anything came."""
        return self._open

    def _close(self, number: int) -> None:
        slot = number % self._length
        self._stamps[slot] = number
        for index, (total, count) in enumerate(zip(self._sums, self._counts, strict=True)):
            middles = self._middles[index]
            mean = total if _ADDED[index] else total / count if count else NAN
            self._values[index][slot] = median(middles) if middles else mean if count else NAN
            middles.clear()
            self._sums[index], self._counts[index] = 0.0, 0


class Signals:
    """The rings of one node, or of the relay. `hour_s` shrinks every span of time, for tests that cannot wait."""

    __slots__ = ("_at", "_before", "_heard", "coarse", "fine", "hour_s", "latest")

    def __init__(self, hour_s: float = HOUR_S) -> None:
        self.hour_s = hour_s
        self.fine = Ring(hour_s / 60, 360)
        self.coarse = Ring(hour_s / 6, 1008)
        self.latest: dict[str, float] = {}
        """The last known value of each channel, totals as they are."""
        self._at = -math.inf
        self._before: dict[str, float] = {}
        self._heard: dict[str, float] = {}

    def since(self, name: str, at: float) -> float | None:
        """The last known value of a channel, unless it was known before `at` alone."""
        return self.latest[name] if self._heard.get(name, -math.inf) >= at else None

    def add(self, sample: Sample) -> None:
        """Take in one sample."""
        if sample.at < self._at:
            return
        self._at = sample.at
        values = [self._value(name, getattr(sample, name)) for name in CHANNELS]
        self.fine.add(sample.at, values)
        self.coarse.add(sample.at, values)

    def _value(self, name: str, value: float | None) -> float:
        if value is None or not math.isfinite(value):
            return NAN
        self.latest[name] = value
        self._heard[name] = self._at
        if name not in TOTALS:
            return value
        before = self._before.get(name)
        self._before[name] = value
        if before is None:
            return NAN
        return value - before if value >= before else value
