"""A site's own pages: its workers, what waits for its people, and its part in each of its runs.

They show to a site's token no more than the API does: nothing of other sites, and no outlier score.
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, replace

from fastapi import APIRouter, Request, Response
from sqlalchemy import Select, case, distinct, func, select, tuple_
from sqlalchemy.orm import Session, defer

from tessera.coordinator.alerts.attention import held_updates, withheld_runs
from tessera.coordinator.alerts.failures import FAULTS, failed_tasks
from tessera.coordinator.api.dependencies import Serving
from tessera.coordinator.dashboard.runs import Ordinal, facts_of
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, SignedSite, Visitor
from tessera.coordinator.dashboard.sorting import PageNumber
from tessera.coordinator.dashboard.templating import render
from tessera.coordinator.dashboard.workers import worker_lines
from tessera.coordinator.db import views
from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.tables import RUNS, WORKER_NAME, RunRow, SiteRow, TaskRow, WorkerRow, find, select_tasks
from tessera.shared.api.runs import Measurement, Run
from tessera.shared.api.tasks import TaskView
from tessera.shared.metrics.comparison import MAIN_SCORES
from tessera.shared.metrics.site_spread import PERSONAL

router = APIRouter(prefix=f"{PREFIX}/site", include_in_schema=False, route_class=PageRoute)

RUNS_AT_A_TIME = 25
ROUNDS_AT_A_TIME = 50
MAX_WORKERS = 100
MAX_MEASURED = 25
"""Evaluated versions whose scores a page shows: the latest."""

SCORES = ("macro_f1", *MAIN_SCORES)
FACTS = ("Method", "Data set", "Training", "Codec", "Differential privacy", "Privacy of a site", "Figures of sites")
"""The settings of a run that a site's page shows: of those, none names another site."""


@dataclass(frozen=True)
class Share:
    """A site's part in a run: the rounds that asked it to train, those whose versions have its updates, the last of
    these, and the bytes of all its tasks."""

    run: Run
    asked: int = 0
    counted: int = 0
    last: int = 0
    up: int = 0
    down: int = 0

    @property
    def missed(self) -> int:
        """The latest versions in a row that have no update of the site."""
        return self.run.version.number - self.last


def _workers(site: SiteRow) -> Select[str]:
    return select(WorkerRow.id).where(WorkerRow.site_id == site.id)


def _shares(session: Session, site: SiteRow, rows: Sequence[RunRow]) -> list[Share]:
    merged = (TaskRow.kind == "train") & (TaskRow.state == "merged")
    sums = session.execute(
        select(
            TaskRow.run_id,
            func.count(distinct(case((TaskRow.kind == "train", TaskRow.version_number)))),
            func.count(distinct(case((merged, TaskRow.version_number)))),
            func.max(case((merged, TaskRow.version_number + 1), else_=0)),
            func.sum(TaskRow.upload_bytes),
            views.total(TaskRow.download_bytes),
        )
        .where(TaskRow.worker_id.in_(_workers(site)), TaskRow.run_id.in_([row.id for row in rows]))
        .group_by(TaskRow.run_id)
    )
    found = {run_id: map(int, of_run) for run_id, *of_run in sums}
    return [Share(views.for_site(views.run_view(session, row), site.name), *found.get(row.id, ())) for row in rows]


@router.get("")
def show_site(request: Request, serving: Serving, who: SignedSite, page: PageNumber = 1) -> Response:
    """Show the site's workers, the runs and updates that wait for its people, and its runs, newest first."""
    since, begin = serving.database.now() - serving.settings.liveness_seconds, (page - 1) * RUNS_AT_A_TIME
    with serving.reading(who.principal) as session:
        site = _site(session, who)
        own = select(WorkerRow, SiteRow).join_from(WorkerRow, SiteRow).where(SiteRow.id == site.id)
        workers = session.execute(own.order_by(WorkerRow.last_seen_at.desc()).limit(MAX_WORKERS + 1)).all()
        # Its health by outlier scores is not for the site, whose updates could be tuned to them.
        lines = [replace(line, scores={}) for line in worker_lines(session, workers[:MAX_WORKERS], since)]
        runs = RUNS.order_by(RunRow.created_at.desc(), RunRow.id.desc())
        rows = [row for row, _ in session.execute(runs.offset(begin).limit(RUNS_AT_A_TIME + 1))]
        here = f"{PREFIX}/site?page="
        return render(
            request,
            "site.html",
            who,
            site=site.name,
            lines=sorted(lines, key=lambda line: line.urgency),
            more=len(workers) > MAX_WORKERS,
            heads={row.id: row.audit_head for row, _ in workers},
            errors=_last_errors(session, site),
            withheld=_withheld(session, site, since),
            held=held_updates(session, WorkerRow.site_id == site.id),
            shares=_shares(session, site, rows[:RUNS_AT_A_TIME]),
            newer=f"{here}1" if page > 1 else None,
            older=f"{here}{page + 1}" if len(rows) > RUNS_AT_A_TIME else None,
        )


