"""Everything: routers, files in chunks, uploads, batches, their lines and results, webhook deliveries."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import conv

revision = "0001"
down_revision = None

Items = tuple[sa.schema.SchemaItem, ...]

BIG_ID = sa.BigInteger().with_variant(sa.Integer(), "sqlite")


def _check(name: str, rule: str) -> sa.CheckConstraint:
    return sa.CheckConstraint(rule, name=conv(f"ck_{name}"))


def _unique(table: str, *columns: str) -> sa.UniqueConstraint:
    return sa.UniqueConstraint(*columns, name=conv(f"uq_{table}_{'_'.join(columns)}"))


def _refers(table: str, columns: list[str], to: list[str], ondelete: str | None = None) -> sa.ForeignKeyConstraint:
    return sa.ForeignKeyConstraint(columns, to, name=conv(f"fk_{table}_{'_'.join(columns)}"), ondelete=ondelete)


def _index(name: str, table: str, columns: list[str], only: str | None = None) -> None:
    where = None if only is None else sa.text(only)
    told = [sa.text(column) if " " in column else column for column in columns]
    op.create_index(name, table, told, sqlite_where=where, postgresql_where=where)


DELIVERIES: Items = (
    sa.Column("number", BIG_ID, nullable=False),
    sa.Column("id", sa.Text(), nullable=False),
    sa.Column("batch_id", sa.Text(), nullable=False),
    sa.Column("url", sa.Text(), nullable=False),
    sa.Column("type", sa.Text(), nullable=False),
    sa.Column("created_at", sa.BigInteger(), nullable=False),
    sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("due_at", sa.Double()),
    sa.Column("ended_at", sa.Double()),
    sa.PrimaryKeyConstraint("number", name=conv("pk_deliveries")),
    _unique("deliveries", "batch_id", "type"),
    _check("deliveries_attempts", "attempts >= 0"),
    _check("deliveries_ended", "(due_at IS NULL) = (ended_at IS NOT NULL)"),
    _unique("deliveries", "id"),
)

ROUTERS: Items = (
    sa.Column("id", sa.Text(), nullable=False),
    sa.Column("name", sa.Text(), nullable=False),
    sa.Column("started_at", sa.Double(), nullable=False),
    sa.Column("beat_at", sa.Double(), nullable=False),
    sa.Column("pace", sa.Integer(), nullable=False, server_default="0"),
    sa.PrimaryKeyConstraint("id", name=conv("pk_routers")),
    _check("routers_pace", "pace >= 0"),
)

UPLOADS: Items = (
    sa.Column("number", BIG_ID, nullable=False),
    sa.Column("id", sa.Text(), nullable=False),
    sa.Column("caller", sa.Text(), nullable=False),
    sa.Column("purpose", sa.Text(), nullable=False),
    sa.Column("filename", sa.Text(), nullable=False),
    sa.Column("mime_type", sa.Text(), nullable=False),
    sa.Column("bytes", sa.BigInteger(), nullable=False),
    sa.Column("file_expires_s", sa.BigInteger()),
    sa.Column("created_at", sa.BigInteger(), nullable=False),
    sa.Column("expires_at", sa.BigInteger(), nullable=False),
    sa.Column("state", sa.Text(), nullable=False),
    sa.Column("part_ids", sa.Text()),
    sa.Column("file_id", sa.Text()),
    sa.PrimaryKeyConstraint("number", name=conv("pk_uploads")),
    _check("uploads_state", "state IN ('pending', 'completed', 'cancelled', 'expired')"),
    _check("uploads_bytes", "bytes >= 0"),
    _check("uploads_file", "(state = 'completed') = (file_id IS NOT NULL)"),
    _check("uploads_parts", "(state = 'completed') = (part_ids IS NOT NULL)"),
    _unique("uploads", "id"),
)

FILES: Items = (
    sa.Column("number", BIG_ID, nullable=False),
    sa.Column("id", sa.Text(), nullable=False),
    sa.Column("caller", sa.Text(), nullable=False),
    sa.Column("purpose", sa.Text(), nullable=False),
    sa.Column("filename", sa.Text(), nullable=False),
    sa.Column("bytes", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("created_at", sa.BigInteger(), nullable=False),
    sa.Column("expires_at", sa.BigInteger()),
    sa.Column("state", sa.Text(), nullable=False),
    sa.Column("writer", sa.Text()),
    sa.Column("upload", sa.BigInteger()),
    sa.PrimaryKeyConstraint("number", name=conv("pk_files")),
    _check("files_state", "state IN ('writing', 'part', 'ready', 'deleting')"),
    _check("files_bytes", "bytes >= 0"),
    _check("files_part", "state <> 'part' OR upload IS NOT NULL"),
    _check("files_writer", "writer IS NULL OR state = 'writing'"),
    _unique("files", "id"),
    _refers("files", ["upload"], ["uploads.number"], "SET NULL"),
)

BATCHES: Items = (
    sa.Column("number", BIG_ID, nullable=False),
    sa.Column("id", sa.Text(), nullable=False),
    sa.Column("caller", sa.Text(), nullable=False),
    sa.Column("endpoint", sa.Text(), nullable=False),
    sa.Column("input_file_id", sa.Text(), nullable=False),
    sa.Column("input", sa.BigInteger()),
    sa.Column("completion_window", sa.Text(), nullable=False),
    sa.Column("window_s", sa.BigInteger(), nullable=False),
    sa.Column("priority", sa.Integer(), nullable=False),
    sa.Column("urgency", sa.Double(), nullable=False),
    sa.Column("metadata", sa.Text()),
    sa.Column("output_expires_s", sa.BigInteger()),
    sa.Column("webhook", sa.Text()),
    sa.Column("idempotency_key", sa.Text()),
    sa.Column("state", sa.Text(), nullable=False),
    sa.Column("late", sa.Boolean(), nullable=False, server_default=sa.text("false")),
    sa.Column("model", sa.Text()),
    sa.Column("errors", sa.Text()),
    sa.Column("waiting", sa.Text()),
    sa.Column("created_at", sa.BigInteger(), nullable=False),
    sa.Column("expires_at", sa.BigInteger(), nullable=False),
    sa.Column("validated_at", sa.BigInteger()),
    sa.Column("in_progress_at", sa.BigInteger()),
    sa.Column("finalizing_at", sa.BigInteger()),
    sa.Column("completed_at", sa.BigInteger()),
    sa.Column("failed_at", sa.BigInteger()),
    sa.Column("expired_at", sa.BigInteger()),
    sa.Column("cancelling_at", sa.BigInteger()),
    sa.Column("cancelled_at", sa.BigInteger()),
    sa.Column("total", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("completed", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("failed", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("stopped", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("size_left", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("input_tokens", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("output_tokens", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("cached_tokens", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("reasoning_tokens", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("owner", sa.Text()),
    sa.Column("epoch", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("lease_until", sa.Double()),
    sa.Column("written_line", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("output", sa.BigInteger()),
    sa.Column("error", sa.BigInteger()),
    sa.Column("output_file_id", sa.Text()),
    sa.Column("error_file_id", sa.Text()),
    sa.Column("cleared", sa.Boolean(), nullable=False, server_default=sa.text("false")),
    sa.PrimaryKeyConstraint("number", name=conv("pk_batches")),
    _unique("batches", "caller", "idempotency_key"),
    _check(
        "batches_state",
        "state IN ('validating', 'in_progress', 'finalizing', 'completed', 'failed', 'expired', "
        "'cancelling', 'cancelled')",
    ),
    _check("batches_window", "window_s > 0 AND expires_at = created_at + window_s"),
    _check("batches_counts", "completed >= 0 AND failed >= 0 AND stopped >= 0"),
    _check("batches_total", "completed + failed + stopped <= total"),
    _check(
        "batches_tokens",
        "input_tokens >= 0 AND output_tokens >= 0 AND cached_tokens >= 0 AND reasoning_tokens >= 0 AND size_left >= 0",
    ),
    _check("batches_progress", "epoch >= 0 AND written_line >= 0"),
    _check("batches_lease", "(owner IS NULL) = (lease_until IS NULL)"),
    _check("batches_owner", "owner IS NULL OR validated_at IS NULL"),
    _check("batches_in_progress_stamp", "state NOT IN ('in_progress', 'finalizing') OR in_progress_at IS NOT NULL"),
    _check("batches_finalizing_stamp", "state <> 'finalizing' OR finalizing_at IS NOT NULL"),
    _check("batches_cancelling_stamp", "state NOT IN ('cancelling', 'cancelled') OR cancelling_at IS NOT NULL"),
    _check("batches_validated_stamp", "state = 'validating' OR state = 'cancelling' OR validated_at IS NOT NULL"),
    _check("batches_cancelled_stamp", "(state = 'cancelled') = (cancelled_at IS NOT NULL)"),
    _check("batches_completed_stamp", "(state = 'completed') = (completed_at IS NOT NULL)"),
    _check("batches_expired_stamp", "(state = 'expired') = (expired_at IS NOT NULL)"),
    _check("batches_failed_stamp", "(state = 'failed') = (failed_at IS NOT NULL)"),
    _check(
        "batches_all_lines",
        "state NOT IN ('cancelled', 'completed', 'expired', 'failed') OR completed + failed + stopped = total",
    ),
    _check("batches_none_stopped", "state <> 'completed' OR stopped = 0"),
    _check("batches_late", "state <> 'expired' OR late"),
    _check("batches_cleared", "NOT cleared OR NOT state NOT IN ('cancelled', 'completed', 'expired', 'failed')"),
    _unique("batches", "id"),
    _refers("batches", ["input"], ["files.number"], "SET NULL"),
    _refers("batches", ["output"], ["files.number"], "SET NULL"),
    _refers("batches", ["error"], ["files.number"], "SET NULL"),
)

CHUNKS: Items = (
    sa.Column("file", sa.BigInteger(), nullable=False),
    sa.Column("start", sa.BigInteger(), nullable=False),
    sa.Column("data", sa.LargeBinary(), nullable=False),
    _unique("chunks", "file", "start"),
    _check("chunks_start", "start >= 0"),
    _check("chunks_data", "length(data) BETWEEN 1 AND 1048576"),
    _refers("chunks", ["file"], ["files.number"]),
)

JOBS: Items = (
    sa.Column("batch", sa.BigInteger(), nullable=False, autoincrement=False),
    sa.Column("line", sa.BigInteger(), nullable=False, autoincrement=False),
    sa.Column("custom_id", sa.Text(), nullable=False),
    sa.Column("offset", sa.BigInteger(), nullable=False),
    sa.Column("length", sa.BigInteger(), nullable=False),
    sa.Column("model", sa.Text(), nullable=False),
    sa.Column("prefix", sa.BigInteger(), nullable=False),
    sa.Column("size", sa.BigInteger(), nullable=False),
    sa.Column("state", sa.Text(), nullable=False),
    sa.Column("attempts", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("returns", sa.Integer(), nullable=False, server_default="0"),
    sa.Column("not_before", sa.Double(), nullable=False, server_default="0"),
    sa.Column("node", sa.Text()),
    sa.Column("owner", sa.Text()),
    sa.Column("epoch", sa.BigInteger(), nullable=False, server_default="0"),
    sa.Column("lease_until", sa.Double()),
    sa.PrimaryKeyConstraint("batch", "line", name=conv("pk_jobs")),
    _unique("jobs", "batch", "custom_id"),
    _check("jobs_state", "state IN ('queued', 'running', 'done', 'failed', 'expired', 'cancelled')"),
    _check("jobs_place", 'line >= 1 AND "offset" >= 0 AND length > 0 AND size >= 0'),
    _check("jobs_counts", "attempts >= 0 AND returns >= 0 AND epoch >= 0"),
    _check("jobs_owner", "(state = 'running') = (owner IS NOT NULL)"),
    _check("jobs_lease", "(state = 'running') = (lease_until IS NOT NULL)"),
    _refers("jobs", ["batch"], ["batches.number"]),
)

RESULTS: Items = (
    sa.Column("batch", sa.BigInteger(), nullable=False),
    sa.Column("line", sa.BigInteger(), nullable=False),
    sa.Column("status", sa.Integer()),
    sa.Column("request_id", sa.Text()),
    sa.Column("body", sa.LargeBinary()),
    sa.Column("bytes", sa.BigInteger(), nullable=False),
    sa.Column("error_code", sa.Text()),
    sa.Column("error_message", sa.Text()),
    sa.Column("created_at", sa.Double(), nullable=False),
    _unique("results", "batch", "line"),
    _refers("results", ["batch", "line"], ["jobs.batch", "jobs.line"]),
    _check("results_status", "status IS NULL OR status BETWEEN 100 AND 599"),
    _check("results_body", "(status IS NULL) = (body IS NULL)"),
    _check("results_error", "(status IS NULL) = (error_code IS NOT NULL)"),
    _check("results_message", "(error_code IS NULL) = (error_message IS NULL)"),
    _check("results_bytes", "bytes >= 0"),
)


def upgrade() -> None:
    """Make every table and index."""
    op.create_table("deliveries", *DELIVERIES, sqlite_autoincrement=True)
    op.create_table("routers", *ROUTERS)
    op.create_table("uploads", *UPLOADS, sqlite_autoincrement=True)
    op.create_table("files", *FILES, sqlite_autoincrement=True)
    op.create_table("batches", *BATCHES, sqlite_autoincrement=True)
    op.create_table("chunks", *CHUNKS)
    op.create_table("jobs", *JOBS, sqlite_with_rowid=False)
    op.create_table("results", *RESULTS)
    _index("ix_deliveries_due", "deliveries", ["due_at"], only="due_at IS NOT NULL")
    _index("ix_deliveries_ended", "deliveries", ["ended_at"], only="ended_at IS NOT NULL")
    _index("ix_uploads_pending", "uploads", ["expires_at"], only="state = 'pending'")
    _index("ix_files_expiring", "files", ["state", "expires_at"], only="state = 'ready'")
    _index("ix_files_listed", "files", ["state", "caller", "number"], only="state = 'ready'")
    _index("ix_files_state", "files", ["state", "number"])
    _index("ix_files_upload", "files", ["upload"])
    _index("ix_batches_error", "batches", ["error"])
    _index("ix_batches_input", "batches", ["input"])
    _index("ix_batches_listed", "batches", ["caller", "number"])
    _index("ix_batches_output", "batches", ["output"])
    _index("ix_batches_state", "batches", ["state", "number"])
    _index("ix_batches_uncleared", "batches", ["number"], only="NOT cleared")
    _index("ix_jobs_queued", "jobs", ["state", "batch", "prefix", "size DESC", "line"], only="state = 'queued'")
    _index("ix_jobs_running", "jobs", ["state", "batch", "line"], only="state = 'running'")
    if op.get_bind().dialect.name == "postgresql":
        # Uncompressed, so that a line is cut out of a chunk without reading all of it.
        op.execute("ALTER TABLE chunks ALTER COLUMN data SET STORAGE EXTERNAL")
