"""Detectors over the signals of one node: each answers one question and knows nothing of the others.

A finding is yes, no or unknown, with the numbers that led to it. Rules:
- speed is judged at equal load: each value is divided by what the node itself took, when it was fresh, with as many
  calls running; of first tokens, bins in which calls waited inside the node are left out;
- the node is fresh for `BASE_H` hours after its last restart, less a warm-up, and never within the last `TREND_H`;
  at a load it met only later it was fresh for the first `CLASS_MOST` bins there;
- what a node calls noise is learnt from that time too: the scatter of its ninety-minute means, which holds slow wander.
"""

import math
from collections.abc import Sequence
from enum import StrEnum
from itertools import pairwise
from typing import NamedTuple

import msgspec

from router.core.robust import Point, Shift, echo, median, settled, spread, trend
from router.core.signals import NAN, Bin, Signals

WARM_UP_H = 0.5
"""Compiling, first loads and cold caches: nothing is learnt of speed."""
BASE_H = 24.0
RECENT_H = 1.5
TREND_H = 6.0
LEAST_BASE_BINS = 18
LEAST_RECENT_BINS = 6
LEAST_SPANS = 5
SURE_BINS = 12
"""Bins of a load class before its own noise is believed where it is less than usual."""
OF_MEDIAN = 1.25
"""The noise of a median, against that of a mean."""
IDLE = 0.5
"""Calls at once below which a bin is too few calls to tell a speed."""
LEAST_SCATTER = 0.005
"""Least noise of one bin."""
CLASS_BINS = 3
"""Bins of one load class before it is believed."""
LATE_BINS = 36
"""The same for a load first met after that day: a fault that came with it must not count as fresh at once."""
CLASS_MOST = 72
"""Bins (12 hours) of a load class that count as fresh."""
SLOWER = {"ttft": (0.02, 3.5), "gap": (0.015, 3.0)}
"""Least drift that a trend confirms: as a share, and in its own noise. First tokens hang on more than the node."""
MUCH_SLOWER = (0.04, 5.0)
"""Least drift that is believed without a trend."""
SURE = 3.0
"""How sure a trend has to be, in standard deviations."""
NOISE = (0.004, 0.01)
"""Least noise a node is thought to have, and that of one whose noise is not known."""
FOLLOWS = (0.01, 1.5, 0.5)
"""Once one measure of speed drifts, less is asked of the other: share, noise, and share of the first one's drift."""
BESIDE_GROWTH = (0.01, 2.0)
"""Least drift that a trend confirms while memory grows, which is a reason for it."""
HELD = (0.01, 1.5)
"""What is left of a drift that was told, for it to go on being told."""
APART = 0.5
"""It is said not to drift when it shows less than this share of what the first one does over `TREND_H`."""
RELAY = (0.02, 2.0, 0.5)
"""The same for the relay, beside the node."""

NOW_H = 0.5
"""What "now" is for load."""
KV_FULL = 0.9
PREEMPTIONS = (1.0, 0.05, 4.0)
"""Least preemptions a minute, a minute and running call, and as a multiple of the fresh node's."""
WAITING = (1.0, 0.1)
"""Least calls waiting inside the node, alone and for each that runs."""
QUEUE = (0.5, 4.0)
"""Least wait before sending in seconds, and as a multiple of the fresh node's."""
COLLAPSE = (0.1, 0.5, 1000.0)
"""Least hit ratio when fresh, the share of it that counts as collapsed, and tokens to judge by."""

RESTART_FALL = 0.6
"""Where restarts are not told, memory that falls by this share within one bin tells one."""


class Told(StrEnum):
    """What a detector found."""

    YES = "yes"
    NO = "no"
    UNKNOWN = "unknown"


class Evidence(msgspec.Struct, frozen=True):
    """One number that led to a verdict. `against` is what it was held against (None: nothing), `what` in words."""

    name: str
    value: float
    unit: str
    against: float | None = None
    what: str = ""


class Finding(NamedTuple):
    """What one detector found. `size` is drift as a share above 1, or growth in bytes an hour."""

    told: Told
    evidence: tuple[Evidence, ...] = ()
    size: float = 0.0


UNKNOWN = Finding(Told.UNKNOWN)


