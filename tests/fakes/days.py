"""Days of a node as its signals would show them: a seeded generator, one sample a minute.

Load follows the hour of the day and wanders; what calls take grows with it; medians of a minute are noisier the fewer
calls there were; the node as a whole wanders slowly by 0.3 %, which no averaging takes away. The node starts
at hour 0, cold, and its memory fills over the first hours.
"""

import math
import random
from collections.abc import Iterator
from dataclasses import dataclass, replace

from router.core.drift import Course, Diagnosis
from router.core.signals import Sample, Signals

GIB = 2**30
SLOTS = 16.0
LIMIT = 64.0 * GIB


@dataclass(frozen=True, kw_only=True)
class Day:
    """What happens. Faults begin at hour `onset`."""

    seed: int
    hours: float = 38.0
    onset: float = 30.0
    decay: float = 0.0
    """Share of speed that is lost over 36 hours, evenly."""
    ttft_decay: bool = True
    leak_gib_h: float = 0.0
    busier: float = 1.0
    thrash: bool = False
    hit_ratio: float = 0.5
    """Hit ratio from the onset on; 0.5 before."""
    relay_slower: float = 0.0
    """Share by which the relay and the node both slow down at the onset."""
    relay_alone: float = 0.0
    """Share by which the relay slows down at the onset, and the node does not."""
    fills_h: float = 1.0
    """How fast memory fills after the start, as a time constant; it fills by 8 GiB."""
    tooth_h: float = 0.0
    """Memory rises by 6 GiB and falls again, this often."""
    memory: bool = True
    quiet: float = 7.0
    """Calls at once in the mean; at night some 2 are left, which batch keeps going."""


class _Wander:
    """A slow walk that comes back to 0."""

    def __init__(self, chance: random.Random, size: float, minutes: float) -> None:
        self._chance, self._keep, self.value = chance, math.exp(-1 / minutes), 0.0
        self._kick = size * math.sqrt(1 - self._keep**2)

    def step(self) -> float:
        self.value = self.value * self._keep + self._chance.gauss(0, self._kick)
        return self.value


def samples(day: Day) -> Iterator[tuple[Sample, Sample | None]]:
    """The node's sample of each minute, and the relay's every fifth."""
    chance = random.Random(day.seed)
    own, world, burst = _Wander(chance, 0.003, 180), _Wander(chance, 0.003, 120), _Wander(chance, 1.5, 20)
    memory, phase = _Wander(chance, 0.001, 30), chance.uniform(-2, 2)
    totals = {"preemptions": 0.0, "prefix_queries": 0.0, "prefix_hits": 0.0}
    for minute in range(int(day.hours * 60)):
        hour = minute / 60
        bad = hour >= day.onset
        wanted = day.quiet + 4.5 * math.sin(2 * math.pi * (hour - 9 + phase) / 24) + burst.step()
        wanted = max(0.1, wanted) * (day.busier if bad else 1.0)
        if day.thrash and bad:
            wanted += 20
        running, waiting = min(wanted, SLOTS), max(0.0, wanted - SLOTS)
        calls = sum(chance.random() < wanted / 10 for _ in range(30))
        slow = 1 / (1 - day.decay * min(1.0, max(0.0, hour - day.onset) / 36)) * math.exp(own.step())
        slow *= (1 + day.relay_slower if bad else 1.0) * (3.0 if hour < 0.3 else 1.0)
        ratio = day.hit_ratio if bad else 0.5
        cold = (1 - ratio) / 0.5
        full = min(1.0, 0.05 + wanted / 18)
        thrashing = day.thrash and bad
        totals["preemptions"] += calls * (1.5 if thrashing else 0.02 * (full > 0.8))
        totals["prefix_queries"] += 800 * calls
        totals["prefix_hits"] += 800 * calls * ratio * chance.uniform(0.8, 1.2)
        gap = 0.022 * (1 + 0.025 * running) * slow * (1.6 if thrashing else 1.0)
        first = 0.0004 * (1 + 0.04 * running) * (slow if day.ttft_decay else math.exp(own.value)) * cold
        rss = 22 * GIB + 8 * GIB * (1 - math.exp(-hour / day.fills_h)) + day.leak_gib_h * GIB * max(0, hour - day.onset)
        rss += 6 * GIB * ((hour / day.tooth_h) % 1.0) if day.tooth_h else 0.0
        seen = calls > 0
        few = 1 / math.sqrt(max(1, calls))
        waits = waiting * 2.0
        node = Sample(
            at=minute * 60.0,
            ttft_s=first * math.exp(chance.gauss(0, 0.35 * few)) + waits / 500 if seen else None,
            queue_s=abs(chance.gauss(0, 0.01)) + (waits if waiting > 0 else 0.0) if seen else None,
            gap_s=gap * math.exp(chance.gauss(0, 0.10 * few)) if seen else None,
            tokens_per_s=1 / gap if seen else None,
            errors=0,
            kv_used=full,
            rss_bytes=rss * (1 + memory.step()) if day.memory else None,
            running=running,
            waiting=waiting,
            restarts=0,
            **totals,
        )
        drift = (1 + day.relay_slower + day.relay_alone if bad else 1.0) * math.exp(world.step())
        relay = Sample(
            at=minute * 60.0,
            ttft_s=0.006 * drift * math.exp(chance.gauss(0, 0.08)),
            gap_s=0.015 * drift * math.exp(chance.gauss(0, 0.05)),
        )
        yield node, relay if minute % 5 == 0 else None


def verdicts(day: Day, *, since_h: float = 0.0, every_min: int = 10, relay: bool = True) -> Iterator[Diagnosis]:
    """The diagnosis every ten minutes from hour `since_h` on."""
    signals, control, course = Signals(), Signals(), Course()
    for minute, (node, other) in enumerate(samples(day)):
        signals.add(node)
        if other is not None:
            control.add(other)
        if minute % every_min == 0 and minute >= since_h * 60:
            yield course.judge(signals, node.at, control if relay else None, LIMIT)


DECAY = Day(seed=0, decay=0.18, leak_gib_h=0.25)
FAULTS = {
    "memory_growth_with_drift": DECAY,
    "placement_or_noise": replace(DECAY, leak_gib_h=0.0),
    "decode_decay": replace(DECAY, leak_gib_h=0.0, ttft_decay=False),
    "memory_growth": Day(seed=0, leak_gib_h=0.25),
    "overload": Day(seed=0, busier=6.0),
    "kv_pressure": Day(seed=0, thrash=True),
    "cache_collapse": Day(seed=0, hit_ratio=0.05),
    "network_or_world": Day(seed=0, relay_slower=0.3),
}
"""Faults by the verdict they should have."""
