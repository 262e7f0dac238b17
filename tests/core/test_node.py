"""The states of a node: every pair of state and event, and what evidence may do."""

from collections.abc import Callable

import msgspec
import pytest

from router.core.budget import Room
from router.core.call import ENDPOINTS, Call, Reason, Workload
from router.core.node import (
    BACKOFF_S,
    FAULTS_TO_DOWN,
    PANIC_S,
    REFUSAL_S,
    TRANSITIONS,
    Event,
    Facts,
    Load,
    ModelFacts,
    Node,
    Sign,
    Spec,
    State,
)
from router.core.states import REFUSALS_TO_BUSY

NOW = 1000.0
BOTH = frozenset(Workload)


def node_in(state: State = State.READY, **said: object) -> Node:
    node = Node(Spec(**{"name": "n", "url": "http://h", "pools": BOTH, "models": {"m": "own"}, **said}))
    node.state = state
    return node


def call(prompt: int = 100, output: int = 50, sequences: int = 1) -> Call:
    return Call(
        id="c",
        endpoint=ENDPOINTS["chat/completions"],
        model="m",
        body=b"{}",
        prompt_tokens=prompt,
        output_tokens=output,
        sequences=sequences,
        workload=Workload.INTERACTIVE,
        reason=Reason.DEFAULT,
    )


# the table

EXPECTED = {
    (State.STARTING, Event.ANSWERED): State.READY,
    (State.STARTING, Event.PROBED): State.READY,
    (State.STARTING, Event.FAILED): State.DOWN,
    (State.READY, Event.FAILED): State.DOWN,
    (State.DOWN, Event.ANSWERED): State.READY,
    (State.DOWN, Event.PROBED): State.PROBATION,
    (State.DOWN, Event.TRIED): State.PROBATION,
    (State.PROBATION, Event.ANSWERED): State.READY,
    (State.PROBATION, Event.FAILED): State.DOWN,
    (State.READY, Event.STRAINED): State.BUSY,
    (State.BUSY, Event.CALMED): State.READY,
    (State.BUSY, Event.FAILED): State.DOWN,
    (State.READY, Event.DECAYED): State.DEGRADED,
    (State.BUSY, Event.DECAYED): State.DEGRADED,
    (State.DEGRADED, Event.MENDED): State.READY,
    (State.DEGRADED, Event.FAILED): State.DOWN,
    **{(state, Event.DRAIN): State.DRAINING for state in State if state not in (State.DRAINING, State.RECYCLING)},
    (State.DRAINING, Event.RESUME): State.PROBATION,
    (State.DRAINING, Event.HOOK): State.RECYCLING,
    (State.RECYCLING, Event.RETURNED): State.PROBATION,
    (State.RECYCLING, Event.LOST): State.DOWN,
}


def seen_strained(node: Node) -> None:
    """A look that is answered moves a busy node only once it is calm."""
    node.strained_at = NOW
    node.seen(Facts(), Load(), NOW)


CAUSES: dict[Event, Callable[[Node], None]] = {
    Event.ANSWERED: lambda node: node.observe(Sign.GOOD, NOW, "event"),
    Event.PROBED: lambda node: seen_strained(node),
    Event.CALMED: lambda node: node.seen(Facts(), Load(), NOW) if node.state is State.BUSY else None,
    Event.STRAINED: lambda node: [node.observe(Sign.REFUSED, NOW, "503") for _ in range(REFUSALS_TO_BUSY)] and None,
    Event.DECAYED: lambda node: node.diagnosed(NOW, "event", slower=True),
    Event.MENDED: lambda node: node.diagnosed(NOW, "event", slower=False),
    Event.DRAIN: lambda node: node.drain(NOW, "event"),
    Event.RESUME: lambda node: node.resume(NOW, "event"),
    Event.HOOK: lambda node: node.recycle(NOW, "event"),
    Event.RETURNED: lambda node: node.returned(NOW, "event"),
    Event.LOST: lambda node: node.lost(NOW, "event"),
    Event.TRIED: lambda node: node.try_again(NOW, node.budget.hold(Room(1, 1), Workload.INTERACTIVE)),
    Event.FAILED: lambda node: [node.observe(Sign.FAULT, NOW, "event") for _ in range(FAULTS_TO_DOWN)] and None,
}


