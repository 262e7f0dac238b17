"""The tables, once for SQLite and PostgreSQL. Rules that must always hold stand here as constraints.

States come from `core/job.py`; a final state has its stamp; counters are never negative and never say more than there
is; one result for a line. `number` is a row's own key and the order in which rows came; `id` is what callers see.
Times: whole unix seconds where OpenAI shows them, floating seconds for leases and waits.
"""

from collections.abc import Iterable
from typing import Any

from sqlalchemy import (
    BigInteger,
    Boolean,
    CheckConstraint,
    Column,
    ColumnElement,
    Dialect,
    Double,
    ForeignKey,
    ForeignKeyConstraint,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Table,
    Text,
    TypeDecorator,
    UniqueConstraint,
    text,
)

from router.core.job import BATCH_FINAL, BatchState, JobState
from router.core.wellformed import well_formed
from router.errors import BadRequest

CHUNK_BYTES = 2**20
"""Most bytes in one row of `chunks`."""
HEAD = "0002"
"""The newest migration."""
VERSION_TABLE = "schema_version"
"""Where the migration reached is written."""

metadata = MetaData(
    naming_convention={
        "ix": "ix_%(table_name)s_%(column_0_N_name)s",
        "uq": "uq_%(table_name)s_%(column_0_N_name)s",
        "ck": "ck_%(table_name)s_%(constraint_name)s",
        "fk": "fk_%(table_name)s_%(column_0_N_name)s",
        "pk": "pk_%(table_name)s",
    }
)
BigId = BigInteger().with_variant(Integer(), "sqlite")


class Words(TypeDecorator[str]):
    """Text, by any caller's pen: what PostgreSQL cannot keep is refused in front of both databases."""

    impl = Text
    cache_ok = True

    def process_bind_param(self, value: str | None, dialect: Dialect) -> str | None:
        """The same text. Raises BadRequest for NUL and for half a surrogate pair."""
        if value is not None and not well_formed(value):
            raise BadRequest("Text with NUL, or with half of a surrogate pair, cannot be kept.", code="invalid_value")
        return value


def one_of(column: str, states: Iterable[str]) -> str:
    """SQL that holds while a column is one of these states; literal, so that partial indexes can be used."""
    names = ", ".join(f"'{state}'" for state in states)
    return f"{column} IN ({names})"


def _index(name: str, *columns: ColumnElement[Any], only: str | None = None) -> None:
    """An index; with `only`, of the rows for which that holds.

    Where `only` names a state, the state is the first column all the same: SQLite prefers the index that matches more.
    """
    where = None if only is None else text(only)
    Index(name, *columns, sqlite_where=where, postgresql_where=where)


def _stamped(state: BatchState) -> CheckConstraint:
    """A batch in this final state has its stamp, and no other batch has it."""
    return CheckConstraint(f"(state = '{state}') = ({state}_at IS NOT NULL)", name=f"{state}_stamp")


NOT_FINAL = "state NOT IN ({})".format(", ".join(f"'{state}'" for state in sorted(BATCH_FINAL)))

routers = Table(
    "routers",
    metadata,
    Column("id", Words, primary_key=True),
    Column("name", Words, nullable=False),
    Column("started_at", Double, nullable=False),
    Column("beat_at", Double, nullable=False),
    Column("pace", Integer, nullable=False, server_default="0"),
    CheckConstraint("pace >= 0", name="pace"),
)

uploads = Table(
    "uploads",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=True),
    Column("id", Words, nullable=False, unique=True),
    Column("caller", Words, nullable=False),
    Column("purpose", Words, nullable=False),
    Column("filename", Words, nullable=False),
    Column("mime_type", Words, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("file_expires_s", BigInteger),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("state", Words, nullable=False),
    Column("part_ids", Words),
    Column("file_id", Words),
    CheckConstraint("state IN ('pending', 'completed', 'cancelled', 'expired')", name="state"),
    CheckConstraint("bytes >= 0", name="bytes"),
    CheckConstraint("(state = 'completed') = (file_id IS NOT NULL)", name="file"),
    CheckConstraint("(state = 'completed') = (part_ids IS NOT NULL)", name="parts"),
    sqlite_autoincrement=True,
)
_index("ix_uploads_pending", uploads.c.expires_at, only="state = 'pending'")
_index("ix_uploads_over", uploads.c.expires_at, only="state <> 'pending'")

