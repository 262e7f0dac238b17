"""What drift, slope and load of a node mean together: separate detectors, one table, one verdict.

Rules: the first row of `TABLE` that fits tells the verdict; a row asks each detector for one answer and leaves the rest
open. A verdict counts once it stood for `CONFIRM_H`, so that one odd stretch changes nothing; `Diagnosis.since` is when
it began to stand. What memory will do is told beside any verdict.
"""

from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

from router.core.detectors import (
    UNKNOWN,
    Beside,
    Evidence,
    Finding,
    Speed,
    Times,
    Told,
    began,
    collapse,
    drift,
    elsewhere,
    overload,
    pressure,
    speed,
)
from router.core.growth import growth
from router.core.signals import Signals

__all__ = ["Course", "Diagnosis", "Evidence", "Verdict", "diagnose"]

CONFIRM_H = 0.25
"""How long a verdict has to stand before it counts."""
DRIFT_H = 0.5
"""The same for a slowdown that nothing else speaks for: an hour of bad luck looks like one."""
LATELY_H = 0.5
"""How old memory may be and still be what the node has; an agent that is gone must not have it recycled for ever."""
FORGET_H = 2.0
"""How long nothing may be known before a verdict is dropped for that: an hour without calls mends nothing."""


class Verdict(StrEnum):
    """What is wrong with a node, if anything."""

    STEADY = "steady"
    OVERLOAD = "overload"
    KV_PRESSURE = "kv_pressure"
    CACHE_COLLAPSE = "cache_collapse"
    DECODE_DECAY = "decode_decay"
    MEMORY_GROWTH = "memory_growth"
    MEMORY_GROWTH_WITH_DRIFT = "memory_growth_with_drift"
    PLACEMENT_OR_NOISE = "placement_or_noise"
    NETWORK_OR_WORLD = "network_or_world"
    UNKNOWN = "unknown"


MEANING: Mapping[Verdict, str] = {
    Verdict.STEADY: "as fast as when it was fresh, and no memory grows",
    Verdict.OVERLOAD: "calls wait because there are too many; the node itself is well",
    Verdict.KV_PRESSURE: "the KV cache is full and running calls are thrown out of it, over and over",
    Verdict.CACHE_COLLAPSE: "prompts are no longer found in the prefix cache, and first tokens take longer for it",
    Verdict.DECODE_DECAY: "tokens follow each other more slowly, while prompts are read as fast as ever",
    Verdict.MEMORY_GROWTH: "memory grows; speed does not suffer yet",
    Verdict.MEMORY_GROWTH_WITH_DRIFT: "memory grows and the node slows down: local decay that a restart ends",
    Verdict.PLACEMENT_OR_NOISE: "slower at equal load while memory is flat: clocks, neighbours, placement",
    Verdict.NETWORK_OR_WORLD: "the relay slowed down too: the way, the prompts or the world, not the node",
    Verdict.UNKNOWN: "not enough is known",
}

#: The detectors, in the order of the table's columns.
DETECTORS = ("relay", "pressure", "collapse", "ttft", "gap", "memory", "load")

Row = tuple[Mapping[str, Told], Verdict]
Y, N, U = Told.YES, Told.NO, Told.UNKNOWN

TABLE: Sequence[Row] = (
    ({"relay": Y, "ttft": Y}, Verdict.NETWORK_OR_WORLD),
    ({"relay": Y, "gap": Y}, Verdict.NETWORK_OR_WORLD),
    ({"pressure": Y}, Verdict.KV_PRESSURE),
    ({"collapse": Y, "ttft": Y}, Verdict.CACHE_COLLAPSE),
    ({"memory": Y, "ttft": Y}, Verdict.MEMORY_GROWTH_WITH_DRIFT),
    ({"memory": Y, "gap": Y}, Verdict.MEMORY_GROWTH_WITH_DRIFT),
    ({"memory": Y}, Verdict.MEMORY_GROWTH),
    ({"memory": N, "ttft": Y}, Verdict.PLACEMENT_OR_NOISE),
    ({"gap": Y, "ttft": N}, Verdict.DECODE_DECAY),
    ({"gap": Y, "memory": N}, Verdict.PLACEMENT_OR_NOISE),
    ({"ttft": Y}, Verdict.UNKNOWN),
    ({"gap": Y}, Verdict.UNKNOWN),
    ({"load": Y}, Verdict.OVERLOAD),
    ({"ttft": N, "gap": N}, Verdict.STEADY),
    ({"ttft": N}, Verdict.STEADY),
    ({"gap": N}, Verdict.STEADY),
    ({}, Verdict.UNKNOWN),
)
"""What the detectors have to say, and what that means. The first row that fits counts."""

