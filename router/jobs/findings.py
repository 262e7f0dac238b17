"""What is wrong with an input file, in bounded space."""

from router.jobs.store import LineError

LISTED = 100
"""Findings told one by one; one more tells how many there were beyond."""


class Findings:
    """What is wrong: with the file as a whole first, then line by line in its order."""

    def __init__(self) -> None:
        self._listed: list[LineError] = []
        self._whole: list[LineError] = []
        self.count = 0

    def __bool__(self) -> bool:
        return bool(self.count or self._whole)

    def add(self, code: str, message: str, param: str | None, line: int) -> None:
        """One thing wrong with one line."""
        self.count += 1
        if self.count <= LISTED:
            self._listed.append(LineError(code=code, message=message, param=param, line=line))

    def refuse(self, code: str, message: str, param: str | None = None) -> None:
        """The file as a whole cannot be taken."""
        self._whole.append(LineError(code=code, message=message, param=param, line=None))

    def told(self) -> tuple[LineError, ...]:
        """What the batch's `errors` say."""
        rest = self.count - len(self._listed)
        more = f"{rest} more errors were found that are not listed."
        summary = [LineError(code="too_many_errors", message=more, param=None, line=None)] if rest else []
        return (*self._whole, *self._listed, *summary)
