"""What the dashboard's snapshot tells beside a scrape: causes, estimates, drift, events.

Rules: the snapshot is another router's and may be of another version, so whatever is not as expected is as if it were
not there.
"""

from collections.abc import Iterator, Mapping
from typing import Any

__all__ = ["State"]

MOST_EVENTS, MOST_TAKE_BACKS = 8, 3
GOOD = frozenset(("ready",))


class State:
    """One state. Empty where there is none."""

    def __init__(self, told: object = None) -> None:
        self._told: Mapping[str, Any] = told if isinstance(told, dict) else {}

    def node(self, name: str) -> Mapping[str, Any]:
        """A node's card."""
        return _part(_part(self._told, "nodes"), name)

    def drift(self, name: str) -> float | None:
        """A node's first tokens against its fresh self, as a share above it."""
        return _number(_part(self.node(name), "trend").get("ttft_drift"))

    def growth(self, name: str) -> float | None:
        """Bytes an hour by which a node's memory grows."""
        return _number(_part(self.node(name), "trend").get("rss_bytes_an_hour"))

    def engine(self, name: str) -> str:
        """What a node is, and its context in thousands of tokens."""
        card = self.node(name)
        context = _number(card.get("context"))
        return f"{card.get('engine', '-')}{'' if context is None else f' {context / 1024:.0f}k'}"

    def trouble(self, name: str) -> str:
        """What is wrong with a node, in words; empty if nothing is."""
        card = self.node(name)
        said = [str(one) for one in (card.get("trouble"), _part(card, "trend").get("verdict")) if one]
        if card.get("state") not in GOOD and not said and card.get("cause"):
            said.append(str(card["cause"]))
        return "; ".join(said)

    def batch(self, name: str) -> tuple[int | None, float | None]:
        """How often lines of a batch were taken back, and when it will be done, unix seconds."""
        row = _part(_part(self._told, "batches"), name)
        taken = row.get("taken_back")
        return (taken if isinstance(taken, int) else None), _number(row.get("ends_at"))

    def ends_at(self) -> float | None:
        """When all lines left are done, unix seconds."""
        return _number(_part(self._told, "queue").get("ends_at"))

    def canary(self) -> tuple[float, float] | None:
        """The relay's first token for the same small call, and its spread, in seconds."""
        told = _part(_part(self._told, "relay"), "canary")
        first, spread = _number(told.get("ttft_s")), _number(told.get("spread_s"))
        return None if first is None or spread is None else (first, spread)

    def events(self) -> list[tuple[float, str]]:
        """What happened last, oldest first: unix seconds and words. Take-backs leave room for the rest."""
        rows = sorted(self._events())
        takes = [row for row in rows if row[2]][-MOST_TAKE_BACKS:]
        rest = [row for row in rows if not row[2]][-(MOST_EVENTS - len(takes)) :]
        return [(at, text) for at, text, _ in sorted(takes + rest)]

    def _events(self) -> Iterator[tuple[float, str, bool]]:
        for row in _part(self._told, "events").values():
            if isinstance(row, list) and len(row) > 3 and isinstance(row[0], int | float):
                yield float(row[0]), f"{row[3]}: {row[2]}" if row[3] else str(row[2]), row[1] == "take_back"


def _part(told: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    part = told.get(name)
    return part if isinstance(part, dict) else {}


def _number(value: object) -> float | None:
    return float(value) if isinstance(value, int | float) and not isinstance(value, bool) else None
