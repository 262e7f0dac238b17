"""HTTP edges and operations: limits, browsers, deploys, metrics and memory."""

import asyncio
import gc
import json
import signal

import pytest

from tests.fakes import FakeNode, Script
from tests.rig import Connection, ask, chat, entry, eventually, request, running_process, stream

CHAT = "/v1/chat/completions"
ORIGIN = (("Origin", "https://chat.example"),)
MIB = 2**20
LOGGED = {"log": {"level": "info", "calls": True}}


async def test_real_prompts_fit_and_what_is_over_is_413(rig):
    await rig.node(context=10**9, kv_tokens=10**10)
    app = await rig.router(server={"request_body_bytes": 2 * MIB})
    fits = json.dumps(chat("x" * (2 * MIB - 200))).encode()
    assert (await ask(app.port, fits)).status == 200
    over = json.dumps(chat("x" * (2 * MIB + 200))).encode()
    reply = await ask(app.port, over)
    assert (reply.status, reply.error["code"]) == (413, "payload_too_large")


async def test_a_body_that_says_it_is_too_large_is_refused_unread(rig):
    await rig.node()
    app = await rig.router(server={"request_body_bytes": MIB})
    head = request(CHAT, b"", headers=(("Content-Length", str(40 * MIB)),))
    async with await Connection.open(app.port) as line:
        await line.send(head)
        assert (await line.reply()).status == 413


async def test_a_chunked_body_is_read_up_to_the_cap_only(rig):
    await rig.node()
    app = await rig.router(server={"request_body_bytes": MIB})
    head = request(CHAT, b"", headers=(("Transfer-Encoding", "chunked"),))
    piece = b"10000\r\n" + b"x" * 65536 + b"\r\n"
    async with await Connection.open(app.port) as line:
        await line.send(head)
        try:
            for _ in range(64):
                await line.send(piece)
        except ConnectionError:
            pass
        assert (await line.reply()).status == 413


async def test_browsers_are_let_in_when_they_are_named(rig):
    await rig.node()
    app = await rig.router(
        server={"cors_origins": ["https://chat.example"]}, keys=[{"name": "ui", "key": "secret-key"}]
    )
    asked = "authorization,content-type,x-stainless-os"
    preflight = (
        *ORIGIN,
        ("Access-Control-Request-Method", "POST"),
        ("Access-Control-Request-Headers", asked),
    )
    reply = await ask(app.port, path=CHAT, method="OPTIONS", headers=preflight)
    assert reply.status in (200, 204)
    assert reply.header("access-control-allow-origin") == ORIGIN[0][1]
    assert set(asked.split(",")) <= {
        name.strip().lower() for name in (reply.header("access-control-allow-headers") or "").split(",")
    }
    key = (("Authorization", "Bearer secret-key"),)
    answers = [
        await ask(app.port, chat(), headers=ORIGIN),
        await ask(app.port, chat(model="nope"), headers=(*ORIGIN, *key)),
        await ask(app.port, stream(), headers=(*ORIGIN, *key)),
        await ask(app.port, path="/v1/nope", method="GET", headers=(*ORIGIN, *key)),
    ]
    assert [answer.status for answer in answers] == [401, 404, 200, 404]
    assert {answer.header("access-control-allow-origin") for answer in answers} == {ORIGIN[0][1]}
    stranger = await ask(app.port, chat(), headers=(("Origin", "https://evil.example"), *key))
    assert stranger.header("access-control-allow-origin") is None


async def test_without_named_origins_no_browser_is_answered(rig):
    await rig.node()
    app = await rig.router()
    assert (await ask(app.port, chat(), headers=ORIGIN)).header("access-control-allow-origin") is None


@pytest.mark.parametrize("path", ["/", "/v1/models", "/health", "/healthz", "/readyz", "/metrics"])
async def test_head_answers_where_get_does(rig, path):
    await rig.node()
    app = await rig.router()
    async with await Connection.open(app.port) as line:
        for _ in range(2):
            await line.send(request(path, method="HEAD"))
            reply = await line.reply("HEAD")
            assert (reply.status, reply.body) == (200, b"")


