"""One line of a batch and the same call unstreamed, asked of one node; what differs, field by field.

A line takes the way it takes in a batch, without the store: made into a call, sent down the corridor as a stream, put
together, judged, and sent again unstreamed where the node says that it does not stream this.
"""

import json
import re
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from router.jobs.answers import read
from router.jobs.assemble import Assembly
from router.jobs.calls import Calls
from router.jobs.store import JobRow
from router.jobs.verdicts import End, Plain, answered
from tests.rig import App, ask

BATCHES = Path(__file__).parents[2] / "docs" / "batches.md"
CHANGING = frozenset(("id", "call_id", "created", "created_at", "completed_at", "cached_tokens"))
"""What is another one each time, in either form: only its type is compared."""
UNREAD = frozenset(("timings",))
"""How fast it went this time."""
NEAR = 0.02
"""How far numbers may be apart: sums in another order, and probabilities made of them."""


@dataclass
class Differences:
    """Paths, with `[]` for any place of a list. `missing` has only the unstreamed form, `extra` only the other."""

    missing: set[str] = field(default_factory=set)
    extra: set[str] = field(default_factory=set)
    other: set[str] = field(default_factory=set)

    def find(self, whole: Any, joined: Any, path: str = "") -> None:
        """Compare two values."""
        if isinstance(whole, dict) and isinstance(joined, dict):
            self._find_keys(whole, joined, path)
        elif isinstance(whole, list) and isinstance(joined, list):
            for one, another in zip(whole, joined, strict=False):
                self.find(one, another, f"{path}[]")
            if len(whole) != len(joined):
                (self.missing if len(whole) > len(joined) else self.extra).add(f"{path}[]")
        elif not _same(path.rpartition(".")[2], whole, joined):
            self.other.add(path)

    def _find_keys(self, whole: Mapping[str, Any], joined: Mapping[str, Any], path: str) -> None:
        for key in whole.keys() | joined.keys():
            inner = f"{path}.{key}" if path else key
            if key not in joined:
                self.missing.add(inner)
            elif key not in whole:
                self.extra.add(inner)
            elif key not in UNREAD:
                self.find(whole[key], joined[key], inner)


def _same(key: str, one: Any, another: Any) -> bool:
    if key in CHANGING:
        return type(one) is type(another)
    if key == "arguments":  # vLLM writes them anew where it does not stream them
        return _read(one) == _read(another)
    numbers = isinstance(one, int | float) and isinstance(another, int | float)
    if numbers and not (isinstance(one, int) and isinstance(another, int)):
        return abs(one - another) <= NEAR
    return bool(one == another)


def _read(arguments: str) -> Any:
    try:
        return json.loads(arguments)
    except ValueError:
        return arguments


class Forms:
    """Asks one model in both forms. `streamed` counts the lines that were put together from a stream."""

    def __init__(self, app: App, model: str) -> None:
        self._app = app
        self._model = model
        self.streamed = 0

    async def compare(self, path: str, body: Mapping[str, Any]) -> Differences:
        """What differs. A call that is refused must be refused alike."""
        body = {"model": self._model, **body}
        whole = await ask(self._app.port, body, path)
        status, line = await self._line(path, body)
        assert status == whole.status, (status, line[:300], whole.body[:300])
        found = Differences()
        if status == 200:
            found.find(whole.json, json.loads(line))
        else:
            assert json.loads(line)["error"]["message"] == whole.error["message"]
        return found

    async def _line(self, path: str, body: Mapping[str, Any]) -> tuple[int, bytes]:
        inside = self._app.inside
        row = {"custom_id": "a", "method": "POST", "url": path, "body": body}
        with ThreadPoolExecutor(1) as reader:
            calls = Calls(inside.fleet, inside.tokens, inside.estimates, reader, long_prompt_tokens=8192)
            verdict: Any = Plain()
            for streamed in (True, False):
                call = await calls.of(_job(path, self._model), json.dumps(row).encode(), streamed=streamed)
                async with inside.dispatcher.open(call) as reply:
                    said = await read(reply, call)
                whole = said.body() if isinstance(said, Assembly) else said
                verdict = answered(reply.status, whole, request_id=call.id, streamed=call.stream)
                if not isinstance(verdict, Plain):
                    break
        assert isinstance(verdict, End), verdict
        self.streamed += isinstance(said, Assembly)
        result = verdict.result
        assert result.status is not None
        assert result.body is not None
        return result.status, result.body


def _job(path: str, model: str) -> JobRow:
    return JobRow(
        batch=1, batch_id="batch_1", line=1, custom_id="a", caller="nightly", endpoint=path, input=1, offset=0,
        length=1, model=model, prefix=0, size=1, attempts=0, returns=0, node=None, epoch=1, expires_at=0,
    )  # fmt: skip


def listed(engine: str, path: str) -> tuple[set[str], set[str]]:
    """What docs/batches.md says of an engine's endpoint: paths only the unstreamed form has, paths that differ."""
    lines = [line for line in BATCHES.read_text().splitlines() if line.startswith(f"| {engine}")]
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in lines]
    row = next(row for row in rows if row[1] == f"`{path}`")
    return set(re.findall(r"`([^`]+)`", row[2])), set(re.findall(r"`([^`]+)`", row[3]))