class Times(NamedTuple):
    """Spans of one judgement, in seconds: when the node began, the hour, and now."""

    began: float
    hour: float
    now: float

    @property
    def base(self) -> tuple[float, float]:
        """When the node was fresh."""
        begin = self.began + WARM_UP_H * self.hour
        return begin, min(begin + BASE_H * self.hour, self.now - TREND_H * self.hour)

    def fresh(self, bins: Sequence[Bin]) -> list[Bin]:
        """Bins of that time."""
        begin, end = self.base
        return [one for one in bins if begin <= one.at < end]

    def last(self, bins: Sequence[Bin], hours: float) -> list[Bin]:
        """Bins of the last hours."""
        since = max(self.began, self.now - hours * self.hour)
        return [one for one in bins if one.at >= since]


def began(bins: Sequence[Bin]) -> float:
    """When the node last began: its last restart, or the first that is known of it."""
    found = bins[0].at if bins else 0.0
    before = NAN
    for one in bins:
        fell = math.isnan(one.restarts) and one.rss_bytes < before * (1 - RESTART_FALL)
        if one.restarts > 0 or fell:
            found = one.at
        before = before if math.isnan(one.rss_bytes) else one.rss_bytes
    return found


Shown = tuple[float, float, float]
"""A time, the load then, and what was measured."""


def load_class(load: float) -> int:
    """Loads of one class are alike: each is wider than the one before by the root of two."""
    return int(2 * math.log2(1 + max(0.0, load)))


def first_of_each(shown: Sequence[Shown], day_ends: float) -> list[Shown]:
    """The first bins of each load class, in order of time: of the first day, or of a load met later once it is many."""
    met: dict[int, list[Shown]] = {}
    for one in shown:
        group = met.setdefault(load_class(one[1]), [])
        if len(group) < CLASS_MOST and (one[0] < day_ends or not group or group[0][0] >= day_ends):
            group.append(one)
    kept = (group for group in met.values() if group[0][0] < day_ends or len(group) >= LATE_BINS)
    return sorted(one for group in kept for one in group)


class Curve:
    """What a fresh node took at each load: medians of load classes, straight lines between them."""

    def __init__(self, shown: Sequence[Shown]) -> None:
        classes: dict[int, list[tuple[float, float]]] = {}
        for _, load, value in shown:
            classes.setdefault(load_class(load), []).append((load, value))
        believed = {which: group for which, group in classes.items() if len(group) >= CLASS_BINS}
        knots = {which: (median(x for x, _ in group), median(y for _, y in group)) for which, group in believed.items()}
        self._knots = sorted(knots.values())
        loads = [load for group in believed.values() for load, _ in group]
        self._range = (0.9 * min(loads) - 0.5, 1.1 * max(loads) + 0.5) if loads else (1.0, 0.0)
        scatters = {which: self._scatter(group) for which, group in believed.items()}
        usual = median(scatters.values()) if scatters else LEAST_SCATTER
        self._noise = {
            which: max(found, usual) if len(believed[which]) < SURE_BINS else found for which, found in scatters.items()
        }
        self._errors = {knots[which][0]: self._noise[which] / len(group) ** 0.5 for which, group in believed.items()}

    def shift(self, one: Shown) -> Point | None:
        """How far what was measured is off, as a logarithm, and its noise; None outside of the loads seen."""
        expected = self._at(one[1]) if self._range[0] <= one[1] <= self._range[1] else None
        if expected is None or expected <= 0:
            return None
        noisy = max(self._noise.values())
        return math.log(one[2] / expected), self._noise.get(load_class(one[1]), noisy)

    def doubt(self, loads: Sequence[float]) -> float:
        """How far the curve itself may be off at these loads, which no number of bins averages out.

        It is the error of each knot by how much that counts at these loads together. Beyond the last knot it grows with
        the distance, as the error of any straight line that is drawn on.
        """
        parts = dict.fromkeys(self._errors, 0.0)
        for load in loads:
            weighed = self._weighed(load)
            expected = sum(part * value for _, value, part in weighed)
            for at, value, part in weighed:
                parts[at] += part * value / expected / len(loads)
        return OF_MEDIAN * math.hypot(*(part * self._errors[at] for at, part in parts.items()))

    def _at(self, load: float) -> float | None:
        return sum(part * value for _, value, part in self._weighed(load)) if self._knots else None

    def _weighed(self, load: float) -> list[tuple[float, float, float]]:
        """The knots that tell what to expect at a load, each with its part; the parts add up to 1."""
        knots = self._knots
        if len(knots) < 2:
            return [(*one, 1.0) for one in knots]
        inside = [one for one in pairwise(knots) if one[0][0] <= load <= one[1][0]]
        left, right = inside[0] if inside else (knots[0], knots[-1])
        part = (load - left[0]) / (right[0] - left[0])
        return [(*left, 1.0 - part), (*right, part)]

    def _scatter(self, group: Sequence[tuple[float, float]]) -> float:
        expected = [(value, self._at(load)) for load, value in group]
        return max(LEAST_SCATTER, spread([math.log(value / told) for value, told in expected if told and told > 0]))


