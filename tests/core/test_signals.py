"""Rings: what a bin holds, what is forgotten, what is unknown; and the statistics over them."""

import math
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.robust import echo, median, never_left, settled, slope, spread, thinned, trend
from router.core.signals import Bin, Ring, Sample, Signals


def test_a_bin_holds_means_and_growth_of_totals():
    signals = Signals()
    for second, running, preemptions in ((0, 2, 100), (20, 4, 103), (40, None, 104), (60, 9, 110), (120, 1, 110)):
        signals.add(Sample(at=float(second), running=running, preemptions=preemptions, errors=1))
    first, second = signals.fine.bins()
    assert (first.at, first.running, first.preemptions, first.errors) == (0.0, 3.0, 4.0, 3.0)
    assert (second.at, second.running, second.preemptions) == (60.0, 9.0, 6.0)
    assert math.isnan(first.rss_bytes), "unknown is not zero"
    assert signals.latest["preemptions"] == 110


def test_a_total_that_falls_began_anew():
    signals = Signals()
    for minute, total in enumerate((500, 600, 7, 9, 9)):
        signals.add(Sample(at=minute * 60.0, prefix_hits=total))
    grown = [one.prefix_hits for one in signals.fine.bins()]
    assert math.isnan(grown[0])
    assert grown[1:] == [100, 7, 2]


def test_a_clock_set_back_spoils_nothing():
    signals = Signals()
    for at in (600.0, 660.0, 10.0, 720.0):
        signals.add(Sample(at=at, running=at))
    assert [(one.at, one.running) for one in signals.fine.bins()] == [(600.0, 600.0), (660.0, 660.0)]


def test_what_is_not_finite_is_unknown():
    signals = Signals()
    signals.add(Sample(at=0.0, rss_bytes=math.inf, kv_used=math.nan))
    signals.add(Sample(at=60.0))
    assert math.isnan(signals.fine.bins()[0].rss_bytes)
    assert signals.latest == {}


def test_old_bins_are_forgotten_and_gaps_stay_gaps():
    ring = Ring(60.0, 5)
    width = len(Bin._fields) - 1
    for minute in (0, 1, 2, 5, 6, 7):
        ring.add(minute * 60.0, [float(minute)] * width)
    assert [one.at / 60 for one in ring.bins()] == [2, 5, 6]
    assert [one.at / 60 for one in ring.bins(since=300.0)] == [5, 6]
    ring.add(60.0 * 1000, [1.0] * width)
    assert ring.bins() == []


def test_a_node_takes_no_more_memory_than_is_said():
    """88 kB a node, whatever comes."""
    signals = Signals()
    for minute in range(3000):
        signals.add(Sample(at=minute * 60.0, running=1.0))
    rings = (signals.fine, signals.coarse)
    assert sum(sys.getsizeof(channel) for ring in rings for channel in (*ring._values, ring._stamps)) < 100_000


@given(st.floats(-1e3, 1e3), st.floats(-1e6, 1e6), st.integers(2, 200))
def test_the_slope_of_a_line_is_found_however_many_points(rise, start, count):
    points = [(float(at), start + rise * at) for at in range(count)]
    assert len(thinned(points)) <= 60
    assert slope(points) == pytest.approx(rise, abs=1e-6 * (1 + abs(start)))


def test_odd_values_do_not_move_a_slope():
    points = [(float(at), 2.0 * at + (1e6 if at % 5 == 0 else 0)) for at in range(50)]
    assert slope(points) == pytest.approx(2.0, rel=0.1)


@given(st.lists(st.floats(-1e9, 1e9), min_size=1, max_size=50))
def test_statistics_never_raise(values):
    assert min(values) <= median(values) <= max(values)
    assert spread(values) >= 0
    assert never_left(values)[0] == min(values)
    assert settled([(value, 1.0) for value in values])[1] == pytest.approx(len(values) ** -0.5)
    assert math.isfinite(trend(values))
    assert slope([(1.0, value) for value in values]) == 0.0


def test_a_trend_is_a_trend():
    assert trend([float(at) for at in range(36)]) > 7
    assert trend([1.0] * 36) == 0
    assert trend([float(at % 2) for at in range(36)]) < 1


def test_how_much_of_a_rise_another_series_shows():
    rise = [(float(at), at / 10, 0.1) for at in range(36)]
    assert echo(rise, rise) == pytest.approx(1, abs=0.02)
    assert echo(rise, [(at, value / 4, 0.1) for at, value, _ in rise]) == pytest.approx(0.25, abs=0.02)
    assert echo(rise, [(at, 0.0, 0.1) for at, _, _ in rise[::3]]) == pytest.approx(0, abs=1e-9), "where both are known"
    odd = [(at, 100.0 if at == 35 else 0.0, 0.1) for at, _, _ in rise]
    assert echo(rise, odd) < 0.1, "one odd value says little"
    assert echo(rise, [(at + 0.5, value, 0.1) for at, value, _ in rise]) is None
    assert echo([(at, -value, 0.1) for at, value, _ in rise], rise) is None, "the first did not rise"
