"""The nodes and the loops that look at them. Time is told by hand; sockets are real."""

import asyncio
import logging
from collections.abc import Callable
from functools import cache
from time import monotonic
from typing import Any

import pytest

from router.core.call import Workload
from router.core.node import FAULTS_TO_DOWN, Facts, Load, ModelFacts, Node, Sign, Spec, State
from router.fleet.fleet import FACTS_EVERY, Fleet
from router.fleet.probe import Probe
from router.upstream.client import Client
from tests.fakes import FakeNode
from tests.fleet.looking import BOTH, Clock, fleet_of, raw_server, spec

CHAT = frozenset({Workload.INTERACTIVE})
BATCH = frozenset({Workload.BATCH})


class Counter:
    def __init__(self) -> None:
        self.calls = 0

    def __call__(self) -> None:
        self.calls += 1


async def until(true: Callable[[], bool], within_s: float = 5.0) -> None:
    """Poll for something a loop does on real sockets."""
    async with asyncio.timeout(within_s):
        while not true():  # noqa: ASYNC110 - what is polled tells nobody when it changes
            await asyncio.sleep(0.005)


# looking


async def test_a_node_that_answers_is_ready_and_known() -> None:
    changed = Counter()
    async with FakeNode(models=["tiny"], kv_tokens=4096) as fake, fleet_of(spec(fake), changed=changed) as fleet:
        node = fleet.nodes[0]
        assert fleet.serving("tiny") == []
        await fleet.look(node)
        assert (node.state, node.budget.tokens, fleet.serving("tiny")) == (State.READY, 4096, [node])
        assert changed.calls == 1
        await fleet.look(node)
        assert changed.calls == 1
        fake.running = 2
        await fleet.look(node)
        assert changed.calls == 2
        assert (fleet.by_name["node"], fleet.trouble, fleet.blind) == (node, {}, set())


async def test_facts_are_read_seldom_and_load_at_each_look() -> None:
    async with FakeNode(models=["tiny"]) as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        await fleet.look(node)
        fake.models.append("late")
        fake.forget()
        for _ in range(FACTS_EVERY - 1):
            await fleet.look(node)
        assert {seen.path for seen in fake.probes} == {"/health", "/metrics"}
        assert not node.serves("late")
        await fleet.look(node)
        assert node.serves("late")
        assert {seen.path for seen in fake.probes} == {"/health", "/metrics", "/v1/models", "/version"}


async def test_what_comes_back_after_being_down_may_be_another_engine() -> None:
    async with FakeNode(models=["tiny"], dialect="vllm") as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        await fleet.look(node)
        await fake.down()
        while node.state is not State.DOWN:
            await fleet.look(node)
        assert node.serves("tiny")
        fake.dialect, fake.models, fake.slots, fake.context = "llamacpp", ["other"], 2, 1024
        await fake.up()
        await fleet.look(node)
        assert (node.state, node.facts.engine, node.budget.tokens) == (State.PROBATION, "llamacpp", 2048)
        assert fleet.serving("tiny") == []


async def test_a_node_that_calls_took_down_is_recognised_again() -> None:
    async with FakeNode(models=["tiny"]) as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        await fleet.look(node)
        for _ in range(FAULTS_TO_DOWN):
            node.observe(Sign.FAULT, 0.0, "reset")
        fake.dialect, fake.models = "sglang", ["other"]
        await fleet.look(node)
        assert (node.facts.engine, node.models()) == ("sglang", ["other"])


