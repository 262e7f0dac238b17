"""How much is kept, in all and for one caller."""

from sqlalchemy import ColumnElement, func, select

from router.core.job import JobState
from router.jobs.schema import batches, files, jobs
from router.jobs.store.batches import ACTIVE, LEFT
from router.jobs.store.database import Query
from router.jobs.store.files import READY
from router.jobs.store.rows import Held, StoreUsage
from router.jobs.store.shelf import Shelf, is_state


class Holdings(Shelf):
    """Numbers for quotas and metrics."""

    async def usage(self) -> StoreUsage:
        """What the store holds."""
        async with self._db.read() as tx:
            kept = await tx.first(select(func.count().label("files"), _sum(files.c.bytes).label("bytes")).where(READY))
            assert kept is not None
            return StoreUsage(
                files=kept["files"],
                file_bytes=int(kept["bytes"]),
                batches=await tx.scalar(select(func.count()).select_from(batches).where(ACTIVE)),
                queued=await tx.scalar(_jobs(JobState.QUEUED)),
                running=await tx.scalar(_jobs(JobState.RUNNING)),
                disk_bytes=await self._db.disk_bytes(tx),
            )

    async def held(self, caller: str) -> Held:
        """What one caller holds."""
        async with self._db.read() as tx:
            kept = select(func.count().label("files"), _sum(files.c.bytes).label("bytes"))
            mine = await tx.first(kept.where(files.c.caller == caller, READY))
            active = select(
                func.count().label("batches"), _sum(LEFT).label("lines"), _sum(batches.c.size_left).label("tokens")
            )
            work = await tx.first(active.where(batches.c.caller == caller, ACTIVE))
        assert mine is not None
        assert work is not None
        return Held(
            files=mine["files"],
            bytes=int(mine["bytes"]),
            batches=work["batches"],
            lines=int(work["lines"]),
            tokens=int(work["tokens"]),
        )


def _sum(column: ColumnElement[int]) -> ColumnElement[int]:
    return func.coalesce(func.sum(column), 0)


def _jobs(state: JobState) -> Query:
    return select(func.count()).select_from(jobs).where(is_state(jobs.c.state, state))
