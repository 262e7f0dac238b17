"""Leases on lines: claim, extend, put back. Fenced: a claim raises the line's epoch, and only its holder may act on it.

Whose turn it is comes from `core.job.share`; the order inside a batch is an index. A lease of this very router never
ends by the clock: it knows what it runs, and a clock that steps must not make it run a line twice.
"""

from collections.abc import Collection, Iterable, Sequence
from itertools import groupby

from sqlalchemy import RowMapping, func, literal, or_, select, update

from router.core.job import BatchState, JobState, Ready, share
from router.jobs.schema import batches, jobs
from router.jobs.store.database import Condition, Query, Transaction
from router.jobs.store.rows import JobRow
from router.jobs.store.shelf import STEP_ROWS, Shelf, is_state, locked, of_lines
from router.jobs.store.wakes import Topic

BATCHES_AT_ONCE = 256
"""Batches looked at in one claim, nearest deadline first."""
RUNNING = is_state(jobs.c.state, JobState.RUNNING)
QUEUED = is_state(jobs.c.state, JobState.QUEUED)
ORDER = (jobs.c.prefix, jobs.c.size.desc(), jobs.c.line)
"""The same order as `core.job.job_order`, and that of an index."""


class Claims(Shelf):
    """Lines under lease."""

    async def claim(self, *, models: Collection[str], limit: int, lease_s: float) -> list[JobRow]:
        """At most `limit` lines for these models, in the order they are due to run, for `lease_s` seconds."""
        if limit < 1 or not models:
            return []
        async with self._db.read() as tx:
            now = await tx.now()
            anything = any(row["lines"] for row in await tx.all(_ready(models, 1, now)))
            if not anything and await tx.first(select(jobs.c.line).where(self._lapsed(now)).limit(1)) is None:
                return []
        async with self._db.write() as tx:
            now = await tx.now()
            await self._release(tx, self._lapsed(now))
            found = {row["number"]: row for row in await tx.all(_ready(models, limit, now)) if row["lines"]}
            ready = [
                Ready(number=row["number"], caller=row["caller"], urgency=row["urgency"], lines=row["lines"])
                for row in found.values()
            ]
            claimed: list[JobRow] = []
            for number, lines in share(ready, await _running(tx), limit, now).items():
                claimed += await self._take(tx, found[number], _next_lines(number, models, lines, now), now + lease_s)
            return claimed

    async def _take(self, tx: Transaction, batch: RowMapping, query: Query, until: float) -> list[JobRow]:
        rows = await tx.all(query)
        lease = {"state": JobState.RUNNING, "owner": self.router, "epoch": jobs.c.epoch + 1, "lease_until": until}
        await tx.run(update(jobs).where(of_lines(batch["number"], (row["line"] for row in rows))).values(**lease))
        return [_job_row(batch, row) for row in rows]

    async def extend(self, held: Collection[JobRow], lease_s: float) -> set[tuple[str, int]]:
        """Keep these lines longer; the keys of those that are not ours any more."""
        lost: set[tuple[str, int]] = set()
        ordered = sorted(held, key=lambda job: (job.batch, job.line))
        for start in range(0, len(ordered), STEP_ROWS):
            async with self._db.write() as tx:
                until = await tx.now() + lease_s
                for number, group in groupby(ordered[start : start + STEP_ROWS], key=lambda job: job.batch):
                    lost |= await self._extend(tx, number, list(group), until)
        return lost

    async def _extend(self, tx: Transaction, number: int, group: list[JobRow], until: float) -> set[tuple[str, int]]:
        mine = of_lines(number, (job.line for job in group)) & RUNNING & (jobs.c.owner == self.router)
        rows = await tx.all(locked(select(jobs.c.line, jobs.c.epoch).where(mine).order_by(jobs.c.line)))
        epochs = {row["line"]: row["epoch"] for row in rows}
        kept = [job.line for job in group if epochs.get(job.line) == job.epoch]
        if kept:
            await tx.run(update(jobs).where(of_lines(number, kept)).values(lease_until=until))
        return {job.key for job in group if epochs.get(job.line) != job.epoch}

    async def put_back(
        self, job: JobRow, *, not_before: float | None = None, charged: bool, node: str | None = None
    ) -> bool:
        """Let a line wait again, until `not_before`; `charged` counts the attempt against it. False: not ours."""
        counted = {"attempts": jobs.c.attempts + 1} if charged else {"returns": jobs.c.returns + 1}
        waits = {"state": JobState.QUEUED, "owner": None, "lease_until": None, "not_before": not_before or 0.0}
        mine = of_lines(job.batch, (job.line,)) & RUNNING & (jobs.c.owner == self.router) & (jobs.c.epoch == job.epoch)
        async with self._db.write() as tx:
            changed = update(jobs).where(mine).values(**waits, **counted, **({"node": node} if node else {}))
            tx.wake(Topic.JOBS)
            return bool(await tx.run(changed))

    def _lapsed(self, now: float) -> Condition:
        return RUNNING & (jobs.c.lease_until < now) & (jobs.c.owner != self.router)

    async def _release(self, tx: Transaction, which: Condition) -> int:
        """Take lines from routers that are lost."""
        waits = {"state": JobState.QUEUED, "owner": None, "lease_until": None, "returns": jobs.c.returns + 1}
        rows = await tx.all(locked(select(jobs.c.batch, jobs.c.line).where(which).limit(STEP_ROWS), skip=True))
        for number, lines in _by_batch(rows):
            await tx.run(update(jobs).where(of_lines(number, lines) & RUNNING).values(**waits))
        if rows:
            tx.wake(Topic.JOBS)
        return len(rows)


