"""A fleet that GPUStack tells of, seen from outside."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from router.core.node import State
from tests.conftest import Rig
from tests.fakes import Script
from tests.fakes.gpustack import FakeGpustack
from tests.fleet.looking import raw_server
from tests.fleet.looking import told as answers
from tests.rig import App, ask, chat, entry, eventually, stream

MODEL = "qwen2.5-7b"
POLL_S = 0.05


@pytest.fixture
async def server() -> AsyncIterator[FakeGpustack]:
    async with FakeGpustack() as fake:
        yield fake


def told(server: FakeGpustack, **more: Any) -> dict[str, Any]:
    """What an operator writes."""
    return {"gpustack": {"url": server.url, "api_key": server.key, "poll_s": POLL_S, **more}}


def named(app: App) -> list[str]:
    return [node.name for node in app.nodes]


async def test_instances_beside_a_node_of_the_settings(rig: Rig, server: FakeGpustack) -> None:
    """Each is asked at its own port, without GPUStack's key; a re-created one is another node; calls that run end."""
    fixed = await rig.node("fixed", models=[MODEL])
    one = await rig.node("one", models=[MODEL], script=Script(n=30, gap=0.02))
    row = server.add(port=one.port)
    app = await rig.router(fixed, discovery=told(server))
    assert named(app) == ["fixed", row["name"]]
    app.node("fixed").refused_until = 1e12
    async with asyncio.TaskGroup() as group:
        long = group.create_task(ask(app.port, stream(model=MODEL)))
        await eventually(lambda: one.running)
        server.remove(row["id"])
        again = server.add(port=one.port, state="scheduled")
        await eventually(lambda: named(app) == ["fixed"])
        server.update(again["id"], state="running")
        await eventually(lambda: named(app) == ["fixed", again["name"]])
        assert not long.done()
    assert (len(long.result().text.split()), long.result().header("x-ebbtide-node")) == (30, row["name"])
    reply = await ask(app.port, chat(model=MODEL))
    assert reply.header("x-ebbtide-node") == again["name"]
    assert not [seen for seen in one.seen + one.probes if seen.header("authorization")]
    assert {seen.header("authorization") for seen in server.seen} == {f"Bearer {server.key}"}
    await eventually(lambda: not app.inside.roster.leaving)


async def test_names_and_pools_by_model(rig: Rig, server: FakeGpustack) -> None:
    chats, works, other = [await rig.node(name, models=[name]) for name in ("chats", "works", "other")]
    for node in (chats, works, other):
        server.add(model_name=node.name, name=f"{node.name}-1", port=node.port)
    said = told(
        server,
        models={"big": "chats", "large": "chats", "works": "works"},
        pools=["interactive"],
        model_pools={"works": ["batch"]},
    )
    app = await rig.router(nodes=[], discovery=said)
    assert {node.name: sorted(node.spec.pools) for node in app.nodes} == {
        "chats-1": ["interactive"],
        "works-1": ["batch"],
    }
    cards = (await ask(app.port, path="/v1/models", method="GET")).json["data"]
    assert [card["id"] for card in cards] == ["big", "large", "works"]
    for public in ("big", "large"):
        assert (await ask(app.port, chat(model=public))).header("x-ebbtide-node") == "chats-1"
    assert [seen.json["model"] for seen in chats.seen] == ["chats", "chats"]


@pytest.mark.parametrize("bad", ["revoked", "down"])
async def test_gpustack_away_keeps_the_nodes_and_says_so(rig: Rig, server: FakeGpustack, bad: str) -> None:
    one = await rig.node("one", models=[MODEL])
    server.add(port=one.port)
    app = await rig.router(nodes=[], discovery=told(server))
    if bad == "revoked":
        server.refuses = 401
    else:
        await server.down()
    await eventually(lambda: app.inside.roster.discovery.stale())
    ready = await ask(app.port, path="/readyz", method="GET")
    assert (ready.status, ready.json) == (200, {"status": "ready", "stale_discovery": ["gpustack"]})
    assert (await ask(app.port, chat(model=MODEL))).status == 200
    samples = await app.metrics()
    assert samples['ebbtide_discovery_up{source="gpustack"}'] == 0
    assert samples['ebbtide_discovery_nodes{source="gpustack"}'] == 1
    if bad == "down":
        await server.up()
    server.refuses = None
    await eventually(lambda: not app.inside.roster.discovery.stale(), within=5)


