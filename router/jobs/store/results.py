"""Results: the end of a line, its batch's counters and tokens, in one transaction.

Lines that end while a commit is under way share the next one: the commit, the disk's slowest act, is not paid by line.
"""

from collections.abc import Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import BigInteger, bindparam, case, insert, select, update

from router.core.job import JobState
from router.jobs.schema import batches, jobs, results
from router.jobs.store.database import Database, Transaction
from router.jobs.store.rows import JobRow, NewResult
from router.jobs.store.shelf import THESE, Shelf, locked
from router.jobs.store.together import Together

SHARED_LINES = 500
"""Most lines one commit is shared by."""
SHARED_BYTES = 8 * 2**20
"""Most bytes of results in one commit, beyond the first line."""

Ending = tuple[JobRow, NewResult]

_BATCHES = bindparam("of_batches", type_=BigInteger, expanding=True)
LOCK = locked(select(batches.c.number).where(batches.c.number.in_(_BATCHES)).order_by(batches.c.number))
THERE = locked(select(jobs.c.line, jobs.c.state, jobs.c.owner, jobs.c.epoch).where(THESE).order_by(jobs.c.line))
END = update(jobs).where(THESE).values(state=bindparam("ended"), owner=None, lease_until=None)
KEEP = insert(results)


class Results(Shelf):
    """Lines that ended."""

    def __init__(self, database: Database, router: str, name: str, stale_s: float) -> None:
        super().__init__(database, router, name, stale_s)
        self._ends = Together(self._keep, _bytes, most=SHARED_LINES, limit=SHARED_BYTES)

    async def finish(self, job: JobRow, result: NewResult) -> bool:
        """Write how a line ended. True once it is kept, also when this very claim kept it before.

        False if the line is not ours any more: the result is dropped.
        """
        return await self._ends.ask((job, result))

    async def _keep(self, endings: Sequence[Ending]) -> list[bool]:
        async with self._db.write(grows=True) as tx:
            kept = await self._write(tx, endings)
            now = await tx.now()
        self._finished.append((now, len(kept)))
        return [(job.key, job.epoch) in kept for job, _ in endings]

    async def _write(self, tx: Transaction, endings: Sequence[Ending]) -> set[tuple[tuple[str, int], int]]:
        """Keep what is ours to keep; which lines are kept now, by key and epoch."""
        ordered = sorted(endings, key=lambda ending: (ending[0].batch, ending[0].line))
        await tx.all(LOCK, {"of_batches": sorted({job.batch for job, _ in ordered})})
        kept: set[tuple[tuple[str, int], int]] = set()
        for number, group in groupby(ordered, key=lambda ending: ending[0].batch):
            kept |= await self._write_batch(tx, number, list(group))
        return kept

    async def _write_batch(
        self, tx: Transaction, number: int, group: Sequence[Ending]
    ) -> set[tuple[tuple[str, int], int]]:
        asked = {"of_batch": number, "of_lines": [job.line for job, _ in group]}
        there = {row.line: row for row in await tx.rows(THERE, asked)}
        kept: set[tuple[tuple[str, int], int]] = set()
        new: dict[int, Ending] = {}
        for job, result in group:
            row = there.get(job.line)
            if row is None or row.epoch != job.epoch:
                continue
            if row.state == JobState.RUNNING and row.owner == self.router:
                new.setdefault(job.line, (job, result))
            elif row.state not in (JobState.DONE, JobState.FAILED):
                continue
            kept.add((job.key, job.epoch))
        if new:
            await self._insert(tx, number, list(new.values()))
        return kept

    async def _insert(self, tx: Transaction, number: int, endings: Sequence[Ending]) -> None:
        now = await tx.now()
        for state, done in ((JobState.DONE, True), (JobState.FAILED, False)):
            lines = [job.line for job, result in endings if result.done is done]
            if lines:
                await tx.run(END, {"of_batch": number, "of_lines": lines, "ended": state})
        await tx.run(KEEP, [_result(job, result, now) for job, result in endings])
        await tx.run(update(batches).where(batches.c.number == number).values(**_counted(endings)))


def _bytes(ending: Ending) -> int:
    return len(ending[1].body or b"")


def _result(job: JobRow, result: NewResult, now: float) -> dict[str, Any]:
    body = result.body
    if body is not None and (b"\n" in body or b"\r" in body):
        body = body.replace(b"\n", b" ").replace(b"\r", b" ")  # in valid JSON these stand between values only
    return {
        "batch": job.batch,
        "line": job.line,
        "status": result.status,
        "request_id": result.request_id,
        "body": body,
        "bytes": len(body or b""),
        "error_code": result.error_code,
        "error_message": result.error_message,
        "created_at": now,
    }


def _counted(endings: Sequence[Ending]) -> dict[str, Any]:
    """What a batch's counters become."""
    done = sum(result.done for _, result in endings)
    tokens = [result.tokens for _, result in endings]
    grown = {
        "completed": done,
        "failed": len(endings) - done,
        "input_tokens": sum(count.input for count in tokens),
        "output_tokens": sum(count.output for count in tokens),
        "cached_tokens": sum(count.cached for count in tokens),
        "reasoning_tokens": sum(count.reasoning for count in tokens),
    }
    values: dict[str, Any] = {name: batches.c[name] + more for name, more in grown.items() if more}
    size = sum(job.size for job, _ in endings)
    left = batches.c.size_left - size
    return values | {"size_left": case((left > 0, left), else_=0), "waiting": None}
