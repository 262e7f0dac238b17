"""Upkeep: deadlines, cancels, result files, what is past its time. In small steps, each safe to do twice.

One read looks for one thing to do for every chore; each that found one does it in one short transaction, which checks
again: another router may have been faster. Then it looks again, so no chore keeps the others waiting.
"""

from collections.abc import Awaitable, Callable
from functools import partial

from sqlalchemy import Double, Table, Text, bindparam, delete, exists, func, not_, select, text, update

from router.core.job import BATCH_FINAL, BatchState, JobState
from router.jobs.schema import batches, chunks, deliveries, files, jobs, results, routers, uploads
from router.jobs.store.batches import ACTIVE, LEFT, count_stopped, stop_running
from router.jobs.store.database import Query
from router.jobs.store.endings import ENDING, UNFINISHED, write_page
from router.jobs.store.rows import Event, Swept
from router.jobs.store.shelf import STEP_ROWS, Shelf, is_state, locked

CHUNKS_AT_ONCE = 32
"""Rows of 1 MiB deleted in one transaction."""
DELIVERIES_S = UPLOADS_S = 7 * 86400
"""Deliveries are kept this long after their end, and so are uploads that are over, when nothing refers to them."""

IN_PROGRESS = is_state(batches.c.state, BatchState.IN_PROGRESS)
ANSWERED = LEFT == 0
DELETING = is_state(files.c.state, "deleting")
PENDING = is_state(uploads.c.state, "pending")
UNCLEARED = text("NOT cleared")
READ = exists().where(batches.c.input == files.c.number, ACTIVE)
"""Files in which a batch still reads its lines."""


_NOW = bindparam("now", type_=Double)
_WRITING = is_state(files.c.state, "writing") & files.c.writer.is_not(None)
_LOST = not_(exists().where(routers.c.id == files.c.writer))
_OURS = (files.c.writer == bindparam("me", type_=Text)) & files.c.number.not_in(bindparam("in_hand", expanding=True))
_ENDED = exists().where(uploads.c.number == files.c.upload, not_(PENDING))
_IN_PARTS = exists().where(files.c.upload == uploads.c.number)
_TOLD = not_(exists().where(deliveries.c.batch_id == batches.c.id, deliveries.c.due_at.is_not(None)))
_STAMP = func.coalesce(*(batches.c[f"{state}_at"] for state in sorted(BATCH_FINAL)))

DUE: dict[str, Query] = {
    "window": select(batches.c.number).where(IN_PROGRESS, batches.c.expires_at <= _NOW),
    "answered": select(batches.c.number).where(IN_PROGRESS, ANSWERED),
    "stopped": select(batches.c.number).where(ENDING, UNFINISHED),
    "ending": select(batches.c.number).where(ENDING, not_(UNFINISHED)).order_by(batches.c.expires_at),
    "clear": select(batches.c.number).where(UNCLEARED, _STAMP.is_not(None)),
    "expired": select(files.c.number).where(is_state(files.c.state, "ready"), files.c.expires_at <= _NOW),
    "parts": select(files.c.number).where(is_state(files.c.state, "part"), _ENDED),
    "orphans": select(files.c.number).where(_WRITING, _LOST | _OURS),
    "uploads": select(uploads.c.number).where(PENDING, uploads.c.expires_at <= _NOW),
    "over": select(uploads.c.number).where(not_(PENDING), uploads.c.expires_at <= _NOW - UPLOADS_S, not_(_IN_PARTS)),
    "chunks": select(files.c.number).where(DELETING, not_(READ)).order_by(files.c.number),
    "deliveries": select(deliveries.c.number).where(deliveries.c.ended_at <= _NOW - DELIVERIES_S),
    "forgotten": select(batches.c.number).where(
        batches.c.cleared, bindparam("forget_before", type_=Double) >= _STAMP, _TOLD
    ),
}
"""What is due, by chore: numbers of rows. With no `forget_before`, nothing is to be forgotten."""
LOOK = select(*(query.limit(1).scalar_subquery().label(chore) for chore, query in DUE.items()))
"""One of each."""


class _Tally:
    """What one sweep did so far, and what its queries are asked with."""

    def __init__(self) -> None:
        self.values: dict[str, object] = {}
        self.events: list[Event] = []
        self.expired = self.cancelled = self.files = self.rows = 0