def _site(session: Session, who: Visitor) -> SiteRow:
    return find(session, SiteRow, who.principal.site_id or "")


def _last_errors(session: Session, site: SiteRow) -> dict[str, tuple[TaskView, str]]:
    """Return the latest failure of each worker with the name of its run, by the worker's name."""
    faulty = TaskRow.worker_id.in_(_workers(site)) & TaskRow.state.in_(FAULTS)
    newest = select(TaskRow.worker_id, func.max(TaskRow.created_at)).where(faulty).group_by(TaskRow.worker_id)
    found, _ = failed_tasks(session, MAX_WORKERS, tuple_(TaskRow.worker_id, TaskRow.created_at).in_(newest))
    return {task.worker: (task, run) for task, run in found}


def _withheld(session: Session, site: SiteRow, since: float) -> list[tuple[RunRow, Sequence[tuple[str, str]]]]:
    """Return the runs that wait for an approval of the site, with its workers and their reasons."""
    found = withheld_runs(session, [worker for worker in live_workers(session, since) if worker.site == site.name])
    # A worker may name any run.
    own = set(session.scalars(select(RunRow.id).where(RunRow.id.in_([run.id for run, _ in found]))))
    return [(run, workers) for run, workers in found if run.id in own]


@router.get("/runs/{run_id}")
def show_run(run_id: str, request: Request, serving: Serving, who: SignedSite, before: Ordinal = None) -> Response:
    """Show the site's part in a run: its rounds, newest first, those before a number if given, and its scores."""
    with serving.reading(who.principal) as session:
        site = _site(session, who)
        (share,) = _shares(session, site, [views.find_run(session, run_id)])
        latest = share.run.version.number
        last = min(before - 1 if before else latest + 1, latest + 1)
        first = max(1, last - ROUNDS_AT_A_TIME + 1)
        tasks = _tasks_by_round(session, site, run_id, first, last)
        measurements = _measurements(session, site, share.run)
        here = f"{PREFIX}/site/runs/{run_id}"
        return render(
            request,
            "site_run.html",
            who,
            site=site.name,
            share=share,
            # The round after the latest version may not have begun, or not with this site.
            rounds=[(n, tasks[n]) for n in range(last, first - 1, -1) if n <= latest or tasks[n]],
            declared=_declared(session, site, share.run.spec.dataset),
            spent=views.spent_epsilon(session, run_id, TaskRow.worker_id.in_(_workers(site)))
            if share.run.spec.privacy
            else [],
            measurements=measurements,
            scores=[
                name
                for name in (*SCORES, *(PERSONAL + score for score in SCORES))
                if any(name in one.metrics for one in measurements)
            ],
            facts=[fact for fact in facts_of(share.run.spec, share.run) if fact[0] in FACTS],
            newer=here if before else None,
            older=f"{here}?before={first}" if first > 1 else None,
        )


def _tasks_by_round(
    session: Session, site: SiteRow, run_id: str, first: int, last: int
) -> defaultdict[int, list[TaskView]]:
    """Return the site's training tasks of some rounds as the API shows them, in order."""
    rows = session.execute(
        select_tasks(TaskRow, WORKER_NAME)
        # A task's plan is slow to decode.
        .options(defer(TaskRow.plan))
        .where(TaskRow.worker_id.in_(_workers(site)), TaskRow.run_id == run_id, TaskRow.kind == "train")
        .where(TaskRow.version_number.between(first - 1, last - 1))
        .order_by(TaskRow.created_at, WORKER_NAME)
    )
    found: defaultdict[int, list[TaskView]] = defaultdict(list)
    for task, worker in rows:
        number = task.version_number + 1
        found[number].append(views.task_for_site(views.task_view(task, worker, number)))
    return found


def _measurements(session: Session, site: SiteRow, run: Run) -> list[Measurement]:
    """Return the site's evaluations of the latest versions that it measured, newest first."""
    every = run.spec.evaluation.every if run.spec.evaluation else 1
    recent = TaskRow.version_number > run.version.number - MAX_MEASURED * every
    own = TaskRow.worker_id.in_(_workers(site))
    return views.measurements(session, run.id, run.spec, own, recent)[::-1]


def _declared(session: Session, site: SiteRow, dataset: str) -> dict[str, int]:
    """Return the number of examples of a data set that each worker declares now."""
    rows = session.execute(select(WorkerRow.name, WorkerRow.declared).where(WorkerRow.site_id == site.id))
    counts = {worker: declared.get("datasets", {}).get(dataset, 0) for worker, declared in rows}
    return {worker: count for worker, count in sorted(counts.items()) if count}
