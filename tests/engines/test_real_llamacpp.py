"""The router in front of a real llama.cpp: what it finds out, what it serves, and what becomes of slots.

The router hangs up on the server within a second of its client's leaving. What the server makes of it is its own
affair: a stream stops with the next token, or, since it tells its progress, with the second step of its prompt (128
tokens on one thread: up to two seconds on a busy machine); for what is not streamed it looks once it had nothing to
tell anybody for a second.
"""

import asyncio
import os
import signal

import pytest

from router.tools.child import Child
from tests.engines.conftest import Llamas
from tests.engines.live import LLAMA_MODEL, SELDOM_S, Llama
from tests.engines.nightly import beside_chat
from tests.rig import Connection, ask, chat, eventually, request, stream
from tests.rig.routers import free_port

CHAT = "/v1/chat/completions"
SLOW = {
    "server": {"heartbeat_s": 300},
    "probe": {"every_s": 2, "timeout_s": 5},
    "upstream": {"connect_s": 2, "first_byte_s": 60, "idle_s": 30},
    "classify": {"long_prompt_tokens": 300},
    "pools": {"interactive": {"patience_s": 20}, "batch": {"patience_s": 60}},
}
LEAVE_S = 1.0
UNBEGUN_S = 6.0
pytestmark = pytest.mark.timeout(60)


def words(tokens: int, first: str = "Log") -> str:
    """So many tokens as the router counts them; documents with different `first` have no beginning in common."""
    return first + " calm" * tokens


async def router(rig, llamas: Llamas, **settings):
    """Both nodes in both pools: only contexts tell them apart."""
    return await rig.router(llamas.chat.entry(), llamas.long.entry(), **{**SLOW, **settings})


async def alone(rig, llama: Llama, **settings):
    """One node."""
    return await rig.router(llama.entry(), **{**SLOW, **settings})


def said(content: str = "Name one sea.", tokens: int = 8, **fields):
    return chat(content, model=LLAMA_MODEL, max_tokens=tokens, **fields)


def streamed(content: str = "Name one sea.", tokens: int = 8, **fields):
    return stream(content, model=LLAMA_MODEL, max_tokens=tokens, **fields)


def endless(content: str = "Count from one upwards."):
    """Decodes until its client leaves or the context is full."""
    return streamed(content, 1500, ignore_eos=True)


async def begun(port: int, body) -> Connection:
    """A client that has its first piece of the answer's body."""
    line = await Connection.open(port)
    await line.send(request(CHAT, body))
    await line.read_until(b"data: ")
    return line


# what it finds out


async def test_probing_finds_models_context_slots_and_cache(rig, llamas):
    app = await router(rig, llamas)
    for llama in llamas:
        node = app.node(llama.name)
        assert node.facts.engine == "llamacpp"
        assert node.models() == [LLAMA_MODEL]
        assert node.context(LLAMA_MODEL) == llama.context
        assert (node.budget.sequences, node.budget.tokens) == (llama.slots, llama.slots * llama.context)
        assert (node.load.running, node.load.waiting) == (0, 0)
    listed = (await ask(app.port, path="/v1/models", method="GET")).json["data"]
    assert [(card["id"], card["max_model_len"]) for card in listed] == [(LLAMA_MODEL, 1024)]


async def test_a_strangers_call_is_seen_as_load(rig, llamas):
    app = await alone(rig, llamas.long, probe={"every_s": 0.2})
    async with await begun(llamas.long.port, endless()):
        await eventually(lambda: app.node("long").load.running == 1, within=5)
        await eventually(lambda: app.node("long").budget.foreign.sequences == 1, within=5)
        assert app.held == 0
    await llamas.long.until_busy(0, LEAVE_S)
    await eventually(lambda: app.node("long").budget.foreign.sequences == 0, within=5)


# what it serves


async def test_chat_unstreamed(rig, llamas):
    app = await router(rig, llamas)
    reply = await ask(app.port, said())
    assert reply.status == 200
    assert (reply.header("content-type") or "").startswith("application/json")
    assert reply.json["object"] == "chat.completion"
    assert reply.json["choices"][0]["message"]["content"]
    assert reply.json["usage"]["completion_tokens"] <= 8
    assert reply.header("x-ebbtide-workload") == "interactive"


@pytest.mark.parametrize("include_usage", [None, False, True])
async def test_chat_streamed_with_usage_only_for_who_asked(rig, llamas, include_usage):
    app = await router(rig, llamas)
    options = {} if include_usage is None else {"stream_options": {"include_usage": include_usage}}
    reply = await ask(app.port, streamed(**options))
    assert (reply.status, reply.clean, reply.data[-1]) == (200, True, b"[DONE]")
    assert reply.text
    counted = [event.json for event in reply.events if b'"usage":{' in event.data]
    assert [chunk["choices"] for chunk in counted] == ([[]] if include_usage else [])


