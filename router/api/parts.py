"""Reads a multipart form while it arrives: one part of it is long and goes to a writer, the others are short fields.

Rules:
- Any order: fields may come after the file, and do with clients that stream one.
- Nothing is kept but the fields; what came of the file is written before more is asked for.
- Unknown fields are let be; a field that comes twice is refused, because two readers could take different ones.
"""

from collections.abc import AsyncIterator, Callable
from typing import Protocol

import msgspec
from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.api.asks import missing
from router.errors import Answer, BadRequest, UnsupportedContentType

FIELD_BYTES = 8192
FORM_BYTES = 2**20
"""More than all of a form but its long part has."""
FIELDS = 64
"""Most parts of a form."""
NAME_CHARACTERS = 255


class Sink(Protocol):
    """Where the long part goes."""

    async def write(self, data: bytes) -> None:
        """Take more of it."""


class Part(msgspec.Struct):
    """A part begins; its bytes follow. `filename` is None for a plain field."""

    name: str
    filename: str | None


class Form(msgspec.Struct):
    """What came: the fields, and of the long part its name (the last step of its path) and its size."""

    fields: dict[str, str]
    filename: str
    size: int


class Limit(msgspec.Struct, frozen=True):
    """How long the long part may be; `over` is the answer to more."""

    bytes: int
    over: Callable[[], Answer]

    def check(self, length: int | None) -> None:
        """Refuse a form whose announced `length` cannot be that of a short enough part."""
        if length is not None and length > self.bytes + FORM_BYTES:
            raise self.over()


class _Events:
    """Turns a parser's calls into parts and their bytes. The pieces of a part that came together are given as one."""

    def __init__(self, boundary: bytes) -> None:
        self.whole = False
        self._events: list[Part | bytes] = []
        self._pieces: list[bytes] = []
        self._header = self._value = b""
        self._disposition: dict[bytes, bytes] = {}
        self._parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._begin,
                "on_part_data": self._data,
                "on_part_end": self._join,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_headers_finished": self._headers,
                "on_end": self._end,
            },
        )

    def feed(self, data: bytes) -> list[Part | bytes]:
        self._parser.write(data)
        self._join()
        events, self._events = self._events, []
        return events

    def _begin(self) -> None:
        self._disposition = {}

    def _data(self, data: bytes, start: int, end: int) -> None:
        self._pieces.append(data[start:end])

    def _join(self) -> None:
        if self._pieces:
            self._events.append(b"".join(self._pieces))
            self._pieces.clear()

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            self._disposition = parse_options_header(self._value)[1]
        self._header = self._value = b""

    def _headers(self) -> None:
        name, filename = self._disposition.get(b"name", b""), self._disposition.get(b"filename")
        told = None if filename is None else filename.decode("utf-8", "replace")
        self._events.append(Part(name.decode("utf-8", "replace"), told))

    def _end(self) -> None:
        self.whole = True


async def parts(content_type: bytes, pieces: AsyncIterator[bytes]) -> AsyncIterator[Part | bytes]:
    """The parts of a form, each followed by its bytes. Raises UnsupportedContentType or BadRequest."""
    kind, options = parse_options_header(content_type)
    if kind != b"multipart/form-data":
        raise UnsupportedContentType("Unsupported content type. This path reads 'multipart/form-data'.")
    unreadable = BadRequest("We could not parse the form in your request.")
    try:
        events = _Events(options.get(b"boundary") or b"")
    except FormParserError:
        raise unreadable from None
    if not options.get(b"boundary"):
        raise BadRequest("The Content-Type of the form must name its boundary.")
    async for piece in pieces:
        try:
            found = events.feed(piece)
        except FormParserError:
            raise unreadable from None
        for event in found:
            yield event
    if not events.whole:
        raise BadRequest("The form in your request is not complete.")


def _the_same(_fields: dict[str, str], limit: Limit) -> Limit:
    return limit


class Filling:
    """One form on its way into `sink`: the part named `field` is the long one. `watch` sees its bytes too.

    `narrow` is asked, when the long part begins, what the fields before it leave of the limit.
    """

    def __init__(
        self,
        field: str,
        sink: Sink,
        limit: Limit,
        watch: Callable[[bytes], None] | None = None,
        narrow: Callable[[dict[str, str], Limit], Limit] = _the_same,
    ) -> None:
        self._field, self._sink, self._limit, self._watch, self._narrow = field, sink, limit, watch, narrow
        self._fields: dict[str, bytes] = {}
        self._current: str | None = None
        self._filename: str | None = None
        self._size = self._parts = 0
        self._found = False

    async def fill(self, events: AsyncIterator[Part | bytes]) -> Form:
        """Read the form to its end. Raises BadRequest, or what the limit says."""
        async for event in events:
            if isinstance(event, Part):
                self._begin(event)
            elif self._current is None:
                await self._take(event)
            else:
                self._add(self._current, event)
        if not self._found:
            raise missing(self._field)
        return Form(self._told(), plain_name(self._filename), self._size)

    def _told(self) -> dict[str, str]:
        return {name: value.decode("utf-8", "replace").strip() for name, value in self._fields.items()}

    def _begin(self, part: Part) -> None:
        self._parts += 1
        if self._parts > FIELDS:
            raise BadRequest(f"The form has more than {FIELDS} parts.")
        known = self._found if part.name == self._field else part.name in self._fields
        if known:
            name = part.name[:64]
            raise BadRequest(f"The form has more than one field '{name}'.", param=name, code="invalid_value")
        if part.name == self._field:
            self._found, self._current, self._filename = True, None, part.filename
            self._limit = self._narrow(self._told(), self._limit)
        else:
            self._current = part.name
            self._fields[part.name] = b""

    async def _take(self, data: bytes) -> None:
        self._size += len(data)
        if self._size > self._limit.bytes:
            raise self._limit.over()
        if self._watch is not None:
            self._watch(data)
        await self._sink.write(data)

    def _add(self, name: str, data: bytes) -> None:
        self._fields[name] += data
        if len(self._fields[name]) > FIELD_BYTES:
            told = name[:64]
            raise BadRequest(f"The field '{told}' of the form is too long.", param=told, code="invalid_value")


def plain_name(filename: str | None) -> str:
    """The last step of what a client calls its file, without control characters; `upload` when it says nothing."""
    name = (filename or "").replace("\\", "/").rpartition("/")[2]
    return "".join(sign for sign in name if sign.isprintable())[-NAME_CHARACTERS:].strip() or "upload"
