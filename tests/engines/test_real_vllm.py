"""The router in front of a real vLLM: its facts, every protocol it speaks, its errors, and calls whose clients leave.

Run by `scripts/test-engines`. Nothing here depends on what the model says: it may have random weights.
"""

import asyncio
import json
import struct
from base64 import b64decode

import pytest

from tests.engines.nightly import beside_chat
from tests.rig import Connection, ask, chat, eventually, request, stream

CHAT = "/v1/chat/completions"
SETTINGS = {
    "upstream": {"connect_s": 2, "first_byte_s": 60, "idle_s": 30},
    "pools": {"interactive": {"patience_s": 20}, "batch": {"patience_s": 60}},
}
LEAVE_S = 1.0
pytestmark = [pytest.mark.engine, pytest.mark.timeout(90)]


@pytest.fixture
async def app(rig, vllm):
    """The router with this one node."""
    return await rig.router(vllm.entry(), **SETTINGS)


def said(vllm, content="Name one sea.", **fields):
    return chat(content, model=vllm.model, **{"max_tokens": 8, **fields})


def streamed(vllm, content="Name one sea.", **fields):
    return stream(content, model=vllm.model, **{"max_tokens": 8, **fields})


def endless(vllm, make=streamed):
    """Decodes until its client leaves."""
    return make(vllm, "Count.", max_tokens=vllm.context - 200, ignore_eos=True)


def usages(reply):
    return [event.json["usage"] for event in reply.events if event.data.startswith(b"{") and event.json.get("usage")]


# facts and load


async def test_probing_finds_model_context_and_cache(app, vllm):
    node = app.node("vllm")
    assert (node.facts.engine, node.models(), node.context(vllm.model)) == ("vllm", [vllm.model], vllm.context)
    assert node.budget.tokens == node.facts.tokens
    assert node.facts.tokens >= vllm.context
    assert (node.load.running, node.load.waiting, node.load.used) == (0, 0, 0.0)
    card = (await ask(app.port, path=f"/v1/models/{vllm.model}", method="GET")).json
    assert (card["max_model_len"], card["owned_by"]) == (vllm.context, "vllm")


async def test_load_follows_the_engine_and_a_strangers_call_is_foreign(app, vllm):
    node = app.node("vllm")
    ours, stranger = await Connection.open(app.port), await Connection.open(vllm.port)
    for line in (ours, stranger):
        await line.send(request(CHAT, endless(vllm)))
        await line.read_until(b"data: ")
    await eventually(lambda: node.load.running == 2, within=5)
    await eventually(lambda: node.budget.foreign.sequences == 1, within=5)
    assert app.held == 1
    for line in (ours, stranger):
        line.close()
    await eventually(lambda: node.load.running == 0 and node.budget.foreign.sequences == 0, within=5)


# protocols


async def test_chat_unstreamed(app, vllm):
    reply = await ask(app.port, said(vllm))
    assert (reply.status, reply.json["object"], reply.json["model"]) == (200, "chat.completion", vllm.model)
    assert reply.json["usage"]["completion_tokens"] <= 8
    assert reply.header("x-ebbtide-node") == "vllm"


@pytest.mark.parametrize("include_usage", [None, False, True])
async def test_chat_streamed_with_usage_only_for_who_asked(app, vllm, include_usage):
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    reply = await ask(app.port, streamed(vllm, **options))
    assert (reply.status, reply.clean, reply.data[-1]) == (200, True, b"[DONE]")
    assert len(usages(reply)) == bool(include_usage)
    assert all(event.json["choices"] for event in reply.events[:-1] if "usage" not in event.json)
    metrics = await app.metrics()
    assert metrics.get('ebbtide_output_tokens_total{workload="interactive"}', 0) == (0 if include_usage is False else 8)


@pytest.mark.parametrize("prompt", ["The tide", ["The tide", "The moon"], [5, 6, 7], [[5, 6], [7]]])
async def test_completions_take_every_shape_of_prompt(app, vllm, prompt):
    body = {"model": vllm.model, "prompt": prompt, "max_tokens": 3}
    choices = (await ask(app.port, body, "/v1/completions")).json["choices"]
    several = isinstance(prompt, list) and not isinstance(prompt[0], int)
    assert [choice["index"] for choice in choices] == list(range(len(prompt) if several else 1))


async def test_tokens_at_the_root_and_under_v1(app, vllm):
    for base in ("", "/v1"):
        found = (await ask(app.port, {"model": vllm.model, "prompt": "The tide"}, f"{base}/tokenize")).json
        assert found["max_model_len"] == vllm.context
        assert found["count"] == len(found["tokens"])
        body = {"model": vllm.model, "tokens": found["tokens"]}
        assert "tide" in (await ask(app.port, body, f"{base}/detokenize")).json["prompt"]


