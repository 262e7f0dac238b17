"""Nodes from GPUStack: a server on a real socket that answers as a recorded one, and what stands when it does not."""

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

import pytest

from router.errors import ProbeFailed
from router.fleet.discovery import Instances
from router.fleet.discovery.gpustack import MOST_INSTANCES
from router.fleet.gpustack import Gpustack, Instance, node_name
from router.upstream.client import Client
from router.upstream.target import Target
from tests.fakes.gpustack import CAPTURES, FakeGpustack, recorded
from tests.fleet.hearing import QUICK_S, Ears, hearing, listed_instance
from tests.fleet.looking import raw_server
from tests.rig import eventually

NEVER_S = 3600.0


@pytest.fixture
async def server() -> AsyncIterator[FakeGpustack]:
    async with FakeGpustack() as fake:
        yield fake


async def soon(seconds: float) -> None:
    """Waits between two tries, for a test that has no time."""
    await asyncio.sleep(min(seconds, QUICK_S))


@asynccontextmanager
async def asking(server: FakeGpustack, key: str | None = None) -> AsyncIterator[Gpustack]:
    async with Client() as client:
        yield Gpustack(client, Target.parse(server.url, api_key=key or server.key), timeout_s=5)


@asynccontextmanager
async def following(
    server: FakeGpustack, *, poll_s: float = NEVER_S, silence_s: float = NEVER_S, key: str | None = None
) -> AsyncIterator[Ears]:
    """What is heard of it once it was first asked. Without `poll_s` only the watch tells of changes."""
    async with asking(server, key) as asked:
        source = Instances(
            server=asked, listed=listed_instance, poll_s=poll_s, silence_s=silence_s, lasting_s=0.03, sleep=soon
        )
        async with hearing(source) as ears:
            await ears.discovery.first(5)
            yield ears


@asynccontextmanager
async def watching(server: FakeGpustack, **options: float) -> AsyncIterator[Ears]:
    """As `following`, with everything read that a watch that begins has read."""
    async with following(server, **options) as ears:
        await eventually(lambda: server.watchers == 1)
        await settled(server)
        yield ears


async def settled(server: FakeGpustack) -> None:
    """Until a change that comes now has been read, and with it everything told before."""
    before = server.lists
    server.say(b'{"type":3,"id":0}\n\n')
    await eventually(lambda: server.lists > before)


def urls(ears: Ears) -> list[str]:
    return [node.spec.url for _, node in ears.discovery.listed()]


# what is listed


@pytest.mark.parametrize(
    ("fields", "there"),
    [
        ({"state": "running"}, True),
        ({"state": "unreachable"}, True),
        *(({"state": state}, False) for state in ("pending", "analyzing", "scheduled", "initializing", "downloading")),
        *(({"state": state}, False) for state in ("starting", "error", "something new")),
        ({"port": None}, False),
        ({"worker_ip": None, "worker_advertise_address": None}, False),
        ({"role": "prefill"}, False),
        ({"role": "decode"}, False),
        ({"role": "router"}, True),
        ({"draining_since": "2026-11-29T15:06:33Z"}, False),
        ({"worker_ip": "odd"}, False),
    ],
)
async def test_only_instances_that_serve_are_nodes(server: FakeGpustack, fields: dict, there: bool) -> None:
    server.add(port=8001)
    server.add(**{"port": 8002, **fields})
    async with following(server) as ears:
        assert urls(ears) == ["http://127.0.0.1:8001", "http://127.0.0.1:8002"][: 1 + there]
        assert ears.trouble is None


@pytest.mark.parametrize(
    ("fields", "url"),
    [
        ({"worker_advertise_address": "gpu-1.example", "worker_ip": "10.0.0.1"}, "http://gpu-1.example:8001"),
        ({"worker_advertise_address": None, "worker_ip": "10.0.0.1"}, "http://10.0.0.1:8001"),
        ({"worker_advertise_address": "fd00::1"}, "http://[fd00::1]:8001"),
    ],
)
async def test_an_engine_is_reached_where_gpustacks_gateway_reaches_it(
    server: FakeGpustack, fields: dict, url: str
) -> None:
    server.add(port=8001, **fields)
    async with following(server) as ears:
        assert urls(ears) == [url]


@pytest.mark.parametrize(
    ("name", "known"),
    [
        ("qwen2.5-7b-0osus", "qwen2.5-7b-0osus"),
        ("Qwen/Qwen2.5 7B-0osus", "Qwen-Qwen2.5-7B-0osus-7"),
        ("a" * 64, "a" * 64),
        ("a" * 70, "a" * 62 + "-7"),
        ("模型", "7"),
    ],
)
def test_a_node_is_named_as_its_instance(name: str, known: str) -> None:
    assert node_name(Instance(id=7, name=name, model_id=1, model_name="m", state="running")) == known


async def test_every_page_is_read(server: FakeGpustack) -> None:
    for port in range(1, 151):
        server.add(port=port)
    async with following(server) as ears:
        assert len(ears.names) == 150
        assert ears.names[0].endswith("-00001"), "the oldest first, so that a new one moves none"


