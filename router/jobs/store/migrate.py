"""Bringing the schema up to date: forward only, once, however many routers start together.

Runs in a thread with a connection of its own, inside one transaction that holds the database's lock for migrations
(PostgreSQL: an advisory lock; SQLite: the write lock), so a second router waits and then finds nothing to do.
Alembic keeps what it is doing in globals: one migration at a time in a process.
"""

import asyncio
import sqlite3
import threading
from typing import Any

from sqlalchemy import URL, Connection, create_engine, event, inspect, text
from sqlalchemy.ext.asyncio import create_async_engine
from sqlalchemy.pool import NullPool

from router.errors import StoreError
from router.jobs.schema import HEAD, VERSION_TABLE
from router.jobs.store.rows import lock_key

PAGE_BYTES = 8192
"""SQLite's page: a chunk of 1 MiB is a chain of pages, and longer pages make it shorter."""

_one_at_a_time = threading.Lock()


def migrate(url: URL, busy_s: float, connect_args: dict[str, Any] | None = None) -> None:
    """Migrate what the URL names. Blocks."""
    with _one_at_a_time:
        if url.get_backend_name() == "sqlite":
            _sqlite(url, busy_s)
        else:
            asyncio.run(_postgres(url, connect_args or {}))


def _sqlite(url: URL, busy_s: float) -> None:
    engine = create_engine(
        url.set(drivername="sqlite+pysqlite"),
        poolclass=NullPool,
        connect_args={"isolation_level": None, "timeout": busy_s},
    )

    @event.listens_for(engine, "connect")
    def prepare(connection: sqlite3.Connection, _: object) -> None:
        for pragma in (f"page_size = {PAGE_BYTES}", "auto_vacuum = INCREMENTAL", "journal_mode = WAL"):
            connection.execute(f"PRAGMA {pragma}").fetchall()

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql("BEGIN IMMEDIATE")

    with engine.begin() as connection:
        _upgrade(connection)


async def _postgres(url: URL, connect_args: dict[str, Any]) -> None:
    engine = create_async_engine(url, poolclass=NullPool, connect_args=connect_args)
    async with engine.begin() as connection:
        await connection.execute(text("SET LOCAL lock_timeout = 0"))
        await connection.execute(text("SELECT pg_advisory_xact_lock(:key)"), {"key": lock_key("ebbtide migrations")})
        await connection.run_sync(_upgrade)


def _upgrade(connection: Connection) -> None:
    reached = None
    if inspect(connection).has_table(VERSION_TABLE):
        reached = connection.scalar(text(f"SELECT version_num FROM {VERSION_TABLE}"))
    if reached == HEAD:
        return
    if reached is not None and reached > HEAD:
        raise StoreError(f"The database was written by a newer Ebbtide (schema {reached}; this one knows {HEAD}).")
    # Only a router that has something to migrate pays for importing Alembic.
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", "router.jobs:migrations")
    config.attributes["connection"] = connection
    command.upgrade(config, "head")
