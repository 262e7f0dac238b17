"""The nodes and the loops that look at them. Time is told by hand; sockets are real."""

import asyncio
import logging
from collections.abc import Callable
from time import monotonic

import pytest

from router.core.node import FAULTS_TO_DOWN, Load, Sign, Spec, State
from router.fleet.fleet import FACTS_EVERY
from tests.fakes import FakeNode
from tests.fleet.looking import BOTH, Clock, fleet_of, raw_server, spec
from tests.rig.descriptors import no_descriptors


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
        assert changed.calls == 1
        await fleet.look(node)
        assert (changed.calls, node.budget.foreign.sequences) == (2, 2)
        assert (fleet.by_name["node"], fleet.trouble, fleet.blind) == (node, {}, set())


async def test_a_look_that_could_not_be_made_says_nothing_of_the_node() -> None:
    async with FakeNode() as fake, fleet_of(spec(fake)) as fleet:
        node = fleet.nodes[0]
        node.observe(Sign.GOOD, 1.0, "answered")
        with no_descriptors():
            for _ in range(FAULTS_TO_DOWN + 1):
                await fleet.look(node)
        assert (node.state, node.misses, len(fleet.trouble)) == (State.READY, 0, 1)
        await fleet.look(node)
        assert (node.state, fleet.trouble) == (State.READY, {})


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