class Speed(NamedTuple):
    """How one measure of speed stands: logarithms of now over fresh, newest last, and the node's own noise."""

    level: float
    noise: float
    sure: float
    fresh: float
    now: float
    late: tuple[Shift, ...] = ()
    """The shifts of the last `TREND_H`, one a bin."""

    @property
    def ratio(self) -> float:
        """Now over fresh, at equal load."""
        return math.exp(self.level)

    def over(self, share: float, noises: float) -> bool:
        """Whether it is slower by that share and by so many times its noise."""
        return self.level >= max(share, noises * self.noise)


def speed(bins: Sequence[Bin], channel: str, times: Times, *, alone: bool = False) -> Speed | None:
    """How a measure of speed drifted; None without enough evidence. `alone` leaves load out: the relay's is unknown."""
    index = Bin._fields.index(channel)
    spoilt = channel == "ttft_s" and not alone
    usable = [
        (one.at, 0.0 if alone or math.isnan(one.running) else one.running, one[index])
        for one in bins
        if one[index] > 0 and (alone or not (one.running < IDLE or (spoilt and one.queued)))
    ]
    begin, since = times.base[0], times.now - TREND_H * times.hour
    early = [one for one in usable if begin <= one[0] < since]
    fresh = first_of_each(early, begin + BASE_H * times.hour)
    if len(fresh) < LEAST_BASE_BINS:
        return None
    curve = Curve(fresh)
    late = [(one, shift) for one in usable if one[0] >= since and (shift := curve.shift(one)) is not None]
    recent = [(one, shift) for one, shift in late if one[0] >= times.now - RECENT_H * times.hour]
    if len(recent) < LEAST_RECENT_BINS:
        return None
    level, chance = settled([shift for _, shift in recent])
    wander = _wander([(one[0], curve.shift(one)) for one in fresh], times.hour)
    noise = math.hypot(chance, wander, curve.doubt([one[1] for one, _ in recent]))
    now = median(one[2] for one, _ in recent)
    sure = trend([shift for _, (shift, _) in late])
    return Speed(level, noise, sure, now / math.exp(level), now, tuple((one[0], *shift) for one, shift in late))


