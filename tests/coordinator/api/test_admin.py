"""What administrators and machines that watch are shown."""

from __future__ import annotations

import shutil
from datetime import UTC, datetime
from itertools import pairwise

import pytest
from prometheus_client.parser import text_string_to_metric_families
from sqlalchemy import update

from tessera.coordinator.alerts.attention import Alert
from tessera.coordinator.alerts.status import MAX_CONCERNS, MAX_RUNS
from tessera.coordinator.alerts.status import status as status_of
from tessera.coordinator.db.tables import VersionRow
from tessera.shared.api.audit_chain import GENESIS, link, named
from tessera.shared.api.tasks import Progress
from tessera.shared.schema import PROTOCOL
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values


def test_health_and_version_answer_anybody(standing: LiveCoordinator) -> None:
    http = standing.bare()
    assert http.get("/healthz/live").status_code == 204
    ready = http.get("/healthz/ready")
    assert (ready.status_code, ready.json()) == (
        200,
        {
            "ready": True,
            "schema_at_head": True,
            "database_intact": True,
            "store_writable": True,
            "store_has_space": True,
            "conducts": True,
        },
    )
    assert http.get("/version").json() == {"version": "0.1.0", "protocol_min": PROTOCOL, "protocol_max": PROTOCOL}


def test_a_coordinator_whose_store_takes_nothing_is_not_ready(coordinator: LiveCoordinator) -> None:
    shutil.rmtree(coordinator.settings.staging_dir)
    answer = coordinator.bare().get("/healthz/ready")
    assert (answer.status_code, answer.json()["ready"], answer.json()["store_writable"]) == (503, False, False)
    assert coordinator.bare().get("/healthz/live").status_code == 204


@pytest.mark.parametrize(("schema", "status"), [("0000", 503), ("9999_from_0100", 200), ("9999", 503)])
def test_a_coordinator_stays_ready_on_a_schema_that_admits_its_code(
    coordinator: LiveCoordinator, schema: str, status: int
) -> None:
    with coordinator.services.database.engine.begin() as connection:
        connection.exec_driver_sql(f"UPDATE alembic_version SET version_num = '{schema}'")
    answer = coordinator.bare().get("/healthz/ready")
    assert (answer.status_code, answer.json()["schema_at_head"]) == (status, status == 200)


def test_metrics_are_prometheus_text_and_tell_of_runs_and_workers(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start_run(client, model, values(model))
    ScriptedWorker(coordinator.client("site", "a")).enrol()
    until(lambda: client.status().live_workers)
    answer = coordinator.http("viewer").get("/metrics")
    assert answer.headers["Content-Type"].startswith("text/plain")
    families = {family.name: family for family in text_string_to_metric_families(answer.text)}
    running = {sample.labels["state"]: sample.value for sample in families["tessera_runs"].samples}
    assert running == {"running": 1, "paused": 0, "completed": 0, "cancelled": 0}
    assert families["tessera_live_workers"].samples[0].value == 1
    # Six blocks, a model and a manifest.
    assert families["tessera_blobs"].samples[0].value == 8


def test_the_status_tells_of_progress_warnings_failures_room_and_what_waits_for_people(
    coordinator: LiveCoordinator,
) -> None:
    client, model = coordinator.client(), small_model()
    failing, held = (ScriptedWorker(coordinator.client("site", site)).enrol() for site in ("a", "b"))
    run = start_run(client, model, values(model), name="cats")
    task = held.take()
    failing.fail(failing.take())
    held.client.heartbeat(task.id, task.token, Progress(phase="uploading", held_since=datetime.fromtimestamp(0, UTC)))
    with coordinator.services.database.transaction() as session:
        session.execute(update(VersionRow).values(warnings=["scores are equal"]))
    status = coordinator.client("viewer").status()
    assert (status.runs, status.workers, status.live_workers) == ({"running": 1}, 2, 2)
    (live,) = status.live_runs
    assert (live.name, live.version, live.rounds, live.warnings) == (
        "cats",
        0,
        run.spec.rounds,
        ("scores are equal",),
    )
    assert live.round is not None
    assert (live.round.number, live.round.state, live.round.tasks) == (1, "open", {"failed": 1, "leased": 1})
    (failure,) = status.failures
    assert (failure.name, failure.state, failure.tasks, failure.workers) == ("cats", "failed", 1, ("a/w",))
    assert failure.remedy
    assert {one.code: one.detail for one in status.needs_attention}["update-held"] == "Held at b/w."
    assert status.needs_attention_total == len(status.needs_attention)
    assert (status.blobs, status.blob_bytes > run.model_bytes) == (8, True)
    assert status.free_disk_bytes > 0


def test_a_status_is_one_page_however_many_runs_there_are(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start = values(model)
    for number in range(MAX_RUNS + 2):
        start_run(client, model, start, name=f"run-{number}", dataset="none")
    status = client.status()
    assert status.runs == {"running": MAX_RUNS + 2}
    assert len(status.live_runs) == MAX_RUNS
    assert len(status.needs_attention) <= MAX_CONCERNS


def test_many_runs_that_wait_leave_room_in_the_status_for_a_full_disk(coordinator: LiveCoordinator) -> None:
    services = coordinator.services
    found = [Alert("run-paused", "a run is paused", "")] * MAX_CONCERNS
    found.append(Alert("disk-low", "The disk is nearly full", "", weight="bad"))
    with services.database.snapshot() as session:
        shown = status_of(session, 0.0, found, services.disk, services.memory).needs_attention
    assert (shown[0].code, len(shown)) == ("disk-low", MAX_CONCERNS)


def test_the_audit_chain_tells_every_step_of_a_round_and_holds_together(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    run = start_run(client, model, values(model))
    worker = ScriptedWorker(coordinator.client("site", "a"))
    worker.train(worker.take())
    until(lambda: client.run(run.id).state == "completed")
    entries = list(client.audit())
    told = [entry.action for entry in entries if entry.run == run.id]
    assert told == [
        "run.create",
        "round.open",
        "task.lease",
        "task.accept",
        "round.close",
        "round.commit",
        "version",
        "run.complete",
    ]
    assert entries[0].previous == GENESIS
    assert all(after.previous == before.digest for before, after in pairwise(entries))
    # Whoever may read the chain can verify it, from what the API shows alone.
    for entry in entries:
        content = entry.model_dump(include={"seq", "actor", "action", "subject", "detail"})
        assert link(entry.previous, {**content, "at": entry.at.timestamp(), "run_id": entry.run}) == entry.digest


def test_the_audit_chain_tells_who_did_it(coordinator: LiveCoordinator) -> None:
    client = coordinator.client()
    client.create_site("somewhere")
    stored = list(client.audit())[-1]
    entry = named(client.audit_names(), stored)
    assert "somewhere" not in stored.model_dump_json()
    assert (entry.action, entry.actor, entry.detail) == (
        "site.create",
        "admin:test-admin",
        {"name": "somewhere", "studies": ["default"]},
    )
