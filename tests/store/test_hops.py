"""SQLite's connection in hops: when a transaction begins, what a rollback undoes, and rows written many at once."""

from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest

from router.jobs.store.hops import ROWS, Hops


@pytest.fixture
async def hops(tmp_path: Path) -> AsyncIterator[Hops]:
    made = Hops(str(tmp_path / "t.db"), "BEGIN IMMEDIATE", ("foreign_keys = ON",), timeout_s=1)
    await made
    await execute(made, "CREATE TABLE t (a INTEGER PRIMARY KEY, b TEXT)")
    await made.commit()
    yield made
    await made.close()


async def execute(hops: Hops, sql: str, values: Any = (), *, many: bool = False) -> Any:
    cursor = hops.cursor()
    await (cursor.executemany if many else cursor.execute)(sql, values)
    return cursor


async def numbers(hops: Hops) -> list[int]:
    return [row[0] for row in await (await execute(hops, "SELECT a FROM t ORDER BY a")).fetchall()]


async def test_a_transaction_begins_with_its_first_statement(hops: Hops) -> None:
    hops.begin()
    assert not hops.in_transaction
    await execute(hops, "INSERT INTO t VALUES (1, 'x')")
    assert hops.in_transaction
    await hops.commit()
    assert not hops.in_transaction
    hops.begin()
    await hops.commit()
    hops.begin()
    await hops.rollback()
    assert await numbers(hops) == [1]


async def test_what_comes_after_a_rollback_does_not_see_what_it_undid(hops: Hops) -> None:
    hops.begin()
    await execute(hops, "INSERT INTO t VALUES (1, 'x')")
    await hops.rollback()
    hops.begin()
    assert await numbers(hops) == []
    await execute(hops, "INSERT INTO t VALUES (2, 'y')")
    await hops.commit()
    assert await numbers(hops) == [2]


@pytest.mark.parametrize("count", [1, ROWS - 1, ROWS, 3 * ROWS + 7])
async def test_many_rows_are_written_in_order_and_counted(hops: Hops, count: int) -> None:
    await execute(hops, "INSERT INTO t VALUES (5, 'there')")
    hops.begin()
    rows = [(number, f"row {number}") for number in range(1, count + 1)]
    written = await execute(hops, "INSERT INTO t (a, b) VALUES (?, ?) ON CONFLICT DO NOTHING", rows, many=True)
    await hops.commit()
    assert written.rowcount == count - (count >= 5)
    assert await numbers(hops) == sorted({5, *range(1, count + 1)})
    done = await execute(hops, "UPDATE t SET b = ? WHERE a = ?", [("new", 1), ("new", 5)], many=True)
    assert done.rowcount == 2