ALONE = frozenset((Verdict.PLACEMENT_OR_NOISE, Verdict.DECODE_DECAY))
"""Verdicts that rest on speed alone; which of them it is may change while the slowdown stands."""
ALARMS = frozenset(Verdict) - {Verdict.STEADY, Verdict.UNKNOWN, Verdict.OVERLOAD}
"""Verdicts that say something is wrong; overload is a matter of how much is asked."""


class Diagnosis(msgspec.Struct, frozen=True, kw_only=True):
    """What is held of a node: the verdict, since when, and the numbers that led to it.

    `began` is when the node last began, as far as is known. Times are of the clock of the samples. Ratios are now over
    fresh at equal load; None is unknown. `rss_bytes` is what memory was known of last, None if that is long ago.
    `projected_limit_s` is how many seconds of growth as it is are left before memory reaches its limit; None when no
    memory grows, or no limit is known.
    """

    verdict: Verdict = Verdict.UNKNOWN
    since: float = 0.0
    at: float = 0.0
    began: float = 0.0
    evidence: tuple[Evidence, ...] = ()
    found: Mapping[str, Told] = {}
    ttft_drift_ratio: float | None = None
    gap_drift_ratio: float | None = None
    relay_drift_ratio: float | None = None
    rss_bytes: float | None = None
    rss_slope_bytes_per_hour: float | None = None
    projected_limit_s: float | None = None


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What is known beside the signals: the most memory a node may have, and which speeds are held to drift."""

    limit_bytes: float | None = None
    drifting: frozenset[str] = frozenset()


def diagnose(signals: Signals, now: float, relay: Signals | None = None, held: Held = Held()) -> Diagnosis:  # noqa: B008
    """What the signals say at `now`, standing alone."""
    bins = signals.coarse.bins()
    times = Times(began(bins), signals.hour_s, now)
    first, gap = speed(bins, "ttft_s", times), speed(bins, "gap_s", times)
    memory = _memory([growth(bins, name, times, whole=name == "rss_bytes") for name in MEMORIES])
    findings = {
        **_drifts(first, gap, held.drifting, growing=memory.told is Y),
        "relay": _relay(relay, times, first, gap),
        "pressure": pressure(signals, bins, times),
        "collapse": collapse(bins, times),
        "memory": memory,
        "load": overload(signals, bins, times),
    }
    rows = ((row, verdict) for row, verdict in TABLE if all(findings[name].told is told for name, told in row.items()))
    row, verdict = next(rows)
    rss = growth(bins, "rss_bytes", times)
    known = rss.told is not U or bool(rss.evidence)
    has = signals.since("rss_bytes", max(times.began, now - LATELY_H * signals.hour_s))
    return Diagnosis(
        verdict=verdict,
        since=now,
        at=now,
        began=times.began,
        evidence=_evidence(row, findings),
        found={name: findings[name].told for name in DETECTORS},
        ttft_drift_ratio=first.ratio if first else None,
        gap_drift_ratio=gap.ratio if gap else None,
        relay_drift_ratio=1 + findings["relay"].size if findings["relay"].evidence else None,
        rss_bytes=has,
        rss_slope_bytes_per_hour=rss.size if known else None,
        projected_limit_s=_left(rss, has, held.limit_bytes),
    )


MEMORIES = ("rss_bytes", "gpu_bytes", "part_bytes")
"""Memory that may grow. Only the first, of the whole process tree, can be said to be flat."""


def _drifts(first: Speed | None, gap: Speed | None, held: frozenset[str], *, growing: bool) -> dict[str, Finding]:
    """Both measures of speed; once one drifts, less is asked of the other."""
    ttft = drift(first, "ttft", None, Beside("ttft" in held, growing))
    between = drift(gap, "gap", None, Beside("gap" in held, growing))
    if between.told is Y and ttft.told is N:
        ttft = drift(first, "ttft", gap)
    elif ttft.told is Y and between.told is N:
        between = drift(gap, "gap", first)
    return {"ttft": ttft, "gap": between}


def _relay(relay: Signals | None, times: Times, first: Speed | None, gap: Speed | None) -> Finding:
    """Whether the relay drifts like the node, in the same time."""
    if relay is None:
        return UNKNOWN
    bins = relay.coarse.bins()
    pairs = ((speed(bins, "ttft_s", times, alone=True), first), (speed(bins, "gap_s", times, alone=True), gap))
    found = [elsewhere(theirs, ours) for theirs, ours in pairs if theirs is not None]
    return next((one for one in found if one.told is Y), found[0] if found else UNKNOWN)


def _memory(found: Sequence[Finding]) -> Finding:
    """The first memory that grows; else what the whole tree says."""
    return next((one for one in found if one.told is Y), found[0])


def _evidence(row: Mapping[str, Told], findings: Mapping[str, Finding]) -> tuple[Evidence, ...]:
    """The numbers of the row first, then of every other detector that knows something."""
    order = (*row, *(name for name in DETECTORS if name not in row))
    return tuple(one for name in order for one in findings[name].evidence)


def _left(rss: Finding, has: float | None, limit_bytes: float | None) -> float | None:
    if rss.told is not Y or rss.size <= 0 or limit_bytes is None or has is None:
        return None
    return max(0.0, limit_bytes - has) / rss.size * 3600


class Course:
    """The verdicts of one node over time. What was wrong before a restart is not held after it."""

    __slots__ = ("_candidate", "_candidate_since", "now")

    def __init__(self) -> None:
        self.now = Diagnosis()
        self._candidate = Verdict.UNKNOWN
        self._candidate_since = 0.0

    @property
    def _alarmed(self) -> bool:
        return self.now.verdict in ALARMS

    def judge(
        self, signals: Signals, now: float, relay: Signals | None = None, limit_bytes: float | None = None
    ) -> Diagnosis:
        """The diagnosis at `now`. A new verdict counts once it stood for a while."""
        drifting = frozenset(name for name in ("ttft", "gap") if self.now.found.get(name) is Y and self._alarmed)
        fresh = diagnose(signals, now, relay, Held(limit_bytes=limit_bytes, drifting=drifting))
        if not self.now.at:
            self.now = msgspec.structs.replace(fresh, verdict=Verdict.UNKNOWN)
        if self._alarmed and fresh.began > self.now.since:
            self.now = msgspec.structs.replace(self.now, verdict=Verdict.UNKNOWN, since=fresh.began)
        if fresh.verdict is not self._candidate:
            if not {fresh.verdict, self._candidate} <= ALONE or self.now.verdict in ALONE:
                self._candidate_since = now
            self._candidate = fresh.verdict
        if fresh.verdict is self.now.verdict:
            self.now = msgspec.structs.replace(fresh, since=self.now.since)
        elif now - self._candidate_since >= self._least_h(fresh.verdict) * signals.hour_s:
            self.now = msgspec.structs.replace(fresh, since=self._candidate_since)
        else:
            self.now = msgspec.structs.replace(fresh, verdict=self.now.verdict, since=self.now.since)
        return self.now

    def _least_h(self, verdict: Verdict) -> float:
        """How long a verdict has to stand in the place of what is held now."""
        if verdict is Verdict.UNKNOWN:
            return FORGET_H
        return DRIFT_H if verdict in ALONE and self.now.verdict not in ALONE else CONFIRM_H