async def test_usage_is_accounted_and_learnt_from(rig, llamas):
    app = await router(rig, llamas)
    first = await ask(app.port, said(words(60)))
    second = await ask(app.port, streamed(words(80), stream_options={"include_usage": True}))
    usages = [first.json["usage"], next(event.json["usage"] for event in second.events if b'"usage":{' in event.data)]
    await ask(app.port, streamed(words(40, "Diary")))
    estimate = app.inside.estimates.of(LLAMA_MODEL)
    assert estimate.ratio != 1.0
    metrics = await app.metrics()
    told = metrics['ebbtide_prompt_tokens_total{workload="interactive"}']
    assert told > sum(usage["prompt_tokens"] for usage in usages)


async def test_completions_and_tokens(rig, llamas):
    app = await router(rig, llamas)
    body = {"model": LLAMA_MODEL, "prompt": "The tide", "max_tokens": 4}
    reply = await ask(app.port, body, "/v1/completions")
    assert reply.json["object"] == "text_completion"
    assert reply.json["choices"][0]["text"]
    tokens = (await ask(app.port, {"model": LLAMA_MODEL, "content": "The tide"}, "/tokenize")).json["tokens"]
    assert len(tokens) == 2
    assert (await ask(app.port, {"model": LLAMA_MODEL, "tokens": tokens}, "/detokenize")).json["content"] == "The tide"


async def test_what_this_server_was_not_started_for_is_refused_as_openai_would(rig, llamas):
    app = await router(rig, llamas)
    reply = await ask(app.port, {"model": LLAMA_MODEL, "input": "The tide"}, "/v1/embeddings")
    assert reply.status == 501
    assert (reply.error["code"], reply.header("x-should-retry")) == ("unsupported_endpoint", "false")
    assert all(str(node.state) == "ready" and not node.faults for node in app.nodes)


async def test_a_prompt_longer_than_every_node_is_refused_before_it_is_sent(rig, llamas):
    app = await router(rig, llamas)
    reply = await ask(app.port, said(words(2400)))
    assert reply.status == 400
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")
    assert reply.error["message"].startswith("This model's maximum context length is 1024 tokens")
    assert reply.header("x-ebbtide-node") is None


@pytest.mark.parametrize("make", [said, streamed])
async def test_the_servers_own_refusal_of_a_long_prompt_reads_the_same(rig, llamas, make):
    """The estimate leaves it open, so the longest node is asked, and says no itself."""
    app = await router(rig, llamas)
    reply = await ask(app.port, make(words(1500)))
    assert (reply.status, reply.header("x-ebbtide-node")) == (400, "long")
    assert (reply.error["code"], reply.error["param"]) == ("context_length_exceeded", "messages")
    assert reply.error["message"].startswith("This model's maximum context length is 1024 tokens")
    assert (reply.error["type"], app.node("long").faults) == ("invalid_request_error", 0)


async def test_thirty_calls_in_a_row_never_meet_the_connection_it_closes(rig, llamas):
    """It closes a kept-alive connection soon after an answer; a call that met that would be a 503."""
    app = await router(rig, llamas)
    async with await Connection.open(app.port) as line:
        for number in range(30):
            await line.send(request(CHAT, (streamed if number % 3 else said)(f"Say {number}.", 2)))
            reply = await line.reply()
            assert (reply.status, reply.clean) == (200, True), (number, reply.body)
    assert all(not node.faults for node in app.nodes)
    metrics = await app.metrics()
    assert metrics['ebbtide_calls_total{endpoint="chat/completions",outcome="completed",workload="interactive"}'] == 30


# what becomes of slots


@pytest.mark.parametrize("make", [streamed, said])
async def test_a_client_that_leaves_while_tokens_come_frees_its_slot(rig, llamas, make):
    app = await alone(rig, llamas.long)
    line = await Connection.open(app.port)
    await line.send(request(CHAT, make("Count from one upwards.", 1500, ignore_eos=True)))
    await llamas.long.until_busy(1, 5)
    if make is streamed:
        await line.read_until(b"data: ")
    line.close()
    await eventually(lambda: app.held == 0 and app.inside.pools["long"].open == 0, within=LEAVE_S)
    if make is streamed:
        await llamas.long.until_busy(0, LEAVE_S)
    else:
        await asyncio.sleep(SELDOM_S)
        await llamas.long.until_busy(0, UNBEGUN_S, every=SELDOM_S)
    assert app.node("long").faults == 0


async def test_a_client_that_leaves_inside_its_prompt_frees_its_slot_before_the_prompt_is_done(rig, llamas):
    app = await alone(rig, llamas.long, probe={"every_s": 5})
    line = await Connection.open(app.port)
    await line.send(request(CHAT, streamed(words(800, "Left"))))
    await llamas.long.until_busy(1, 5)
    done = await llamas.long.prompts()
    line.close()
    await eventually(lambda: app.held == 0 and app.inside.pools["long"].open == 0, within=LEAVE_S)
    await llamas.long.until_busy(0, UNBEGUN_S)
    assert await llamas.long.prompts() - done < 800