def test_the_table_holds_these_pairs_and_no_others() -> None:
    written = {(state, event): after for state, events in TRANSITIONS.items() for event, after in events.items()}
    assert written == EXPECTED
    assert set(TRANSITIONS) == set(State)


@pytest.mark.parametrize("event", Event)
@pytest.mark.parametrize("state", State)
def test_every_state_meets_every_event(state: State, event: Event) -> None:
    node = node_in(state)
    CAUSES[event](node)
    assert node.state is EXPECTED.get((state, event), state)
    assert (node.since == NOW) is (node.state is not state)


@pytest.mark.parametrize("state", State)
def test_what_is_no_evidence_moves_no_state(state: State) -> None:
    node = node_in(state)
    for _ in range(20):
        node.observe(Sign.NEITHER, NOW, "x")
    assert (node.state, node.faults) == (state, 0)


# evidence


def test_a_node_goes_down_at_the_third_failure_in_a_row() -> None:
    node = node_in()
    for expected in (State.READY, State.READY, State.DOWN):
        node.observe(Sign.FAULT, NOW, "reset")
        assert node.state is expected
    assert (node.cause, node.faults) == ("reset", FAULTS_TO_DOWN)


def test_an_answer_between_failures_begins_the_count_again() -> None:
    node = node_in()
    for sign in (Sign.FAULT, Sign.FAULT, Sign.GOOD, Sign.FAULT, Sign.FAULT):
        node.observe(sign, NOW, "x")
    assert node.state is State.READY


def test_neither_does_not_hide_a_dying_node() -> None:
    node = node_in()
    for _ in range(FAULTS_TO_DOWN):
        node.observe(Sign.NEITHER, NOW, "400")
        node.observe(Sign.FAULT, NOW, "500")
    assert node.state is State.DOWN


def test_a_callers_error_leaves_a_half_open_node_half_open() -> None:
    node = node_in(State.PROBATION)
    node.observe(Sign.NEITHER, NOW, "400")
    assert node.state is State.PROBATION
    node.observe(Sign.FAULT, NOW, "500")
    assert node.state is State.DOWN


def test_the_wait_before_another_try_doubles_to_its_bound_and_an_answer_ends_it() -> None:
    node = node_in(State.PROBATION)
    waits = []
    for _ in range(9):
        node.observe(Sign.FAULT, NOW, "x")
        waits.append(node.retry_at - NOW)
        assert not node.usable(node.retry_at - 0.01)
        assert node.usable(node.retry_at)
        with node.budget.hold(Room(1, 1), Workload.INTERACTIVE) as permit:
            node.try_again(NOW, permit)
    assert waits == [1, 2, 4, 8, 16, 32, 60, 60, 60]
    node.observe(Sign.GOOD, NOW, "x")
    assert (node.state, node.backoff_s) == (State.READY, BACKOFF_S[0])


def test_a_refusal_leaves_the_node_alone_for_longer_and_longer() -> None:
    node = node_in()
    waits = []
    for _ in range(7):
        node.observe(Sign.REFUSED, NOW, "503")
        waits.append(node.refused_until - NOW)
        assert not node.usable(node.refused_until - 0.01)
        assert node.usable(node.refused_until)
    assert waits == [0.5, 1, 2, 4, 8, 8, 8]
    node.observe(Sign.GOOD, NOW, "x")
    assert node.usable(NOW)
    assert node.refusal_s == REFUSAL_S[0]


@pytest.mark.parametrize("state", [State.STARTING, State.READY])
def test_a_node_that_is_up_is_usable(state: State) -> None:
    assert node_in(state).usable(NOW)


def test_panic_cuts_waits_short() -> None:
    node = node_in()
    for _ in range(5):
        node.observe(Sign.REFUSED, NOW, "503")
    assert not node.usable(NOW + PANIC_S)
    assert not node.usable(NOW + PANIC_S - 0.01, panic=True)
    assert node.usable(NOW + PANIC_S, panic=True)
    node = node_in()
    for _ in range(8):
        node.observe(Sign.FAULT, NOW, "500")
    assert not node.usable(NOW + PANIC_S)
    assert node.usable(NOW + PANIC_S, panic=True)


