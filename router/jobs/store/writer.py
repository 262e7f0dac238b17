"""Writing a file in pieces of at most 1 MiB, each its own transaction; nobody sees it before the end.

Memory: one piece. A file whose writer is lost stays invisible, and the sweep removes it.
"""

from types import TracebackType
from typing import Self

import msgspec
from sqlalchemy import insert, update

from router.errors import StoreError, StoreLost
from router.jobs.schema import CHUNK_BYTES, chunks, files
from router.jobs.store.database import Database, Transaction
from router.jobs.store.rows import FileRow, PartRow, Prefix, new_id


class Draft(msgspec.Struct, kw_only=True):
    """What a file will be called. May change until it is published; `upload` is the number of what it is a part of."""

    caller: str
    purpose: str
    filename: str
    expires_s: int | None = None
    upload: int | None = None


class Writer:
    """Takes bytes for one new file. `bytes` counts what came."""

    prefix = Prefix.FILE

    def __init__(self, database: Database, router: str, draft: Draft, in_hand: set[int]) -> None:
        self.bytes = 0
        self._db = database
        self._router = router
        self._draft = draft
        self._in_hand = in_hand
        self._pending = bytearray()
        self._kept = 0
        self._number = 0
        self._id = new_id(self.prefix)

    async def write(self, data: bytes | bytearray | memoryview) -> None:
        """Take more bytes. Returns once all but the last unfinished piece are in the database."""
        rest = memoryview(data)
        self.bytes += len(rest)
        while len(self._pending) + len(rest) >= CHUNK_BYTES:
            take = CHUNK_BYTES - len(self._pending)
            self._pending += rest[:take]
            rest = rest[take:]
            await self._keep()
        self._pending += rest

    async def _keep(self) -> None:
        piece = bytes(self._pending)
        async with self._db.write(grows=True) as tx:
            await tx.run(insert(chunks).values(file=self._number, start=self._kept, data=piece))
        self._kept += len(piece)
        self._pending.clear()

    async def __aenter__(self) -> Self:
        draft = self._draft
        row = {
            "id": self._id,
            "caller": draft.caller,
            "purpose": draft.purpose,
            "filename": draft.filename,
            "state": "writing",
            "writer": self._router,
            "upload": draft.upload,
        }
        async with self._db.write() as tx:
            made = insert(files).values(**row, created_at=int(await tx.now())).returning(files.c.number)
            self._number = await tx.scalar(made)
            # Before anybody can see the row: a sweep takes a file of ours that is not in hand for one that was dropped.
            self._in_hand.add(self._number)
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            if error is None:
                if self._pending:
                    await self._keep()
                async with self._db.write() as tx:
                    await self._publish(tx)
        except BaseException:
            await self._discard()
            raise
        finally:
            self._in_hand.discard(self._number)
        if error is not None:
            await self._discard()

    async def _publish(self, tx: Transaction) -> None:
        await self._show(tx, "ready", self._draft.expires_s)

    async def _show(self, tx: Transaction, state: str, expires_s: int | None) -> FileRow:
        now = int(await tx.now())
        row = FileRow(
            number=self._number,
            id=self._id,
            caller=self._draft.caller,
            purpose=self._draft.purpose,
            filename=self._draft.filename,
            bytes=self._kept,
            created_at=now,
            expires_at=None if expires_s is None else now + expires_s,
        )
        mine = (files.c.number == self._number) & (files.c.state == "writing")
        shown = update(files).where(mine).values(**msgspec.structs.asdict(row), state=state, writer=None)
        if not await tx.run(shown):
            raise StoreLost("The file was taken away while it was written: this router was thought dead")
        return row

    async def _discard(self) -> None:
        mine = (files.c.number == self._number) & (files.c.state == "writing")
        try:
            async with self._db.write() as tx:
                await tx.run(update(files).where(mine).values(state="deleting", writer=None))
        except StoreError:
            return  # the sweep finds it by its writer


class FileWriter(Writer):
    """Writes a file. `purpose`, `filename` and `expires_s` may be told late: a form may send the bytes first."""

    row: FileRow

    @property
    def purpose(self) -> str:
        """What it is for."""
        return self._draft.purpose

    @purpose.setter
    def purpose(self, purpose: str) -> None:
        self._draft.purpose = purpose

    @property
    def filename(self) -> str:
        """What its sender calls it."""
        return self._draft.filename

    @filename.setter
    def filename(self, filename: str) -> None:
        self._draft.filename = filename

    @property
    def expires_s(self) -> int | None:
        """Seconds it is kept from now on; None for ever."""
        return self._draft.expires_s

    @expires_s.setter
    def expires_s(self, expires_s: int | None) -> None:
        self._draft.expires_s = expires_s

    async def _publish(self, tx: Transaction) -> None:
        self.row = await self._show(tx, "ready", self._draft.expires_s)


class PartWriter(Writer):
    """Writes one part of an upload."""

    prefix = Prefix.PART
    row: PartRow
    upload_id = ""

    async def _publish(self, tx: Transaction) -> None:
        row = await self._show(tx, "part", None)
        self.row = PartRow(id=row.id, upload_id=self.upload_id, created_at=row.created_at, bytes=row.bytes)
