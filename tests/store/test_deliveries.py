"""The outbox: filled with the end of a batch, given out under lease to one router at a time, fenced by attempts."""

import asyncio

import pytest

from router.jobs.store import BatchRow, Delivery, Store
from tests.store.bench import Bench

URL = "https://hooks.example/x"


async def ended(bench: Bench, caller: str = "ann", webhook: str | None = URL) -> BatchRow:
    """A batch that is completed."""
    batch = await bench.running(1, caller, webhook=webhook)
    await bench.finish_all()
    await bench.settle()
    return await bench.again(batch)


async def claim(bench: Bench, store: Store | None = None, limit: int = 10) -> list[Delivery]:
    return await (store or bench.store).claim_deliveries(limit=limit, lease_s=60)


async def test_an_end_is_told_once(bench: Bench) -> None:
    batch = await ended(bench)
    await bench.settle()
    outbox = await bench.store.outbox()
    assert (outbox.waiting, outbox.due_in_s) == (1, 0)
    (delivery,) = await claim(bench)
    assert (delivery.batch_id, delivery.caller, delivery.url) == (batch.id, "ann", URL)
    assert (delivery.type, delivery.attempts) == ("batch.completed", 0)
    assert delivery.id.startswith("evt_")
    await bench.store.delivered(delivery)
    assert await bench.store.outbox() == type(outbox)(waiting=0, oldest_s=0.0, due_in_s=None)
    bench.clock.tick(100)
    assert await claim(bench) == []


async def test_without_a_webhook_nobody_is_told(bench: Bench) -> None:
    await ended(bench, webhook=None)
    assert (await bench.store.outbox()).waiting == 0


@pytest.mark.parametrize("way", ["failed", "cancelled", "expired"])
async def test_every_end_is_told_by_its_name(bench: Bench, way: str) -> None:
    if way == "failed":
        await bench.validating(1, webhook=URL)
        batch = await bench.store.claim_validation(30)
        assert batch is not None
        await bench.store.fail_batch(batch, [])
    else:
        batch = await bench.running(1, webhook=URL)
        if way == "cancelled":
            await bench.store.cancel_batch("ann", batch.id)
        bench.clock.tick(86401 if way == "expired" else 0)
        await bench.settle()
    assert [delivery.type for delivery in await claim(bench)] == [f"batch.{way}"]


async def test_a_claim_is_a_lease(bench: Bench) -> None:
    await ended(bench)
    other = await bench.router("other")
    (first,) = await claim(bench)
    assert await claim(bench, other) == []
    outbox = await bench.store.outbox()
    assert (outbox.waiting, outbox.due_in_s) == (1, 60)
    bench.clock.tick(61)
    (second,) = await claim(bench, other)
    assert (second.id, second.attempts) == (first.id, 1)
    assert not await bench.store.delivery_failed(first, retry_in_s=0), "the lease is another's by now"
    assert not await bench.store.delivery_failed(first, retry_in_s=None)
    assert await claim(bench) == []
    assert await other.delivery_failed(second, retry_in_s=300)
    bench.clock.tick(299)
    assert await claim(bench) == []
    bench.clock.tick(2)
    (third,) = await claim(bench)
    assert third.attempts == 2


async def test_what_was_taken_is_over_whoever_says_so(bench: Bench) -> None:
    await ended(bench)
    (first,) = await claim(bench)
    bench.clock.tick(61)
    (second,) = await claim(bench)
    await bench.store.delivered(first)
    assert not await bench.store.delivery_failed(second, retry_in_s=0)
    assert (await bench.store.outbox()).waiting == 0


async def test_given_up_is_over(bench: Bench) -> None:
    await ended(bench)
    (delivery,) = await claim(bench)
    assert await bench.store.delivery_failed(delivery, retry_in_s=None)
    bench.clock.tick(1e6)
    assert await claim(bench) == []


async def test_two_routers_never_hold_the_same(bench: Bench) -> None:
    other = await bench.router("other")
    for _ in range(6):
        await ended(bench)
    claims = await asyncio.gather(*(claim(bench, store, 2) for store in (bench.store, other) * 4))
    taken = [delivery.id for claimed in claims for delivery in claimed]
    assert len(taken) == len(set(taken))
    while more := await claim(bench, limit=3):
        taken += [delivery.id for delivery in more]
    assert len(taken) == len(set(taken)) == 6


async def test_the_untried_go_first_then_the_longest_due(bench: Bench) -> None:
    failed = [await ended(bench), await ended(bench)]
    for delivery in await claim(bench):
        await bench.store.delivery_failed(delivery, retry_in_s=5 if delivery.batch_id == failed[1].id else 10)
    bench.clock.tick(20)
    fresh = await ended(bench)
    assert (await bench.store.outbox()).oldest_s == 20
    order = [(await claim(bench, limit=1))[0].batch_id for _ in range(3)]
    assert order == [fresh.id, failed[1].id, failed[0].id]
    assert await claim(bench, limit=0) == []


async def test_a_batch_is_not_forgotten_before_its_end_was_told(bench: Bench) -> None:
    batch = await ended(bench)
    (delivery,) = await claim(bench)
    bench.clock.tick(1000)
    await bench.store.sweep(keep_batches_s=10)
    assert (await bench.again(batch)).id == batch.id
    await bench.store.delivered(delivery)
    await bench.store.sweep(keep_batches_s=10)
    assert await bench.store.batch("ann", batch.id) is None


async def test_what_is_over_is_cleared_after_a_week(bench: Bench) -> None:
    await ended(bench)
    (delivery,) = await claim(bench)
    await bench.store.delivered(delivery)
    for days, left in ((6, 1), (2, 0)):
        bench.clock.tick(days * 86400)
        await bench.settle()
        assert (await bench.run("SELECT count(*) FROM deliveries"))[0][0] == left
