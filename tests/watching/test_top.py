"""`ebbtide top`: what it shows of a router under load, how it says that the router is lost, and that it comes back."""

import asyncio
import json
import re
from io import StringIO

import pytest
from rich.console import Console

from router.cli import main
from router.core.yielding import WaitReason
from router.tools.picture import WORDS, Seen, picture
from router.tools.readings import Between, Scrape
from router.tools.stated import State
from router.tools.top import Watch
from router.upstream.client import Client
from tests.fakes import Script
from tests.rig import ask, eventually, stream
from tests.rig.routers import free_port, running_app

BATCH = (("X-Ebbtide-Workload", "batch"),)


def shown(seen: Seen) -> str:
    console = Console(file=StringIO(), width=160)
    console.print(picture(seen, 160))
    return console.file.getvalue()


def test_every_reason_to_wait_has_words():
    assert set(WORDS) == set(WaitReason)


async def test_chat_queue_and_nodes_as_they_are(rig):
    node = await rig.node(script=Script(ttft=0.01, n=4), slots=2)
    pools = {"interactive": {"ttft_p95_ms": 5000}, "batch": {"reserve": 0.25}}
    app = await rig.router({"name": "n1", "url": node.url, "max_sequences": 2}, pools=pools)
    async with Client(connections=2) as client:
        watch = Watch(client, app.url, None)
        await watch.look()
        for _ in range(5):
            await ask(app.port, stream(stream_options={"include_usage": True}))
        node.script = Script(ttft=300)
        tasks = [asyncio.create_task(ask(app.port, stream(), headers=BATCH)) for _ in range(4)]
        await eventually(lambda: app.held and app.waiting)
        text, waiting = shown(await watch.look()), app.waiting
        for task in tasks:
            task.cancel()
        await asyncio.wait(tasks)
    assert "CHAT fine" in text
    assert "objective 5,000 ms" in text
    assert "errors 0.0%" in text
    assert f"batch       {waiting:>6} wait" in text
    assert any(words in text for words in WORDS.values())
    assert "n1    ready  [" in text
    assert "P" in text.partition("n1    ready")[2].splitlines()[0]


async def test_chat_over_its_objective_is_slow_and_failing_comes_first(rig):
    node = await rig.node(script=Script(ttft=0.05, n=2))
    app = await rig.router(pools={"interactive": {"ttft_p95_ms": 1}})
    async with Client(connections=2) as client:
        await ask(app.port, stream())
        slow = shown(await Watch(client, app.url, None).look())
        assert "CHAT slow (since its start)" in slow
        assert "docs/runbooks.md, EbbtideChatSlow" in slow
        node.script = Script(n=4, cut=2)
        await ask(app.port, stream())
        assert "CHAT failing" in shown(await Watch(client, app.url, None).look())


