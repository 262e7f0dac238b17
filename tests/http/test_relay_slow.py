"""A relay that is slow, silent or down: whoever a node can answer does not wait for it, and no node is blamed."""

import asyncio
from time import monotonic

from router.core.drift import ALARMS
from router.core.node import State
from tests.fakes import Script
from tests.http.test_canary import sampling
from tests.rig import ask, chat, entry, eventually, stream
from tests.rig.recycling import SLOWER, find

SLOW_S = 2.0
SILENT = Script(nohead=60.0)
NO_PATIENCE = {"pools": {"interactive": {"patience_s": 0.1}}}
CANARIES = {"care": {"canary": {"enabled": True, "every_s": 0.1, "relay_every_s": 0.1}}}


def blameless(app):
    """No node ever left its place, and nothing is held against one."""
    return all(
        {after for _, _, after in node.moves} == {State.READY} and not node.faults and not node.misses
        for node in app.nodes
    )


async def test_calls_at_a_slow_relay_hold_up_none_that_a_node_can_take(rig):
    """They went there for want of room; room that is free again is used at once, and each is told apart."""
    one, relay = await rig.node(), await rig.relay(script=Script(ttft=SLOW_S))
    app = await rig.router(entry(one, max_sequences=1), relay=relay, **NO_PATIENCE)
    one.upcoming.append(Script(ttft=0.5))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask(app.port, stream()))
        await eventually(lambda: one.running)
        away = [group.create_task(ask(app.port, stream())) for _ in range(3)]
        await eventually(lambda: relay.inflight == 3)
        assert (await first).header("x-ebbtide-node") == "n1"
        local = [await ask(app.port, chat()) for _ in range(3)] + [await ask(app.port, stream())]
        assert not any(task.done() for task in away), "the relay still thinks"
    assert {(reply.status, reply.header("x-ebbtide-node")) for reply in local} == {(200, "n1")}
    assert {(task.result().status, task.result().header("x-ebbtide-node")) for task in away} == {(200, "relay")}
    assert blameless(app)
    await app.inside.watch.step()
    took = {name: app.inside.watch.signals(name).latest["ttft_s"] for name in ("n1", "relay")}
    assert took["relay"] > 3 * took["n1"], "what the relay takes is the relay's"
    assert app.inside.watch.diagnosis("n1").verdict not in ALARMS


async def test_a_relay_that_says_nothing_is_given_up_and_no_node_is_blamed(rig):
    one, relay = await rig.node(), await rig.relay(script=SILENT)
    app = await rig.router(
        entry(one, max_sequences=1), relay=relay, **NO_PATIENCE, upstream={"first_byte_s": 0.5, "retries": 2}
    )
    one.upcoming.append(Script(ttft=0.3))
    async with asyncio.TaskGroup() as group:
        first = group.create_task(ask(app.port, chat()))
        await eventually(lambda: one.running)
        lost = await ask(app.port, chat())
        assert (await first).status == 200
    assert (lost.status, lost.header("x-should-retry")) == (504, "false")
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1"
    assert (relay.accepted, one.accepted) == (1, 2)
    assert blameless(app)


async def test_a_relay_that_is_down_costs_the_calls_that_need_it_and_no_others(rig):
    """They are told so at once, and it is used again as soon as it is back."""
    one, relay = await rig.node(), await rig.relay()
    app = await rig.router(entry(one, max_sequences=1), relay=relay, **NO_PATIENCE)
    await relay.down()
    one.upcoming.append(Script(ttft=60.0))
    busy = asyncio.create_task(ask(app.port, stream()))
    await eventually(lambda: one.running)
    lost = await ask(app.port, chat())
    await relay.up()
    away = await ask(app.port, chat())
    busy.cancel()
    await asyncio.gather(busy, return_exceptions=True)
    await eventually(lambda: not one.inflight, within=5)
    assert (lost.status, lost.error["code"]) == (502, "upstream_unavailable")
    assert (away.status, away.header("x-ebbtide-node")) == (200, "relay")
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1"
    assert blameless(app)


async def test_slow_canaries_of_the_relay_hold_up_neither_nodes_nor_chat(rig):
    """The relay's band says how slow it is; the nodes are looked at as often as ever."""
    await rig.node()
    relay = await rig.relay(script=Script(ttft=0.5))
    app = await rig.router(relay=relay, **CANARIES)
    told = sampling(app)
    began = monotonic()
    replies = [await ask(app.port, chat()) for _ in range(10)]
    quick = monotonic() - began
    assert {(reply.status, reply.header("x-ebbtide-node")) for reply in replies} == {(200, "n1")}
    await eventually(lambda: sum(name == "relay" for name, _ in told) >= 3, within=8)
    seconds = {which: [took for name, took in told if name == which] for which in ("n1", "relay")}
    assert min(seconds["relay"]) >= 0.5 > sorted(seconds["n1"])[len(seconds["n1"]) // 2]
    assert len(seconds["n1"]) > len(seconds["relay"])
    assert quick < 5
    assert blameless(app)


async def test_a_relay_that_answers_no_canary_is_unknown(rig):
    await rig.node()
    relay = await rig.relay(script=SILENT)
    app = await rig.router(relay=relay, **CANARIES, upstream={"first_byte_s": 0.3})
    told = sampling(app)
    await eventually(lambda: relay.accepted >= 3, within=8)
    await eventually(lambda: len(told) >= 3, within=8)
    assert {name for name, _ in told} == {"n1"}
    assert app.inside.caring.band.shown() is None
    assert (await ask(app.port, chat())).status == 200
    assert blameless(app)


async def test_chat_leaves_a_degraded_node_only_for_a_relay_that_is_better(rig):
    """As canaries show it; without enough of them the relay is taken at the operator's word."""
    await rig.node()
    relay = await rig.relay()
    app = await rig.router(relay=relay, care={"degraded_chat": "none"})
    find(app, n1=SLOWER)
    app.inside.caring.keeper.look()
    sampled, places = app.inside.caring.canary.sampled, []
    for name, seconds in (("nobody", 0.0), ("n1", 0.2), ("relay", 0.5), ("relay", 0.1)):
        for _ in range(24):
            sampled(name, seconds)
        places.append((await ask(app.port, chat())).header("x-ebbtide-node"))
    assert places == ["relay", "relay", "n1", "relay"]
    shown = {name for name in await app.metrics() if name.startswith("ebbtide_canary_seconds")}
    assert shown == {f'ebbtide_canary_seconds{{node="{name}"}}' for name in ("n1", "relay")}
    sampled("relay", 9.0)
    app.inside.caring.forget("relay")
    assert not app.node("n1").outruns_relay, "another relay is another matter"
