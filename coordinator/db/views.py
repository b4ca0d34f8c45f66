"""The API's views of rows, and their pagination."""

import base64
import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing
from datetime import UTC, datetime
from typing import Any, TypeVar

from pydantic import BaseModel
from sqlalchemy import ColumnElement, Float, Row, Select, cast, func, select, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Load, Session, load_only, selectinload, undefer

from tessera.coordinator.db.tables import (
    WORKER_NAME,
    AuditRow,
    BlobRow,
    EnrolmentRow,
    RoundRow,
    RunRow,
    SiteRow,
    Table,
    TaskRow,
    TokenRow,
    VersionRow,
    WorkerRow,
    one_of,
    select_tasks,
)
from tessera.coordinator.domain.lifecycle import LIVE_ROUND
from tessera.shared.api.admin import AuditEntry, Enrolment, Token, WorkerView
from tessera.shared.api.class_counts import Counts, counts_of
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Coverage, Measurement, Round, Run, RunSpec, SiteReport
from tessera.shared.api.tasks import REPORTS, Receipt, TaskView
from tessera.shared.api.versions import VersionRef
from tessera.shared.json_limits import check_document
from tessera.shared.problems import BadRequest, NotFound
from tessera.shared.rounds.client_privacy import EPSILON
from tessera.shared.rounds.outliers import PREFIX
from tessera.shared.rounds.planning import dataset_of
from tessera.shared.schema import ACCEPTED, Page
from tessera.shared.schema import EPSILON as WORKER_EPSILON

V = TypeVar("V", bound=BaseModel)

PAGE_BYTES = 4 << 20
AT_A_TIME = 20
UNCOMMITTED = ("open", "merging", "abandoned")


def instant(seconds: float) -> datetime:
    return datetime.fromtimestamp(seconds, UTC)


def total(reported: ColumnElement[int] | InstrumentedAttribute[int]) -> ColumnElement[float]:
    """Return the sum of a number that sites report: a float, because SQLite cannot add up integers beyond 2^63."""
    return func.sum(cast(reported, Float))


def page(
    session: Session,
    query: Select[*tuple[Any, ...]],
    keys: Sequence[InstrumentedAttribute[Any]],
    view: Callable[[Any], V],
    limit: int,
    cursor: str | None,
) -> Page[V]:
    """Return one page of `query` in the order of `keys`, which must be unique together and selected first.

    The cursor holds the last keys of the page, so pages neither skip nor repeat rows while others are added. A page
    also ends at PAGE_BYTES: its reader holds it in memory.
    """
    ordered = query.order_by(*keys).limit(limit + 1)
    if cursor is not None:
        last_shown = _decode(cursor, [key.type.python_type for key in keys])
        ordered = ordered.where(tuple_(*keys) > tuple_(*last_shown))
    items: list[V] = []
    last: list[Any] = []
    size = 0
    # A few at a time: some rows are large, and those that no longer fit are not read.
    with closing(session.execute(ordered.execution_options(yield_per=AT_A_TIME))) as rows:
        for row in rows:
            if len(items) == limit or size >= PAGE_BYTES:
                cursor = base64.urlsafe_b64encode(json.dumps(last).encode()).decode()
                return Page(items=tuple(items), next_cursor=cursor)
            items.append(view(row))
            last = [getattr(row[0], key.key) for key in keys]
            size += len(items[-1].model_dump_json())
    return Page(items=tuple(items))


def _decode(cursor: str, kinds: Sequence[type]) -> list[Any]:
    """Return the keys of the last shown item. Raises BadRequest unless their types are those of the collection."""
    try:
        values = check_document(base64.urlsafe_b64decode(cursor))
    except ValueError:
        values = None
    if not isinstance(values, list) or len(values) != len(kinds) or not all(map(_fits, values, kinds)):
        raise BadRequest("the cursor is not one that this collection gave", remedy="Begin without a cursor.")
    return values


def _fits(value: object, kind: type) -> bool:
    # No database holds a wider integer.
    return type(value) is kind and not (isinstance(value, int) and value.bit_length() > 63)


# ---------------------------------------------------------------- views


def view_of(model: type[V], row: Table, **others: Any) -> V:
    """Return a view: the row's columns of the same names, with instants as datetimes, and other values."""
    columns = {name: getattr(row, name) for name in model.model_fields if hasattr(row, name)} | others
    instants = [name for name, at in columns.items() if at is not None and name.rpartition("_")[2] == "at"]
    return model.model_validate(columns | {name: instant(columns[name]) for name in instants})