async def test_batches_with_a_key_and_none_without(tmp_path, rig):
    node = await rig.node(script=Script(ttft=300))
    settings = {"nodes": [{"name": "n1", "url": node.url}], "store": {"url": f"sqlite:///{tmp_path}/e.db"},
                "keys": [{"name": "ann", "key": "a-key-of-ann"}]}  # fmt: skip
    async with running_app(settings) as app, Client(connections=2) as client:
        headers = (("Authorization", "Bearer a-key-of-ann"),)
        store = app.inside.batching.store
        async with store.writing(caller="ann", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
            await writer.write(b'{"custom_id":"1","method":"POST","url":"/v1/chat/completions","body":{"model":"tiny",'
                               b'"messages":[{"role":"user","content":"x"}]}}\n')  # fmt: skip
        body = {"input_file_id": writer.row.id, "endpoint": "/v1/chat/completions", "completion_window": "24h"}
        batch = (await ask(app.port, body, "/v1/batches", headers=headers)).json["id"]
        with_key = shown(await Watch(client, app.url, "a-key-of-ann").look())
        assert batch in with_key
        assert "23:59:" in with_key or "24:00:00" in with_key
        assert batch not in shown(await Watch(client, app.url, None).look())


async def test_what_the_dashboard_tells_where_there_is_one():
    events = {
        "2": [1800000060.0, "node", "ready → down: refused\x1b[2J", "n1"],
        "1": [1800000000.0, "batch", "ended", ""],
        **{str(at): [1800000100.0 + at, "take_back", f"took back line {at}", "n2"] for at in range(10, 20)},
        "90": "none of ours",
    }
    card = {
        "engine": "vllm",
        "context": 32768,
        "state": "degraded",
        "trend": {"ttft_drift": 0.18, "rss_bytes_an_hour": 41 * 2**20, "verdict": "memory growth: memory grows"},
    }
    relay = {"canary": {"ttft_s": 0.21, "spread_s": 0.035}}
    state = {"events": events, "nodes": {"n1": card}, "relay": relay, "queue": {"ends_at": None}, "batches": None}
    pages = {
        "/metrics": '# TYPE ebbtide_node_up gauge\nebbtide_node_up{node="n1"} 1\n',
        "/dashboard/snapshot": json.dumps({"at": 1.0, "state": state}),
    }

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        path = (await reader.readuntil(b"\r\n\r\n")).split()[1].decode()
        body = pages.get(path, "").encode()
        status = b"200 OK" if path in pages else b"404 Not Found"
        writer.write(b"HTTP/1.1 %b\r\ncontent-length: %d\r\nconnection: close\r\n\r\n%b" % (status, len(body), body))
        await writer.drain()
        writer.close()

    async with await asyncio.start_server(answer, "127.0.0.1", 0) as server, Client(connections=2) as client:
        port = server.sockets[0].getsockname()[1]
        text = shown(await Watch(client, f"http://127.0.0.1:{port}", None).look())
    assert "EVENTS" in text
    assert text.index("ended") < text.index("n1: ready → down: refused[2J"), (
        "oldest first, and nothing a terminal obeys"
    )
    assert re.findall(r"n2: took back line (\d+)", text) == ["17", "18", "19"], "the rest has room, too"
    assert "vllm 32k  +18.0%  +41.0 MiB" in text
    assert "n1: memory growth: memory grows" in text
    assert "RELAY control 210 ms ± 35 ms" in text


@pytest.mark.parametrize("told", [None, [], {"nodes": [1], "events": [], "relay": 3}, {"nodes": {"n1": 4}}])
def test_a_snapshot_of_another_version_is_as_if_there_were_none(told):
    state = State(told)
    assert (state.events(), state.trouble("n1"), state.drift("n1"), state.ends_at()) == ([], "", None, None)
    assert (state.canary(), state.batch("b"), state.engine("n1")) == (None, (None, None), "-")


async def test_a_router_that_is_lost_comes_back(rig):
    node = await rig.node()
    port = free_port()
    settings = {"nodes": [{"name": "n1", "url": node.url}], "server": {"port": port}}
    async with Client(connections=2) as client:
        watch = Watch(client, f"http://127.0.0.1:{port}", None)
        assert "ROUTER LOST (never seen)" in shown(await watch.look())
        async with running_app(settings):
            assert "live" in shown(await watch.look())
        lost = shown(await watch.look())
        assert "ROUTER LOST (last seen" in lost
        assert "n1" in lost, "what was seen last stays"
        async with running_app(settings):
            assert "ROUTER LOST" not in shown(await watch.look())


async def test_once_prints_and_ends_and_fails_when_there_is_nobody(rig, capsys):
    await rig.node()
    app = await rig.router()
    assert await asyncio.to_thread(main, ["top", "--once", "--url", app.url]) == 0
    assert "NODES" in capsys.readouterr().out
    assert await asyncio.to_thread(main, ["top", "--once", "--url", f"http://127.0.0.1:{free_port()}"]) == 1
    assert "no answer" in capsys.readouterr().err


@pytest.mark.parametrize(("before", "grown"), [(3.0, 4.0), (9.0, 7.0)])
def test_a_counter_that_fell_was_begun_anew(before, grown):
    old = Scrape.read(f'# TYPE ebbtide_x counter\nebbtide_x_total{{a="b"}} {before}\n', 0)
    new = Scrape.read('# TYPE ebbtide_x counter\nebbtide_x_total{a="b"} 7\n', 1)
    assert Between(old, new).grown("x_total", "a") == {"b": grown}


def test_quantiles_of_what_is_new():
    def scrape(*counts: int) -> Scrape:
        rows = zip(("0.1", "0.2", "+Inf"), counts, strict=True)
        return Scrape.read("# TYPE h histogram\n" + "".join(f'h_bucket{{le="{le}"}} {n}\n' for le, n in rows), 0)

    between = Between(scrape(100, 100, 100), scrape(100, 110, 110))
    assert between.quantile(0.5, "h") == pytest.approx(0.15)
    assert Between(scrape(0, 0, 0), scrape(0, 0, 5)).quantile(0.5, "h") == 0.2
    assert Between(scrape(1, 1, 1), scrape(1, 1, 1)).quantile(0.5, "h") is None


def test_text_that_is_no_scrape_is_told():
    with pytest.raises(ValueError, match=r"\S"):
        Scrape.read("<html>{", 0)
