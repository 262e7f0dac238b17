"""How Alembic runs: on the connection it is handed, in the transaction that is open on it."""

from alembic import context

from router.jobs.schema import VERSION_TABLE, metadata

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=metadata,
    version_table=VERSION_TABLE,
    transactional_ddl=True,
)
with context.begin_transaction():
    context.run_migrations()
