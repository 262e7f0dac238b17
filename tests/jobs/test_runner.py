"""Lines run end to end: a real store, the real corridor, fake nodes on real sockets."""

import asyncio
import json

import pytest

from router.core.call import Workload
from router.core.job import BatchState
from router.jobs.runner import Terms
from tests.fakes import Script
from tests.jobs.desk import line, room
from tests.rig import ask, chat, eventually


async def test_every_line_is_answered_once_with_the_unstreamed_body(rig, tmp_path):
    node = await rig.node(slots=4)
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit(line(number) for number in range(20))
        results = await jobs.drained(batch)
    row = results.batch
    assert (row.state, row.total, row.completed, row.failed) == (BatchState.COMPLETED, 20, 20, 0)
    assert results.ids == {f"r{number}" for number in range(20)}
    one = results.output["r7"]
    assert one["id"].startswith("batch_req_")
    assert one["error"] is None
    assert one["response"]["status_code"] == 200
    body = results.body(7)
    assert body["object"] == "chat.completion"
    assert body["choices"][0]["message"]["content"] == "tok0 tok1 tok2"
    assert body["usage"]["completion_tokens"] == 3
    assert (row.tokens.output, row.model) == (60, "tiny")
    sent = node.seen[0].json
    assert sent["stream"] is True
    assert sent["stream_options"] == {"include_usage": True}


async def test_a_line_that_says_stream_false_is_streamed_upstream_all_the_same(rig, tmp_path):
    node = await rig.node()
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit([line(1, stream=False, stream_options=None)])
        results = await jobs.drained(batch)
    assert results.body(1)["object"] == "chat.completion"
    assert node.seen[0].body.count(b'"stream"') == 1


@pytest.mark.parametrize(
    ("url", "body", "kind"),
    [
        ("/v1/completions", {"prompt": ["a", "b"], "max_tokens": 2}, "text_completion"),
        ("/v1/embeddings", {"input": "hello"}, "list"),
        ("/v1/responses", {"input": "hello"}, "response"),
    ],
)
async def test_the_other_endpoints(rig, tmp_path, url, body, kind):
    await rig.node()
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        results = await jobs.drained(await jobs.submit([line(1, url=url, **body)], endpoint=url))
    assert results.body(1)["object"] == kind
    assert results.batch.tokens.input > 0


async def test_what_an_engine_does_not_stream_goes_unstreamed(rig, tmp_path):
    node = await rig.node()
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        results = await jobs.drained(await jobs.submit([line(1, prompt_logprobs=1)]))
    assert results.body(1)["object"] == "chat.completion"
    assert "stream" not in node.seen[0].json


async def test_a_node_that_cannot_stream_is_asked_again_unstreamed(rig, tmp_path):
    def judge(seen):
        return Script(status=400, message="stream is not supported") if seen.json.get("stream") else None

    node = await rig.node()
    node.on_request = judge
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        results = await jobs.drained(await jobs.submit([line(1)]))
    assert results.body(1)["object"] == "chat.completion"
    assert node.accepted == 2


async def test_a_lines_own_error_fails_it_alone_and_at_once(rig, tmp_path):
    node = await rig.node()
    node.on_request = lambda seen: (
        Script(status=422, shape="openai", message="bad line") if b"line 3" in seen.body else None
    )
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        results = await jobs.drained(await jobs.submit(line(number) for number in range(6)))
    assert (results.batch.state, results.batch.completed, results.batch.failed) == (BatchState.COMPLETED, 5, 1)
    failed = results.errors["r3"]
    assert failed["error"] is None
    assert failed["response"]["status_code"] == 422
    assert failed["response"]["body"]["error"]["message"] == "bad line"
    assert node.accepted == 6


async def test_a_prompt_that_no_context_holds_fails_with_openais_words(rig, tmp_path):
    await rig.node(context=64)
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        long = line(1, messages=[{"role": "user", "content": "many words " * 400}])
        results = await jobs.drained(await jobs.submit([long, line(2)]))
    error = results.errors["r1"]["response"]
    assert (error["status_code"], error["body"]["error"]["code"]) == (400, "context_length_exceeded")
    assert results.output.keys() == {"r2"}


async def test_refusals_of_nodes_are_never_a_lines_end(rig, tmp_path):
    node = await rig.node(script=Script(status=429))
    app = await rig.router()
    async with room(app, tmp_path, terms=Terms(retries=1)) as jobs:
        batch = await jobs.submit(line(number) for number in range(4))
        await eventually(lambda: node.accepted >= 2, within=5)
        node.script = Script(status=503)
        before = node.accepted
        await eventually(lambda: node.accepted >= before + 1, within=5)
        node.script = Script()
        results = await jobs.drained(batch)
    assert (results.batch.completed, results.batch.failed) == (4, 0)


async def test_a_fault_costs_an_attempt_and_the_last_one_ends_the_line(rig, tmp_path):
    node = await rig.node()
    node.on_request = lambda seen: Script(status=500, message="boom") if b"line 1" in seen.body else None
    app = await rig.router(upstream={"retries": 0})
    async with room(app, tmp_path, terms=Terms(retries=2)) as jobs:
        results = await jobs.drained(await jobs.submit([line(0), line(1), line(2)]))
    assert results.output.keys() == {"r0", "r2"}
    failed = results.errors["r1"]["response"]
    assert (failed["status_code"], failed["body"]["error"]["message"]) == (500, "boom")
    assert sum(b"line 1" in body for body in node.bodies) == 2