files = Table(
    "files",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=True),
    Column("id", Words, nullable=False, unique=True),
    Column("caller", Words, nullable=False),
    Column("purpose", Words, nullable=False),
    Column("filename", Words, nullable=False),
    Column("bytes", BigInteger, nullable=False, server_default="0"),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger),
    Column("state", Words, nullable=False),
    Column("writer", Words),
    Column("upload", BigInteger, ForeignKey("uploads.number", ondelete="SET NULL")),
    CheckConstraint("state IN ('writing', 'part', 'ready', 'deleting')", name="state"),
    CheckConstraint("bytes >= 0", name="bytes"),
    CheckConstraint("state <> 'part' OR upload IS NOT NULL", name="part"),
    CheckConstraint("writer IS NULL OR state = 'writing'", name="writer"),
    sqlite_autoincrement=True,
)
_index("ix_files_listed", files.c.state, files.c.caller, files.c.number, only="state = 'ready'")
_index("ix_files_state", files.c.state, files.c.number)
_index("ix_files_expiring", files.c.state, files.c.expires_at, only="state = 'ready'")
_index("ix_files_upload", files.c.upload)

chunks = Table(
    "chunks",
    metadata,
    Column("file", BigInteger, ForeignKey("files.number"), nullable=False),
    Column("start", BigInteger, nullable=False),
    Column("data", LargeBinary, nullable=False),
    UniqueConstraint("file", "start"),
    CheckConstraint("start >= 0", name="start"),
    CheckConstraint(f"length(data) BETWEEN 1 AND {CHUNK_BYTES}", name="data"),
)

batches = Table(
    "batches",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=True),
    Column("id", Words, nullable=False, unique=True),
    Column("caller", Words, nullable=False),
    Column("endpoint", Words, nullable=False),
    Column("input_file_id", Words, nullable=False),
    Column("input", BigInteger, ForeignKey("files.number", ondelete="SET NULL")),
    Column("completion_window", Words, nullable=False),
    Column("window_s", BigInteger, nullable=False),
    Column("priority", Integer, nullable=False),
    Column("urgency", Double, nullable=False),
    Column("metadata", Words),
    Column("output_expires_s", BigInteger),
    Column("webhook", Words),
    Column("idempotency_key", Words),
    Column("state", Words, nullable=False),
    Column("late", Boolean(create_constraint=False), nullable=False, server_default=text("false")),
    Column("model", Words),
    Column("errors", Words),
    Column("waiting", Words),
    Column("created_at", BigInteger, nullable=False),
    Column("expires_at", BigInteger, nullable=False),
    Column("validated_at", BigInteger),
    Column("in_progress_at", BigInteger),
    Column("finalizing_at", BigInteger),
    Column("completed_at", BigInteger),
    Column("failed_at", BigInteger),
    Column("expired_at", BigInteger),
    Column("cancelling_at", BigInteger),
    Column("cancelled_at", BigInteger),
    Column("total", BigInteger, nullable=False, server_default="0"),
    Column("completed", BigInteger, nullable=False, server_default="0"),
    Column("failed", BigInteger, nullable=False, server_default="0"),
    Column("stopped", BigInteger, nullable=False, server_default="0"),
    Column("size_left", BigInteger, nullable=False, server_default="0"),
    Column("input_tokens", BigInteger, nullable=False, server_default="0"),
    Column("output_tokens", BigInteger, nullable=False, server_default="0"),
    Column("cached_tokens", BigInteger, nullable=False, server_default="0"),
    Column("reasoning_tokens", BigInteger, nullable=False, server_default="0"),
    Column("owner", Words),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("lease_until", Double),
    Column("written_line", BigInteger, nullable=False, server_default="0"),
    Column("output", BigInteger, ForeignKey("files.number", ondelete="SET NULL")),
    Column("error", BigInteger, ForeignKey("files.number", ondelete="SET NULL")),
    Column("output_file_id", Words),
    Column("error_file_id", Words),
    Column("cleared", Boolean(create_constraint=False), nullable=False, server_default=text("false")),
    UniqueConstraint("caller", "idempotency_key"),
    CheckConstraint(one_of("state", BatchState), name="state"),
    CheckConstraint("window_s > 0 AND expires_at = created_at + window_s", name="window"),
    CheckConstraint("completed >= 0 AND failed >= 0 AND stopped >= 0", name="counts"),
    CheckConstraint("completed + failed + stopped <= total", name="total"),
    CheckConstraint(
        "input_tokens >= 0 AND output_tokens >= 0 AND cached_tokens >= 0 AND reasoning_tokens >= 0 AND size_left >= 0",
        name="tokens",
    ),
    CheckConstraint("epoch >= 0 AND written_line >= 0", name="progress"),
    CheckConstraint("(owner IS NULL) = (lease_until IS NULL)", name="lease"),
    CheckConstraint("owner IS NULL OR validated_at IS NULL", name="owner"),
    CheckConstraint(
        "state NOT IN ('in_progress', 'finalizing') OR in_progress_at IS NOT NULL", name="in_progress_stamp"
    ),
    CheckConstraint("state <> 'finalizing' OR finalizing_at IS NOT NULL", name="finalizing_stamp"),
    CheckConstraint("state NOT IN ('cancelling', 'cancelled') OR cancelling_at IS NOT NULL", name="cancelling_stamp"),
    CheckConstraint("state = 'validating' OR state = 'cancelling' OR validated_at IS NOT NULL", name="validated_stamp"),
    *(_stamped(state) for state in sorted(BATCH_FINAL)),
    CheckConstraint(f"{NOT_FINAL} OR completed + failed + stopped = total", name="all_lines"),
    CheckConstraint("state <> 'completed' OR stopped = 0", name="none_stopped"),
    CheckConstraint("state <> 'expired' OR late", name="late"),
    CheckConstraint(f"NOT cleared OR NOT {NOT_FINAL}", name="cleared"),
    sqlite_autoincrement=True,
)
_index("ix_batches_listed", batches.c.caller, batches.c.number)
_index("ix_batches_state", batches.c.state, batches.c.number)
_index("ix_batches_uncleared", batches.c.number, only="NOT cleared")
_index("ix_batches_input", batches.c.input)
_index("ix_batches_output", batches.c.output)
_index("ix_batches_error", batches.c.error)