class Sweep(Shelf):
    """What must happen without anybody asking."""

    async def sweep(self, *, steps: int = 20, keep_batches_s: int | None = None) -> Swept:
        """Do at most `steps` rounds of what is due. `keep_batches_s`: forget batches that ended longer ago."""
        chores = self._chores()
        tally = _Tally()
        more = await self._db.tidy()
        for step in range(steps):
            due = await self._look(tally, keep_batches_s)
            if not due:
                break
            for chore, number in due.items():
                await chores[chore](number, tally)
            more = more or step == steps - 1
        return Swept(
            events=tuple(tally.events),
            lines_expired=tally.expired,
            lines_cancelled=tally.cancelled,
            files_deleted=tally.files,
            rows_deleted=tally.rows,
            more=more,
        )

    def _chores(self) -> dict[str, Callable[[int, _Tally], Awaitable[None]]]:
        return {
            "window": self._close_window,
            "answered": self._close_answered,
            "stopped": self._stop_lines,
            "ending": self._write_files,
            "clear": self._clear,
            "expired": partial(self._give_up, DUE["expired"]),
            "parts": partial(self._give_up, DUE["parts"]),
            "orphans": partial(self._give_up, DUE["orphans"]),
            "uploads": self._expire_uploads,
            "over": partial(self._delete, uploads, DUE["over"]),
            "chunks": self._drop_chunks,
            "deliveries": partial(self._delete, deliveries, DUE["deliveries"]),
            "forgotten": partial(self._delete, batches, DUE["forgotten"]),
        }

    async def _look(self, tally: _Tally, keep_batches_s: int | None) -> dict[str, int]:
        """The chores that have something to do, each with one number of what."""
        async with self._db.read() as tx:
            now = await tx.now()
            before = None if keep_batches_s is None else now - keep_batches_s
            tally.values = {"now": now, "me": self.router, "in_hand": sorted(self._in_hand), "forget_before": before}
            (found,) = await tx.all(LOOK, tally.values)
        return {chore: number for chore, number in found.items() if number is not None}

    async def _close_window(self, number: int, tally: _Tally) -> None:
        async with self._db.write() as tx:
            now = int(await tx.now())
            late = (batches.c.number == number, IN_PROGRESS, batches.c.expires_at <= now)
            values = {"state": BatchState.FINALIZING, "finalizing_at": now, "late": True, "size_left": 0}
            if await tx.run(update(batches).where(*late).values(**values)):
                tally.expired += await stop_running(tx, number, JobState.EXPIRED)

    async def _close_answered(self, number: int, tally: _Tally) -> None:
        async with self._db.write() as tx:
            values = {"state": BatchState.FINALIZING, "finalizing_at": int(await tx.now()), "size_left": 0}
            answered = (batches.c.number == number, IN_PROGRESS, ANSWERED)
            await tx.run(update(batches).where(*answered).values(**values))

    async def _stop_lines(self, number: int, tally: _Tally) -> None:
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

    async def _write_files(self, number: int, tally: _Tally) -> None:
        async with self._db.write(grows=True) as tx:
            event = await write_page(self._db, tx, number)
        if event is not None:
            tally.events.append(event)

    async def _clear(self, number: int, tally: _Tally) -> None:
        """The files and the counters say it all: lines and results of a final batch go."""
        async with self._db.write() as tx:
            for table in (results, jobs):
                step = select(table.c.line).where(table.c.batch == number).order_by(table.c.line).limit(STEP_ROWS)
                gone = await tx.run(delete(table).where(table.c.batch == number, table.c.line.in_(step)))
                tally.rows += gone
                if gone:
                    return
            await tx.run(update(batches).where(batches.c.number == number).values(cleared=True))

    async def _give_up(self, due: Query, _: int, tally: _Tally) -> None:
        """Files nobody is to see any more. One that was begun here since the look is in hand by now."""
        async with self._db.write() as tx:
            found = [row["number"] for row in await tx.all(due.limit(STEP_ROWS), tally.values)]
            numbers = [number for number in found if number not in self._in_hand]
            given_up = update(files).where(files.c.number.in_(numbers)).values(state="deleting", writer=None)
            await tx.run(given_up)

    async def _expire_uploads(self, _: int, tally: _Tally) -> None:
        step = DUE["uploads"].limit(STEP_ROWS).scalar_subquery()
        async with self._db.write() as tx:
            await tx.run(update(uploads).where(uploads.c.number.in_(step)).values(state="expired"), tally.values)

    async def _drop_chunks(self, number: int, tally: _Tally) -> None:
        async with self._db.write() as tx:
            mine = chunks.c.file == number
            step = select(chunks.c.start).where(mine).order_by(chunks.c.start).limit(CHUNKS_AT_ONCE)
            gone = await tx.run(delete(chunks).where(mine, chunks.c.start.in_(step)))
            tally.rows += gone
            if gone < CHUNKS_AT_ONCE:
                tally.files += await tx.run(delete(files).where(files.c.number == number, DELETING))

    async def _delete(self, table: Table, due: Query, _: int, tally: _Tally) -> None:
        """Rows that nothing refers to."""
        step = due.limit(STEP_ROWS).scalar_subquery()
        async with self._db.write() as tx:
            tally.rows += await tx.run(delete(table).where(table.c.number.in_(step)), tally.values)
