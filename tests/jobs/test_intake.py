"""Batches being taken in: a crash half way, two routers, a lost store, a fault of ours, and a great many lines."""

import asyncio
import json
from collections.abc import AsyncIterator, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import pytest

from router.core.job import BatchState
from router.errors import StoreLost
from router.jobs.checks import Rules
from router.jobs.intake import Intake, validate
from router.jobs.store import BatchRow, FileRow, NewBatch, Store, Topic
from tests.http.counter import Clock, jsonl, line


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
async def store(tmp_path: Path, clock: Clock) -> AsyncIterator[Store]:
    store = await Store.open(f"sqlite:///{tmp_path}/one.db", router="one", clock=clock)
    yield store
    await store.close()


@pytest.fixture
def reader() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as reader:
        yield reader


@pytest.fixture
def intake(store: Store, reader: ThreadPoolExecutor) -> Intake:
    return Intake(store=store, rules=Rules(models={"tiny"}.__contains__), reader=reader)


async def put(store: Store, content: bytes) -> FileRow:
    async with store.writing(caller="ann", purpose="batch", filename="in.jsonl", expires_s=None) as writer:
        await writer.write(content)
    return writer.row


async def new(store: Store, content: bytes) -> BatchRow:
    file = await put(store, content)
    asked = NewBatch(
        caller="ann", endpoint="/v1/chat/completions", input_file_id=file.id, completion_window="24h", window_s=86400
    )
    return await store.create_batch(asked)


async def state(store: Store, batch: BatchRow) -> BatchRow:
    found = await store.batch("ann", batch.id)
    assert found is not None
    return found


async def begun(store: Store, batch: BatchRow) -> BatchRow:
    """The batch once it is no longer being checked."""
    async with asyncio.timeout(5):
        seen = store.wakes.count(Topic.JOBS)
        while (row := await state(store, batch)).state is BatchState.VALIDATING:
            seen = await store.wakes.wait(Topic.JOBS, seen)
    return row


async def ids(store: Store) -> list[str]:
    """Every line there is to run; the first few are read where they are said to stand."""
    jobs = await store.claim(models={"tiny"}, limit=100_000, lease_s=30)
    for job in jobs[:10]:
        assert json.loads(await store.line(job))["custom_id"] == job.custom_id
    return sorted(job.custom_id for job in jobs)


class Breaking:
    """A store that breaks at the `at`-th time one of its methods is used."""

    def __init__(self, store: Store, method: str, at: int, error: BaseException) -> None:
        self._store, self._method, self._left, self._error = store, method, at, error

    def __getattr__(self, name: str) -> Any:
        if name == self._method:
            self._left -= 1
            if not self._left:
                raise self._error
        return getattr(self._store, name)


def breaking(intake: Intake, method: str, at: int, error: BaseException) -> Intake:
    broken: Any = Breaking(intake.store, method, at, error)
    return replace(intake, store=broken)


async def test_batches_are_taken_in_as_they_come(store: Store, intake: Intake) -> None:
    running = asyncio.create_task(intake.run())
    batch = await new(store, jsonl(line("a"), line("b")))
    row = await begun(store, batch)
    running.cancel()
    await asyncio.wait([running])
    assert (row.state, row.total, row.model) == (BatchState.IN_PROGRESS, 2, "tiny")
    assert await ids(store) == ["a", "b"]


@pytest.mark.parametrize("at", [1, 2, 3])
async def test_a_check_that_died_half_way_is_done_again_and_writes_each_line_once(
    store: Store, intake: Intake, clock: Clock, at: int
) -> None:
    content = jsonl(*(line(f"{number:05}", user="x" * 2000) for number in range(1500)))
    batch = await new(store, content)
    with pytest.raises(StoreLost):
        await breaking(intake, "add_jobs", at, StoreLost("gone")).step()
    assert (await state(store, batch)).state is BatchState.VALIDATING
    clock.now += 31
    assert await intake.step()
    row = await state(store, batch)
    assert (row.state, row.total) == (BatchState.IN_PROGRESS, 1500)
    assert await ids(store) == [f"{number:05}" for number in range(1500)]


async def test_a_router_that_lost_its_claim_changes_nothing(
    store: Store, intake: Intake, clock: Clock, tmp_path: Path
) -> None:
    batch = await new(store, jsonl(line("a"), line("b")))
    late = await store.claim_validation(30)
    assert late is not None
    clock.now += 31
    other = await Store.open(f"sqlite:///{tmp_path}/one.db", router="two", clock=clock)
    assert await replace(intake, store=other).step()
    assert await validate(intake, late) is None
    assert (await state(store, batch)).total == 2
    await other.close()


async def test_a_long_check_keeps_its_claim(store: Store, intake: Intake) -> None:
    seen: list[float] = []

    class Extending:
        def __getattr__(self, name: str) -> Any:
            if name == "extend_validation":
                seen.append(0.0)
            return getattr(store, name)

    extending: Any = Extending()
    await new(store, jsonl(*(line(str(number), user="x" * 1000) for number in range(4000))))
    assert await replace(intake, store=extending, lease_s=0.003).step()
    assert seen


async def test_the_loss_of_the_store_is_waited_out(store: Store, intake: Intake, monkeypatch: Any) -> None:
    monkeypatch.setattr("router.jobs.intake.LOOK_S", 0.01)
    batch = await new(store, jsonl(line("a")))
    running = asyncio.create_task(breaking(intake, "claim_validation", 1, StoreLost("gone")).run())
    assert (await begun(store, batch)).state is BatchState.IN_PROGRESS
    running.cancel()
    await asyncio.wait([running])


async def test_a_fault_of_ours_fails_that_batch_alone(store: Store, intake: Intake) -> None:
    bad, good = await new(store, jsonl(line("a"))), await new(store, jsonl(line("b")))
    assert await breaking(intake, "input", 1, RuntimeError("a bug")).step()
    assert await intake.step()
    row = await state(store, bad)
    assert (row.state, row.errors[0].code) == (BatchState.FAILED, "internal_error")
    assert (await state(store, good)).state is BatchState.IN_PROGRESS
    assert not await intake.step()


async def test_fifty_thousand_lines_are_taken_in_while_others_are_served(store: Store, intake: Intake) -> None:
    block = "".join(json.dumps(line(f"@-{number:03}")) + "\n" for number in range(500))
    batch = await new(store, "".join(block.replace("@", str(number)) for number in range(100)).encode())
    waits: list[float] = []
    began = process_time()
    checking = asyncio.create_task(intake.step())
    while not checking.done():
        asked = perf_counter()
        await state(store, batch)
        waits.append(perf_counter() - asked)
        await asyncio.sleep(0.005)
    took = process_time() - began
    row = await state(store, batch)
    assert (row.state, row.total) == (BatchState.IN_PROGRESS, 50_000)
    assert took < 20
    assert sorted(waits)[len(waits) // 2] < 0.5
