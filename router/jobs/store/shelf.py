"""What every part of the store stands on, and the words they share."""

import re
from collections import deque
from collections.abc import Iterable

from sqlalchemy import BigInteger, ColumnElement, Double, Text, bindparam, func, literal_column, select

from router.jobs.schema import jobs, routers
from router.jobs.store.database import Condition, Database, Query, Transaction
from router.jobs.store.measures import Measures
from router.jobs.store.wakes import Wakes

OF_BATCH = bindparam("of_batch", type_=BigInteger)
OF_LINES = bindparam("of_lines", type_=BigInteger, expanding=True)
"""Which rows of `jobs` a statement is about that is built once and asked often: building it takes as long as asking."""
THESE = (jobs.c.batch == OF_BATCH) & jobs.c.line.in_(OF_LINES)
STEP_ROWS = 2000
"""Most rows one upkeep transaction changes."""
PACE_S = 60.0
"""Lines finished in the last so many seconds are a router's pace."""
OTHERS = select(func.coalesce(func.sum(routers.c.pace), 0)).where(
    routers.c.id != bindparam("me", type_=Text), routers.c.beat_at >= bindparam("since", type_=Double)
)
"""The pace of the other live routers."""
_ID = re.compile(r"[A-Za-z0-9_-]{1,128}", re.ASCII)


class Shelf:
    """One part of the store: the database, who we are in it, and what this process has in hand."""

    def __init__(self, database: Database, router: str, name: str, stale_s: float) -> None:
        self._db = database
        self.router = router
        self.name = name
        self._stale_s = stale_s
        self._in_hand: set[int] = set()
        self._finished: deque[tuple[float, int]] = deque(maxlen=4096)

    @property
    def wakes(self) -> Wakes:
        """The bells that say there may be work."""
        return self._db.wakes

    @property
    def measures(self) -> Measures:
        """How long it takes, and what goes wrong."""
        return self._db.measures

    async def now(self) -> float:
        """Unix seconds by the clock that leases and deadlines are compared with."""
        async with self._db.read() as tx:
            return await tx.now()

    def _own_pace(self, now: float) -> int:
        """Lines this router finished in the last minute."""
        while self._finished and not now - PACE_S <= self._finished[0][0] <= now + 1:  # later: the clock was set back
            self._finished.popleft()
        return sum(lines for _, lines in self._finished)

    def _others(self, now: float) -> dict[str, object]:
        return {"me": self.router, "since": now - self._stale_s}

    async def _pace(self, tx: Transaction) -> int:
        """Lines all live routers finished in the last minute."""
        now = await tx.now()
        return self._own_pace(now) + int(await tx.scalar(OTHERS, self._others(now)))


def is_state(column: ColumnElement[str], *states: str) -> Condition:
    """Whether a column is one of these states, written out in the SQL so that partial indexes serve."""
    literals: list[ColumnElement[str]] = [literal_column(f"'{state}'") for state in states]
    return column == literals[0] if len(literals) == 1 else column.in_(literals)


def known(*ids: str) -> bool:
    """Whether these could be ids of ours at all: PostgreSQL refuses text with a zero byte, callers may send it."""
    return all(_ID.fullmatch(id_) for id_ in ids)


def locked(query: Query, *, skip: bool = False) -> Query:
    """Lock the rows of a query until the transaction ends. SQLite's writer holds the whole file already."""
    return query.with_for_update(key_share=True, skip_locked=skip)


def of_lines(batch: int, lines: Iterable[int]) -> Condition:
    """Rows of `jobs` with these keys."""
    return (jobs.c.batch == batch) & jobs.c.line.in_(list(lines))
