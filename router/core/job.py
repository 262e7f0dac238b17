"""A job and its batch: their states, whose turn it is, and how long things may take.

Rule 1: states change only along the two tables here; the database holds the states and their stamps as constraints.
Rule 2: a line has exactly one end. `done` goes to the output file; `failed`, `expired`, `cancelled` to the error file.
Rule 3: whose turn it is: the nearest deadline first, in classes that double (a batch due in 40 minutes and one due in
50 are equally near); inside a class the caller with fewest lines running; inside a batch lines that share a prefix back
to back, and of those the long ones first.
"""

import hashlib
import heapq
import re
from collections.abc import Mapping, Sequence
from enum import StrEnum

import msgspec

WINDOW_S = (300, 14 * 86400)
"""Shortest and longest completion window."""
PRIORITY_S = 3600.0
"""One step of priority counts like a deadline that is one hour nearer."""
NEAREST_S = 60.0
"""Batches due within this are all equally near: the first class of deadlines."""
RETRY_S = (1.0, 300.0)
"""First and longest bound of the wait before a line is tried again."""


class BatchState(StrEnum):
    """OpenAI's states of a batch."""

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    COMPLETED = "completed"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLING = "cancelling"
    CANCELLED = "cancelled"


class BatchEvent(StrEnum):
    """What moves a batch."""

    ACCEPTED = "every line is valid"
    REJECTED = "a line is not valid"
    ANSWERED = "every line has its end"
    DEADLINE = "the window closed"
    CANCEL = "the caller cancelled"
    WRITTEN = "files written"
    WRITTEN_LATE = "files written after the window"


BATCH_TRANSITIONS: dict[BatchState, dict[BatchEvent, BatchState]] = {
    BatchState.VALIDATING: {
        BatchEvent.ACCEPTED: BatchState.IN_PROGRESS,
        BatchEvent.REJECTED: BatchState.FAILED,
        BatchEvent.CANCEL: BatchState.CANCELLING,
    },
    BatchState.IN_PROGRESS: {
        BatchEvent.ANSWERED: BatchState.FINALIZING,
        BatchEvent.DEADLINE: BatchState.FINALIZING,
        BatchEvent.CANCEL: BatchState.CANCELLING,
    },
    BatchState.FINALIZING: {
        BatchEvent.WRITTEN: BatchState.COMPLETED,
        BatchEvent.WRITTEN_LATE: BatchState.EXPIRED,
        BatchEvent.CANCEL: BatchState.CANCELLING,
    },
    BatchState.CANCELLING: {BatchEvent.WRITTEN: BatchState.CANCELLED},
    BatchState.COMPLETED: {},
    BatchState.FAILED: {},
    BatchState.EXPIRED: {},
    BatchState.CANCELLED: {},
}
"""State and event to next state; a pair that is not here changes nothing."""

BATCH_FINAL = frozenset(state for state, moves in BATCH_TRANSITIONS.items() if not moves)
"""States that no event leaves."""


class JobState(StrEnum):
    """Where one line is."""

    QUEUED = "queued"
    RUNNING = "running"
    DONE = "done"
    FAILED = "failed"
    EXPIRED = "expired"
    CANCELLED = "cancelled"


class JobEvent(StrEnum):
    """What moves a line."""

    CLAIM = "a router claims it"
    PUT_BACK = "its router puts it back"
    LEASE_ENDED = "its router is lost"
    SUCCEEDED = "answered"
    FAILED = "failed for good"
    EXPIRE = "the window closed"
    CANCEL = "the caller cancelled"


JOB_TRANSITIONS: dict[JobState, dict[JobEvent, JobState]] = {
    JobState.QUEUED: {
        JobEvent.CLAIM: JobState.RUNNING,
        JobEvent.EXPIRE: JobState.EXPIRED,
        JobEvent.CANCEL: JobState.CANCELLED,
    },
    JobState.RUNNING: {
        JobEvent.PUT_BACK: JobState.QUEUED,
        JobEvent.LEASE_ENDED: JobState.QUEUED,
        JobEvent.SUCCEEDED: JobState.DONE,
        JobEvent.FAILED: JobState.FAILED,
        JobEvent.EXPIRE: JobState.EXPIRED,
        JobEvent.CANCEL: JobState.CANCELLED,
    },
    JobState.DONE: {},
    JobState.FAILED: {},
    JobState.EXPIRED: {},
    JobState.CANCELLED: {},
}
"""State and event to next state; a pair that is not here changes nothing."""

