"""Which batches are late: so near the end of their window that help from outside is due.

Rules:
- Only in the last part of its window a batch can be late: a pace measured over a minute says little about a night.
- There it is late when the pace would not get it done in time, those that go first included, or when less than a
  bound is left, whatever the pace. A pace of nothing tells nothing: then only the bound counts.
- The pace of the last minute includes what help has done, so help stops when it is not needed any more.
"""

from collections.abc import Sequence

import msgspec


class Standing(msgspec.Struct, frozen=True, kw_only=True):
    """A batch in progress with `left` lines to do. `model` is None when its lines ask for several."""

    batch_id: str
    model: str | None
    expires_at: float
    window_s: float
    left: int


class Standings(msgspec.Struct, frozen=True, kw_only=True):
    """Batches in the order they are served, at `now`; `done` lines of any batch ended in the last `pace_s` seconds."""

    now: float
    batches: Sequence[Standing]
    done: int
    pace_s: float = 60.0


class LateTerms(msgspec.Struct, frozen=True, kw_only=True):
    """The last part of a window, and the seconds left, in which a batch may be late, or is."""

    last_share: float
    within_s: float


def late(standings: Standings, terms: LateTerms) -> list[Standing]:
    """The batches that are late."""
    found, ahead = [], 0
    for batch in standings.batches:
        ahead += batch.left
        left_s = batch.expires_at - standings.now
        if batch.left and left_s <= terms.last_share * batch.window_s:
            too_slow = bool(standings.done) and ahead * standings.pace_s / standings.done > left_s
            if too_slow or left_s <= terms.within_s:
                found.append(batch)
    return found
