"""The schema: the migrations make exactly the tables, twice is once, and the rules stand in the database."""

import asyncio
import re
import sqlite3
from pathlib import Path

import pytest
from sqlalchemy import create_engine, make_url

from router.errors import StoreError
from router.jobs.schema import HEAD, metadata
from router.jobs.store import Store
from router.jobs.store.migrate import migrate
from tests.store.bench import Bench, answer

MIGRATIONS = Path(__file__).parents[2] / "router" / "jobs" / "migrations" / "versions"


def tables(file: Path) -> dict[str, list[str]]:
    """Every table and index of a SQLite file, as sets of lines without order."""
    with sqlite3.connect(file) as connection:
        rows = connection.execute("SELECT name, sql FROM sqlite_master WHERE sql IS NOT NULL").fetchall()
    connection.close()
    told = {name: sorted(re.sub(r"\s+", " ", line.strip(" ,\t")) for line in sql.split("\n")) for name, sql in rows}
    return {name: lines for name, lines in told.items() if name not in ("schema_version", "sqlite_sequence")}


def test_migrations_from_nothing_make_the_schema(tmp_path: Path) -> None:
    migrate(make_url(f"sqlite:///{tmp_path}/migrated.db"), 1.0)
    engine = create_engine(f"sqlite:///{tmp_path}/made.db")
    metadata.create_all(engine)
    engine.dispose()
    made = tables(tmp_path / "made.db")
    assert tables(tmp_path / "migrated.db") == made
    assert len(made) == len(metadata.tables) + sum(len(table.indexes) for table in metadata.tables.values())


def test_migrations_from_themselves_change_nothing(tmp_path: Path) -> None:
    for _ in range(2):
        migrate(make_url(f"sqlite:///{tmp_path}/a.db"), 1.0)
    assert tables(tmp_path / "a.db")


def test_the_head_is_the_newest_step() -> None:
    steps = sorted(re.search(r"v(\d{4})_", path.name)[1] for path in MIGRATIONS.glob("v*.py"))  # type: ignore[index]
    assert steps[-1] == HEAD
    assert steps == [f"{number:04}" for number in range(1, len(steps) + 1)]


async def test_several_start_at_once_on_postgresql(empty_url: str) -> None:
    stores = await asyncio.gather(*(Store.open(empty_url, router=f"r{n}") for n in range(3)))
    assert len(await stores[0].routers()) == 3
    for store in stores:
        await store.close()


async def test_several_start_at_once_on_sqlite(tmp_path: Path) -> None:
    url = f"sqlite:///{tmp_path}/new/folder/ebbtide.db"
    stores = await asyncio.gather(*(Store.open(url, router=f"r{n}") for n in range(3)))
    assert len(await stores[0].routers()) == 3
    for store in stores:
        await store.close()
    assert sorted(path.name for path in (tmp_path / "new" / "folder").iterdir()) == ["ebbtide.db"]


async def test_a_newer_schema_is_refused(url: str) -> None:
    async with Bench(url) as bench:
        await bench.run("UPDATE schema_version SET version_num = '9999'")
        with pytest.raises(StoreError, match="newer Ebbtide"):
            await Store.open(url, router="old")


WRONG = [
    "UPDATE batches SET state = 'paused'",
    "UPDATE batches SET state = 'completed'",
    "UPDATE batches SET completed = 4",
    "UPDATE batches SET failed = -1",
    "UPDATE batches SET stopped = 3",
    "UPDATE batches SET state = 'cancelled', cancelling_at = 1, cancelled_at = 1",
    "UPDATE batches SET input_tokens = -1",
    "UPDATE batches SET completed_at = 1",
    "UPDATE batches SET state = 'finalizing'",
    "UPDATE batches SET state = 'cancelling'",
    "UPDATE batches SET owner = 'x'",
    "UPDATE batches SET in_progress_at = NULL",
    "UPDATE batches SET state = 'expired', expired_at = 1",
    "UPDATE batches SET expires_at = expires_at + 1",
    "UPDATE batches SET cleared = true",
    "UPDATE jobs SET state = 'running' WHERE line = 3",
    "UPDATE jobs SET owner = 'x' WHERE line = 3",
    "UPDATE jobs SET state = 'lost'",
    "UPDATE jobs SET attempts = -1",
    "UPDATE jobs SET custom_id = 'c'",
    "INSERT INTO results SELECT * FROM results",
    "UPDATE results SET status = NULL",
    "UPDATE results SET error_code = 'x'",
    "UPDATE results SET line = 77",
    "DELETE FROM jobs",
    "DELETE FROM batches",
    "DELETE FROM files",
    "UPDATE files SET bytes = -1",
    "UPDATE files SET state = 'part'",
    "UPDATE files SET writer = 'x'",
    "INSERT INTO chunks VALUES (99, 0, 'x')",
    "UPDATE chunks SET start = -1",
    "INSERT INTO chunks SELECT * FROM chunks",
]


async def test_the_database_refuses(bench: Bench) -> None:
    await bench.running(3)
    jobs = await bench.claim(2)
    await bench.store.finish(jobs[0], answer(jobs[0]))
    for sql in WRONG:
        taken = True
        try:
            await bench.run(sql)
        except StoreError:
            taken = False
        assert not taken, sql
