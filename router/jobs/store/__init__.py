"""The one database that is the whole state of batch work: files, batches, their lines, results.

Each part of the store stands in a module of its own; `Store` is all of them together. Every method is one short
transaction or a few, raises StoreLost when the database cannot be reached (asking again is safe) and StoreFull when it
has no space (nothing was written).
"""

from contextlib import suppress
from secrets import token_hex
from typing import Self

from sqlalchemy import make_url, text
from sqlalchemy.exc import ArgumentError

from router.errors import StoreError
from router.jobs.store.batches import Batches
from router.jobs.store.database import Clock, Database
from router.jobs.store.deliveries import Deliveries
from router.jobs.store.holdings import Holdings
from router.jobs.store.inputs import Inputs
from router.jobs.store.overview import Lines, Overview, Overviews, Progress
from router.jobs.store.results import Results
from router.jobs.store.routers import Routers
from router.jobs.store.rows import (
    BatchRow,
    Delivery,
    Event,
    FileRow,
    Held,
    JobRow,
    LineError,
    NewBatch,
    NewJob,
    NewResult,
    Outbox,
    Pace,
    PartRow,
    RouterRow,
    StoreUsage,
    Swept,
    Tokens,
    UploadRow,
)
from router.jobs.store.spending import Spending
from router.jobs.store.sweep import Sweep
from router.jobs.store.uploads import Uploads
from router.jobs.store.validation import Validation
from router.jobs.store.wakes import Topic, Wakes
from router.jobs.store.writer import FileWriter, PartWriter


class Store(Uploads, Inputs, Results, Routers, Batches, Validation, Sweep, Deliveries, Holdings, Spending, Overviews):
    """All of it. Open one in a process."""

    @classmethod
    async def open(cls, url: str, *, router: str, clock: Clock | None = None, stale_s: float = 20.0) -> Self:
        """Open `sqlite:///path` or `postgresql://user:pw@host/db`, migrate it, and register this router.

        `router` names it to people; a restart under the same name takes over from its past life at once. `stale_s`:
        a router that has not beaten for so long is lost. Without `clock`, SQLite goes by this machine's and PostgreSQL
        by the server's.
        """
        identity = f"{router}-{token_hex(4)}"
        database = _database(url, clock)
        store = cls(database, identity, router, stale_s)
        try:
            await database.open(identity)
            await store.register()
        except BaseException:
            await database.close()
            raise
        return store

    async def close(self) -> None:
        """Give back what this router holds and close every connection."""
        with suppress(StoreError):
            await self.leave()
        await self._db.close()

    async def ping(self) -> None:
        """Raise StoreLost if the database does not answer."""
        async with self._db.read() as tx:
            await tx.scalar(text("SELECT 1"))


def _database(url: str, clock: Clock | None) -> Database:
    try:
        parsed = make_url(url)
    except ArgumentError as error:
        raise StoreError("The store's URL cannot be read: sqlite:///path or postgresql://user:pw@host/db") from error
    match parsed.get_backend_name():
        case "sqlite":
            from router.jobs.store.sqlite import Sqlite

            return Sqlite(parsed, clock)
        case "postgresql":
            from router.jobs.store.postgres import Postgres

            return Postgres(parsed, clock)
        case other:
            raise StoreError(f"The store is SQLite or PostgreSQL, not {other}")


__all__ = [
    "BatchRow",
    "Delivery",
    "Event",
    "FileRow",
    "FileWriter",
    "Held",
    "JobRow",
    "LineError",
    "Lines",
    "NewBatch",
    "NewJob",
    "NewResult",
    "Outbox",
    "Overview",
    "Pace",
    "PartRow",
    "PartWriter",
    "Progress",
    "RouterRow",
    "Store",
    "StoreUsage",
    "Swept",
    "Tokens",
    "Topic",
    "UploadRow",
    "Wakes",
]
