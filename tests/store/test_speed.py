"""How fast: printed, not judged. `pytest -s tests/store/test_speed.py`; EBBTIDE_LINES=50000 for the full size."""

import asyncio
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager

import pytest

from router.core.job import BatchState
from tests.store.bench import Bench, answer, new_jobs

LINES = int(os.environ.get("EBBTIDE_LINES", "5000"))
AT_ONCE = 64


@contextmanager
def timed(what: str) -> Iterator[None]:
    began, used = time.perf_counter(), time.process_time()
    yield
    took, cpu = time.perf_counter() - began, time.process_time() - used
    print(f"{what:>8}: {LINES / took:9.0f} lines/s  {cpu / LINES * 1e6:6.0f} us CPU a line")


@pytest.mark.timeout(600)
async def test_lines_a_second(url: str) -> None:
    print(f"\n{url.split(':')[0]}, {LINES} lines")
    async with Bench(url) as bench:
        batch = await bench.validating(LINES)
        reading = await bench.store.claim_validation(600)
        assert reading is not None
        jobs = new_jobs(LINES)
        with timed("add"):
            assert await bench.store.add_jobs(reading, jobs)
        assert await bench.store.begin(reading, model="m")
        with timed("run"):
            while claimed := await bench.claim(AT_ONCE):
                await asyncio.gather(*(one(bench, job) for job in claimed))
        slowest = 0.0
        with timed("files"):
            while (await bench.again(batch)).state is not BatchState.COMPLETED:
                began = time.perf_counter()
                await bench.store.sweep(steps=1)
                slowest = max(slowest, time.perf_counter() - began)
        with timed("clear"):
            await bench.settle()
        print(f"slowest step of the sweep: {slowest * 1e3:.0f} ms")
        assert (await bench.again(batch)).completed == LINES


async def one(bench: Bench, job: object) -> None:
    line = await bench.store.line(job)  # type: ignore[arg-type]
    assert line
    assert await bench.store.finish(job, answer(job))  # type: ignore[arg-type]
