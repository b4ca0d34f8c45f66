"""A version that is newer than this one: its code with one more step of the schema, and with one more field of two
messages of a worker and of one of a coordinator."""

from __future__ import annotations

import shutil
from pathlib import Path

from alembic.script import ScriptDirectory

from tessera.coordinator.db.engine import alembic_config
from tests.support.paths import ROOT

VERSION = "9.0.0"

PARTS = ("coordinator", "worker", "shared", "migrations", "tessera", "docs", "tests/support")

STEP = """
import sqlalchemy as sa
from alembic import op

revision, down_revision = {revision!r}, {before!r}


def upgrade() -> None:
    op.add_column("tasks", sa.Column("novelty", sa.String()))
    op.create_table(
        "novelties",
        sa.Column("task_id", sa.String(), sa.ForeignKey("tasks.id", ondelete="CASCADE"), nullable=False),
        sa.Column("note", sa.String(), nullable=False),
        sa.PrimaryKeyConstraint("task_id"),
    )
"""

TABLE = """
class NoveltyRow(Table):
    __tablename__ = "novelties"

    task_id: Mapped[str] = mapped_column(ForeignKey("tasks.id", ondelete="CASCADE"), primary_key=True)
    note: Mapped[str]


class BlobRow(Table):
"""

ACCEPTING = "    view = _accept(services, caller, record, columns, report.data)\n"

WRITING = """
    from tessera.coordinator.db.engine import insert_missing
    from tessera.coordinator.db.tables import NoveltyRow

    view = _accept(services, caller, record, columns | {"novelty": report.novelty}, report.data)
    with services.database.transaction() as session:
        insert_missing(session, NoveltyRow, [{"task_id": task_id, "note": report.novelty or "none"}])
"""

CHANGES = (
    ("coordinator/db/tables.py", "\nclass BlobRow(Table):\n", TABLE),
    (
        "coordinator/db/tables.py",
        "    update_digest: Mapped[str | None]",
        "    novelty: Mapped[str | None]\n    update_digest: Mapped[str | None]",
    ),
    (
        "shared/api/tasks.py",
        "    resources: Resources = {}\n",
        "    resources: Resources = {}\n    novelty: str = ''\n",
    ),
    ("coordinator/db/workers.py", '    "resources",\n', '    "resources",\n    "novelty",\n'),
    ("shared/api/tasks.py", "    update: Digest\n", "    update: Digest\n    novelty: str | None = None\n"),
    ("shared/api/tasks.py", "    run_name: Label\n", "    run_name: Label\n    novelty: str | None = None\n"),
    (
        "coordinator/operations/tasks.py",
        '{"audit_head": record.worker.audit_head}',
        '{"audit_head": record.worker.audit_head, "novelty": task.id}',
    ),
    ("coordinator/operations/tasks.py", ACCEPTING, WRITING),
    (
        "tests/support/federation.py",
        "            update=digest,\n",
        "            update=digest, novelty=task.novelty,\n",
    ),
)


def make(folder: Path) -> Path:
    """Write that version's tree into a new folder."""
    for part in PARTS:
        shutil.copytree(ROOT / part, folder / part, symlinks=True, ignore=shutil.ignore_patterns("__pycache__"))
    for name, before, after in CHANGES:
        file = folder / name
        text = file.read_text()
        assert text.count(before) == 1, f"{name} has {text.count(before)} times {before!r}"
        file.write_text(text.replace(before, after))
    head = ScriptDirectory.from_config(alembic_config()).get_current_head()
    assert head
    revision = f"9000_from_{head.partition('_')[0]}"
    (folder / "migrations" / "versions" / "9000_novelties.py").write_text(STEP.format(revision=revision, before=head))
    # The first that is found is the installed one.
    about = folder / f"tessera_fl-{VERSION}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: tessera-fl\nVersion: {VERSION}\n")
    return folder
