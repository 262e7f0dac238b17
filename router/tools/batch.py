"""Batch jobs from the command line, against any service with OpenAI's Files and Batches.

Rules:
- A batch belongs to the service: leaving while it runs costs nothing, and `--wait` picks it up again by its id.
- While waiting, a service that is away for a moment is asked again; what it refuses is told in its own words.
- Results are written beside their place and moved there whole.
- Exit status 0: what was asked for is done, and with `--wait` every line has an answer. 1: anything else.
"""

import argparse
import asyncio
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from time import monotonic
from typing import Any, TypeAlias

import msgspec
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from router.errors import EbbtideError, ProbeFailed
from router.upstream.client import Client, Said

__all__ = ["run"]

DEFAULT_URL = "http://127.0.0.1:8080/v1"
FINAL = frozenset(("completed", "failed", "expired", "cancelled"))
POLL_S = (0.5, 5.0)
"""First and longest time between two looks at a batch."""
AWAY_S = 600.0
"""How long a service may be away while a batch is waited for."""
SAY_S = 10.0
"""How often a line is printed where there is no terminal to draw on."""
PACE_S = 30.0
"""Tokens a second are told over this long."""

Batch: TypeAlias = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Counter:
    """A service's batch counter: where it is, and what it is told of us."""

    client: Client
    url: str
    key: str | None

    async def submit(
        self, file: Path, endpoint: str, window: str, metadata: Mapping[str, str], webhook: str | None
    ) -> Batch:
        """Upload a file and make a batch of it."""
        sent = await self.client.send_file(f"{self.url}/files", file, {"purpose": "batch"}, headers=self._headers)
        asked: dict[str, Any] = {
            "input_file_id": _wanted(sent)["id"],
            "endpoint": endpoint,
            "completion_window": window,
        }
        if metadata:
            asked["metadata"] = dict(metadata)
        if webhook:
            asked["webhook"] = webhook
        return _wanted(await self.client.ask("POST", f"{self.url}/batches", asked, headers=self._headers))

    async def look(self, batch_id: str) -> Batch:
        """A batch as it stands."""
        return _wanted(await self.client.ask("GET", f"{self.url}/batches/{batch_id}", headers=self._headers))

    async def cancel(self, batch_id: str) -> Batch:
        """Stop a batch."""
        return _wanted(await self.client.ask("POST", f"{self.url}/batches/{batch_id}/cancel", headers=self._headers))

    async def save(self, file_id: str, place: Path) -> None:
        """Write a file's content to `place`, whole or not at all; `-` is standard output."""
        url = f"{self.url}/files/{file_id}/content"
        if str(place) == "-":
            _good(await self.client.save(url, sys.stdout.buffer, headers=self._headers))
            return
        part = place.with_name(f"{place.name}.part")
        try:
            with part.open("wb") as sink:
                _good(await self.client.save(url, sink, headers=self._headers))
            part.replace(place)
        finally:
            part.unlink(missing_ok=True)

    @property
    def _headers(self) -> dict[str, str]:
        return {} if self.key is None else {"authorization": f"Bearer {self.key}"}


def run(arguments: argparse.Namespace) -> int:
    """`ebbtide batch ACTION TARGET`; the exit status."""
    return asyncio.run(_run(arguments))


async def _run(arguments: argparse.Namespace) -> int:
    url = (arguments.url or os.environ.get("OPENAI_BASE_URL") or DEFAULT_URL).rstrip("/")
    key = os.environ.get("OPENAI_API_KEY") or None
    async with Client(connections=4) as client:
        try:
            return await _act(Counter(client=client, url=url, key=key), arguments, Console(stderr=True))
        except ProbeFailed as error:
            raise EbbtideError(f"{url}: {error}") from error