def test_a_node_on_probation_takes_one_call_at_a_time() -> None:
    node = node_in(State.PROBATION)
    assert node.usable(NOW)
    node.budget.hold(Room(1, 1), Workload.INTERACTIVE)  # one that began before the node went down
    with node.budget.hold(Room(1, 1), Workload.INTERACTIVE) as permit:
        node.try_again(NOW, permit)
        assert not node.usable(NOW)
        assert not node.usable(NOW, panic=True)
    assert node.usable(NOW)


# probes


def test_a_missed_probe_is_no_failure_while_calls_are_answered() -> None:
    node = node_in()
    node.observe(Sign.GOOD, NOW, "x")
    for seconds in range(10):
        node.missed(NOW + seconds, "slow", refused=False)
    assert (node.state, node.faults) == (State.BUSY, 0)


def test_refused_connections_take_a_node_out_however_lately_it_answered() -> None:
    node = node_in()
    node.observe(Sign.GOOD, NOW, "x")
    for _ in range(FAULTS_TO_DOWN):
        node.missed(NOW + 1, "connection refused", refused=True)
    assert node.state is State.DOWN


def test_a_silent_node_nobody_calls_goes_down() -> None:
    node = node_in()
    for _ in range(FAULTS_TO_DOWN):
        node.missed(NOW, "slow", refused=False)
    assert node.state is State.DOWN


def test_a_probe_that_answers_does_not_hide_failing_calls() -> None:
    node = node_in()
    for _ in range(FAULTS_TO_DOWN):
        node.observe(Sign.FAULT, NOW, "no first byte")
        node.seen(Facts(), Load(), NOW)
    assert node.state is not State.READY


def test_missed_probes_count_only_in_a_row() -> None:
    node = node_in()
    for hour in range(FAULTS_TO_DOWN):
        node.missed(NOW + 3600 * hour, "slow", refused=False)
        node.seen(Facts(), Load(), NOW + 3600 * hour + 2)
    assert node.state is State.READY


def test_a_living_front_of_a_dead_engine_does_not_end_the_back_off() -> None:
    node = node_in()
    for _ in range(FAULTS_TO_DOWN + 5):
        node.observe(Sign.FAULT, NOW, "no first byte")
    assert node.retry_at > NOW + 30
    node.seen(Facts(), Load(), NOW + 2)
    assert not node.usable(NOW + 2)


def test_a_node_that_streams_long_answers_is_busy_not_dead() -> None:
    node = node_in()
    with node.budget.hold(Room(1, 1), Workload.INTERACTIVE):
        node.observe(Sign.GOOD, NOW, "first token")
        for seconds in (20, 22, 24):
            node.heard(NOW + seconds - 1)
            node.missed(NOW + seconds, "slow", refused=False)
        assert node.state is State.BUSY


def test_a_load_that_is_no_longer_measured_is_unknown() -> None:
    node = node_in()
    node.seen(Facts(tokens=1000), Load(running=5, waiting=3, used=0.9), NOW)
    node.observe(Sign.GOOD, NOW + 10, "x")
    for seconds in range(11, 19, 2):
        node.missed(NOW + seconds, "slow", refused=False)
    assert (node.load, node.budget.foreign) == (Load(), Room(0, 0))


# capacity and names


def test_what_the_operator_said_goes_before_what_the_node_tells() -> None:
    node = node_in(tokens=500, sequences=3)
    node.seen(Facts(tokens=9000, sequences=64), Load(), NOW)
    assert (node.budget.tokens, node.budget.sequences) == (500, 3)
    node = node_in()
    node.seen(Facts(tokens=9000, sequences=64), Load(), NOW)
    assert (node.budget.tokens, node.budget.sequences) == (9000, 64)


@pytest.mark.parametrize(
    ("load", "foreign"),
    [
        (Load(), Room(0, 0)),
        (Load(running=1, used=0.1), Room(0, 0)),
        (Load(running=3, waiting=2, used=0.5), Room(400, 4)),
        (Load(running=3), Room(0, 2)),
        (Load(used=0.5), Room(0, 0)),
        (Load(running=3, used=0.05), Room(0, 2)),
    ],
)
def test_calls_of_others_are_what_is_there_beside_ours(load: Load, foreign: Room) -> None:
    node = node_in()
    with node.budget.hold(Room(100, 1), Workload.INTERACTIVE):
        node.seen(Facts(tokens=1000), load, NOW)
        assert node.budget.foreign == Room(0, 0), "one look may have met a call of ours that just began or ended"
        node.seen(Facts(tokens=1000), load, NOW)
        assert node.budget.foreign == foreign


