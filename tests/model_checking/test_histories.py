"""The checker of histories finds what it is for: each of these histories is bad in one way."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import func, select, text, update

from tessera.coordinator.db.tables import AuditRow, TaskRow, VersionRow, WorkerRow
from tessera.coordinator.services import Services, assemble
from tessera.shared.api.cohort import Cohort
from tests.support import databases
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.histories import Finding, Log, RecordingClient, check, read

Lines = list[dict[str, Any]]
MODEL = small_model()


@pytest.fixture(scope="module")
def past(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, list[Path]]:
    """What a run of two rounds leaves, in files, and two workers' history of it, as their clients wrote it."""
    folder = tmp_path_factory.mktemp("past")
    logs, workers = [folder / f"{site}.jsonl" for site in "ab"], []
    with databases.running_on("sqlite"), LiveCoordinator(folder / "coordinator") as coordinator:
        for site, path in zip("ab", logs, strict=True):
            token = coordinator.token("site", site)
            recording = RecordingClient(coordinator.url, token, Log(path=path), f"{site}/w", verify=False)
            workers.append(ScriptedWorker(recording))
            workers[-1].enrol()
        client = coordinator.client()
        run = start_run(client, MODEL, values(MODEL), rounds=2, cohort=Cohort(size=2, quorum=2))
        for _ in range(2):
            for step, worker in enumerate(workers, start=1):
                worker.train(worker.take(), step=step)
        until(lambda: client.run(run.id).state == "completed")
        for worker in workers:
            worker.client.close()
    return folder / "coordinator", logs


@pytest.fixture
def history(past: tuple[Path, list[Path]]) -> Lines:
    return read(past[1])


@pytest.fixture
def services(past: tuple[Path, list[Path]], tmp_path: Path) -> Iterator[Services]:
    """Over a copy of what the run left, to be spoilt."""
    folder = shutil.copytree(past[0], tmp_path / "coordinator")
    with databases.running_on("sqlite"):
        made = assemble(LiveCoordinator(folder).settings)
    yield made
    made.database.close()


def found(services: Services, lines: Lines) -> list[Finding]:
    return check(lines, services.database, services.blobs)


def kinds(services: Services, lines: Lines) -> set[str]:
    return {finding.kind for finding in found(services, lines)}


def test_a_good_history_has_nothing_to_be_found(services: Services, history: Lines) -> None:
    assert sum(line.get("did") == "submit" for line in history) == 4
    assert sum(line.get("told", {}).get("state") == "accepted" for line in history) == 4
    assert found(services, history) == []


def repeated(history: Lines, **changes: object) -> Lines:
    """With one accepted submission once more, changed."""
    asked = next(line for line in history if line.get("did") == "submit")
    told = next(line for line in history if line["id"] == asked["id"] and "told" in line)
    later = max(line["at"] for line in history) + 1
    again = {"id": "again", "at": later}
    return [*history, {**asked, **again, **changes}, {**told, **again}]


def test_two_tokens_that_were_both_accepted_are_found(services: Services, history: Lines) -> None:
    assert kinds(services, repeated(history, token=2)) == {"twice", "lost"}


def test_two_updates_of_one_task_that_were_both_accepted_are_found(services: Services, history: Lines) -> None:
    assert kinds(services, repeated(history, update=f"sha256:{'1' * 64}")) == {"twice", "lost"}


def test_an_update_that_was_made_from_another_version_is_found(services: Services, history: Lines) -> None:
    assert kinds(services, repeated(history, version=f"sha256:{'1' * 64}")) == {"wrong-round"}


def test_an_update_that_was_made_for_another_round_is_found(services: Services, history: Lines) -> None:
    assert kinds(services, repeated(history, round=7)) == {"wrong-round"}


def test_a_refusal_after_an_acceptance_is_found(services: Services, history: Lines) -> None:
    lines = repeated(history)
    lines[-1]["told"] = {"problem": "lease-lost"}
    assert kinds(services, lines) == {"contradiction"}


def test_an_accepted_update_that_nobody_sent_is_found(services: Services, history: Lines) -> None:
    first = next(line["id"] for line in history if line.get("did") == "submit")
    assert kinds(services, [line for line in history if line["id"] != first]) == {"never-sent"}


FIRST = select(VersionRow.digest).where(VersionRow.number == 0).scalar_subquery()
SPOILT: dict[str, tuple[Any, set[str]]] = {
    "an accepted update is gone": (
        update(TaskRow).values(state="expired", merged_in=None).where(TaskRow.version_number == 0),
        {"lost", "wrong-version"},
    ),
    "an update counts twice as much": (
        update(TaskRow)
        .values(examples=99)
        .where(TaskRow.worker_id == select(func.min(WorkerRow.id)).scalar_subquery()),
        {"wrong-version"},
    ),
    "an update is in the wrong round": (update(TaskRow).values(version_number=0), {"wrong-round"}),
    "a version is another": (
        update(VersionRow).values(digest=FIRST).where(VersionRow.number == 2),
        {"wrong-version"},
    ),
    "the chain was changed": (update(AuditRow).values(actor="nobody").where(AuditRow.seq == 3), {"broken-chain"}),
}


@pytest.mark.parametrize("name", SPOILT)
def test_a_spoilt_database_is_found(services: Services, history: Lines, name: str) -> None:
    spoil, wanted = SPOILT[name]
    with services.database.transaction() as session:
        # The schema forbids some of it.
        session.execute(text("DROP INDEX uq_tasks_update"))
        session.execute(spoil)
    assert kinds(services, history) == wanted


def test_a_line_that_was_cut_off_is_no_line(tmp_path: Path) -> None:
    path = tmp_path / "w.jsonl"
    path.write_text(json.dumps({"id": 0, "at": 0.0, "who": "a/w", "did": "claim"}) + '\n{"id": 1, "a')
    assert [line["id"] for line in read([path])] == ["w.jsonl:0"]


def test_one_wish_that_made_two_runs_is_found(services: Services, history: Lines) -> None:
    created = [{"id": f"c{n}", "at": n, "who": "o", "did": "create", "key": "k"} for n in range(2)]
    run = next(line["told"]["run"] for line in history if "run" in line.get("told", {}))
    answers = [{"id": f"c{n}", "at": n, "told": {"id": name}} for n, name in enumerate([run, "another"])]
    assert kinds(services, [*history, *created, *answers]) == {"twice", "lost"}


def test_a_cancellation_that_was_lost_is_found(services: Services, history: Lines) -> None:
    run = next(line["told"]["run"] for line in history if "run" in line.get("told", {}))
    asked = {"id": "p", "at": 0.0, "who": "o", "did": "patch", "run": run, "state": "cancelled"}
    told = {"id": "p", "at": 1.0, "told": {"id": run, "state": "cancelled"}}
    assert kinds(services, [*history, asked, told]) == {"lost"}
