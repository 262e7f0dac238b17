"""When a node is due, and what speaks against taking it out."""

import pytest

from router.core.call import Workload
from router.core.care import Care, Record, hindrance, reluctance, wanted
from router.core.node import Node, Spec, State
from tests.rig.recycling import Found

CHAT, BATCH = frozenset((Workload.INTERACTIVE,)), frozenset((Workload.BATCH,))


def node(name, state=State.READY, pools=frozenset(Workload), models=("m",)):
    one = Node(Spec(name=name, url=f"http://{name}", pools=pools, models={model: model for model in models}))
    one.state = state
    return one


@pytest.mark.parametrize(
    ("found", "due"),
    [
        (Found("memory_growth", 3599, 10), True),
        (Found("memory_growth_with_drift", 0, 10), True),
        (Found("memory_growth", 3601, 10), False),
        (Found("memory_growth", None, 10), False),
        (Found("steady", 10, 10), False),
        (Found("steady", None, 1000), True),
        (Found("steady", None, 999), False),
        (Found("unknown", None, None), False),
        (Found("decode_decay", None, 10), False),
    ],
)
def test_a_node_is_due_by_what_its_memory_will_do_or_has_done(found, due):
    assert (wanted(found, Care(rss_limit_bytes=1000)) is not None) is due


def test_without_a_limit_only_growth_counts():
    assert wanted(Found("steady", None, 1e15), Care()) is None


@pytest.mark.parametrize("state", [State.DRAINING, State.RECYCLING, State.DOWN, State.PROBATION])
def test_no_more_than_so_many_are_out(state):
    one, two, three = node("a"), node("b", state), node("c")
    assert "b is not there" in (hindrance(one, [one, two, three], (), Care()) or "")
    assert hindrance(one, [one, two, three], (), Care(max_unavailable=2)) is None


@pytest.mark.parametrize("state", [State.READY, State.BUSY, State.DEGRADED])
def test_another_node_that_carries_its_part_is_enough(state):
    one, two = node("a"), node("b", state)
    assert hindrance(one, [one, two], (), Care()) is None


@pytest.mark.parametrize(
    ("other", "relayed", "words"),
    [
        (node("b", pools=BATCH), (), "last usable node of the interactive pool for m"),
        (node("b", pools=CHAT), (), "last usable node of the batch pool for m"),
        (node("b", models=("else",)), (), "for m"),
        (node("b", State.STARTING), (), "for m"),
        (node("b", models=("else",)), ("m",), None),
    ],
)
def test_never_the_last_of_a_pool_unless_a_relay_answers(other, relayed, words):
    one = node("a")
    found = hindrance(one, [one, other], relayed, Care())
    assert found is None if words is None else words in (found or "")


def test_the_router_keeps_its_distance_and_gives_up():
    care = Care(cooldown_s=100, failures=2)
    assert reluctance(Record(), care, 0.0) is None
    assert "not again for 40 s" in (reluctance(Record(ended_at=0.0), care, 60.0) or "")
    assert reluctance(Record(ended_at=0.0), care, 100.0) is None
    assert "somebody has to look" in (reluctance(Record(0.0, 2, "the hook answered 503"), care, 1e6) or "")
