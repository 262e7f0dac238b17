"""A chat that is placed in one pass over the nodes goes where all of the thought would have led it."""

from collections.abc import Callable

from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from router.core.budget import Room
from router.core.call import Call, Workload
from router.core.node import Load, Node, State
from router.core.placement import Run, Situation, at_once, place, weigh
from router.core.yielding import Policy
from tests.core.test_placement import CHAT, NOW, call, calls, fleets, node, situations


@settings(max_examples=200, deadline=None)
@given(calls, fleets, situations, st.none() | st.integers(0, 3), st.booleans())
def test_what_is_placed_is_what_all_of_the_thought_comes_to(
    asked: Call, makers: list[Callable[[], Node]], situation: Situation, packed: int | None, degraded_chat: bool
) -> None:
    nodes = [make() for make in makers]
    situation.packed, situation.policy = packed, Policy(degraded_chat=degraded_chat)
    assert place(asked, nodes, NOW, situation) == weigh(asked, nodes, NOW, situation)


@st.composite
def fit(draw: st.DrawFn) -> Node:
    """A node that has something to say against it rather seldom."""
    capacities = draw(st.sampled_from([(None, None), (1000, None), (None, 8), (1000, 8)]))
    made = node("", tokens=capacities[0], sequences=capacities[1], load=Load(waiting=draw(st.sampled_from([0, 0, 1]))))
    made.state = draw(st.sampled_from([*[State.READY] * 5, *State]))
    made.faults, made.back_at = draw(st.integers(0, 1)), draw(st.sampled_from([-1e9, -1e9, NOW - 1]))
    for workload, reading in draw(st.lists(st.tuples(st.sampled_from(Workload), st.sampled_from([0, 300, 900])))):
        made.budget.hold(Room(reading, 1), workload, prompt_tokens=reading, now=NOW)
    return made


@settings(max_examples=200, deadline=None)
@given(calls, fleets, st.lists(fit(), min_size=1, max_size=3), situations)
def test_a_chat_placed_at_once_goes_where_all_of_the_thought_leads(
    asked: Call, makers: list[Callable[[], Node]], fits: list[Node], situation: Situation
) -> None:
    asked = structs.replace(asked, workload=CHAT, model="m", bound_to=None)
    situation.tried = ()
    nodes = [*fits, *(make() for make in makers)]
    assert at_once(asked, nodes, NOW, situation) in (None, weigh(asked, nodes, NOW, situation))


def test_a_call_whose_answer_the_context_cuts_short_is_given_what_it_then_fits_into() -> None:
    asked = call(100, 2000)
    free, used = node("free"), node("used", tokens=10_000)
    used.budget.hold(Room(100, 1), CHAT)
    assert at_once(asked, [used, free], NOW, Situation()) == Run(free), "no more than 1000 tokens are ever held"
    free.budget.hold(Room(1, 1), CHAT)
    assert at_once(asked, [used, free], NOW, Situation()) == Run(used)