def run_view(session: Session, row: RunRow) -> Run:
    version = session.get_one(VersionRow, (row.id, row.version_number))
    ref = VersionRef(number=version.number, digest=version.digest)
    scalars = version.scalars
    return view_of(Run, row, version=ref, client_epsilon=scalars.get(EPSILON), coverage=Coverage.of(scalars))


def for_site(run: Run, site: str) -> Run:
    """Return the view of a run for a site that takes part in it: without the names of other sites, the sizes of
    their data, or what people wrote about the run."""
    cohort = run.spec.cohort
    named = {"sites": None if cohort.sites is None else (site,), "require": (site,) if site in cohort.require else ()}
    spec = run.spec.model_copy(update={"cohort": cohort.model_copy(update=named)})
    hidden = {"reason": None, "bounds": None, "coverage": None, "tags": (), "note": ""}
    return run.model_copy(update={"spec": spec, **hidden})


def find_run(session: Session, run_id: str) -> RunRow:
    """Raise NotFound."""
    row = session.get(RunRow, run_id)
    if row is None:
        raise NotFound(f"there is no run {run_id}")
    return row


WITH_TASKS = Load(RoundRow).options(
    undefer(RoundRow.updates), selectinload(RoundRow.task_rows).options(undefer(TaskRow.worker_name))
)
"""The option of a query whose rounds are for `round_view`: it reads the tasks of all of them in one statement."""


def round_view(row: RoundRow) -> Round:
    """Return the view of a round that was read `WITH_TASKS`."""
    tasks = [task_view(task, task.worker_name, row.number) for task in row.task_rows]
    return view_of(
        Round,
        row,
        run=row.run_id,
        version=row.number if row.state == "committed" else None,
        tasks=sorted(tasks, key=lambda task: task.worker),
    )


GOES_ON = (TaskRow.kind == "train") & TaskRow.state.in_(("offered", "leased", "expired", "accepted"))
GOES_ON &= TaskRow.merged_in.is_(None)
"""Tasks whose update the next version of a run that buffers updates may take."""


def open_round_view(session: Session, row: RoundRow, cohort: Cohort) -> Round:
    """Return the view of a live round that was read `WITH_TASKS`; of a run that buffers updates, with the tasks of
    earlier rounds that go on."""
    view = round_view(row)
    if not cohort.buffers or row.state not in LIVE_ROUND:
        return view
    others = (TaskRow.run_id == row.run_id) & (TaskRow.round_id != row.id) & GOES_ON
    tasks = session.scalars(select(TaskRow).options(undefer(TaskRow.worker_name)).where(others))
    more = [task_view(task, task.worker_name, task.version_number + 1) for task in tasks]
    return view.model_copy(update={"tasks": tuple(sorted((*view.tasks, *more), key=lambda task: task.worker))})


def earlier_tasks(session: Session, row: RoundRow) -> list[TaskView]:
    """Return the tasks of earlier rounds whose updates were assigned to a round's version."""
    late = (
        (TaskRow.run_id == row.run_id) & (TaskRow.merged_in == row.number) & (TaskRow.version_number < row.number - 1)
    )
    tasks = session.scalars(select(TaskRow).options(undefer(TaskRow.worker_name)).where(late))
    return [task_view(task, task.worker_name, task.version_number + 1) for task in tasks]


def task_view(row: TaskRow, worker: str, round_number: int) -> TaskView:
    progress = row.progress or None
    named = {"run": row.run_id, "round": round_number, "worker": worker, "update": row.update_digest}
    return view_of(TaskView, row, progress=progress, **named)


def without_scores(metrics: Mapping[str, float]) -> dict[str, float]:
    """Return a worker's metrics without outlier scores, which only the coordinator writes."""
    return {name: value for name, value in metrics.items() if not name.startswith(PREFIX)}


