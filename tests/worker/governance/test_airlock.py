"""Updates that wait for a person: nothing leaves unreleased, whatever ends first."""

from __future__ import annotations

from collections.abc import Callable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from tessera.shared.api.tasks import Task
from tessera.shared.problems import RoundClosed
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.updates.update_file import WrittenUpdate
from tessera.worker.agent import Agent
from tessera.worker.governance.airlock import (
    Airlock,
    AirlockError,
    BlockOut,
    HeldTask,
    ReleaseDecision,
    Summary,
    UpdateWithheld,
    summary_of,
    work_of,
)
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.settings import WorkerSettings
from tessera.worker.state.audit import Audit
from tessera.worker.state.database import DATABASE_FILE, StateDatabase
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.vault import Vault
from tessera.worker.task.environment import Journal, TaskRun
from tessera.worker.task.heartbeat import Stop
from tessera.worker.task.upload import Egress, HeldUpdate, UpdateFile
from tessera.worker.training.progress import Report
from tests.support.task_document import task_of

DIGEST = f"sha256:{'0' * 64}"
BYTES = b"an update"


def summary(token: int = 1, update: bytes = BYTES) -> Summary:
    task = TaskRef(run="r", run_name="demo", round=1, task="abcdef0123456789", token=token)
    return summary_of(
        task, orchestrator=None, dataset="wards", examples=10, held_at=datetime.now(UTC), update=digest_of(update),
        nbytes=len(update),
        blocks={"a": BlockOut(nbytes=4, norm=3.0), "b": BlockOut(nbytes=5, norm=4.0)}, metrics={}, epsilon=None,
    )  # fmt: skip


def held_in(folder: Path, task: Task | None = None) -> Airlock:
    """An airlock that holds an update."""
    airlock, made = Airlock(folder, pause=0.01), folder / "made"
    made.write_bytes(BYTES)
    airlock.hold(made, summary(), HeldTask(work=work_of(task) if task else DIGEST, blocks=()))
    return airlock


def closing(after: int = 3) -> Callable[[], None]:
    """A check of a task whose round closes after some looks."""
    looks = iter(range(after))

    def check() -> None:
        if next(looks, None) is None:
            raise RoundClosed("too late")

    return check


def test_an_update_leaves_once_it_is_released(tmp_path: Path) -> None:
    worker, desk = held_in(tmp_path), Airlock(tmp_path)
    (held,) = desk.held()
    assert (held.id, held.norm, held.update) == ("abcdef012345-1", 5.0, digest_of(BYTES))
    assert desk.path(held).read_bytes() == BYTES
    with pytest.raises(RoundClosed):
        worker.wait(held, closing())
    desk.decide("abcdef", "release", "ann")
    outcome = worker.wait(held, lambda: None)
    assert (outcome.update, outcome.by) == (digest_of(BYTES), "ann")


def test_what_is_withheld_does_not_leave_and_says_why(tmp_path: Path) -> None:
    worker = held_in(tmp_path)
    Airlock(tmp_path).decide("abcdef", "withhold", "ann", "norm too large")
    with pytest.raises(UpdateWithheld, match="norm too large"):
        worker.wait(worker.held()[0], lambda: None)


def test_an_update_that_was_removed_is_withheld(tmp_path: Path) -> None:
    worker = held_in(tmp_path)
    (held,) = worker.held()
    worker.remove(held)
    with pytest.raises(UpdateWithheld, match="its file was removed"):
        worker.wait(held, lambda: None)
    with pytest.raises(AirlockError, match="no held updates have an id beginning with 'abcdef'"):
        worker.decide("abcdef", "release", "ann")


def test_a_decision_is_made_once_and_on_one_update(tmp_path: Path) -> None:
    desk = held_in(tmp_path)
    desk.decide("abcdef", "withhold", "ann")
    with pytest.raises(AirlockError, match="was already decided"):
        desk.decide("abcdef", "release", "bob")


def test_a_decision_on_an_update_that_is_removed_meanwhile_is_refused(tmp_path: Path) -> None:
    worker = held_in(tmp_path)

    def clock() -> datetime:
        worker.remove(summary())
        return datetime.now(UTC)

    with pytest.raises(AirlockError, match="was removed meanwhile"):
        Airlock(tmp_path, clock).decide("abcdef", "release", "ann")


