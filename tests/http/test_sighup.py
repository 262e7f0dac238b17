"""SIGHUP to the program operators run: what it takes in, what it refuses, and what it says of either."""

import asyncio
import signal
from pathlib import Path
from typing import Any

import yaml

from tests.fakes import FakeNode, Script
from tests.rig import RouterProcess, ask, chat, entry, eventually, running_process, stream
from tests.rig.routers import samples, with_quick_bounds

OK = "ebbtide_config_last_reload_successful"
AT = "ebbtide_config_last_reload_success_timestamp_seconds"
ANN = (("Authorization", "Bearer sk-ann"),)
BOB = (("Authorization", "Bearer sk-bob"),)


def written(**settings: Any) -> str:
    return yaml.safe_dump(with_quick_bounds({"log": {"level": "info", "format": "text"}, **settings}))


async def counted(router: RouterProcess) -> dict[str, float]:
    return samples((await ask(router.port, path="/metrics", method="GET")).body.decode())


async def test_a_reload_while_people_chat(tmp_path: Path) -> None:
    """Nodes and keys change, a long answer of a removed node comes whole, a bad file changes nothing."""
    keys = [{"name": "ann", "key": "sk-ann"}, {"name": "bob", "key": "sk-bob"}]
    log = {"log": {"level": "info", "format": "text"}}
    old, new = FakeNode(name="old", script=Script(n=80, gap=0.02)), FakeNode(name="new")
    async with (
        old,
        new,
        running_process({"nodes": [entry(old)], "keys": keys, **log}, tmp_path) as router,
        asyncio.TaskGroup() as group,
    ):
        first = await counted(router)
        long = group.create_task(ask(router.port, stream(), headers=ANN))
        await eventually(lambda: old.running)

        said = await router.hang_up(written(nodes=[entry(new)], keys=keys[:1], server={"keepalive_s": 9}))
        assert "settings reloaded: keys.bob removed" in said
        assert "settings reloaded: server.keepalive_s changed, which needs a restart" in said
        assert (await ask(router.port, chat(), headers=BOB)).status == 401
        reply = await ask(router.port, chat(), headers=ANN)
        assert (reply.status, reply.header("x-ebbtide-node")) == (200, "new")
        after = await counted(router)
        assert (after[OK], after[AT] > first[AT], after['ebbtide_node_up{node="new"}']) == (1, True, 1)

        said = await router.hang_up(written(nodes=[entry(old)], kyes=[], keys=[]))
        assert f"{router.config}:" in said
        assert "kyes: unknown key; did you mean 'keys'?" in said
        still = await counted(router)
        assert (still[OK], still[AT]) == (0, after[AT])
        assert (await ask(router.port, chat(), headers=ANN)).header("x-ebbtide-node") == "new"
        assert (await ask(router.port, chat())).status == 401

        said = await router.hang_up(written(nodes=[entry(new)], keys=keys[:1], server={"keepalive_s": 9}))
        assert (await counted(router))[OK] == 1
        for _ in range(20):
            router.process.send_signal(signal.SIGHUP)
        reply = await long
        assert (len(reply.text.split()), reply.data[-1]) == (80, b"[DONE]")
        assert (await ask(router.port, chat(), headers=ANN)).status == 200
        assert "sk-ann" not in router.said


async def test_a_reload_during_the_drain_is_not_the_second_word(tmp_path: Path) -> None:
    async with (
        FakeNode(script=Script(n=40, gap=0.02)) as node,
        running_process({"nodes": [entry(node)]}, tmp_path) as router,
        asyncio.TaskGroup() as group,
    ):
        long = group.create_task(ask(router.port, stream()))
        await eventually(lambda: node.running)
        router.process.terminate()
        for _ in range(5):
            router.process.send_signal(signal.SIGHUP)
        assert len((await long).text.split()) == 40
        assert await asyncio.wait_for(router.process.wait(), 10) == 0
