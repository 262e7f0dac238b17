"""Disconnects, leaks and connection pools: whoever leaves, whenever, leaves nothing behind.

Each test drives the real router over real sockets; the fixture checks at its end that no room, waiter, connection or
task is left.
"""

import asyncio
import random
from time import monotonic

import pytest

from tests.fakes import Script
from tests.rig import Connection, ask, chat, eventually, request, stream

CHAT = "/v1/chat/completions"


async def opened(port, body, **options):
    """A client that has sent its request."""
    line = await Connection.open(port, **options)
    await line.send(request(CHAT, body))
    return line


@pytest.mark.parametrize("leave", [Connection.close, Connection.reset])
async def test_an_unstreamed_call_whose_client_left_is_aborted_at_the_node(rig, leave):
    node = await rig.node(script=Script(ttft=20))
    app = await rig.router()
    line = await opened(app.port, chat())
    await eventually(lambda: node.inflight == 1)
    assert app.held == 1
    leave(line)
    left = monotonic()
    await eventually(lambda: node.aborted, within=1)
    assert node.aborted[0].ended - left < 1
    await eventually(lambda: app.held == 0)
    assert app.node("n1").faults == 0
    metrics = await app.metrics()
    key = 'ebbtide_calls_total{endpoint="chat/completions",outcome="client_left",workload="interactive"}'
    assert metrics[key] == 1


async def test_a_queued_call_whose_client_left_never_reaches_the_node(rig):
    node = await rig.node(script=Script(ttft=0.6))
    app = await rig.router(
        {"name": "n1", "url": node.url, "max_sequences": 1}, pools={"interactive": {"patience_s": 9}}
    )
    running = asyncio.create_task(ask(app.port, chat()))
    await eventually(lambda: node.inflight == 1)
    gone = [await opened(app.port, chat(f"gone {index}")) for index in range(19)]
    await eventually(lambda: app.waiting == 19)
    survivor = asyncio.create_task(ask(app.port, chat("stays")))
    await eventually(lambda: app.waiting == 20)
    for line in gone:
        line.close()
    await eventually(lambda: app.waiting == 1, within=0.5)
    assert [(await call).status for call in (running, survivor)] == [200, 200]
    assert node.accepted == 2


async def test_a_stream_whose_client_reset_is_aborted_every_time(rig):
    node = await rig.node(script=Script(gap=0.02, n=500))
    app = await rig.router(server={"cors_origins": ["*"]})

    async def watch_and_reset():
        async with await Connection.open(app.port) as line:
            await line.send(request(CHAT, stream()))
            await line.read_until(b"tok3")
            line.reset()

    for _ in range(5):
        await asyncio.gather(*(watch_and_reset() for _ in range(10)))
        await eventually(lambda: node.inflight == 0, within=1)
    assert len(node.aborted) == node.accepted == 50


async def test_clients_that_leave_before_the_head_leak_no_connection(rig):
    node = await rig.node(script=Script(stall=(1, 5)))
    app = await rig.router()
    for batch in range(10):
        lines = [await opened(app.port, stream()) for _ in range(20)]
        if batch % 2:
            await eventually(lambda: node.inflight)
        for line in lines:
            line.reset()
    await eventually(lambda: node.inflight == 0)
    node.script = Script()
    began = monotonic()
    assert (await ask(app.port, chat())).status == 200
    assert monotonic() - began < 0.5


async def test_streams_that_are_refused_do_not_use_the_pool_up(rig):
    node = await rig.node(script=Script(status=422, shape="openai"))
    app = await rig.router()
    refused = await asyncio.gather(*(ask(app.port, stream()) for _ in range(50)))
    assert {reply.status for reply in refused} == {422}
    node.script = Script()
    began = monotonic()
    assert (await ask(app.port, stream())).text.startswith("tok0")
    assert monotonic() - began < 0.5


async def test_calls_left_at_random_moments_do_not_turn_routing(rig):
    first, second = await rig.node(), await rig.node()
    app = await rig.router()
    dice = random.Random(8)
    slow = Script(nohead=0.02, ttft=0.02, gap=0.01, n=20)
    first.script = second.script = slow

    async def leave_some_time():
        line = await opened(app.port, stream() if dice.random() < 0.5 else chat())
        await asyncio.sleep(dice.random() * 0.1)
        line.reset()

    for _ in range(4):
        await asyncio.gather(*(leave_some_time() for _ in range(40)))
    await eventually(lambda: app.held == 0)
    await eventually(lambda: first.inflight + second.inflight == 0)
    await eventually(lambda: not any(node.budget.foreign.sequences for node in app.nodes))
    for node in (first, second):
        node.forget()
        node.script = Script()
    for _ in range(100):
        assert (await ask(app.port, chat())).status == 200
    assert abs(first.accepted - second.accepted) <= 20


async def test_a_stalled_stream_is_let_go_when_its_client_leaves(rig):
    node = await rig.node(script=Script(stall=(3, 600)))
    app = await rig.router(upstream={"idle_s": 30})
    async with await Connection.open(app.port) as line:
        await line.send(request(CHAT, stream()))
        await line.read_until(b"tok2")
    await eventually(lambda: node.aborted, within=1)


async def test_one_silent_node_does_not_slow_the_others(rig):
    silent = await rig.node(models=["silent"], script=Script(nohead=600))
    await rig.node(models=["tiny"])
    app = await rig.router(upstream={"first_byte_s": 3, "first_byte_per_prompt_token_s": 0.0001, "retries": 0})
    stuck = [asyncio.create_task(ask(app.port, chat(model="silent"))) for _ in range(100)]
    await eventually(lambda: silent.inflight >= 50)
    took = []
    for _ in range(20):
        began = monotonic()
        assert (await ask(app.port, chat())).status == 200
        took.append(monotonic() - began)
    assert sorted(took)[-2] < 0.2
    assert {reply.status for reply in await asyncio.gather(*stuck)} <= {502, 503, 504}
    assert str(app.node("n1").state) == "down"


async def test_a_connection_closed_as_it_is_reused_is_no_error(rig):
    node = await rig.node()
    app = await rig.router()
    for round_ in range(20):
        assert (await ask(app.port, chat())).status == 200
        node.race_closes = round_ % 2
    assert node.accepted == 20
    assert app.node("n1").faults == 0


async def test_calls_spaced_at_the_nodes_idle_bound_meet_no_error(rig):
    node = await rig.node()
    node.idleclose = 0.15
    app = await rig.router()
    for _ in range(20):
        assert (await ask(app.port, chat())).status == 200
        await asyncio.sleep(0.15 + random.uniform(-0.005, 0.005))
    assert node.accepted == 20
    assert app.node("n1").faults == 0


async def test_an_idle_client_connection_stays_open(rig):
    await rig.node()
    app = await rig.router()
    async with await Connection.open(app.port) as line:
        for _ in range(3):
            await line.send(request(CHAT, chat()))
            assert (await line.reply()).status == 200
            await asyncio.sleep(0.3)
