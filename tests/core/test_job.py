"""States as a table, and whose turn it is."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.job import (
    BATCH_FINAL,
    BATCH_TRANSITIONS,
    JOB_FINAL,
    JOB_TRANSITIONS,
    BatchEvent,
    BatchState,
    JobEvent,
    JobState,
    Ready,
    job_order,
    nearness,
    request_id,
    retry_delay_s,
    share,
    sources,
    urgency,
    window_seconds,
)

NOW = 1_800_000_000.0


def test_final_states_are_openais() -> None:
    assert {"completed", "failed", "expired", "cancelled"} == BATCH_FINAL
    assert {"done", "failed", "expired", "cancelled"} == JOB_FINAL


def test_every_state_and_event_is_in_the_tables() -> None:
    assert set(BATCH_TRANSITIONS) == set(BatchState)
    assert set(JOB_TRANSITIONS) == set(JobState)
    assert {event for moves in BATCH_TRANSITIONS.values() for event in moves} == set(BatchEvent)
    assert {event for moves in JOB_TRANSITIONS.values() for event in moves} == set(JobEvent)


@pytest.mark.parametrize("state", BatchState)
def test_every_batch_can_end(state: BatchState) -> None:
    seen, rest = set(), {state}
    while rest:
        now = rest.pop()
        seen.add(now)
        rest |= set(BATCH_TRANSITIONS[now].values()) - seen
    assert seen & BATCH_FINAL


def test_what_can_be_cancelled() -> None:
    assert set(sources(BatchEvent.CANCEL)) == {BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING}


@pytest.mark.parametrize(("window", "seconds"), [("24h", 86400), ("5m", 300), ("14d", 1209600), ("90m", 5400)])
def test_windows(window: str, seconds: int) -> None:
    assert window_seconds(window) == seconds


@pytest.mark.parametrize(
    "window", ["", "4m", "15d", "0h", "24", "h", "24H", " 24h", "24h ", "24h\n", "-5m", "1.5h", "٢٤h", "9" * 400 + "m"]
)
def test_other_windows_are_refused(window: str) -> None:
    with pytest.raises(ValueError, match="24h") as refused:
        window_seconds(window)
    assert len(str(refused.value)) < 200


@given(st.integers(1, 10**6), st.floats(0, 1, exclude_max=True))
def test_retries_wait_longer_and_are_bounded(attempt: int, unit: float) -> None:
    assert 0.5 <= retry_delay_s(attempt, unit) <= 300.0
    assert retry_delay_s(attempt, unit) <= retry_delay_s(attempt + 1, unit)


def test_priority_is_a_nearer_deadline() -> None:
    assert urgency(NOW, 0) == NOW
    assert urgency(NOW, 2) == NOW - 7200
    assert urgency(NOW, -1) > NOW


@pytest.mark.parametrize(("left_s", "near"), [(-1e9, 0), (0, 0), (59, 0), (60, 1), (120, 2), (3600, 6), (86400, 11)])
def test_deadlines_are_classed_by_doubling(left_s: float, near: int) -> None:
    assert nearness(NOW + left_s, NOW) == near


def test_order_inside_a_batch() -> None:
    lines = [(7, 10, 1), (-5, 10, 2), (7, 99, 3), (-5, 20, 4), (-5, 20, 5)]
    assert sorted(lines, key=lambda line: job_order(*line)) == [lines[3], lines[4], lines[1], lines[2], lines[0]]


def test_a_request_id_is_the_same_each_time() -> None:
    assert request_id("batch_a", 1) == request_id("batch_a", 1)
    assert len({request_id(batch, line) for batch in ("batch_a", "batch_b") for line in range(1000)}) == 2000
    assert len(request_id("batch_a", 1)) == len("batch_req_") + 24


def ready(number: int, caller: str, left_s: float, lines: int = 10) -> Ready:
    return Ready(number=number, caller=caller, urgency=NOW + left_s, lines=lines)


def test_the_near_deadline_is_served_whole_before_the_far_one() -> None:
    assert share([ready(1, "a", 86400), ready(2, "a", 600, 3)], {}, 5, NOW) == {2: 3, 1: 2}
    assert list(share([ready(1, "a", 86400), ready(2, "a", 600, 3)], {}, 5, NOW)) == [2, 1]


def test_callers_with_equally_near_deadlines_share() -> None:
    batches = [ready(1, "a", 86400), ready(2, "a", 86401), ready(3, "b", 86402), ready(4, "c", 86403, 1)]
    assert share(batches, {}, 7, NOW) == {1: 3, 3: 3, 4: 1}
    assert share(batches, {"a": 5}, 5, NOW) == {3: 4, 4: 1}


@given(
    st.lists(st.tuples(st.sampled_from("abc"), st.integers(-100, 10**6), st.integers(1, 9)), max_size=12),
    st.dictionaries(st.sampled_from("abc"), st.integers(0, 20)),
    st.integers(0, 60),
)
def test_shares_use_the_limit_and_no_more(
    told: list[tuple[str, int, int]], running: dict[str, int], limit: int
) -> None:
    batches = [ready(number, caller, left, lines) for number, (caller, left, lines) in enumerate(told)]
    shares = share(batches, running, limit, NOW)
    there = {batch.number: batch for batch in batches}
    assert sum(shares.values()) == min(limit, sum(batch.lines for batch in batches))
    assert all(0 < lines <= there[number].lines for number, lines in shares.items())
    order = [nearness(there[number].urgency, NOW) for number in shares]
    assert order == sorted(order)


@given(st.lists(st.tuples(st.sampled_from("abc"), st.integers(1, 9)), max_size=12), st.integers(0, 60))
def test_among_equally_near_nobody_who_waits_is_two_behind(told: list[tuple[str, int]], limit: int) -> None:
    batches = [ready(number, caller, 86400, lines) for number, (caller, lines) in enumerate(told)]
    shares = share(batches, {}, limit, NOW)
    given_, left = Counter[str](), Counter[str]()
    for batch in batches:
        given_[batch.caller] += shares.get(batch.number, 0)
        left[batch.caller] += batch.lines - shares.get(batch.number, 0)
    hungry = [given_[caller] for caller, lines in left.items() if lines]
    assert not hungry or max(given_.values()) - min(hungry) <= 1