async def test_an_engine_that_was_not_sure_is_looked_for_again() -> None:
    slow = {b"/metrics"}

    async def vllm(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        path = head.split()[1]
        if path in slow:
            await reader.read()
        pages = {
            b"/v1/models": b'{"data":[{"id":"m","owned_by":"us"}]}',
            b"/metrics": b"vllm:num_requests_running 1\n",
            b"/health": b"",
        }
        status = b"200 OK" if path in pages else b"404 Not Found"
        body = pages.get(path, b"")
        writer.write(b"HTTP/1.1 %s\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%s" % (status, len(body), body))
        await writer.drain()

    async with raw_server(vllm) as url, fleet_of(Spec(name="n", url=url, pools=BOTH), timeout_s=0.3) as fleet:
        node = fleet.nodes[0]
        await fleet.look(node)
        assert node.facts.engine == "openai"
        slow.clear()
        await fleet.look(node)
        assert (node.facts.engine, node.facts.streams_usage, node.load.running) == ("vllm", True, 1)


async def test_a_capacity_that_is_not_told_this_time_is_kept() -> None:
    async with FakeNode(kv_tokens=4096) as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        await fleet.look(node)
        fake.metrics = 500
        for _ in range(FACTS_EVERY + 1):
            await fleet.look(node)
        assert (node.load, node.budget.tokens) == (Load(), 4096)
        assert fleet.blind == {"node"}
        fake.version = "0.34.0"
        for _ in range(FACTS_EVERY):
            await fleet.look(node)
        assert node.budget.tokens is None


async def test_a_restart_with_less_room_is_believed() -> None:
    async with FakeNode(kv_tokens=4096) as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        await fleet.look(node)
        await fake.down()
        while node.state is not State.DOWN:
            await fleet.look(node)
        fake.metrics = 500
        await fake.up()
        await fleet.look(node)
        assert node.budget.tokens is None


async def test_trouble_is_logged_when_it_begins_and_ends(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ebbtide.fleet")
    async with FakeNode() as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        await fake.down()
        for _ in range(5):
            await fleet.look(node)
        assert node.state is State.DOWN
        assert [record.getMessage().partition(":")[0] for record in caplog.records] == [
            "node node",
            "node node is down",
        ]
        assert "node" in fleet.trouble
        caplog.clear()
        await fake.up()
        for _ in range(3):
            await fleet.look(node)
        assert [record.getMessage() for record in caplog.records] == ["node node answers again (vllm)"]
        assert fleet.trouble == {}
        caplog.clear()
        fake.metrics = 500
        for _ in range(3):
            await fleet.look(node)
        assert len(caplog.records) == 1


async def test_metrics_old_new_missing_broken_and_stale() -> None:
    names: list[dict[str, str | None]] = [
        {"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc"},
        {},
        {"vllm:kv_cache_usage_perc": None, "vllm:num_requests_running": None},
        {},
        {},
    ]
    samples = ("vllm:num_requests_running 0", "vllm:kv_cache_usage_perc 0.5")
    stale = "".join(f"{sample} 1395066363000\n" for sample in samples)
    fakes = [FakeNode(name=f"F{index + 1}") for index in range(5)]
    for fake, renamed in zip(fakes, names, strict=True):
        fake.kv_usage, fake.metric_names = 0.5, renamed
    fakes[3].metrics, fakes[4].metrics = 500, stale
    async with fakes[0], fakes[1], fakes[2], fakes[3], fakes[4], fleet_of(*map(spec, fakes)) as fleet:
        await fleet.first_look(5.0)
        used = [node.load.used for node in fleet.nodes]
    assert used == [0.5, 0.5, None, None, 0.5]
    assert all(node.state is State.READY for node in fleet.nodes)
    assert fleet.blind == {"F3", "F4"}


# first look


async def test_the_first_look_waits_for_no_silent_node() -> None:
    async with FakeNode(name="quick") as quick, FakeNode(name="silent") as silent:
        silent.frozen = True
        async with fleet_of(spec(quick), spec(silent), timeout_s=30.0) as fleet:
            began = monotonic()
            await fleet.first_look(0.3)
            assert monotonic() - began < 1.0
            assert [node.state for node in fleet.nodes] == [State.READY, State.STARTING]
        silent.frozen = False


async def test_no_nodes_at_all() -> None:
    async with fleet_of() as fleet:
        await fleet.first_look(1.0)
        await fleet.watch()
        assert fleet.model_cards() == []
        assert fleet.interactive_context("tiny") is None


# watching


class Steps:
    """A sleep that ends when told, in place of the passing of time; it notes what was asked for."""

    def __init__(self) -> None:
        self.asked: list[float] = []
        self._gate = asyncio.Event()

    async def __call__(self, seconds: float) -> None:
        self.asked.append(seconds)
        if seconds and len(self.asked) > 3:
            await self._gate.wait()

    def go(self) -> None:
        self._gate.set()
        self._gate = asyncio.Event()


async def test_looks_are_spread_over_a_period_and_repeated() -> None:
    steps, clock = Steps(), Clock()
    fakes = [FakeNode(name=name) for name in "abc"]
    async with (
        fakes[0],
        fakes[1],
        fakes[2],
        fleet_of(*map(spec, fakes), sleep=steps, clock=clock, every_s=3.0) as fleet,
    ):
        task = asyncio.create_task(fleet.watch())
        await until(lambda: len(steps.asked) == 6)
        assert steps.asked == [0.0, 1.0, 2.0, 3.0, 3.0, 3.0]
        assert all(node.state is State.READY for node in fleet.nodes)
        for fake in fakes:
            fake.forget()
        steps.go()
        await until(lambda: all(fake.probes for fake in fakes))
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task


async def test_a_silent_node_delays_only_itself() -> None:
    async with FakeNode(name="quick") as quick, FakeNode(name="silent") as silent:
        silent.frozen = True
        async with fleet_of(spec(quick), spec(silent), timeout_s=30.0, every_s=0.02) as fleet:
            task = asyncio.create_task(fleet.watch())
            await until(lambda: len(quick.probes) > 20)
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task
            assert fleet.by_name["silent"].state is State.STARTING
        silent.frozen = False


async def test_nonsense_from_one_node_kills_no_loop() -> None:
    async def nonsense(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b'HTTP/1.1 200 OK\r\ncontent-length: 21\r\n\r\n{"data": {"id": [1]}}')
        await writer.drain()

    async with FakeNode(name="good") as good, raw_server(nonsense) as url:
        odd = Spec(name="odd", url=url, pools=BOTH)
        async with fleet_of(spec(good), odd, every_s=0.01) as fleet:
            task = asyncio.create_task(fleet.watch())
            await until(lambda: fleet.by_name["odd"].state is State.DOWN and len(good.probes) > 10)
            assert not task.done()
            assert fleet.by_name["good"].state is State.READY
            assert "not a list of models" in fleet.trouble["odd"]
            task.cancel()
            with pytest.raises(asyncio.CancelledError):
                await task


async def test_a_busy_node_that_answers_calls_is_not_thrown_out() -> None:
    clock = Clock()
    async with FakeNode() as fake, fleet_of(spec(fake), timeout_s=0.05, clock=clock) as fleet:
        node = fleet.nodes[0]
        fake.probe_delay = 0.2
        for _ in range(8):
            clock.now += 2.0
            node.heard(clock.now - 1.0)
            await fleet.look(node)
        assert node.state is State.STARTING
        assert "node" in fleet.trouble


# models


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
