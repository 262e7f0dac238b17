"""Nodes, keys and limits that change while calls run: no call suffers for it, and what is gone leaves nothing."""

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from router.core.budget import Room
from router.core.call import Workload
from router.errors import SettingsError
from router.settings import NodeEntry
from tests.conftest import Rig
from tests.fakes import FakeNode, Script
from tests.rig import App, Reply, ask, chat, entry, eventually, relay_entry, running_app, stream

SLOW = Script(n=40, gap=0.02)
ANN = (("Authorization", "Bearer sk-ann"),)
BOB = (("Authorization", "Bearer sk-bob"),)


def to(*nodes: FakeNode | dict[str, Any], **settings: Any) -> dict[str, Any]:
    """Settings with these nodes."""
    return {**settings, "nodes": [node if isinstance(node, dict) else entry(node) for node in nodes]}


@asynccontextmanager
async def chatting(app: App, callers: int = 3) -> AsyncIterator[list[Reply]]:
    """Callers who chat one call after another until the block ends; all their answers."""
    replies: list[Reply] = []
    over = asyncio.Event()

    async def chatter() -> None:
        while not over.is_set():
            replies.append(await ask(app.port, stream("hello", max_tokens=4)))

    async with asyncio.TaskGroup() as group:
        for index in range(callers):
            group.create_task(chatter(), name=f"fake-caller-{index}")
        yield replies
        over.set()


async def running_on(node: FakeNode) -> None:
    await eventually(lambda: node.running > 0)


async def test_a_removed_node_ends_what_it_runs_and_gets_nothing_new(rig: Rig) -> None:
    old, new = await rig.node("old", script=SLOW), await rig.node("new")
    app = await rig.router(old)
    async with asyncio.TaskGroup() as group:
        long = group.create_task(ask(app.port, stream(max_tokens=40)))
        await running_on(old)
        told = await app.reload(to(new))
        assert told == ["nodes.old removed", "nodes.new added"]
        assert [node.name for node in app.inside.roster.leaving] == ["old"]
        replies = [await ask(app.port, stream()) for _ in range(3)]
        assert {reply.header("x-ebbtide-node") for reply in replies} == {"new"}
        assert not long.done()
    assert (long.result().status, len(long.result().text.split())) == (200, 40)
    assert long.result().data[-1] == b"[DONE]"
    await eventually(lambda: not app.inside.roster.leaving)
    assert (old.accepted, set(app.inside.pools)) == (1, {"new"})
    await app.reload(to(old))


async def test_series_of_a_removed_node_go_with_its_last_call(rig: Rig) -> None:
    old, new = await rig.node("old", script=SLOW), await rig.node("new")
    app = await rig.router(old, new)
    replies = await asyncio.gather(*(ask(app.port, stream(max_tokens=20)) for _ in range(4)))
    assert {reply.header("x-ebbtide-node") for reply in replies} == {"old", "new"}
    assert any('node="old"' in name for name in await app.metrics())
    await app.reload(to(new))
    await eventually(lambda: not app.inside.roster.leaving)
    samples = await app.metrics()
    assert not [name for name in samples if 'node="old"' in name]
    assert samples['ebbtide_legs_total{node="new",outcome="completed"}'] >= 1
    await app.reload(to(old, new))
    assert (await app.metrics())['ebbtide_node_up{node="old"}'] == 1


async def test_a_reload_under_load_fails_no_call(rig: Rig) -> None:
    """Nodes come, go, move and change their limits while people chat."""
    first, second, third = [await rig.node(name, script=Script(gap=0.002)) for name in ("first", "second", "third")]
    app = await rig.router(first)
    async with chatting(app) as replies:
        for wanted in (
            to(first, second),
            to(second),
            to({**entry(third), "name": "second"}),
            to(entry(third, max_sequences=8), first),
            to(first),
        ):
            seen = len(replies)
            await app.reload(wanted)
            await eventually(lambda seen=seen: len(replies) >= seen + 6, within=10)
    assert {reply.status for reply in replies} == {200}
    assert all(reply.data[-1] == b"[DONE]" for reply in replies)
    assert min(node.accepted for node in (first, second, third)) > 0


