"""Chat comes and batch makes way: on real sockets, with fake nodes whose prompts take as long as told."""

import asyncio
import json
from time import monotonic
from typing import Any

import pytest

from router.core.budget import Room
from router.core.call import Workload
from router.core.node import Node
from tests.fakes import FakeNode, Script
from tests.fakes.seen import Seen
from tests.jobs.desk import line, room
from tests.rig import App, ask, chat, eventually, stream
from tests.rig.client import Connection, request

LONG = "word " * 2000
BATCH = (("X-Ebbtide-Workload", "batch"),)
SLOW, QUICK = Script(ttft=30.0, n=3), Script(n=3)


def slow_until(node: FakeNode, *, freed: asyncio.Event) -> None:
    """Long prompts are read for ever until `freed`; short ones answer at once."""

    def script(seen: Seen) -> Script:
        return SLOW if len(seen.body) > 5000 and not freed.is_set() else QUICK

    node.on_request = script


def long_calls(node: FakeNode) -> list[Seen]:
    return [seen for seen in node.seen if len(seen.body) > 5000]


async def taken_back(app: App) -> float:
    return sum(value for name, value in (await app.metrics()).items() if name.startswith("ebbtide_take_backs_total"))


@pytest.fixture
def freed() -> asyncio.Event:
    return asyncio.Event()


async def test_room_taken_back_before_its_call_had_its_turn_is_not_used(rig):
    fake = await rig.node(script=Script(ttft=0.5))
    app = await rig.router()
    node, admission = app.node("n1"), app.inside.dispatcher.admission
    with node.budget.hold(Room(1, 1), Workload.INTERACTIVE, prompt_tokens=1000, now=monotonic()):
        asked = asyncio.create_task(ask(app.port, chat(LONG), headers=BATCH))
        await eventually(lambda: admission.waiting(Workload.BATCH))
    admission.serve()
    (granted,) = node.budget.batch
    admission.empty(node)
    assert granted.taken
    await eventually(lambda: fake.inflight)
    (held,) = node.budget.batch
    assert held is not granted, "what runs there is held"
    assert (await asked).status == 200
    assert fake.accepted == 1


@pytest.mark.parametrize("body", [stream(LONG), chat(LONG)])
async def test_a_long_prompt_makes_way_for_chat_and_is_answered_later(rig, freed, body):
    node = await rig.node()
    slow_until(node, freed=freed)
    app = await rig.router()
    asked = asyncio.create_task(ask(app.port, body, headers=BATCH))
    await eventually(lambda: long_calls(node))
    reply = await ask(app.port, stream())
    assert reply.status == 200
    await eventually(lambda: node.aborted)
    assert node.aborted == long_calls(node)[:1]
    freed.set()
    answer = await asyncio.wait_for(asked, 5)
    assert answer.status == 200
    assert b"tok0" in answer.body
    assert answer.body.count(b"tok0") == 1, "one answer, and nothing of an earlier one"
    assert answer.header("x-ebbtide-node") == "n1"
    assert await taken_back(app) >= 1
    assert app.node("n1").faults == 0


async def test_the_bytes_sent_again_are_the_same(rig, freed):
    node = await rig.node()
    slow_until(node, freed=freed)
    app = await rig.router()
    asked = asyncio.create_task(ask(app.port, stream(LONG), headers=BATCH))
    await eventually(lambda: long_calls(node))
    await ask(app.port, chat())
    freed.set()
    await asyncio.wait_for(asked, 5)
    first, second = long_calls(node)
    assert first.body == second.body


async def test_what_a_person_has_read_is_never_taken_back(rig):
    node = await rig.node(slots=1)
    node.on_request = lambda seen: Script(n=8, gap=0.03) if len(seen.body) > 5000 else QUICK
    app = await rig.router({"name": "n1", "url": node.url, "max_sequences": 1})
    reading = asyncio.create_task(ask(app.port, stream(LONG), headers=BATCH))
    await eventually(lambda: node.seen and node.seen[0].tokens)
    assert (await ask(app.port, chat())).status == 200, "it waited for the room"
    assert (await reading).clean
    assert not node.aborted
    assert await taken_back(app) == 0


async def test_a_client_that_leaves_while_its_call_is_taken_back_leaves_nothing(rig, freed):
    node = await rig.node()
    slow_until(node, freed=freed)
    app = await rig.router()
    chatting = Script(n=3, gap=0.3)
    async with await Connection.open(app.port) as leaver:
        await leaver.send(request("/v1/chat/completions", chat(LONG), headers=BATCH))
        await eventually(lambda: long_calls(node))
        node.on_request = lambda seen: chatting
        asked = asyncio.create_task(ask(app.port, stream()))
        await eventually(lambda: app.waiting == 1)
        leaver.reset()
        await eventually(lambda: app.waiting == 0, within=1)
    assert (await asked).status == 200
    assert len(long_calls(node)) == 1


async def test_shadow_counts_and_takes_nothing(rig, freed):
    node = await rig.node()
    slow_until(node, freed=freed)
    app = await rig.router(pools={"batch": {"mode": "shadow"}})
    async with await Connection.open(app.port) as patient:
        await patient.send(request("/v1/chat/completions", chat(LONG), headers=BATCH))
        await eventually(lambda: long_calls(node))
        assert (await ask(app.port, chat())).status == 200
        assert not node.aborted
        assert (await app.metrics())['ebbtide_take_backs_total{mode="shadow",node="n1",phase="prefill"}'] == 1


