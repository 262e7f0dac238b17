"""Byte fidelity of streams: what the node said is what the client gets, when it was said."""

import asyncio
import json
from itertools import pairwise
from time import monotonic

import psutil
import pytest

from tests.fakes import Script
from tests.fakes.streams import data_event
from tests.rig import Connection, ask, chat, entry, eventually, relay_entry, request, stream

CHAT = "/v1/chat/completions"
DONE = b"data: [DONE]\n\n"


def chunk(delta, finish=None, **extra):
    choice = {"index": 0, "delta": delta, "finish_reason": finish}
    head = {"id": "chatcmpl-1", "object": "chat.completion.chunk", "created": 1, "model": "tiny"}
    return data_event({**head, "choices": [choice], **extra})


FINISH = chunk({}, "stop")


async def test_events_arrive_when_they_are_sent_from_nodes_and_relay(rig):
    node = await rig.node(script=Script(gap=0.05, n=12))
    relay = await rig.relay(models=["far"], script=Script(gap=0.05, n=12))
    app = await rig.router(node, relay=relay_entry(relay, ("far",), api_key="relay-key"))
    for server, model in ((node, "tiny"), (relay, "far")):
        reply = await ask(app.port, stream(model=model))
        arrived = [event.at for event in reply.events if b"tok" in event.data]
        late = sorted(at - sent for sent, at in zip(server.seen[-1].sent, arrived, strict=True))
        assert late[-2] < 0.02
        assert reply.header("x-accel-buffering") == "no"
        assert reply.header("cache-control") == "no-cache"
        assert (reply.header("content-type") or "").startswith("text/event-stream")


async def test_characters_cut_by_segments_stay_whole(rig):
    wire = chunk({"content": "你好🌍"}) + FINISH + DONE
    node = await rig.node(script=Script(pieces=tuple(wire[at : at + 1] for at in range(len(wire))), piece_gap=0))
    app = await rig.router()
    reply = await ask(app.port, stream(stream_options={"include_usage": True}))
    assert reply.body == wire
    assert node.accepted == 1


async def test_unicode_line_separators_are_text(rig):
    text = "a\u2028b\u2029c\x85d\x0be\x1cf"
    usage = {"prompt_tokens": 7, "completion_tokens": 5, "total_tokens": 12}
    raw = json.dumps({"content": text}, ensure_ascii=False).encode()
    first = chunk({"content": "X"}).replace(b'{"content":"X"}', raw)
    last = data_event({"id": "c", "object": "chat.completion.chunk", "model": "a\u2028", "choices": [], "usage": usage})
    wire = first + FINISH + last + DONE
    await rig.node(script=Script(pieces=(wire,)))
    app = await rig.router()
    reply = await ask(app.port, stream(stream_options={"include_usage": True}))
    assert reply.body == wire
    assert (await app.metrics())['ebbtide_prompt_tokens_total{workload="interactive"}'] == 7


@pytest.mark.parametrize("size", [2**20, 9 * 2**20])
async def test_a_very_long_event_passes_whole(rig, size):
    usage = {"prompt_tokens": 3, "completion_tokens": 2, "total_tokens": 5}
    wire = chunk({"content": "x" * size}) + FINISH + data_event({"choices": [], "usage": usage}) + DONE
    pieces = tuple(wire[at : at + 65536] for at in range(0, len(wire), 65536))
    await rig.node(script=Script(pieces=pieces, piece_gap=0))
    app = await rig.router()
    reply = await ask(app.port, stream(stream_options={"include_usage": True}))
    assert len(reply.body) == len(wire)
    assert reply.body == wire
    assert (await app.metrics())['ebbtide_output_tokens_total{workload="interactive"}'] == 2


async def test_a_client_that_does_not_read_holds_no_memory_and_no_node(rig):
    node = await rig.node(script=Script(flood=200 * 2**20))
    app = await rig.router(server={"write_stall_s": 0.8})
    before = psutil.Process().memory_info().rss
    async with await Connection.open(app.port, receive_buffer=4096) as line:
        await line.send(request(CHAT, stream()))
        await eventually(lambda: node.aborted, within=4)
        assert psutil.Process().memory_info().rss - before < 16 * 2**20
        assert node.aborted[0].pushed < 20 * 2**20
    metrics = await app.metrics()
    stalled = 'ebbtide_calls_total{endpoint="chat/completions",outcome="client_stalled",workload="interactive"}'
    assert metrics[stalled] == 1


