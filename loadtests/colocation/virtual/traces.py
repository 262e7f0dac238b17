"""What is asked, and when: traces read from CSV, thinned by a seeded coin, shaped by a day's curve.

Rules:
- A trace is a CSV with the columns `t_seconds,prompt_tokens,output_tokens`; a table of shared beginnings, if any, has
  `row,parent_row,shared_tokens`, one row for each of the trace. Times are used as they are: never stretched.
- Less load is made by a coin for each request. More load than a trace has is made of copies of it, each moved by a
  seeded part of its span and wrapped round: their prompts are their own.
- Batch lines are taken in the file's order, again and again: the backlog never runs dry, and no line is the same
  document as an earlier one.
"""

import csv
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from loadtests.colocation.virtual.ask import BATCH, CHAT, Ask
from loadtests.colocation.virtual.blocks import BLOCK, Part


@dataclass(frozen=True)
class Row:
    """One request of a trace: seconds from its start, tokens in, tokens out, and how it begins like an earlier row."""

    t: float
    prompt: int
    output: int
    parent: int = -1
    shared: int = 0


@dataclass(frozen=True)
class Workload:
    """Which files make a workload. `curve` names a column of the table of rates that shapes the hour like a day."""

    chat: str
    batch: str
    curve: str | None = None
    prefixes: str | None = None


WORKLOADS = {
    "W1": Workload("azure2023_conv.csv", "batch_30k.csv"),
    "W2": Workload("azure2023_conv.csv", "batch_30k.csv", curve="m_large_rps"),
    "W3": Workload("azure2023_code.csv", "batch_30k.csv"),
    "W4": Workload("mooncake_conversation.csv", "batch_11k.csv", prefixes="mooncake_conversation_prefix.csv"),
    "W5": Workload("servegen_r1_burst_hour.csv", "batch_over40k.csv"),
    "sample": Workload("chat.csv", "batch.csv"),
}
SAMPLE = Path(__file__).parent / "sample"
RATES = "servegen_rates_14d.csv"
RATE_STEP_S, DAY_STEPS = 600, 144


def read(path: Path, prefixes: Path | None = None) -> list[Row]:
    """A trace, in order of time."""
    links = _links(prefixes) if prefixes is not None else {}
    with path.open(newline="") as lines:
        rows = [
            Row(float(one["t_seconds"]), int(one["prompt_tokens"]), int(one["output_tokens"]), *links.get(row, ()))
            for row, one in enumerate(csv.DictReader(lines))
        ]
    return rows if links else sorted(rows, key=lambda one: one.t)


def _links(path: Path) -> dict[int, tuple[int, int]]:
    with path.open(newline="") as lines:
        return {
            int(one["row"]): (int(one["parent_row"]), int(one["shared_tokens"]))
            for one in csv.DictReader(lines)
            if int(one["parent_row"]) >= 0
        }


def curve(path: Path, column: str, day: int = 1) -> list[float]:
    """One day of a table of rates, hourly means as shares of the highest hour."""
    with path.open(newline="") as lines:
        rates = [float(one[column]) for one in csv.DictReader(lines)]
    one_day = rates[day * DAY_STEPS : (day + 1) * DAY_STEPS]
    hour = len(one_day) // 24
    means = [sum(one_day[at : at + hour]) / hour for at in range(0, len(one_day), hour)]
    return [mean / max(means) for mean in means]


def thinned(
    rows: Sequence[Row], factor: float, seed: int, shape: Sequence[float] = (1.0,), span: float | None = None
) -> list[tuple[int, int, Row]]:
    """Which requests come: (copy, row number, row moved in time), in order of time.

    `factor` is how much of the trace's own load there shall be when `shape` is 1; `shape` is spread over `span`.
    """
    span = span or rows[-1].t + 1e-3
    coins = random.Random(f"coins {seed}")
    copies = max(1, -(-int(factor * 1e9) // 10**9))
    chosen = []
    for copy in range(copies):
        offset = 0.0 if copy == 0 else coins.random() * span
        for number, row in enumerate(rows):
            t = (row.t + offset) % span
            here = shape[min(len(shape) - 1, int(t / span * len(shape)))]
            if coins.random() < factor / copies * here:
                chosen.append((copy, number, Row(t, row.prompt, row.output, row.parent, row.shared)))
    return sorted(chosen, key=lambda one: one[2].t)


def chats(chosen: Sequence[tuple[int, int, Row]], rows: Sequence[Row]) -> list[Ask]:
    """The asks of chosen requests, with the beginnings they share."""
    beginnings = _beginnings(rows)
    return [
        Ask((copy, number), CHAT, row.prompt, row.output, due=row.t, shared=_of_copy(copy, beginnings.get(number, ())))
        for copy, number, row in chosen
    ]


def _beginnings(rows: Sequence[Row]) -> dict[int, list[tuple[int, int, int]]]:
    """Of what rows' blocks the beginning of each row's prompt is made: (row, first, last). A parent comes earlier."""
    found: dict[int, list[tuple[int, int, int]]] = {}
    for number, row in enumerate(rows):
        end = row.shared // BLOCK
        if row.parent >= 0 and end > 0:
            own = (row.parent, rows[row.parent].shared // BLOCK, end)
            chain = [*found.get(row.parent, ()), own]
            found[number] = [(owner, first, min(last, end)) for owner, first, last in chain if first < min(last, end)]
    return found


def _of_copy(copy: int, beginning: Sequence[tuple[int, int, int]]) -> tuple[Part, ...]:
    return tuple(Part((CHAT, (copy, owner)), first, last) for owner, first, last in beginning)


def backlog(rows: Sequence[Row], most: int, seed: int) -> Iterator[Ask]:
    """Lines of a batch for ever. Those longer than `most` tokens in all are left out: no node could hold them."""
    fitting = [row for row in rows if row.prompt + row.output <= most]
    if not fitting:
        raise ValueError(f"no line of the batch fits a context of {most} tokens")
    start = random.Random(f"backlog {seed}").randrange(len(fitting))
    number = 0
    while True:
        row = fitting[(start + number) % len(fitting)]
        yield Ask(number, BATCH, row.prompt, row.output)
        number += 1
