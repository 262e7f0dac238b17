"""Takes batches in: checks the lines of each input file and writes them down as jobs, then lets the batch begin.

Rules:
- Whoever claims a batch reads its file from the start. Writing a line twice is writing it once, so a router that dies
  here costs a second reading and nothing else.
- Pieces are judged in a thread; between two of them everything else has its turn.
- A batch leaves `validating` however the reading ends, but for the loss of the store: then it is claimed again.
"""

import asyncio
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass

import structlog

from router.errors import StoreError, StoreFull, StoreLost
from router.jobs.checks import Rules
from router.jobs.lines import Reader
from router.jobs.store import BatchRow, FileRow, LineError, NewJob, Store, Topic

STEP_JOBS = 250
"""Lines written in one go: so many hold the event loop for about 5 ms."""
LEASE_S = 30.0
LOOK_S = 1.0
"""How often a batch is looked for when nobody says that there is one, and the wait after the store was lost."""

log = structlog.get_logger()


@dataclass(frozen=True, kw_only=True)
class Allowance:
    """What one caller may have waiting, over all its batches. None is without limit."""

    lines: int | None = None
    tokens: int | None = None


@dataclass(frozen=True, kw_only=True)
class Intake:
    """Checks new batches until cancelled. `reader` is the thread that reads; `allowance` is asked by caller."""

    store: Store
    rules: Rules
    reader: Executor
    allowance: Callable[[str], Allowance] = lambda _: Allowance()
    lease_s: float = LEASE_S

    async def run(self) -> None:
        """Take in batch after batch, oldest first."""
        while True:
            try:
                seen = self.store.wakes.count(Topic.BATCHES)
                if not await self.step():
                    await self.store.wakes.wait(Topic.BATCHES, seen, timeout_s=LOOK_S)
            except StoreError as error:
                log.warning("a batch waits to be checked", reason=str(error))
                await asyncio.sleep(LOOK_S)

    async def step(self) -> bool:
        """Check the batch whose turn it is; False when there is none."""
        batch = await self.store.claim_validation(self.lease_s)
        if batch is None:
            return False
        try:
            await validate(self, batch)
        except StoreError:
            raise
        except Exception:
            log.error("a batch could not be checked through a fault of ours", batch=batch.id, exc_info=True)
            await _reject(self.store, batch, "internal_error", "The router failed to check this batch.")
        return True


async def validate(intake: Intake, batch: BatchRow) -> BatchRow | None:
    """Check a claimed batch: it begins, or fails with what is wrong. None when another router has taken it over."""
    store = intake.store
    file = await store.input(batch)
    if file is None:
        return await _no_file(store, batch)
    reader = Reader(batch.endpoint, intake.rules)
    try:
        if not await _read(intake, batch, file, reader):
            return None
    except (StoreLost, StoreFull):
        raise
    except StoreError:
        return await _no_file(store, batch)
    if not reader.found:
        await _check_allowance(intake, batch, reader)
    if reader.found:
        return await store.fail_batch(batch, reader.found.told())
    return await store.begin(batch, model=reader.model)


async def _read(intake: Intake, batch: BatchRow, file: FileRow, reader: Reader) -> bool:
    """Read the whole file and write its lines down; False when another router has taken the batch over."""
    loop = asyncio.get_running_loop()
    due = loop.time() + intake.lease_s / 3
    jobs: list[NewJob] = []
    async for piece in intake.store.content(file):
        jobs += await loop.run_in_executor(intake.reader, reader.feed, piece)
        if reader.done:
            return True
        if len(jobs) >= STEP_JOBS and not reader.found:
            if not await _write(intake.store, batch, jobs):
                return False
            jobs = []
        if loop.time() >= due:
            if not await intake.store.extend_validation(batch, intake.lease_s):
                return False
            due = loop.time() + intake.lease_s / 3
    jobs += await loop.run_in_executor(intake.reader, reader.end)
    return bool(reader.found) or await _write(intake.store, batch, jobs)


async def _write(store: Store, batch: BatchRow, jobs: Sequence[NewJob]) -> bool:
    """Write lines down in steps; False when another router has taken the batch over."""
    for start in range(0, len(jobs), STEP_JOBS):
        if not await store.add_jobs(batch, jobs[start : start + STEP_JOBS]):
            return False
    return True


async def _check_allowance(intake: Intake, batch: BatchRow, reader: Reader) -> None:
    """What the caller has waiting, this batch included, against what it may."""
    allowed = intake.allowance(batch.caller)
    if allowed.lines is None and allowed.tokens is None:
        return
    held = await intake.store.held(batch.caller)
    lines, tokens = held.lines + reader.jobs, held.tokens + reader.tokens
    if allowed.lines is not None and lines > allowed.lines:
        message = f"Enqueued request limit reached: {lines} requests would wait, {allowed.lines} may."
        reader.found.refuse("batch_request_limit_exceeded", message)
    if allowed.tokens is not None and tokens > allowed.tokens:
        message = f"Enqueued token limit reached: {tokens} tokens would wait, {allowed.tokens} may."
        reader.found.refuse("token_limit_exceeded", message)


async def _no_file(store: Store, batch: BatchRow) -> BatchRow | None:
    message = f"Cannot find file {batch.input_file_id}, or your key does not have access to it."
    return await _reject(store, batch, "invalid_request", message, "file_id")


async def _reject(store: Store, batch: BatchRow, code: str, message: str, param: str | None = None) -> BatchRow | None:
    return await store.fail_batch(batch, [LineError(code=code, message=message, param=param, line=None)])