async def test_a_deploy_lets_streams_finish(tmp_path):
    async with FakeNode(name="n1", script=Script(gap=0.1, n=15)) as node:
        settings = {"nodes": [entry(node)], "server": {"drain_s": 20}}
        async with running_process(settings, tmp_path) as router:
            running = [asyncio.create_task(ask(router.port, stream())) for _ in range(10)]
            await eventually(lambda: node.inflight == 10, within=4)
            router.process.send_signal(signal.SIGTERM)
            await eventually(lambda: not running[0].done())
            refused = await _after_the_signal(router.port)
            replies = await asyncio.gather(*running)
            assert all(len(reply.text.split()) == 15 and reply.data[-1] == b"[DONE]" for reply in replies)
            assert refused in (None, 503)
            assert await asyncio.wait_for(router.process.wait(), 5) == 0


async def _after_the_signal(port):
    """Status of a new call once the router drains, None where it no longer listens."""
    async with asyncio.timeout(3):
        while True:
            try:
                if (await ask(port, path="/readyz", method="GET")).status == 503:
                    return (await ask(port, chat())).status
            except ConnectionError:
                return None
            await asyncio.sleep(0.02)


async def test_the_end_of_the_drain_is_told_in_the_stream(tmp_path):
    async with FakeNode(name="n1", script=Script(gap=0.1, n=600)) as node:
        settings = {"nodes": [entry(node)], "server": {"drain_s": 0.5}} | LOGGED
        async with running_process(settings, tmp_path) as router:
            running = asyncio.create_task(ask(router.port, stream()))
            await eventually(lambda: node.inflight and node.seen[0].tokens > 2, within=4)
            router.process.send_signal(signal.SIGTERM)
            reply = await running
            assert "error" in json.loads(reply.data[-2])
            assert reply.data[-1] == b"[DONE]"
            assert await asyncio.wait_for(router.process.wait(), 5) == 0
            assert len(node.aborted) == 1
            assert json.loads(router.said.splitlines()[-1])["outcome"] == "shutdown"


async def test_a_call_that_runs_at_the_end_of_the_drain_is_told_too(tmp_path):
    async with FakeNode(name="n1", script=Script(ttft=60)) as node:
        settings = {"nodes": [entry(node)], "server": {"drain_s": 0.5}} | LOGGED
        async with running_process(settings, tmp_path) as router:
            running = asyncio.create_task(ask(router.port, chat()))
            await eventually(lambda: node.inflight, within=4)
            router.process.send_signal(signal.SIGTERM)
            reply = await running
            assert (reply.status, reply.error["code"]) == (503, "server_is_overloaded")
            assert await asyncio.wait_for(router.process.wait(), 5) == 0
            assert json.loads(router.said.splitlines()[-1])["outcome"] == "shutdown"


async def test_names_from_requests_never_become_labels(rig):
    await rig.node()
    app = await rig.router()
    await ask(app.port, chat())
    await ask(app.port, chat(model="warm-up"))
    before = set(await app.metrics())
    for index in range(60):
        assert (await ask(app.port, chat(model=f"typo-{index}", user=f"user-{index}"))).status == 404
        await ask(app.port, path=f"/v1/typo-{index}", method="GET")
    assert (await ask(app.port, chat(model="x" * 10_000))).status in (400, 404)
    await ask(app.port, chat(), headers=(("X-Ebbtide-Workload", "made-up"),))
    after = set(await app.metrics())
    assert not [name for name in after if "typo" in name or "user-" in name or "made-up" in name]
    families = {name.partition("{")[0] for name in after}
    assert len(after - before) <= len(families)


