"""Migration 0013: columns, states and keys of rows that the version before wrote."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest
from alembic import command
from sqlalchemy import text

from tessera.coordinator.db.engine import Database, alembic_config
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.tasks import AdvertisedPolicy, Progress
from tessera.shared.methods.base import Plan
from tests.support.coordinator import LiveCoordinator, until
from tests.support.databases import empty_in
from tests.support.federation import ScriptedWorker, small_model, start_run, values

pytestmark = pytest.mark.both_databases

DIGEST = "sha256:" + "0" * 64
OLD_SPEC = {
    "name": "wards", "method": {"name": "fedavg", "settings": {}}, "model": DIGEST, "version": DIGEST,
    "dataset": "wards", "rounds": 3, "divide": "cohort",
    "cohort": {"size": 4, "enough": 3, "quorum": 2, "tries": 5, "task_tries": 6},
}  # fmt: skip
OLD_PLAN = {"stage": "train", "memory": ["c/*"], "numbers": {"a": 1}}
TASK_COLUMNS = (
    "id, run_id, round_id, worker_id, kind, state, version_number, seed, plan, token, leases, created_at, "
    "upload_bytes, download_bytes, numbers, progress"
)
OLD_ROWS = (
    ("sites", "id, name, created_at", ("s", "north", 1.0)),
    ("workers", "id, site_id, name, declared, declared_digest, created_at, last_seen_at",
     ("w", "s", "n1", json.dumps({"kinds": ["train"], "mirror": {"max_epochs": 3}}), DIGEST, 1.0, 1.0)),
    ("runs", "id, name, state, spec, model_bytes, version_number, revision, created_at, resumed_at, updated_at",
     ("r", "wards", "running", json.dumps(OLD_SPEC), 4, 0, 1, 1.0, 1.0, 1.0)),
    ("versions", "run_id, number, digest, numbers, created_at", ("r", 0, DIGEST, '{"moved": 0.5}', 1.0)),
    ("rounds", "id, run_id, number, attempt, state, stage, opened_at, deadline_at",
     ("o", "r", 1, 1, "open", "train", 1.0, 9.0)),
    ("tasks", TASK_COLUMNS,
     ("t", "r", "o", "w", "train", "lapsed", 0, 7, json.dumps(OLD_PLAN), 2, 2, 1.0, 0, 0, '{"loss": 0.25}',
      '{"phase": "uploading", "bytes": 1, "of_bytes": 2}')),
    ("idempotency", "owner, key, fingerprint, body, created_at",
     ("token:x", "k", "f", json.dumps({"id": "r", "spec": OLD_SPEC}), 1.0)),
)  # fmt: skip


@pytest.fixture
def before(tmp_path: Path) -> Iterator[Database]:
    """A database as version 0012 left it, with a run in the middle of a round."""
    database = Database(empty_in(tmp_path))
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0012")
        for table, columns, row in OLD_ROWS:
            names = [name.strip() for name in columns.split(",")]
            given = ", ".join(f":{name}" for name in names)
            connection.execute(
                text(f"insert into {table} ({columns}) values ({given})"), dict(zip(names, row, strict=True))
            )
    yield database
    database.close()


def test_rows_of_the_version_before_have_the_present_names(before: Database) -> None:
    with before.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "0013")

        def one(query: str) -> object:
            found = connection.execute(text(query)).scalar_one()
            return json.loads(found) if isinstance(found, str) and found.startswith(("{", "[")) else found

        spec = RunSpec.model_validate(one("select spec from runs"))
        plan = Plan.model_validate(one("select plan from tasks"))
        declared = one("select declared from workers")
        progress = Progress.model_validate(one("select progress from tasks"))
        assert (spec.normalization, spec.cohort.target_updates) == ("cohort", 3)
        assert (spec.cohort.max_attempts, spec.cohort.max_task_attempts) == (5, 6)
        assert (plan.server_state, plan.scalars) == (("c/*",), {"a": 1.0})
        assert isinstance(declared, dict)
        assert AdvertisedPolicy.model_validate(declared["advertised_policy"]).max_epochs == 3
        assert one("select declared_digest from workers") == ""
        assert progress.total_bytes == 2
        assert one("select state from tasks") == "expired"
        assert (one("select attempts from tasks"), one("select metrics from tasks")) == (2, {"loss": 0.25})
        assert one("select scalars from versions") == {"moved": 0.5}
        body = one("select body from idempotency")
        assert isinstance(body, dict)
        assert RunSpec.model_validate(body["spec"]) == spec


def test_the_way_back_restores_every_row(before: Database) -> None:
    with before.engine.begin() as connection:
        rows = {table: connection.execute(text(f"select * from {table}")).all() for table, _, _ in OLD_ROWS}
        command.upgrade(alembic_config(connection), "0013")
        command.downgrade(alembic_config(connection), "0012")
        for table, found in rows.items():
            again = [tuple(map(read, row)) for row in connection.execute(text(f"select * from {table}")).all()]
            # What a worker declared is read anew until it declares it again.
            assert again == [tuple("" if v == DIGEST and table == "workers" else read(v) for v in r) for r in found]


def read(value: object) -> object:
    return json.loads(value) if isinstance(value, str) and value.startswith(("{", "[")) else value


def test_a_run_goes_on_in_the_middle_of_a_round(tmp_path: Path) -> None:
    live, model = LiveCoordinator(tmp_path), small_model()
    with live:
        run = start_run(live.client(), model, values(model), rounds=2, cohort={"quorum": 2, "max_task_attempts": 4})
        workers = [ScriptedWorker(live.client("site", site)) for site in ("a", "b")]
        for worker in workers:
            worker.enrol()
        tasks = [worker.take() for worker in workers]
        workers[0].train(tasks[0])
    # As the version before had it, and then as this one finds it.
    database = Database(live.settings.database_url)
    with database.engine.begin() as connection:
        command.downgrade(alembic_config(connection), "0012")
        assert "task_tries" in str(connection.execute(text("select spec from runs")).scalar_one())
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    database.close()
    with live:
        for worker, site in zip(workers, ("a", "b"), strict=True):
            worker.client = live.client("site", site)
        workers[1].train(workers[1].take())
        for worker in workers:
            worker.train(worker.take())
        until(lambda: live.client().run(run.id).state == "completed")
        assert live.client().run(run.id).spec.cohort.max_task_attempts == 4
