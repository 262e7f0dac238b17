"""Drain, resume and recycle on real sockets: by the operator, by diagnosis, and when things go wrong."""

import asyncio
import json

import pytest

from tests.fakes import Script
from tests.jobs.desk import line, room
from tests.rig import ask, chat, entry, eventually, stream
from tests.rig.recycling import LEAKING, LIMIT, SLOWER, Found, act, called, care, find, hook, restarting


@pytest.fixture
def log(tmp_path):
    return tmp_path / "hook.log"


def state(app, name):
    return str(app.node(name).state)


async def recycled(app, name, within=8):
    await eventually(lambda: name in app.inside.caring.recycling.records, within)
    record = app.inside.caring.recycling.records[name]
    return record.outcome


async def back(app, *names):
    """They are back, and a call to each has ended its probation."""
    for name in names:
        await eventually(lambda name=name: state(app, name) in ("probation", "ready"), within=8)
        others = [node for node in app.nodes if node.name != name]
        for node in others:
            node.refused_until = 1e12
        assert (await ask(app.port, chat())).header("x-ebbtide-node") == name
        for node in others:
            node.refused_until = 0
        assert state(app, name) == "ready"


# drain and resume


async def test_a_drained_node_finishes_its_calls_and_gets_no_new_ones(rig):
    one, two = await rig.node(script=Script(n=40, gap=0.02)), await rig.node()
    app = await rig.router()
    app.node("n2").refused_until = 1e12
    running = asyncio.create_task(ask(app.port, stream(max_tokens=40)))
    await eventually(lambda: one.running)
    app.node("n2").refused_until = 0
    told = await act(app, "n1", "drain")
    assert (told.status, told.json["state"], told.json["running"]) == (200, "draining", 1)
    for _ in range(4):
        assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n2"
    assert one.accepted == 1
    reply = await running
    assert (reply.status, len(reply.text.split())) == (200, 40)
    assert (await act(app, "n1", "resume")).json["state"] == "probation"
    app.node("n2").refused_until = 1e12
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1"
    assert state(app, "n1") == "ready"
    assert two.accepted == 4


async def test_batch_is_taken_back_from_a_drained_node_and_done_elsewhere(rig):
    slow, other = await rig.node(script=Script(ttft=30)), await rig.node()
    app = await rig.router()
    app.node("n2").refused_until = 1e12
    asked = asyncio.create_task(ask(app.port, chat(), headers=(("X-Ebbtide-Workload", "batch"),)))
    await eventually(lambda: slow.inflight)
    app.node("n2").refused_until = 0
    await act(app, "n1", "drain")
    reply = await asyncio.wait_for(asked, 5)
    assert (reply.status, reply.header("x-ebbtide-node")) == (200, "n2")
    assert (len(slow.aborted), other.accepted) == (1, 1)


async def test_with_every_node_drained_chat_goes_to_the_relay_and_without_one_is_told_to_wait(rig):
    await rig.node()
    relay = await rig.relay()
    app = await rig.router(relay=relay)
    await act(app, "n1", "drain")
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "relay"
    alone = await rig.router(pools={"interactive": {"patience_s": 0.1}})
    await act(alone, "n1", "drain")
    reply = await ask(alone.port, chat())
    assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")


async def test_looks_and_failures_leave_a_drained_node_drained(rig):
    one, _ = await rig.node(), await rig.node()
    app = await rig.router()
    await act(app, "n1", "drain")
    await one.down()
    await eventually(lambda: "n1" in app.inside.fleet.trouble)
    await one.up()
    await eventually(lambda: "n1" not in app.inside.fleet.trouble)
    assert state(app, "n1") == "draining"


# recycle


async def test_a_recycle_drains_restarts_waits_for_a_token_and_lets_the_node_in(rig, log):
    one, _ = await rig.node(script=Script(n=20, gap=0.02)), await rig.node()
    app = await rig.router(**care(log))
    app.node("n2").refused_until = 1e12
    running = asyncio.create_task(ask(app.port, stream(max_tokens=20)))
    await eventually(lambda: one.running)
    app.node("n2").refused_until = 0
    states = []
    app.node("n1").moved = lambda node, before: states.append(str(node.state))
    async with restarting(log, one):
        told = await act(app, "n1", "recycle")
        assert (told.status, told.json["state"]) == (202, "draining")
        assert (await running).status == 200, "what ran there ended as it would have"
        await eventually(lambda: "probation" in states, within=8)
    one.script = Script()
    app.node("n2").refused_until = 1e12
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1"
    assert (await recycled(app, "n1"), called(log)) == ("done", ["n1"])
    assert states[:2] == ["draining", "recycling"]
    assert states[-2:] == ["probation", "ready"]
    found = await app.metrics()
    assert found['ebbtide_node_recycles_total{node="n1",outcome="done"}'] == 1
    row = (await ask(app.port, path="/admin/nodes/n1", method="GET")).json
    assert (row["last_recycle"], row["state"]) == ("done", "ready")


