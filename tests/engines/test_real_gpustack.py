"""A real GPUStack 2.3 server: what it tells, how soon, and what a restart does to its instances.

EBBTIDE_GPUSTACK_URL and EBBTIDE_GPUSTACK_KEY (scope `management`) name one with at least two running instances of one
model on this machine. One of them is restarted, then deleted. Where nobody listens at an instance's port, a fake
engine does.
"""

import asyncio
import os
import socket
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack
from time import monotonic

import pytest

from router.fleet.gpustack import Gpustack, Instance, Restarts
from router.upstream.client import Client
from router.upstream.target import Target
from tests.fakes import FakeNode
from tests.rig import App, ask, chat, eventually, running_app

URL, KEY = (os.environ.get(f"EBBTIDE_GPUSTACK_{name}", "") for name in ("URL", "KEY"))
RUN_S = 60.0
pytestmark = [
    pytest.mark.engine,
    pytest.mark.timeout(180),
    pytest.mark.skipif(not (URL and KEY), reason="EBBTIDE_GPUSTACK_URL and EBBTIDE_GPUSTACK_KEY name no GPUStack"),
]


@pytest.fixture
async def server() -> AsyncIterator[Gpustack]:
    async with Client() as client:
        yield Gpustack(client, Target.parse(URL, api_key=KEY))


@pytest.fixture
async def instances(server: Gpustack) -> AsyncIterator[list[Instance]]:
    """Two running instances of one model, with an engine at each."""
    running = [one for one in await server.instances() if one.state == "running" and one.serves]
    two = [one for one in running if one.model_id == running[0].model_id][:2]
    assert len(two) == 2, "two running instances of one model are needed"
    async with AsyncExitStack() as stack:
        for one in two:
            if not listens(one):
                fake = FakeNode(name=one.name, models=[one.model_name])
                fake.port = one.port or 0
                await stack.enter_async_context(fake)
        yield two


def listens(instance: Instance) -> bool:
    with socket.socket() as probe:
        probe.settimeout(2)
        return probe.connect_ex((instance.address or "", instance.port or 0)) == 0


def settings(model: str, key: str = KEY) -> dict:
    # A poll that never comes: what is seen here the watch has told.
    return {"nodes": [], "discovery": {"gpustack": {"url": URL, "api_key": key, "models": [model], "poll_s": 3600}}}


def named(app: App) -> set[str]:
    return {node.name for node in app.nodes}


async def answers(app: App, model: str) -> str:
    """The node that answered a chat."""
    reply = await ask(app.port, chat(model=model))
    assert reply.status == 200, reply.text
    return str(reply.header("x-ebbtide-node"))


async def chatting(app: App, model: str, until: asyncio.Event) -> int:
    """Chats, one after the other; how many were answered, which all must be."""
    done = 0
    while not until.is_set():
        await answers(app, model)
        done += 1
        await asyncio.sleep(0.05)
    return done


async def test_instances_are_nodes_and_a_restart_is_followed(server: Gpustack, instances: list[Instance]) -> None:
    """No chat fails while one instance is restarted where it is and then replaced by another."""
    first, second = instances
    model = first.model_name
    async with running_app(settings(model)) as app, asyncio.TaskGroup() as group:
        assert {first.name, second.name} <= named(app)
        over = asyncio.Event()
        chats = group.create_task(chatting(app, model, over))
        restarts = Restarts(server, within_s=RUN_S)
        began = monotonic()
        restart = group.create_task(restarts.restart(first.url))
        await eventually(lambda: first.name not in named(app), within=10)
        print(f"out of the fleet {monotonic() - began:.2f} s after the word to restart")
        await restart
        print(f"restarted in {monotonic() - began:.2f} s")
        await eventually(lambda: first.name in named(app), within=10)
        (again,) = [one for one in await server.instances() if one.id == first.id]
        assert (again.name, again.port, again.worker_ip) == (first.name, first.port, first.worker_ip)
        before, began = named(app), monotonic()
        await restarts.replace(first.url)
        await eventually(lambda: first.name not in named(app), within=10)
        print(f"out of the fleet {monotonic() - began:.2f} s after the word to replace")
        await eventually(lambda: named(app) - before, within=RUN_S)
        print(f"replaced in {monotonic() - began:.2f} s by {named(app) - before}")
        over.set()
        print(f"{await chats} chats answered meanwhile")


async def test_a_wrong_key_is_told(instances: list[Instance]) -> None:
    async with running_app(settings(instances[0].model_name, "gpustack_wrong"), ready=False) as app:
        ready = await ask(app.port, path="/readyz", method="GET")
        assert ready.json["stale_discovery"] == ["gpustack"]
        assert "refuses the key (401)" in app.inside.roster.discovery.told["gpustack"].trouble
