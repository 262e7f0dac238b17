"""Files: kept for batches, as OpenAI's Files API. A caller sees its own and no others."""

from functools import partial
from typing import Any

from starlette.responses import Response
from starlette.routing import BaseRoute

from router.api.asks import KEPT_S, chosen, missing, text, whole_in_text
from router.api.desk import Desk, Quota, Visit
from router.api.downloads import Download
from router.api.ops import json_response
from router.api.parts import Filling, Form, Limit, parts
from router.errors import BadRequest, NotFound, RateLimited, TooLarge
from router.jobs.opening import Opening
from router.jobs.store import FileRow

PURPOSES = ("assistants", "batch", "fine-tune", "vision", "user_data", "evals")
"""What a file may be uploaded for."""
PAGE = (1, 10_000)
DEFAULT_NAME = "upload"
"""What SDKs call a file that has no name of its own; taken as JSONL on its content."""


class Files:
    """`/files` and what is below it."""

    def __init__(self, desk: Desk) -> None:
        self._desk = desk

    def routes(self) -> list[BaseRoute]:
        """Paths without version."""
        route = self._desk.route
        return [
            route("/files", POST=self.create, GET=self.listed),
            route("/files/{id}", GET=self.one, DELETE=self.delete),
            route("/files/{id}/content", GET=self.content),
        ]

    async def create(self, visit: Visit) -> Response:
        """Take a file in, in whatever order the form's parts come."""
        desk = self._desk
        limit = await _limit(desk, visit)
        limit.check(visit.heading.content_length)
        opening = Opening()

        def narrow(fields: dict[str, str], limit: Limit) -> Limit:
            if fields.get("purpose") == "batch":
                limit = _no_more(limit, batch_limit(desk, "file"))
                limit.check(visit.heading.content_length)
            return limit

        events = parts(visit.heading.content_type, visit.pieces())
        writing = desk.store.writing(caller=visit.caller, purpose="", filename=DEFAULT_NAME, expires_s=None)
        async with writing as writer:
            form = await Filling("file", writer, limit, opening.feed, narrow).fill(events)
            purpose = purpose_of(form.fields)
            expires_s = _kept_s(form)
            if purpose == "batch":
                check_batch_file(desk, form.filename, form.size, "file")
                _check_opening(opening)
                expires_s = expires_s or desk.bounds.batch_file_s
            writer.purpose, writer.filename, writer.expires_s = purpose, form.filename, expires_s
        return json_response(file_object(writer.row))

    async def listed(self, visit: Visit) -> Response:
        """One page of files."""
        query = visit.query
        rows, more = await self._desk.store.files(
            visit.caller,
            purpose=query.get("purpose") or None,
            limit=whole_in_text("limit", query.get("limit", str(PAGE[1])), *PAGE),
            order=chosen("order", query.get("order", "desc"), ("asc", "desc")),
            after=query.get("after") or None,
        )
        return json_response(page([file_object(row) for row in rows], more=more))

    async def one(self, visit: Visit) -> Response:
        """One file."""
        return json_response(file_object(await self._found(visit)))

    async def delete(self, visit: Visit) -> Response:
        """Delete a file; a batch that has begun to read it goes on."""
        if not await self._desk.store.delete_file(visit.caller, visit.id):
            raise no_such_file(visit.id)
        return json_response({"id": visit.id, "object": "file", "deleted": True})

    async def content(self, visit: Visit) -> Response:
        """The bytes of a file, or a range of them."""
        file = await self._found(visit)
        read = partial(self._desk.store.content, file)
        return Download(file, read, wanted=visit.header("range"), stall_s=self._desk.terms.write_stall_s)

    async def _found(self, visit: Visit) -> FileRow:
        file = await self._desk.store.file(visit.caller, visit.id)
        if file is None:
            raise no_such_file(visit.id)
        return file