async def test_a_front_that_lives_is_not_enough_to_come_back(rig, log):
    one, _ = await rig.node(), await rig.node()
    app = await rig.router(**care(log))
    one.script = Script(status=500)
    await act(app, "n1", "recycle")
    await eventually(lambda: sum(seen.path.endswith("completions") for seen in one.seen), within=5)
    assert (state(app, "n1"), called(log)) == ("recycling", ["n1"])
    one.script = Script()
    await back(app, "n1")


@pytest.mark.parametrize(
    ("script", "bounds", "words"),
    [
        ("echo no such unit >&2; exit 3", {}, "status 3: no such unit"),
        ("sleep 600", {"hook_s": 0.3}, "longer than 0.3 s"),
    ],
    ids=["fails", "hangs"],
)
async def test_a_hook_that_fails_leaves_the_node_to_its_looks_and_says_why(rig, log, script, bounds, words):
    one, _ = await rig.node(), await rig.node()
    app = await rig.router(**care(log, command=hook(log, script), **bounds))
    await act(app, "n1", "recycle")
    assert words in await recycled(app, "n1")
    row = (await ask(app.port, path="/admin/nodes/n1", method="GET")).json
    assert words in row["last_recycle"]
    await eventually(lambda: state(app, "n1") == "probation", within=5)
    assert (await app.metrics())['ebbtide_node_recycles_total{node="n1",outcome="failed"}'] == 1
    assert one.accepted == 0


async def test_a_node_that_does_not_come_back_is_down_and_comes_when_it_can(rig, log):
    one, _ = await rig.node(), await rig.node()
    app = await rig.router(**care(log, ready_s=0.5))
    await one.down()
    await act(app, "n1", "recycle", {"force": True})
    assert "no answer within 0.5 s" in await recycled(app, "n1")
    assert state(app, "n1") == "down"
    await one.up()
    await eventually(lambda: state(app, "n1") == "probation", within=5)


async def test_calls_that_outlast_the_bound_are_cut_by_the_restart_and_by_nothing_before(rig, log):
    one, _ = await rig.node(script=Script(n=500, gap=0.02)), await rig.node()
    app = await rig.router(**{"care": {**care(log)["care"], "drain_s": 0.4}})
    app.node("n2").refused_until = 1e12
    running = asyncio.create_task(ask(app.port, stream(max_tokens=500)))
    await eventually(lambda: one.running)
    app.node("n2").refused_until = 0
    async with restarting(log, one):
        await act(app, "n1", "recycle")
        reply = await running
        assert json.loads(reply.data[-2])["error"]
        one.script = Script()
        await back(app, "n1")


async def test_resume_ends_a_recycle_that_still_drains(rig, log):
    one, _ = await rig.node(script=Script(n=60, gap=0.02)), await rig.node()
    app = await rig.router(**care(log))
    app.node("n2").refused_until = 1e12
    running = asyncio.create_task(ask(app.port, stream(max_tokens=60)))
    await eventually(lambda: one.running)
    await act(app, "n1", "recycle")
    assert (await act(app, "n1", "resume")).status == 200
    assert (await running).status == 200
    assert called(log) == []


# what callers are kept from


async def test_the_last_node_is_not_recycled_without_a_relay_unless_forced(rig, log):
    one = await rig.node()
    app = await rig.router(**care(log))
    reply = await act(app, "n1", "recycle")
    assert (reply.status, reply.error["code"]) == (409, "recycle_refused")
    assert "last usable node" in reply.error["message"]
    async with restarting(log, one):
        assert (await act(app, "n1", "recycle", {"force": True})).status == 202
        await back(app, "n1")


async def test_with_a_relay_the_last_node_may_go(rig, log):
    one, relay = await rig.node(), await rig.relay()
    app = await rig.router(relay=relay, **care(log))
    async with restarting(log, one):
        assert (await act(app, "n1", "recycle")).status == 202
        assert (await ask(app.port, chat())).header("x-ebbtide-node") == "relay"
        await back(app, "n1")


async def test_two_nodes_that_leak_at_once_go_one_after_the_other(rig, log):
    nodes = [await rig.node() for _ in range(3)]
    app = await rig.router(**care(log, enabled=True))
    out = []
    for node in app.nodes:
        node.moved = lambda _node, _before: out.append(sum(state(app, n) in ("draining", "recycling") for n in names))
    names = [node.name for node in nodes]
    async with restarting(log, *nodes):
        find(app, n1=LEAKING, n2=LEAKING)
        app.inside.caring.keeper.look()
        for _ in range(200):
            app.inside.caring.keeper.look()
            assert (await ask(app.port, chat())).status == 200
            if len(app.inside.caring.recycling.records) == 2:
                break
            await asyncio.sleep(0.02)
        find(app)
        await back(app, "n1", "n2")
    assert called(log) == ["n1", "n2"]
    assert max(out) == 1


