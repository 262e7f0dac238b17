"""A stored file on its way to a client.

Rules: the bytes as they were stored; one piece is held at a time; a client that reads nothing for too long, or has
left, ends the reading; a file that goes away meanwhile breaks the connection, so that half of it never looks whole.
One range may be asked for (RFC 9110); of several, the whole file is sent, as the RFC allows.
"""

import asyncio
import re
from collections.abc import AsyncIterator, Callable
from urllib.parse import quote

import structlog
from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from router.api.terms import TURN
from router.errors import StoreError
from router.jobs.store import FileRow

Reading = Callable[[int, int], AsyncIterator[bytes]]
"""The bytes of a file from a place on, so many."""

_RANGE = re.compile(r"bytes=(\d{0,18})-(\d{0,18})", re.ASCII)
log = structlog.get_logger()


class Download(Response):
    """A file, or one range of it. `wanted` is the Range header; `stall_s` how long the client may read nothing."""

    def __init__(self, file: FileRow, read: Reading, *, wanted: str | None, stall_s: float) -> None:
        self._read, self._stall_s = read, stall_s
        found = span(wanted, file.bytes)
        headers = {
            "content-type": "application/octet-stream",
            "content-disposition": disposition(file.filename),
            "accept-ranges": "bytes",
        }
        if found is None:
            self._start, self._length, status = 0, 0, 416
            headers["content-range"] = f"bytes */{file.bytes}"
        else:
            self._start, self._length = found
            status = 200
            if self._length < file.bytes or (wanted and self._start):
                status = 206
                headers["content-range"] = f"bytes {self._start}-{self._start + self._length - 1}/{file.bytes}"
        headers["content-length"] = str(self._length)
        super().__init__(None, status, headers)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
        if scope["method"] == "HEAD":
            await send({"type": "http.response.body", "body": b"", "more_body": False})
            return
        leaving = asyncio.ensure_future(_left(receive))
        try:
            await self._pour(send, leaving)
        except (StoreError, TimeoutError) as error:
            log.warning("a download was broken off", reason=str(error) or "its client reads nothing")
            scope["extensions"][TURN].abort()
            await asyncio.sleep(0)  # the server hears of the lost connection before we return
        finally:
            leaving.cancel()

    async def _pour(self, send: Send, leaving: "asyncio.Future[None]") -> None:
        left = self._length
        if left:
            async for piece in self._read(self._start, self._length):
                if leaving.done():
                    return
                left -= len(piece)
                async with asyncio.timeout(self._stall_s):
                    await send({"type": "http.response.body", "body": piece, "more_body": left > 0})
        else:
            await send({"type": "http.response.body", "body": b"", "more_body": False})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def span(wanted: str | None, size: int) -> tuple[int, int] | None:
    """Start and length of what a Range header asks of `size` bytes; all of it without one; None if it has none."""
    told = _RANGE.fullmatch(wanted.strip()) if wanted else None
    if told is None or not (told[1] or told[2]):
        return 0, size
    if not told[1]:
        length = min(int(told[2]), size)
        return (size - length, length) if length else None
    start, end = int(told[1]), min(int(told[2] or size), size - 1)
    if told[2] and int(told[2]) < start:
        return 0, size
    return (start, end - start + 1) if start < size else None


def disposition(filename: str) -> str:
    """Content-Disposition with the name in ASCII, and in UTF-8 when it has other letters (RFC 6266)."""
    plain = "".join(sign if " " <= sign <= "~" and sign not in '"\\' else "_" for sign in filename)
    named = f'attachment; filename="{plain}"'
    return named if plain == filename else f"{named}; filename*=UTF-8''{quote(filename, safe='')}"
