"""Whether the memory of a node grows without end.

Rules: memory grows when, within one of `WINDOWS`, it grew in both halves, the later half did not level off, and what
it has now was not there before. Growth is taken from what the series never came back from, so one tooth of a sawtooth
is no growth; and once a node has been seen to give much memory back, all up to that top is its habit. The first
`WARM_UP_H` hours after a start are ignored.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

from router.core.detectors import UNKNOWN, Evidence, Finding, Times, Told
from router.core.robust import Point, median, never_left, slope
from router.core.signals import Bin

WARM_UP_H = 2.0
"""Pools, lazily mapped weights and prompt caches fill: memory may grow."""
YOUNG_H = 24.0
YOUNG_SHORTEST_H = 3.0
WHOLE = 0.9
"""Share of a window that has to be known."""
LEVELLING = (0.85, 0.3)
"""Growth whose later half has less than this share of the earlier half's slope levels off: while young, and after."""
WINDOWS = ((6.0, 0.01), (3.0, 0.03), (1.5, 0.10))
"""Hours, and the share memory has to grow by within them."""
LEAST_BYTES = 32 * 2**20
"""Growth below this is none."""
LEAST_BINS = 8
LEAST_H = 3.0
"""Hours of evidence before memory is said not to grow."""
HALF = 0.25
"""Each half of a window shows at least this share of the growth asked of the whole."""
TOOTH = 0.2
"""A fall by this share of all memory ever seen to grow, and by `LEAST_BYTES`, is a tooth."""


class Window(NamedTuple):
    """Growth within the last hours: bytes an hour of the whole and of its halves, and whether it counts."""

    hours: float
    slope: float
    halves: tuple[float, float]
    grows: bool


def growth(bins: Sequence[Bin], channel: str, times: Times, *, whole: bool = True) -> Finding:
    """Whether the memory of `channel` grows. `whole` is False for a part of a node, whose rest then tells nothing."""
    index = Bin._fields.index(channel)
    since = times.began + WARM_UP_H * times.hour
    points = [(one.at, one[index]) for one in bins if one.at >= since and one[index] > 0]
    if len(points) < LEAST_BINS:
        return UNKNOWN
    windows = [_window(points, hours, share, times) for hours, share in WINDOWS if hours >= _shortest(times)]
    told = next((window for window in windows if window is not None and window.grows), None)
    shown = told or next((window for window in windows if window is not None), None)
    if shown is None:
        return UNKNOWN
    grows = told is not None and points[-1][1] > _habit(points)
    evidence = (
        Evidence(channel, points[-1][1], "bytes", points[0][1], "itself after its warm-up"),
        Evidence(f"{channel}_slope", shown.slope, "bytes/h", 0.0, f"flat, over {shown.hours:g} h"),
        Evidence(f"{channel}_slope_later", shown.halves[1], "bytes/h", shown.halves[0], "the earlier half of that"),
    )
    if grows:
        return Finding(Told.YES, evidence, shown.slope)
    enough = times.now - points[0][0] >= LEAST_H * times.hour and whole
    return Finding(Told.NO if enough else Told.UNKNOWN, evidence, shown.slope)


def _window(points: Sequence[Point], hours: float, share: float, times: Times) -> Window | None:
    """One window; None when memory is not known for most of it."""
    late = [point for point in points if point[0] >= times.now - hours * times.hour]
    if len(late) < LEAST_BINS or times.now - late[0][0] < WHOLE * hours * times.hour:
        return None
    middle = len(late) // 2
    kept = list(zip((at for at, _ in late), never_left([value for _, value in late]), strict=True))
    halves = tuple(slope(half) * 3600 for half in (late[: middle + 1], late[middle:]))
    enough = max(LEAST_BYTES, share * late[0][1])
    gained = [_gain(half) for half in (kept[: middle + 1], kept[middle:])]
    young = _young(times)
    steady = halves[0] > 0 and halves[1] >= LEVELLING[0 if young else 1] * halves[0]
    grows = steady and sum(gained) >= enough and min(gained) >= HALF * enough
    return Window(hours, slope(late) * 3600, (halves[0], halves[1]), grows)


def _young(times: Times) -> bool:
    return times.now - times.began < YOUNG_H * times.hour


def _shortest(times: Times) -> float:
    """A short window of a young node cannot tell growth from filling up."""
    return YOUNG_SHORTEST_H if _young(times) else 0.0


def _gain(half: Sequence[Point]) -> float:
    """What was gained from the first third to the last, by medians."""
    third = max(1, len(half) // 3)
    return median(value for _, value in half[-third:]) - median(value for _, value in half[:third])


def _habit(points: Sequence[Point]) -> float:
    """The highest memory that was given back again; less than any memory when none was."""
    least, top, habit = points[0][1], points[0][1], -math.inf
    for _, value in points:
        least = min(least, value)
        if top - value >= max(LEAST_BYTES, TOOTH * (top - least)) and top - value >= 0.02 * top:
            habit = max(habit, top)
        top = max(top, value)
    return habit
