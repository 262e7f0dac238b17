"""Batches as callers see them: made, read, listed, cancelled."""

from collections.abc import Mapping

import msgspec
from sqlalchemy import RowMapping, bindparam, func, select, update

from router.core.job import BatchEvent, BatchState, JobState, sources, urgency
from router.core.lateness import Standing, Standings
from router.core.wellformed import mended
from router.errors import Conflict, NotFound
from router.jobs.schema import batches, files, jobs
from router.jobs.store.database import Query, Transaction
from router.jobs.store.files import visible
from router.jobs.store.rows import BatchRow, NewBatch, Pace, Prefix, batch_row, new_id
from router.jobs.store.shelf import OTHERS, Shelf, is_state, known, locked
from router.jobs.store.wakes import Topic

ACTIVE = is_state(
    batches.c.state, BatchState.VALIDATING, BatchState.IN_PROGRESS, BatchState.FINALIZING, BatchState.CANCELLING
)
"""Batches that are not final."""
_STANDING = ("model", "expires_at", "window_s", "left")
LEFT = batches.c.total - batches.c.completed - batches.c.failed - batches.c.stopped
"""Lines of a batch that have no end yet."""

ONE = select(batches).where(batches.c.caller == bindparam("of_caller"), batches.c.id == bindparam("of_id"))


def _watched() -> Query:
    """A batch, its running lines, lines of others that go first, and the pace of the other live routers."""
    first = batches.alias()
    left = first.c.total - first.c.completed - first.c.failed - first.c.stopped
    ahead = select(func.coalesce(func.sum(left), 0)).where(
        is_state(first.c.state, BatchState.IN_PROGRESS),
        first.c.urgency < batches.c.urgency,
        first.c.number != batches.c.number,
    )
    running = select(func.count()).where(jobs.c.batch == batches.c.number, is_state(jobs.c.state, JobState.RUNNING))
    return ONE.add_columns(
        running.correlate(batches).scalar_subquery().label("running"),
        ahead.correlate(batches).scalar_subquery().label("ahead"),
        OTHERS.scalar_subquery().label("pace_of_others"),
    )


WATCHED = _watched()


