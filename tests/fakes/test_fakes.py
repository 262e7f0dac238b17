"""Every knob of a fake does what it says: tests that lean on them may trust them."""

import asyncio
import base64
import gzip
import json
import struct
from itertools import pairwise
from time import monotonic

import pytest

from tests.fakes import FakeNode, Script
from tests.fakes.plain import vector
from tests.fakes.script import PING
from tests.rig import Connection, ask, chat, eventually, request, stream

CHAT = "/v1/chat/completions"


async def test_a_healthy_node_answers_whole_and_streamed(node):
    whole = await ask(node.port, chat(max_tokens=3))
    assert whole.json["choices"][0]["message"]["content"] == "tok0 tok1 tok2"
    assert whole.json["choices"][0]["finish_reason"] == "length"
    streamed = await ask(node.port, stream(max_tokens=3))
    assert streamed.text == "tok0 tok1 tok2"
    assert streamed.data[-1] == b"[DONE]"
    assert (node.accepted, node.completed, node.inflight) == (2, 2, 0)


async def test_usage_comes_only_when_asked_for(node):
    without = await ask(node.port, stream())
    assert not any(b'"usage"' in data for data in without.data)
    asked = await ask(node.port, stream(stream_options={"include_usage": True}))
    last = json.loads(asked.data[-2])
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == 5


async def test_pace(node):
    node.script = Script(ttft=0.1, gap=0.05, n=3)
    began = monotonic()
    reply = await ask(node.port, stream())
    times = [event.at - began for event in reply.events if b"tok" in event.raw]
    assert times[0] >= 0.1
    assert times[2] - times[0] >= 0.1
    assert reply.head_at - began < 0.1
    node.script = Script(ttft=0.1, head_first=False)
    began = monotonic()
    assert (await ask(node.port, stream())).head_at - began >= 0.1


@pytest.mark.parametrize("cut", [{"cut": 2}, {"cut_clean": 2}, {"cut_inside": 2}])
async def test_cuts_end_the_stream_inside_the_answer(node, cut):
    node.script = Script(**cut)
    reply = await ask(node.port, stream())
    assert not reply.clean
    assert reply.text == "tok0 tok1"
    assert (b"tok2" in reply.body, len(node.cut)) == (False, 1) or "cut_inside" in cut


async def test_a_cut_is_a_reset_and_a_clean_cut_is_not(node):
    for script, kind in ((Script(cut=1), ConnectionResetError), (Script(cut_clean=1), None)):
        node.script = script
        async with await Connection.open(node.port) as line:
            await line.send(request(CHAT, stream()))
            ended: type[BaseException] | None = None
            try:
                while await line.read():
                    pass
            except ConnectionResetError as error:
                ended = type(error)
            assert ended is kind


async def test_an_unstreamed_answer_can_be_cut_too(node):
    node.script = Script(cut_clean=0)
    reply = await ask(node.port, chat())
    assert not reply.clean
    assert 0 < len(reply.body) < int(reply.header("content-length") or 0)


async def test_an_end_without_finish_or_done(node):
    node.script = Script(eof_chunked=2)
    reply = await ask(node.port, stream())
    assert reply.clean
    assert reply.data[-1] != b"[DONE]"
    assert b'"finish_reason":"' not in reply.body
    node.script = Script(done=False)
    assert b'"finish_reason":"stop"' in (await ask(node.port, stream())).data[-1]


async def test_stall_and_nohead_are_silent_with_the_socket_open(node):
    node.script = Script(stall=(1, 0.15))
    reply = await ask(node.port, stream())
    times = [event.at for event in reply.events]
    assert max(later - earlier for earlier, later in pairwise(times)) >= 0.14
    node.script = Script(nohead=0.1)
    began = monotonic()
    assert (await ask(node.port, stream())).head_at - began >= 0.1


async def test_a_refusal_carries_status_body_and_retry_after(node):
    node.script = Script(status=503, ra="7", body={"error": "scaling"})
    reply = await ask(node.port, chat())
    assert (reply.status, reply.header("retry-after"), reply.json) == (503, "7", {"error": "scaling"})