async def _act(counter: Counter, arguments: argparse.Namespace, console: Console) -> int:
    if arguments.action == "submit":
        batch = await _submit(counter, arguments)
    elif arguments.action == "cancel":
        batch = await counter.cancel(arguments.target)
    else:
        batch = await counter.look(arguments.target)
    if arguments.wait:
        console.print(f"batch {_plain(batch['id'])}", style="bold", highlight=False, markup=False)
        batch = await _wait(counter, batch, console)
    if arguments.action == "results" or arguments.output is not None:
        return await _results(counter, batch, arguments)
    _print(batch, as_json=arguments.json)
    return _status(batch) if arguments.wait else 0


async def _submit(counter: Counter, arguments: argparse.Namespace) -> Batch:
    file = Path(arguments.target)
    if arguments.output is not None and not arguments.wait:
        raise EbbtideError("--output needs --wait: there are no results before the batch has ended")
    endpoint = arguments.endpoint or _endpoint(file)
    return await counter.submit(file, endpoint, arguments.window, dict(arguments.metadata or ()), arguments.webhook)


def _endpoint(file: Path) -> str:
    """The url of the first line."""
    with file.open("rb") as lines:
        first = next((line for line in lines if line.strip()), b"")
    try:
        return msgspec.json.decode(first.removeprefix(b"\xef\xbb\xbf"), type=_Line).url
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise EbbtideError(f"{file}: the first line is not a request of a batch ({error})") from error


class _Line(msgspec.Struct):
    url: str


async def _wait(counter: Counter, batch: Batch, console: Console) -> Batch:
    """Show a batch until it has ended."""
    shown = _Shown(console)
    wait_s, seen_at = POLL_S[0], monotonic()
    with shown:
        while shown.show(batch)["status"] not in FINAL:
            await asyncio.sleep(wait_s)
            wait_s = min(POLL_S[1], wait_s * 1.2)
            try:
                batch = await counter.look(batch["id"])
                seen_at = monotonic()
            except (ProbeFailed, _Away) as error:
                if monotonic() - seen_at > AWAY_S:
                    raise
                shown.note(f"away ({error}); asking again")
    return batch


class _Shown:
    """A batch on a terminal as a bar, elsewhere as a line now and then."""

    def __init__(self, console: Console) -> None:
        self._console = console
        columns = "{task.fields[failed]} failed", "{task.fields[pace]}", "{task.fields[left]}", "{task.fields[note]}"
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            *(TextColumn(column, markup=False) for column in columns),
            TimeElapsedColumn(),
            console=console,
            disable=not console.is_terminal,
        )
        self._task = self._bar.add_task("", total=None, failed=0, pace="", left="", note="")
        self._before: list[tuple[float, int, int]] = []
        self._said: tuple[float, str] = (0.0, "")

    def __enter__(self) -> None:
        self._bar.start()

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def note(self, text: str) -> None:
        """Something that is no progress."""
        self._bar.update(self._task, note=text)

    def show(self, batch: Batch) -> Batch:
        """The batch as it stands."""
        counts, now = _counts(batch), monotonic()
        ended = counts["completed"] + counts["failed"]
        self._before.append((now, ended, _output_tokens(batch)))
        while len(self._before) > 2 and self._before[0][0] < now - PACE_S:
            self._before.pop(0)
        pace, left = self._rates(counts["total"] - ended)
        note = _plain((batch.get("ebbtide") or {}).get("waiting_reason") or "")
        total, status = counts["total"] or None, _plain(batch["status"])
        fields: dict[str, Any] = {"failed": counts["failed"], "pace": pace, "left": left, "note": note}
        self._bar.update(self._task, description=status, total=total, completed=ended, **fields)
        if not self._console.is_terminal:
            self._say(
                now, batch["status"], f"{ended}/{counts['total']} lines, {counts['failed']} failed {pace} {left} {note}"
            )
        return batch

    def _rates(self, left: int) -> tuple[str, str]:
        """Tokens a second and the time left, as far as they can be told."""
        (began, first, tokens), (now, last, more) = self._before[0], self._before[-1]
        if now <= began:
            return "", ""
        pace = f"{(more - tokens) / (now - began):,.0f} tokens/s" if more > tokens else ""
        if last <= first:
            return pace, ""
        seconds = int(left * (now - began) / (last - first))
        return pace, f"{seconds // 3600}:{seconds // 60 % 60:02}:{seconds % 60:02} left"

    def _say(self, now: float, status: str, text: str) -> None:
        if status != self._said[1] or now - self._said[0] >= SAY_S:
            self._said = now, status
            self._console.print(f"{status}: {text.strip()}", highlight=False, markup=False)