jobs = Table(
    "jobs",
    metadata,
    Column("batch", BigInteger, ForeignKey("batches.number"), primary_key=True, autoincrement=False),
    Column("line", BigInteger, primary_key=True, autoincrement=False),
    Column("custom_id", Words, nullable=False),
    Column("offset", BigInteger, nullable=False),
    Column("length", BigInteger, nullable=False),
    Column("model", Words, nullable=False),
    Column("prefix", BigInteger, nullable=False),
    Column("size", BigInteger, nullable=False),
    Column("state", Words, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("returns", Integer, nullable=False, server_default="0"),
    Column("not_before", Double, nullable=False, server_default="0"),
    Column("node", Words),
    Column("owner", Words),
    Column("epoch", BigInteger, nullable=False, server_default="0"),
    Column("lease_until", Double),
    UniqueConstraint("batch", "custom_id"),
    CheckConstraint(one_of("state", JobState), name="state"),
    CheckConstraint('line >= 1 AND "offset" >= 0 AND length > 0 AND size >= 0', name="place"),
    CheckConstraint("attempts >= 0 AND returns >= 0 AND epoch >= 0", name="counts"),
    CheckConstraint("(state = 'running') = (owner IS NOT NULL)", name="owner"),
    CheckConstraint("(state = 'running') = (lease_until IS NOT NULL)", name="lease"),
    sqlite_with_rowid=False,
)
_QUEUED, _RUNNING = "state = 'queued'", "state = 'running'"
_index(
    "ix_jobs_queued",
    jobs.c.state,
    jobs.c.batch,
    jobs.c.prefix,
    jobs.c.size.desc(),
    jobs.c.line,
    only=_QUEUED,
)
_index("ix_jobs_running", jobs.c.state, jobs.c.batch, jobs.c.line, only=_RUNNING)

results = Table(
    "results",
    metadata,
    Column("batch", BigInteger, nullable=False),
    Column("line", BigInteger, nullable=False),
    Column("status", Integer),
    Column("request_id", Words),
    Column("body", LargeBinary),
    Column("bytes", BigInteger, nullable=False),
    Column("error_code", Words),
    Column("error_message", Words),
    Column("created_at", Double, nullable=False),
    UniqueConstraint("batch", "line"),
    ForeignKeyConstraint(["batch", "line"], ["jobs.batch", "jobs.line"]),
    CheckConstraint("status IS NULL OR status BETWEEN 100 AND 599", name="status"),
    CheckConstraint("(status IS NULL) = (body IS NULL)", name="body"),
    CheckConstraint("(status IS NULL) = (error_code IS NOT NULL)", name="error"),
    CheckConstraint("(error_code IS NULL) = (error_message IS NULL)", name="message"),
    CheckConstraint("bytes >= 0", name="bytes"),
)

spending = Table(
    "spending",
    metadata,
    Column("slot", BigInteger, primary_key=True, autoincrement=False),
    Column("batch", Boolean(create_constraint=False), primary_key=True, autoincrement=False),
    Column("usd", Double, nullable=False),
)

deliveries = Table(
    "deliveries",
    metadata,
    Column("number", BigId, primary_key=True, autoincrement=True),
    Column("id", Words, nullable=False, unique=True),
    Column("batch_id", Words, nullable=False),
    Column("url", Words, nullable=False),
    Column("type", Words, nullable=False),
    Column("created_at", BigInteger, nullable=False),
    Column("attempts", Integer, nullable=False, server_default="0"),
    Column("due_at", Double),
    Column("ended_at", Double),
    UniqueConstraint("batch_id", "type"),
    CheckConstraint("attempts >= 0", name="attempts"),
    CheckConstraint("(due_at IS NULL) = (ended_at IS NOT NULL)", name="ended"),
    sqlite_autoincrement=True,
)
_index("ix_deliveries_due", deliveries.c.due_at, only="due_at IS NOT NULL")
_index("ix_deliveries_ended", deliveries.c.ended_at, only="ended_at IS NOT NULL")
