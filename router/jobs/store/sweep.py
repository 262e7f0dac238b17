"""Upkeep: deadlines, cancels, result files, what is past its time. In small steps, each safe to do twice.

A chore looks for one thing to do with a read, and does it in one short transaction that checks again: another router
may have been faster. A sweep goes round the chores that found something, so none keeps the others waiting; what one has
done may be work for another, so a sweep that did anything says that there may be more.
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
DELETING = is_state(files.c.state, "deleting")
UNCLEARED = text("NOT cleared")


class _Tally:
    """What one sweep did so far."""

    def __init__(self) -> None:
        self.events: list[Event] = []
        self.expired = self.cancelled = self.files = self.rows = 0


class Sweep(Shelf):
    """What must happen without anybody asking."""

    async def sweep(self, *, steps: int = 20, keep_batches_s: int | None = None) -> Swept:
        """Do at most `steps` rounds of what is due. `keep_batches_s`: forget batches that ended longer ago."""

        async def forget(tally: _Tally) -> bool:
            return await self._forget(tally, keep_batches_s)

        chores: list[Callable[[_Tally], Awaitable[bool]]] = [
            self._close_window,
            self._close_answered,
            self._stop_lines,
            self._write_files,
            self._clear,
            self._expire_files,
            self._expire_uploads,
            self._drop_parts,
            self._drop_orphans,
            self._drop_chunks,
            self._drop_deliveries,
            forget,
        ]
        tally = _Tally()
        more = await self._db.tidy()
        for _ in range(steps):
            chores = [chore for chore in chores if await chore(tally)]
            if not chores:
                break
            more = True
        return Swept(
            events=tuple(tally.events),
            lines_expired=tally.expired,
            lines_cancelled=tally.cancelled,
            files_deleted=tally.files,
            rows_deleted=tally.rows,
            more=more,
        )

    async def _due(self, query: Query) -> int | None:
        """The first number a query gives."""
        async with self._db.read() as tx:
            number: int | None = await tx.scalar(query.limit(1))
            return number

    async def _close_window(self, tally: _Tally) -> bool:
        async with self._db.read() as tx:
            late = (IN_PROGRESS, batches.c.expires_at <= await tx.now())
            number = await tx.scalar(select(batches.c.number).where(*late).order_by(batches.c.expires_at).limit(1))
        if number is None:
            return False
        async with self._db.write() as tx:
            values = {
                "state": BatchState.FINALIZING,
                "finalizing_at": int(await tx.now()),
                "late": True,
                "size_left": 0,
            }
            if await tx.run(update(batches).where(batches.c.number == number, *late).values(**values)):
                tally.expired += await stop_running(tx, number, JobState.EXPIRED)
        return True

    async def _close_answered(self, tally: _Tally) -> bool:
        answered = (IN_PROGRESS, LEFT == 0)
        number = await self._due(select(batches.c.number).where(*answered))
        if number is None:
            return False
        async with self._db.write() as tx:
            values = {"state": BatchState.FINALIZING, "finalizing_at": int(await tx.now()), "size_left": 0}
            await tx.run(update(batches).where(batches.c.number == number, *answered).values(**values))
        return True

    async def _stop_lines(self, tally: _Tally) -> bool:
        number = await self._due(select(batches.c.number).where(ENDING, UNFINISHED))
        if number is None:
            return False
        async with self._db.write() as tx:
            batch = await tx.first(locked(select(batches).where(batches.c.number == number, ENDING), skip=True))
            if batch is None:
                return False
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
        return True

    async def _write_files(self, tally: _Tally) -> bool:
        ready = select(batches.c.number).where(ENDING, not_(UNFINISHED)).order_by(batches.c.expires_at)
        number = await self._due(ready)
        if number is None:
            return False
        async with self._db.write(grows=True) as tx:
            event = await write_page(self._db, tx, number)
        if event is not None:
            tally.events.append(event)
        return True

    async def _clear(self, tally: _Tally) -> bool:
        """The files and the counters say it all: lines and results of a final batch go."""
        ended = is_state(batches.c.state, *sorted(BATCH_FINAL))
        number = await self._due(select(batches.c.number).where(UNCLEARED, ended).order_by(batches.c.number))
        if number is None:
            return False
        async with self._db.write() as tx:
            for table in (results, jobs):
                step = select(table.c.line).where(table.c.batch == number).order_by(table.c.line).limit(STEP_ROWS)
                gone = await tx.run(delete(table).where(table.c.batch == number, table.c.line.in_(step)))
                tally.rows += gone
                if gone:
                    return True
            await tx.run(update(batches).where(batches.c.number == number).values(cleared=True))
        return True

    async def _expire_files(self, tally: _Tally) -> bool:
        async with self._db.read() as tx:
            past = (is_state(files.c.state, "ready"), files.c.expires_at <= await tx.now())
        return await self._give_up(select(files.c.number).where(*past))

    async def _drop_parts(self, tally: _Tally) -> bool:
        ended = select(files.c.number).join(uploads, files.c.upload == uploads.c.number)
        return await self._give_up(ended.where(is_state(files.c.state, "part"), uploads.c.state != "pending"))

    async def _drop_orphans(self, tally: _Tally) -> bool:
        """Half-written files whose writer is gone, or which this router does not write any more."""
        lost = ~exists().where(routers.c.id == files.c.writer)
        mine = (files.c.writer == self.router) & files.c.number.not_in(sorted(self._in_hand))
        half = (is_state(files.c.state, "writing"), files.c.writer.is_not(None), lost | mine)
        return await self._give_up(select(files.c.number).where(*half))

    async def _give_up(self, query: Query) -> bool:
        if await self._due(query) is None:
            return False
        async with self._db.write() as tx:
            step = query.limit(STEP_ROWS).scalar_subquery()
            await tx.run(update(files).where(files.c.number.in_(step)).values(state="deleting", writer=None))
        return True

    async def _expire_uploads(self, tally: _Tally) -> bool:
        async with self._db.read() as tx:
            past = (is_state(uploads.c.state, "pending"), uploads.c.expires_at <= await tx.now())
        if await self._due(select(uploads.c.number).where(*past)) is None:
            return False
        async with self._db.write() as tx:
            await tx.run(update(uploads).where(*past).values(state="expired"))
        return True

    async def _drop_chunks(self, tally: _Tally) -> bool:
        read = exists().where(batches.c.input == files.c.number, ACTIVE)
        free = select(files.c.number).where(DELETING, ~read).order_by(files.c.number)
        number = await self._due(free)
        if number is None:
            return False
        async with self._db.write() as tx:
            mine = chunks.c.file == number
            step = select(chunks.c.start).where(mine).order_by(chunks.c.start).limit(CHUNKS_AT_ONCE)
            gone = await tx.run(delete(chunks).where(mine, chunks.c.start.in_(step)))
            tally.rows += gone
            if gone < CHUNKS_AT_ONCE:
                tally.files += await tx.run(delete(files).where(files.c.number == number, DELETING))
        return True

    async def _drop_deliveries(self, tally: _Tally) -> bool:
        async with self._db.read() as tx:
            past = deliveries.c.ended_at <= await tx.now() - DELIVERIES_S
            if await tx.first(select(deliveries.c.number).where(past).limit(1)) is None:
                return False
        async with self._db.write() as tx:
            step = select(deliveries.c.number).where(past).limit(STEP_ROWS).scalar_subquery()
            tally.rows += await tx.run(delete(deliveries).where(deliveries.c.number.in_(step)))
        return True

    async def _forget(self, tally: _Tally, keep_s: int | None) -> bool:
        if keep_s is None:
            return False
        stamps = [batches.c[f"{state}_at"] for state in sorted(BATCH_FINAL)]
        async with self._db.read() as tx:
            past = (batches.c.cleared, func.coalesce(*stamps) <= await tx.now() - keep_s)
            if await tx.first(select(batches.c.number).where(*past).limit(1)) is None:
                return False
        async with self._db.write() as tx:
            step = select(batches.c.number).where(*past).limit(STEP_ROWS).scalar_subquery()
            tally.rows += await tx.run(delete(batches).where(batches.c.number.in_(step)))
        return True
