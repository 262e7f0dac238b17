"""What the fleet says of the models its nodes serve. No node is asked."""

from functools import cache
from typing import Any

import pytest

from router.core.call import Workload
from router.core.node import Facts, Load, ModelFacts, Node, Spec, State
from router.fleet.fleet import Fleet
from router.fleet.probe import Probe
from router.upstream.client import Client
from tests.fleet.looking import BOTH

CHAT = frozenset({Workload.INTERACTIVE})
BATCH = frozenset({Workload.BATCH})


def known(
    name: str, pools: frozenset[Workload] = BOTH, models: dict[str, int | None] | None = None, **said: Any
) -> Node:
    node = Node(Spec(name=name, url="http://127.0.0.1:9", pools=pools, **said))
    facts = {
        model: ModelFacts(
            context=context,
            card={
                "id": model,
                "object": "model",
                "created": 7,
                "owned_by": name,
                "max_model_len": context,
                "root": model,
            },
        )
        for model, context in (models or {}).items()
    }
    node.seen(Facts(models=facts), Load(), 0.0)
    return node


@cache
def unused_probe() -> Probe:
    return Probe(Client(), {})


def fleet_with(*nodes: Node) -> Fleet:
    return Fleet(nodes, unused_probe())


def test_models_of_all_nodes_once_each() -> None:
    fleet = fleet_with(known("a", models={"m": 100, "x": None}), known("b", models={"m": 200}))
    cards = {card["id"]: card for card in fleet.model_cards(["m", "far", "far"])}
    assert list(cards) == ["m", "x", "far"]
    assert cards["m"] == {
        "id": "m",
        "object": "model",
        "created": 7,
        "owned_by": "a",
        "max_model_len": 200,
        "root": "m",
    }
    assert cards["x"]["max_model_len"] is None
    assert cards["far"]["owned_by"] == "relay"
    assert {type(card["created"]) for card in cards.values()} == {int}


def test_models_go_by_their_public_names() -> None:
    node = Node(
        Spec(name="a", url="http://h", pools=BOTH, models={"llama": "meta/Llama", "gone": "not there"}, context=80)
    )
    node.seen(Facts(models={"meta/Llama": ModelFacts(context=100, card={"id": "meta/Llama"})}), Load(), 0.0)
    cards = {card["id"]: card for card in fleet_with(node).model_cards()}
    assert list(cards) == ["llama", "gone"]
    assert (cards["llama"]["max_model_len"], cards["gone"]["max_model_len"]) == (80, 80)
    assert {card["object"] for card in cards.values()} == {"model"}


def test_a_node_that_is_down_keeps_its_models_and_yields_to_those_that_are_up() -> None:
    down, up = known("a", models={"m": 100, "only": 9}), known("b", models={"m": 50})
    for _ in range(3):
        down.missed(100.0, "gone", refused=True)
    assert down.state is State.DOWN
    cards = {card["id"]: card for card in fleet_with(down, up).model_cards()}
    assert (cards["m"]["owned_by"], cards["only"]["owned_by"]) == ("b", "a")


def test_a_card_of_odd_types_is_made_right() -> None:
    node = Node(Spec(name="a", url="http://h", pools=BOTH))
    card = {"id": "m", "object": None, "created": "now", "owned_by": 3, "extra": [1]}
    node.seen(Facts(models={"m": ModelFacts(card=card)}), Load(), 0.0)
    made = fleet_with(node).model_cards()[0]
    assert (made["object"], made["owned_by"], made["extra"]) == ("model", "ebbtide", [1])
    assert isinstance(made["created"], int)


@pytest.mark.parametrize(
    ("nodes", "context"),
    [
        ([known("a", models={"m": 100}), known("b", models={"m": 200})], 200),
        ([known("a", models={"m": 100}), known("b", BATCH, models={"m": 200})], 100),
        ([known("a", models={"m": 100}), known("b", models={"m": None})], None),
        ([known("a", CHAT, models={"m": 100}), known("b", BATCH, models={"m": None})], 100),
        ([known("a", BATCH, models={"m": 100})], None),
        ([known("a", models={"other": 100})], None),
        ([known("a", models={"m": 100}, context=60)], 60),
        ([], None),
    ],
)
def test_the_longest_interactive_context(nodes: list[Node], context: int | None) -> None:
    assert fleet_with(*nodes).interactive_context("m") == context
