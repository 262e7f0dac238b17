"""Upkeep: deadlines, cancels, result files, what is past its time. In small steps, each safe to do twice.

One read looks for one thing to do for every chore; each that found one does it in one short transaction, which checks
again: another router may have been faster. Then it looks again, so no chore keeps the others waiting.
"""

from collections.abc import Awaitable, Callable

from sqlalchemy import delete, exists, func, not_, select, text, update

from router.core.job import BATCH_FINAL, BatchState, JobState
from router.jobs.schema import batches, chunks, deliveries, files, jobs, results, routers, uploads
from router.jobs.store.batches import ACTIVE, LEFT, count_stopped, stop_running
from router.jobs.store.database import Query
from router.jobs.store.endings import ENDING, UNFINISHED, write_page
from router.jobs.store.rows import Event, Swept
from router.jobs.store.shelf import STEP_ROWS, Shelf, is_state, locked

CHUNKS_AT_ONCE = 32
"""Rows of 1 MiB deleted in one transaction."""
DELIVERIES_S = 7 * 86400
"""Deliveries are kept this long after their end."""

IN_PROGRESS = is_state(batches.c.state, BatchState.IN_PROGRESS)
ANSWERED = LEFT == 0
FINAL = is_state(batches.c.state, *sorted(BATCH_FINAL))
DELETING = is_state(files.c.state, "deleting")
PENDING = is_state(uploads.c.state, "pending")
UNCLEARED = text("NOT cleared")
READ = exists().where(batches.c.input == files.c.number, ACTIVE)
"""Files in which a batch still reads its lines."""