async def test_a_node_that_stays_keeps_what_was_learnt(rig: Rig) -> None:
    fake = await rig.node(script=SLOW, kv_tokens=4096)
    app = await rig.router()
    before = app.node("n1")
    assert before.budget.tokens == 4096
    async with asyncio.TaskGroup() as group:
        running = group.create_task(ask(app.port, stream(max_tokens=20)))
        await running_on(fake)
        held = before.budget.held()
        told = await app.reload(
            to(entry(fake, kv_tokens=1024, pools=["batch"], api_key="k"), pools={"batch": {"reserve": 0.5}})
        )
        assert told == ["pools.batch.reserve changed", "nodes.n1 changed (pools, api_key, kv_tokens)"]
        assert app.node("n1") is before
        assert (before.budget.tokens, before.budget.reserve, before.budget.held()) == (1024, 0.0, held)
    assert running.result().status == 200
    await ask(app.port, stream())
    assert fake.seen[-1].header("authorization") == "Bearer k"
    await app.reload(to(entry(fake), pools={"batch": {"reserve": 0.5}}))
    assert (before.budget.tokens, before.budget.reserve) == (4096, 0.5)


async def test_a_node_that_moved_is_another_node(rig: Rig) -> None:
    here, there = await rig.node("here"), await rig.node("there", models=["tiny", "late"])
    app = await rig.router({**entry(here), "name": "a"})
    before = app.node("a")
    await app.reload(to({**entry(there), "name": "a"}))
    assert app.node("a") is not before
    assert str(app.node("a").state) == "ready"
    assert (await ask(app.port, chat(model="late"))).status == 200
    assert (here.accepted, there.accepted) == (0, 1)


async def test_calls_that_wait_go_to_a_node_that_comes(rig: Rig) -> None:
    full, fresh = await rig.node("full", slots=1, script=SLOW), await rig.node("fresh")
    limits = {"interactive": {"patience_s": 10}}
    app = await rig.router(entry(full, max_sequences=1), pools=limits)
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(app.port, stream(max_tokens=40)))
        await running_on(full)
        waiting = group.create_task(ask(app.port, stream()))
        await eventually(lambda: app.waiting == 1)
        await app.reload(to(entry(full, max_sequences=1), fresh, pools=limits))
        reply = await waiting
        assert (reply.status, reply.header("x-ebbtide-node")) == (200, "fresh")
        assert full.running == 1


async def test_room_granted_on_a_node_that_goes_is_used_there(rig: Rig) -> None:
    """The call was let in before the node went, and sets out after."""
    old, new = await rig.node("old"), await rig.node("new")
    patient = {"connect_s": 20, "first_byte_s": 20, "idle_s": 20}
    app = await rig.router(entry(old, max_sequences=1), pools={"interactive": {"patience_s": 10}}, upstream=patient)
    inside = app.inside
    async with asyncio.TaskGroup() as group:
        with app.node("old").budget.hold(Room(1, 1), Workload.INTERACTIVE):
            call = group.create_task(ask(app.port, stream()))
            await eventually(lambda: app.waiting == 1)
        inside.admission.changed()
        assert app.waiting == 0
        inside.roster.take(inside.settings.model_copy(update={"nodes": (NodeEntry(name="new", url=new.url),)}))
        inside.roster.start()
        assert [node.name for node in inside.roster.leaving] == ["old"]
    assert (call.result().status, call.result().header("x-ebbtide-node")) == (200, "old")
    await eventually(lambda: not inside.roster.leaving)
    assert (old.accepted, new.accepted) == (1, 0)


