"""A fleet that is discovered, seen from outside: by a file, by a name, and beside nodes of the settings."""

import asyncio
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from router.core.node import State
from tests.conftest import Rig
from tests.fakes import FakeNode, Script
from tests.rig import App, ask, chat, entry, eventually, stream

EVERY_S = 0.02


def list_of(path: Path, *nodes: FakeNode | dict[str, Any]) -> None:
    """Write a file of nodes as a careful writer does."""
    spare = path.with_suffix(".new")
    spare.write_text(json.dumps([node if isinstance(node, dict) else entry(node) for node in nodes], indent="\t"))
    spare.rename(path)


def named(app: App) -> list[str]:
    return [node.name for node in app.nodes]


def discovery(path: Path, **more: Any) -> dict[str, Any]:
    return {"discovery": {"file": str(path), "file_every_s": EVERY_S, **more}}


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "nodes.json"


async def test_nodes_of_a_file_come_and_go(rig: Rig, path: Path) -> None:
    fixed, one, late = (
        await rig.node("fixed"),
        await rig.node("one", script=Script(n=30, gap=0.02)),
        await rig.node("late"),
    )
    list_of(path, one)
    app = await rig.router(fixed, **discovery(path))
    assert named(app) == ["fixed", "one"]
    async with asyncio.TaskGroup() as group:
        app.node("fixed").refused_until = 1e12
        long = group.create_task(ask(app.port, stream()))
        await eventually(lambda: one.running)
        list_of(path, late)
        await eventually(lambda: named(app) == ["fixed", "late"] and str(app.node("late").state) == "ready", within=5)
        reply = await ask(app.port, chat())
        assert (reply.status, reply.header("x-ebbtide-node")) == (200, "late")
        assert not long.done()
    assert len(long.result().text.split()) == 30
    await eventually(lambda: not app.inside.roster.leaving)
    samples = await app.metrics()
    assert samples['ebbtide_discovery_nodes{source="file"}'] == 1
    assert samples['ebbtide_discovery_up{source="file"}'] == 1


@pytest.mark.parametrize("bad", ["garbage", "gone"])
async def test_a_bad_file_keeps_the_nodes_and_says_so(rig: Rig, path: Path, bad: str) -> None:
    one = await rig.node("one")
    list_of(path, one)
    app = await rig.router(**{**discovery(path), "nodes": []})
    ready = await ask(app.port, path="/readyz", method="GET")
    assert (ready.status, ready.json) == (200, {"status": "ready"})
    if bad == "gone":
        path.unlink()  # noqa: ASYNC240 - of a temporary folder
    else:
        list_of(path, {**entry(one), "poools": []})
    await eventually(lambda: app.inside.roster.discovery.stale())
    ready = await ask(app.port, path="/readyz", method="GET")
    assert (ready.status, ready.json) == (200, {"status": "ready", "stale_discovery": ["file"]})
    assert (await ask(app.port, chat())).status == 200
    trouble = app.inside.roster.discovery.told["file"].trouble
    if bad == "garbage":
        assert trouble == f"{path}:6: nodes.0.poools: unknown key; did you mean 'pools'?"
    samples = await app.metrics()
    assert samples['ebbtide_discovery_up{source="file"}'] == 0
    assert samples['ebbtide_discovery_nodes{source="file"}'] == 1
    list_of(path, one)
    await eventually(lambda: not app.inside.roster.discovery.stale())


async def test_nodes_of_the_settings_win(rig: Rig, path: Path, caplog: pytest.LogCaptureFixture) -> None:
    fixed, late = await rig.node("fixed"), await rig.node("late")
    twin = {**entry(fixed), "name": "twin"}
    usurper = {"name": "fixed", "url": "http://127.0.0.1:9"}
    list_of(path, usurper, twin)
    app = await rig.router(fixed, **discovery(path))
    list_of(path, usurper, twin, late)
    await eventually(lambda: named(app) == ["fixed", "late"])
    assert app.node("fixed").spec.url == fixed.url
    told = [record.message for record in caplog.records if "left out" in record.message]
    assert told == [
        "node fixed of discovery by file is left out: one of the settings has that name",
        "node twin of discovery by file is left out: fixed of the settings has that URL",
    ]


async def test_every_address_of_a_name_is_a_node(rig: Rig) -> None:
    """A server that leaves the name while it answers ends what it has begun."""
    fake = await rig.node(script=Script(n=30, gap=0.02))
    said: list[str] = ["127.0.0.1", "127.0.0.2"]

    async def resolve(name: str, port: int) -> Sequence[str]:
        assert (name, port) == ("vllm.models.svc", fake.port)
        return list(said)

    dns = [{"name": "vllm.models.svc", "port": fake.port, "engine": "vllm", "pools": ["interactive"]}]
    dns[0]["agent"] = "http://{host}:9400"
    app = await rig.router(nodes=[], discovery={"dns": dns, "dns_every_s": EVERY_S}, resolve=resolve, ready=False)
    first, second = (f"vllm-{address}-{fake.port}" for address in said)
    assert named(app) == [first, second]
    assert app.inside.roster.agents == {
        name: f"http://{address}:9400/metrics" for name, address in zip(named(app), said, strict=True)
    }
    await eventually(lambda: app.node(first).state is State.READY)
    async with asyncio.TaskGroup() as group:
        long = group.create_task(ask(app.port, stream()))
        await eventually(lambda: fake.running)
        said[:] = ["127.0.0.2"]
        await eventually(lambda: named(app) == [second])
        assert not long.done()
    assert len(long.result().text.split()) == 30
    assert long.result().header("x-ebbtide-node") == first
    await eventually(lambda: not app.inside.roster.leaving)
    said.clear()
    await eventually(lambda: app.inside.roster.discovery.stale())
    assert named(app) == [second]


async def test_discovery_itself_is_changed_by_a_reload(rig: Rig, path: Path, tmp_path: Path) -> None:
    fixed, one, late = await rig.node("fixed"), await rig.node("one"), await rig.node("late")
    second = tmp_path / "second.json"
    list_of(path, one)
    app = await rig.router(fixed, **discovery(path))
    list_of(second, late)
    bare = {"nodes": [entry(fixed)]}
    assert await app.reload({**bare, **discovery(second)}) == ["discovery.file changed"]
    await eventually(lambda: named(app) == ["fixed", "late"])
    assert (await ask(app.port, chat())).status == 200
    assert await app.reload(bare) == ["discovery.file removed", "discovery.file_every_s changed"]
    assert named(app) == ["fixed"]
    assert not [name for name in await app.metrics() if 'source="' in name]
