"""Transactions on one database, and the border where its errors become ours.

Rule 1: whoever writes knows it before the first statement (`write`); a read (`read`) never becomes a write.
Rule 2: transactions are short: a few thousand rows or 1 MiB, and nothing is awaited inside but the database.
Rule 3: rows are locked in one order: batches by number, then jobs by line. So nobody waits in a circle.
Rule 4: bells ring after the commit.
"""

from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from contextlib import AbstractAsyncContextManager, asynccontextmanager, contextmanager
from time import perf_counter
from typing import Any

from sqlalchemy import ColumnElement, CursorResult, Executable, RowMapping, Select, Table
from sqlalchemy import Row as SqlRow
from sqlalchemy.dialects import postgresql, sqlite
from sqlalchemy.exc import DBAPIError, SQLAlchemyError, StatementError
from sqlalchemy.exc import TimeoutError as PoolTimeout
from sqlalchemy.ext.asyncio import AsyncConnection, AsyncEngine

from router.errors import BadRequest, StoreError, StoreFull, StoreLost
from router.jobs.store.measures import Act, Measures, Trouble, act_of
from router.jobs.store.wakes import Topic, Wakes

BUSY_S = 10.0
"""Longest wait for a lock another process or router holds."""

_TROUBLE = {StoreLost: Trouble.LOST, StoreFull: Trouble.FULL}

Clock = Callable[[], float]
Condition = ColumnElement[bool]
Query = Select[*tuple[Any, ...]]
Row = SqlRow[*tuple[Any, ...]]
Insert = sqlite.Insert | postgresql.Insert


class Transaction:
    """One transaction: statements, the time, and the bells to ring once it is committed."""

    def __init__(self, connection: AsyncConnection, database: "Database") -> None:
        self.connection = connection
        self.topics: set[Topic] = set()
        self._database = database
        self._now: float | None = None

    async def run(
        self, statement: Executable, values: Sequence[Mapping[str, Any]] | Mapping[str, Any] | None = None
    ) -> int:
        """Execute with these values, once for each if there are several; the number of rows it changed."""
        return (await self._do(statement, values)).rowcount

    async def all(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Sequence[RowMapping]:
        """Every row it gives."""
        return (await self._do(statement, values)).mappings().all()

    async def rows(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Sequence[Row]:
        """Every row it gives, as a tuple: cheaper, where there are many."""
        return (await self._do(statement, values)).all()

    async def first(self, statement: Executable, values: Mapping[str, Any] | None = None) -> RowMapping | None:
        """The first row it gives."""
        return (await self._do(statement, values)).mappings().first()

    async def scalar(self, statement: Executable, values: Mapping[str, Any] | None = None) -> Any:  # noqa: ANN401 - what a column holds
        """The first column of the first row, or None."""
        return (await self._do(statement, values)).scalar()

    async def _do(self, statement: Executable, values: Any = None) -> CursorResult[Any]:  # noqa: ANN401 - as above
        began = perf_counter()
        try:
            return await self.connection.execute(statement, values)
        finally:
            self._database.measures.since(began, act_of(statement))

    async def now(self) -> float:
        """Unix seconds by the clock that all routers at this database share; one value in one transaction."""
        if self._now is None:
            self._now = await self._database.time(self)
        return self._now

    def wake(self, *topics: Topic) -> None:
        """Ring these after the commit."""
        self.topics.update(topics)


class Database(ABC):
    """What SQLite and PostgreSQL do differently."""

    def __init__(self, clock: Clock | None) -> None:
        self.wakes = Wakes()
        self.measures = Measures()
        self.clock = clock

    @abstractmethod
    async def open(self, router: str) -> None:
        """Bring the schema up to date and connect. `router` is the id this router is known by to the others."""

    @abstractmethod
    async def close(self) -> None:
        """Close every connection."""

    @abstractmethod
    async def listen(self) -> None:
        """Hear other routers' bells until cancelled."""

    @abstractmethod
    async def time(self, tx: Transaction) -> float:
        """Unix seconds by the shared clock."""

    @abstractmethod
    async def disk_bytes(self, tx: Transaction) -> int:
        """Bytes the database takes on disk."""

    @abstractmethod
    async def gone(self, tx: Transaction, router: str, *, namesake: bool) -> bool:
        """Whether a router's process is known to be dead. `namesake`: it has the asking router's name."""

    @abstractmethod
    async def tidy(self) -> bool:
        """Give a little unused space back to the disk; whether there is more."""

    @abstractmethod
    def insert(self, table: Table) -> Insert:
        """An INSERT that knows ON CONFLICT."""

    @abstractmethod
    def _writing(self) -> AbstractAsyncContextManager[None]:
        """What a writer holds meanwhile."""

    @abstractmethod
    def _engines(self) -> tuple[AsyncEngine, AsyncEngine]:
        """For reading and for writing."""

    @abstractmethod
    def _kind(self, error: DBAPIError) -> type[StoreError]:
        """What an error of the driver means."""

    @abstractmethod
    async def _announce(self, tx: Transaction) -> None:
        """Tell other routers, inside the transaction."""

    @abstractmethod
    async def _room(self, tx: Transaction) -> None:
        """Raise StoreFull when there is only as much space left as clearing up may need."""

    @abstractmethod
    async def _relieve(self) -> None:
        """After StoreFull, by whoever holds the turn to write: make what room can be made at once."""

    @asynccontextmanager
    async def read(self) -> AsyncIterator[Transaction]:
        """A snapshot for the length of the block."""
        with self._translated():
            async with self._engines()[0].connect() as connection:
                yield Transaction(connection, self)

    @asynccontextmanager
    async def write(self, *, grows: bool = False) -> AsyncIterator[Transaction]:
        """A transaction that is committed when the block ends, and undone when it raises.

        One that `grows` brings bytes to keep: StoreFull while the rest of the disk is needed to clear up.
        """
        asked = perf_counter()
        async with self._writing():
            self.measures.since(asked, Act.TURN)
            try:
                with self._translated():
                    async with self._engines()[1].begin() as connection:
                        tx = Transaction(connection, self)
                        if grows:
                            await self._room(tx)
                        yield tx
                        if tx.topics:
                            await self._announce(tx)
                        began = perf_counter()
                self.measures.since(began, Act.COMMIT)
            except StoreFull:
                await self._relieve()
                raise
        self.wakes.ring(tx.topics)

    @contextmanager
    def _translated(self) -> Iterator[None]:
        try:
            yield
        except StoreError as error:
            self._count(type(error))
            raise
        except DBAPIError as error:
            raise self._error(StoreLost if error.connection_invalidated else self._kind(error), error) from error
        except StatementError as error:
            if isinstance(error.orig, BadRequest):
                raise error.orig from None
            raise self._error(StoreError, error) from error
        except (PoolTimeout, OSError) as error:
            raise self._error(StoreLost, error) from error
        except SQLAlchemyError as error:
            raise self._error(StoreError, error) from error

    def _error(self, kind: type[StoreError], cause: Exception) -> StoreError:
        self._count(kind)
        return kind(_said(kind, cause))

    def _count(self, kind: type[StoreError]) -> None:
        self.measures.errors.add((_TROUBLE.get(kind, Trouble.REFUSED),))


def _said(kind: type[StoreError], error: BaseException) -> str:
    """Our words first, the driver's own after; never the statement, which may hold a caller's text."""
    cause = getattr(error, "orig", None) or error
    words = {StoreLost: "The database cannot be reached", StoreFull: "The database has no space left"}
    told = str(cause).partition("\n")[0][:200]
    return f"{words.get(kind, 'The database refused')}: {type(cause).__name__}: {told}"
