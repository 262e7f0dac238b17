"""Several routers: known to each other, and survived by each other."""

import asyncio

import pytest

from router.jobs.store import Store, Topic
from tests.store.bench import Bench, answer


async def test_they_know_each_other(bench: Bench) -> None:
    other = await bench.router("other")
    assert [router.name for router in await bench.store.routers()] == ["first", "other"]
    bench.clock.tick(30)
    await other.beat()
    assert [router.name for router in await bench.store.routers()] == ["other"]
    bench.stores.remove(other)
    await other.close()
    await bench.store.beat()
    assert [router.name for router in await bench.store.routers()] == ["first"]


async def test_a_restart_goes_on_at_once(bench: Bench) -> None:
    """kill -9 and a new start under the same name: no lease is waited for."""
    batch = await bench.running(5)
    validating = await bench.validating(2)
    life = await bench.router("batch-router")
    assert await life.claim_validation(300) is not None
    old = await bench.claim(store=life, lease_s=300)
    await bench.crash(life)
    await bench.store.prune()
    again = await bench.router("batch-router")
    new = await bench.claim(store=again, lease_s=300)
    assert [job.key for job in new] == [job.key for job in old]
    assert {job.returns for job in new} == {1}
    assert await bench.begin(again, 2)
    for job in new:
        assert await again.finish(job, answer(job))
    await bench.finish_all()
    await bench.settle()
    assert await bench.holds(batch, 5) == {"done": 5}
    assert await bench.holds(validating, 2) == {"done": 2}


async def test_one_that_lives_keeps_its_lines_though_another_has_its_name(bench: Bench) -> None:
    await bench.running(2)
    (job, _) = await bench.claim()
    twin = await bench.router("first")
    assert await bench.claim(store=twin) == []
    assert await twin.prune() == []
    assert await bench.store.finish(job, answer(job))


async def test_one_that_froze_is_fenced_out_and_comes_back(bench: Bench) -> None:
    batch = await bench.running(3)
    frozen = await bench.router("frozen")
    held = await bench.claim(store=frozen)
    seen = bench.store.wakes.count(Topic.JOBS)
    bench.clock.tick(25)
    await bench.store.beat()
    assert [router.id for router in await bench.store.prune()] == [frozen.router]
    assert bench.store.wakes.count(Topic.JOBS) > seen
    assert len(await bench.claim()) == 3
    assert await frozen.extend(held, 30) == {job.key for job in held}
    assert not any([await frozen.finish(job, answer(job)) for job in held])
    await frozen.beat()
    assert len(await bench.store.routers()) == 2
    bench.clock.tick(31)
    await frozen.beat()
    await bench.finish_all(frozen)
    await bench.settle()
    assert await bench.holds(batch, 3) == {"done": 3}


async def test_watching(bench: Bench) -> None:
    """Beats, prunes and hears bells, until cancelled."""
    frozen = await bench.router("frozen")
    await bench.running(1)
    await bench.claim(store=frozen)
    bench.clock.tick(25)
    seen = bench.store.wakes.count(Topic.JOBS)
    async with asyncio.TaskGroup() as tasks:
        watch = tasks.create_task(bench.store.watch())
        await bench.store.wakes.wait(Topic.JOBS, seen, timeout_s=20)
        watch.cancel()
    assert len(await bench.claim()) == 1


async def test_bells_ring_at_other_routers(postgres_url: str) -> None:
    async with Bench(postgres_url) as bench:
        other = await bench.router("other")
        seen = {topic: other.wakes.count(topic) for topic in Topic}
        batch = await bench.running(2)
        await bench.claim()
        await bench.store.cancel_batch("ann", batch.id)
        await bench.settle()
        for topic in Topic:
            assert await other.wakes.wait(topic, seen[topic], timeout_s=20) > seen[topic]


@pytest.mark.parametrize("clocks", [3])
async def test_the_servers_clock_is_the_clock(postgres_url: str, clocks: int) -> None:
    stores = [await Store.open(postgres_url, router=f"r{n}") for n in range(clocks)]
    times = [await store.now() for store in stores]
    assert times == sorted(times)
    assert times[-1] - times[0] < 5
    for store in stores:
        await store.close()
