"""Where a call runs: for every input one answer, and the promises each kind of answer keeps."""

from collections.abc import Callable
from copy import copy

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.core.budget import Room
from router.core.call import ENDPOINTS, Call, Reason, Workload
from router.core.node import Facts, Load, ModelFacts, Node, Spec, State
from router.core.placement import (
    UNTOLD_BATCH_SEQUENCES,
    Decision,
    Refuse,
    RefuseReason,
    Relay,
    RelayCause,
    Run,
    Situation,
    Wait,
    WaitReason,
    place,
)

NOW = 1000.0
CHAT, BATCH = Workload.INTERACTIVE, Workload.BATCH
BOTH = frozenset(Workload)
many = settings(max_examples=80, deadline=None)


def call(prompt: int = 100, output: int = 50, workload: Workload = CHAT, **fields: object) -> Call:
    said = {
        "id": "c",
        "endpoint": ENDPOINTS["chat/completions"],
        "model": "m",
        "body": b"{}",
        "prompt_tokens": prompt,
        "output_tokens": output,
        "least_tokens": prompt,
        "workload": workload,
        "reason": Reason.DEFAULT,
    }
    return Call(**{**said, **fields})


def node(
    name: str = "a",
    pools: frozenset[Workload] = BOTH,
    *,
    models: tuple[str, ...] = ("m",),
    context: int | None = 1000,
    tokens: int | None = 1000,
    sequences: int | None = 8,
    load: Load | None = None,
    state: State = State.READY,
    reserve: float = 0.0,
) -> Node:
    made = Node(Spec(name=name, url="http://h", pools=pools), reserve=reserve)
    facts = Facts(models={model: ModelFacts(context=context) for model in models}, tokens=tokens, sequences=sequences)
    for _ in range(2):  # what others run there is believed once two looks agree
        made.seen(facts, load or Load(), NOW - 10)
    made.state = state
    return made


# every input

few = st.integers(0, 400)
held_rooms = st.lists(st.tuples(st.builds(Room, few, st.integers(1, 3)), st.sampled_from(Workload)), max_size=4)


@st.composite
def worlds(draw: st.DrawFn) -> Callable[[], Node]:
    """A maker of equal nodes: what one call to it makes may be changed without changing the next."""
    name = draw(st.sampled_from("abcde"))
    pools = draw(st.sampled_from([frozenset({CHAT}), frozenset({BATCH}), BOTH]))
    fields = {
        "models": draw(st.sampled_from([("m",), ("m", "x"), ("x",), ()])),
        "context": draw(st.none() | st.integers(1, 600)),
        "tokens": draw(st.none() | st.integers(1, 1000)),
        "sequences": draw(st.none() | st.integers(1, 8)),
        "load": draw(st.builds(Load, running=st.none() | st.integers(0, 9), waiting=st.none() | st.integers(0, 3))),
        "state": draw(st.sampled_from(State)),
        "reserve": draw(st.sampled_from([0.0, 0.25, 0.5, 1.0])),
    }
    held = draw(held_rooms)
    foreign = draw(st.builds(Room, few, st.integers(0, 4)))
    moments = draw(st.tuples(*[st.sampled_from([-1e9, NOW - 5, NOW - 0.5, NOW, NOW + 0.4, NOW + 7])] * 3))
    faults = draw(st.integers(0, 2))
    back_at = draw(st.sampled_from([-1e9, NOW - 9, NOW - 1, NOW]))

    def make() -> Node:
        made = node(name, pools, **fields)
        for room, workload in held:
            made.budget.hold(room, workload)
        made.budget.foreign = foreign
        made.failed_at, made.retry_at, made.refused_until = moments
        made.faults, made.back_at = faults, back_at
        return made

    return make


