"""The relay's account in the store: it outlasts a router, several share it, a lost database loses nothing."""

import pytest

from router.core.spend import SLOT_S, SLOTS, Price, Spend
from router.errors import StoreError
from router.jobs.accounts import Accounts
from tests.core.test_spend import call
from tests.store.bench import Bench


def accounts(bench, store=None):
    spend = Spend({"big": Price(input=1000.0, output=3000.0)}, 10.0)
    return Accounts(store=store or bench.store, spend=lambda: spend, clock=bench.clock)


async def test_what_was_spent_outlasts_a_router_and_is_shared(bench: Bench) -> None:
    one = accounts(bench)
    charge = one.spend().charge(call(), bench.clock.now)
    one.spend().charge(call(job=True), bench.clock.now)
    await one.balance()
    other = accounts(bench, await bench.router("other"))
    await other.balance()
    assert other.spend().day(bench.clock.now) == pytest.approx(8.0)
    assert other.spend().day(bench.clock.now, batch=True) == pytest.approx(4.0)
    assert other.spend().reached(call(), bench.clock.now) is not None
    one.spend().settle(charge, 1.0)
    await one.balance()
    await other.balance()
    assert other.spend().day(bench.clock.now) == pytest.approx(5.0)
    other.spend().charge(call(500, 500), bench.clock.now)
    await other.balance()
    await one.balance()
    assert one.spend().day(bench.clock.now) == pytest.approx(7.0)


async def test_old_slots_go(bench: Bench) -> None:
    one = accounts(bench)
    one.spend().charge(call(), bench.clock.now)
    await one.balance()
    bench.clock.tick((SLOTS + 1) * SLOT_S)
    one.spend().charge(call(500, 500), bench.clock.now)
    await one.balance()
    assert one.spend().day(bench.clock.now) == pytest.approx(2.0)
    assert len(await bench.run("SELECT usd FROM spending")) == 1


async def test_what_cannot_be_written_is_written_later(bench: Bench) -> None:
    store = await bench.router("second")
    one = accounts(bench, store)
    one.spend().charge(call(), bench.clock.now)
    await store.close()
    with pytest.raises(StoreError):
        await one.balance()
    assert one.spend().day(bench.clock.now) == pytest.approx(4.0), "and still counts"
    again = Accounts(store=bench.store, spend=one.spend, clock=bench.clock)
    await again.balance()
    assert one.spend().day(bench.clock.now) == pytest.approx(4.0)
    assert one.spend().take() == {}