def file_object(row: FileRow) -> dict[str, Any]:
    """OpenAI's FileObject."""
    return {
        "id": row.id,
        "object": "file",
        "bytes": row.bytes,
        "created_at": row.created_at,
        "expires_at": row.expires_at,
        "filename": row.filename,
        "purpose": row.purpose,
        "status": "processed",
        "status_details": None,
    }


def page(data: list[dict[str, Any]], *, more: bool) -> dict[str, Any]:
    """OpenAI's list: SDKs go on after the last id while `has_more`."""
    return {
        "object": "list",
        "data": data,
        "first_id": data[0]["id"] if data else None,
        "last_id": data[-1]["id"] if data else None,
        "has_more": more,
    }


def no_such_file(file_id: str) -> NotFound:
    """The answer to an id that is unknown, another caller's, deleted or expired."""
    return NotFound(f"No such File object: {file_id[:128]}", param="id")


def purpose_of(fields: dict[str, str]) -> str:
    """What the sender says a file is for."""
    if not fields.get("purpose"):
        raise missing("purpose")
    return chosen("purpose", fields["purpose"], PURPOSES)


def check_batch_file(desk: Desk, filename: str, size: int, param: str) -> None:
    """A batch's input has a bound of its own and is called .jsonl. `param` is the field at fault for its size."""
    limit = batch_limit(desk, param)
    if size > limit.bytes:
        raise limit.over()
    if filename != DEFAULT_NAME and not filename.lower().endswith(".jsonl"):
        raise BadRequest("Invalid file format for Batch API. Must be .jsonl")


def batch_limit(desk: Desk, param: str) -> Limit:
    """How long the input of a batch may be."""
    most = desk.bounds.batch_file_bytes
    message = f"The file is larger than {most} bytes, the most for the input of a batch."
    return Limit(most, lambda: TooLarge(message, param=param))


def _no_more(one: Limit, other: Limit) -> Limit:
    return min(one, other, key=lambda limit: limit.bytes)


async def check_quota(desk: Desk, caller: str) -> int:
    """How many bytes a caller may still store. Raises RateLimited when it holds as many files as it may."""
    quota = desk.quota(caller)
    if quota.files is None and quota.bytes is None:
        return desk.bounds.file_bytes
    held = await desk.store.held(caller)
    if quota.files is not None and held.files >= quota.files:
        raise over_quota(f"You hold {held.files} files, and may hold {quota.files}. Delete some.")
    return _bytes_left(desk, quota, held.bytes)


async def check_part_quota(desk: Desk, caller: str) -> int:
    """How many bytes a caller may still store in parts of uploads it has begun."""
    quota = desk.quota(caller)
    return _bytes_left(desk, quota, 0 if quota.bytes is None else (await desk.store.held(caller)).bytes)


def _bytes_left(desk: Desk, quota: Quota, held: int) -> int:
    most = desk.bounds.file_bytes
    return most if quota.bytes is None else min(most, max(0, quota.bytes - held))


def over_quota(message: str) -> RateLimited:
    """The answer to a caller that would hold more than it may. Trying again does not help."""
    return RateLimited(message, retry=False)


async def _limit(desk: Desk, visit: Visit) -> Limit:
    left, most = await check_quota(desk, visit.caller), desk.bounds.file_bytes
    if left < most:
        return Limit(left, lambda: over_quota(f"The file is larger than the {left} bytes you may still store."))
    return Limit(most, lambda: TooLarge(f"The file is larger than {most} bytes.", param="file"))


def _kept_s(form: Form) -> int | None:
    """`expires_after[seconds]` of the form."""
    anchor, seconds = (form.fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return None
    if not anchor or not seconds:
        raise missing(f"expires_after.{'seconds' if anchor else 'anchor'}")
    chosen("expires_after.anchor", text("expires_after.anchor", anchor), ("created_at",))
    return whole_in_text("expires_after.seconds", seconds, *KEPT_S)


def _check_opening(opening: Opening) -> None:
    fault = opening.fault()
    if fault is not None:
        raise BadRequest(f"Invalid file format for Batch API. Must be .jsonl, but {fault}.")
