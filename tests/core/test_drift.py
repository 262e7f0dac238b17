"""Verdicts over days of a node: the right one soon after a fault begins, and none where there is none."""

import random
from dataclasses import replace

import pytest

from router.core.detectors import Curve, Evidence, Told, began
from router.core.drift import ALARMS, DETECTORS, TABLE, Course, Diagnosis, Verdict, diagnose
from router.core.signals import Sample, Signals
from tests.fakes.days import DECAY, FAULTS, LIMIT, Day, samples, verdicts

HOUR = 3600.0
RIGHT_WITHIN_H = 6.0


def after_onset(day: Day, **options) -> list[tuple[float, Diagnosis]]:
    """Hours since the onset and what was held then, up to the bound."""
    short = replace(day, hours=day.onset + RIGHT_WITHIN_H + 0.1)
    held = list(verdicts(short, since_h=day.onset - 1, every_min=20, **options))
    before = [one.verdict for one in held if one.at < day.onset * HOUR]
    assert not ALARMS & set(before)
    assert before[-1] is Verdict.STEADY
    return [(one.at / HOUR - day.onset, one) for one in held if one.at >= day.onset * HOUR]


@pytest.mark.parametrize("name", FAULTS)
def test_the_verdict_is_right_within_six_hours(name):
    held = after_onset(replace(FAULTS[name], seed=2))
    right = [at for at, one in held if one.verdict == name]
    assert right
    assert min(right) <= RIGHT_WITHIN_H
    last = next(one for _, one in reversed(held) if one.verdict == name)
    assert last.since >= FAULTS[name].onset * HOUR
    assert last.evidence


def test_tokens_that_slow_down_alone_are_told_from_a_node_that_does():
    """First tokens are too noisy to say within hours that they stood still; whether they follow shows sooner."""
    told = dict.fromkeys(("decode_decay", "placement_or_noise"), 0)
    for name in told:
        for seed in range(20, 25):
            *_, last = verdicts(replace(FAULTS[name], seed=seed, hours=37.1), since_h=34, every_min=20)
            told[name] += last.verdict == name
    assert min(told.values()) >= 4


@pytest.mark.parametrize("seed", [3, 4])
def test_other_nodes_decay_like_the_first(seed):
    held = after_onset(replace(DECAY, seed=seed))
    assert held[-1][1].verdict is Verdict.MEMORY_GROWTH_WITH_DRIFT
    told = {one.name: one for one in held[-1][1].evidence}
    assert told["rss_bytes_slope"].value == pytest.approx(0.25 * 2**30, rel=0.2)
    assert told["gap_drift_ratio"].value == pytest.approx(1.03, abs=0.02)
    assert told["rss_bytes"].unit == "bytes"


@pytest.mark.parametrize(
    "day",
    [
        Day(seed=5),
        Day(seed=6, busier=2.0),
        Day(seed=7, fills_h=3.0, onset=99),
        Day(seed=8, tooth_h=1.5, onset=99),
        Day(seed=9, memory=False),
    ],
    ids=["plain", "doubled", "warm-up", "sawtooth", "no agent"],
)
def test_load_alone_is_no_fault(day):
    held = [one.verdict for one in verdicts(day, every_min=30)]
    assert not ALARMS & set(held), "a false alarm"
    assert Verdict.STEADY in held


def test_a_slow_relay_is_not_held_against_the_node():
    """It is three times as slow as it was, and a node that is as fast as ever is steady."""
    held = list(verdicts(Day(seed=2, relay_alone=2.0, hours=38.0), since_h=29, every_min=20))
    assert not ALARMS & {one.verdict for one in held}
    assert held[-1].verdict is Verdict.STEADY
    assert held[-1].relay_drift_ratio == pytest.approx(3.0, rel=0.1)
    assert held[-1].ttft_drift_ratio == pytest.approx(1.0, abs=0.03)
    assert held[-1].found["relay"] is Told.YES


def test_a_load_that_was_hardly_met_is_not_judged():
    """Nights are all it knows when the day begins; one busy stretch among them does not say what is usual then."""
    nights = [(float(at), load, 0.02 * (1 + 0.025 * load)) for at, load in enumerate((1.3, 2.2, 3.4) * 6)]
    curve = Curve([*nights, (18.0, 8.5, 0.03)])
    assert curve.shift((20.0, 3.6, 0.03)) is not None
    assert curve.shift((20.0, 8.4, 0.03)) is None


def test_what_is_drawn_on_beyond_what_was_met_is_doubted():
    chance = random.Random(1)
    shown = [(float(at), load, chance.gauss(1.0, 0.03)) for at, load in enumerate((1.3, 2.2, 3.4) * 6)]
    curve = Curve(shown)
    inside, edge, beyond = (curve.doubt([load] * 9) for load in (2.2, 3.4, 4.2))
    assert 0.002 < inside < edge * 1.5
    assert beyond > 1.3 * edge
    assert curve.doubt([1.3, 2.2, 3.4]) < max(curve.doubt([load]) for load in (1.3, 2.2, 3.4)), "errors of knots differ"