async def test_counters_count_every_call_once(rig):
    await rig.node()
    app = await rig.router()
    key = 'ebbtide_calls_total{endpoint="chat/completions",outcome="completed",workload="interactive"}'
    counted = []
    for _ in range(5):
        await asyncio.gather(*(ask(app.port, chat()) for _ in range(8)))
        counted.append((await app.metrics())[key])
    assert counted == [8, 16, 24, 32, 40]
    assert (await app.metrics()).get('ebbtide_queue_calls{workload="interactive"}', 0) == 0


async def test_finished_calls_leave_no_objects_behind(rig):
    node = await rig.node()
    app = await rig.router()

    async def many(body, count):
        for _ in range(count // 10):
            await asyncio.gather(*(ask(app.port, body) for _ in range(10)))
        node.forget()

    async def objects():
        await eventually(lambda: app.held == 0)
        gc.collect()
        return len(gc.get_objects())

    failing = chat("x" * 100_000, model="nope")
    await many(stream(), 60)
    await many(failing, 20)
    before = await objects()
    await many(stream(), 150)
    await many(failing, 40)
    assert await objects() - before < 400


async def test_a_queue_over_its_bytes_refuses_at_once_and_counts_back_to_zero(rig):
    node = await rig.node(script=Script(ttft=30), context=10**7, kv_tokens=10**9)
    app = await rig.router(
        entry(node, max_sequences=1),
        pools={"interactive": {"patience_s": 4, "queue_bytes": 1_100_000}},
        upstream={"first_byte_s": 20},
        classify={"long_prompt_tokens": 10**8},
    )
    async with await Connection.open(app.port) as holder:
        await holder.send(request(CHAT, chat()))
        await eventually(lambda: node.inflight == 1)
        calls = [asyncio.create_task(ask(app.port, chat("x " * 50_000))) for _ in range(30)]
        await eventually(lambda: sum(call.done() for call in calls) == 20, within=4)
        waiting = await app.metrics()
        assert waiting['ebbtide_queue_calls{workload="interactive"}'] == 10
        assert 1_000_000 < waiting['ebbtide_queue_bytes{workload="interactive"}'] <= 1_100_000
        replies = await asyncio.gather(*calls)
    assert all(reply.status == 503 and reply.header("retry-after") for reply in replies)
    assert (await app.metrics())['ebbtide_queue_bytes{workload="interactive"}'] == 0


async def test_slow_senders_do_not_slow_the_others(rig):
    await rig.node()
    app = await rig.router()
    slow = [await Connection.open(app.port) for _ in range(100)]
    raw = request(CHAT, chat())
    for index, line in enumerate(slow):
        await line.send(raw[: 10 + index])
    assert (await ask(app.port, chat())).status == 200
    for line in slow:
        line.close()


SMUGGLED = {
    "both framings": (("Content-Length", "5"), ("Transfer-Encoding", "chunked")),
    "two lengths": (("Content-Length", "5"), ("Content-Length", "6")),
    "odd coding": (("Transfer-Encoding", "chunked, gzip"),),
}


@pytest.mark.parametrize("name", SMUGGLED)
async def test_doubtful_framing_is_refused_and_the_connection_closed(rig, name):
    node = await rig.node()
    app = await rig.router()
    async with await Connection.open(app.port) as line:
        await line.send(request(CHAT, b"0\r\n\r\n", headers=SMUGGLED[name]))
        reply = await line.reply()
        assert 400 <= reply.status < 500 or reply.status == 501
        assert await asyncio.wait_for(line.ended(), 2)
    assert node.accepted == 0


async def test_a_very_long_url_is_refused(rig):
    await rig.node()
    app = await rig.router()
    reply = await ask(app.port, path="/v1/models/" + "x" * 80_000, method="GET")
    assert reply.status in (400, 404, 414, 431)


async def test_two_keys_in_one_request_are_none(rig):
    await rig.node()
    app = await rig.router(keys=[{"name": "a", "key": "key-a"}])
    both = (("Authorization", "Bearer wrong"), ("Authorization", "Bearer key-a"))
    assert (await ask(app.port, chat(), headers=both)).status in (400, 401)
