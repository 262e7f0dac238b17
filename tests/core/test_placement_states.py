"""What the states of nodes mean for where calls go: each row of the table of terms, tried."""

import pytest

from router.core.budget import Room
from router.core.call import Workload
from router.core.node import Node, State
from router.core.placement import Relay, RelayCause, Run, Situation, TakeBack, Wait, place
from router.core.states import TERMS, Access
from router.core.yielding import Policy
from tests.core.test_placement import BATCH, CHAT, NOW, call, node

NONE = Policy(degraded_chat=False)


def placed(nodes: list[Node], workload: Workload = CHAT, **situation: object) -> object:
    return place(call(workload=workload), nodes, NOW, Situation(**situation))


@pytest.mark.parametrize("workload", Workload)
@pytest.mark.parametrize("state", State)
def test_alone_a_node_gets_calls_unless_its_state_says_no(state: State, workload: Workload) -> None:
    one = node(state=state)
    one.retry_at = NOW + 100
    one.failed_at = NOW
    found = placed([one], workload)
    assert isinstance(found, Wait if TERMS[state].access(workload) is Access.NO else Run)


@pytest.mark.parametrize("workload", Workload)
@pytest.mark.parametrize("state", [State.BUSY, State.DEGRADED])
def test_who_is_not_well_comes_after_all_others_with_room(state: State, workload: Workload) -> None:
    well, unwell = node("well"), node("unwell", state=state)
    well.budget.hold(Room(700, 5), workload)
    for turn in range(4):
        found = placed([unwell, well], workload, turn=turn)
        assert isinstance(found, Run)
        assert found.node is well
    well.budget.hold(Room(200, 1), workload)
    found = placed([unwell, well], workload)
    assert isinstance(found, Run)
    assert found.node is unwell


def test_batch_is_taken_back_on_a_node_that_is_well_before_chat_goes_to_one_that_is_not() -> None:
    well, unwell = node("well"), node("unwell", state=State.DEGRADED)
    well.budget.hold(Room(950, 8), BATCH, prompt_tokens=900, now=NOW)
    found = placed([unwell, well])
    assert isinstance(found, TakeBack)
    assert found.node is well


def test_with_none_a_degraded_node_gets_chat_only_when_there_is_nobody_else() -> None:
    well, unwell = node("well"), node("unwell", state=State.DEGRADED)
    well.budget.hold(Room(950, 8), CHAT)
    assert isinstance(placed([unwell, well], policy=NONE), Wait)
    assert placed([unwell], policy=NONE) == Run(unwell)
    assert placed([unwell], policy=NONE, relay=True) == Relay(RelayCause.DEGRADED)
    assert placed([unwell], relay=True) == Run(unwell)
    assert placed([unwell], BATCH, policy=NONE, relay=True) == Run(unwell), "nobody watches batch"


def test_with_none_a_relay_takes_over_only_while_it_is_better() -> None:
    one, two = node("one", state=State.DEGRADED), node("two", state=State.DEGRADED)
    two.outruns_relay = True
    for turn in range(2):
        assert placed([one, two], policy=NONE, relay=True, turn=turn) == Run(two)
    two.budget.hold(Room(950, 8), CHAT)
    assert isinstance(placed([one, two], policy=NONE, relay=True), Wait)
    assert placed([one, two], policy=NONE, relay=True, waited=9.0) == Relay(RelayCause.NO_ROOM)


@pytest.mark.parametrize("state", [State.DRAINING, State.RECYCLING])
def test_panic_does_not_reach_for_what_somebody_took_out(state: State) -> None:
    one = node(state=state)
    one.failed_at = one.retry_at = NOW - 1000
    assert isinstance(placed([one]), Wait)
    assert placed([one], relay=True) == Relay(RelayCause.NODES_DOWN)
