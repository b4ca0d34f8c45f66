"""Runs the steps on the connection that `tessera coordinator migrate` hands over."""

from __future__ import annotations

from alembic import context

from coordinator.storage.tables import Table

context.configure(
    connection=context.config.attributes["connection"],
    target_metadata=Table.metadata,
    # SQLite cannot alter most of a table in place; batches copy it.
    render_as_batch=True,
)
with context.begin_transaction():
    context.run_migrations()