@pytest.mark.parametrize(
    ("shape", "sign"),
    [
        ("openai", b'"code":null'),
        ("vllm", b'"code":500'),
        ("sglang", b'{"object":"error"'),
        ("detail", b'{"detail":'),
        ("string", b'{"error":"'),
        ("html", b"<html>"),
        ("llamacpp", b'{"error":{"code":500'),
        ("anthropic", b'{"type":"error"'),
        ("empty", b""),
    ],
)
async def test_error_bodies_as_engines_word_them(node, shape, sign):
    node.script = Script(status=500, shape=shape)
    reply = await ask(node.port, chat())
    assert reply.status == 500
    assert sign in reply.body


async def test_an_error_inside_a_200_after_a_ping(node):
    node.script = Script(errframe=0, prelude=(PING,))
    reply = await ask(node.port, stream())
    assert reply.status == 200
    assert reply.events[0].comment
    assert json.loads(reply.data[0])["error"]["message"] == "scripted failure"
    assert len(reply.data) == 1


async def test_raw_pieces_come_one_by_one(node):
    head = b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\n"
    node.script = Script(raw=(head, b"a", b"b", b"c", b"d"))
    async with await Connection.open(node.port) as line:
        await line.send(request(CHAT, chat()))
        pieces = [piece async for piece in _pieces(line)]
    assert pieces == [head, b"a", b"b", b"c", b"d"]


async def _pieces(line):
    while piece := await line.read():
        yield piece


async def test_pieces_of_the_body(node):
    wanted = 'data: {"text": "你好🌍"}\n\n'.encode()
    node.script = Script(pieces=tuple(wanted[at : at + 1] for at in range(len(wanted))), piece_gap=0)
    assert (await ask(node.port, stream())).body == wanted


async def test_idle_connections_are_closed(node):
    node.idleclose = 0.05
    async with await Connection.open(node.port) as line:
        await line.send(request("/health", method="GET"))
        await line.reply("GET")
        assert await asyncio.wait_for(line.ended(), 1)


async def test_a_reused_connection_can_be_reset_at_its_next_request(node):
    node.race_closes = 1
    async with await Connection.open(node.port) as line:
        await line.send(request(CHAT, chat()))
        await line.reply()
        await line.send(request(CHAT, chat()))
        with pytest.raises(ConnectionResetError):
            await line.reply()
    assert node.accepted == 1


async def test_the_peer_leaving_is_an_abort(node):
    node.script = Script(ttft=30)
    for leave in (Connection.close, Connection.reset):
        line = await Connection.open(node.port)
        await line.send(request(CHAT, chat()))
        await eventually(lambda: node.inflight == 1)
        leave(line)
        await eventually(lambda: node.inflight == 0)
    assert len(node.aborted) == 2
    assert all(seen.ended for seen in node.aborted)


async def test_a_peer_that_does_not_read_blocks_the_node(node):
    node.script = Script(flood=64 * 2**20)
    async with await Connection.open(node.port, receive_buffer=4096) as line:
        await line.send(request(CHAT, stream()))
        await eventually(lambda: node.seen and node.seen[0].pushed)
        pushed = node.seen[0].pushed
        assert not await _grows(lambda: node.seen[0].pushed > pushed + 16 * 2**20)


async def _grows(predicate) -> bool:
    try:
        return bool(await eventually(predicate, 0.3))
    except AssertionError:
        return False


async def test_slots_queue_what_is_beyond_them():
    async with FakeNode(slots=1, script=Script(ttft=0.1)) as node:
        calls = [asyncio.create_task(ask(node.port, chat())) for _ in range(3)]
        await eventually(lambda: (node.running, node.waiting) == (1, 2))
        await asyncio.gather(*calls)
        starts = sorted(seen.running_since for seen in node.seen)
        assert starts[1] - starts[0] >= 0.09


async def test_prefill_is_serial_and_as_long_as_the_prompt():
    async with FakeNode(prefill_rate=1000) as node:
        began = monotonic()
        await asyncio.gather(*(ask(node.port, chat("x" * 400)) for _ in range(2)))
        assert monotonic() - began >= 0.2


async def test_a_prompt_over_the_context_is_refused_as_the_engine_refuses_it():
    for dialect, words in (("vllm", "maximum context length is 10"), ("llamacpp", "available context size")):
        async with FakeNode(context=10, dialect=dialect) as node:
            reply = await ask(node.port, chat("x" * 100))
            assert reply.status == 400
            assert words in reply.error["message"]


async def test_keys_are_asked_for():
    async with FakeNode(requires_key="secret", dialect="openai") as node:
        assert (await ask(node.port, chat())).status == 401
        key = (("Authorization", "Bearer secret"),)
        assert (await ask(node.port, chat(), headers=key)).status == 200


