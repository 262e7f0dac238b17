"""The dashboard's door: who may see and do what, what a stream tells, and what it costs when nobody listens."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from router.api import feeds
from router.api.assets import Assets
from router.api.feeds import Feed, change
from router.core.events import Topic
from router.core.node import State
from router.core.placement import WaitReason
from router.dispatch.history import FAILED
from tests.fakes import Script
from tests.jobs.desk import jsonl, line
from tests.rig import Event, Reply, ask, entry, eventually, relay_entry, running_app, stream
from tests.rig.client import Connection, request

ADMIN, PLAIN = {"name": "ops", "key": "key-of-ops", "admin": True}, {"name": "nightly", "key": "key-of-nightly"}


def bearer(key: str) -> tuple[tuple[str, str], ...]:
    return (("Authorization", f"Bearer {key}"),)


async def get(port: int, path: str, **options: Any) -> Reply:
    return await ask(port, path=path, method="GET", **options)


@asynccontextmanager
async def listening(port: int, query: str = "", headers: Any = (), **options: Any) -> AsyncIterator["Listener"]:
    async with await Connection.open(port, **options) as line:
        await line.send(request(f"/dashboard/events?{query}", method="GET", headers=headers))
        yield Listener(line)


class Listener:
    """An open stream."""

    def __init__(self, line: Connection) -> None:
        self.line = line
        self._growing = line.watch("GET")
        self._seen = 0
        self.reply: Reply | None = None

    async def next(self, kind: str) -> Any:
        """What the next event of that kind says."""
        while True:
            events: list[Event] = [] if self.reply is None else self.reply.events
            for event in events[self._seen :]:
                self._seen += 1
                if f"event: {kind}".encode() in event.lines:
                    return event.json
            self.reply = await anext(self._growing)

    async def rest(self) -> Reply:
        """The whole answer, once it has ended."""
        return [reply async for reply in self._growing][-1]


# The page


async def test_the_page_is_open_guarded_and_small(rig):
    await rig.node()
    app = await rig.router(keys=[ADMIN])
    page = await get(app.port, "/dashboard")
    assert page.status == 200
    policy = page.header("content-security-policy") or ""
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    assert (page.header("x-frame-options"), page.header("x-content-type-options")) == ("DENY", "nosniff")
    assert b"{{" not in page.body
    assert b"style=" not in page.body
    again = await get(app.port, "/dashboard", headers=(("If-None-Match", page.header("etag") or ""),))
    assert (again.status, again.body) == (304, b"")
    assert (await get(app.port, "/v1/dashboard/")).body == page.body
    assert Assets().wire_bytes() < 150_000


async def test_files_are_kept_for_ever_and_a_version_is_never_mixed(rig):
    await rig.node()
    app = await rig.router()
    version = Assets().version
    plain = await get(app.port, f"/dashboard/static/{version}/app.js")
    packed = await get(app.port, f"/dashboard/static/{version}/app.js", headers=(("Accept-Encoding", "gzip"),))
    assert "immutable" in (plain.header("cache-control") or "")
    assert packed.header("content-encoding") == "gzip"
    assert len(packed.body) < len(plain.body)
    for wrong in ("another/app.js", f"{version}/none.js", f"{version}/../dashboard.py", f"{version}/%2e%2e/board.py"):
        assert (await get(app.port, f"/dashboard/static/{wrong}")).status == 404


@pytest.mark.parametrize("words", [WaitReason, State, Topic, FAILED], ids=["reasons", "states", "topics", "outcomes"])
def test_every_code_has_its_words_on_the_page(words):
    text = files("router.api").joinpath("static/words.js").read_text()
    assert [str(word) for word in words if f" {word}: " not in text] == []


def test_what_is_to_do_has_its_runbook():
    text = files("router.api").joinpath("static/words.js").read_text()
    todo = text.partition("export const TODO = {")[2].partition("};")[0]
    named = re.findall(r', "(\w+)"\],$', todo, re.M)
    assert len(named) == todo.count("\n") - 1 > 8
    runbooks = (Path(__file__).parents[2] / "docs/runbooks.md").read_text()
    assert [name for name in named if f"\n## {name}\n" not in runbooks] == []


# Who


@pytest.mark.parametrize("path", ["/dashboard/snapshot", "/dashboard/events"])
async def test_facts_need_a_key_when_keys_are_set(rig, path):
    await rig.node()
    app = await rig.router(keys=[ADMIN, PLAIN])
    for headers in ((), bearer("wrong")):
        refused = await get(app.port, path, headers=headers)
        assert (refused.status, refused.error["code"]) == (401, "invalid_api_key")
    assert (await get(app.port, "/dashboard/snapshot", headers=bearer("key-of-nightly"))).status == 200


async def test_who_is_told_what_they_may(rig):
    await rig.node()
    app = await rig.router(keys=[ADMIN, PLAIN])
    await ask(app.port, stream(), headers=bearer("key-of-ops"))
    app.inside.events.add(Topic.TAKE_BACK, "took back a batch call", caller="ops")
    ops = (await get(app.port, "/dashboard/snapshot", headers=bearer("key-of-ops"))).json
    assert ops["you"] == {
        "name": "ops",
        "keys": True,
        "admin": True,
        "sees_all": True,
        "acts": ["drain", "resume", "recycle"],
    }
    assert ops["state"]["choices"]["keys"] == ["ops", "nightly"]
    told = (await get(app.port, "/dashboard/snapshot", headers=bearer("key-of-nightly"))).json
    assert (told["you"]["admin"], told["you"]["sees_all"], told["you"]["acts"]) == (False, False, [])
    assert told["state"]["choices"]["keys"] == ["nightly"]
    assert "took back" not in json.dumps(told["state"]["events"])
    assert told["state"]["chat"]["calls"] == 1, "as /metrics tells anybody"
    other = await get(app.port, "/dashboard/snapshot?key=ops", headers=bearer("key-of-nightly"))
    assert (other.status, other.error["code"]) == (403, "permission_denied")


async def test_acting_needs_an_administrator_whatever_is_set(tmp_path, node):
    path = "/dashboard/batches/batch_x/cancel"
    settings = {"nodes": [entry(node)], "store": {"url": f"sqlite:///{tmp_path}/jobs.db"}}
    async with running_app({**settings, "keys": [ADMIN, PLAIN]}) as app:
        assert (await ask(app.port, path=path)).status == 401
        assert (await ask(app.port, path=path, headers=bearer("key-of-nightly"))).status == 403
        assert (await ask(app.port, path=path, headers=bearer("key-of-ops"))).status == 404
        drain = "/dashboard/nodes/node/drain"
        assert (await ask(app.port, path=drain, headers=bearer("key-of-nightly"))).status == 403
        assert (await ask(app.port, path=drain, headers=bearer("key-of-ops"))).json == {"done": True}
        assert str(app.node("node").state) == "draining"
    async with running_app(settings) as keyless:
        assert (await ask(keyless.port, path=path)).status == 403


async def test_an_administrator_stops_anybodys_batch_and_it_is_told(tmp_path, node):
    node.script = Script(ttft=30)
    settings = {"nodes": [entry(node)], "store": {"url": f"sqlite:///{tmp_path}/jobs.db"}, "keys": [ADMIN, PLAIN]}
    async with running_app(settings) as app:
        store = app.inside.batching.store
        async with store.writing(caller="nightly", purpose="batch", filename="in", expires_s=None) as writer:
            await writer.write(jsonl([line(1)]))
        asked = {"input_file_id": writer.row.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        made = await ask(app.port, asked, path="/v1/batches", headers=bearer("key-of-nightly"))
        path = f"/dashboard/batches/{made.json['id']}"
        await eventually(lambda: app.held == 1, within=5)
        lines = (await get(app.port, path, headers=bearer("key-of-ops"))).json
        assert lines["states"] == {"running": 1}
        assert (await ask(app.port, path=f"{path}/cancel", headers=bearer("key-of-ops"))).json == {"done": True}
        await eventually(lambda: app.held == 0, within=5)
        told = f"ops cancelled {made.json['id']}"
        await eventually(lambda: told in [entry.text for entry in app.inside.events])
        over = f"{made.json['id']} is cancelled: 0 of 1 lines done, 0 failed"
        await eventually(lambda: over in [entry.text for entry in app.inside.events], within=5)


# The stream


async def test_a_stream_tells_everything_once_and_then_what_changed(rig):
    node = await rig.node()
    app = await rig.router()
    async with listening(app.port) as listener:
        first = await listener.next("snapshot")
        assert first["state"]["nodes"]["n1"]["phases"]["interactive_prefill"] == 0
        node.script = Script(ttft=30)
        asked = asyncio.create_task(ask(app.port, stream("a prompt nobody may see")))
        told: dict[str, Any] = {}
        while told.get("put", {}).get("nodes", {}).get("n1", {}).get("phases", {}).get("interactive_prefill") != 1:
            told = await listener.next("change")
        assert "batches" not in told.get("put", {})
        asked.cancel()
        assert listener.reply is not None
        assert b"nobody may see" not in listener.reply.body
        assert listener.reply.header("content-type") == "text/event-stream; charset=utf-8"
    await asyncio.gather(asked, return_exceptions=True)
    await eventually(lambda: app.inside.dashboard.feeds.readers == 0)


async def test_changes_make_the_next_state_of_the_last():
    before = {"a": 1, "nodes": {"x": 1, "y": 2}, "batches": None, "events": {}}
    after = {"a": 2, "nodes": {"y": 3, "z": 4}, "batches": {"b": 1}, "events": {}}
    assert change(before, after) == {
        "set": {"a": 2, "batches": {"b": 1}},
        "put": {"nodes": {"y": 3, "z": 4}},
        "gone": {"nodes": ["x"]},
    }
    assert change(after, after) == {}


async def test_a_quiet_stream_beats_and_ends_with_the_router(rig, monkeypatch):
    monkeypatch.setattr(feeds, "BEAT_S", 0.1)
    await rig.node()
    app = await rig.router(probe={"every_s": 3600})
    async with listening(app.port) as listener:
        await listener.next("snapshot")
        await listener.next("beat")
        app.inside.dashboard.close()
        assert (await listener.rest()).clean


async def test_nothing_is_built_while_nobody_reads(rig, monkeypatch):
    built: list[int] = []
    look = Feed.look

    async def counted(self: Feed, at: float) -> None:
        built.append(1)
        await look(self, at)

    monkeypatch.setattr(Feed, "look", counted)
    await rig.node()
    app = await rig.router()
    async with listening(app.port) as one, listening(app.port) as two:
        await one.next("snapshot")
        await two.next("snapshot")
        await app.inside.dashboard.feeds.look()
        assert len(built) == 1, "once for both"
    await eventually(lambda: app.inside.dashboard.feeds.readers == 0)
    built.clear()
    await app.inside.dashboard.feeds.look()
    assert built == []


async def test_a_reader_who_takes_nothing_is_let_go(rig):
    await rig.node()
    app = await rig.router()
    async with listening(app.port, receive_buffer=2048) as listener:
        await listener.next("snapshot")
        for turn in range(120):
            for _ in range(500):
                app.inside.events.add(Topic.NODE, f"{turn} " + "x" * 500)
            await app.inside.dashboard.feeds.look()
            await asyncio.sleep(0)
        await eventually(lambda: app.inside.dashboard.feeds.readers == 0)


async def test_readers_are_bounded(rig, monkeypatch):
    monkeypatch.setattr(feeds, "READERS", 2)
    monkeypatch.setattr(feeds, "WISHES", 1)
    await rig.node()
    app = await rig.router()
    async with listening(app.port) as one:
        await one.next("snapshot")
        another = await get(app.port, "/dashboard/events?model=tiny")
        assert (another.status, another.header("retry-after")) == (503, "10")
        async with listening(app.port) as two:
            await two.next("snapshot")
            assert (await get(app.port, "/dashboard/events")).status == 503


async def test_a_wish_narrows_what_is_told(rig):
    await rig.node("a")
    await rig.node("b", models=["other"])
    app = await rig.router()
    await ask(app.port, stream())
    for query, nodes, calls in (("model=tiny", ["a"], 1), ("node=b", ["b"], 0), ("pool=batch", ["a", "b"], 1)):
        state = (await get(app.port, f"/dashboard/snapshot?{query}")).json["state"]
        assert (list(state["nodes"]), state["chat"]["calls"]) == (nodes, calls)
    long = await get(app.port, f"/dashboard/snapshot?model={'x' * 300}")
    assert (long.status, long.error["param"]) == (400, "model")


async def test_where_and_how_chat_failed_is_told(rig):
    node = await rig.node("a")
    app = await rig.router(upstream={"retries": 0})
    for script in (Script(status=500), Script(n=4, cut=2), Script(n=4, cut=2), Script()):
        node.script = script
        await ask(app.port, stream())
    chat = (await get(app.port, "/dashboard/snapshot")).json["state"]["chat"]
    assert (chat["calls"], chat["failed"], chat["verdict"]) == (4, 3, "failing")
    assert chat["failures"] == [
        {"node": "a", "outcome": "cut", "calls": 2},
        {"node": "a", "outcome": "failed", "calls": 1},
    ]


async def test_a_node_that_comes_and_goes_is_told(rig):
    node = await rig.node("a")
    app = await rig.router()
    await node.down()
    await eventually(lambda: str(app.node("a").state) == "down", within=5)
    texts = [entry.text for entry in app.inside.events if entry.node == "a"]
    assert texts[0].startswith("starting → ready")
    assert texts[-1].startswith("ready → down: ")
    await node.up()


async def test_a_reload_changes_the_keys_and_the_relay_that_are_told(rig):
    node, relay = await rig.node("a"), await rig.relay(models=["tiny", "other"])
    nodes = {"nodes": [entry(node)]}
    app = await rig.router(keys=[ADMIN, PLAIN])
    async with listening(app.port, headers=bearer("key-of-ops")) as listener:
        first = (await listener.next("snapshot"))["state"]
        assert (first["choices"]["keys"], first["relay"]) == (["ops", "nightly"], None)
        outside = relay_entry(relay, models=["tiny", "other"], api_key=relay.requires_key)
        await app.reload({**nodes, "keys": [ADMIN, PLAIN], "relay": outside})
        told: dict[str, Any] = {}
        while "relay" not in told.get("set", {}):
            told = await listener.next("change")
        assert told["set"]["relay"]["models"] == ["tiny", "other"]
        assert told["set"]["choices"]["models"] == ["tiny", "other"]
        fewer = {**ADMIN, "admin": False}
        await app.reload({**nodes, "keys": [fewer, {"name": "late", "key": "key-of-late", "admin": True}]})
        assert (await listener.rest()).clean, "who looks has to show their key again"
    assert (await get(app.port, "/dashboard/snapshot", headers=bearer("key-of-nightly"))).status == 401
    ops = (await get(app.port, "/dashboard/snapshot", headers=bearer("key-of-ops"))).json
    assert (ops["you"]["acts"], ops["state"]["choices"]["keys"]) == ([], ["ops"])
    late = (await get(app.port, "/dashboard/snapshot", headers=bearer("key-of-late"))).json
    assert (late["state"]["choices"]["keys"], late["state"]["relay"]) == (["ops", "late"], None)