fleets = st.lists(worlds(), max_size=4, unique_by=lambda make: make().name)
situations = st.builds(
    Situation,
    waited=st.sampled_from([0.0, 1.0, 2.0, 5.0]),
    patience=st.sampled_from([0.0, 2.0, 3600.0]),
    tried=st.frozensets(st.sampled_from("abcde"), max_size=3),
    relay=st.booleans(),
    chat_waits=st.booleans(),
    turn=st.integers(0, 10),
)
calls = st.builds(
    call,
    prompt=few,
    output=few,
    workload=st.sampled_from(Workload),
    model=st.sampled_from(["m", "x", "unknown"]),
    least_tokens=few,
    sequences=st.integers(1, 3),
    bound_to=st.none() | st.sampled_from("abcde"),
)


def known_of(one: Node) -> tuple[object, ...]:
    budget = one.budget
    fields = [getattr(one, name) for name in Node.__slots__ if name != "budget"]
    return *fields, budget.held(CHAT), budget.held(BATCH), budget.foreign, budget.tokens, budget.sequences


@many
@given(calls, fleets, situations)
def test_every_input_has_an_answer_and_nothing_is_changed(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation
) -> None:
    nodes = [make() for make in makers]
    before, situated = [known_of(one) for one in nodes], copy(situation)
    decision = place(asked, nodes, NOW, situation)
    assert isinstance(decision, Decision)
    assert [known_of(one) for one in nodes] == before
    assert situation == situated
    assert place(asked, nodes, NOW, situation) == decision


@many
@given(calls, fleets, situations)
def test_what_runs_may_run_there(asked: Call, makers: list[Callable[[], Node]], situation: Situation) -> None:
    nodes = [make() for make in makers]
    decision = place(asked, nodes, NOW, situation)
    if not isinstance(decision, Run):
        return
    chosen = decision.node
    assert chosen in nodes
    assert chosen.serves(asked.model)
    assert chosen.name not in situation.tried
    assert asked.bound_to in (None, chosen.name)
    assert chosen.usable(NOW) or (chosen.usable(NOW, panic=True) and not situation.relay)
    assert chosen.budget.fits(chosen.room_for(asked), asked.workload)
    if asked.workload is BATCH:
        assert not chosen.load.waiting
        assert not situation.chat_waits or CHAT not in chosen.spec.pools


@many
@given(calls, fleets, situations)
def test_a_prompt_goes_where_the_context_holds_it(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation
) -> None:
    nodes = [make() for make in makers]
    decision = place(asked, nodes, NOW, situation)
    serving = [one for one in nodes if one.serves(asked.model) and asked.bound_to in (None, one.name)]
    contexts = [one.context(asked.model) for one in serving]
    if isinstance(decision, Run):
        context = decision.node.context(asked.model)
        if context is not None and context <= asked.prompt_tokens:
            assert context > asked.least_tokens
            assert None not in contexts
            assert context == max(known for known in contexts if known is not None)
    elif decision == Refuse(RefuseReason.CONTEXT, getattr(decision, "context", None)):
        assert serving
        assert all(known is not None and known <= asked.prompt_tokens for known in contexts)
        assert decision.context == max(known for known in contexts if known is not None)


@many
@given(calls, fleets, situations)
def test_the_relay_only_where_it_is_allowed(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation
) -> None:
    decision = place(asked, [make() for make in makers], NOW, situation)
    if isinstance(decision, Relay):
        assert situation.relay
    if isinstance(decision, Refuse):
        assert not situation.relay or decision.reason is RefuseReason.OWNER_GONE


@many
@given(calls, fleets, situations)
def test_patience_ends_and_a_moment_to_wake_is_ahead(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation
) -> None:
    decision = place(asked, [make() for make in makers], NOW, situation)
    if isinstance(decision, Wait):
        assert situation.waited < situation.patience
        assert decision.until is None or decision.until > NOW