async def test_no_total_time_ends_a_healthy_stream_but_silence_does(rig):
    node = await rig.node(script=Script(gap=0.2, n=12))
    app = await rig.router(upstream={"first_byte_s": 1.2, "idle_s": 1.2, "retries": 0})
    reply = await ask(app.port, stream())
    assert len(reply.text.split()) == 12
    assert reply.data[-1] == b"[DONE]"
    node.script = Script(stall=(3, 600))
    began = monotonic()
    stalled = await ask(app.port, stream())
    assert 1.0 < monotonic() - began < 5
    assert json.loads(stalled.data[-2])["error"]["code"] == "upstream_error"


async def test_a_long_unstreamed_call_is_not_cut_by_the_idle_bound_of_streams(rig):
    await rig.node(script=Script(ttft=1.0))
    app = await rig.router(upstream={"first_byte_s": 3, "idle_s": 0.3})
    assert (await ask(app.port, chat())).status == 200


async def test_a_long_prefill_after_the_head_is_not_taken_for_silence_inside_the_answer(rig):
    node = await rig.node(script=Script(ttft=1.0, head_first=True))
    app = await rig.router(upstream={"first_byte_s": 3, "idle_s": 0.3, "retries": 0})
    assert (await ask(app.port, stream())).text == "tok0 tok1 tok2 tok3 tok4"
    node.script = Script(ttft=600, head_first=True)
    app = await rig.router(
        upstream={"first_byte_s": 0.5, "first_byte_per_prompt_token_s": 0, "idle_s": 30, "retries": 0}
    )
    refused = await ask(app.port, stream())
    assert (refused.status, refused.error["code"]) == (504, "upstream_timeout")


async def test_comments_keep_a_waiting_stream_alive(rig):
    node = await rig.node(script=Script(ttft=1.2))
    app = await rig.router(server={"heartbeat_s": 0.2})
    reply = await ask(app.port, stream())
    times = [reply.head_at, *(event.at for event in reply.events)]
    assert max(later - earlier for earlier, later in pairwise(times)) < 1.1, "comments came between"
    assert reply.text == "tok0 tok1 tok2 tok3 tok4"
    node.script = Script(ttft=0.6, status=500, shape="openai")
    failed = await ask(app.port, stream())
    assert failed.status == 200
    assert json.loads(failed.data[-2])["error"]["type"] == "server_error"
    assert failed.data[-1] == b"[DONE]"


@pytest.mark.parametrize("ttft", [0.0, 0.6])
async def test_a_stream_that_comes_compressed_is_readable_with_and_without_a_heartbeat(rig, ttft):
    await rig.node()
    relay = await rig.relay(models=["far"], script=Script(gzip=True, ttft=ttft))
    app = await rig.router(relay=relay_entry(relay, ["far"], api_key=relay.requires_key), server={"heartbeat_s": 0.2})
    reply = await ask(app.port, stream(model="far"))
    assert reply.text == "tok0 tok1 tok2 tok3 tok4"
    assert reply.data[-1] == b"[DONE]"
    assert not reply.values("content-encoding")
    assert any(event.comment for event in reply.events) is bool(ttft)


async def test_a_stream_whose_coding_nobody_asked_for_is_no_answer(rig):
    node = await rig.node(script=Script(headers=(("content-encoding", "br"),)))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert (reply.status, reply.error["code"]) == (502, "upstream_unavailable")
    node.script = Script(gzip=True, cut=3)
    cut = await ask(app.port, stream())
    assert cut.text == "tok0 tok1 tok2"
    assert json.loads(cut.data[-2])["error"]["code"] == "upstream_error"


async def test_after_a_heartbeat_a_failed_node_is_still_replaced(rig):
    bad = await rig.node(script=Script(ttft=0.6, status=500))
    good = await rig.node(script=Script())
    app = await rig.router(server={"heartbeat_s": 0.2})
    replies = [await ask(app.port, stream()) for _ in range(2)]
    assert [reply.text for reply in replies] == ["tok0 tok1 tok2 tok3 tok4"] * 2
    assert bad.accepted >= 1
    assert good.accepted == 2


async def test_the_heartbeat_does_not_move_the_bound_on_the_first_byte(rig):
    await rig.node(script=Script(nohead=30))
    bounds = {"first_byte_s": 0.6, "first_byte_per_prompt_token_s": 0.0001, "retries": 0}
    app = await rig.router(server={"heartbeat_s": 0.1}, upstream=bounds)
    began = monotonic()
    reply = await ask(app.port, stream())
    assert monotonic() - began < 1.5
    assert b"error" in reply.data[-2]