@pytest.mark.parametrize("script", [Script(cut=1), Script(cut_clean=2), Script(eof_chunked=1), Script(errframe=1)])
async def test_an_answer_that_breaks_off_is_asked_for_again(rig, tmp_path, script):
    node = await rig.node()
    node.upcoming = [script]
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        results = await jobs.drained(await jobs.submit([line(1)]))
        assert jobs.runner.ended["charged"] == 1
    assert results.body(1)["choices"][0]["message"]["content"] == "tok0 tok1 tok2"
    assert node.accepted == 2


async def test_with_all_nodes_away_lines_wait_and_nothing_is_charged(rig, tmp_path):
    node = await rig.node()
    app = await rig.router()
    async with room(app, tmp_path, terms=Terms(retries=1)) as jobs:
        await node.down()
        batch = await jobs.submit(line(number) for number in range(5))
        await jobs.until(batch, BatchState.IN_PROGRESS, within=5)
        await eventually(lambda: jobs.reasons.all().get(batch.id), within=5)
        await asyncio.sleep(1)
        row = await jobs.look(batch)
        assert (row.state, row.failed) == (BatchState.IN_PROGRESS, 0)
        assert row.waiting
        assert jobs.reasons.of(row)
        await node.up()
        results = await jobs.drained(batch, within=5)
    assert results.batch.completed == 5
    assert jobs.reasons.of(results.batch) is None


async def test_a_model_nobody_serves_holds_back_no_other(rig, tmp_path):
    node = await rig.node()
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        waiting = await jobs.submit([line(1, model="missing")])
        results = await jobs.drained(await jobs.submit([line(1)]))
        assert results.batch.completed == 1
        row = await jobs.look(waiting)
        assert row.state is BatchState.IN_PROGRESS
        assert jobs.reasons.of(row) == "No node serves the model 'missing' now."
        node.models.append("missing")
        assert (await jobs.drained(waiting)).batch.completed == 1


async def test_nodes_are_fed_to_their_room_and_no_more(rig, tmp_path):
    node = await rig.node(script=Script(ttft=0.05), slots=64)
    entry = {"name": node.name, "url": node.url, "engine": "vllm", "max_sequences": 8, "pools": ["batch"]}
    app = await rig.router(entry)
    most = 0

    def watch(seen):
        nonlocal most
        most = max(most, node.inflight)

    node.on_request = watch
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit(line(number) for number in range(60))
        await jobs.until(batch, BatchState.IN_PROGRESS)
        await eventually(lambda: node.inflight == 8)
        assert node.waiting == 0
        await jobs.drained(batch)
    assert most == 8


async def test_cancelling_aborts_what_runs(rig, tmp_path):
    node = await rig.node(script=Script(ttft=300), slots=10)
    app = await rig.router()
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit(line(number) for number in range(10))
        await eventually(lambda: node.inflight >= 7, within=5)
        await jobs.store.cancel_batch(batch.caller, batch.id)
        await eventually(lambda: len(node.aborted) == node.accepted, within=2)
        results = await jobs.drained(batch, within=5)
    assert results.batch.state is BatchState.CANCELLED
    assert {one["error"]["code"] for one in results.errors.values()} == {"batch_cancelled"}
    assert len(results.ids) == 10
    assert node.inflight == 0


async def test_stopping_puts_back_what_runs_and_the_next_router_goes_on(rig, tmp_path):
    node = await rig.node(script=Script(ttft=300), slots=4)
    app = await rig.router()
    async with room(app, tmp_path, router="first") as jobs:
        batch = await jobs.submit(line(number) for number in range(6))
        await eventually(lambda: node.inflight >= 3, within=5)
    await eventually(lambda: node.inflight == 0)
    node.script = Script()
    async with room(app, tmp_path, router="second", terms=Terms(retries=1)) as jobs:
        results = await jobs.drained(batch, within=5)
    assert (results.batch.completed, results.batch.failed) == (6, 0)


async def test_chat_goes_on_beside_it(rig, tmp_path):
    node = await rig.node(script=Script(gap=0.01), slots=8)
    app = await rig.router(upstream={"connect_s": 5, "first_byte_s": 10, "idle_s": 10})
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit(line(number) for number in range(40))
        await eventually(lambda: node.inflight >= 4, within=5)
        replies = await asyncio.gather(*(ask(app.port, chat()) for _ in range(10)))
        assert {reply.status for reply in replies} == {200}
        await jobs.drained(batch)
    assert json.loads(replies[0].body)["choices"]


async def test_lines_have_their_turn_among_batch_calls_of_people_who_never_stop_asking(rig, tmp_path):
    node = await rig.node(script=Script(ttft=0.02), slots=2)
    app = await rig.router({"name": node.name, "url": node.url, "engine": "vllm", "max_sequences": 2})

    async def again():
        while True:
            assert (await ask(app.port, chat(), headers=(("X-Ebbtide-Workload", "batch"),))).status == 200

    people = [asyncio.create_task(again()) for _ in range(24)]
    await eventually(lambda: app.inside.dispatcher.admission.waiting(Workload.BATCH) > 10)
    async with room(app, tmp_path) as jobs:
        results = await jobs.drained(await jobs.submit(line(number) for number in range(20)), within=20)
        assert not [task for task in people if task.done()]
    for task in people:
        task.cancel()
    await asyncio.wait(people)
    assert len(results.output) == 20