# by diagnosis


async def test_a_dry_run_says_what_it_would_do_and_does_nothing(rig, log, caplog):
    await rig.node(), await rig.node()
    app = await rig.router(**care(log))
    find(app, n1=LEAKING)
    for _ in range(3):
        app.inside.caring.keeper.look()
    assert (state(app, "n1"), called(log)) == ("ready", [])
    assert caplog.text.count("should be recycled") == 1
    assert "dry run" in caplog.text
    assert (await app.metrics())['ebbtide_node_recycle_due{node="n1"}'] == 1
    row = (await ask(app.port, path="/admin/nodes/n1", method="GET")).json
    assert "reaches its limit in 10 minutes" in row["recycle_due"]
    assert row["diagnosis"]["verdict"] == "memory_growth"
    assert row["diagnosis"]["evidence"] == [
        {"name": "rss_bytes_slope", "value": 2**30, "unit": "bytes/h", "against": 0, "what": "flat"}
    ]
    find(app, n1=Found())
    app.inside.caring.keeper.look()
    assert (await app.metrics())['ebbtide_node_recycle_due{node="n1"}'] == 0


async def test_memory_over_its_limit_is_enough(rig, log):
    one, _ = await rig.node(), await rig.node()
    app = await rig.router(**care(log, enabled=True, rss_limit_bytes=LIMIT))
    async with restarting(log, one):
        find(app, n1=Found("steady", rss_bytes=LIMIT - 1), n2=Found())
        app.inside.caring.keeper.look()
        assert state(app, "n1") == "ready"
        find(app, n1=Found("steady", rss_bytes=LIMIT))
        app.inside.caring.keeper.look()
        assert state(app, "n1") == "draining"
        find(app)
        assert await recycled(app, "n1") == "done"
        await back(app, "n1")


async def test_it_keeps_its_distance_and_gives_up_where_it_does_not_help(rig, log, caplog):
    await rig.node(), await rig.node()
    app = await rig.router(**care(log, enabled=True, command=hook(log, "exit 1"), cooldown_s=3600, failures=2))
    keeper, recycling = app.inside.caring.keeper, app.inside.caring.recycling
    find(app, n1=LEAKING)
    keeper.look()
    await recycled(app, "n1")
    await back(app, "n1")
    keeper.look()
    assert (len(called(log)), "a short while ago" in caplog.text) == (1, True)
    recycling.records["n1"].ended_at -= 3600
    keeper.look()
    await eventually(lambda: recycling.records["n1"].failures == 2, within=5)
    await back(app, "n1")
    recycling.records["n1"].ended_at -= 3600
    for _ in range(5):
        keeper.look()
    assert len(called(log)) == 2
    assert "somebody has to look" in caplog.text


@pytest.mark.parametrize(("chat_there", "place"), [("some", "n1"), ("none", "relay")])
async def test_a_degraded_node_gets_less_chat_or_none(rig, chat_there, place):
    await rig.node()
    relay = await rig.relay()
    app = await rig.router(relay=relay, care={"degraded_chat": chat_there})
    find(app, n1=SLOWER)
    app.inside.caring.keeper.look()
    assert state(app, "n1") == "degraded"
    reply = await ask(app.port, chat())
    assert (reply.status, reply.header("x-ebbtide-node")) == (200, place)
    find(app, n1=Found("unknown"))
    app.inside.caring.keeper.look()
    assert state(app, "n1") == "degraded", "who knows nothing says nothing"
    find(app, n1=Found("steady"))
    app.inside.caring.keeper.look()
    assert state(app, "n1") == "ready"
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1"


async def test_chat_prefers_a_node_that_is_well(rig):
    one, two = await rig.node(), await rig.node()
    app = await rig.router(entry(one), entry(two, max_sequences=1))
    find(app, n1=SLOWER)
    app.inside.caring.keeper.look()
    for _ in range(6):
        assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n2"
    assert (one.accepted, two.accepted) == (0, 6)
    two.script = Script(n=50, gap=0.05)
    running = asyncio.create_task(ask(app.port, stream(max_tokens=50)))
    await eventually(lambda: two.running)
    assert (await ask(app.port, chat())).header("x-ebbtide-node") == "n1", "when no other has room"
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)


# batches


async def test_lines_of_a_batch_are_done_once_each_while_its_node_is_recycled(rig, log, tmp_path):
    one, two = await rig.node(script=Script(ttft=0.15)), await rig.node(script=Script(ttft=0.15))
    app = await rig.router(**care(log))
    async with restarting(log, one), room(app, tmp_path) as desk:
        batch = await desk.submit([line(number) for number in range(24)])
        await eventually(lambda: one.inflight, within=5)
        await act(app, "n1", "recycle")
        results = await desk.drained(batch, within=20)
        await back(app, "n1")
    assert (len(results.output), results.errors) == (24, {})
    assert results.ids == {f"r{number}" for number in range(24)}
    assert two.accepted
