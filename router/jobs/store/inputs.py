"""The bytes of lines, cut out of their input file inside the database.

Lines asked for while a read is under way share the next one: one statement brings many lines.
"""

from collections.abc import Sequence
from itertools import groupby

from sqlalchemy import BigInteger, Integer, LargeBinary, bindparam, cast, func, select

from router.errors import StoreError
from router.jobs.schema import CHUNK_BYTES, chunks, jobs
from router.jobs.store.database import Database, Transaction
from router.jobs.store.files import PIECE
from router.jobs.store.rows import JobRow
from router.jobs.store.shelf import Shelf
from router.jobs.store.together import Together

SHARED_LINES = 256
"""Most lines one read brings."""
SHARED_BYTES = 4 * 2**20
"""Most bytes one read brings, beyond the first line."""

_FILE = bindparam("file", type_=BigInteger)
_ROW = (
    select(func.max(chunks.c.start))
    .where(chunks.c.file == _FILE, chunks.c.start <= jobs.c.offset)
    .correlate(jobs)
    .scalar_subquery()
)
_HERE = chunks.alias()
_PIECE = func.substr(
    _HERE.c.data, cast(jobs.c.offset - _HERE.c.start + 1, Integer), cast(jobs.c.length, Integer), type_=LargeBinary
)
LINES = (
    select(jobs.c.line, _PIECE.label("piece"))
    .select_from(jobs.join(_HERE, (_HERE.c.file == _FILE) & (_HERE.c.start == _ROW)))
    .where(jobs.c.batch == bindparam("of", type_=BigInteger), jobs.c.line.in_(bindparam("lines", expanding=True)))
)
"""What the row in which a line begins has of it; all of it, unless it goes on in the next row."""


class Inputs(Shelf):
    """What lines say."""

    def __init__(self, database: Database, router: str, name: str, stale_s: float) -> None:
        super().__init__(database, router, name, stale_s)
        self._reads = Together(self._read, _length, most=SHARED_LINES, limit=SHARED_BYTES)

    async def line(self, job: JobRow) -> bytes:
        """The bytes of a job's line in its input file."""
        told = await self._reads.ask(job)
        if isinstance(told, StoreError):
            raise told
        return told

    async def lines(self, jobs: Sequence[JobRow]) -> list[bytes | None]:
        """The bytes of many lines at once; None for one whose input is not there."""
        found: list[bytes | None] = []
        for start in range(0, len(jobs), SHARED_LINES):
            told = await self._read(jobs[start : start + SHARED_LINES])
            found += [None if isinstance(line, StoreError) else line for line in told]
        return found

    async def _read(self, wanted: Sequence[JobRow]) -> list[bytes | StoreError]:
        ordered = sorted(wanted, key=lambda job: job.batch)
        found: dict[tuple[int, int], bytes] = {}
        async with self._db.read() as tx:
            for batch, group in groupby(ordered, key=lambda job: job.batch):
                same = list(group)
                values = {"of": batch, "file": same[0].input, "lines": [job.line for job in same]}
                found |= {(batch, row["line"]): bytes(row["piece"]) for row in await tx.all(LINES, values)}
            return [await _whole(tx, job, found.get((job.batch, job.line), b"")) for job in wanted]


def _length(job: JobRow) -> int:
    return job.length


async def _whole(tx: Transaction, job: JobRow, begun: bytes) -> bytes | StoreError:
    """A line whose beginning is read; what is wrong with one line is told for that line."""
    parts, start, end = [begun], job.offset + len(begun), job.offset + job.length
    while start < end:
        piece = await tx.scalar(PIECE, {"file": job.input, "at": start, "length": min(end - start, CHUNK_BYTES)})
        if not piece:
            return StoreError("The input file is not there any more")
        parts.append(bytes(piece))
        start += len(piece)
    return b"".join(parts)