@pytest.mark.parametrize(
    ("told", "said", "context"), [(None, None, None), (100, None, 100), (None, 80, 80), (100, 80, 80), (60, 80, 60)]
)
def test_the_context_is_the_shorter_of_what_is_told_and_said(
    told: int | None, said: int | None, context: int | None
) -> None:
    node = node_in(context=said)
    node.seen(Facts(models={"own": ModelFacts(context=told)}), Load(), NOW)
    assert node.context("m") == context


def test_models_are_those_said_or_else_those_told() -> None:
    node = node_in()
    node.seen(Facts(models={"own": ModelFacts(), "other": ModelFacts()}), Load(), NOW)
    assert (node.models(), node.own_name("m"), node.serves("m"), node.serves("own")) == (["m"], "own", True, False)
    node = node_in(models={})
    assert not node.serves("own")
    node.seen(Facts(models={"own": ModelFacts()}), Load(), NOW)
    assert (node.models(), node.own_name("own"), node.serves("own")) == (["own"], "own", True)


@pytest.mark.parametrize(
    ("context", "asked", "room"),
    [
        (None, call(), Room(150, 1)),
        (120, call(), Room(120, 1)),
        (100, call(), Room(100, 1)),
        (50, call(), Room(100, 1)),
        (None, call(sequences=3), Room(250, 3)),
        (120, call(sequences=3), Room(160, 3)),
    ],
)
def test_room_is_the_prompt_and_what_the_context_leaves(context: int | None, asked: Call, room: Room) -> None:
    assert node_in(context=context).room_for(asked) == room


def test_what_the_operator_says_may_change_and_what_was_learnt_stays() -> None:
    said = node_in().spec
    node = Node(msgspec.structs.replace(said, tokens=100), reserve=0.25)
    node.seen(Facts(tokens=400, sequences=8), Load(), 1.0)
    permit = node.budget.hold(Room(50, 1), Workload.BATCH)
    node.respec(said, reserve=0.0)
    assert (node.budget.tokens, node.budget.sequences, node.budget.reserve) == (400, 8, 0.0)
    node.respec(msgspec.structs.replace(said, tokens=40, sequences=2), reserve=0.5)
    assert (node.budget.tokens, node.budget.sequences, node.budget.reserve) == (40, 2, 0.5)
    assert (node.state, node.budget.held()) == (State.READY, Room(50, 1))
    with permit:
        pass
    assert node.budget.held() == Room(0, 0)


def test_moves_are_counted_and_stays_add_up() -> None:
    """Every second since it was met is in one state or another, however often it moved."""
    node = Node(Spec(name="n", url="http://h", pools=BOTH))
    assert node.stays(NOW) == {State.STARTING: 0.0}, "not met yet"
    node.met(NOW)
    node.met(NOW + 1.0)
    node.seen(Facts(), Load(), NOW + 2.0)
    node.drain(NOW + 5.0, "operator")
    node.resume(NOW + 6.0, "operator")
    node.observe(Sign.GOOD, NOW + 7.0, "answered")
    assert node.spent == {State.STARTING: 2.0, State.READY: 3.0, State.DRAINING: 1.0, State.PROBATION: 1.0}
    assert node.stays(NOW + 10.0) == node.spent | {State.READY: 6.0}
    assert sum(node.stays(NOW + 10.0).values()) == 10.0
    assert node.stays(NOW)[State.READY] == 3.0, "a clock that is set back takes nothing away"
    assert node.moves == {
        (State.STARTING, Event.PROBED, State.READY): 1,
        (State.READY, Event.DRAIN, State.DRAINING): 1,
        (State.DRAINING, Event.RESUME, State.PROBATION): 1,
        (State.PROBATION, Event.ANSWERED, State.READY): 1,
    }
    node.drain(NOW + 11.0, "operator")
    node.drain(NOW + 12.0, "operator")
    assert node.moves[State.READY, Event.DRAIN, State.DRAINING] == 2
