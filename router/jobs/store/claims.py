"""Leases on lines: claim, extend, put back. Fenced: a claim raises the line's epoch, and only its holder may act on it.

Whose turn it is comes from `core.job.share`; the order inside a batch is an index. A lease of this very router never
ends by the clock: it knows what it runs, and a clock that steps must not make it run a line twice.
"""

from collections.abc import Collection, Iterable, Mapping, Sequence
from itertools import groupby
from typing import Any

from sqlalchemy import BigInteger, Double, RowMapping, Text, bindparam, func, literal, or_, select, update

from router.core.job import RETRY_S, BatchState, JobState, Ready, share
from router.jobs.schema import batches, jobs
from router.jobs.store.database import Condition, Query, Row, Transaction
from router.jobs.store.rows import JobRow
from router.jobs.store.shelf import OF_BATCH, STEP_ROWS, THESE, Shelf, is_state, locked, of_lines
from router.jobs.store.wakes import Topic

BATCHES_AT_ONCE = 256
"""Batches looked at in one claim, nearest deadline first."""
RUNNING = is_state(jobs.c.state, JobState.RUNNING)
QUEUED = is_state(jobs.c.state, JobState.QUEUED)
ORDER = (jobs.c.prefix, jobs.c.size.desc(), jobs.c.line)
"""The same order as `core.job.job_order`, and that of an index."""

OF_ROW = tuple(name for name in JobRow.__struct_fields__ if name in jobs.c)
"""What a claimed line has of its own; the rest is its batch's."""
_NOW = bindparam("now", type_=Double)
_ME = bindparam("me", type_=Text)
_UNTIL = bindparam("until", type_=Double)
_AT_MOST = bindparam("at_most", type_=BigInteger)
_MODELS = bindparam("models", type_=Text, expanding=True)
_DUE = or_(jobs.c.not_before <= _NOW, jobs.c.not_before > _NOW + RETRY_S[1])
"""A wait longer than any there is was begun before the clock was set back."""
_WAITING = QUEUED & _DUE & jobs.c.model.in_(_MODELS)


def _ready() -> Query:
    """Batches in progress with how many of their lines may be claimed, counted no further than `at_most`."""
    lines = select(literal(1).label("one")).where(jobs.c.batch == batches.c.number, _WAITING)
    counted = lines.order_by(*ORDER).limit(_AT_MOST).correlate(batches).subquery()  # ordered: so the index is used
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
            batches.c.expires_at > _NOW,
            or_(batches.c.model.is_(None), batches.c.model.in_(_MODELS)),
        )
        .order_by(batches.c.urgency, batches.c.number)
        .limit(BATCHES_AT_ONCE)
    )


def _held_by(owner: Condition) -> Query:
    """Running lines of some routers, a step of them, but those that somebody has locked."""
    return locked(select(jobs.c.batch, jobs.c.line).where(RUNNING, owner).limit(STEP_ROWS), skip=True)


READY = _ready()
_LINE = [(jobs.c.epoch + 1).label("epoch") if name == "epoch" else jobs.c[name] for name in OF_ROW]
NEXT = locked(select(*_LINE).where(jobs.c.batch == OF_BATCH, _WAITING).order_by(*ORDER).limit(_AT_MOST), skip=True)
"""Lines as they will be once they are claimed."""
LEASE = update(jobs).where(THESE).values(state=JobState.RUNNING, owner=_ME, epoch=jobs.c.epoch + 1, lease_until=_UNTIL)
CALLERS = (
    select(batches.c.caller, func.count().label("lines"))
    .join(jobs, jobs.c.batch == batches.c.number)
    .where(RUNNING)
    .group_by(batches.c.caller)
)
"""Lines running for each caller."""
LAPSED = _held_by((jobs.c.lease_until < _NOW) & (jobs.c.owner != _ME))
ANY_LAPSED = select(jobs.c.line).where(RUNNING, jobs.c.lease_until < _NOW, jobs.c.owner != _ME).limit(1)
HELD_BY = _held_by(jobs.c.owner == _ME)
MINE = locked(select(jobs.c.line, jobs.c.epoch).where(THESE, RUNNING, jobs.c.owner == _ME).order_by(jobs.c.line))
EXTEND = update(jobs).where(THESE).values(lease_until=_UNTIL)


class Claims(Shelf):
    """Lines under lease."""

    async def claim(self, *, models: Collection[str], limit: int, lease_s: float) -> list[JobRow]:
        """At most `limit` lines for these models, in the order they are due to run, for `lease_s` seconds."""
        if limit < 1 or not models:
            return []
        asked: dict[str, Any] = {"models": sorted(models), "me": self.router}
        async with self._db.read() as tx:
            asked |= {"now": await tx.now(), "at_most": 1}
            anything = any(row["lines"] for row in await tx.all(READY, asked))
            if not anything and await tx.first(ANY_LAPSED, asked) is None:
                return []
        async with self._db.write() as tx:
            asked |= {"now": await tx.now(), "until": await tx.now() + lease_s}
            await self._release(tx, LAPSED, asked)
            found = {row["number"]: row for row in await tx.all(READY, asked | {"at_most": limit}) if row["lines"]}
            ready = [
                Ready(number=row["number"], caller=row["caller"], urgency=row["urgency"], lines=row["lines"])
                for row in found.values()
            ]
            callers = {row["caller"]: row["lines"] for row in await tx.all(CALLERS)}
            claimed: list[JobRow] = []
            for number, lines in share(ready, callers, limit, asked["now"]).items():
                claimed += await _take(tx, found[number], asked | {"of_batch": number, "at_most": lines})
            return claimed

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
        asked = {"of_batch": number, "of_lines": [job.line for job in group], "me": self.router}
        epochs = {row["line"]: row["epoch"] for row in await tx.all(MINE, asked)}
        kept = [job.line for job in group if epochs.get(job.line) == job.epoch]
        if kept:
            await tx.run(EXTEND, {"of_batch": number, "of_lines": kept, "until": until})
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

    async def _release(self, tx: Transaction, which: Query, asked: Mapping[str, Any]) -> int:
        """Take lines from routers that are lost."""
        waits = {"state": JobState.QUEUED, "owner": None, "lease_until": None, "returns": jobs.c.returns + 1}
        rows = await tx.all(which, asked)
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


async def _take(tx: Transaction, batch: RowMapping, asked: Mapping[str, Any]) -> list[JobRow]:
    rows = await tx.rows(NEXT, asked)
    if rows:
        await tx.run(LEASE, {**asked, "of_lines": [row.line for row in rows]})
    return [_job_row(batch, row) for row in rows]


def _job_row(batch: RowMapping, row: Row) -> JobRow:
    return JobRow(
        batch_id=batch["id"],
        caller=batch["caller"],
        endpoint=batch["endpoint"],
        input=batch["input"],
        expires_at=batch["expires_at"],
        **dict(zip(OF_ROW, row, strict=True)),
    )