async def test_scripts_by_request_by_order_by_suffix_and_by_model(node):
    node.script = Script(n=1)
    node.scripts["tiny"] = Script(n=2)
    node.upcoming = [Script(n=3)]
    assert (await ask(node.port, stream())).text == "tok0 tok1 tok2"
    assert (await ask(node.port, stream())).text == "tok0 tok1"
    assert (await ask(node.port, stream(model="tiny;n=4"))).text == "tok0 tok1 tok2 tok3"
    node.on_request = lambda seen: Script(n=5) if b"five" in seen.body else None
    assert len((await ask(node.port, stream("five"))).text.split()) == 5


async def test_gzip_whole_and_streamed(node):
    node.script = Script(gzip=True)
    whole = await ask(node.port, chat())
    assert json.loads(gzip.decompress(whole.body))["object"] == "chat.completion"
    assert gzip.decompress((await ask(node.port, stream())).body).endswith(b"data: [DONE]\n\n")


async def test_down_refuses_and_up_serves_on_the_same_port(node):
    port = node.port
    await node.down()
    with pytest.raises(ConnectionError):
        await ask(port, chat())
    await node.up()
    assert node.port == port
    assert (await ask(port, chat())).status == 200


async def test_frozen_answers_nothing_until_thawed(node):
    node.frozen = True
    call = asyncio.create_task(ask(node.port, path="/health", method="GET"))
    await eventually(lambda: node.probes)
    assert not call.done()
    node.frozen = False
    assert (await call).status == 200


@pytest.mark.parametrize("fmt", ["float", "base64"])
async def test_embeddings_honour_the_format(node, fmt):
    reply = await ask(node.port, {"model": "tiny", "input": "a", "encoding_format": fmt}, "/v1/embeddings")
    item = reply.json["data"][0]["embedding"]
    assert list(item if fmt == "float" else struct.unpack("<8f", base64.b64decode(item))) == vector("a")


@pytest.mark.parametrize(("prompt", "choices"), [("a", 1), (["a", "b"], 2), ([1, 2], 1), ([[1, 2], [3]], 2)])
async def test_a_completion_has_a_choice_for_every_prompt(node, prompt, choices):
    reply = await ask(node.port, {"model": "tiny", "prompt": prompt}, "/v1/completions")
    assert [choice["index"] for choice in reply.json["choices"]] == list(range(choices))


async def test_background_responses_are_kept_polled_and_cancelled(node):
    node.script = Script(ttft=0.05)
    made = (await ask(node.port, {"model": "tiny", "input": "x", "background": True}, "/v1/responses")).json
    assert made["status"] == "queued"
    path = f"/v1/responses/{made['id']}"
    cancelled = await ask(node.port, b"", f"{path}/cancel")
    assert cancelled.json["status"] == "cancelled"
    assert (await ask(node.port, path="/v1/responses/resp_none", method="GET")).status == 404
    earlier = {"model": "tiny", "input": "x", "previous_response_id": "resp_none"}
    assert (await ask(node.port, earlier, "/v1/responses")).status == 404


@pytest.mark.parametrize("dialect", ["vllm", "sglang", "llamacpp", "ollama", "openai"])
async def test_every_dialect_lists_its_models(dialect):
    async with FakeNode(dialect=dialect) as node:
        reply = await ask(node.port, path="/v1/models", method="GET")
        assert [model["id"] for model in reply.json["data"]] == ["tiny"]


async def test_metrics_can_be_renamed_dropped_replaced_and_broken(node):
    async def scrape():
        return await ask(node.port, path="/metrics", method="GET")

    assert b"vllm:kv_cache_usage_perc{" in (await scrape()).body
    node.metric_names = {"vllm:kv_cache_usage_perc": "vllm:gpu_cache_usage_perc", "vllm:num_requests_running": None}
    body = (await scrape()).body
    assert b"vllm:gpu_cache_usage_perc{" in body
    assert b"num_requests_running" not in body
    node.metrics = 500
    assert (await scrape()).status == 500


async def test_doubtful_framing_is_noted(node):
    raw = request(CHAT, chat(), headers=(("Transfer-Encoding", "chunked"), ("Content-Length", "5")))
    async with await Connection.open(node.port) as line:
        await line.send(raw.partition(b"\r\n\r\n")[0] + b"\r\n\r\n0\r\n\r\n")
        await line.reply()
    assert "framing twice" in node.faults[0]