async def test_an_unreachable_instance_is_used_while_it_answers(rig: Rig, server: FakeGpustack) -> None:
    one = await rig.node("one", models=[MODEL])
    row = server.add(port=one.port)
    app = await rig.router(nodes=[], discovery=told(server))
    node = app.node(row["name"])
    server.update(row["id"], state="unreachable")
    before = server.lists
    await eventually(lambda: server.lists > before + 1)
    assert (await ask(app.port, chat(model=MODEL))).header("x-ebbtide-node") == row["name"]
    await one.down()
    await eventually(lambda: node.state is State.DOWN)
    assert named(app) == [row["name"]]
    await one.up()
    await eventually(lambda: node.state is not State.DOWN, within=5)


async def test_another_key_is_taken_at_a_reload(rig: Rig, server: FakeGpustack) -> None:
    one = await rig.node("one", models=[MODEL])
    row = server.add(port=one.port)
    fixed = await rig.node("fixed")
    app = await rig.router(fixed, discovery=told(server, api_key="gpustack_old"))
    assert (named(app), app.inside.roster.discovery.stale()) == (["fixed"], ["gpustack"])
    changed = await app.reload({"nodes": [entry(fixed)], "discovery": told(server)})
    assert changed == ["discovery.gpustack.api_key changed"]
    await eventually(lambda: named(app) == ["fixed", row["name"]])


async def test_an_agent_beside_each_instance_tells_its_memory(rig: Rig, server: FakeGpustack) -> None:
    """Found by the port of the instance; one that is created again elsewhere has another."""
    one, two = await rig.node("one", models=[MODEL]), await rig.node("two", models=[MODEL])
    first = server.add(port=one.port)
    app = await rig.router(nodes=[], discovery=told(server, agent="http://{host}:{port+1000}/of-{port}"))
    asked = app.inside.roster.agents
    assert asked == {first["name"]: f"http://127.0.0.1:{one.port + 1000}/of-{one.port}/metrics"}
    server.remove(first["id"])
    second = server.add(port=two.port)
    await eventually(lambda: named(app) == [second["name"]])
    assert list(app.inside.roster.agents.values()) == [f"http://127.0.0.1:{two.port + 1000}/of-{two.port}/metrics"]


async def test_an_agent_is_asked_as_the_settings_say_now(rig: Rig, server: FakeGpustack) -> None:
    """What it tells is the instance's; after a reload without it nobody is asked, and no series is left."""
    one, fixed = await rig.node("one", models=[MODEL]), await rig.node("fixed")
    name = server.add(port=one.port)["name"]
    async with raw_server(answers("ebbtide_agent_tree_rss_bytes 7e9\n")) as agent:
        said = told(server, agent=agent.replace("127.0.0.1", "{host}"))
        app = await rig.router(fixed, discovery=said)
        up = f'ebbtide_node_agent_up{{node="{name}"}}'
        await app.inside.watch.step()
        assert app.inside.watch.signals(name).latest["rss_bytes"] == 7e9
        assert (await app.metrics())[up] == 1
        changed = await app.reload({"nodes": [entry(fixed)], "discovery": told(server)})
        assert changed == ["discovery.gpustack.agent removed"]
        await eventually(lambda: app.inside.roster.agents == {})
        assert up not in await app.metrics()


async def test_an_agent_that_several_nodes_name_is_asked_for_none(
    rig: Rig, server: FakeGpustack, caplog: pytest.LogCaptureFixture
) -> None:
    """It reads one engine: whose memory that is cannot be told, and the wrong one would be restarted."""
    one, two = await rig.node("one", models=[MODEL]), await rig.node("two", models=[MODEL])
    first, second = server.add(port=one.port)["name"], server.add(port=two.port)
    app = await rig.router(nodes=[], discovery=told(server, agent="http://{host}:9400"))
    assert app.inside.roster.agents == {}
    server.remove(second["id"])
    await eventually(lambda: app.inside.roster.agents == {first: "http://127.0.0.1:9400/metrics"})
    warned = [record.message for record in caplog.records if "is named by" in record.message]
    names = ", ".join(sorted((first, second["name"])))
    assert warned == [f"the agent at http://127.0.0.1:9400/metrics is named by {names}: it is asked for none of them"]
