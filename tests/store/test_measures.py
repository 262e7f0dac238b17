"""The store counts how long it takes and what goes wrong, on both databases."""

import pytest

from router.errors import StoreError
from router.jobs.store.measures import Act, Trouble
from tests.store.bench import Bench


async def test_statements_are_timed_by_what_they_do(bench: Bench) -> None:
    await bench.running(3)
    await bench.finish_all()
    await bench.settle()
    await bench.store.ping()
    counts = {act: sum(seen) for (act,), seen in bench.store.measures.seconds.counts.items()}
    assert counts.keys() == set(Act), counts
    assert all(counts.values())


async def test_errors_are_counted_by_kind(bench: Bench) -> None:
    with pytest.raises(StoreError):
        await bench.run("UPDATE nothing SET here = 1")
    assert bench.store.measures.errors.values == {(Trouble.REFUSED,): 1}
    await bench.store._db.close()
    with pytest.raises(StoreError):
        await bench.store.ping()
    assert bench.store.measures.errors.values[Trouble.LOST,] == 1