def test_a_release_of_other_bytes_lets_nothing_leave(tmp_path: Path) -> None:
    worker = held_in(tmp_path)
    (held,) = worker.held()
    other = ReleaseDecision(update=digest_of(b"other"), verdict="release", by="eve", at=datetime.now(UTC))
    StateDatabase.of(tmp_path).write("UPDATE held SET decision = ?", other.model_dump_json())
    with pytest.raises(RoundClosed):
        worker.wait(held, closing())


def test_only_the_same_work_takes_up_what_a_killed_process_held(tmp_path: Path) -> None:
    task = task_of(id="abcdef0123456789", token=1)
    airlock = held_in(tmp_path, task)
    again = task.model_copy(update={"token": 2, "lease_seconds": 9.0})
    assert airlock.find(again)
    assert airlock.find(again.model_copy(update={"seed": task.seed + 1})) is None
    assert airlock.find(again.model_copy(update={"id": "another"})) is None


def test_an_update_that_the_audit_does_not_know_is_not_taken_up(tmp_path: Path) -> None:
    airlock, audit = held_in(tmp_path), Audit(tmp_path / "audit", "w", b"k" * 32)
    (held,) = airlock.held()
    run: Any = SimpleNamespace(env=SimpleNamespace(audit=audit), report=Report())
    stored = HeldTask(work=DIGEST, blocks=())
    audit.record("update.hold", TaskRef("r", "demo", 1, held.task, 1), id=held.id, update=digest_of(b"other"))
    with pytest.raises(PolicyViolation, match="audit does not record the update in the airlock"):
        HeldUpdate.again(Egress(run), airlock, held, stored)
    airlock = held_in(tmp_path)
    audit.record("update.hold", TaskRef("r", "demo", 1, held.task, 1), id=held.id, update=held.update)
    assert HeldUpdate.again(Egress(run), airlock, held, stored).report.examples == held.examples


def test_what_was_changed_after_its_release_does_not_leave(tmp_path: Path) -> None:
    airlock = held_in(tmp_path)
    (held,) = airlock.held()
    airlock.path(held).write_bytes(b"another")
    task: Any = task_of()
    env: Any = SimpleNamespace(policy=Policy(), kinds=("train",), inbox=None, allowances={})
    run = TaskRun(env, task, lambda: None, Report(), Journal(TaskRef.of(task), "notes", None, None))
    with pytest.raises(PolicyViolation, match="the file changed after its release"):
        HeldUpdate(Egress(run), airlock, held, HeldTask(work=DIGEST, blocks=())).send(env, lambda: None)


def test_an_update_that_could_not_be_held_is_not_left_behind(tmp_path: Path) -> None:
    vault, airlock, task = Vault(tmp_path / "vault"), Airlock(tmp_path), task_of()
    made = tmp_path / "made"
    made.write_bytes(BYTES)
    env: Any = SimpleNamespace(vault=vault)
    run = TaskRun(env, task, lambda: None, Report(), Journal(TaskRef.of(task), "notes", None, None))
    update = UpdateFile(WrittenUpdate({}, {}, digest_of(BYTES)), len(BYTES), partial(made.open, "rb"), made)
    (tmp_path / DATABASE_FILE).mkdir()
    with pytest.raises(OSError, match=DATABASE_FILE):
        HeldUpdate.of(Egress(run), airlock, update, {"head": np.ones(2)}, 1, ())
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_what_a_killed_process_had_not_held_in_whole_is_not_kept_for_good(tmp_path: Path) -> None:
    settings = WorkerSettings(
        url="http://127.0.0.1:1", token="t", name="w", state_dir=tmp_path, datasets={"digits": {"kind": "digits"}}
    )
    airlock = held_in(tmp_path)
    (half := tmp_path / "airlock" / "half-1.safetensors").write_bytes(BYTES)
    Agent(settings, Stop()).close()
    assert not half.exists()
    (held,) = airlock.held()
    assert airlock.path(held).read_bytes() == BYTES
