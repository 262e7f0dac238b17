"""Files: rows of at most 1 MiB, found by where they start.

A deleted file is invisible at once; its bytes go in small steps, and not while a batch still reads its lines from it.
"""

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from sqlalchemy import BigInteger, Integer, LargeBinary, bindparam, cast, func, select, update

from router.errors import NotFound, StoreError
from router.jobs.schema import CHUNK_BYTES, chunks, files
from router.jobs.store.database import Condition, Transaction
from router.jobs.store.rows import FileRow, file_row
from router.jobs.store.shelf import Shelf, is_state, known
from router.jobs.store.writer import Draft, FileWriter

READY = is_state(files.c.state, "ready")
"""Files that callers see, as far as they are not past their time."""
_AT = bindparam("at", type_=BigInteger)
PIECE = (
    select(
        func.substr(
            chunks.c.data,
            cast(_AT - chunks.c.start + 1, Integer),
            bindparam("length", type_=Integer),
            type_=LargeBinary,
        ).label("piece")
    )
    .where(chunks.c.file == bindparam("file", type_=BigInteger), chunks.c.start <= _AT)
    .order_by(chunks.c.start.desc())
    .limit(1)
)
"""At most `length` bytes of a file from `at`, as many as one row has."""


class Files(Shelf):
    """Files as callers see them."""

    @asynccontextmanager
    async def writing(
        self, *, caller: str, purpose: str, filename: str, expires_s: int | None
    ) -> AsyncIterator[FileWriter]:
        """Write a new file. It is there when the block ends, and leaves nothing when the block raises."""
        draft = Draft(caller=caller, purpose=purpose, filename=filename, expires_s=expires_s)
        async with FileWriter(self._db, self.router, draft, self._in_hand) as writer:
            yield writer

    async def file(self, caller: str, file_id: str) -> FileRow | None:
        """One file of this caller."""
        if not known(file_id):
            return None
        async with self._db.read() as tx:
            row = await tx.first(select(files).where(files.c.id == file_id, *visible(caller, await tx.now())))
            return file_row(row) if row else None

    async def files(
        self,
        caller: str,
        *,
        purpose: str | None = None,
        limit: int = 10000,
        order: str = "desc",
        after: str | None = None,
    ) -> tuple[list[FileRow], bool]:
        """A page of this caller's files in the order they came (`asc`) or newest first, and whether there are more."""
        async with self._db.read() as tx:
            query = select(files).where(*visible(caller, await tx.now())).limit(limit + 1)
            if purpose is not None:
                query = query.where(files.c.purpose == purpose)
            if after is not None:
                number = await _number(tx, caller, after)
                query = query.where(files.c.number < number if order == "desc" else files.c.number > number)
            rows = await tx.all(query.order_by(files.c.number.desc() if order == "desc" else files.c.number))
        return [file_row(row) for row in rows[:limit]], len(rows) > limit

    async def delete_file(self, caller: str, file_id: str) -> bool:
        """Delete a file; False if there is none."""
        if not known(file_id):
            return False
        async with self._db.write() as tx:
            found = (files.c.id == file_id, *visible(caller, await tx.now()))
            return bool(await tx.run(update(files).where(*found).values(state="deleting")))

    async def content(self, file: FileRow, start: int = 0, length: int | None = None) -> AsyncIterator[bytes]:
        """The bytes of a file, in pieces of at most 1 MiB. StoreError if it is deleted meanwhile.

        Each piece is a transaction of its own, so a slow reader holds nothing.
        """
        end = file.bytes if length is None else min(file.bytes, start + length)
        while start < end:
            async with self._db.read() as tx:
                piece = await _piece(tx, file.number, start, end - start)
            yield piece
            start += len(piece)


def visible(caller: str, now: float) -> tuple[Condition, ...]:
    """Files of a caller that are whole and not past their time."""
    return files.c.caller == caller, READY, (files.c.expires_at.is_(None) | (files.c.expires_at > now))


async def _number(tx: Transaction, caller: str, file_id: str) -> int:
    found = None
    if known(file_id):
        found = await tx.scalar(select(files.c.number).where(files.c.caller == caller, files.c.id == file_id))
    if found is None:
        raise NotFound(f"No such File object: {file_id[:128]}", param="after")
    return int(found)


async def _piece(tx: Transaction, file: int, at: int, length: int) -> bytes:
    """At most `length` bytes from `at`, as many as one row has."""
    piece = await tx.scalar(PIECE, {"file": file, "at": at, "length": min(length, CHUNK_BYTES)})
    if not piece:
        raise StoreError("The file was deleted while it was read")
    return bytes(piece)