JOB_FINAL = frozenset(state for state, moves in JOB_TRANSITIONS.items() if not moves)
"""States that no event leaves."""


def sources(event: BatchEvent) -> tuple[BatchState, ...]:
    """The states of a batch in which an event means something."""
    return tuple(state for state, moves in BATCH_TRANSITIONS.items() if event in moves)


def window_seconds(window: str) -> int:
    """Seconds in `24h`, `90m` or `7d`. ValueError carries a message fit for the caller."""
    told = re.fullmatch(r"([0-9]{1,6})([mhd])", window, re.ASCII)
    seconds = int(told[1]) * {"m": 60, "h": 3600, "d": 86400}[told[2]] if told else 0
    if not WINDOW_S[0] <= seconds <= WINDOW_S[1]:
        raise ValueError(
            f"Invalid value: '{window[:32]}'. Supported values are: '24h', or minutes, hours, days from '5m' to '14d'."
        )
    return seconds


def retry_delay_s(attempt: int, unit: float) -> float:
    """Seconds before a line is tried again after its `attempt`-th failure (from 1). `unit` is uniform in [0, 1).

    Half of a doubling bound is kept and half is drawn, so that lines that failed together do not come back together.
    """
    bound = min(RETRY_S[1], RETRY_S[0] * 2.0 ** min(attempt - 1, 16))
    return bound * (0.5 + 0.5 * unit)


def urgency(expires_at: float, priority: int) -> float:
    """The deadline as it counts: unix seconds, nearer by one hour for each step of priority."""
    return expires_at - priority * PRIORITY_S


def nearness(due: float, now: float) -> int:
    """Class of a deadline: 0 within a minute, then one more each time the time left doubles."""
    return max(0, int((due - now) / NEAREST_S)).bit_length()


class Ready(msgspec.Struct, frozen=True, kw_only=True):
    """A batch with lines to claim. `urgency` in unix seconds, `lines` how many may be claimed."""

    number: int
    caller: str
    urgency: float
    lines: int


def share(batches: Sequence[Ready], running: Mapping[str, int], limit: int, now: float) -> dict[int, int]:
    """How many lines of which batch to claim, `limit` in all; the order of the answer is the order of claiming.

    `running` counts the lines each caller has running already.
    """
    classes: dict[int, dict[str, list[Ready]]] = {}
    for batch in sorted(batches, key=lambda batch: (batch.urgency, batch.number)):
        classes.setdefault(nearness(batch.urgency, now), {}).setdefault(batch.caller, []).append(batch)
    held = dict(running)
    shares: dict[int, int] = {}
    for near in sorted(classes):
        limit -= _fill(classes[near], held, limit, shares)
    return shares


def _fill(callers: dict[str, list[Ready]], held: dict[str, int], limit: int, shares: dict[int, int]) -> int:
    """Share out at most `limit` lines of one class, always to the caller with fewest running; how many went."""
    turns = [(held.get(caller, 0), due[0].urgency, caller) for caller, due in callers.items()]
    heapq.heapify(turns)
    given = 0
    while turns and given < limit:
        count, _, caller = heapq.heappop(turns)
        due = callers[caller]
        batch = due[0]
        shares[batch.number] = shares.get(batch.number, 0) + 1
        held[caller] = count + 1
        given += 1
        if shares[batch.number] >= batch.lines:
            due.pop(0)
        if due:
            heapq.heappush(turns, (count + 1, due[0].urgency, caller))
    return given


def job_order(prefix: int, size: int, line: int) -> tuple[int, int, int]:
    """Sort key of a line inside its batch."""
    return prefix, -size, line


def request_id(batch_id: str, line: int) -> str:
    """The id of a line in its result file, derived so that a file made twice is the same file."""
    return "batch_req_" + hashlib.blake2b(f"{batch_id}:{line}".encode(), digest_size=12).hexdigest()
