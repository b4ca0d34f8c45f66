"""Runs the steps on the connection that `tessera coordinator migrate` hands over."""

from __future__ import annotations

from alembic import context

from tessera.coordinator.db.tables import Table

connection = context.config.attributes["connection"]
if connection.dialect.name == "postgresql":
    # A step over a large table may take its time; what it waits for others is bounded as ever.
    connection.exec_driver_sql("SET LOCAL statement_timeout = 0")
context.configure(
    connection=connection,
    target_metadata=Table.metadata,
    # SQLite cannot alter most of a table in place; batches copy it.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