class _Tally:
    """What one sweep did so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.expired = self.cancelled = self.files = self.rows = 0


Chore = tuple[Query, Callable[[int, Query, _Tally], Awaitable[None]]]
"""A query for the numbers of what is due, and what to do with one; it gets the query too, for more of the same."""


class Sweep(Shelf):
    """What must happen without anybody asking."""

    async def sweep(self, *, steps: int = 20, keep_batches_s: int | None = None) -> Swept:
        """Do at most `steps` rounds of what is due. `keep_batches_s`: forget batches that ended longer ago."""
        tally = _Tally()
        more = await self._db.tidy()
        for step in range(steps):
            due = await self._look(keep_batches_s)
            if not due:
                break
            for number, (query, do) in due:
                await do(number, query, tally)
            more = more or step == steps - 1
        return Swept(
            events=tuple(tally.events),
            lines_expired=tally.expired,
            lines_cancelled=tally.cancelled,
            files_deleted=tally.files,
            rows_deleted=tally.rows,
            more=more,
        )

    async def _look(self, keep_batches_s: int | None) -> list[tuple[int, Chore]]:
        """The chores that have something to do, each with the number of what."""
        async with self._db.read() as tx:
            chores = self._chores(await tx.now(), keep_batches_s)
            (found,) = await tx.all(select(*(query.limit(1).scalar_subquery() for query, _ in chores)))
        return [(number, chore) for number, chore in zip(found.values(), chores, strict=True) if number is not None]

    def _chores(self, now: float, keep_batches_s: int | None) -> list[Chore]:
        batch, file = select(batches.c.number), select(files.c.number)
        writing = (is_state(files.c.state, "writing"), files.c.writer.is_not(None))
        lost = not_(exists().where(routers.c.id == files.c.writer)) | (
            (files.c.writer == self.router) & files.c.number.not_in(sorted(self._in_hand))
        )
        ended = select(uploads.c.number).where(uploads.c.number == files.c.upload, not_(PENDING)).correlate(files)
        chores: list[Chore] = [
            (batch.where(IN_PROGRESS, batches.c.expires_at <= now), self._close_window),
            (batch.where(IN_PROGRESS, ANSWERED), self._close_answered),
            (batch.where(ENDING, UNFINISHED), self._stop_lines),
            (batch.where(ENDING, not_(UNFINISHED)).order_by(batches.c.expires_at), self._write_files),
            (batch.where(UNCLEARED, FINAL).order_by(batches.c.number), self._clear),
            (file.where(is_state(files.c.state, "ready"), files.c.expires_at <= now), self._give_up),
            (file.where(is_state(files.c.state, "part"), ended.exists()), self._give_up),
            (file.where(*writing, lost), self._give_up),
            (select(uploads.c.number).where(PENDING, uploads.c.expires_at <= now), self._expire_uploads),
            (file.where(DELETING, not_(READ)).order_by(files.c.number), self._drop_chunks),
            (select(deliveries.c.number).where(deliveries.c.ended_at <= now - DELIVERIES_S), self._drop_deliveries),
        ]
        if keep_batches_s is not None:
            stamp = func.coalesce(*(batches.c[f"{state}_at"] for state in sorted(BATCH_FINAL)))
            chores.append((batch.where(batches.c.cleared, stamp <= now - keep_batches_s), self._forget))
        return chores

    async def _close_window(self, number: int, _: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            now = int(await tx.now())
            late = (batches.c.number == number, IN_PROGRESS, batches.c.expires_at <= now)
            values = {"state": BatchState.FINALIZING, "finalizing_at": now, "late": True, "size_left": 0}
            if await tx.run(update(batches).where(*late).values(**values)):
                tally.expired += await stop_running(tx, number, JobState.EXPIRED)

    async def _close_answered(self, number: int, _: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            values = {"state": BatchState.FINALIZING, "finalizing_at": int(await tx.now()), "size_left": 0}
            answered = (batches.c.number == number, IN_PROGRESS, ANSWERED)
            await tx.run(update(batches).where(*answered).values(**values))

    async def _stop_lines(self, number: int, _: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            batch = await tx.first(locked(select(batches).where(batches.c.number == number, ENDING), skip=True))
            if batch is None:
                return
            cancelled = batch["state"] == BatchState.CANCELLING
            state = JobState.CANCELLED if cancelled else JobState.EXPIRED
            stopped = await stop_running(tx, number, state)
            queued = (jobs.c.batch == number, is_state(jobs.c.state, JobState.QUEUED))
            step = select(jobs.c.line).where(*queued).limit(STEP_ROWS)
            ended = update(jobs).where(jobs.c.batch == number, jobs.c.line.in_(step)).values(state=state)
            waited = await tx.run(ended)
            await count_stopped(tx, number, waited)
            stopped += waited
        tally.cancelled += stopped if cancelled else 0
        tally.expired += 0 if cancelled else stopped

    async def _write_files(self, number: int, _: Query, tally: _Tally) -> None:
        async with self._db.write(grows=True) as tx:
            event = await write_page(self._db, tx, number)
        if event is not None:
            tally.events.append(event)

    async def _clear(self, number: int, _: Query, tally: _Tally) -> None:
        """The files and the counters say it all: lines and results of a final batch go."""
        async with self._db.write() as tx:
            for table in (results, jobs):
                step = select(table.c.line).where(table.c.batch == number).order_by(table.c.line).limit(STEP_ROWS)
                gone = await tx.run(delete(table).where(table.c.batch == number, table.c.line.in_(step)))
                tally.rows += gone
                if gone:
                    return
            await tx.run(update(batches).where(batches.c.number == number).values(cleared=True))

    async def _give_up(self, _: int, query: Query, tally: _Tally) -> None:
        """Files nobody is to see any more."""
        async with self._db.write() as tx:
            step = query.limit(STEP_ROWS).scalar_subquery()
            await tx.run(update(files).where(files.c.number.in_(step)).values(state="deleting", writer=None))

    async def _expire_uploads(self, _: int, query: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            step = query.limit(STEP_ROWS).scalar_subquery()
            await tx.run(update(uploads).where(uploads.c.number.in_(step), PENDING).values(state="expired"))

    async def _drop_chunks(self, number: int, _: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            mine = chunks.c.file == number
            step = select(chunks.c.start).where(mine).order_by(chunks.c.start).limit(CHUNKS_AT_ONCE)
            gone = await tx.run(delete(chunks).where(mine, chunks.c.start.in_(step)))
            tally.rows += gone
            if gone < CHUNKS_AT_ONCE:
                tally.files += await tx.run(delete(files).where(files.c.number == number, DELETING))

    async def _drop_deliveries(self, _: int, query: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            step = query.limit(STEP_ROWS).scalar_subquery()
            tally.rows += await tx.run(delete(deliveries).where(deliveries.c.number.in_(step)))

    async def _forget(self, _: int, query: Query, tally: _Tally) -> None:
        async with self._db.write() as tx:
            step = query.limit(STEP_ROWS).scalar_subquery()
            tally.rows += await tx.run(delete(batches).where(batches.c.number.in_(step)))
