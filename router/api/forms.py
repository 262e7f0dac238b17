"""What a multipart form says that routing needs: its fields `model` and `stream`, wherever they stand.

The form is read once to the end, by a streaming parser over the bytes already here, so that two `model` fields, which
two readers could take differently, are refused. The bytes themselves go on untouched.
"""

from python_multipart.exceptions import FormParserError
from python_multipart.multipart import MultipartParser, parse_options_header

from router.core.body import Body
from router.errors import BadRequest

_WANTED = (b"model", b"stream")
_VALUE_BYTES = 4096


class _Form:
    """Collects the wanted fields while a parser runs over the form."""

    def __init__(self, boundary: bytes) -> None:
        self.found: dict[bytes, bytes] = {}
        self._header = b""
        self._value = b""
        self._field: bytes | None = None
        self.parser = MultipartParser(
            boundary,
            {
                "on_part_begin": self._part_begin,
                "on_part_data": self._part_data,
                "on_header_field": self._header_field,
                "on_header_value": self._header_value,
                "on_header_end": self._header_end,
                "on_end": self._end,
            },
        )
        self.whole = False

    def _part_begin(self) -> None:
        self._field = None

    def _header_field(self, data: bytes, start: int, end: int) -> None:
        self._header += data[start:end]

    def _header_value(self, data: bytes, start: int, end: int) -> None:
        self._value += data[start:end]

    def _header_end(self) -> None:
        if self._header.lower() == b"content-disposition":
            _, options = parse_options_header(self._value)
            name = options.get(b"name")
            if name in _WANTED and b"filename" not in options:
                if name in self.found:
                    field = name.decode()
                    raise BadRequest(f"The form has more than one field '{field}'.", param=field, code="invalid_value")
                self._field = name
                self.found[name] = b""
        self._header = self._value = b""

    def _part_data(self, data: bytes, start: int, end: int) -> None:
        if self._field is not None and len(self.found[self._field]) <= _VALUE_BYTES:
            self.found[self._field] += data[start:end]

    def _end(self) -> None:
        self.whole = True


def read_form(content_type: bytes, raw: bytes) -> Body:
    """Read the form `raw`. Raises BadRequest for a form that cannot be read or names no model, or two."""
    kind, options = parse_options_header(content_type)
    boundary = options.get(b"boundary")
    if kind != b"multipart/form-data" or not boundary:
        raise BadRequest("The Content-Type of the form must be multipart/form-data and name its boundary.")
    try:
        form = _Form(boundary)
        form.parser.write(raw)
    except FormParserError:
        raise BadRequest("We could not parse the form in your request.") from None
    if not form.whole:
        raise BadRequest("The form in your request is not complete.")
    stream = form.found.get(b"stream", b"").strip().lower() in (b"true", b"1", b"on", b"yes")
    model = form.found.get(b"model")
    return Body.for_form(None if model is None else model.decode("utf-8", "replace").strip(), stream, len(raw))
