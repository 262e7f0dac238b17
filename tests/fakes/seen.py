"""What a fake saw: one record for every request, whatever became of it."""

import json
from dataclasses import dataclass, field
from time import monotonic
from typing import Any

#: The ends of a request, seen from the node.
RUNNING, COMPLETED, ABORTED, CUT = "running", "completed", "aborted", "cut"


@dataclass(kw_only=True)
class Seen:
    """One request as it arrived. Times are `time.monotonic()`; `headers` keeps order, case and duplicates."""

    connection: int
    method: str
    target: str
    headers: list[tuple[str, str]]
    body: bytes = b""
    chunked: bool = False
    started: float = field(default_factory=monotonic)
    running_since: float | None = None  # when it got a slot
    sent: list[float] = field(default_factory=list)  # when each token went out
    ended: float | None = None
    outcome: str = RUNNING
    tokens: int = 0  # sent so far
    pushed: int = 0  # bytes of flood taken by the peer or its kernel

    @property
    def path(self) -> str:
        return self.target.partition("?")[0]

    @property
    def query(self) -> str:
        return self.target.partition("?")[2]

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    def header(self, name: str) -> str | None:
        """The one value of a header, or None; more than one is the sender's fault and raises."""
        values = self.header_values(name)
        if len(values) > 1:
            raise AssertionError(f"{name} came {len(values)} times: {values}")
        return values[0] if values else None

    def header_values(self, name: str) -> list[str]:
        return [value for key, value in self.headers if key.lower() == name.lower()]

    def sent_token(self) -> None:
        self.tokens += 1
        self.sent.append(monotonic())

    def end(self, outcome: str) -> None:
        if self.outcome == RUNNING:
            self.outcome, self.ended = outcome, monotonic()