@pytest.mark.parametrize("renamed", [False, True])
async def test_framing_headers_are_our_own(rig, renamed):
    body = b'{\n  "id": "x",   "model": "own",\n "choices": [ ] }\n'
    headers = (("Connection", "X-Foo"), ("X-Foo", "1"), ("Keep-Alive", "timeout=5"), ("Date", "x"), ("Server", "y"))
    own = "own" if renamed else "tiny"
    node = await rig.node(models=[own], script=Script(answer=body, headers=headers))
    app = await rig.router(entry(node, models={"tiny": own}))
    reply = await ask(app.port, chat())
    assert reply.clean
    assert json.loads(reply.body)["model"] == ("tiny" if renamed else "own")
    assert renamed or reply.body == body
    names = [name.lower() for name, _ in reply.headers]
    assert not {"x-foo", "keep-alive"} & set(names)
    assert len(names) == len(set(names))


async def test_trailers_do_not_break_the_framing(rig):
    await rig.node(script=Script(trailers=(("X-Checksum", "1"),)))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert reply.clean
    assert reply.data[-1] == b"[DONE]"


async def test_events_are_not_rebuilt(rig):
    call = {"index": 0, "id": "c1", "type": "function", "function": {"name": "f", "arguments": ""}}
    other = {"index": 1, "id": "c2", "type": "function", "function": {"name": "g", "arguments": ""}}
    part = {"index": 0, "function": {"arguments": '{"a": '}}
    again = {"index": 0, "function": {"arguments": "1}"}}
    two = data_event({"id": "x", "choices": [{"index": 1, "delta": {"content": "b"}}, {"index": 0, "delta": {}}]})
    events = (
        chunk({"role": "assistant", "content": None}),
        chunk({"reasoning_content": "hm", "odd": [1, {"k": None}]}),
        chunk({"tool_calls": [call, other]}),
        chunk({"tool_calls": [part, again]}),
        two,
        chunk({}, "tool_calls", extra_key=1),
        data_event({"choices": [], "usage": {"prompt_tokens": 1, "completion_tokens": 2, "total_tokens": 3}}),
        DONE,
    )
    await rig.node(script=Script(events=events))
    app = await rig.router()
    reply = await ask(app.port, stream(stream_options={"include_usage": True}))
    assert reply.body == b"".join(events)


async def test_a_rewritten_model_name_is_the_only_change(rig):
    node = await rig.node(models=["own"], script=Script(n=3))
    app = await rig.router(entry(node, models={"tiny": "own"}))
    reply = await ask(app.port, stream(stream_options={"include_usage": True}))
    direct = await ask(node.port, stream(model="own", stream_options={"include_usage": True}))

    def plain(body):
        return [{**json.loads(data), "id": ""} for data in body.data if data.startswith(b"{")]

    assert [{**event, "model": "own"} for event in plain(reply)] == plain(direct)
    assert {event["model"] for event in plain(reply)} == {"tiny"}
    assert node.seen[0].json["model"] == "own"


async def test_non_finite_numbers_pass_in_answers_and_not_in_requests(rig):
    body = b'{"model":"tiny","choices":[{"index":0,"logprobs":{"content":[{"logprob":-Infinity}]}}]}'
    node = await rig.node(script=Script(answer=body))
    app = await rig.router()
    assert (await ask(app.port, chat())).body == body
    refused = await ask(app.port, b'{"model":"tiny","messages":[],"temperature":NaN}')
    assert (refused.status, refused.error["type"]) == (400, "invalid_request_error")
    assert node.accepted == 1


@pytest.mark.parametrize("ends", [{"cut": 3}, {"cut_clean": 3}, {"eof_chunked": 3}])
async def test_half_an_answer_never_looks_whole(rig, ends):
    node = await rig.node(script=Script(**ends))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert reply.text == "tok0 tok1 tok2"
    assert json.loads(reply.data[-2])["error"]["code"] == "upstream_error"
    assert app.node("n1").faults == 1
    assert (await app.metrics())['ebbtide_truncated_total{node="n1"}'] == 1
    node.script = Script(cut_clean=0)
    whole = await ask(app.port, chat())
    assert whole.status == 502
    assert whole.error["type"] == "server_error"


async def test_an_end_without_done_after_a_finish_is_an_end(rig):
    await rig.node(script=Script(done=False))
    app = await rig.router()
    reply = await ask(app.port, stream())
    assert reply.text == "tok0 tok1 tok2 tok3 tok4"
    assert reply.clean
    assert b"error" not in reply.body
    assert app.node("n1").faults == 0
    assert await asyncio.wait_for(ask(app.port, stream()), 2)
