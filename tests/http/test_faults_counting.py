"""Counting and classifying: it never stalls, never raises, never phones home and never judges what is valid."""

import asyncio
import base64
import json
import os
from itertools import pairwise
from time import monotonic

import pytest

from tests.fakes import FakeNode, Script
from tests.rig import Connection, ask, chat, entry, eventually, request, running_process, stream


async def test_big_prompts_stall_neither_probes_nor_streams(rig):
    node = await rig.node(context=2_000_000, kv_tokens=10**9, script=Script(gap=0.1, n=20))
    app = await rig.router()
    words = "All that is gold does not glitter, not all those who wander are lost. " * 14_000
    watched = asyncio.create_task(ask(app.port, stream()))
    big = [asyncio.create_task(ask(app.port, chat(words, user=str(index)))) for index in range(8)]
    took = []
    while not watched.done():
        began = monotonic()
        assert (await ask(app.port, path="/livez", method="GET")).status == 200
        took.append(monotonic() - began)
        await asyncio.sleep(0.05)
    gaps = [later.at - earlier.at for earlier, later in pairwise((await watched).events)]
    assert {reply.status for reply in await asyncio.gather(*big)} <= {200}
    assert sorted(took)[int(len(took) * 0.9)] < 0.3
    assert sorted(gaps)[-2] < 0.5
    assert node.accepted == 9


async def test_text_of_special_tokens_is_text(rig):
    node = await rig.node()
    app = await rig.router()
    body = json.dumps(chat("<|endoftext|> <|im_start|> <|fim_prefix|> <|endofprompt|>")).encode()
    assert (await ask(app.port, body)).status == 200
    assert node.bodies == [body]


async def test_without_a_network_it_starts_and_serves(tmp_path):
    async with FakeNode(name="n1") as node, FakeNode(name="outside") as outside:
        env = dict.fromkeys(("HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY"), outside.url)
        env |= {"NO_PROXY": "127.0.0.1", "TIKTOKEN_CACHE_DIR": str(tmp_path / "empty")}
        async with running_process({"nodes": [entry(node)]}, tmp_path, env=os.environ | env) as router:
            assert (await ask(router.port, chat("hello " * 5000))).status == 200
        assert outside.connections == 0


async def test_media_is_not_text(rig):
    node = await rig.node()
    app = await rig.router()
    picture = base64.b64encode(os.urandom(1_500_000)).decode()
    sound = base64.b64encode(os.urandom(2_000_000)).decode()
    parts = [
        {"type": "text", "text": "what is this"},
        {"type": "image_url", "image_url": {"url": f"data:image/png;base64,{picture}"}},
        {"type": "input_audio", "input_audio": {"data": sound, "format": "wav"}},
        {"type": "file", "file": {"file_data": f"data:application/pdf;base64,{sound}", "filename": "a.pdf"}},
        {"type": "never_heard_of", "what": "ever"},
    ]
    body = json.dumps(chat(parts)).encode()
    node.script = Script(ttft=0.3)
    call = asyncio.create_task(ask(app.port, body))
    await eventually(lambda: node.accepted)
    held = app.node("n1").budget.held().tokens
    reply = await call
    assert (reply.status, reply.header("x-ebbtide-workload")) == (200, "interactive")
    assert 300 <= held <= 32_768
    assert node.bodies == [body]


ODD = {
    "null content": [{"role": "assistant", "content": None}],
    "empty content": [{"role": "user", "content": ""}, {"role": "user", "content": []}],
    "no role": [{"content": "x"}],
    "null tool calls": [{"role": "assistant", "content": None, "tool_calls": None}],
    "reasoning part": [{"role": "assistant", "content": [{"type": "reasoning", "summary": [None]}]}],
    "tool result": [{"role": "tool", "content": [{"type": "tool_result", "content": [{"type": "text", "text": "x"}]}]}],
    "numbers": [{"role": "user", "content": 5}, 7, None, "text"],
    "no messages": [],
    "not a list": {"role": "user"},
    "null": None,
}


