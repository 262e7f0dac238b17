"""On how many nodes chat is placed: at once more, slowly fewer; a node bears what its calls have shown."""

from hypothesis import given
from hypothesis import strategies as st

from router.core.packing import DWELL_S, FIRST_CLIMB, FIRST_LIMIT, FIRST_WINDOW, PEAK_S, WINDOW, Bearing, Packing


def test_chat_takes_the_fewest_nodes_with_room_for_a_burst() -> None:
    packing = Packing()
    assert packing.fit(1, [8, 8, 8], 0.0) == 1
    assert packing.fit(4, [8, 8, 8], 1.0) == 1
    assert packing.fit(7, [8, 8, 8], 2.0) == 2, "seven and a burst are more than eight"
    assert packing.fit(30, [8, 8, 8], 3.0) == 3, "never more than there are"


def test_a_node_is_let_go_only_when_chat_stayed_low() -> None:
    packing = Packing()
    packing.fit(12, [8, 8, 8], 0.0)
    assert packing.fit(1, [8, 8, 8], 1.0) == 2
    assert packing.fit(1, [8, 8, 8], PEAK_S + 1.0) == 2, "the peak has only now been forgotten"
    assert packing.fit(1, [8, 8, 8], PEAK_S + 1.0 + DWELL_S) == 1


def test_no_chat_no_node() -> None:
    packing = Packing()
    packing.fit(1, [8], 0.0)
    packing.fit(0, [8], PEAK_S + 1)
    assert packing.fit(0, [8], PEAK_S + 2 + DWELL_S) == 0


def test_what_a_node_bears_climbs_while_calls_are_in_time_and_falls_when_they_are_not() -> None:
    bearing = Bearing()
    for _ in range(3 * WINDOW):
        bearing.judge(int(bearing.limit), kept=True)
    climbed = bearing.limit
    assert climbed > FIRST_LIMIT
    for _ in range(2 * WINDOW):
        bearing.judge(int(bearing.limit), kept=False)
    assert bearing.limit < climbed


def test_before_its_first_fall_a_limit_climbs_fast_and_no_further_than_what_was_borne_bears_out() -> None:
    bearing = Bearing()
    for _ in range(FIRST_WINDOW):
        bearing.judge(15, kept=True)
    assert bearing.limit == FIRST_CLIMB * FIRST_LIMIT
    for _ in range(10 * FIRST_WINDOW):
        bearing.judge(15, kept=True)
    assert bearing.limit == FIRST_CLIMB * FIRST_LIMIT, "sixteen at once say nothing of thirty"


def test_after_its_first_fall_a_limit_climbs_in_small_steps() -> None:
    bearing = Bearing()
    for _ in range(2):
        bearing.judge(15, kept=False)
    fell = bearing.limit
    assert fell < FIRST_LIMIT
    for _ in range(WINDOW - 1):
        bearing.judge(15, kept=True)
    assert bearing.limit == fell
    bearing.judge(15, kept=True)
    assert fell < bearing.limit <= fell + 1.0


def test_calls_far_below_the_limit_say_nothing() -> None:
    bearing = Bearing()
    for _ in range(10 * WINDOW):
        bearing.judge(0, kept=False)
    assert bearing.limit == FIRST_LIMIT


@given(st.lists(st.tuples(st.integers(0, 100), st.floats(0, 30)), min_size=1), st.lists(st.floats(1, 50), max_size=6))
def test_the_nodes_always_hold_the_chats_there_are(steps: list[tuple[int, float]], limits: list[float]) -> None:
    packing, now = Packing(), 0.0
    for chats, later in steps:
        now += later
        count = packing.fit(chats, limits, now)
        assert 0 <= count <= len(limits)
        assert count == len(limits) or sum(limits[:count]) >= chats


@given(st.lists(st.integers(0, 200), max_size=200))
def test_a_limit_that_never_fell_is_no_more_than_a_quarter_above_what_was_borne(calls: list[int]) -> None:
    bearing = Bearing()
    for chats in calls:
        bearing.judge(chats, kept=True)
    assert bearing.limit <= max(FIRST_LIMIT, FIRST_CLIMB * (max(calls, default=0) + 1))


@given(st.lists(st.tuples(st.integers(0, 60), st.booleans())))
def test_a_limit_is_never_below_one(calls: list[tuple[int, bool]]) -> None:
    bearing = Bearing()
    for chats, kept in calls:
        bearing.judge(chats, kept=kept)
        assert bearing.limit >= 1
