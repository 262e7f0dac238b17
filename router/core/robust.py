"""Statistics that a few odd values do not move: medians, spreads, slopes and a test for a trend.

Rules: every function takes plain sequences, the empty one too where it says so, and never raises for what is in them;
callers leave unknown values out. Slopes are of at most `MOST_POINTS` points, so that their cost has a bound.
"""

from collections.abc import Iterable, Sequence
from itertools import pairwise

MOST_POINTS = 60
"""Points a slope is taken from; a longer series is first put into so many bins by median. 60 make 1,770 pairs."""
OF_NORMAL = 1.4826
"""A median of distances, times this, is the standard deviation of a normal distribution."""

SMOOTH = 9
"""Neighbours whose mean is what a series is taken to be at one time."""

Point = tuple[float, float]
Shift = tuple[float, float, float]
"""A time, a value then, and its noise."""


def median(values: Iterable[float]) -> float:
    """The middle value. Raises IndexError when there is none."""
    ordered = sorted(values)
    middle = len(ordered) // 2
    return ordered[middle] if len(ordered) % 2 else (ordered[middle - 1] + ordered[middle]) / 2


def settled(values: Sequence[Point]) -> Point:
    """The mean of (value, noise) pairs, the quiet ones weighing more, and its own noise.

    A value further than three of its noises from the median counts as if it were there. Raises IndexError when there
    is no value; noises are above 0.
    """
    centre = median(value for value, _ in values)
    weight = sum(1 / noise**2 for _, noise in values)
    kept = sum(min(max(value, centre - 3 * noise), centre + 3 * noise) / noise**2 for value, noise in values)
    return kept / weight, weight**-0.5


def spread(values: Sequence[float]) -> float:
    """The standard deviation as the median distance from the median tells it; 0 for fewer than two values."""
    if len(values) < 2:
        return 0.0
    centre = median(values)
    return OF_NORMAL * median(abs(value - centre) for value in values)


def thinned(points: Sequence[Point], most: int = MOST_POINTS) -> list[Point]:
    """At most `most` points: neighbours are put together and each group is told by its medians."""
    if len(points) <= most:
        return list(points)
    bounds = [index * len(points) // most for index in range(most + 1)]
    groups = (points[begin:end] for begin, end in pairwise(bounds))
    return [(median(at for at, _ in group), median(value for _, value in group)) for group in groups]


def slope(points: Sequence[Point]) -> float:
    """Theil-Sen: the median slope of all pairs, in units of value a unit of time; 0 for fewer than two times."""
    few = thinned(points)
    slopes = [
        (value - before) / (at - then)
        for index, (at, value) in enumerate(few)
        for then, before in few[:index]
        if at > then
    ]
    return median(slopes) if slopes else 0.0


def trend(values: Sequence[float]) -> float:
    """Mann-Kendall: how sure a rise is, in standard deviations of pure chance (negative for a fall)."""
    count = len(values)
    if count < 4:
        return 0.0
    rises = sum((value > before) - (value < before) for index, value in enumerate(values) for before in values[:index])
    chance = (count * (count - 1) * (2 * count + 5) / 18) ** 0.5
    sure: float = (rises - (rises > 0) + (rises < 0)) / chance
    return sure


def never_left(values: Sequence[float]) -> list[float]:
    """For each value the least of it and all later ones: what the series has not come back from.

    Of a sawtooth this is flat up to its last tooth; of steady growth it is the series.
    """
    kept = list(values)
    for index in range(len(kept) - 2, -1, -1):
        kept[index] = min(kept[index], kept[index + 1])
    return kept


def echo(lead: Sequence[Shift], other: Sequence[Shift]) -> float | None:
    """How much of the rise of one series another shows: 1 all of it, 0 none; None when the first did not rise.

    Both are held together where both are known. A time counts the more, the higher the first one stood around it, so
    that most is learnt where following would show most; a value further than three of its noises beyond none of that
    rise, or all of it, counts as if it were there.
    """
    beside = {at: (value, noise) for at, value, noise in other}
    shown = whole = 0.0
    for index, (at, rose, _) in enumerate(lead):
        if at not in beside:
            continue
        around = lead[max(0, index - SMOOTH // 2) : index + SMOOTH // 2 + 1]
        near = max(0.0, sum(value for _, value, _ in around) / len(around))
        value, noise = beside[at]
        shown += near / noise**2 * min(max(value, -3 * noise), near + 3 * noise)
        whole += near / noise**2 * rose
    return shown / whole if whole > 0 else None
