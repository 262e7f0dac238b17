"""PostgreSQL 14 and newer: several routers at one database.

Rule 1: rows under work are skipped by others (SKIP LOCKED), bells go round by NOTIFY, the server's clock is the clock.
Rule 2: a router that freezes inside a transaction is thrown out by the server after 10 s, so its locks hold nobody up.
Rule 3: one connection listens and holds an advisory lock in this router's name. The server drops it when the process
ends, so a router that starts again under the same name knows at once that its past life is over. Others go by the beat:
a connection that was only cut is no death.
"""

import asyncio
from contextlib import AbstractAsyncContextManager, nullcontext, suppress
from typing import Any

import asyncpg  # type: ignore[import-untyped]
from sqlalchemy import URL, Table, func, select, text
from sqlalchemy.dialects.postgresql import insert
from sqlalchemy.exc import DBAPIError, SQLAlchemyError
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine, create_async_engine
from sqlalchemy.pool import NullPool

from router.errors import StoreError, StoreFull, StoreLost
from router.jobs.store.database import BUSY_S, Clock, Database, Insert, Transaction
from router.jobs.store.migrate import migrate
from router.jobs.store.rows import lock_key
from router.jobs.store.wakes import Topic

CONNECTIONS = 10
"""Connections of one router, beside the one that listens."""
AGAIN_S = 1.0
"""Pause before the listening connection is made again."""
ALIVE_S = 30.0
"""How often it is asked whether it still lives."""
CHANNEL = "ebbtide"
FULL = ("53100",)
"""SQLSTATE disk_full."""
LOST = ("08", "25006", "40001", "40P01", "53", "55P03", "57", "58")
"""SQLSTATE classes and codes after which asking again helps: connection, read-only standby, deadlock, resources, lock
not available, operator intervention, system error."""


class Postgres(Database):
    """One PostgreSQL database."""

    def __init__(self, url: URL, clock: Clock | None) -> None:
        super().__init__(clock)
        query = dict(url.query)
        ssl = query.pop("sslmode", None)
        self._url = url.set(drivername="postgresql+asyncpg", query=query)
        limits = {
            "application_name": "ebbtide",
            "lock_timeout": f"{BUSY_S * 1000:.0f}ms",
            "idle_in_transaction_session_timeout": f"{BUSY_S * 1000:.0f}ms",
        }
        self._args: dict[str, Any] = {"server_settings": limits, "command_timeout": 3 * BUSY_S, "timeout": BUSY_S}
        if ssl is not None:
            self._args["ssl"] = ssl
        self._engine: AsyncEngine | None = None
        self._listening: AsyncConnection | None = None
        self._driver: Any = None
        self._ended = asyncio.Event()
        self._ended.set()
        self._router = ""

    async def open(self, router: str) -> None:
        self._router = router
        with self._translated():
            await asyncio.to_thread(migrate, self._url, BUSY_S, self._args)
            self._engine = create_async_engine(
                self._url, pool_size=CONNECTIONS, max_overflow=0, pool_timeout=BUSY_S, connect_args=self._args
            )
            await self._connect()

    async def close(self) -> None:
        await self._hang_up()
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.dispose()

    async def _connect(self) -> None:
        """Make the connection that listens."""
        self._ended = asyncio.Event()
        engine = create_async_engine(self._url, poolclass=NullPool, connect_args=self._args)
        self._listening = await engine.connect()
        self._driver = (await self._listening.get_raw_connection()).driver_connection
        self._driver.add_termination_listener(lambda _, ended=self._ended: ended.set())
        try:
            await self._driver.add_listener(CHANNEL, self._heard)
            await self._driver.execute("SELECT pg_advisory_lock($1)", lock_key(self._router))
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise StoreLost("The connection that listens was cut") from error

    async def _hang_up(self) -> None:
        self._ended.set()
        if self._listening is not None:
            listening, self._listening = self._listening, None
            if self._driver is not None:
                self._driver.terminate()
            with suppress(SQLAlchemyError, OSError):
                await listening.invalidate()
                await listening.close()

    async def listen(self) -> None:
        while True:
            try:
                with self._translated():
                    await self._hear()
            except StoreError:
                self._ended.set()
                await asyncio.sleep(AGAIN_S)

    async def _hear(self) -> None:
        """Until the connection ends. A connection that does not answer has ended without saying so."""
        if self._ended.is_set():
            await self._hang_up()
            await self._connect()
            self.wakes.ring(Topic)
        try:
            await asyncio.wait_for(self._ended.wait(), ALIVE_S)
        except TimeoutError:
            await self._alive()

    async def _alive(self) -> None:
        try:
            await self._driver.execute("SELECT 1", timeout=BUSY_S)
        except (asyncpg.PostgresError, asyncpg.InterfaceError) as error:
            raise StoreLost("The connection that listens does not answer") from error

    def _heard(self, _: object, __: int, ___: str, payload: str) -> None:
        self.wakes.ring(topic for topic in Topic if topic in payload.split())

    async def _announce(self, tx: Transaction) -> None:
        await tx.scalar(select(func.pg_notify(CHANNEL, " ".join(sorted(tx.topics)))))

    async def _room(self, tx: Transaction) -> None:
        return None  # the server does not tell how full its disk is

    async def _relieve(self) -> None:
        return None

    async def time(self, tx: Transaction) -> float:
        if self.clock is not None:
            return self.clock()
        return float(await tx.scalar(text("SELECT extract(epoch FROM clock_timestamp())::float8")))

    async def disk_bytes(self, tx: Transaction) -> int:
        return int(await tx.scalar(text("SELECT pg_database_size(current_database())")))

    async def gone(self, tx: Transaction, router: str, *, namesake: bool) -> bool:
        if not namesake:
            return False
        return bool(await tx.scalar(select(func.pg_try_advisory_xact_lock(lock_key(router)))))

    async def tidy(self) -> bool:
        return False

    def insert(self, table: Table) -> Insert:
        return insert(table)

    def _writing(self) -> AbstractAsyncContextManager[None]:
        return nullcontext()

    def _engines(self) -> tuple[AsyncEngine, AsyncEngine]:
        if self._engine is None:
            raise StoreLost("The store is not open")
        return self._engine, self._engine

    def _kind(self, error: DBAPIError) -> type[StoreError]:
        state = getattr(error.orig, "sqlstate", None) or ""
        if state in FULL:
            return StoreFull
        if state.startswith(LOST) or not state:
            return StoreLost
        return StoreError