@many
@given(calls, fleets, situations, st.data())
def test_more_room_never_turns_run_into_anything_else(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation, data: st.DataObject
) -> None:
    decision = place(asked, [make() for make in makers], NOW, situation)
    if not isinstance(decision, Run):
        return
    roomier = [make() for make in makers]
    grown = data.draw(st.sampled_from(roomier))
    budget = grown.budget
    more = data.draw(st.integers(0, 500))
    match data.draw(st.sampled_from(["permit", "foreign", "tokens", "sequences"])):
        case "permit":
            for permit in list(budget)[: 1 + more % 4]:
                with permit:
                    pass
        case "foreign":
            budget.foreign = Room(max(0, budget.foreign.tokens - more), max(0, budget.foreign.sequences - more % 4))
        case "tokens" if budget.tokens is not None:
            budget.tokens += more
        case "sequences" if budget.sequences is not None:
            budget.sequences += more
    assert isinstance(place(asked, roomier, NOW, situation), Run)


@many
@given(calls, fleets, situations, st.data())
def test_one_more_ready_and_empty_node_never_hurts(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation, data: st.DataObject
) -> None:
    decision = place(asked, [make() for make in makers], NOW, situation)
    fresh = node("z", context=None, models=("m", "x"))
    joined = place(asked, [*(make() for make in makers), fresh], NOW, situation)
    welcome = asked.model != "unknown" and asked.bound_to is None
    held_back = asked.workload is BATCH and situation.chat_waits
    if isinstance(decision, Run) or (welcome and not held_back):
        assert isinstance(joined, Run)


# in words


@pytest.mark.parametrize(
    ("asked", "nodes", "situation", "decision"),
    [
        (call(), [], Situation(), Refuse(RefuseReason.UNKNOWN_MODEL)),
        (call(), [], Situation(relay=True), Relay(RelayCause.UNKNOWN_MODEL)),
        (call(bound_to="b"), [node()], Situation(), Refuse(RefuseReason.OWNER_GONE)),
        (call(1000), [node()], Situation(), Refuse(RefuseReason.CONTEXT, 1000)),
        (call(1000), [node()], Situation(relay=True), Relay(RelayCause.CONTEXT)),
        (call(), [node()], Situation(tried=("a",)), Refuse(RefuseReason.NODE_FAILED)),
        (call(), [node()], Situation(tried=("a",), relay=True), Relay(RelayCause.NODE_FAILED)),
        (call(), [node(load=Load(running=8))], Situation(), Wait(WaitReason.NO_ROOM)),
        (call(), [node(load=Load(running=8))], Situation(waited=2.0), Refuse(RefuseReason.NO_ROOM)),
        (call(), [node(load=Load(running=8))], Situation(waited=2.0, relay=True), Relay(RelayCause.NO_ROOM)),
        (call(workload=BATCH), [node(load=Load(waiting=1))], Situation(), Wait(WaitReason.ENGINE_QUEUE)),
        (call(workload=BATCH), [node()], Situation(chat_waits=True), Wait(WaitReason.CHAT_WAITS)),
    ],
)
def test_answers_other_than_run(asked: Call, nodes: list[Node], situation: Situation, decision: Decision) -> None:
    assert place(asked, nodes, NOW, situation) == decision


def test_an_estimate_over_the_context_is_tried_on_the_longest_unless_it_surely_is_too_long() -> None:
    short, long = node("short", context=500), node("long", context=900)
    assert place(call(950, least_tokens=300), [short, long], NOW, Situation()) == Run(long)
    assert place(call(950, least_tokens=900), [short, long], NOW, Situation()) == Refuse(RefuseReason.CONTEXT, 900)


def test_calls_go_to_nodes_shaped_for_them_and_elsewhere_only_without_any() -> None:
    chat, batch = node("chat", frozenset({CHAT}), context=500), node("batch", frozenset({BATCH}))
    assert place(call(), [batch, chat], NOW, Situation()) == Run(chat)
    assert place(call(workload=BATCH), [batch, chat], NOW, Situation()) == Run(batch)
    assert place(call(800), [batch, chat], NOW, Situation()) == Run(batch)