def test_the_first_morning_of_a_node_is_no_fault():
    """Its load rises past all it met in the night, with bad luck besides."""
    day = Day(seed=8009, hours=14.0, onset=99.0)
    assert not ALARMS & {one.verdict for one in verdicts(day, since_h=9)}


def test_a_restart_begins_anew():
    signals, course = Signals(), Course()
    for node, _ in samples(replace(DECAY, hours=48, seed=1)):
        signals.add(node)
    assert diagnose(signals, 48 * HOUR).verdict is Verdict.MEMORY_GROWTH_WITH_DRIFT
    for hours in (47.9, 48.2):
        held = course.judge(signals, hours * HOUR)
    assert held.verdict is Verdict.MEMORY_GROWTH_WITH_DRIFT
    signals.add(Sample(at=48 * HOUR, restarts=1, rss_bytes=2**30))
    signals.add(Sample(at=48.5 * HOUR, restarts=1, rss_bytes=2**30))
    assert began(signals.coarse.bins()) == 48 * HOUR
    assert diagnose(signals, 48.5 * HOUR).verdict is Verdict.UNKNOWN
    held = course.judge(signals, 48.5 * HOUR)
    assert (held.verdict, held.rss_bytes) == (Verdict.UNKNOWN, 2**30), "at once: it is another process"


def test_memory_that_was_known_long_ago_is_not_what_a_node_has():
    signals = Signals()
    signals.add(Sample(at=0.0, rss_bytes=2e9))
    assert diagnose(signals, 0.4 * HOUR).rss_bytes == 2e9
    assert diagnose(signals, 0.6 * HOUR).rss_bytes is None


def test_a_fall_of_memory_tells_a_restart_where_none_is_told():
    signals = Signals()
    for minute in range(120):
        signals.add(Sample(at=minute * 60.0, rss_bytes=30e9 if minute < 60 else 5e9))
    assert began(signals.coarse.bins()) == HOUR


def test_memory_that_is_not_known_is_not_flat():
    """Drift without memory says only half of it."""
    signals, course = Signals(), Course()
    for node, _ in samples(replace(DECAY, hours=42, seed=1, memory=False, decay=0.5)):
        signals.add(node)
    held = course.judge(signals, 42 * HOUR)
    assert (held.verdict, held.found["memory"], held.rss_bytes) == (Verdict.UNKNOWN, Told.UNKNOWN, None)
    assert held.ttft_drift_ratio > 1.1
    assert any(one.name == "ttft_drift_ratio" for one in held.evidence)


def test_growth_of_a_part_is_growth_and_its_rest_is_nothing():
    for leak, verdict in ((0.5, Verdict.MEMORY_GROWTH), (0.0, Verdict.STEADY)):
        signals = Signals()
        for node, _ in samples(Day(seed=1, leak_gib_h=leak)):
            part = Sample(at=node.at, gap_s=node.gap_s, running=node.running, part_bytes=node.rss_bytes)
            signals.add(part)
        held = diagnose(signals, 38 * HOUR)
        assert held.verdict is verdict
        assert held.found["memory"] is (Told.YES if leak else Told.UNKNOWN)


def test_the_time_left_until_a_limit():
    held = None
    signals, course = Signals(), Course()
    for node, _ in samples(Day(seed=1, leak_gib_h=1.0)):
        signals.add(node)
    held = course.judge(signals, 38 * HOUR, None, LIMIT)
    left = (LIMIT - held.rss_bytes) / 2**30
    assert held.projected_limit_s == pytest.approx(left * HOUR, rel=0.1)
    assert course.judge(signals, 38 * HOUR).projected_limit_s is None


def test_nothing_known_is_unknown():
    held = diagnose(Signals(), 0.0)
    assert held.verdict is Verdict.UNKNOWN
    assert held.evidence == ()
    assert set(held.found) == set(DETECTORS)


def test_one_odd_stretch_changes_nothing():
    signals, course = Signals(), Course()
    for minute in range(60 * 12):
        late = minute == 60 * 12 - 1
        signals.add(Sample(at=minute * 60.0, gap_s=0.02, running=4, waiting=50 if late else 0))
    assert course.judge(signals, 11.5 * HOUR).verdict is Verdict.UNKNOWN
    before = course.judge(signals, 12 * HOUR)
    for minute in range(40):
        signals.add(Sample(at=12 * HOUR + minute * 60.0, gap_s=0.02, running=4, waiting=50))
        held = course.judge(signals, 12 * HOUR + minute * 60.0)
        if minute < 15:
            assert held.verdict is Verdict.STEADY
    assert before.verdict is Verdict.STEADY
    assert held.verdict is Verdict.OVERLOAD
    assert 12 * HOUR + 10 * 60 < held.since < 12 * HOUR + 30 * 60
    assert Evidence("waiting", 50.0, "calls", 1.0, "most") in held.evidence


def test_every_verdict_has_a_row_and_every_row_a_detector():
    assert {verdict for _, verdict in TABLE} == set(Verdict)
    assert {name for row, _ in TABLE for name in row} == set(DETECTORS)
    assert TABLE[-1] == ({}, Verdict.UNKNOWN)
