"""What two scrapes of a router tell together: rates, quantiles, and levels now.

Rules: a counter that fell was begun anew, so all of it is new; what is not there is None, never zero.
"""

import math
from collections import defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from prometheus_client.parser import text_string_to_metric_families

__all__ = ["Between", "Scrape"]

PREFIX = "ebbtide_"
Labels = Mapping[str, str]


@dataclass(frozen=True)
class Scrape:
    """Samples by name (without prefix), each with its labels. `at` is seconds of any steady clock."""

    at: float
    samples: Mapping[str, list[tuple[Labels, float]]] = field(default_factory=dict)

    @classmethod
    def read(cls, text: str, at: float) -> "Scrape":
        """From the text form. Raises ValueError when it is none."""
        found: dict[str, list[tuple[Labels, float]]] = defaultdict(list)
        for family in text_string_to_metric_families(text):
            for sample in family.samples:
                found[sample.name.removeprefix(PREFIX)].append((sample.labels, sample.value))
        return cls(at, found)

    def of(self, name: str, **match: str) -> Iterator[tuple[Labels, float]]:
        """Samples with these label values."""
        for labels, value in self.samples.get(name, ()):
            if all(labels.get(key) == wanted for key, wanted in match.items()):
                yield labels, value

    def one(self, name: str, **match: str) -> float | None:
        """The sum of such samples; None when there is none."""
        values = [value for _, value in self.of(name, **match)]
        return sum(values) if values else None

    def values(self, name: str, label: str) -> list[str]:
        """The values of a label, in order of their first sample."""
        return list(dict.fromkeys(labels[label] for labels, _ in self.of(name) if label in labels))


@dataclass(frozen=True)
class Between:
    """What happened from one scrape to a later one. Against an empty scrape: since the router's start."""

    before: Scrape
    after: Scrape

    def grown(self, name: str, by: str | None = None, **match: str) -> dict[str, float]:
        """How much counters grew, by the value of a label (all under "" without one)."""
        old = {frozenset(labels.items()): value for labels, value in self.before.of(name, **match)}
        sums: dict[str, float] = defaultdict(float)
        for labels, value in self.after.of(name, **match):
            was = old.get(frozenset(labels.items()), 0.0)
            sums["" if by is None else labels.get(by, "")] += value - was if value >= was else value
        return sums

    def quantile(self, share: float, name: str, **match: str) -> float | None:
        """Of a histogram's new values, between the bounds of its buckets; the last bound when above it."""
        grown = self.grown(f"{name}_bucket", "le", **match)
        bounds = sorted((float(bound), count) for bound, count in grown.items())
        if not bounds or bounds[-1][1] <= 0:
            return None
        rank, low, below = share * bounds[-1][1], 0.0, 0.0
        for bound, count in bounds:
            if count >= rank:
                if math.isinf(bound):
                    return low
                return low + (bound - low) * (rank - below) / max(count - below, 1e-9)
            low, below = bound, count
        return low