def test_calls_between_two_looks_are_spread() -> None:
    nodes = [node("a"), node("b", load=Load(running=1))]
    counts = {"a": 0, "b": 0}
    for turn in range(8):
        decision = place(call(10, 10), nodes, NOW, Situation(turn=turn))
        assert isinstance(decision, Run)
        counts[decision.node.name] += 1
        decision.node.budget.hold(decision.node.room_for(call(10, 10)), CHAT)
    assert sorted(counts.values()) in ([4, 4], [3, 5])


def test_a_node_that_failed_lately_draws_no_traffic() -> None:
    failing, slow = node("failing"), node("slow")
    failing.faults = 1
    slow.budget.hold(Room(100, 1), CHAT)
    assert place(call(), [failing, slow], NOW, Situation()) == Run(slow)


def test_batch_on_a_node_that_tells_nothing_is_few() -> None:
    silent = node(tokens=None, sequences=None)
    for _ in range(UNTOLD_BATCH_SEQUENCES):
        assert place(call(workload=BATCH), [silent], NOW, Situation()) == Run(silent)
        silent.budget.hold(Room(1, 1), BATCH)
    assert place(call(workload=BATCH), [silent], NOW, Situation()) == Wait(WaitReason.NO_ROOM)
    assert place(call(), [silent], NOW, Situation()) == Run(silent)


@pytest.mark.parametrize("relay", [False, True])
def test_all_nodes_refusing_is_waited_for(relay: bool) -> None:
    refusing = node()
    refusing.failed_at, refusing.refused_until = NOW - 0.1, NOW + 0.4
    decision = place(call(), [refusing], NOW, Situation(relay=relay))
    assert decision == Wait(WaitReason.NODES_BUSY, NOW + 0.4)
    assert place(call(), [refusing], NOW + 0.4, Situation(relay=relay)) == Run(refusing)


def test_all_nodes_down_go_to_the_relay_or_are_tried_again() -> None:
    down = node(state=State.DOWN)
    down.failed_at, down.retry_at = NOW - 0.1, NOW + 30
    assert place(call(), [down], NOW, Situation(relay=True)) == Relay(RelayCause.NODES_DOWN)
    assert isinstance(place(call(), [down], NOW, Situation()), Wait)
    assert place(call(), [down], NOW + 1, Situation()) == Run(down)


def test_without_a_relay_a_wait_ends_when_panic_allows() -> None:
    refusing = node()
    refusing.failed_at, refusing.refused_until = NOW, NOW + 8
    decision = place(call(), [refusing], NOW, Situation())
    assert isinstance(decision, Wait)
    assert decision.until is not None
    assert place(call(), [refusing], NOW + 1, Situation()) == Run(refusing)
    assert decision.until <= NOW + 1


def test_a_starting_node_that_refuses_is_busy() -> None:
    starting = node(state=State.STARTING)
    starting.failed_at, starting.refused_until = NOW, NOW + 0.5
    assert place(call(), [starting], NOW, Situation(relay=True)) == Wait(WaitReason.NODES_BUSY, NOW + 0.5)


def test_a_node_that_tells_nothing_is_not_flooded() -> None:
    tells, silent = node("tells"), node("silent", tokens=None, sequences=None)
    for turn in range(20):
        decision = place(call(10, 10), [tells, silent], NOW, Situation(turn=turn))
        assert isinstance(decision, Run)
        decision.node.budget.hold(decision.node.room_for(call(10, 10)), CHAT)
    assert silent.budget.held().sequences <= 14


def test_batch_on_its_own_nodes_does_not_wait_for_chat() -> None:
    chat, batch = node("chat", frozenset({CHAT})), node("batch", frozenset({BATCH}))
    decision = place(call(workload=BATCH), [chat, batch], NOW, Situation(chat_waits=True, patience=3600.0))
    assert decision == Run(batch)