async def test_messages_streamed_and_not(app, vllm):
    body = {"model": vllm.model, "max_tokens": 8, "messages": [{"role": "user", "content": "hi"}]}
    whole = await ask(app.port, body, "/v1/messages")
    assert (whole.status, whole.json["type"], whole.json["role"]) == (200, "message", "assistant")
    counted = await ask(app.port, body, "/v1/messages/count_tokens")
    assert counted.json["input_tokens"] == whole.json["usage"]["input_tokens"]
    reply = await ask(app.port, body | {"stream": True}, "/v1/messages")
    kinds = [event.json["type"] for event in reply.events if event.data.startswith(b"{")]
    assert (reply.clean, kinds[0], kinds[-1]) == (True, "message_start", "message_stop")
    refused = await ask(app.port, body | {"model": "nobody"}, "/v1/messages")
    assert (refused.status, refused.json["type"], refused.json["error"]["type"]) == (404, "error", "not_found_error")


async def test_responses_streamed_and_not(app, vllm):
    body = {"model": vllm.model, "input": "hi", "max_output_tokens": 8, "store": False}
    whole = await ask(app.port, body, "/v1/responses")
    assert (whole.status, whole.json["object"]) == (200, "response")
    reply = await ask(app.port, body | {"stream": True}, "/v1/responses")
    events = [event.json for event in reply.events if event.data.startswith(b"{")]
    assert (reply.clean, events[0]["type"]) == (True, "response.created")
    assert events[-1]["type"] in ("response.completed", "response.incomplete")
    assert [event["sequence_number"] for event in events] == list(range(len(events)))


@pytest.mark.parametrize("tier", ["fast", "ultrafast", "priority", "flex"])
async def test_every_tier_is_taken_on_responses(app, vllm, tier):
    body = {"model": vllm.model, "input": "hi", "max_output_tokens": 4, "service_tier": tier}
    reply = await ask(app.port, body, "/v1/responses")
    assert reply.status == 200, reply.body
    assert reply.header("x-ebbtide-workload") == ("batch" if tier == "flex" else "interactive")
    assert reply.header("x-ebbtide-reason") == "tier"


async def test_unknown_keys_and_priority_pass(app, vllm):
    """C8. vLLM takes what it does not know, and a priority under its default policy is ignored."""
    reply = await ask(app.port, said(vllm, priority=5, foo={"bar": [1, None]}))
    direct = await ask(vllm.port, said(vllm, priority=5, foo={"bar": [1, None]}))
    assert (reply.status, direct.status) == (200, 200)
    ids = await ask(app.port, said(vllm, return_token_ids=True, max_tokens=2))
    assert len(ids.json["choices"][0]["token_ids"]) == 2


@pytest.mark.parametrize("form", ["float", "base64"])
async def test_embeddings_come_in_the_form_asked_for_or_are_refused_in_one_shape(app, vllm, form):
    """C18, as far as the model has them."""
    body = {"model": vllm.model, "input": "The tide", "encoding_format": form}
    reply = await ask(app.port, body, "/v1/embeddings")
    if reply.status != 200:
        assert set(reply.error) == {"message", "type", "param", "code"}
        assert reply.error["code"] is None or isinstance(reply.error["code"], str)
        assert reply.status in (400, 404, 501)
        assert not app.node("vllm").faults
        return
    value = reply.json["data"][0]["embedding"]
    numbers = value if form == "float" else [number for (number,) in struct.iter_unpack("<f", b64decode(value))]
    assert all(isinstance(number, float) for number in numbers)


# errors


@pytest.mark.parametrize("make", [said, streamed])
async def test_vllms_own_400_is_a_400_for_streams_too(app, vllm, make):
    """C39, C46, C55."""
    reply = await ask(app.port, make(vllm, temperature=-3))
    assert (reply.status, reply.header("content-type")) == (400, "application/json")
    assert set(reply.error) == {"message", "type", "param", "code"}
    assert reply.error["code"] is None or isinstance(reply.error["code"], str)
    assert reply.error["type"] == "invalid_request_error"
    assert not app.node("vllm").faults


@pytest.mark.parametrize("make", [said, streamed])
async def test_a_prompt_too_long_reads_the_same_from_vllm_and_from_us(app, vllm, make):
    """C49: the first is refused by the engine, the second before it is sent."""
    open_, sure = " calm" * int(vllm.context * 1.2), " calm" * int(vllm.context * 2.5)
    for content, node in ((open_, "vllm"), (sure, None)):
        reply = await ask(app.port, make(vllm, content))
        assert (reply.status, reply.header("x-ebbtide-node")) == (400, node)
        assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")
        assert reply.error["message"].startswith(f"This model's maximum context length is {vllm.context} tokens")
    assert not app.node("vllm").faults


