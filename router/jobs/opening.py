"""Whether what is being uploaded begins like JSONL. Only its beginning is looked at; the batch checks the rest."""

import msgspec

OPENING_BYTES = 2**20
"""How much of a file is kept for this."""
_BOM = b"\xef\xbb\xbf"


class Opening:
    """The beginning of a file: its first line that is not blank must be JSON."""

    def __init__(self) -> None:
        self._kept = bytearray()
        self._whole = False

    def feed(self, data: bytes) -> None:
        """The next bytes of the file."""
        if self._whole:
            return
        self._kept += data[: OPENING_BYTES - len(self._kept)]
        self._whole = b"\n" in self._text() or len(self._kept) >= OPENING_BYTES

    def fault(self) -> str | None:
        """Why this is no JSONL, once enough has come or all has."""
        line, newline, _ = self._text().partition(b"\n")
        if not line:
            return "the file is empty"
        if not newline and len(self._kept) >= OPENING_BYTES:
            return None if line.startswith(b"{") else "its first line is not a JSON object"
        try:
            msgspec.json.decode(line, type=msgspec.Raw)
        except (msgspec.DecodeError, RecursionError):
            return "its first line is not JSON"
        return None

    def _text(self) -> bytes:
        return bytes(self._kept).removeprefix(_BOM).lstrip()