async def test_a_response_in_a_removed_node_is_unknown(rig: Rig) -> None:
    """Also when another node has its name now."""
    old, new = await rig.node("old"), await rig.node("new")
    app = await rig.router({**entry(old), "name": "a"}, {**entry(new), "name": "b"})
    made: dict[str, str] = {}
    while len(made) < 2:
        reply = await ask(app.port, {"model": "tiny", "input": "x", "background": True}, "/v1/responses")
        made[reply.header("x-ebbtide-node") or ""] = reply.json["id"]
    spare = await rig.node("spare")
    await app.reload(to({**entry(spare), "name": "a"}, {**entry(new), "name": "b"}))
    for method, action in (("GET", ""), ("POST", "/cancel")):
        kept = await ask(
            app.port, b"" if method == "POST" else None, f"/v1/responses/{made['b']}{action}", method=method
        )
        gone = await ask(
            app.port, b"" if method == "POST" else None, f"/v1/responses/{made['a']}{action}", method=method
        )
        assert (kept.status, gone.status) == (200, 404)
        assert gone.error["type"] == "invalid_request_error"
    follow = {"model": "tiny", "input": "y", "previous_response_id": made["a"]}
    assert (await ask(app.port, follow, "/v1/responses")).status == 404
    assert spare.accepted == 0
    await app.reload(to({**entry(new), "name": "b"}))
    assert (await ask(app.port, path=f"/v1/responses/{made['b']}", method="GET")).status == 200


async def test_keys_come_and_go(rig: Rig) -> None:
    await rig.node()
    ann = {"name": "ann", "key": "sk-ann"}
    app = await rig.router(keys=[ann])
    assert (await ask(app.port, chat(), headers=BOB)).status == 401
    told = await app.reload(to(rig.nodes[0], keys=[ann, {"name": "bob", "key": "sk-bob", "workload": "batch"}]))
    assert told == ["keys.bob added"]
    reply = await ask(app.port, chat(), headers=BOB)
    assert (reply.status, reply.header("x-ebbtide-workload")) == (200, "batch")
    told = await app.reload(to(rig.nodes[0], keys=[{**ann, "workload": "interactive"}]))
    assert told == ["keys.bob removed", "keys.ann changed (workload)"]
    assert (await ask(app.port, chat(), headers=BOB)).status == 401
    assert (await ask(app.port, chat(), headers=ANN)).header("x-ebbtide-reason") == "key"


async def test_keys_do_not_go_from_an_address_others_can_reach(rig: Rig) -> None:
    """Not even when the new settings listen elsewhere: that takes a restart."""
    fake = await rig.node()
    public = {"host": "0.0.0.0", "port": 0}
    app = await rig.router(server=public, keys=[{"name": "ann", "key": "sk-ann"}])
    with pytest.raises(SettingsError, match="keys: others can reach"):
        await app.reload(to(fake))
    assert (await ask(app.port, chat())).status == 401
    assert (await ask(app.port, chat(), headers=ANN)).status == 200


async def test_limits_hold_for_calls_that_come_after(rig: Rig) -> None:
    fake = await rig.node(script=SLOW)
    only = entry(fake, max_sequences=1)
    app = await rig.router(only, pools={"interactive": {"patience_s": 30}})
    assert (await ask(app.port, chat("word " * 100))).header("x-ebbtide-workload") == "interactive"
    async with asyncio.TaskGroup() as group:
        group.create_task(ask(app.port, stream(max_tokens=40)))
        await running_on(fake)
        patient = group.create_task(ask(app.port, stream()))
        await eventually(lambda: app.waiting == 1)
        told = await app.reload(
            to(
                only,
                pools={"interactive": {"patience_s": 0.05}},
                classify={"long_prompt_tokens": 50},
                server={"request_body_bytes": 2048},
            )
        )
        assert told == [
            "server.request_body_bytes changed",
            "classify.long_prompt_tokens changed",
            "pools.interactive.patience_s changed",
        ]
        hasty = await ask(app.port, stream())
        assert (hasty.status, patient.done()) == (503, False)
        assert (await ask(app.port, chat("x" * 3000))).status == 413
    assert patient.result().status == 200
    reply = await ask(app.port, chat("word " * 100))
    assert (reply.header("x-ebbtide-workload"), reply.header("x-ebbtide-reason")) == ("batch", "size")


