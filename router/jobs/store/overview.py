"""What an operator sees of batches, whoever has them: how each stands, and the lines of one."""

from collections.abc import Sequence

import msgspec
from sqlalchemy import RowMapping, func, not_, select

from router.core.job import BatchState, JobState
from router.jobs.schema import batches, jobs, results
from router.jobs.store.batches import ACTIVE, LEFT
from router.jobs.store.database import Transaction
from router.jobs.store.shelf import Shelf, is_state, known

SHOWN_LINES = 20
_COLUMNS = (
    "id", "caller", "endpoint", "model", "state", "priority", "waiting", "created_at", "expires_at", "in_progress_at",
    "total", "completed", "failed", "stopped",
)  # fmt: skip


class Progress(msgspec.Struct, frozen=True, kw_only=True):
    """How one batch stands. `left` lines have no end yet, `running` of them run at any router. `model` None: several.

    `ends_at` is when all have one if the routers go on as in the last minute (None while nothing moves). Unix seconds.
    """

    id: str
    caller: str
    endpoint: str
    model: str | None
    state: str
    priority: int
    waiting: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    total: int
    completed: int
    failed: int
    stopped: int
    left: int
    running: int
    ends_at: float | None


class Overview(msgspec.Struct, frozen=True, kw_only=True):
    """Batches that are not final, in the order they are served, then the newest final ones. `more` did not fit."""

    batches: Sequence[Progress] = ()
    more: int = 0
    done_a_minute: int = 0


class LineShown(msgspec.Struct, frozen=True, kw_only=True):
    """A line that runs. `attempts` were charged to it, `returns` (take-backs and the like) were not."""

    line: int
    node: str | None
    attempts: int
    returns: int


class Lines(msgspec.Struct, frozen=True, kw_only=True):
    """The lines of one batch: by state, the first that run, and why lines failed (`code`, how many)."""

    states: dict[str, int]
    returns: int
    attempts: int
    running: Sequence[LineShown]
    failures: Sequence[tuple[str, int]]


class Overviews(Shelf):
    """What an operator sees of batches."""

    async def overview(self, limit: int = 500, final: int = 20) -> Overview:
        """At most `limit` batches that are not final and the newest `final` ones that are."""
        columns = [batches.c[name] for name in _COLUMNS]
        going = select(*columns, LEFT.label("left")).where(ACTIVE)
        over = select(*columns, LEFT.label("left")).where(not_(ACTIVE)).order_by(batches.c.number.desc())
        running = select(jobs.c.batch, func.count().label("lines")).where(is_state(jobs.c.state, JobState.RUNNING))
        names = select(batches.c.number, batches.c.id)
        async with self._db.read() as tx:
            rows = await tx.all(going.order_by(batches.c.urgency, batches.c.number).limit(limit))
            ended = await tx.all(over.limit(final))
            active = await tx.scalar(select(func.count()).select_from(batches).where(ACTIVE))
            counts = {row["batch"]: row["lines"] for row in await tx.all(running.group_by(jobs.c.batch))}
            known_as = await tx.all(names.where(batches.c.number.in_(list(counts)[:limit]))) if counts else ()
            pace, now = await self._pace(tx), await tx.now()
        runs = {row["id"]: counts[row["number"]] for row in known_as}
        ahead, shown = 0, []
        for row in rows:
            ahead += int(row["left"])
            moves = pace and row["state"] == BatchState.IN_PROGRESS
            shown.append(_progress(row, runs.get(row["id"], 0), now + ahead * 60.0 / pace if moves else None))
        shown += [_progress(row, 0, None) for row in ended]
        return Overview(batches=shown, more=max(0, active - len(rows)), done_a_minute=pace)

    async def caller_of(self, batch_id: str) -> str | None:
        """Whose batch it is; None if there is none."""
        if not known(batch_id):
            return None
        async with self._db.read() as tx:
            row = await tx.first(select(batches.c.caller).where(batches.c.id == batch_id))
        return None if row is None else str(row["caller"])

    async def standing_of(self, batch_id: str) -> Lines | None:
        """The lines of one batch, whoever has it; None if there is none."""
        if not known(batch_id):
            return None
        async with self._db.read() as tx:
            found = await tx.first(select(batches.c.number).where(batches.c.id == batch_id))
            return None if found is None else await _lines(tx, found["number"])


async def _lines(tx: Transaction, number: int) -> Lines:
    mine = jobs.c.batch == number
    sums = func.coalesce(func.sum(jobs.c.attempts), 0), func.coalesce(func.sum(jobs.c.returns), 0)
    counted = select(jobs.c.state, func.count().label("lines"), sums[0].label("attempts"), sums[1].label("returns"))
    states = await tx.all(counted.where(mine).group_by(jobs.c.state))
    running = select(jobs.c.line, jobs.c.node, jobs.c.attempts, jobs.c.returns)
    begun = await tx.all(
        running.where(mine, is_state(jobs.c.state, JobState.RUNNING)).order_by(jobs.c.line).limit(SHOWN_LINES)
    )
    bad = (results.c.batch == number) & (results.c.status.is_(None) | not_(results.c.status.between(200, 299)))
    causes = select(results.c.error_code, results.c.status, func.count().label("lines")).where(bad)
    failures = await tx.all(causes.group_by(results.c.error_code, results.c.status).limit(SHOWN_LINES))
    return Lines(
        states={str(row["state"]): row["lines"] for row in states},
        attempts=sum(int(row["attempts"]) for row in states),
        returns=sum(int(row["returns"]) for row in states),
        running=[LineShown(**row) for row in begun],
        failures=sorted(
            ((row["error_code"] or f"status {row['status']}", row["lines"]) for row in failures),
            key=lambda pair: -pair[1],
        ),
    )


def _progress(row: RowMapping, running: int, ends_at: float | None) -> Progress:
    return Progress(**row, running=running, ends_at=ends_at)