@pytest.mark.parametrize("name", ODD)
async def test_odd_messages_are_the_nodes_to_judge(rig, name):
    node = await rig.node(script=Script(answer={"ok": True}))
    node.on_request = lambda seen: Script(
        raw=(b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\ncontent-type: application/json\r\n\r\n{}",)
    )
    app = await rig.router()
    body = json.dumps({"model": "tiny", "messages": ODD[name]}).encode()
    reply = await ask(app.port, body)
    assert reply.status == 200, reply.body
    assert node.bodies == [body]


@pytest.mark.parametrize(
    ("prompt", "tokens"),
    [("x", 1), (["x", "y"], 2), ([1, 2, 3], 3), ([[1, 2], [3]], 3), (list(range(5000)), 5000)],
)
async def test_token_ids_count_as_what_they_are(rig, prompt, tokens):
    node = await rig.node(script=Script(ttft=0.2))
    app = await rig.router()
    call = asyncio.create_task(ask(app.port, {"model": "tiny", "prompt": prompt, "max_tokens": 1}, "/v1/completions"))
    await eventually(lambda: node.accepted)
    held = app.node("n1").budget.held().tokens
    assert (await call).status == 200
    assert held >= tokens
    if tokens > 2:
        assert held <= tokens * 1.5 + 20


async def test_the_nodes_own_refusal_is_passed_on(rig):
    await rig.node(script=Script(status=400, shape="openai", message="messages: field required"))
    app = await rig.router()
    reply = await ask(app.port, {"model": "tiny"})
    assert (reply.status, reply.error["message"]) == (400, "messages: field required")


@pytest.mark.parametrize("factor", [0.65, 1.35])
async def test_the_estimate_learns_the_models_own_tokenizer(rig, factor):
    limit = 4096
    words = "the quick brown fox jumps over the lazy dog and runs away "
    plain = len(words.split())
    node = await rig.node(context=limit)
    node.count = lambda text: int(len(text.split()) * factor)
    app = await rig.router()
    for _ in range(50):
        assert (await ask(app.port, chat(words * 60, max_tokens=5))).status == 200
    near = int(limit * 0.95 / factor / plain)
    served = [await ask(app.port, chat(words * near, max_tokens=5)) for _ in range(5)]
    assert [reply.status for reply in served] == [200] * 5
    over = await ask(app.port, chat(words * int(near * 1.4), max_tokens=5))
    assert (over.status, over.error["code"]) == (400, "context_length_exceeded")


async def test_a_long_prompt_is_batch_and_a_header_says_otherwise(rig):
    await rig.node()
    app = await rig.router(classify={"long_prompt_tokens": 1000})
    told = await ask(app.port, chat("word " * 3000))
    assert (told.header("x-ebbtide-workload"), told.header("x-ebbtide-reason")) == ("batch", "size")
    said = await ask(app.port, chat("word " * 3000), headers=(("X-Ebbtide-Workload", "interactive"),))
    assert (said.header("x-ebbtide-workload"), said.header("x-ebbtide-reason")) == ("interactive", "header")


HAZARDS = {
    "duplicate model": b'{"model":"tiny","model":"other","messages":[]}',
    "duplicate stream": b'{"model":"tiny","stream":false,"stream":true,"messages":[]}',
    "deep nesting": b'{"model":"tiny","messages":' + b"[" * 100_000 + b"]" * 100_000 + b"}",
    "huge integer": b'{"model":"tiny","messages":[],"seed":' + b"9" * 5000 + b"}",
    "NaN": b'{"model":"tiny","messages":[],"temperature":NaN}',
    "Infinity": b'{"model":"tiny","messages":[],"temperature":-Infinity}',
    "lone surrogate": b'{"model":"ti\\ud800ny","messages":[]}',
    "not UTF-8": b'{"model":"tiny","messages":["\xff\xfe"]}',
    "model is a number": b'{"model":5,"messages":[]}',
    "model is an object": b'{"model":{},"messages":[]}',
    "truncated": b'{"model":"tiny","messages":[',
}


@pytest.mark.parametrize("name", HAZARDS)
async def test_what_cannot_be_read_is_the_callers_error(rig, name):
    node = await rig.node()
    app = await rig.router()
    reply = await ask(app.port, HAZARDS[name])
    assert reply.status in (400, 404), reply.body
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert node.accepted == 0
    async with await Connection.open(app.port) as line:
        await line.send(request("/v1/chat/completions", chat()))
        assert (await line.reply()).status == 200
