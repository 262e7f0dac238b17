"""SQLite's connection for the event loop: a thread each, and one hop there and back for a statement with its rows.

A hop costs little while the loop is idle and milliseconds while it is not: the thread has to wait for the interpreter.
So what aiosqlite does in several is one here: BEGIN goes with the first statement, the rows come back with it, the
cursor stays over there, and nobody waits for a rollback (what comes after it on this connection runs after it).
"""

import re
import sqlite3
from collections.abc import Callable, Sequence
from functools import partial
from itertools import chain
from typing import Any

import aiosqlite

__all__ = ["Hops"]

Row = tuple[Any, ...]
Values = Sequence[Any]
Act = Callable[[sqlite3.Cursor, str, Any], object]
ROWS = 64
"""Most rows written by one statement. The interpreter is handed over for every statement, not for every row."""
_INSERT = re.compile(r"(INSERT INTO .* VALUES )(\([?, ]+\))(.*)", re.DOTALL)


class Hops(aiosqlite.Connection):
    """One connection; await it to open it. `begin` is how its transactions begin."""

    def __init__(self, path: str, begin: str, pragmas: Sequence[str], *, timeout_s: float) -> None:
        super().__init__(partial(_connect, path, pragmas, timeout_s), iter_chunk_size=64)
        self._thread.daemon = True
        self._begin = begin
        self._due = self._touched = False

    def begin(self) -> None:
        """A transaction begins with the next statement."""
        self._due = True

    def cursor(self) -> "_Cursor":  # type: ignore[override]  # aiosqlite's own goes there and back to be made
        """Something to execute one statement with."""
        return _Cursor(self)

    async def run(self, act: Act, sql: str, values: Values) -> "_Done":
        """Execute and bring back all there is."""
        due, self._due, self._touched = self._due, False, True
        done: _Done = await self._execute(self._run, act, sql, values, self._begin if due else None)  # type: ignore[no-untyped-call]
        return done

    def _run(self, act: Act, sql: str, values: Values, begin: str | None) -> "_Done":
        if begin is not None:
            self._conn.execute(begin)
        cursor = self._conn.cursor()
        try:
            changed = act(cursor, sql, values)
            rows = cursor.fetchall() if cursor.description else []
            return _Done(rows, cursor, changed if isinstance(changed, int) else cursor.rowcount)
        finally:
            cursor.close()

    async def commit(self) -> None:
        """Commit, if anything was said since it began."""
        self._due = False
        if self._touched:
            await super().commit()
            self._touched = False

    async def rollback(self) -> None:
        """Undo. Whatever comes next here comes after it."""
        self._due = False
        if self._touched:
            self._touched = False
            self._tx.put_nowait((None, self._undo))

    def _undo(self) -> None:
        if self._connection is not None and self._connection.in_transaction:
            self._connection.rollback()


def _connect(path: str, pragmas: Sequence[str], timeout_s: float) -> sqlite3.Connection:
    connection: sqlite3.Connection = sqlite3.connect(
        path, timeout=timeout_s, isolation_level=None, check_same_thread=False
    )
    for pragma in pragmas:
        connection.execute(f"PRAGMA {pragma}")
    return connection


def _insert(insert: re.Match[str], cursor: sqlite3.Cursor, _: str, rows: Sequence[Values]) -> int:
    """Many rows in few statements, of a few sizes so that SQLite knows them again; how many were written."""
    into, values, rest = insert.groups()
    at, size, written = 0, ROWS, 0
    while at < len(rows):
        while size > len(rows) - at:
            size //= 2
        cursor.execute(into + ", ".join([values] * size) + rest, [*chain.from_iterable(rows[at : at + size])])
        written += cursor.rowcount
        at += size
    return written


class _Done:
    """What a statement left behind."""

    __slots__ = ("description", "lastrowid", "rowcount", "rows")

    def __init__(self, rows: list[Row], cursor: sqlite3.Cursor, changed: int) -> None:
        self.rows = rows
        self.description = cursor.description
        self.rowcount = changed
        self.lastrowid = cursor.lastrowid


class _Cursor:
    """What SQLAlchemy's adapter expects of a cursor; only `execute` and `executemany` go anywhere."""

    __slots__ = ("_hops", "_rows", "arraysize", "description", "lastrowid", "rowcount")

    def __init__(self, hops: Hops) -> None:
        self._hops = hops
        self._rows: list[Row] = []
        self.arraysize = 1
        self.description: Any = None
        self.lastrowid: int | None = None
        self.rowcount = -1

    async def __aenter__(self) -> "_Cursor":
        return self

    async def execute(self, sql: str, values: Values = ()) -> None:
        self._keep(await self._hops.run(sqlite3.Cursor.execute, sql, values))

    async def executemany(self, sql: str, values: Sequence[Values]) -> None:
        insert = _INSERT.fullmatch(sql)
        if insert is None:
            self._keep(await self._hops.run(sqlite3.Cursor.executemany, sql, values))
        else:
            self._keep(await self._hops.run(partial(_insert, insert), sql, values))

    def _keep(self, done: _Done) -> None:
        self._rows, self.description = done.rows, done.description
        self.rowcount, self.lastrowid = done.rowcount, done.lastrowid

    async def fetchall(self) -> list[Row]:
        return self._rows

    async def close(self) -> None:
        return None
