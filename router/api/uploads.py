"""Uploads: a long file in parts, which may come at the same time, as OpenAI's Uploads API."""

import re
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from router.api.asks import chosen, kept_s, missing, required, text, whole, wrong_type
from router.api.desk import Desk, Visit
from router.api.files import PURPOSES, check_batch_file, check_part_quota, check_quota, file_object, over_quota
from router.api.ops import json_response
from router.api.parts import Filling, Limit, parts, plain_name
from router.errors import BadRequest, TooLarge
from router.jobs.store import UploadRow

_MD5 = re.compile(r"[0-9a-fA-F]{32}", re.ASCII)


class Uploads:
    """`/uploads` and what is below it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[BaseRoute]:
        """Paths without version."""
        route = self._desk.route
        return [
            route("/uploads", POST=self.create),
            route("/uploads/{id}/parts", POST=self.add_part),
            route("/uploads/{id}/complete", POST=self.complete),
            route("/uploads/{id}/cancel", POST=self.cancel),
        ]

    async def create(self, visit: Visit) -> Response:
        """Begin an upload of a file of known size."""
        desk, told = self._desk, await visit.told()
        filename = plain_name(required(told, "filename", 1024))
        mime_type = required(told, "mime_type", 255)
        purpose = chosen("purpose", required(told, "purpose"), PURPOSES)
        if told.get("bytes") is None:
            raise missing("bytes")
        size = whole("bytes", told["bytes"], 1, desk.bounds.file_bytes)
        expires_s = kept_s("expires_after", told.get("expires_after"))
        if purpose == "batch":
            check_batch_file(desk, filename, size, "bytes")
            expires_s = expires_s or desk.bounds.batch_file_s
        left = await check_quota(desk, visit.caller)
        if size > left:
            raise over_quota(f"The file is larger than the {left} bytes you may still store.")
        upload = await desk.store.create_upload(
            caller=visit.caller,
            purpose=purpose,
            filename=filename,
            mime_type=mime_type,
            size=size,
            file_expires_s=expires_s,
        )
        return json_response(upload_object(upload))

    async def add_part(self, visit: Visit) -> Response:
        """Take one part in."""
        limit = await self._limit(visit)
        events = parts(visit.heading.content_type, visit.pieces())
        async with self._desk.store.adding_part(visit.caller, visit.id) as writer:
            await Filling("data", writer, limit).fill(events)
        part = writer.row
        told = {"id": part.id, "object": "upload.part", "created_at": part.created_at, "upload_id": part.upload_id}
        return json_response(told)

    async def _limit(self, visit: Visit) -> Limit:
        left, most = await check_part_quota(self._desk, visit.caller), self._desk.bounds.part_bytes
        if left < most:
            return Limit(left, lambda: over_quota(f"The part is larger than the {left} bytes you may still store."))
        return Limit(most, lambda: TooLarge(f"The part is larger than {most} bytes.", param="data"))

    async def complete(self, visit: Visit) -> Response:
        """Put the parts together in the order named."""
        told = await visit.told()
        if told.get("part_ids") is None:
            raise missing("part_ids")
        if type(told["part_ids"]) is not list:
            raise wrong_type("part_ids", "an array", told["part_ids"])
        part_ids = [text(f"part_ids[{index}]", part) for index, part in enumerate(told["part_ids"])]
        md5 = told.get("md5")
        if md5 is not None and not _MD5.fullmatch(text("md5", md5)):
            raise BadRequest("Invalid value for 'md5': expected 32 hex digits.", param="md5", code="invalid_value")
        upload = await self._desk.store.complete_upload(visit.caller, visit.id, part_ids, md5)
        return json_response(upload_object(upload))

    async def cancel(self, visit: Visit) -> Response:
        """Give an upload up."""
        await visit.body()
        return json_response(upload_object(await self._desk.store.cancel_upload(visit.caller, visit.id)))


def upload_object(row: UploadRow) -> dict[str, Any]:
    """OpenAI's Upload."""
    return {
        "id": row.id,
        "object": "upload",
        "bytes": row.bytes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": row.state,
        "file": None if row.file is None else file_object(row.file),
    }
