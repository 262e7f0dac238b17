"""`ebbtide diagnose FILE`: a recorded series of one node through the same code that watches live nodes.

Rules: the file is CSV with a header; columns are the fields of a `Sample`, any may be missing but `at`, and an empty
cell is unknown; `relay_ttft_s` and `relay_gap_s`, or a second file, are the relay. Everything wrong is told with file,
line and column. Exit status 0: a verdict was told, whatever it is. 2: the input cannot be read.
"""

import argparse
import csv
import difflib
import heapq
import math
import sys
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, NamedTuple

import msgspec

from router.core.drift import MEANING, Course, Diagnosis, Verdict
from router.core.signals import CHANNELS, HOUR_S, Sample, Signals

__all__ = ["run"]

AT = "at"
RELAY = "relay_"
RELAY_COLUMNS = (f"{RELAY}ttft_s", f"{RELAY}gap_s")
EVERY_S = HOUR_S / 6
"""Time of the series between two diagnoses."""
BAD_INPUT = 2
MOST_CHARACTERS = 2**16
"""Longest cell: anything longer is no number."""


class Unreadable(Exception):
    """The input cannot be used. The message names file, line and column."""


class Row(NamedTuple):
    """One line: the node's sample and the relay's, if it has one."""

    at: float
    node: Sample | None
    relay: Sample | None


class Change(msgspec.Struct, frozen=True):
    """A verdict began to be held at `at`; it stands since `since`. Both in the series' own time."""

    at: float
    since: float
    verdict: Verdict


def run(arguments: argparse.Namespace) -> int:
    """`ebbtide diagnose FILE`; the exit status."""
    try:
        began, changes, last = replay(arguments.file, arguments.relay, arguments.limit)
    except Unreadable as error:
        sys.stderr.write(f"ebbtide: {error}\n")
        return BAD_INPUT
    if arguments.json:
        told = {"began": began, "verdicts": changes, "last": last}
        sys.stdout.write(msgspec.json.format(msgspec.json.encode(told), indent=2).decode() + "\n")
    else:
        sys.stdout.writelines(f"{line}\n" for line in _text(began, changes, last))
    return 0


def replay(file: Path, relay: Path | None, limit_bytes: float | None) -> tuple[float, Sequence[Change], Diagnosis]:
    """When the series begins, every change of verdict, and the last diagnosis. Raises Unreadable."""
    series = _rows(file, control=False)
    if relay is not None:
        series = heapq.merge(series, _rows(relay, control=True), key=lambda row: row.at)
    node, control, course = Signals(), Signals(), Course()
    changes: list[Change] = []
    began, due, at = math.nan, math.nan, math.nan
    for row in series:
        at = row.at
        if math.isnan(began):
            began, due = at, at + EVERY_S
        if row.node is not None:
            node.add(row.node)
        if row.relay is not None:
            control.add(row.relay)
        if at >= due:
            due = at + EVERY_S
            _note(changes, course.judge(node, at, control, limit_bytes))
    if math.isnan(began):
        raise Unreadable(f"{file}: no line after the header")
    if not changes:
        _note(changes, course.judge(node, at, control, limit_bytes))
    return began, changes, course.now


def _note(changes: list[Change], held: Diagnosis) -> None:
    if not changes or changes[-1].verdict is not held.verdict:
        changes.append(Change(held.at, held.since, held.verdict))


def _rows(file: Path, *, control: bool) -> Iterator[Row]:
    """The rows of a file; of the relay's when `control`."""
    try:
        with file.open(newline="", encoding="utf-8-sig") as lines:
            reader = csv.reader(lines, strict=True)
            columns = _header(next(reader, []), file, control=control)
            before = -math.inf
            for cells in reader:
                if not any(cells):
                    continue
                row = _row(cells, columns, f"{file}:{reader.line_num}", control=control)
                if row.at < before:
                    raise Unreadable(f"{file}:{reader.line_num}: column {AT}: earlier than the line before")
                before = row.at
                yield row
    except OSError as error:
        raise Unreadable(f"{file}: cannot be read: {(error.strerror or 'error').lower()}") from error
    except UnicodeDecodeError as error:
        raise Unreadable(f"{file}: not UTF-8 text") from error
    except csv.Error as error:
        raise Unreadable(f"{file}:{reader.line_num}: not CSV: {error}") from error


def _header(names: Sequence[str], file: Path, *, control: bool) -> list[str]:
    columns = [name.strip() for name in names]
    known = (AT, "ttft_s", "gap_s") if control else (AT, *CHANNELS, *RELAY_COLUMNS)
    for number, name in enumerate(columns, 1):
        if name not in known:
            near = difflib.get_close_matches(name, known, 1)
            hint = f"; did you mean {near[0]!r}?" if near else f"; known are {', '.join(known)}"
            raise Unreadable(f"{file}:1: column {number}: unknown name {name[:80]!r}{hint}")
        if name in columns[: number - 1]:
            raise Unreadable(f"{file}:1: column {number}: {name!r} is there twice")
    if AT not in columns:
        raise Unreadable(f"{file}:1: no column {AT!r}")
    return columns


def _row(cells: Sequence[str], columns: Sequence[str], where: str, *, control: bool) -> Row:
    if len(cells) != len(columns):
        raise Unreadable(f"{where}: {len(cells)} cells for {len(columns)} columns")
    values = {name: _number(cell.strip(), name, where) for name, cell in zip(columns, cells, strict=True)}
    at = values.pop(AT)
    if at is None:
        raise Unreadable(f"{where}: column {AT}: empty")
    told: dict[str, Any] = {name.removeprefix(RELAY): value for name, value in values.items()}
    if control:
        return Row(at, None, Sample(at=at, **told))
    theirs: dict[str, Any] = {
        name.removeprefix(RELAY): value for name, value in values.items() if name.startswith(RELAY)
    }
    ours: dict[str, Any] = {name: value for name, value in values.items() if not name.startswith(RELAY)}
    return Row(at, Sample(at=at, **ours), Sample(at=at, **theirs) if theirs else None)


def _number(cell: str, name: str, where: str) -> float | None:
    if not cell:
        return None
    try:
        value = float(cell[:MOST_CHARACTERS])
    except ValueError:
        value = _time(cell) if name == AT else math.nan
    if not math.isfinite(value) or (value < 0 and name != AT):
        wanted = "a number of seconds or an ISO 8601 time" if name == AT else "a number, 0 or more"
        raise Unreadable(f"{where}: column {name}: {cell[:80]!r} is not {wanted}")
    return value


def _time(cell: str) -> float:
    try:
        told = datetime.fromisoformat(cell)
    except ValueError:
        return math.nan
    return (told if told.tzinfo else told.replace(tzinfo=UTC)).timestamp()


def _text(began: float, changes: Sequence[Change], last: Diagnosis) -> Iterator[str]:
    yield "   hour  verdict"
    for change in changes:
        yield f"{(change.at - began) / HOUR_S:7.1f}  {change.verdict}"
    yield f"\n{last.verdict} since hour {(last.since - began) / HOUR_S:.1f}: {MEANING[last.verdict]}"
    for one in last.evidence:
        against = "" if one.against is None else f"   against {_shown(one.against)}"
        what = f" ({one.what})" if one.what else ""
        yield f"  {one.name:24} {_shown(one.value):>12} {one.unit}{against}{what}"
    if last.projected_limit_s is not None:
        yield f"  memory reaches its limit in {last.projected_limit_s / HOUR_S:.1f} h if it goes on like this"


def _shown(value: float) -> str:
    return f"{value:,.0f}" if abs(value) >= 1e4 else f"{value:.4g}"