def _by_batch(rows: Sequence[RowMapping]) -> Iterable[tuple[int, list[int]]]:
    grouped: dict[int, list[int]] = {}
    for row in rows:
        grouped.setdefault(row["batch"], []).append(row["line"])
    return grouped.items()


def _waiting(models: Collection[str], now: float) -> tuple[Condition, ...]:
    return QUEUED, jobs.c.not_before <= now, jobs.c.model.in_(sorted(models))


def _ready(models: Collection[str], limit: int, now: float) -> Query:
    """Batches in progress with how many of their lines may be claimed, counted no further than `limit`."""
    lines = select(literal(1).label("one")).where(jobs.c.batch == batches.c.number, *_waiting(models, now))
    counted = lines.order_by(*ORDER).limit(limit).correlate(batches).subquery()  # ordered, so that the index is used
    columns = batches.c.number, batches.c.id, batches.c.caller, batches.c.endpoint, batches.c.input
    return (
        select(
            *columns,
            batches.c.urgency,
            batches.c.expires_at,
            select(func.count()).select_from(counted).scalar_subquery().label("lines"),
        )
        .where(
            is_state(batches.c.state, BatchState.IN_PROGRESS),
            batches.c.expires_at > now,
            or_(batches.c.model.is_(None), batches.c.model.in_(sorted(models))),
        )
        .order_by(batches.c.urgency, batches.c.number)
        .limit(BATCHES_AT_ONCE)
    )


def _next_lines(number: int, models: Collection[str], lines: int, now: float) -> Query:
    query = select(jobs).where(jobs.c.batch == number, *_waiting(models, now)).limit(lines)
    return locked(query.order_by(*ORDER), skip=True)


async def _running(tx: Transaction) -> dict[str, int]:
    """Lines running for each caller."""
    query = select(batches.c.caller, func.count().label("lines")).join(jobs, jobs.c.batch == batches.c.number)
    return {row["caller"]: row["lines"] for row in await tx.all(query.where(RUNNING).group_by(batches.c.caller))}


def _job_row(batch: RowMapping, row: RowMapping) -> JobRow:
    plain = {name: row[name] for name in JobRow.__struct_fields__ if name in row}
    plain |= {name: batch[name] for name in ("caller", "endpoint", "input", "expires_at")}
    return JobRow(**plain | {"batch_id": batch["id"], "epoch": row["epoch"] + 1})
