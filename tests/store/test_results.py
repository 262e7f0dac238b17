"""Results: once, with their counters, however many come at once and whoever gives up waiting."""

import asyncio
import json

import pytest

from router.core.job import BatchState
from router.errors import StoreError
from router.jobs.schema import CHUNK_BYTES
from router.jobs.store import NewResult, Store
from tests.store.bench import Bench, answer


async def test_twice_is_once(bench: Bench) -> None:
    batch = await bench.running(2)
    job, _ = await bench.claim()
    assert await asyncio.gather(*(bench.store.finish(job, answer(job)) for _ in range(3))) == [True] * 3
    assert await bench.store.finish(job, answer(job, 500))
    now = await bench.again(batch)
    assert (now.completed, now.failed, now.tokens.input) == (1, 0, 2)


async def test_many_at_once_share_commits_and_all_count(bench: Bench) -> None:
    first, second = await bench.running(60), await bench.running(60, caller="bob")
    other = await bench.router("other")
    mine, theirs = await bench.claim(60), await bench.claim(60, store=other)
    ends = [bench.store.finish(job, answer(job)) for job in mine] + [
        other.finish(job, answer(job, 400)) for job in theirs
    ]
    assert all(await asyncio.gather(*ends))
    rows = [await bench.again(first), await bench.again(second)]
    assert sum(row.completed for row in rows) == sum(row.failed for row in rows) == 60
    await bench.settle()
    for batch in (first, second):
        await bench.holds(batch, 60)


async def test_one_who_gives_up_takes_nobody_along(bench: Bench) -> None:
    batch = await bench.running(20)
    jobs = await bench.claim()
    tasks = [asyncio.ensure_future(bench.store.finish(job, answer(job))) for job in jobs]
    await asyncio.sleep(0)
    for task in tasks[::3]:
        task.cancel()
    ends = await asyncio.gather(*tasks, return_exceptions=True)
    assert all(end is True for index, end in enumerate(ends) if index % 3)
    for job, end in zip(jobs, ends, strict=True):
        if end is not True:
            assert await bench.store.finish(job, answer(job))
    await bench.settle()
    assert await bench.holds(batch, 20) == {"done": 20}


async def test_an_error_of_the_database_reaches_all_who_wait_and_asking_again_works(bench: Bench) -> None:
    await bench.running(4)
    jobs = await bench.claim()
    wrong = NewResult(status=99, body=b"{}")  # no such status: the database refuses
    ends = [bench.store.finish(jobs[0], wrong), *(bench.store.finish(job, answer(job)) for job in jobs[1:])]
    kept = await asyncio.gather(*ends, return_exceptions=True)
    assert isinstance(kept[0], StoreError)
    assert all(isinstance(end, StoreError) or end for end in kept)
    assert all(await asyncio.gather(*(bench.store.finish(job, answer(job)) for job in jobs)))


async def test_bodies_are_spliced_as_they_came(bench: Bench) -> None:
    batch = await bench.running(3)
    bodies = [
        b'{"a": 1.0e5, "\\u00e4":"\xc3\xa4"}',
        b'{\n  "a": [1,\r\n 2]\n}',
        b'{"long":"' + b"x" * (3 * CHUNK_BYTES) + b'"}',
    ]
    for job, body in zip(await bench.claim(3), sorted(bodies), strict=True):
        await bench.store.finish(job, NewResult(status=200, request_id='r"1', body=body))
    await bench.settle()
    row = await bench.again(batch)
    text = await bench.text(row.output_file_id)
    assert len(text.splitlines()) == text.count(b"\n") == 3
    assert bodies[0] in text
    assert bodies[2] in text
    output, _ = await bench.results(batch)
    assert sorted(json.dumps(line["response"]["body"]) for line in output) == sorted(
        json.dumps(json.loads(b)) for b in bodies
    )


async def test_result_files_are_made_in_steps_and_resumed_by_anybody(bench: Bench) -> None:
    """After every single transaction another router goes on; the bytes are the same as in one go."""
    batch = await bench.running(2500)
    jobs = await bench.claim(2400)
    await asyncio.gather(*(bench.store.finish(job, answer(job, 400 if job.line % 5 == 0 else 200)) for job in jobs))
    bench.clock.tick(86400)
    routers = [bench.store, await bench.router("other")]
    for turn in range(100):
        await routers[turn % 2].sweep(steps=1)
        if (await bench.again(batch)).state is BatchState.EXPIRED:
            break
    ends = await bench.holds(batch, 2500)
    assert ends["batch_expired"] == 100
    output, _ = await bench.results(batch)
    assert [int(line["custom_id"][1:]) for line in output] == sorted(int(line["custom_id"][1:]) for line in output)


async def test_two_routers_sweep_at_once(bench: Bench) -> None:
    batches = [await bench.running(30) for _ in range(4)]
    other = await bench.router("other")
    await bench.finish_all()

    async def settled(store: Store) -> int:
        return len(await bench.settle(store))

    assert sum(await asyncio.gather(settled(bench.store), settled(other))) == 4
    for batch in batches:
        assert await bench.holds(batch, 30) == {"done": 30}


@pytest.mark.parametrize("state", ["cancelled", "expired"])
async def test_answers_that_come_while_a_batch_is_stopped(bench: Bench, state: str) -> None:
    """Finish races with the stop: whichever is first, the line has one end."""
    batch = await bench.running(40)
    jobs = await bench.claim()

    async def stop() -> None:
        if state == "cancelled":
            await bench.store.cancel_batch("ann", batch.id)
        else:
            bench.clock.tick(86400)
            await bench.store.sweep()

    ends = await asyncio.gather(stop(), *(bench.store.finish(job, answer(job)) for job in jobs))
    await bench.settle()
    assert (await bench.holds(batch, 40))["done"] == sum(end is True for end in ends[1:])