async def test_an_instance_that_cannot_be_a_node_is_left_out_and_told_once(
    server: FakeGpustack, caplog: pytest.LogCaptureFixture
) -> None:
    server.add(port=8001, worker_ip="odd")
    async with watching(server):
        await settled(server)
        await settled(server)
    told = "instance 'qwen2.5-7b-00001' of GPUStack is left out: its url cannot be that of a node"
    assert [record.message for record in caplog.records] == [told]


# how changes are heard


async def test_instances_come_and_go_by_the_watch_alone(server: FakeGpustack) -> None:
    first = server.add(port=8001)
    async with watching(server) as ears:
        second = server.add(port=None, state="pending")
        server.update(second["id"], state="initializing", port=8002)
        server.update(second["id"], state="starting")
        await settled(server)
        assert urls(ears) == ["http://127.0.0.1:8001"]
        server.update(second["id"], state="running")
        await eventually(lambda: len(urls(ears)) == 2)
        for state in ("scheduled", "initializing", "starting"):
            server.update(first["id"], state=state)
        await eventually(lambda: urls(ears) == ["http://127.0.0.1:8002"])
        server.update(first["id"], state="running")
        await eventually(lambda: len(urls(ears)) == 2)


async def test_a_recreated_instance_is_another_node(server: FakeGpustack) -> None:
    """The record of a deletion shows the row as it was, running: it must not count."""
    old = server.add(port=8001)
    async with watching(server) as ears:
        before = ears.names
        server.remove(old["id"])
        await eventually(lambda: ears.names == [])
        server.add(port=8001)
        await eventually(lambda: len(ears.names) == 1)
        assert ears.names != before
        server.update(2, port=8002)
        await eventually(lambda: urls(ears) == ["http://127.0.0.1:8002"])


async def test_an_unreachable_instance_stays(server: FakeGpustack) -> None:
    row = server.add(port=8001)
    async with watching(server) as ears:
        server.update(row["id"], state="unreachable", state_message="Worker is unreachable from the server")
        await settled(server)
        assert ears.lists == [[row["name"]]], "no news"


async def test_what_does_not_matter_is_not_asked_after(server: FakeGpustack) -> None:
    row = server.add(port=8001)
    async with watching(server) as ears:
        before = server.lists
        for progress in range(20):
            server.update(row["id"], download_progress=progress)
            server.say(b"\n\n")
        server.update(row["id"], state="error")
        await eventually(lambda: ears.names == [])
        assert server.lists == before + 1


async def test_a_burst_of_changes_is_asked_after_once_or_twice(server: FakeGpustack) -> None:
    row = server.add(port=8001)
    async with watching(server) as ears:
        before = server.lists
        for state in ["starting", "error"] * 50:
            server.update(row["id"], state=state)
        server.update(row["id"], port=8009, state="running")
        await eventually(lambda: urls(ears) == ["http://127.0.0.1:8009"])
        assert server.lists <= before + 3


@pytest.mark.parametrize("last", [b"", b'{"type":2,"data":{"sta'], ids=["between", "inside a record"])
async def test_a_watch_that_is_cut_is_begun_again_and_the_list_read(server: FakeGpustack, last: bytes) -> None:
    row = server.add(port=8001)
    async with watching(server) as ears:
        before = server.watchers, len(server.seen)
        server.cut(last)
        del server.rows[row["id"]]
        await eventually(lambda: ears.names == [])
        await eventually(lambda: server.watchers == 1)
        server.add(port=8002)
        await eventually(lambda: urls(ears) == ["http://127.0.0.1:8002"])
        assert before[0] == 1
        assert ears.trouble is None


