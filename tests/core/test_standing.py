"""How a node comes and goes: strain, silence bounded by size, flapping, slow start, what an operator decides."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.core.budget import Room
from router.core.call import Workload
from router.core.node import EXPECTED, Facts, Load, Node, Sign, Spec, State
from router.core.standing import STRETCH
from router.core.states import (
    BACKOFF_S,
    CALM_S,
    QUIET_S,
    RAMP_CALLS,
    RAMP_S,
    REFUSALS_TO_BUSY,
    STALLED_S,
    STEADY_S,
    TERMS,
    Access,
)
from tests.core.test_node import NOW, call, node_in

CHAT = Workload.INTERACTIVE


def down(node: Node, at: float) -> None:
    while node.state is not State.DOWN:
        node.observe(Sign.FAULT, at, "reset")


def paced(rate: float = 0.001, tokens: int = 1000) -> Node:
    """A node that has shown how long it reads: `rate` seconds a token."""
    node = node_in(tokens=100_000)
    for _ in range(10):
        node.pace.read_quietly(tokens, rate * tokens, chat=True)
    return node


# strain


def test_refusals_in_a_row_make_a_node_busy_and_calm_ends_it() -> None:
    node = node_in()
    for _ in range(REFUSALS_TO_BUSY):
        node.observe(Sign.REFUSED, NOW, "503")
    assert (node.state, node.faults) == (State.BUSY, 0)
    calm = node.refused_until + CALM_S
    node.seen(Facts(), Load(), calm - 0.1)
    assert node.state is State.BUSY
    node.seen(Facts(), Load(), calm)
    assert node.state is State.READY


def test_looks_missed_while_calls_are_answered_make_it_busy_not_down() -> None:
    node = node_in()
    for seconds in range(60):
        node.heard(NOW + seconds)
        node.missed(NOW + seconds, "no answer within 2 s", refused=False)
    assert (node.state, node.since) == (State.BUSY, NOW + REFUSALS_TO_BUSY - 1)
    assert node.access(CHAT) is Access.LAST


# silence


def test_two_calls_that_get_no_head_take_a_node_out() -> None:
    node = node_in()
    node.observe(Sign.SILENT, NOW, "no head")
    assert node.state is State.READY
    node.observe(Sign.SILENT, NOW, "no head")
    assert node.state is State.DOWN


def test_one_is_enough_when_its_last_look_was_missed_too() -> None:
    node = node_in()
    node.observe(Sign.GOOD, NOW, "answered")
    node.missed(NOW + 2, "no answer within 2 s", refused=False)
    node.observe(Sign.SILENT, NOW + 3, "no head")
    assert node.state is State.DOWN


def test_the_same_the_other_way_round_unless_something_still_comes_from_it() -> None:
    for heard, state in ((False, State.DOWN), (True, State.READY)):
        node = node_in()
        node.observe(Sign.GOOD, NOW, "answered")
        node.observe(Sign.SILENT, NOW + 3, "no head")
        if heard:
            node.heard(NOW + 4)
        node.missed(NOW + 5, "no answer within 2 s", refused=False)
        assert node.state is state


def test_a_first_token_is_waited_for_by_what_is_read_there() -> None:
    node = paced()
    assert node.silence_s() is None
    with node.hold(call(prompt=2000), NOW):
        assert node.silence_s() == pytest.approx(EXPECTED * 2.0)
        with node.hold(call(prompt=1000), NOW) as second:
            assert node.silence_s() == pytest.approx(EXPECTED * 3.0)
            second.spoke(NOW + 1)
            assert node.silence_s() == pytest.approx(EXPECTED * 2.0)


def test_the_slowest_of_late_counts_because_a_cache_makes_most_faster() -> None:
    node = paced(rate=0.0001)
    node.pace.read_quietly(1000, 4.0, chat=True)
    with node.hold(call(prompt=1000), NOW):
        assert node.silence_s() == pytest.approx(EXPECTED * 4.0)


@pytest.mark.parametrize(
    "strange",
    [
        lambda node: setattr(node, "load", Load(waiting=1)),
        lambda node: setattr(node.budget, "foreign", Room(0, 1)),
        lambda node: setattr(node.budget, "tokens", None),
    ],
)
def test_nobody_can_know_it_where_others_queue_or_capacity_is_unknown(strange) -> None:
    node = paced()
    with node.hold(call(prompt=2000), NOW):
        strange(node)
        assert node.silence_s() is None


def test_it_is_not_known_before_enough_was_seen() -> None:
    node = node_in(tokens=100_000)
    for _ in range(7):
        node.pace.read_quietly(1000, 1.0, chat=True)
    with node.hold(call(prompt=1000), NOW):
        assert node.silence_s() is None
        node.pace.read_quietly(1000, 1.0, chat=True)
        assert node.silence_s() is not None


def test_a_bound_that_was_hit_is_doubled_so_that_a_wrong_one_does_no_lasting_harm() -> None:
    node = paced()
    for _ in range(20):
        node.observe(Sign.SILENT, NOW, "no head")
    assert node.stretch == STRETCH
    for _ in range(100):
        node.observe(Sign.GOOD, NOW, "answered")
    assert node.stretch == 1.0


def test_missed_looks_are_no_sign_of_death_while_a_long_prompt_may_be_read() -> None:
    node = paced()
    node.observe(Sign.GOOD, NOW, "answered")
    with node.hold(call(prompt=10_000), NOW):
        for seconds in range(0, int(EXPECTED * 10), 2):
            node.missed(NOW + seconds, "no answer within 2 s", refused=False)
            assert node.state in (State.READY, State.BUSY)
        for seconds in range(1, 7, 2):
            node.missed(NOW + EXPECTED * 10 + seconds, "no answer within 2 s", refused=False)
        assert node.state is State.DOWN


def test_a_frozen_node_without_calls_goes_down_by_its_looks() -> None:
    node = paced()
    node.observe(Sign.GOOD, NOW, "answered")
    for seconds in (2, 4, 6, 8, 10, 12, 14):
        node.missed(NOW + seconds, "no answer within 2 s", refused=False)
    node.missed(NOW + QUIET_S + 6, "no answer within 2 s", refused=False)
    assert node.state is State.DOWN


# no progress


def test_an_engine_that_runs_calls_and_counts_no_token_is_stuck() -> None:
    node = node_in()
    with node.hold(call(), NOW) as permit:
        permit.spoke(NOW)
        for seconds in (0.0, STALLED_S):
            node.seen(Facts(), Load(running=1, done=500.0), NOW + seconds, held=1)
            assert node.state is State.READY
        node.seen(Facts(), Load(running=1, done=500.0), NOW + STALLED_S + 1, held=1)
        assert (node.state, node.hung) == (State.DOWN, True)
        node.seen(Facts(), Load(running=1, done=500.0), NOW + STALLED_S + 1.5, held=1)
        assert node.state is State.DOWN, "its front lives and its engine does not"


@pytest.mark.parametrize(
    "load",
    [
        lambda seconds: Load(running=1, done=500.0 + seconds),
        lambda seconds: Load(running=1),
        lambda seconds: Load(running=0, done=500.0),
        lambda seconds: Load(running=3, done=500.0),
    ],
    ids=["it writes", "it does not count", "it is idle", "others run there, whose size is unknown"],
)
def test_it_is_not_stuck_while(load) -> None:
    node = node_in()
    with node.hold(call(), NOW) as permit:
        permit.spoke(NOW)
        for seconds in range(0, 300, 2):
            node.seen(Facts(), load(seconds), NOW + seconds, held=1)
        assert node.state is State.READY


def test_a_prompt_that_takes_minutes_is_no_stall() -> None:
    node = paced(rate=0.01)
    with node.hold(call(prompt=8000), NOW):
        for seconds in range(0, 300, 2):
            node.seen(Facts(), Load(running=1, done=500.0), NOW + seconds, held=1)
        assert node.state is State.READY


# coming back


def test_a_flapping_node_waits_longer_each_time_and_a_steady_one_begins_anew() -> None:
    node, at, waits = node_in(), NOW, []
    for _ in range(8):
        down(node, at)
        waits.append(node.retry_at - at)
        at = node.retry_at
        with node.hold(call(), at) as permit:
            node.try_again(at, permit)
            node.observe(Sign.GOOD, at, "answered")
        at += 5
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60]
    at += STEADY_S
    down(node, at)
    assert node.retry_at - at == BACKOFF_S[0]


signs = st.sampled_from([*Sign, *[Sign.GOOD] * 4])
happenings = st.one_of(
    st.builds(lambda sign: lambda node, now: node.observe(sign, now, "call"), signs),
    st.builds(lambda refused: lambda node, now: node.missed(now, "look", refused=refused), st.booleans()),
    st.just(lambda node, now: node.seen(Facts(), Load(), now)),
    st.builds(
        lambda name: lambda node, now: getattr(node, name)(now, "somebody"),
        st.sampled_from(["drain", "resume", "recycle", "returned", "lost"]),
    ),
    st.builds(lambda slower: lambda node, now: node.diagnosed(now, "x", slower=slower), st.booleans()),
)


@given(st.lists(st.tuples(happenings, st.sampled_from([0.0, 0.5, 3.0, 100.0])), max_size=40))
def test_a_node_that_is_ready_begins_its_waits_anew_whatever_led_there(happened) -> None:
    node, now = Node(Spec(name="n", url="http://h", pools=frozenset(Workload))), NOW
    for happens, later in happened:
        now += later
        happens(node, now)
        if node.state is State.READY:
            assert node.backoff_s == min(BACKOFF_S[0] * 2.0**node.flaps, BACKOFF_S[1])


def test_nodes_that_fell_together_do_not_come_back_together() -> None:
    node = node_in()
    node.jitter = lambda: 1.2
    down(node, NOW)
    assert node.retry_at == NOW + 1.2 * BACKOFF_S[0]


def returned(node: Node, at: float) -> Node:
    node.state = State.PROBATION
    with node.hold(call(), at - 1) as permit:
        node.try_again(at - 1, permit)
        node.observe(Sign.GOOD, at, "answered")
    return node


def test_a_node_that_is_back_gets_few_calls_at_once_and_one_more_for_each_it_answers() -> None:
    node = returned(node_in(), NOW)
    held = []
    while node.usable(NOW):
        held.append(node.hold(call(), NOW))
    assert len(held) == RAMP_CALLS
    node.observe(Sign.GOOD, NOW, "answered")
    assert node.usable(NOW)
    held.append(node.hold(call(), NOW))
    assert not node.usable(NOW)
    assert not node.usable(NOW, panic=True), "a herd is no better when there is nowhere else to go"
    assert node.usable(NOW + 1)
    held += [node.hold(call(), NOW + 1) for _ in range(100)]
    assert not node.usable(NOW + RAMP_S / 2)
    assert node.usable(NOW + RAMP_S)


def test_a_node_seen_for_the_first_time_is_not_held_back() -> None:
    node = Node(Spec(name="n", url="http://h", pools=frozenset(Workload), models={"m": "m"}))
    node.seen(Facts(), Load(), NOW)
    for _ in range(50):
        assert node.usable(NOW)
        node.hold(call(), NOW)


# what somebody decided


@pytest.mark.parametrize("state", [State.DRAINING, State.RECYCLING])
def test_nothing_that_is_seen_brings_back_a_node_that_was_taken_out(state: State) -> None:
    node = node_in(state)
    node.observe(Sign.GOOD, NOW, "a call that still ran")
    node.seen(Facts(), Load(), NOW)
    for _ in range(5):
        node.observe(Sign.FAULT, NOW, "reset")
        node.missed(NOW, "refused", refused=True)
    node.seen(Facts(), Load(), NOW + 1000)
    assert node.state is state
    assert not node.usable(NOW + 1000)
    assert not node.usable(NOW + 1000, panic=True)


def test_a_recycled_node_has_no_past_and_comes_back_by_one_call() -> None:
    node = node_in(State.DRAINING)
    for _ in range(5):
        node.observe(Sign.FAULT, NOW, "reset")
        node.observe(Sign.REFUSED, NOW, "503")
    node.recycle(NOW, "memory")
    node.returned(NOW + 1, "answered")
    assert (node.state, node.faults, node.flaps) == (State.PROBATION, 0, 0)
    assert node.usable(NOW + 1)
    with node.hold(call(), NOW + 1) as permit:
        node.try_again(NOW + 1, permit)
        assert not node.usable(NOW + 1)


def test_a_node_that_did_not_come_back_is_down_and_may_come_later() -> None:
    node = node_in(State.RECYCLING)
    for _ in range(50):
        node.missed(NOW, "refused", refused=True)  # it restarts: that it is away says nothing of how soon to try it
    node.lost(NOW, "no answer")
    assert (node.state, node.usable(NOW)) == (State.DOWN, False)
    node.seen(Facts(), Load(), NOW + BACKOFF_S[0])
    assert node.state is State.PROBATION


def test_who_moves_is_told() -> None:
    node, told = node_in(), []
    node.moved = lambda which, before: told.append((which.name, before, which.state))
    node.drain(NOW, "operator")
    node.drain(NOW, "operator")
    node.resume(NOW, "operator")
    assert told == [("n", State.READY, State.DRAINING), ("n", State.DRAINING, State.PROBATION)]


def test_every_state_has_its_terms() -> None:
    assert set(TERMS) == set(State)
    assert all(terms.meaning and terms.lasts for terms in TERMS.values())
