"""The relay's spend cap over real sockets: what is charged, that the cap holds, that it is told, and that it lasts."""

import asyncio

import pytest

from tests.fakes import FakeNode, Script
from tests.rig import ask, chat, entry, eventually, relay_entry, running_app, stream
from tests.rig.client import Connection, request

FULL = {"interactive": {"patience_s": 0}}


def priced(relay, usd, *, output=1_000_000.0):
    """A dollar a token, to make sums easy."""
    prices = {"usd_a_day": usd, "input_usd": {"tiny": 0}, "output_usd": {"tiny": output}}
    return relay_entry(relay, api_key=relay.requires_key, spend=prices)


async def through_relay(rig, usd, **settings):
    """A router whose only node is down, so that everything needs the relay."""
    node, relay = await rig.node(), await rig.relay()
    app = await rig.router(relay=priced(relay, usd), upstream={"retries": 0}, pools=FULL, **settings)
    await node.down()
    await eventually(lambda: str(app.node("n1").state) == "down", within=5)
    return app, relay


async def spent(app):
    found = await app.metrics()
    return found['ebbtide_relay_spend_day_usd{by="people"}'], found.get(
        'ebbtide_relay_spend_usd_total{workload="interactive"}', 0.0
    )


@pytest.mark.parametrize("make", [chat, stream])
async def test_a_call_costs_what_its_usage_says(rig, make):
    app, _ = await through_relay(rig, 1000)
    reply = await ask(app.port, make(max_tokens=100))
    assert (reply.status, reply.header("x-ebbtide-node")) == (200, "relay")
    assert await spent(app) == (5, 5)
    assert (await app.metrics())['ebbtide_relay_spend_cap_usd{cap="day"}'] == 1000


async def test_over_the_cap_nobody_is_relayed_and_it_is_told(rig):
    app, relay = await through_relay(rig, 105)
    for _ in range(2):
        assert (await ask(app.port, chat(max_tokens=100))).status == 200
    assert relay.accepted == 2
    reply = await ask(app.port, chat(max_tokens=100))
    assert (reply.status, reply.error["code"], relay.accepted) == (503, "server_is_overloaded", 2)
    assert (await ask(app.port, chat(max_tokens=50))).status == 200, "what still fits goes out"
    assert (await app.metrics())['ebbtide_relay_capped_total{cap="day"}'] == 1
    assert await spent(app) == (15, 15)


async def test_what_is_under_way_counts_and_a_caller_that_leaves_has_cost_its_estimate(rig):
    app, relay = await through_relay(rig, 105)
    relay.script = Script(n=50, gap=0.05)
    async with await Connection.open(app.port) as connection:
        await connection.send(request("/v1/chat/completions", stream(max_tokens=100)))
        await eventually(lambda: relay.inflight == 1)
        assert (await ask(app.port, chat(max_tokens=10))).status == 503
    await eventually(lambda: relay.inflight == 0)
    await eventually(lambda: not app.inside.dispatcher.trips)
    assert await spent(app) == (100, 100)


@pytest.mark.parametrize("status", [400, 429, 500])
async def test_what_the_relay_refuses_costs_nothing(rig, status):
    app, relay = await through_relay(rig, 1000)
    relay.script = Script(status=status)
    assert (await ask(app.port, chat(max_tokens=100))).status >= 400
    assert await spent(app) == (0, 0)


async def test_calls_that_waited_together_do_not_break_the_cap(rig):
    node, relay = await rig.node(script=Script(ttft=300), slots=1), await rig.relay()
    entry = {"name": "n1", "url": node.url, "engine": "vllm", "max_sequences": 1, "models": ["tiny"]}
    app = await rig.router(entry, relay=priced(relay, 250), pools={"interactive": {"patience_s": 0.3}})
    relay.script = Script(ttft=1)
    first = asyncio.create_task(ask(app.port, chat(max_tokens=100)))
    await eventually(lambda: node.inflight == 1)
    replies = await asyncio.gather(*(ask(app.port, chat(max_tokens=100)) for _ in range(6)))
    assert sorted(reply.status for reply in replies) == [200, 200, 503, 503, 503, 503]
    assert "relay" in next(reply for reply in replies if reply.status == 503).error["message"]
    node.script = Script()
    first.cancel()
    await asyncio.gather(first, return_exceptions=True)


async def test_a_reload_changes_the_cap_and_forgets_nothing(rig):
    app, relay = await through_relay(rig, 10)
    assert (await ask(app.port, chat(max_tokens=10))).status == 200
    assert (await ask(app.port, chat(max_tokens=10))).status == 503
    rest = {"nodes": [entry(rig.nodes[0])], "upstream": {"retries": 0}, "pools": FULL}
    assert await app.reload({**rest, "relay": priced(relay, 20)}) == ["relay.spend.usd_a_day changed"]
    assert (await ask(app.port, chat(max_tokens=10))).status == 200
    assert (await app.metrics())['ebbtide_relay_spend_cap_usd{cap="day"}'] == 20
    unlimited = relay_entry(relay, api_key=relay.requires_key)
    assert await app.reload({**rest, "relay": unlimited}) == ["relay.spend removed"]
    assert (await ask(app.port, chat(max_tokens=1000))).status == 200
    await app.reload({**rest, "relay": priced(relay, 15, output=500_000.0)})
    assert (await spent(app))[0] == 10, "what went out while nothing was counted is not, the rest is kept"
    assert (await ask(app.port, chat(max_tokens=11))).status == 503, "five and a half dollars where five are left"
    assert (await ask(app.port, chat(max_tokens=10))).status == 200


async def test_a_cap_that_comes_with_a_reload_is_kept_in_the_store(tmp_path):
    rest = {"store": {"url": f"sqlite:///{tmp_path}/jobs.db"}, "upstream": {"retries": 0}}
    async with FakeNode(name="n1") as node, FakeNode(dialect="openai", requires_key="relay-key") as relay:
        there = {"nodes": [entry(node)], **rest}
        async with running_app({**there, "relay": relay_entry(relay, api_key="relay-key")}) as app:
            await app.reload({**there, "relay": priced(relay, 1000)})
            await node.down()
            await eventually(lambda: str(app.node("n1").state) == "down", within=5)
            assert (await ask(app.port, chat(max_tokens=100))).status == 200
            assert await spent(app) == (5, 5)
        async with running_app({**there, "relay": priced(relay, 1000)}, ready=False) as again:
            assert (await spent(again))[0] == 5
