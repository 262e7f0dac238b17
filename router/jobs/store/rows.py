"""What the store takes and gives: frozen nouns, one for each kind of row. Times as in the schema."""

import hashlib
import secrets
from enum import StrEnum

import msgspec
from sqlalchemy import RowMapping

from router.core.job import BATCH_FINAL, BatchState, request_id


class FileRow(msgspec.Struct, frozen=True, kw_only=True):
    """A file somebody may read. `number` is the store's own key of it."""

    number: int
    id: str
    caller: str
    purpose: str
    filename: str
    bytes: int
    created_at: int
    expires_at: int | None


class UploadRow(msgspec.Struct, frozen=True, kw_only=True):
    """A file that comes in parts. `state` is pending, completed, cancelled or expired."""

    number: int
    id: str
    caller: str
    purpose: str
    filename: str
    mime_type: str
    bytes: int
    created_at: int
    expires_at: int
    state: str
    file_expires_s: int | None
    file: FileRow | None = None


class PartRow(msgspec.Struct, frozen=True, kw_only=True):
    """One part of an upload."""

    id: str
    upload_id: str
    created_at: int
    bytes: int


class LineError(msgspec.Struct, frozen=True, kw_only=True):
    """One thing wrong with an input file, as OpenAI's `errors.data[]`."""

    code: str
    message: str
    param: str | None = None
    line: int | None = None


class Tokens(msgspec.Struct, frozen=True, kw_only=True):
    """Tokens as the nodes counted them; `cached` is part of `input`, `reasoning` part of `output`."""

    input: int = 0
    output: int = 0
    cached: int = 0
    reasoning: int = 0


class NewBatch(msgspec.Struct, frozen=True, kw_only=True):
    """A batch somebody asks for.

    `output_expires_s` counts from the making of the result files. With `same_within_s` an identical batch of this
    caller that is younger is given back instead of a second one; with `idempotency_key`, the one made with that key.
    """

    caller: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    metadata: dict[str, str] | None = None
    output_expires_s: int | None = None
    priority: int = 0
    webhook: str | None = None
    idempotency_key: str | None = None
    same_within_s: float | None = None


class BatchRow(msgspec.Struct, frozen=True, kw_only=True):
    """A batch. Its file ids show once it is final; `late` says that its window closed; `waiting` why it waits."""

    number: int
    id: str
    caller: str
    endpoint: str
    input_file_id: str
    completion_window: str
    window_s: int
    priority: int
    urgency: float
    state: BatchState
    late: bool
    model: str | None
    errors: tuple[LineError, ...]
    metadata: dict[str, str] | None
    output_expires_s: int | None
    webhook: str | None
    waiting: str | None
    created_at: int
    expires_at: int
    in_progress_at: int | None
    finalizing_at: int | None
    completed_at: int | None
    failed_at: int | None
    expired_at: int | None
    cancelling_at: int | None
    cancelled_at: int | None
    total: int
    completed: int
    failed: int
    tokens: Tokens
    output_file_id: str | None
    error_file_id: str | None
    epoch: int


class NewJob(msgspec.Struct, frozen=True, kw_only=True):
    """A valid line: where it stands in the input, whom it asks; `prefix` hashes what it may share, `size` in tokens."""

    line: int
    custom_id: str
    offset: int
    length: int
    model: str
    prefix: int = 0
    size: int = 0


class JobRow(msgspec.Struct, frozen=True, kw_only=True):
    """A line under lease. `attempts` were charged, `returns` were not; `node` had it last; `expires_at` ends it."""

    batch: int
    batch_id: str
    line: int
    custom_id: str
    caller: str
    endpoint: str
    input: int
    offset: int
    length: int
    model: str
    prefix: int
    size: int
    attempts: int
    returns: int
    node: str | None
    epoch: int
    expires_at: int

    @property
    def key(self) -> tuple[str, int]:
        """Batch and line."""
        return self.batch_id, self.line

    @property
    def request_id(self) -> str:
        """Its id in the result file."""
        return request_id(self.batch_id, self.line)


