"""What a look of the conductor, a claim and a submission cost grows with the cohort's size at most, never with its
square. Statements, steps of SQLite and calls of functions are counted, and no time is measured."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import select
from sqlalchemy.orm import Session

from tessera.coordinator.db import tasks
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.snapshots import live_workers, run_snapshot
from tessera.coordinator.db.studies import join
from tessera.coordinator.db.tables import SiteRow, TaskRow, WorkerRow
from tessera.coordinator.domain.decide import decide
from tessera.coordinator.domain.snapshot import RunSnapshot, Timeouts
from tessera.coordinator.domain.workers import LiveWorker
from tessera.shared.api.runs import RunSpec
from tests.support.storage import NOW, add_round, add_run, add_task, migrated, statements

pytestmark = pytest.mark.sqlite

FEW, MANY = 60, 240
CAME = 6
SPEC: dict[str, Any] = {
    "name": "run",
    "method": {"name": "fedavg"},
    "model": f"sha256:{'0' * 64}",
    "version": f"sha256:{'0' * 64}",
    "dataset": "data",
    "rounds": 9,
}
DECLARED = {"kinds": ["train"], "datasets": {"data": 9}, "methods": ["fedavg"]}


class Name(str):
    """A name whose comparisons are calls of a function, so that they are counted."""

    __slots__ = ()
    __hash__ = str.__hash__

    def __eq__(self, other: object) -> bool:
        return str.__eq__(self, str(other))


@dataclass(frozen=True)
class Cost:
    statements: int
    steps: int
    calls: int


@contextmanager
def counted(database: Database, session: Session) -> Iterator[list[Cost]]:
    found: list[Cost] = []
    raw: Any = session.connection().connection.dbapi_connection
    steps = calls = 0

    def stepped() -> int:
        nonlocal steps
        steps += 1
        return 0

    def called(frame: object, event: str, argument: object) -> None:
        nonlocal calls
        calls += event == "call"

    with statements(database) as asked:
        raw.set_progress_handler(stepped, 1)
        sys.setprofile(called)
        yield found
        sys.setprofile(None)
        raw.set_progress_handler(None, 0)
    # Each step of SQLite was a call too.
    found.append(Cost(len(asked), steps, calls - steps))


def crowd(folder: Path, workers: int, *, busy: bool, cohort: dict[str, Any]) -> tuple[Database, RunSpec]:
    """A run that names its sites, of one worker each. If they are busy, each has a task, and six sent an update."""
    database = migrated(folder)
    spec = {**SPEC, "cohort": {"sites": [f"s{number}" for number in range(workers)], **cohort}}
    with database.transaction() as session:
        add_run(session).spec = spec
        if busy:
            add_round(session)
        for number in range(workers):
            site, worker = f"s{number}", f"w{number}"
            session.add(SiteRow(id=site, name=site, created_at=NOW))
            session.add(
                WorkerRow(
                    id=worker, site_id=site, name="w", declared=DECLARED, created_at=NOW, last_seen_at=NOW,
                )
            )  # fmt: skip
        session.flush()
        for number in range(workers):
            join(session, "site", f"s{number}", ["default"])
            if busy:
                state = "accepted" if number < CAME else "leased"
                add_task(session, f"t{number}", f"w{number}", state, instance="i", lease_expires_at=NOW + 60)
    return database, RunSpec.model_validate(spec)


def measured(database: Database, act: Callable[[Session], object]) -> Cost:
    """Return what an act costs that was done before: the first compiles its statements."""
    with database.snapshot() as session:
        act(session)
    with database.snapshot() as session, counted(database, session) as found:
        act(session)
    return found[0]


def look(session: Session) -> RunSnapshot:
    live = [
        LiveWorker(one.id, one.name, Name(one.site), one.declared, studies=one.studies)
        for one in live_workers(session, NOW - 60)
    ]
    run = run_snapshot(session, "run", live, absent_are_gone=True)
    decide(run, NOW, Timeouts(10, 600, 60))
    return run


@pytest.mark.parametrize("busy", [False, True])
@pytest.mark.parametrize("mode", ["barrier", "buffer"])
def test_a_look_costs_four_times_as_much_for_four_times_the_workers(tmp_path: Path, mode: str, *, busy: bool) -> None:
    found = []
    for workers in (FEW, MANY):
        database, _ = crowd(tmp_path / str(workers), workers, busy=busy, cohort={"mode": mode, "target_updates": 50})
        found.append(measured(database, look))
        database.close()
    few, many = found
    assert many.statements == few.statements
    assert many.steps <= 4 * few.steps
    assert many.calls <= 4 * few.calls


def test_a_look_judges_no_worker_whose_site_is_at_work(tmp_path: Path) -> None:
    """Each worker that is judged costs more calls than all else that a look does for it."""
    found = []
    for busy in (True, False):
        database, _ = crowd(tmp_path / str(busy), MANY, busy=busy, cohort={"mode": "buffer", "target_updates": 50})
        found.append(measured(database, look).calls)
        database.close()
    assert found[1] - found[0] > 10 * MANY


@pytest.mark.parametrize("mode", ["barrier", "buffer"])
def test_a_claim_and_a_submission_cost_the_same_in_any_cohort(tmp_path: Path, mode: str) -> None:
    found = []
    for workers in (FEW, MANY):
        cohort = {"mode": mode, "target_updates": 50}
        database, spec = crowd(tmp_path / str(workers), workers, busy=True, cohort=cohort)

        def claimed(session: Session) -> None:
            assert tasks.claimable(session, "w50", "i")

        def submitted(session: Session, spec: RunSpec = spec) -> None:
            (task,) = session.scalars(select(TaskRow).where(TaskRow.id == "t0"))
            assert tasks.is_waited_for(session, task, spec)

        found.append([measured(database, act) for act in (claimed, submitted)])
        database.close()
    assert found[0] == found[1]
