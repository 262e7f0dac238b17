"""What the relay has cost, by slots of a day; and an index for uploads that are over."""

import sqlalchemy as sa
from alembic import op
from sqlalchemy.schema import conv

revision = "0002"
down_revision = "0001"


def upgrade() -> None:
    """Make them."""
    op.create_table(
        "spending",
        sa.Column("slot", sa.BigInteger(), nullable=False),
        sa.Column("batch", sa.Boolean(create_constraint=False), nullable=False),
        sa.Column("usd", sa.Double(), nullable=False),
        sa.PrimaryKeyConstraint("slot", "batch", name=conv("pk_spending")),
    )
    over = sa.text("state <> 'pending'")
    op.create_index("ix_uploads_over", "uploads", ["expires_at"], sqlite_where=over, postgresql_where=over)
