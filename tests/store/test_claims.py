"""Leases: whose turn it is, and that only the holder of the newest lease may act."""

import asyncio
from collections import Counter

import pytest

from router.jobs.store import JobRow, NewJob, Topic
from tests.store.bench import Bench, answer, new_jobs


def lines(jobs: list[JobRow]) -> list[int]:
    return [job.line for job in jobs]


async def test_nearest_deadline_first(bench: Bench) -> None:
    late = await bench.running(2)
    soon = await bench.running(2, completion_window="1h", window_s=3600)
    urgent = await bench.running(2, priority=24)
    order = [job.batch_id for job in await bench.claim(6)]
    assert order == [urgent.id, urgent.id, soon.id, soon.id, late.id, late.id]


async def test_fewest_running_first_among_equally_near(bench: Bench) -> None:
    await bench.running(9, caller="ann")
    await bench.running(9, caller="bob")
    assert Counter(job.caller for job in await bench.claim(6)) == {"ann": 3, "bob": 3}
    await bench.running(9, caller="cid")
    assert Counter(job.caller for job in await bench.claim(3)) == {"cid": 3}
    assert Counter(job.caller for job in await bench.claim(3)) == {"ann": 1, "bob": 1, "cid": 1}


async def test_lines_that_share_a_prefix_run_together_and_long_ones_first(bench: Bench) -> None:
    await bench.validating(6)
    batch = await bench.store.claim_validation(30)
    assert batch is not None
    told = [(1, 7, 10), (2, -5, 10), (3, 7, 99), (4, -5, 20), (5, 7, 50), (6, -5, 20)]
    new = [NewJob(line=n, custom_id=f"c{n}", offset=0, length=1, model="m", prefix=p, size=s) for n, p, s in told]
    assert await bench.store.add_jobs(batch, new)
    await bench.store.begin(batch, model="m")
    assert lines(await bench.claim(4)) == [4, 6, 2, 3]
    assert lines(await bench.claim(4)) == [5, 1]


async def test_only_models_that_are_served(bench: Bench) -> None:
    await bench.validating(4)
    batch = await bench.store.claim_validation(30)
    assert batch is not None
    await bench.store.add_jobs(batch, new_jobs(2, "a"))
    await bench.store.add_jobs(batch, new_jobs(4, "b", first=3))
    await bench.store.begin(batch, model=None)
    assert await bench.claim(models=["c"]) == []
    assert await bench.claim(models=[]) == []
    assert await bench.claim(0) == []
    assert {job.model for job in await bench.claim(models=["b", "c"])} == {"b"}
    assert len(await bench.claim(models=["a", "b"])) == 2


async def test_a_line_knows_where_its_bytes_are(bench: Bench) -> None:
    batch = await bench.running(3)
    jobs = await bench.claim()
    assert [await bench.store.line(job) for job in jobs] == [
        b'{"custom_id":"%b"}' % job.custom_id.encode() + b" " * 13 for job in jobs
    ]
    assert {(job.batch_id, job.caller, job.endpoint, job.expires_at) for job in jobs} == {
        (batch.id, "ann", batch.endpoint, batch.expires_at)
    }


async def test_put_back_waits_and_is_counted(bench: Bench) -> None:
    await bench.running(1)
    (job,) = await bench.claim()
    assert await bench.store.put_back(job, not_before=bench.clock.now + 10, charged=True, node="gpu1")
    assert not await bench.store.put_back(job, charged=True)
    assert await bench.claim() == []
    bench.clock.tick(10)
    (again,) = await bench.claim()
    assert (again.attempts, again.returns, again.node, again.epoch) == (1, 0, "gpu1", job.epoch + 1)
    assert not await bench.store.put_back(job, charged=True)
    assert not await bench.store.finish(job, answer(job))
    assert await bench.store.extend([job, again], 30) == {job.key}
    assert await bench.store.put_back(again, charged=False)
    (third,) = await bench.claim()
    assert (third.attempts, third.returns, third.node) == (1, 1, "gpu1")


async def test_an_old_lease_may_do_nothing(bench: Bench) -> None:
    batch = await bench.running(1)
    (old,) = await bench.claim(lease_s=5)
    other = await bench.router("other")
    assert await bench.claim(store=other) == []
    bench.clock.tick(6)
    (new,) = await bench.claim(store=other)
    assert (new.key, new.epoch, new.returns) == (old.key, old.epoch + 1, 1)
    assert await bench.store.extend([old], 30) == {old.key}
    assert not await bench.store.put_back(old, charged=True)
    assert not await bench.store.finish(old, answer(old, 400))
    assert await other.extend([new], 30) == set()
    assert await other.finish(new, answer(new))
    assert not await bench.store.finish(old, answer(old, 400))
    await bench.settle()
    assert await bench.holds(batch, 1) == {"done": 1}


async def test_a_lapsed_lease_that_nobody_took_goes_on(bench: Bench) -> None:
    """Also after a step of the clock: a router does not take its own lines again."""
    await bench.running(1)
    (job,) = await bench.claim(lease_s=5)
    bench.clock.tick(3600)
    assert await bench.claim() == []
    assert await bench.store.extend([job], 30) == set()
    assert await bench.store.finish(job, answer(job))


async def test_extend_tells_which_are_lost(bench: Bench) -> None:
    await bench.running(4)
    jobs = await bench.claim(3)
    await bench.store.finish(jobs[0], answer(jobs[0]))
    assert await bench.store.extend(jobs, 30) == {jobs[0].key}
    assert await bench.store.extend([], 30) == set()


async def test_no_line_is_claimed_twice(bench: Bench) -> None:
    """Two routers, many claims at once."""
    await bench.running(60)
    other = await bench.router("other")
    claims = [bench.claim(7, store=store) for _ in range(5) for store in (bench.store, other)]
    jobs = [job for claimed in await asyncio.gather(*claims) for job in claimed]
    while more := await bench.claim(7):
        jobs += more
    assert sorted(lines(jobs)) == list(range(1, 61))


@pytest.mark.parametrize("topic", [Topic.BATCHES, Topic.JOBS])
async def test_bells_ring(bench: Bench, topic: Topic) -> None:
    seen = bench.store.wakes.count(topic)
    waiting = asyncio.ensure_future(bench.store.wakes.wait(topic, seen, timeout_s=10))
    await bench.running(1)
    assert await waiting > seen
    assert await bench.store.wakes.wait(topic, seen, timeout_s=10) > seen
    now = bench.store.wakes.count(topic)
    async with asyncio.timeout(10):  # PostgreSQL tells of each commit a little later
        while (later := await bench.store.wakes.wait(topic, now, timeout_s=0.05)) != now:
            now = later


async def test_a_clock_that_is_set_back_makes_no_line_wait_for_it(bench: Bench) -> None:
    """A line may wait for some minutes at most, so one that is to wait longer is due."""
    await bench.running(1)
    (job,) = await bench.claim()
    await bench.store.put_back(job, not_before=bench.clock.now + 60, charged=True)
    assert await bench.claim() == []
    bench.clock.tick(-3600)
    (again,) = await bench.claim()
    assert again.key == job.key