class Batches(Shelf):
    """Batches as callers see them."""

    async def create_batch(self, new: NewBatch) -> BatchRow:
        """Write a batch down, to be validated. That its input file is unknown is for the validation to say."""
        async with self._db.write(grows=True) as tx:
            twin = await self._twin(tx, new)
            if twin is not None:
                return batch_row(twin)
            row = await self._row(tx, new)
            made = (
                self._db.insert(batches)
                .values(**row)
                .on_conflict_do_nothing(index_elements=["caller", "idempotency_key"])
            )
            created = await tx.first(made.returning(batches))
            if created is None:
                same = (batches.c.caller == new.caller, batches.c.idempotency_key == new.idempotency_key)
                created = await tx.first(select(batches).where(*same))
                assert created is not None
            tx.wake(Topic.BATCHES)
            return batch_row(created)

    async def _twin(self, tx: Transaction, new: NewBatch) -> RowMapping | None:
        if new.same_within_s is None:
            return None
        same = select(batches).where(
            batches.c.caller == new.caller,
            batches.c.input_file_id == new.input_file_id,
            batches.c.endpoint == new.endpoint,
            batches.c.completion_window == new.completion_window,
            batches.c.metadata.is_not_distinct_from(_json(new.metadata)),
            batches.c.created_at >= await tx.now() - new.same_within_s,
        )
        return await tx.first(same.order_by(batches.c.number.desc()).limit(1))

    async def _row(self, tx: Transaction, new: NewBatch) -> dict[str, object]:
        now = await tx.now()
        number = None
        if known(new.input_file_id):
            found = (files.c.id == new.input_file_id, *visible(new.caller, now))
            number = await tx.scalar(select(files.c.number).where(*found))
        expires_at = int(now) + new.window_s
        return {
            "id": new_id(Prefix.BATCH),
            "caller": new.caller,
            "endpoint": new.endpoint,
            "input_file_id": mended(new.input_file_id)[:512],
            "input": number,
            "completion_window": new.completion_window,
            "window_s": new.window_s,
            "priority": new.priority,
            "urgency": urgency(expires_at, new.priority),
            "metadata": _json(new.metadata),
            "output_expires_s": new.output_expires_s,
            "webhook": new.webhook,
            "idempotency_key": new.idempotency_key,
            "state": BatchState.VALIDATING,
            "created_at": int(now),
            "expires_at": expires_at,
        }

    async def batch(self, caller: str, batch_id: str) -> BatchRow | None:
        """One batch of this caller."""
        if not known(batch_id):
            return None
        async with self._db.read() as tx:
            row = await tx.first(ONE, {"of_caller": caller, "of_id": batch_id})
            return batch_row(row) if row else None

    async def batches(self, caller: str, *, limit: int = 20, after: str | None = None) -> tuple[list[BatchRow], bool]:
        """A page of this caller's batches, newest first, and whether there are more."""
        query = select(batches).where(batches.c.caller == caller).order_by(batches.c.number.desc()).limit(limit + 1)
        if after is not None:
            last = await self.batch(caller, after)
            if last is None:
                raise NotFound(f"No batch found with id '{after[:128]}'.", param="after")
            query = query.where(batches.c.number < last.number)
        async with self._db.read() as tx:
            rows = await tx.all(query)
        return [batch_row(row) for row in rows[:limit]], len(rows) > limit

    async def cancel_batch(self, caller: str, batch_id: str) -> BatchRow:
        """Stop a batch: no line begins any more, running ones are taken from their routers at once.

        Conflict if it has ended otherwise already; asking again changes nothing.
        """
        async with self._db.write() as tx:
            found = (batches.c.caller == caller, batches.c.id == batch_id)
            row = await tx.first(locked(select(batches).where(*found))) if known(batch_id) else None
            if row is None:
                raise NotFound(f"No batch found with id '{batch_id[:128]}'.")
            if row["state"] in (BatchState.CANCELLING, BatchState.CANCELLED):
                return batch_row(row)
            if row["state"] not in sources(BatchEvent.CANCEL):
                raise Conflict(f"Cannot cancel a batch with status '{row['state']}'.")
            values = {
                "state": BatchState.CANCELLING,
                "cancelling_at": int(await tx.now()),
                "size_left": 0,
                "waiting": None,
            }
            changed = await tx.first(update(batches).where(*found).values(**values).returning(batches))
            assert changed is not None
            await stop_running(tx, row["number"], JobState.CANCELLED)
            return batch_row(changed)

    async def note(self, waiting: Mapping[str, str | None]) -> None:
        """Write down why batches wait, for whoever asks; by batch id."""
        async with self._db.write() as tx:
            for batch_id, why in waiting.items():
                told = None if why is None else mended(why)
                await tx.run(update(batches).where(batches.c.id == batch_id, ACTIVE).values(waiting=told))

    async def watched(self, caller: str, batch_id: str) -> tuple[BatchRow, Pace] | None:
        """One batch of this caller and how it gets on, for an estimate of its end. What a poll costs: one statement."""
        if not known(batch_id):
            return None
        async with self._db.read() as tx:
            now = await tx.now()
            row = await tx.first(WATCHED, {"of_caller": caller, "of_id": batch_id, **self._others(now)})
        if row is None:
            return None
        done_last = self._own_pace(now) + int(row["pace_of_others"])
        return batch_row(row), Pace(running=row["running"], ahead=int(row["ahead"]), done_last=done_last)

    async def standings(self, limit: int = 256) -> Standings:
        """How the batches in progress stand, at most `limit` in the order they are served."""
        columns = batches.c.id, batches.c.model, batches.c.expires_at, batches.c.window_s, LEFT.label("left")
        going = select(*columns).where(is_state(batches.c.state, BatchState.IN_PROGRESS), LEFT > 0)
        async with self._db.read() as tx:
            rows = await tx.all(going.order_by(batches.c.urgency, batches.c.number).limit(limit))
            return Standings(
                now=await tx.now(),
                batches=[Standing(batch_id=row["id"], **{key: row[key] for key in _STANDING}) for row in rows],
                done=await self._pace(tx),
            )


async def stop_running(tx: Transaction, batch: int, state: JobState) -> int:
    """End the running lines of a batch; their routers learn it when they extend. How many."""
    running = (jobs.c.batch == batch, is_state(jobs.c.state, JobState.RUNNING))
    stopped = await tx.run(update(jobs).where(*running).values(state=state, owner=None, lease_until=None))
    if stopped:
        tx.wake(Topic.STOPPED)
        await count_stopped(tx, batch, stopped)
    return stopped


async def count_stopped(tx: Transaction, batch: int, lines: int) -> None:
    """So many lines of a batch ended without an answer."""
    await tx.run(update(batches).where(batches.c.number == batch).values(stopped=batches.c.stopped + lines))


def _json(metadata: dict[str, str] | None) -> str | None:
    return None if metadata is None else msgspec.json.encode(metadata, order="sorted").decode()
