"""Reads a batch's input file piece by piece: which lines there are, and where each stands.

Rules:
- A line ends at "\\n" and nowhere else. A byte order mark is stripped; blank lines are skipped and counted.
- One bad line spoils the batch, so every bad line is looked for (`checks` says what is bad).
- Memory does not grow with the file: one line at most is held, and for each custom_id a hash and a line number.

Reading holds the interpreter for 10 ms a MiB of long lines, 150 ms of the shortest; `intake` does it in a thread.
"""

from router.jobs.checks import Checks, Rules
from router.jobs.findings import Findings
from router.jobs.store import NewJob

__all__ = ["Reader", "Rules"]

_BOM = b"\xef\xbb\xbf"


class Reader:
    """Reads one file. `feed` it in pieces, then `end`; both return the jobs found, none once anything is wrong.

    `url` is the batch's endpoint. `found` is what is wrong; `done` is True when reading on would tell nothing more;
    `jobs` and `tokens` are sums over what was read.
    """

    def __init__(self, url: str, rules: Rules) -> None:
        self._rules = rules
        self._held: list[bytes] = []
        self._held_bytes = self._offset = self._line = 0
        self.found = Findings()
        self._checks = Checks(url, rules, self.found)
        self.jobs = self.tokens = 0
        self.done = False

    @property
    def model(self) -> str | None:
        """The one model asked for, None when there are several or none."""
        return self._checks.model

    def feed(self, data: bytes) -> list[NewJob]:
        """Read the next piece of the file."""
        first, *rest = data.split(b"\n")
        self._hold(first)
        if not rest:
            return []
        last = rest.pop()
        jobs = self._read_held()
        for raw in rest:
            if raw:
                jobs += self._read(raw, len(raw))
            else:
                self._line += 1
                self._offset += 1
        self._hold(last)
        return [] if self.found else jobs

    def end(self) -> list[NewJob]:
        """The file ends here."""
        jobs = self._read_held()
        if not self.jobs and not self.found:
            self.found.refuse("empty_file", "The input file has no lines.")
        return [] if self.found else jobs

    def _hold(self, raw: bytes) -> None:
        """Keep the part of a line that has come; of one that is too long, only its size."""
        self._held_bytes += len(raw)
        if self._held_bytes > self._rules.line_bytes:
            self._held.clear()
        else:
            self._held.append(raw)

    def _read_held(self) -> list[NewJob]:
        """Read the line that has now come whole."""
        raw, length = b"".join(self._held), self._held_bytes
        self._held.clear()
        self._held_bytes = 0
        return self._read(raw, length)

    def _read(self, raw: bytes, length: int) -> list[NewJob]:
        """Read one line of `length` bytes; of one that is too long `raw` may be anything."""
        if self.done:
            return []
        self._line += 1
        offset = self._offset
        self._offset += length + 1
        if length > self._rules.line_bytes:
            limit = f"This line is longer than {self._rules.line_bytes} bytes."
            self.found.add("invalid_request", limit, None, self._line)
            return []
        if self._line == 1 and raw.startswith(_BOM):
            raw = raw[len(_BOM) :]
            offset += len(_BOM)
        if not raw or raw.isspace():
            return []
        return self._check(raw, offset)

    def _check(self, raw: bytes, offset: int) -> list[NewJob]:
        self.jobs += 1
        if self.jobs > self._rules.lines:
            self.done = True
            limit = f"The input file has more than {self._rules.lines} requests."
            self.found.refuse("batch_request_limit_exceeded", limit)
            return []
        asked = self._checks.line(raw, self._line)
        if asked is None:
            return []
        self.tokens += asked.size
        return [
            NewJob(
                line=self._line,
                custom_id=asked.custom_id,
                offset=offset,
                length=len(raw),
                model=asked.model,
                prefix=asked.prefix,
                size=asked.size,
            )
        ]