async def _results(counter: Counter, batch: Batch, arguments: argparse.Namespace) -> int:
    """Save what there is; the exit status."""
    if batch["status"] not in FINAL:
        raise EbbtideError(f"batch {batch['id']} is {batch['status']}; add --wait to wait for its results")
    for file_id, place in (
        (batch.get("output_file_id"), arguments.output),
        (batch.get("error_file_id"), arguments.errors),
    ):
        if file_id is not None and (place is not None or file_id == batch.get("output_file_id")):
            await counter.save(file_id, place or Path("-"))
    counts = _counts(batch)
    _complain(f"batch {batch['id']} {batch['status']}: {counts['completed']} of {counts['total']} lines answered")
    for error in _errors(batch)[:10]:
        _complain(error)
    saved = batch.get("output_file_id") or (arguments.errors and batch.get("error_file_id"))
    return _status(batch) if arguments.wait or not saved else 0


class _Away(EbbtideError):
    """The service answered that it cannot answer now."""


def _good(said: Said) -> Said:
    if said.good:
        return said
    try:
        error = msgspec.json.decode(said.body, type=_Refusal).error
        words = error.message if isinstance(error, _Error) else error
    except (msgspec.MsgspecError, UnicodeDecodeError):
        words = said.body[:200].decode("utf-8", "replace")
    words = _plain(words)
    kind = _Away if said.status == 429 or said.status >= 500 else EbbtideError
    raise kind(f"the service answered {said.status}: {words}")


class _Error(msgspec.Struct):
    message: str


class _Refusal(msgspec.Struct):
    error: _Error | str


def _wanted(said: Said) -> Batch:
    """The object that was asked for."""
    found = _good(said).json
    if not isinstance(found, dict) or not isinstance(found.get("id"), str):
        raise EbbtideError("the service did not answer with OpenAI's object; is its URL right?")
    return found


def _plain(text: object) -> str:
    """What a service says, fit for a terminal."""
    return "".join(char if char.isprintable() else " " for char in str(text))


def _counts(batch: Batch) -> dict[str, int]:
    told = batch.get("request_counts") or {}
    return {name: int(told.get(name) or 0) for name in ("total", "completed", "failed")}


def _output_tokens(batch: Batch) -> int:
    return int((batch.get("usage") or {}).get("output_tokens") or 0)


def _errors(batch: Batch) -> list[str]:
    told = (batch.get("errors") or {}).get("data") or []
    words = [(f"line {error['line']}: " if error.get("line") else "") + str(error.get("message")) for error in told]
    return [_plain(text) for text in words]


def _status(batch: Batch) -> int:
    counts = _counts(batch)
    return 0 if batch["status"] == "completed" and counts["completed"] == counts["total"] else 1


def _print(batch: Batch, *, as_json: bool) -> None:
    if as_json:
        text = msgspec.json.format(msgspec.json.encode(batch), indent=2).decode()
    else:
        counts = _counts(batch)
        rows = [
            _plain(batch["id"]),
            _plain(batch["status"]),
            f"{counts['completed']}/{counts['total']}",
            f"{counts['failed']} failed",
        ]
        text = "  ".join(rows)
        for error in _errors(batch):
            text += f"\n{error}"
    sys.stdout.write(f"{text}\n")
    sys.stdout.flush()


def _complain(line: str) -> None:
    sys.stderr.write(f"ebbtide: {line}\n")
