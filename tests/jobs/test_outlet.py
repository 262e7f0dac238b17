"""Lines of a late batch go to the relay: not before, not for everybody, a few at once, and within the cap."""

import asyncio
from contextlib import asynccontextmanager

from router.core.job import BatchState
from router.core.lateness import LateTerms
from router.jobs.outlet import Outlet
from router.jobs.upkeep import always
from tests.fakes import FakeNode, Script
from tests.jobs.desk import CALLER, background, jsonl, line, room
from tests.rig import ask, entry, eventually, relay_entry, running_app

LATE = LateTerms(last_share=1.0, within_s=10**6)
SOON = LateTerms(last_share=1.0, within_s=1)
STUCK = Script(ttft=300)


@asynccontextmanager
async def outside(rig, tmp_path, *, usd=100.0, models=("tiny",), terms=LATE, **options):
    """A node with one slot that never ends, a relay, and the batch room with a way out."""
    node, relay = await rig.node(script=STUCK, slots=1), await rig.relay(models=list(models))
    entry = {"name": node.name, "url": node.url, "engine": "vllm", "max_sequences": 1}
    spend = {"usd_a_day": usd, "input_usd": dict.fromkeys(models, 0), "output_usd": dict.fromkeys(models, 1_000_000)}
    app = await rig.router(entry, relay=relay_entry(relay, models, api_key=relay.requires_key, spend=spend))
    async with room(app, tmp_path) as jobs:
        outlet = Outlet(
            store=jobs.store,
            runner=jobs.runner,
            dispatcher=app.inside.dispatcher,
            spending=app.inside.spending,
            terms=terms,
            every_s=0.1,
            models=models,
            **options,
        )
        async with background(always(outlet.run)):
            yield node, relay, jobs, outlet
            node.script = Script()


async def test_lines_of_a_late_batch_go_out_when_no_node_takes_them(rig, tmp_path):
    async with outside(rig, tmp_path, usd=1000.0) as (node, relay, jobs, _):
        batch = await jobs.submit(line(number) for number in range(20))
        await eventually(lambda: jobs.runner.ended["done"] == 19, within=10)
        assert (node.accepted, relay.accepted) == (1, 19)
        assert all(b'"stream":true' in body for body in relay.bodies)
        await jobs.store.cancel_batch(batch.caller, batch.id)
        results = await jobs.drained(batch)
    assert results.batch.tokens.output == 19 * 3
    assert results.output.keys() | results.errors.keys() == {f"r{number}" for number in range(20)}


async def test_before_that_they_wait_for_nodes(rig, tmp_path):
    async with outside(rig, tmp_path, terms=SOON) as (node, relay, jobs, outlet):
        batch = await jobs.submit((line(number) for number in range(4)), window_s=3600)
        await eventually(lambda: node.inflight == 1, within=5)
        await outlet.look()
        outlet.let_out()
        assert (outlet.late, relay.accepted) == ({}, 0)
        outlet.terms = LATE
        await eventually(lambda: relay.accepted >= 3, within=5)
        assert node.accepted == 1
        await jobs.store.cancel_batch(batch.caller, batch.id)
        await jobs.until(batch)


async def test_a_few_are_out_at_once(rig, tmp_path):
    async with outside(rig, tmp_path, calls=3) as (_, relay, jobs, _):
        most = 0

        def watch(seen):
            nonlocal most
            most = max(most, relay.inflight)

        relay.on_request, relay.script = watch, Script(ttft=0.1)
        batch = await jobs.submit(line(number) for number in range(12))
        await eventually(lambda: relay.accepted >= 11, within=10)
        assert most == 3
        await jobs.store.cancel_batch(batch.caller, batch.id)
        await jobs.until(batch)


async def test_the_cap_ends_it_and_lines_wait_again(rig, tmp_path):
    async with outside(rig, tmp_path, usd=10.0) as (node, relay, jobs, outlet):
        outlet.spending.spend.batch_share = 1.0
        batch = await jobs.submit(line(number) for number in range(8))
        await eventually(lambda: relay.accepted == 3, within=5)
        await asyncio.sleep(0.5)
        assert relay.accepted == 3, "three lines of three tokens at a dollar each"
        row = await jobs.look(batch)
        assert (row.state, row.failed) == (BatchState.IN_PROGRESS, 0)
        assert jobs.runner.ended["returned"] == 0, "who waits is left alone"
        node.script = Script()
        await node.down()
        await node.up()
        results = await jobs.drained(batch, within=15)
    assert results.batch.completed == 8


