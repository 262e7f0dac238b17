"""What engines are told beside the connection: a priority for batch, and at SGLang that a call is over."""

import asyncio

import pytest

from tests.fakes import Script
from tests.rig import ask, chat, eventually, stream

LONG = "word " * 2000
BATCH = (("X-Ebbtide-Workload", "batch"),)
CHOICE = b'{"finish_reason":null,"index":0,"delta":{"role":"assistant","content":null}}'
PROGRESS = tuple(
    b'data: {"choices":[%b],"prompt_progress":{"total":300,"cache":0,"processed":%d,"time_ms":9}}\n\n' % (CHOICE, read)
    for read in (128, 256, 300)
)


@pytest.mark.parametrize(("dialect", "priority"), [("vllm", 10), ("sglang", -10), ("llamacpp", None)])
async def test_batch_is_put_behind_in_the_engines_own_queue(rig, dialect, priority):
    node = await rig.node(dialect=dialect)
    app = await rig.router()
    assert (await ask(app.port, chat(), headers=BATCH)).status == 200
    assert (await ask(app.port, chat(priority=3), headers=BATCH)).status == 200
    assert (await ask(app.port, chat())).status == 200
    batch, own, people = (seen.json for seen in node.seen)
    assert batch.get("priority") == priority
    assert own["priority"] == 3, "a caller's own stays"
    assert "priority" not in people


@pytest.mark.parametrize(("dialect", "asks"), [("vllm", None), ("sglang", None), ("llamacpp", True)])
async def test_a_llamacpp_tells_how_much_of_a_prompt_it_read_and_the_caller_does_not_hear_it(rig, dialect, asks):
    node = await rig.node(dialect=dialect)
    node.on_request = lambda seen: Script(prelude=PROGRESS if b'"return_progress"' in seen.body else ())
    app = await rig.router()
    for headers in (BATCH, ()):
        told = await ask(app.port, stream(), headers=headers)
        assert told.text == "tok0 tok1 tok2 tok3 tok4"
        assert not any(b"prompt_progress" in event for event in told.data)
        assert node.seen[-1].json.get("return_progress") is asks
    assert (await ask(app.port, chat(), headers=BATCH)).status == 200
    assert "return_progress" not in node.seen[-1].json, "not streamed"


async def test_a_caller_who_asks_for_progress_itself_hears_it(rig):
    node = await rig.node(dialect="llamacpp", script=Script(prelude=PROGRESS))
    app = await rig.router()
    told = await ask(app.port, stream(return_progress=True), headers=BATCH)
    assert [event for event in told.data if b"prompt_progress" in event] == [event[6:-2] for event in PROGRESS]
    assert node.seen[0].body.count(b"return_progress") == 1


async def test_an_engine_that_refuses_priorities_is_asked_again_without_and_never_with_one_again(rig):
    node = await rig.node()
    refusal = Script(status=400, shape="openai", message="Got priority 10 but Priority scheduling is not enabled.")
    node.on_request = lambda seen: refusal if b'"priority"' in seen.body else None
    app = await rig.router()
    for _ in range(3):
        assert (await ask(app.port, chat(), headers=BATCH)).status == 200
    assert ["priority" in seen.json for seen in node.seen] == [True, False, False, False]
    assert app.node("n1").faults == 0


async def test_another_mistake_is_the_callers(rig):
    node = await rig.node(script=Script(status=400, shape="openai", message="temperature is too high"))
    app = await rig.router()
    reply = await ask(app.port, chat(), headers=BATCH)
    assert (reply.status, reply.error["message"], len(node.seen)) == (400, "temperature is too high", 1)


async def test_sglang_is_told_which_call_is_over(rig):
    node = await rig.node(dialect="sglang")
    node.on_request = lambda seen: Script(ttft=30.0) if len(seen.body) > 5000 and not node.aborted else Script(n=3)
    app = await rig.router()
    asked = asyncio.create_task(ask(app.port, chat(LONG), headers=BATCH))
    await eventually(lambda: node.seen)
    assert (await ask(app.port, chat())).status == 200
    told = await eventually(lambda: [seen for seen in node.probes if seen.path == "/abort_request"])
    assert told[0].json == {"rid": node.seen[0].json["rid"]}
    assert (await asked).status == 200
