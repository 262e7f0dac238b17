"""Validation: one router at a time reads a batch's input and writes its lines down.

The batch is under lease meanwhile, fenced by its epoch. Lines are written in steps, each line once, so whoever takes
over goes on. A batch that is cancelled meanwhile is validated to its end: every line must get into the error file.
"""

from collections.abc import Sequence

import msgspec
from sqlalchemy import RowMapping, func, or_, select, update

from router.core.job import BatchEvent, BatchState, JobState, sources
from router.jobs.schema import batches, files, jobs
from router.jobs.store.database import Condition, Transaction
from router.jobs.store.endings import announce
from router.jobs.store.files import visible
from router.jobs.store.rows import BatchRow, FileRow, LineError, NewJob, batch_row, file_row
from router.jobs.store.shelf import Shelf, is_state, locked
from router.jobs.store.wakes import Topic

STEP_LINES = 1000
"""Lines written in one transaction."""
MISSING = LineError(
    code="invalid_request",
    message="Cannot find the input file, or it was deleted or expired before the batch was validated.",
    param="file_id",
)
"""What a batch without input fails with."""


class Validation(Shelf):
    """Batches on their way to be run."""

    async def claim_validation(self, lease_s: float) -> BatchRow | None:
        """The oldest batch to validate, for `lease_s` seconds."""
        open_ = (is_state(batches.c.state, *_OPEN), batches.c.validated_at.is_(None))
        async with self._db.read() as tx:
            if await tx.first(select(batches.c.number).where(*open_).limit(1)) is None:
                return None
        async with self._db.write() as tx:
            now = await tx.now()
            free = or_(batches.c.owner.is_(None), batches.c.lease_until < now)
            oldest = select(batches.c.number).where(*open_, free).order_by(batches.c.number).limit(1)
            row = await tx.first(locked(oldest, skip=True))
            if row is None:
                return None
            lease = {"owner": self.router, "epoch": batches.c.epoch + 1, "lease_until": now + lease_s}
            mine = update(batches).where(batches.c.number == row["number"]).values(**lease)
            taken = await tx.first(mine.returning(batches))
            return batch_row(taken) if taken else None

    async def extend_validation(self, batch: BatchRow, lease_s: float) -> bool:
        """Keep a batch longer; False if it is not ours any more."""
        async with self._db.write() as tx:
            until = await tx.now() + lease_s
            return bool(await tx.run(update(batches).where(*self._ours(batch)).values(lease_until=until)))

    async def input(self, batch: BatchRow) -> FileRow | None:
        """Its input file, or None if that is unknown, another caller's, deleted or expired."""
        source = select(files).join(batches, batches.c.input == files.c.number)
        async with self._db.read() as tx:
            here = visible(batch.caller, await tx.now())
            row = await tx.first(source.where(batches.c.number == batch.number, *here))
            return file_row(row) if row else None

    async def add_jobs(self, batch: BatchRow, new: Sequence[NewJob]) -> bool:
        """Write lines down, each once however often it comes; False, at any step, if the batch is not ours any more."""
        once = self._db.insert(jobs).on_conflict_do_nothing(index_elements=["batch", "line"])
        for start in range(0, len(new), STEP_LINES):
            rows = [
                {**msgspec.structs.asdict(job), "batch": batch.number, "state": JobState.QUEUED}
                for job in new[start : start + STEP_LINES]
            ]
            async with self._db.write(grows=True) as tx:
                if await self._locked(tx, batch) is None:
                    return False
                await tx.run(once, rows)
        return True

    async def begin(self, batch: BatchRow, *, model: str | None) -> BatchRow | None:
        """Every line is written: let them run. `model` is the one all lines ask for, or None if they differ.

        The batch fails instead if its input was deleted meanwhile, and goes on to its end if it was cancelled. None if
        it is not ours any more.
        """
        async with self._db.write() as tx:
            row = await self._locked(tx, batch)
            if row is None:
                return None
            now = await tx.now()
            there = (files.c.number == row["input"], *visible(row["caller"], now))
            if await tx.first(select(files.c.number).where(*there)) is None:
                return await self._refuse(tx, row, (MISSING,))
            counts = select(func.count().label("total"), func.coalesce(func.sum(jobs.c.size), 0).label("size_left"))
            lines = await tx.first(counts.where(jobs.c.batch == batch.number))
            assert lines is not None
            values = {
                "total": lines["total"],
                "model": model,
                "validated_at": int(now),
                "owner": None,
                "lease_until": None,
            }
            if row["state"] in sources(BatchEvent.ACCEPTED):
                values |= {
                    "state": BatchState.IN_PROGRESS,
                    "in_progress_at": int(now),
                    "size_left": int(lines["size_left"]),
                }
                tx.wake(Topic.JOBS)
            return await _changed(tx, row, values)

    async def fail_batch(self, batch: BatchRow, errors: Sequence[LineError]) -> BatchRow | None:
        """Its input is not valid: the batch fails, and no line runs. None if it is not ours any more."""
        async with self._db.write() as tx:
            row = await self._locked(tx, batch)
            return None if row is None else await self._refuse(tx, row, errors)

    async def _refuse(self, tx: Transaction, row: RowMapping, errors: Sequence[LineError]) -> BatchRow:
        now = int(await tx.now())
        said = msgspec.json.encode(list(errors)).decode()
        values: dict[str, object] = {"errors": said, "validated_at": now, "owner": None, "lease_until": None}
        if row["state"] in sources(BatchEvent.REJECTED):
            values |= {"state": BatchState.FAILED, "failed_at": now}
        failed = await _changed(tx, row, values)
        if failed.state is BatchState.FAILED:
            await announce(self._db, tx, failed)
        return failed

    def _ours(self, batch: BatchRow) -> tuple[Condition, ...]:
        return batches.c.number == batch.number, batches.c.owner == self.router, batches.c.epoch == batch.epoch

    async def _locked(self, tx: Transaction, batch: BatchRow) -> RowMapping | None:
        return await tx.first(locked(select(batches).where(*self._ours(batch))))


_OPEN = (BatchState.VALIDATING, BatchState.CANCELLING)


async def _changed(tx: Transaction, row: RowMapping, values: dict[str, object]) -> BatchRow:
    changed = await tx.first(
        update(batches).where(batches.c.number == row["number"]).values(**values).returning(batches)
    )
    assert changed is not None
    return batch_row(changed)
