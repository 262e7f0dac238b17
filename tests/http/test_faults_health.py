"""Field faults of health and load signals: engines that hang behind a living front, busy nodes, frozen nodes, flapping.

Numbers in names are those of the list of faults that people who run such systems reported.
"""

import asyncio
from time import monotonic

from router.core.node import State
from tests.fakes import Script
from tests.rig import ask, chat, entry, eventually, stream

LONG = "word " * 4000


def learn(node, seconds=0.05, tokens=(8, 64, 1024, 8192)):
    """The node has shown how long it reads."""
    for length in tokens:
        for _ in range(10):
            node.pace.read_quietly(length, seconds, chat=True)


def chats(node):
    return [seen for seen in node.seen if seen.path.endswith("completions")]


async def test_b43_an_engine_that_hangs_behind_a_living_front_leaves_after_two_head_bounds(rig):
    one, two = await rig.node(script=Script(nohead=600)), await rig.node()
    app = await rig.router(upstream={"first_byte_s": 30, "retries": 1}, care={"first_byte_least_s": 0.5})
    learn(app.node("n1"))
    began = monotonic()
    replies = await asyncio.gather(*(ask(app.port, stream()) for _ in range(6)))
    assert {(reply.status, reply.header("x-ebbtide-node")) for reply in replies} == {(200, "n2")}, "nobody noticed"
    assert app.node("n1").state in (State.DOWN, State.PROBATION)
    assert monotonic() - began < 10, "by what the node has shown it needs, not by upstream.first_byte_s"
    assert (len(chats(one)), len(chats(two))) == (3, 6)
    one.script = Script()
    await eventually(lambda: app.node("n1").usable(app.inside.clock()), within=10)
    app.node("n2").refused_until = 1e12
    assert (await ask(app.port, stream())).header("x-ebbtide-node") == "n1", "one real answer lets it in again"
    assert app.node("n1").state is State.READY


async def test_b44_a_busy_node_that_misses_its_looks_stays_in_and_its_streams_are_untouched(rig):
    one = await rig.node(script=Script(n=120, gap=0.02))
    app = await rig.router(probe={"every_s": 0.1, "timeout_s": 0.15})
    states = set()
    app.node("n1").moved = lambda node, _: states.add(node.state)
    one.probe_delay = 1.0
    replies = await asyncio.gather(*(ask(app.port, stream(max_tokens=120)) for _ in range(8)))
    assert {(reply.status, len(reply.text.split())) for reply in replies} == {(200, 120)}
    assert states == {State.BUSY}, "busy, once, and never out"


async def test_b48_a_short_prompt_is_given_up_in_seconds_and_a_long_one_is_not(rig):
    one, _ = await rig.node(script=Script(ttft=2.0)), await rig.node()
    app = await rig.router(upstream={"first_byte_s": 30, "retries": 1}, care={"first_byte_least_s": 0.4})
    node = app.node("n1")
    learn(node, 0.01, tokens=(16,))
    learn(node, 1.0, tokens=(4096, 8192))
    app.node("n2").refused_until = 1e12
    long = asyncio.create_task(ask(app.port, stream(LONG)))
    await eventually(lambda: one.inflight)
    assert (await long).header("x-ebbtide-node") == "n1", "reading takes long, and that is known"
    app.node("n2").refused_until = 0
    one.frozen = True
    began = monotonic()
    while node.state is not State.DOWN and monotonic() - began < 20:
        reply = await ask(app.port, stream())
        assert (reply.status, reply.header("x-ebbtide-node")) == (200, "n2")
    assert monotonic() - began < 6
    one.frozen = False
    await eventually(lambda: node.state is not State.DOWN, within=10)


async def test_a_frozen_node_that_thaws_is_not_met_by_a_herd(rig):
    one, two = await rig.node(script=Script(ttft=0.3)), await rig.node(slots=64, script=Script(ttft=0.3))
    app = await rig.router(upstream={"first_byte_s": 2, "retries": 2}, care={"first_byte_least_s": 0.5})
    node = app.node("n1")
    one.frozen = True
    await asyncio.gather(*(ask(app.port, stream()) for _ in range(4)))
    await eventually(lambda: node.state is State.DOWN, within=5)
    before = len(chats(one))
    stop = asyncio.Event()

    async def load():
        while not stop.is_set():
            reply = await ask(app.port, stream())
            assert (reply.status, reply.clean) == (200, True)

    async with asyncio.TaskGroup() as group:
        for _ in range(6):
            group.create_task(load())
        one.frozen = False
        most_in_probation = 0

        def watch():
            nonlocal most_in_probation
            if node.state in (State.DOWN, State.PROBATION):
                most_in_probation = max(most_in_probation, node.budget.held().sequences)
            return node.state is State.READY

        await eventually(watch, within=10)
        at_return = node._fresh()
        stop.set()
    assert most_in_probation <= 1
    assert at_return <= 2
    assert len(chats(one)) > before
    assert two.accepted


async def test_a_flapping_node_is_tried_less_and_less_and_nobody_notices(rig):
    one, _ = await rig.node(), await rig.node()
    app = await rig.router(upstream={"retries": 2, "connect_s": 0.5})
    node, waits = app.node("n1"), []
    for _ in range(3):
        one.script = Script(cut=0)
        replies = await asyncio.gather(*(ask(app.port, chat()) for _ in range(6)))
        assert {reply.status for reply in replies} == {200}
        assert node.state is State.DOWN
        waits.append(node.retry_at - node.failed_at)
        one.script = Script()
        node.retry_at = 0.0
        app.node("n2").refused_until = 1e12
        assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1"
        app.node("n2").refused_until = 0.0
        assert node.state is State.READY
    assert 1.3 < waits[1] / waits[0] < 3
    assert 1.3 < waits[2] / waits[1] < 3


async def test_b46_calls_between_two_looks_are_spread_by_what_was_sent_since(rig):
    one, two = await rig.node(script=Script(ttft=0.3)), await rig.node(script=Script(ttft=0.3))
    app = await rig.router(entry(one), entry(two), probe={"every_s": 5})
    await asyncio.gather(*(ask(app.port, stream()) for _ in range(8)))
    assert abs(len(chats(one)) - len(chats(two))) <= 2


async def test_b47_a_metric_that_was_renamed_or_is_gone_is_not_read_as_an_idle_node(rig):
    names = {"vllm:num_requests_running": None, "vllm:num_requests_waiting": None, "vllm:kv_cache_usage_perc": None}
    told, blind, broken = await rig.node(), await rig.node(), await rig.node()
    blind.metric_names = names
    app = await rig.router()
    broken.metrics = 500
    for fake in (told, blind, broken):
        fake.script = Script(ttft=0.4)
    await eventually(lambda: app.node("n2").load.running is None)
    await asyncio.gather(*(ask(app.port, stream()) for _ in range(12)))
    counts = [len(chats(fake)) for fake in (told, blind, broken)]
    assert sum(counts) == 12
    assert max(counts) - min(counts) <= 3