async def test_the_relay_comes_changes_and_goes(rig: Rig) -> None:
    broken = await rig.node(script=Script(status=500), models=["tiny", "other"])
    relay = await rig.relay(models=["tiny", "other"])
    quick = {"upstream": {"retries": 0}, "probe": {"every_s": 60}}
    app = await rig.router(broken, **quick)
    bare = to(broken, **quick)
    with_relay: Callable[..., dict[str, Any]] = lambda **said: {**bare, "relay": relay_entry(relay, **said)}  # noqa: E731
    assert await app.reload(with_relay(models=["other"], api_key="relay-key")) == ["relay added"]
    outside = await ask(app.port, chat(model="other"))
    assert (outside.status, outside.header("x-ebbtide-node")) == (200, "relay")
    pool = app.inside.dispatcher.relay.pool
    assert await app.reload(with_relay(models=["tiny"], api_key="relay-key")) == ["relay.models changed"]
    assert app.inside.dispatcher.relay.pool is pool
    assert (await ask(app.port, chat())).status == 200
    assert (await ask(app.port, chat(model="other"))).status >= 500
    relay.requires_key = "new-key"
    assert await app.reload(with_relay(api_key="new-key")) == ["relay.api_key changed"]
    assert (await ask(app.port, chat())).status == 200
    assert await app.reload(bare) == ["relay removed"]
    assert (await ask(app.port, chat())).status >= 500
    await eventually(lambda: not pool.open)
    assert len(relay.seen) == 3


async def test_what_takes_a_restart_is_named_each_time(rig: Rig) -> None:
    fake = await rig.node()
    app = await rig.router()
    wanted = to(fake, server={"keepalive_s": 30, "port": 1}, log={"level": "error"})
    for expected in (
        ["log.level changed", "server.port changed", "server.keepalive_s changed"],
        ["server.port changed", "server.keepalive_s changed"],
    ):
        assert await app.reload(wanted) == expected
    assert (await ask(app.port, chat())).status == 200


async def test_lines_of_a_batch_follow_the_nodes(tmp_path: Path) -> None:
    """The node that runs them goes in the middle: each line is answered once. Keys and quotas hold at the desk, too."""
    old, new = FakeNode(name="old", slots=2, script=Script(n=5, gap=0.02)), FakeNode(name="new")
    ann = {"name": "ann", "key": "sk-ann"}
    rest = {"store": {"url": f"sqlite:///{tmp_path}/e.db"}, "batches": {"sweep_s": 0.1}}
    async with old, new:
        first = to(entry(old, max_sequences=2), keys=[ann], **rest)
        async with running_app(first) as app:
            file = await upload(app, [chat(f"line {index}", max_tokens=5) for index in range(12)])
            asked = {"input_file_id": file, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
            batch = (await ask(app.port, asked, "/v1/batches", headers=ANN)).json
            path = f"/v1/batches/{batch['id']}"
            await eventually(lambda: old.accepted >= 3, within=10)
            await app.reload(to(new, keys=[{**ann, "quota": {"batches": 1}}], **rest))
            assert (await ask(app.port, asked, "/v1/batches", headers=ANN)).status == 429
            async with asyncio.timeout(20):
                while batch["status"] != "completed":
                    batch = (await ask(app.port, path=path, method="GET", headers=ANN)).json
            assert batch["request_counts"] == {"total": 12, "completed": 12, "failed": 0}
            assert old.accepted + new.accepted == 12
            await eventually(lambda: not app.held and not app.inside.roster.leaving)
            await app.reload(to(new, keys=[{"name": "bob", "key": "sk-bob"}], **rest))
            statuses = [(await ask(app.port, path=path, method="GET", headers=who)).status for who in (ANN, BOB)]
            assert statuses == [401, 404]


async def upload(app: App, bodies: list[dict[str, Any]]) -> str:
    """A file of lines for chat, by ann; its id."""
    lines = [
        {"custom_id": f"line-{index}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        for index, body in enumerate(bodies)
    ]
    raw = "\n".join(json.dumps(line) for line in lines)
    body = (
        '--x\r\nContent-Disposition: form-data; name="purpose"\r\n\r\nbatch\r\n'
        f'--x\r\nContent-Disposition: form-data; name="file"; filename="f.jsonl"\r\n\r\n{raw}\r\n--x--\r\n'
    )
    headers = (*ANN, ("Content-Type", "multipart/form-data; boundary=x"))
    reply = await ask(app.port, body.encode(), "/v1/files", headers=headers)
    assert reply.status == 200, reply.body
    return str(reply.json["id"])
