"""How much is kept, in all and for one caller."""

from sqlalchemy import ColumnElement, func, select

from router.core.job import BATCH_FINAL, BatchState, JobState
from router.jobs.schema import batches, files, jobs, uploads
from router.jobs.store.batches import ACTIVE, LEFT
from router.jobs.store.database import Query
from router.jobs.store.files import READY
from router.jobs.store.rows import Held, StoreUsage
from router.jobs.store.shelf import Shelf, is_state

PART, PENDING = is_state(files.c.state, "part"), is_state(uploads.c.state, "pending")


class Holdings(Shelf):
    """Numbers for quotas and metrics."""

    async def usage(self) -> StoreUsage:
        """What the store holds."""
        async with self._db.read() as tx:
            kept = await tx.first(select(func.count().label("files"), _sum(files.c.bytes).label("bytes")).where(READY))
            assert kept is not None
            states = dict.fromkeys((state for state in BatchState if state not in BATCH_FINAL), 0)
            counted = select(batches.c.state, func.count().label("batches")).where(ACTIVE).group_by(batches.c.state)
            states |= {BatchState(row["state"]): row["batches"] for row in await tx.all(counted)}
            in_progress = is_state(batches.c.state, BatchState.IN_PROGRESS)
            first = func.min(batches.c.created_at).label("first")
            by_model = select(batches.c.model, _sum(LEFT).label("left"), first).where(in_progress)
            models = await tx.all(by_model.group_by(batches.c.model))
            oldest = min((row["first"] for row in models), default=None)
            return StoreUsage(
                files=kept["files"],
                file_bytes=int(kept["bytes"]),
                batches=sum(states.values()),
                queued=await tx.scalar(_jobs(JobState.QUEUED)),
                running=await tx.scalar(_jobs(JobState.RUNNING)),
                disk_bytes=await self._db.disk_bytes(tx),
                states={str(state): count for state, count in states.items()},
                models={row["model"]: int(row["left"]) for row in models},
                oldest_s=0.0 if oldest is None else max(0.0, await tx.now() - oldest),
            )

    async def held(self, caller: str) -> Held:
        """What one caller holds."""
        async with self._db.read() as tx:
            kept = select(func.count().label("files"), _sum(files.c.bytes).label("bytes"))
            mine = await tx.first(kept.where(files.c.caller == caller, READY))
            parts = await tx.scalar(select(_sum(files.c.bytes)).where(files.c.caller == caller, PART))
            coming = (uploads.c.caller == caller, PENDING, uploads.c.expires_at > await tx.now())
            begun = await tx.scalar(select(func.count()).select_from(uploads).where(*coming))
            active = select(
                func.count().label("batches"), _sum(LEFT).label("lines"), _sum(batches.c.size_left).label("tokens")
            )
            work = await tx.first(active.where(batches.c.caller == caller, ACTIVE))
        assert mine is not None
        assert work is not None
        return Held(
            files=mine["files"] + begun,
            bytes=int(mine["bytes"]) + int(parts),
            batches=work["batches"],
            lines=int(work["lines"]),
            tokens=int(work["tokens"]),
        )


def _sum(column: ColumnElement[int]) -> ColumnElement[int]:
    return func.coalesce(func.sum(column), 0)


def _jobs(state: JobState) -> Query:
    return select(func.count()).select_from(jobs).where(is_state(jobs.c.state, state))
