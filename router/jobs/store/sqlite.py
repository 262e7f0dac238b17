"""SQLite: one file, one writer, readers that never wait for it.

Rule 1: one connection writes, behind a lock, with BEGIN IMMEDIATE: it never finds out late that another process wrote.
Rule 2: readers have their own connections, which cannot write (`query_only`).
Rule 3: write-ahead log with synchronous=FULL: a commit that was told to anybody survives `kill -9` and loss of power.
Rule 4: the last of the disk is for clearing up, so a full disk is a pause and not the end.
Rule 5: every router holds a lock on a file of its own beside the database. The kernel drops it when the process ends,
however it ends, so the next router knows at once whose leases are nobody's.
"""

import asyncio
import os
import shutil
import sqlite3
import time
from contextlib import suppress
from functools import partial
from pathlib import Path

from sqlalchemy import URL, Connection, Table, event, text
from sqlalchemy.dialects.sqlite import insert
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncEngine, create_async_engine
from sqlalchemy.pool import AsyncAdaptedQueuePool

from router.errors import StoreError, StoreFull, StoreLost
from router.jobs.store.database import BUSY_S, Clock, Database, Insert, Transaction
from router.jobs.store.hops import Hops
from router.jobs.store.migrate import PAGE_BYTES, migrate

try:
    import fcntl
except ImportError:  # Windows: only the beat tells
    fcntl = None  # type: ignore[assignment]

READERS = 4
"""Connections that read; polls are short, so few serve many."""
VACUUM_PAGES = 1024
"""Pages given back in one step."""
SPARE_PAGES = 4096
"""Free pages that are kept for what comes next."""
RESERVE_BYTES = 64 * 2**20
"""Space that nothing new may take (a quarter of a small disk): even deleting needs some, for the log."""
LOG_PAGES = 512
"""The write-ahead log is emptied into the file after so many pages (4 MiB)."""

PRAGMAS = (
    f"busy_timeout = {int(BUSY_S * 1000)}",
    "foreign_keys = ON",
    "synchronous = FULL",
    "cache_size = -16384",
    "temp_store = MEMORY",
    f"wal_autocheckpoint = {LOG_PAGES}",
    "secure_delete = FAST",
)
"""Some builds of SQLite overwrite what is deleted with zeros by default: then deleting 32 MiB writes 32 MiB."""