def _wander(base: Sequence[tuple[float, Point | None]], hour: float) -> float:
    """How far the node strays by itself from one span to the next."""
    spans: dict[int, list[Point]] = {}
    for at, shift in base:
        if shift is not None:
            spans.setdefault(int(at // (RECENT_H * hour)), []).append(shift)
    means = [settled(shifts)[0] for shifts in spans.values() if len(shifts) >= CLASS_BINS]
    return max(NOISE[0], spread(means)) if len(means) >= LEAST_SPANS else NOISE[1]


class Beside(NamedTuple):
    """What else is known when a speed is judged: whether it is already held to drift, and whether memory grows."""

    held: bool = False
    growing: bool = False


def drift(found: Speed | None, name: str, lead: Speed | None = None, beside: Beside = Beside()) -> Finding:  # noqa: B008
    """Whether a measure of speed drifted. `lead` is another that did: then less is asked of this one."""
    if found is None:
        return UNKNOWN
    least = BESIDE_GROWTH if beside.growing else SLOWER[name]
    slower = found.over(*MUCH_SLOWER) or (found.over(*least) and found.sure >= SURE)
    slower = slower or (beside.held and found.over(*HELD))
    told = Told.YES if slower else Told.NO
    evidence: tuple[Evidence, ...] = (
        Evidence(f"{name}_drift_ratio", found.ratio, "x", 1.0, "itself when fresh, at equal load"),
        Evidence(f"{name}_noise", found.noise, "share", None, "what chance and its own wander explain"),
        Evidence(name, found.now, "s", found.fresh, "itself when fresh, at equal load"),
    )
    if lead is not None and not slower:
        shown = echo(lead.late, found.late)
        told = _follows(found, lead, shown)
        if shown is not None:
            what = "of the other measure's drift; with less it does not follow"
            evidence += (Evidence(f"{name}_follows", shown, "share", APART, what),)
    return Finding(told, evidence, found.ratio - 1)


def _follows(found: Speed, lead: Speed, shown: float | None) -> Told:
    """Whether a measure drifts with one that does, showing so much of it."""
    if shown is not None and shown < APART:
        return Told.NO
    return Told.YES if found.over(*FOLLOWS[:2]) and found.level >= FOLLOWS[2] * lead.level else Told.UNKNOWN


def elsewhere(relay: Speed | None, node: Speed | None) -> Finding:
    """Whether the relay drifts too, so that it is not the node."""
    if relay is None:
        return UNKNOWN
    share, noises, part = RELAY
    slower = relay.over(share, noises) and (node is None or relay.level >= part * node.level)
    evidence = (Evidence("relay_drift_ratio", relay.ratio, "x", 1.0, "the relay while the node was fresh"),)
    return Finding(Told.YES if slower else Told.NO, evidence, relay.ratio - 1)


def overload(signals: Signals, bins: Sequence[Bin], times: Times) -> Finding:
    """Whether calls wait because there are too many."""
    now = times.last(signals.fine.bins(times.now - NOW_H * times.hour), NOW_H)
    waiting, running = _usual(now, "waiting"), _usual(now, "running")
    queue = _usual(now, "queue_s")
    if waiting is None and queue is None:
        return UNKNOWN
    usual = _usual(times.fresh(bins), "queue_s")
    full = waiting is not None and waiting >= max(WAITING[0], WAITING[1] * (running or 0.0))
    late = queue is not None and queue >= max(QUEUE[0], QUEUE[1] * (usual or 0.0))
    evidence = [Evidence("running", running, "calls")] if running is not None else []
    if waiting is not None:
        evidence.append(Evidence("waiting", waiting, "calls", max(WAITING[0], WAITING[1] * (running or 0.0)), "most"))
    if queue is not None:
        evidence.append(Evidence("queue", queue, "s", usual, "itself when fresh"))
    return Finding(Told.YES if full or late else Told.NO, tuple(evidence))


def pressure(signals: Signals, bins: Sequence[Bin], times: Times) -> Finding:
    """Whether the engine throws running calls out for want of KV cache, over and over."""
    now = times.last(signals.fine.bins(times.now - NOW_H * times.hour), NOW_H)
    used, rate = _usual(now, "kv_used"), _rate(now, "preemptions", times.hour / 60)
    if used is None or rate is None:
        return UNKNOWN
    usual = _rate(times.fresh(bins), "preemptions", times.hour / 6) or 0.0
    running, waiting = _usual(now, "running") or 0.0, _usual(now, "waiting") or 0.0
    least = max(PREEMPTIONS[0], PREEMPTIONS[1] * running, PREEMPTIONS[2] * usual)
    thrash = used >= KV_FULL and rate >= least and waiting >= WAITING[0]
    evidence = (
        Evidence("kv_used", used, "share", KV_FULL, "full"),
        Evidence("preemptions", rate, "1/min", usual, "itself when fresh"),
        Evidence("waiting", waiting, "calls"),
    )
    return Finding(Told.YES if thrash else Told.NO, evidence)


def collapse(bins: Sequence[Bin], times: Times) -> Finding:
    """Whether prompts are no longer found in the prefix cache."""
    usual, now = _hits(times.fresh(bins)), _hits(times.last(bins, 1.0))
    if usual is None or now is None:
        return UNKNOWN
    fell = usual >= COLLAPSE[0] and now < COLLAPSE[1] * usual
    evidence = (Evidence("prefix_hit_ratio", now, "share", usual, "itself when fresh"),)
    return Finding(Told.YES if fell else Told.NO, evidence)


def _hits(bins: Sequence[Bin]) -> float | None:
    known = [one for one in bins if one.prefix_queries >= 0 and one.prefix_hits >= 0]
    queries = sum(one.prefix_queries for one in known)
    return sum(one.prefix_hits for one in known) / queries if queries >= COLLAPSE[2] else None


def _usual(bins: Sequence[Bin], channel: str) -> float | None:
    index = Bin._fields.index(channel)
    known = [one[index] for one in bins if not math.isnan(one[index])]
    return median(known) if known else None


def _rate(bins: Sequence[Bin], channel: str, step: float) -> float | None:
    """What a total grew by in a minute, over bins of `step` seconds."""
    index = Bin._fields.index(channel)
    known = [one[index] for one in bins if not math.isnan(one[index])]
    return sum(known) / (len(known) * step / 60) if known else None