def task_for_site(view: TaskView) -> TaskView:
    """Return a task as its site sees it, with the receipt of its update.

    Outlier scores are hidden, so that an attacker cannot tune an update against them. An accepted task stays
    `accepted`: a repeated report gets the first answer.
    """
    shown: dict[str, Any] = {"metrics": without_scores(view.metrics), "merged_in": None}
    if view.is_accepted:
        shown |= {"state": "accepted", "unmerged": ()}
    if view.is_accepted and view.kind == "train":
        about = {"task": view.id, "token": view.token, "state": view.state, "unmerged": view.unmerged}
        shown["receipt"] = Receipt.model_validate(about)
    return view.model_copy(update=shown)


EVALUATED = (TaskRow.kind == "evaluate", TaskRow.state == "accepted")
"""The conditions of an accepted evaluation."""


def _evaluations(*columns: Any) -> Select[Any]:
    return select_tasks(*columns).where(*EVALUATED)


_MEASURED = (
    TaskRow.version_number,
    TaskRow.held_out,
    TaskRow.examples,
    TaskRow.metrics,
    TaskRow.class_counts,
    TaskRow.download_bytes,
)
EVALUATIONS = _evaluations(TaskRow, WORKER_NAME).options(load_only(*_MEASURED))
"""Accepted evaluations, for `measurement_view`, without their plans, which are slow to decode."""
WITH_COUNTS = _evaluations(TaskRow, WORKER_NAME).options(load_only(*_MEASURED, TaskRow.subgroup_counts))
"""The same with counts by subgroup, which are long."""
_MEASUREMENTS = _evaluations(*_MEASURED, WORKER_NAME).order_by(TaskRow.version_number, TaskRow.id)


def measurement_view(row: Row[TaskRow, str], spec: RunSpec, *, counts: bool = False) -> Measurement:
    """Return an evaluation of a run with these settings, from a row of `WITH_COUNTS` also with `counts`."""
    task, worker = row
    dataset, examples = dataset_of(spec, "evaluate", held_out=task.held_out), task.examples or 0
    return Measurement(
        version=task.version_number,
        dataset=dataset,
        worker=worker,
        held_out=task.held_out,
        examples=examples,
        metrics=task.metrics,
        class_counts=stored_counts(task.class_counts),
        subgroup_counts=(task.subgroup_counts or {}) if counts else {},
        download_bytes=task.download_bytes,
    )


def stored_counts(stored: dict[str, Any] | None) -> Counts | None:
    """Return counts that were validated on arrival."""
    return None if stored is None else counts_of(stored)


def measurements(session: Session, run_id: str, spec: RunSpec, *which: ColumnElement[bool]) -> list[Measurement]:
    """Return a run's evaluations under these conditions, by version. There may be many, which are not validated."""
    names = {held_out: dataset_of(spec, "evaluate", held_out=held_out) for held_out in (True, False)}
    # Of thousands of rows, the session would look at each.
    found = session.connection().execute(_MEASUREMENTS.where(TaskRow.run_id == run_id, *which))
    return [
        Measurement.model_construct(
            version=version,
            dataset=names[held_out],
            worker=worker,
            held_out=held_out,
            examples=examples or 0,
            metrics=metrics,
            class_counts=stored_counts(counts),
            download_bytes=downloaded,
        )
        for version, held_out, examples, metrics, counts, downloaded, worker in found.all()
    ]


def counted_measurements(
    session: Session, run_id: str, spec: RunSpec, version: int | None = None
) -> list[Measurement]:
    """Return a run's evaluations, of one version or of all, with counts by subgroup."""
    which = [TaskRow.run_id == run_id, *([] if version is None else [TaskRow.version_number == version])]
    rows = session.execute(WITH_COUNTS.where(*which).order_by(TaskRow.version_number, TaskRow.id))
    return [measurement_view(row, spec, counts=True) for row in rows]


def latest_measurements(
    session: Session, run_id: str, spec: RunSpec, *which: ColumnElement[bool]
) -> list[Measurement]:
    """Return the evaluations of the latest version that has any under these conditions."""
    newest = select(func.max(TaskRow.version_number)).where(*EVALUATED, TaskRow.run_id == run_id, *which)
    return measurements(
        session, run_id, spec, *which, TaskRow.version_number == newest.correlate(None).scalar_subquery()
    )