async def test_a_caller_that_stays_in_stays_in(rig, tmp_path):
    async with outside(rig, tmp_path, kept_in=(CALLER,)) as (node, relay, jobs, outlet):
        batch = await jobs.submit(line(number) for number in range(4))
        await eventually(lambda: node.inflight == 1 and outlet.late, within=5)
        await asyncio.sleep(0.4)
        assert relay.accepted == 0
        await jobs.store.cancel_batch(batch.caller, batch.id)
        await jobs.until(batch)


async def test_a_model_that_only_the_relay_has_is_done_late(rig, tmp_path):
    async with outside(rig, tmp_path, models=("tiny", "far")) as (node, relay, jobs, _):
        results = await jobs.drained(await jobs.submit(line(number, model="far") for number in range(6)))
    assert (results.batch.completed, relay.accepted, node.accepted) == (6, 6, 0)


async def test_with_every_node_down_a_late_batch_is_done_outside(rig, tmp_path):
    async with outside(rig, tmp_path) as (node, relay, jobs, _):
        await node.down()
        results = await jobs.drained(await jobs.submit(line(number) for number in range(6)))
    assert (results.batch.completed, relay.accepted) == (6, 6)


async def test_trouble_of_the_relays_account_is_not_the_lines_end(rig, tmp_path):
    async with outside(rig, tmp_path) as (_, relay, jobs, _):
        relay.script = Script(status=402)
        batch = await jobs.submit(line(number) for number in range(3))
        await eventually(lambda: relay.accepted >= 2, within=5)
        relay.script = Script()
        await eventually(lambda: relay.accepted >= 4, within=10)
        assert (await jobs.look(batch)).failed == 0
        await jobs.store.cancel_batch(batch.caller, batch.id)
        await jobs.until(batch)


def written(node, relay, home):
    """What an operator writes who lets all lines of a batch leave at once."""
    spend = {"usd_a_day": 100, "input_usd": {"tiny": 0}, "output_usd": {"tiny": 1_000_000}}
    return {
        "nodes": [entry(node, max_sequences=1)],
        "relay": relay_entry(relay, api_key="k", spend=spend),
        "store": {"url": f"sqlite:///{home}/e.db"},
        "batches": {"relay": {"enabled": True, "last_share": 1, "within_s": 86_400}},
    }


async def test_as_an_operator_sets_it_and_the_account_outlasts_the_router(tmp_path):
    async with FakeNode(script=STUCK, slots=1) as node, FakeNode(dialect="openai", requires_key="k") as relay:
        told = written(node, relay, tmp_path)
        async with running_app(told) as app:
            store = app.inside.batching.store
            async with store.writing(caller="", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
                await writer.write(jsonl(line(number) for number in range(4)))
            body = {"input_file_id": writer.row.id, "endpoint": "/v1/chat/completions", "completion_window": "5m"}
            await ask(app.port, body, "/v1/batches")
            await eventually(lambda: app.inside.batching.runner.ended["done"] == 3, within=10)
            assert relay.accepted == 3
            assert (await app.metrics())['ebbtide_relay_spend_usd_total{workload="batch"}'] == 9
        async with running_app(told) as app:
            assert (await app.metrics())['ebbtide_relay_spend_day_usd{by="batches"}'] == 9
            assert (await app.metrics())['ebbtide_relay_spend_day_usd{by="people"}'] == 0


async def test_who_stays_in_is_as_the_last_reload_said(tmp_path):
    async with FakeNode(script=STUCK, slots=1) as node, FakeNode(dialect="openai", requires_key="k") as relay:
        told = written(node, relay, tmp_path)
        ann = {"name": "ann", "key": "sk-ann"}
        async with running_app({**told, "keys": [ann]}) as app:
            kept_in = {**told, "keys": [{**ann, "fallback": False}]}
            assert await app.reload(kept_in) == ["keys.ann changed (fallback)"]
            store = app.inside.batching.store
            async with store.writing(caller="ann", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
                await writer.write(jsonl(line(number) for number in range(4)))
            body = {"input_file_id": writer.row.id, "endpoint": "/v1/chat/completions", "completion_window": "5m"}
            await ask(app.port, body, "/v1/batches", headers=(("Authorization", "Bearer sk-ann"),))
            outlet = app.inside.batching._outlet
            await eventually(lambda: node.inflight == 1 and outlet.late and app.waiting, within=5)
            outlet.let_out()
            await asyncio.sleep(0.3)
            assert relay.accepted == 0
            await app.reload({**told, "keys": [ann]})
            await eventually(lambda: app.inside.batching.runner.ended["done"] == 3, within=10)
            assert relay.accepted == 3