@pytest.mark.parametrize("why", ["mute", "garbage", "too long"])
async def test_without_a_watch_the_list_is_asked_for_again_and_again(
    server: FakeGpustack, why: str, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    server.add(port=8001)
    server.mute = why == "mute"
    silence_s = 0.05 if server.mute else NEVER_S
    async with following(server, poll_s=0.05, silence_s=silence_s) as ears:

        def broken() -> bool:
            server.say({"mute": b"", "garbage": b"<html>\n\n", "too long": b"x" * (2**20 + 1)}[why])
            return "cannot be watched" in caplog.text

        await eventually(broken, within=5)
        server.add(port=8002)
        await eventually(lambda: len(urls(ears)) == 2)
        assert ears.discovery.stale() == []
        server.mute = False
        if why != "mute":

            def watched() -> bool:
                server.say(b"\n\n")
                return "are watched again" in caplog.text

            await eventually(watched)
    assert caplog.text.count("cannot be watched") == 1


# when it does not answer


async def fails(server: FakeGpustack, said: int | bytes | str) -> None:
    """From now on it answers with that status, or that body, or is away."""
    if said == "away":
        await server.down()
    elif isinstance(said, int):
        server.refuses = said
    else:
        server.body = said.encode() if isinstance(said, str) else said


def listing(items: Sequence[object], total: int) -> bytes:
    return json.dumps({"items": items, "pagination": {"total": total}}).encode()


ROW = recorded("model-instance")


@pytest.mark.parametrize(
    ("said", "told"),
    [
        (401, "refuses the key (401): it is wrong, revoked or expired"),
        (403, "denies the key (403): it needs the scope `management`"),
        (404, "has no such path (404)"),
        (500, "GPUStack: status 500"),
        (302, "GPUStack: status 302"),
        ("away", "GPUStack: no answer"),
        (b"<html>", "GPUStack: the answer is not JSON"),
        (b"", "GPUStack: the answer is not JSON"),
        (b"[" * 5000, "GPUStack: the answer is not JSON"),
        (b"[]", "does not answer as GPUStack 2: Expected `object`, got `array`"),
        (b"{}", "does not answer as GPUStack 2: Object missing required field `items`"),
        (listing([{**ROW, "port": "8001"}], 1), "does not answer as GPUStack 2: Expected `int | null`, got `str`"),
        (listing([], 1), "told 0 of 1 instances"),
        (listing([ROW], 101), "told 1 of 101 instances"),
        (listing([ROW] * (MOST_INSTANCES + 1), MOST_INSTANCES + 1), f"has over {MOST_INSTANCES} instances"),
        (b" " * (16 * 2**20 + 1), "the answer is over 16777216 bytes"),
    ],
    ids=lambda value: str(value)[:24],
)
async def test_the_last_list_stands(
    server: FakeGpustack, said: int | bytes | str, told: str, caplog: pytest.LogCaptureFixture
) -> None:
    server.add(port=8001)
    async with following(server, poll_s=0.02) as ears:
        await fails(server, said)
        await eventually(lambda: ears.trouble is not None)
        assert told in str(ears.trouble)
        assert (ears.names, ears.discovery.stale()) == (["qwen2.5-7b-00001"], ["gpustack"])
        server.refuses = server.body = None
        if said == "away":
            await server.up()
        await eventually(lambda: ears.trouble is None)
        assert ears.names == ["qwen2.5-7b-00001"]
    assert server.key not in caplog.text
    assert "its last list stands" in caplog.text


async def test_a_server_that_comes_back_changed_is_believed(server: FakeGpustack) -> None:
    """Polled seldom: the watch that begins again has the list read."""
    server.add(port=8001)
    async with watching(server) as ears:
        await server.down()
        server.rows.clear()
        server.add(port=8002)
        await server.up()
        await eventually(lambda: urls(ears) == ["http://127.0.0.1:8002"])


async def test_no_instances_at_all_is_a_list(server: FakeGpustack) -> None:
    """A model scaled to 0."""
    row = server.add(port=8001)
    async with watching(server) as ears:
        server.remove(row["id"])
        await eventually(lambda: ears.names == [])
        assert ears.trouble is None


async def test_a_wrong_key_is_told_at_once(server: FakeGpustack) -> None:
    async with following(server, key="gpustack_wrong") as ears:
        assert "refuses the key (401)" in str(ears.trouble)


# the watch itself


@pytest.mark.parametrize("size", [1, 7, 1000, 100_000])
async def test_a_recorded_watch_is_read_in_pieces_of_any_size(size: int) -> None:
    recording = (CAPTURES / "watch.raw").read_bytes()[: 9000 if size == 1 else None]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        assert head.startswith(b"GET /v2/model-instances?watch=true HTTP/1.1")
        writer.write(b"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nconnection: close\r\n\r\n")
        for at in range(0, len(recording), size):
            writer.write(recording[at : at + size])
            await writer.drain()

    async with raw_server(answer) as url, Client() as client:
        asked = Gpustack(client, Target.parse(url, api_key="k"))
        records = [record async for record in asked.watch(5)]
    lines = recording[: recording.rindex(b"\n")].split(b"\n")
    wanted = [json.loads(line)["type"] for line in lines if line]
    assert [record.type for record in records if record is not None] == wanted
    assert records[0] is None, "that it has begun"
    assert sum(record is None for record in records) == 1 + sum(not line for line in lines)


async def test_which_records_matter() -> None:
    """Of a recorded watch all but what was found out about a running engine."""
    lines = [json.loads(line) for line in (CAPTURES / "watch.raw").read_bytes().split(b"\n") if line]
    aside = [line["changed_fields"].keys() for line in lines if line["type"] == 2]
    assert {"api_detected_backend_version"} in [set(keys) for keys in aside]

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter, head: bytes) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\n\r\n" + (CAPTURES / "watch.raw").read_bytes())

    async with raw_server(answer) as url, Client() as client:
        records = [record async for record in Gpustack(client, Target.parse(url)).watch(5) if record is not None]
    moot = [set(record.changed_fields or ()) for record in records if not record.matters]
    assert moot == [{"api_detected_backend_version"}] * 3


async def test_a_refused_watch_is_a_failure(server: FakeGpustack) -> None:
    async with asking(server, "gpustack_wrong") as asked:
        with pytest.raises(ProbeFailed, match=r"refuses the key \(401\)"):
            await anext(asked.watch(5))