class Sqlite(Database):
    """One file on a local disk."""

    def __init__(self, url: URL, clock: Clock | None) -> None:
        super().__init__(clock or time.time)
        if not url.database or url.database == ":memory:":
            raise StoreError("The store needs a file: sqlite:///var/ebbtide.db")
        self._url = url.set(drivername="sqlite+aiosqlite")
        self.path = Path(url.database)
        self._turn = asyncio.Lock()
        self._presence = Presence(self.path)
        self._pair: tuple[AsyncEngine, AsyncEngine] | None = None
        self._made: list[Hops] = []

    async def open(self, router: str) -> None:
        with self._translated():
            self.path.parent.mkdir(parents=True, exist_ok=True)
            await asyncio.to_thread(migrate, self._url, BUSY_S)
            self._presence.enter(router)
        self._pair = self._engine(READERS, writes=False), self._engine(1, writes=True)

    def _engine(self, connections: int, *, writes: bool) -> AsyncEngine:
        engine = create_async_engine(
            self._url,
            poolclass=AsyncAdaptedQueuePool,
            pool_size=connections,
            max_overflow=0,
            pool_timeout=BUSY_S,
            connect_args={"async_creator_fn": partial(self._connection, writes=writes)},
        )

        @event.listens_for(engine.sync_engine, "begin")
        def begin(connection: Connection) -> None:
            hops = connection.connection.driver_connection
            assert isinstance(hops, Hops)
            hops.begin()

        return engine

    async def _connection(self, *_: object, writes: bool, **__: object) -> Hops:
        pragmas = PRAGMAS if writes else (*PRAGMAS, "query_only = ON")
        hops = Hops(str(self.path), "BEGIN IMMEDIATE" if writes else "BEGIN", pragmas, timeout_s=BUSY_S)
        await hops
        self._made = [*filter(_is_open, self._made), hops]
        return hops

    async def close(self) -> None:
        pair, self._pair = self._pair, None
        for engine in pair or ():
            await engine.dispose()
        # One that was in use when its user was cancelled is neither in a pool nor closed.
        for connection in filter(_is_open, self._made):
            with suppress(sqlite3.Error, ValueError):
                await connection.close()
        self._presence.leave()

    async def listen(self) -> None:
        await asyncio.Event().wait()

    async def time(self, tx: Transaction) -> float:
        assert self.clock is not None
        return self.clock()

    async def disk_bytes(self, tx: Transaction) -> int:
        files = (self.path, self.path.with_name(self.path.name + "-wal"))
        return sum(file.stat().st_size for file in files if file.exists())

    async def gone(self, tx: Transaction, router: str, *, namesake: bool) -> bool:
        return self._presence.gone(router)

    async def tidy(self) -> bool:
        async with self.read() as tx:
            spare = await tx.scalar(text("PRAGMA freelist_count"))
        kept = SPARE_PAGES
        if self._free() < 0:
            kept = 0
            async with self._turn:
                await self._relieve()
        if spare <= kept:
            return False
        async with self._turn:
            await self._script(f"PRAGMA incremental_vacuum({VACUUM_PAGES})")
        return bool(spare > kept + VACUUM_PAGES)

    async def _script(self, script: str) -> None:
        """Run it on the writer outside a transaction, to its end, if that is possible now."""
        async with self._engines()[1].connect() as connection:
            raw = (await connection.get_raw_connection()).driver_connection
            assert raw is not None
            with suppress(sqlite3.Error):
                await raw.executescript(script)

    def _free(self) -> int:
        """Bytes free on the disk beyond the reserve; negative when the reserve is touched."""
        disk = shutil.disk_usage(self.path.parent)
        return disk.free - min(RESERVE_BYTES, disk.total // 4)

    async def _room(self, tx: Transaction) -> None:
        free = self._free()
        if free < 0 and free + await tx.scalar(text("PRAGMA freelist_count")) * PAGE_BYTES < 0:
            raise StoreFull("The disk is nearly full; what is left is needed to clear up")

    async def _relieve(self) -> None:
        with suppress(SQLAlchemyError):
            await self._script("PRAGMA wal_checkpoint(TRUNCATE)")

    def insert(self, table: Table) -> Insert:
        return insert(table)

    def _writing(self) -> asyncio.Lock:
        return self._turn

    async def _announce(self, tx: Transaction) -> None:
        return None

    def _engines(self) -> tuple[AsyncEngine, AsyncEngine]:
        if self._pair is None:
            raise StoreLost("The store is not open")
        return self._pair

    def _kind(self, error: DBAPIError) -> type[StoreError]:
        cause = error.orig
        name = getattr(cause, "sqlite_errorname", "")
        if name.startswith("SQLITE_FULL"):
            return StoreFull
        lost = ("SQLITE_BUSY", "SQLITE_LOCKED", "SQLITE_IOERR", "SQLITE_CANTOPEN", "SQLITE_READONLY", "SQLITE_PROTOCOL")
        if name.startswith(lost) or isinstance(cause, sqlite3.ProgrammingError):
            return StoreLost
        return StoreError


def _is_open(connection: Hops) -> bool:
    try:
        return connection.in_transaction in (True, False)
    except ValueError:
        return False


class Presence:
    """Which routers' processes live: each holds the lock of its own file."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._held: tuple[int, Path] | None = None

    def _file(self, router: str) -> Path:
        return self._path.with_name(f"{self._path.name}.{router}.lock")

    def enter(self, router: str) -> None:
        """Be seen."""
        file = self._file(router)
        held = os.open(file, os.O_RDWR | os.O_CREAT, 0o600)
        self._held = held, file
        if fcntl is not None:
            fcntl.flock(held, fcntl.LOCK_EX | fcntl.LOCK_NB)

    def leave(self) -> None:
        """Be seen no more."""
        if self._held is not None:
            held, file = self._held
            self._held = None
            file.unlink(missing_ok=True)
            os.close(held)

    def gone(self, router: str) -> bool:
        """Whether nobody holds that router's lock; its file is cleared away then."""
        file = self._file(router)
        try:
            found = os.open(file, os.O_RDWR)
        except FileNotFoundError:
            return True
        try:
            if fcntl is None:
                return False
            fcntl.flock(found, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        finally:
            os.close(found)
        file.unlink(missing_ok=True)
        return True