async def test_a_long_document_is_batch_waits_for_the_slot_and_is_served(rig, llamas):
    app = await alone(rig, llamas.long)
    chatting = await begun(app.port, endless())
    document = asyncio.create_task(ask(app.port, streamed(words(330, "Quay"))))
    await eventually(lambda: app.waiting == 1, within=5)
    assert await llamas.long.busy() == 1
    chatting.close()
    reply = await document
    assert (reply.status, reply.clean, reply.data[-1]) == (200, True, b"[DONE]")
    assert (reply.header("x-ebbtide-workload"), reply.header("x-ebbtide-reason")) == ("batch", "size")
    assert int(reply.header("x-ebbtide-queue-ms") or 0) > 0


async def test_a_waiting_document_whose_client_leaves_never_reaches_the_slot(rig, llamas):
    app = await alone(rig, llamas.long)
    chatting = await begun(app.port, endless())
    waiting = await Connection.open(app.port)
    await waiting.send(request(CHAT, said(words(330, "Unread"))))
    await eventually(lambda: app.waiting == 1, within=5)
    waiting.close()
    await eventually(lambda: app.waiting == 0, within=LEAVE_S)
    chatting.close()
    await llamas.long.until_busy(0, LEAVE_S)
    metrics = await app.metrics()
    legs = [value for key, value in metrics.items() if key.startswith("ebbtide_legs_total{")]
    assert legs == [1]


async def test_contexts_and_pools_place_chat_and_document(rig, llamas):
    app = await rig.router(
        llamas.chat.entry(pools=["interactive"]), llamas.long.entry(pools=["interactive", "batch"]), **SLOW
    )
    interactive = (("X-Ebbtide-Workload", "interactive"),)
    document = asyncio.create_task(ask(app.port, streamed(words(280, "Placed"), 4), headers=interactive))
    await eventually(lambda: app.node("long").budget.held().sequences == 1, within=5)
    quick = [await ask(app.port, said(f"Say {number}.", 2)) for number in range(3)]
    assert [reply.header("x-ebbtide-node") for reply in quick] == ["chat"] * 3
    reply = await document
    assert (reply.status, reply.header("x-ebbtide-node")) == (200, "long")
    assert (reply.header("x-ebbtide-workload"), reply.header("x-ebbtide-reason")) == ("interactive", "header")


@pytest.mark.timeout(240)
async def test_forty_lines_are_done_beside_chat_and_read_by_the_sdk(llamas, tmp_path):
    batch = await beside_chat([llama.entry() for llama in llamas], LLAMA_MODEL, tmp_path, SLOW)
    assert batch.model == LLAMA_MODEL


async def test_a_server_killed_inside_a_stream_is_told_and_seen_when_it_comes_back(rig, weights, tmp_path):
    llama = Llama("mortal", free_port(), slots=1, context=256)
    with Child("mortal", tmp_path / "mortal.log") as child:
        child.start("router.tools.llama", llama.arguments(weights))
        await asyncio.to_thread(child.wait_ready, f"{llama.url}/health", 30)
        app = await alone(rig, llama, pools={"interactive": {"patience_s": 0.5}}, probe={"every_s": 0.2})
        async with await Connection.open(app.port) as line:
            await line.send(request(CHAT, endless()))
            killed = False
            async for reply in line.watch():
                if not killed and reply.text:
                    os.kill(child.pid or 0, signal.SIGKILL)
                    killed = True
        assert (reply.clean, reply.data[-1]) == (True, b"[DONE]")
        assert reply.events[-2].json["error"]["code"] == "upstream_error"
        refused = await ask(app.port, said())
        assert (refused.status, refused.error["code"]) == (502, "upstream_unavailable")
        await eventually(lambda: str(app.node("mortal").state) == "down", within=10)
        child.end()
        child.start("router.tools.llama", llama.arguments(weights))
        await eventually(lambda: app.node("mortal").usable(app.inside.clock()), within=30)
        await eventually(lambda: str(app.node("mortal").state) in ("probation", "ready"), within=10)
        assert (await ask(app.port, said())).status == 200
        assert str(app.node("mortal").state) == "ready"


# what it shares


async def test_a_document_that_is_read_makes_way_for_a_chat(rig, llamas):
    app = await alone(rig, llamas.long)
    document = asyncio.create_task(ask(app.port, said(words(400), 4)))
    await eventually(lambda: app.node("long").budget.batch)
    reply = await ask(app.port, streamed(tokens=4))
    assert (reply.status, reply.header("x-ebbtide-workload")) == (200, "interactive")
    assert not document.done()
    answer = await asyncio.wait_for(document, 50)
    assert (answer.status, answer.header("x-ebbtide-workload")) == (200, "batch")
    assert answer.json["choices"][0]["message"]["content"]
    assert (await app.metrics())['ebbtide_take_backs_total{mode="enforce",node="long",phase="prefill"}'] == 1
