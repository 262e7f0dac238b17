"""Uploads: a file that comes in parts, in any order and at the same time.

Completing copies the parts' rows inside the database in small steps into a file nobody sees; one last transaction shows
the file, ends the upload and gives up the parts. A crash before that leaves a pending upload that can be completed.
"""

import hashlib
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from typing import Any

import msgspec
from sqlalchemy import BigInteger, insert, literal, select, update

from router.errors import BadRequest, Conflict, NotFound
from router.jobs.schema import chunks, files, uploads
from router.jobs.store.database import Transaction
from router.jobs.store.files import Files
from router.jobs.store.rows import FileRow, Prefix, UploadRow, file_row, new_id
from router.jobs.store.shelf import is_state, known, locked
from router.jobs.store.writer import Draft, FileWriter, PartWriter

UPLOAD_S = 3600
"""An upload waits this long for its parts (OpenAI: one hour)."""
COPY_CHUNKS = 16
"""Rows of 1 MiB copied in one transaction."""


class Uploads(Files):
    """Uploads as callers see them."""

    async def create_upload(
        self, *, caller: str, purpose: str, filename: str, mime_type: str, size: int, file_expires_s: int | None
    ) -> UploadRow:
        """Begin an upload of `size` bytes in all."""
        async with self._db.write() as tx:
            now = int(await tx.now())
            row: dict[str, Any] = {
                "id": new_id(Prefix.UPLOAD),
                "caller": caller,
                "purpose": purpose,
                "filename": filename,
                "mime_type": mime_type,
                "bytes": size,
                "file_expires_s": file_expires_s,
                "created_at": now,
                "expires_at": now + UPLOAD_S,
                "state": "pending",
            }
            number = await tx.scalar(insert(uploads).values(**row).returning(uploads.c.number))
        return UploadRow(number=number, **row)

    async def upload(self, caller: str, upload_id: str) -> UploadRow | None:
        """One upload of this caller, with its file once it has one."""
        if not known(upload_id):
            return None
        async with self._db.read() as tx:
            return await _upload(tx, caller, upload_id)

    @asynccontextmanager
    async def adding_part(self, caller: str, upload_id: str) -> AsyncIterator[PartWriter]:
        """Write one part. It counts when the block ends, and leaves nothing when the block raises."""
        upload = self._pending(await self.upload(caller, upload_id), upload_id)
        draft = Draft(caller=caller, purpose=upload.purpose, filename=upload.filename, upload=upload.number)
        writer = PartWriter(self._db, self.router, draft, self._in_hand)
        writer.upload_id = upload.id
        async with writer:
            yield writer

    async def complete_upload(
        self, caller: str, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> UploadRow:
        """Make the file of these parts in this order. Asking again with the same parts gives the same answer."""
        found = await self.upload(caller, upload_id)
        if found and found.state == "completed" and await self._made_of(found, part_ids):
            return found
        upload = self._pending(found, upload_id)
        parts = await self._parts(upload, part_ids)
        if md5 is not None and await self._md5(parts) != md5.lower():
            raise BadRequest("The MD5 checksum of the parts differs from the one given.", param="md5")
        draft = Draft(caller=caller, purpose=upload.purpose, filename=upload.filename, expires_s=upload.file_expires_s)
        async with _Whole(self._db, self.router, draft, self._in_hand) as whole:
            whole.upload, whole.part_ids = upload, part_ids
            for part in parts:
                await whole.copy(part)
        return msgspec.structs.replace(upload, state="completed", file=whole.row)

    async def cancel_upload(self, caller: str, upload_id: str) -> UploadRow:
        """Give an upload up; its parts go."""
        upload = await self.upload(caller, upload_id)
        if upload and upload.state == "cancelled":
            return upload
        upload = self._pending(upload, upload_id)
        async with self._db.write() as tx:
            await _leave_pending(tx, upload, state="cancelled")
        return msgspec.structs.replace(upload, state="cancelled")

    @staticmethod
    def _pending(upload: UploadRow | None, upload_id: str) -> UploadRow:
        if upload is None:
            raise NotFound(f"No such Upload object: {upload_id[:128]}", param="id")
        if upload.state != "pending":
            raise Conflict(f"The upload is {upload.state} and takes no more changes.")
        return upload

    async def _made_of(self, upload: UploadRow, part_ids: Sequence[str]) -> bool:
        async with self._db.read() as tx:
            made = await tx.scalar(select(uploads.c.part_ids).where(uploads.c.number == upload.number))
        return bool(made == ",".join(part_ids))

    async def _parts(self, upload: UploadRow, part_ids: Sequence[str]) -> list[FileRow]:
        async with self._db.read() as tx:
            rows = await tx.all(select(files).where(files.c.upload == upload.number, is_state(files.c.state, "part")))
        there = {row["id"]: file_row(row) for row in rows}
        missing = [part for part in part_ids if part not in there]
        if missing or len(set(part_ids)) != len(part_ids) or not part_ids:
            raise BadRequest(
                "`part_ids` must name each part of this upload at most once, and one at least.", param="part_ids"
            )
        parts = [there[part] for part in part_ids]
        size = sum(part.bytes for part in parts)
        if size != upload.bytes:
            raise BadRequest(
                f"The parts hold {size} bytes, the upload was created for {upload.bytes}.", param="part_ids"
            )
        return parts

    async def _md5(self, parts: Sequence[FileRow]) -> str:
        digest = hashlib.md5(usedforsecurity=False)
        for part in parts:
            async for piece in self.content(part):
                digest.update(piece)
        return digest.hexdigest()


class _Whole(FileWriter):
    """The file an upload becomes."""

    upload: UploadRow
    part_ids: Sequence[str]

    async def copy(self, part: FileRow) -> None:
        """Append a part's rows, inside the database."""
        columns = ["file", "start", "data"]
        done = 0
        while done < part.bytes:
            source = select(chunks.c.start).where(chunks.c.file == part.number, chunks.c.start >= done)
            async with self._db.write(grows=True) as tx:
                starts = (await tx.connection.scalars(source.order_by(chunks.c.start).limit(COPY_CHUNKS + 1))).all()
                end = starts[COPY_CHUNKS] if len(starts) > COPY_CHUNKS else part.bytes
                rows = select(literal(self._number, BigInteger), chunks.c.start + self._kept, chunks.c.data).where(
                    chunks.c.file == part.number, chunks.c.start >= done, chunks.c.start < end
                )
                await tx.run(insert(chunks).from_select(columns, rows))
            done = end
        self._kept += part.bytes
        self.bytes = self._kept

    async def _publish(self, tx: Transaction) -> None:
        await _leave_pending(tx, self.upload, state="completed", file_id=self._id, part_ids=",".join(self.part_ids))
        await super()._publish(tx)


async def _leave_pending(tx: Transaction, upload: UploadRow, **values: str) -> None:
    """End a pending upload and give up its parts."""
    pending = (uploads.c.number == upload.number, is_state(uploads.c.state, "pending"))
    if await tx.first(locked(select(uploads.c.number).where(*pending))) is None:
        raise Conflict("The upload was ended by another request.")
    await tx.run(update(uploads).where(*pending).values(**values))
    parts = (files.c.upload == upload.number, is_state(files.c.state, "part"))
    await tx.run(update(files).where(*parts).values(state="deleting"))


async def _upload(tx: Transaction, caller: str, upload_id: str) -> UploadRow | None:
    row = await tx.first(select(uploads).where(uploads.c.caller == caller, uploads.c.id == upload_id))
    if row is None:
        return None
    values = {name: row[name] for name in UploadRow.__struct_fields__ if name in row}
    if row["state"] == "pending" and row["expires_at"] <= await tx.now():
        values["state"] = "expired"
    file = None
    if row["file_id"] is not None:
        file = await tx.first(select(files).where(files.c.id == row["file_id"], is_state(files.c.state, "ready")))
    return UploadRow(**values, file=file_row(file) if file else None)
