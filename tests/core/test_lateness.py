"""When a batch is late."""

import pytest

from router.core.lateness import LateTerms, Standing, Standings, late

TERMS = LateTerms(last_share=0.25, within_s=900)
NOW = 1_000_000.0
HOUR = 3600.0


def batch(left_s, left=100, window_s=24 * HOUR, name="b"):
    return Standing(batch_id=name, model="m", expires_at=NOW + left_s, window_s=window_s, left=left)


def is_late(*batches, done=0, terms=TERMS):
    return [one.batch_id for one in late(Standings(now=NOW, batches=batches, done=done), terms)]


@pytest.mark.parametrize(
    ("left_s", "left", "done", "told"),
    [
        (20 * HOUR, 10**6, 1, False),  # hopeless, and much too early to know
        (5 * HOUR, 10_000, 60, False),  # 10,000 s of work in 18,000 s
        (5 * HOUR, 20_000, 60, True),  # 20,000 s of work
        (5 * HOUR, 20_000, 0, False),  # nothing moved: nothing is known
        (900, 1, 6000, True),  # the bound, whatever the pace
        (901, 1, 6000, False),
        (-1, 1, 6000, True),
        (900, 0, 0, False),  # nothing left to do
    ],
)
def test_pace_and_bound(left_s, left, done, told):
    assert bool(is_late(batch(left_s, left), done=done)) is told


def test_a_short_window_is_not_late_from_its_start():
    assert not is_late(batch(300, window_s=300))
    assert is_late(batch(75, window_s=300))


def test_what_goes_first_counts():
    first, second = batch(5 * HOUR, 10_000, name="a"), batch(5.5 * HOUR, 10_000, name="b")
    assert is_late(first, second, done=60) == ["b"]
    assert is_late(second, first, done=60) == ["a"]
    assert is_late(first, second, done=120) == []