def spent_epsilon(session: Session, run_id: str, *which: ColumnElement[bool]) -> list[tuple[str, str, float]]:
    """Return the epsilon that each worker has reported with its updates under these conditions: the names of the site
    and worker, and the value."""
    spent = func.max(TaskRow.metrics[WORKER_EPSILON].as_float())
    query = select_tasks(SiteRow.name, WorkerRow.name, spent).where(TaskRow.run_id == run_id, *which)
    reported = query.where(TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED)).group_by(
        SiteRow.name, WorkerRow.name
    )
    rows = session.execute(reported.order_by(SiteRow.name, WorkerRow.name))
    return [(site, worker, value) for site, worker, value in rows if value is not None]


def site_reports(session: Session, run_id: str) -> list[SiteReport]:
    """Return the latest task of each site in a run without rounds, or of each worker in a rehearsal, with reports."""
    of_worker, of_task = (SiteRow.name, WORKER_NAME, WorkerRow.declared), (TaskRow.state, TaskRow.problem)
    rows = session.execute(
        select_tasks(*of_worker, *of_task, TaskRow.kind, TaskRow.report)
        .where(TaskRow.run_id == run_id)
        .order_by(TaskRow.created_at, TaskRow.id)
    )
    latest: dict[str, SiteReport] = {}
    for site, worker, declared, state, problem, kind, report in rows:
        # An accepted task is the last one.
        place, name = worker if kind == "rehearse" else site, REPORTS.get(kind, "evaluation")
        about = {"site": site, "worker": worker, "device": declared.get("device", ""), "state": state}
        latest[place] = SiteReport.model_validate({**about, "problem": problem, name: report})
    return [latest[place] for place in sorted(latest)]


def worker_view(row: WorkerRow, site: SiteRow, live_since: float) -> WorkerView:
    suspended = site.suspended_at is not None
    live = row.last_seen_at >= live_since and not suspended and not row.revoked
    # The view ignores the other parts of the declaration.
    return view_of(WorkerView, row, **row.declared, site=site.name, live=live, suspended=suspended)


def token_view(row: TokenRow, site: str | None, used_at: float | None = None) -> Token:
    """Return a token; `used_at` is its last use if that is not stored yet."""
    return view_of(Token, row, site=site, last_used_at=used_at or row.last_used_at)


def enrolment_view(row: EnrolmentRow, now: float, decided_at: float | None = None) -> Enrolment:
    pending = row.state == "pending"
    state = "expired" if pending and row.expires_at <= now else row.state
    left = max(0.0, row.expires_at - now) if pending else 0.0
    return view_of(Enrolment, row, state=state, decided_at=decided_at, expires_in_seconds=left)


def audit_view(row: AuditRow) -> AuditEntry:
    return view_of(AuditEntry, row, run=row.run_id)


def runs_by_state(session: Session) -> dict[str, int]:
    """Return the number of runs in each state."""
    return dict(session.execute(select(RunRow.state, func.count()).group_by(RunRow.state)).all())


def rounds_by_state(session: Session) -> dict[str, int]:
    """Return the number of rounds in each state: of the committed ones, each run has as many as its version says."""
    others = select(RoundRow.state, func.count()).where(one_of(RoundRow.state, *UNCOMMITTED)).group_by(RoundRow.state)
    committed = session.scalar(select(func.sum(RunRow.version_number))) or 0
    return dict(session.execute(others).all()) | {"committed": int(committed)}


def overdue_seconds(session: Session, now: float) -> float:
    """Return the seconds since the earliest deadline of an open round; 0 if none has passed."""
    is_open = one_of(RoundRow.state, *LIVE_ROUND) & (RoundRow.state == "open")
    first = session.scalar(select(func.min(RoundRow.deadline_at)).where(is_open))
    return 0.0 if first is None else max(0.0, now - first)


def merging_seconds(session: Session, now: float) -> float:
    """Return the seconds of the longest merge in progress; 0 if there is none."""
    since: list[float] = []
    is_merging = one_of(RoundRow.state, *LIVE_ROUND) & (RoundRow.state == "merging")
    for round_id in session.scalars(select(RoundRow.id).where(is_merging)):
        closing = select(AuditRow.at).where(AuditRow.subject == round_id, AuditRow.action == "round.close")
        # From the end, where it is.
        since += session.scalars(closing.order_by(AuditRow.seq.desc()).limit(1))
    return max(0.0, now - min(since, default=now))


def blob_totals(session: Session) -> tuple[int, int]:
    """Return the number of blobs and their total bytes."""
    count, size = session.execute(select(func.count(), func.coalesce(func.sum(BlobRow.size), 0))).one()
    return count, size