# counts


async def test_counts_of_long_prompts_are_learnt_from_vllms_own_usage(app, vllm):
    """The same count is made of every prompt of over 8 KiB; a tokenizer of another make shows in the ratio."""
    estimate = app.inside.estimates.of(vllm.model)
    text = "The harbour master writes down wind, water and boats. " * 200
    own = (await ask(app.port, said(vllm, text, max_tokens=1))).json["usage"]["prompt_tokens"]
    for number in range(10):
        await ask(app.port, streamed(vllm, f"{text} {number}", max_tokens=1))
    counted = await app.inside.tokens.count(_body(said(vllm, text)), decide_at=1)
    assert abs(estimate.prompt(counted) - own) / own < 0.1
    assert own <= estimate.upper(counted) * 1.01


def _body(fields):
    from router.core.body import read_body
    from router.core.call import ENDPOINTS

    return read_body(ENDPOINTS["chat/completions"], json.dumps(fields).encode())


# clients that leave


@pytest.mark.parametrize("make", [streamed, said])
@pytest.mark.parametrize("leave", [Connection.close, Connection.reset])
async def test_a_client_that_leaves_stops_the_engine(app, vllm, make, leave):
    """C23, C43."""
    line = await Connection.open(app.port)
    await line.send(request(CHAT, endless(vllm, make)))
    await vllm.until_running(1, 10)
    if make is streamed:
        await line.read_until(b"data: ")
    leave(line)
    await vllm.until_running(0, LEAVE_S)
    assert app.held == 0
    assert not app.node("vllm").faults


async def test_a_client_that_leaves_inside_a_long_prompt_stops_the_engine(app, vllm):
    each = len((await ask(vllm.port, {"model": vllm.model, "prompt": " calm" * 100}, "/tokenize")).json["tokens"]) / 100
    line = await Connection.open(app.port)
    await line.send(request(CHAT, streamed(vllm, "Left" + " calm" * int(0.7 * vllm.context / each))))
    await vllm.until_running(1, 10)
    line.close()
    await vllm.until_running(0, LEAVE_S)
    await eventually(lambda: app.held == 0)


async def test_a_queued_client_that_leaves_never_reaches_the_engine(rig, vllm):
    """C22."""
    app = await rig.router(vllm.entry(max_sequences=1), **SETTINGS)
    running, queued = await Connection.open(app.port), await Connection.open(app.port)
    await running.send(request(CHAT, endless(vllm)))
    await running.read_until(b"data: ")
    await queued.send(request(CHAT, said(vllm)))
    await eventually(lambda: app.waiting == 1)
    queued.close()
    await eventually(lambda: app.waiting == 0, within=LEAVE_S)
    assert await vllm.running() == 1
    running.close()
    await vllm.until_running(0, LEAVE_S)
    legs = [value for key, value in (await app.metrics()).items() if key.startswith("ebbtide_legs_total{")]
    assert legs == [1]


async def test_a_document_waits_beside_the_queue_of_the_engine_and_is_served(rig, vllm):
    app = await rig.router(vllm.entry(max_sequences=1), classify={"long_prompt_tokens": 1000}, **SETTINGS)
    chatting = await Connection.open(app.port)
    await chatting.send(request(CHAT, endless(vllm)))
    await chatting.read_until(b"data: ")
    document = asyncio.create_task(ask(app.port, streamed(vllm, "Log" + " calm" * 2000)))
    await eventually(lambda: app.waiting == 1)
    chatting.close()
    reply = await document
    assert (reply.status, reply.data[-1]) == (200, b"[DONE]")
    assert (reply.header("x-ebbtide-workload"), reply.header("x-ebbtide-reason")) == ("batch", "size")


async def test_many_calls_on_few_connections(app, vllm):
    """vLLM closes idle connections after 5 s; ours do not meet that, nor anything else."""
    replies = await asyncio.gather(
        *(ask(app.port, (streamed if n % 2 else said)(vllm, f"Say {n}.")) for n in range(60))
    )
    assert {reply.status for reply in replies} == {200}
    assert all(reply.clean for reply in replies)
    assert not app.node("vllm").faults


# batches


async def test_forty_lines_are_done_beside_chat_and_read_by_the_sdk(vllm, tmp_path):
    batch = await beside_chat([vllm.entry()], vllm.model, tmp_path, SETTINGS)
    assert batch.model == vllm.model