class NewResult(msgspec.Struct, frozen=True, kw_only=True):
    """How a line ended: a node's answer (`status` and `body`), or an error of ours.

    `body` is one JSON value as the node sent it. A status from 200 to 299 makes the line done, all else failed.
    """

    status: int | None = None
    request_id: str | None = None
    body: bytes | None = None
    error_code: str | None = None
    error_message: str | None = None
    tokens: Tokens = Tokens()

    @property
    def done(self) -> bool:
        """Whether it goes to the output file."""
        return self.status is not None and 200 <= self.status < 300


class RouterRow(msgspec.Struct, frozen=True, kw_only=True):
    """A router at this store. `pace` is lines it finished in the last minute."""

    id: str
    name: str
    started_at: float
    beat_at: float
    pace: int


class Event(msgspec.Struct, frozen=True, kw_only=True):
    """A batch became final. `seconds` since it was created."""

    batch_id: str
    caller: str
    state: BatchState
    total: int
    completed: int
    failed: int
    seconds: float


class Swept(msgspec.Struct, frozen=True, kw_only=True):
    """What one sweep did; `more` says there may be more to do at once."""

    events: tuple[Event, ...] = ()
    lines_expired: int = 0
    lines_cancelled: int = 0
    files_deleted: int = 0
    rows_deleted: int = 0
    more: bool = False


class StoreUsage(msgspec.Struct, frozen=True, kw_only=True):
    """What is kept: ready files and their bytes, batches that are not final, their lines, bytes on disk.

    `states` counts those batches by state; `models` the lines left of batches in progress by model (None: several);
    `oldest_s` is the age of the oldest batch in progress.
    """

    files: int
    file_bytes: int
    batches: int
    queued: int
    running: int
    disk_bytes: int
    states: dict[str, int]
    models: dict[str | None, int]
    oldest_s: float


class Held(msgspec.Struct, frozen=True, kw_only=True):
    """What one caller holds: files and uploads under way with their parts' bytes, batches that are not final, their
    unfinished lines and estimated tokens.
    """

    files: int
    bytes: int
    batches: int
    lines: int
    tokens: int


class Delivery(msgspec.Struct, frozen=True, kw_only=True):
    """A webhook event to deliver. `type` is `batch.completed` and the like; `attempts` were made before this one.

    `caller` has the batch; it is None once the batch is forgotten.
    """

    id: str
    caller: str | None
    batch_id: str
    url: str
    type: str
    created_at: int
    attempts: int


class Outbox(msgspec.Struct, frozen=True, kw_only=True):
    """Events not yet delivered: how many, how old the oldest is, in how long one is due (None: there are none)."""

    waiting: int
    oldest_s: float
    due_in_s: float | None


class Pace(msgspec.Struct, frozen=True, kw_only=True):
    """How a batch gets on: its lines running, others' lines that go first, lines all routers ended in `window_s`."""

    running: int
    ahead: int
    done_last: int
    window_s: float = 60.0


class Prefix(StrEnum):
    """What an id begins with."""

    FILE = "file-"
    BATCH = "batch_"
    UPLOAD = "upload_"
    PART = "part_"
    EVENT = "evt_"


def new_id(prefix: Prefix) -> str:
    """A fresh id: the prefix and 24 hex digits."""
    return prefix + secrets.token_hex(12)


def lock_key(name: str) -> int:
    """A signed 64-bit key for an advisory lock."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "big", signed=True)


def file_row(row: RowMapping) -> FileRow:
    """From a row of `files`."""
    return FileRow(**{name: row[name] for name in FileRow.__struct_fields__})


def batch_row(row: RowMapping) -> BatchRow:
    """From a row of `batches`."""
    plain = {name: row[name] for name in BatchRow.__struct_fields__ if name in row}
    state = BatchState(row["state"])
    shown = state in BATCH_FINAL
    return BatchRow(
        **plain
        | {
            "state": state,
            "errors": msgspec.json.decode(row["errors"] or "[]", type=tuple[LineError, ...]),
            "metadata": msgspec.json.decode(row["metadata"], type=dict[str, str]) if row["metadata"] else None,
            "tokens": Tokens(
                input=row["input_tokens"],
                output=row["output_tokens"],
                cached=row["cached_tokens"],
                reasoning=row["reasoning_tokens"],
            ),
            "output_file_id": row["output_file_id"] if shown else None,
            "error_file_id": row["error_file_id"] if shown else None,
        }
    )