async def test_an_engine_gets_one_long_prompt_at_a_time(rig, freed):
    node = await rig.node()
    slow_until(node, freed=freed)
    app = await rig.router()
    asked = [asyncio.create_task(ask(app.port, chat(LONG), headers=BATCH)) for _ in range(3)]
    await eventually(lambda: app.waiting == 2 and len(long_calls(node)) == 1)
    waits = {name: value for name, value in (await app.metrics()).items() if "waiting_calls" in name}
    assert waits['ebbtide_waiting_calls{reason="batch_prefill",workload="batch"}'] == 2
    freed.set()
    assert (await ask(app.port, chat())).status == 200
    assert {reply.status for reply in await asyncio.gather(*asked)} == {200}


def long_line(number: int, **body: Any) -> bytes:
    return line(number, messages=[{"role": "user", "content": LONG}], **body)


async def test_lines_of_a_batch_are_taken_back_uncharged_and_each_is_answered_once(rig, tmp_path, freed):
    node = await rig.node(slots=8)
    app = await rig.router()
    slow_until(node, freed=freed)
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit(long_line(number) for number in range(4))
        for rounds in range(1, 4):
            await eventually(lambda count=rounds: len(long_calls(node)) == count, within=5)
            assert (await ask(app.port, chat())).status == 200
            await eventually(lambda count=rounds: len(node.aborted) == count, within=5)
        freed.set()
        results = await jobs.drained(batch)
        assert jobs.runner.ended["charged"] == 0
        assert jobs.runner.ended["returned"] == 0, "it stays ours, and is asked again at once"
    assert (results.batch.completed, results.batch.failed) == (4, 0)
    assert len(long_calls(node)) == 4 + 3
    assert [json.loads(seen.body) for seen in long_calls(node)[:4]] == [json.loads(long_calls(node)[0].body)] * 4


async def test_a_line_that_writes_is_taken_back_when_there_is_no_other_room(rig, tmp_path):
    node = await rig.node(slots=1)
    pace = {"now": Script(n=50, gap=0.05)}
    node.on_request = lambda seen: pace["now"] if len(seen.body) > 5000 else QUICK
    app = await rig.router({"name": "n1", "url": node.url, "max_sequences": 1})
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit([long_line(1)])
        await eventually(lambda: node.seen and node.seen[0].tokens >= 3, within=5)
        reply = await ask(app.port, chat())
        assert reply.status == 200
        assert node.aborted == long_calls(node)[:1]
        pace["now"] = QUICK
        results = await jobs.drained(batch)
    assert (results.batch.completed, results.batch.failed) == (1, 0)
    assert results.body(1)["choices"][0]["message"]["content"] == "tok0 tok1 tok2"
    calls = await app.metrics()
    assert calls['ebbtide_calls_total{endpoint="chat/completions",outcome="taken_back",workload="batch"}'] == 1


async def test_a_line_goes_back_to_the_node_that_read_it(rig, tmp_path, freed):
    nodes = [await rig.node(slots=4) for _ in range(2)]
    for node in nodes:
        slow_until(node, freed=freed)
    app = await rig.router(upstream={"first_byte_s": 3, "first_byte_per_prompt_token_s": 0})
    async with room(app, tmp_path) as jobs:
        batch = await jobs.submit([long_line(1)])
        await eventually(lambda: long_calls(nodes[0]) or long_calls(nodes[1]), within=5)
        had = next(node for node in nodes if long_calls(node))
        replies = await asyncio.gather(*(ask(app.port, chat()) for _ in range(12)))
        assert {reply.status for reply in replies} == {200}
        await eventually(lambda: len(long_calls(had)) == 1 + len(had.aborted), within=5)
        freed.set()
        for node in nodes:
            for seen in long_calls(node):
                seen.end("over")
        await asyncio.gather(*(ask(app.port, chat()) for _ in range(12)))
        results = await jobs.drained(batch)
    assert results.batch.completed == 1


def shares(nodes: list[Node]) -> list[int]:
    return [node.budget.chats for node in nodes]


async def test_chat_is_packed_while_there_is_batch_and_spread_when_there_is_none(rig, tmp_path):
    nodes = [await rig.node(slots=16, script=Script(n=3, gap=0.2)) for _ in range(3)]
    app = await rig.router()
    spread = [asyncio.create_task(ask(app.port, stream())) for _ in range(6)]
    await eventually(lambda: sum(shares(app.nodes)) == 6)
    assert shares(app.nodes) == [2, 2, 2]
    await asyncio.gather(*spread)
    async with room(app, tmp_path) as jobs:
        for node in nodes:
            node.on_request = lambda seen: SLOW if len(seen.body) > 5000 else Script(n=3, gap=0.2)
        batch = await jobs.submit(long_line(number) for number in range(2))
        await eventually(lambda: sum(len(node.budget.batch) for node in app.nodes) == 2, within=5)
        packed = [asyncio.create_task(ask(app.port, stream())) for _ in range(3)]
        await eventually(lambda: sum(shares(app.nodes)) == 3)
        assert sorted(shares(app.nodes)) == [0, 0, 3]
        assert sum(len(node.budget.batch) for node in app.nodes) == 2, "whole nodes are left to batch"
        assert await taken_back(app) == 0
        await asyncio.gather(*packed)
        for node in nodes:
            node.on_request = None
            node.script = QUICK
        await jobs.store.cancel_batch(batch.caller, batch.id)
