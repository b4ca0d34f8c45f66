"""Failures, the audit chain, storage."""

import csv
import io
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Annotated, Any
from urllib.parse import urlencode

from fastapi import APIRouter, Depends, Query, Request, Response
from sqlalchemy import ColumnElement, func, select, true
from sqlalchemy.orm import InstrumentedAttribute, Session

from tessera.coordinator.alerts.failures import alike, failed_tasks
from tessera.coordinator.api.dependencies import Serving, require_role
from tessera.coordinator.dashboard.charts.run_charts import download
from tessera.coordinator.dashboard.security_headers import PREFIX
from tessera.coordinator.dashboard.session import PageRoute, Signed
from tessera.coordinator.dashboard.sorting import Sorted
from tessera.coordinator.dashboard.templating import render, span
from tessera.coordinator.dashboard.workers import containing
from tessera.coordinator.db import audit, views
from tessera.coordinator.db.studies import reads_all
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    AuditRow,
    BlobRow,
    RoundRow,
    RunBlobRow,
    RunRow,
    SiteRow,
    TaskRow,
    TokenRow,
    UploadRow,
    VersionRow,
    WorkerRow,
    one_of,
    select_tasks,
)
from tessera.coordinator.limits.memory import WATERMARK
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.admin import AuditEntry
from tessera.shared.api.audit_chain import named
from tessera.shared.api.secure_sums import HELPER_KINDS
from tessera.shared.api.tasks import TaskView
from tessera.shared.problems import Fault, Invalid
from tessera.shared.sanitize import fit_for_table

router = APIRouter(prefix=PREFIX, include_in_schema=False, route_class=PageRoute)

ENTRIES = 100
SEARCHED = 50_000
"""Entries of the audit chain that one page looks through: a chain has millions, and few of them may match."""
CLOCK_SECONDS = 3600.0
"""Step of a clock by which entries may be out of their order in time and are found all the same."""
FAILURES = 200
ABANDONED = 10
RUNS = 100
CHOICES = 200
MAX_CSV_ROWS = 10_000

Word = Annotated[str, Query(max_length=128)]
Place = Annotated[int | None, Query(ge=1, lt=1 << 53)]


@dataclass(frozen=True)
class Filters:
    """The filters of a list of records, as a form sends them: an empty one does not filter. Instants are in UTC."""

    who: Word = ""
    what: Word = ""
    since: Word = ""
    until: Word = ""
    run: Word = ""

    @property
    def query(self) -> str:
        """The filters as a query, to which others can be added."""
        given = {name: value for name, value in asdict(self).items() if value}
        return urlencode(given) + "&" if given else ""

    @property
    def period(self) -> tuple[float | None, float | None]:
        """The first instant, and that before which the period ends. Raise Invalid for one that cannot be read."""
        return _instant("since", self.since), _instant("until", self.until)

    def within(self, column: ColumnElement[float] | InstrumentedAttribute[float]) -> list[ColumnElement[bool]]:
        """Return the conditions of the period. Raise Invalid for an instant that cannot be read."""
        since, until = self.period
        after = [] if since is None else [column >= since]
        return after if until is None else [*after, column < until]


Filtered = Annotated[Filters, Depends()]


def _instant(name: str, text: str) -> float | None:
    if not text:
        return None
    try:
        at = datetime.fromisoformat(text)
    except ValueError:
        fault = Fault(pointer=f"/{name}", detail=f"{text!r} is no date and time, such as 2026-07-01T12:00")
        raise Invalid("the filter is invalid; see the errors", errors=[fault]) from None
    return (at if at.tzinfo else at.replace(tzinfo=UTC)).timestamp()


def as_csv(name: str, columns: Sequence[str], rows: Iterable[Sequence[object]]) -> Response:
    """Return rows as a file to download. No cell is a formula to a spreadsheet: workers choose some of the texts."""
    file = io.StringIO()
    writer = csv.writer(file)
    writer.writerow(columns)
    writer.writerows(map(fit_for_table, row) for row in rows)
    return download(file.getvalue(), f"{name}.csv", "text/csv")


# ---------------------------------------------------------------- failures


@router.get("/failures")
def list_failures(request: Request, serving: Serving, who: Signed, filters: Filtered, after: Word = "") -> Response:
    """Show failed tasks and rejected updates, newest first."""
    with serving.reading(who.principal) as session:
        of_run = views.run_view(session, views.find_run(session, filters.run)) if filters.run else None
        failures, older = _failures(session, filters, FAILURES, after)
        paused = select(RunRow).where(RunRow.state == "paused", RunRow.reason.is_not(None)).limit(FAILURES)
        rounds = (
            select(RoundRow, RunRow.name)
            .options(views.WITH_TASKS)
            .join_from(RoundRow, RunRow)
            .where(one_of(RoundRow.state, *views.UNCOMMITTED), RoundRow.state == "abandoned")
            .where(RoundRow.run_id == filters.run if filters.run else true())
            .order_by(RoundRow.opened_at.desc())
            .limit(ABANDONED)
        )
        # They are no tasks, which the other filters are about.
        besides = not after and filters == Filters(run=filters.run)
        return render(
            request,
            "failures.html",
            who,
            run=of_run,
            filters=filters,
            failures=alike(failures),
            abandoned=[(views.round_view(row), name) for row, name in session.execute(rounds)] if besides else [],
            paused=[views.run_view(session, row) for row in session.scalars(paused)]
            if besides and not filters.run
            else [],
            newer=f"{PREFIX}/failures?{filters.query}" if after else None,
            older=f"{PREFIX}/failures?{filters.query}after={older}" if older else None,
        )


@router.get("/failures.csv")
def download_failures(serving: Serving, who: Signed, filters: Filtered) -> Response:
    with serving.reading(who.principal) as session:
        failures, _ = _failures(session, filters, MAX_CSV_ROWS)
    columns = ("created_at", "state", "worker", "run", "kind", "round", "code", "detail")
    rows = [
        (task.created_at and task.created_at.isoformat(), task.state, task.worker, run, task.kind, task.round,
         task.problem and task.problem.code, task.problem and task.problem.detail)
        for task, run in failures
    ]  # fmt: skip
    return as_csv("failures", columns, rows)


def _failures(
    session: Session, filters: Filters, most: int, after: str = ""
) -> tuple[list[tuple[TaskView, str]], str | None]:
    which = [TaskRow.state == filters.what] if filters.what else []
    which += filters.within(TaskRow.created_at)
    if filters.who:
        which.append(containing(WORKER_NAME, filters.who))
    if filters.run:
        which.append(TaskRow.run_id == filters.run)
    return failed_tasks(session, most, *which, after=after)


# ---------------------------------------------------------------- audit


@router.get("/audit")
def list_audit(request: Request, serving: Serving, who: Signed, filters: Filtered, before: Place = None) -> Response:
    """Show every change of state, newest first; for administrators, as in the API."""
    require_role(who.principal, "admin")
    with serving.reading(who.principal) as session:
        first, last, over = _searched(session, filters, before)
        entries = _entries(session, filters, ENTRIES + 1, AuditRow.seq.between(first, last))
        following = entries[ENTRIES - 1].seq if len(entries) > ENTRIES else None if over else first
        newest = select(RunRow.id, RunRow.name).order_by(RunRow.created_at.desc()).limit(CHOICES)
        here = f"{PREFIX}/audit?{filters.query}"
        return render(
            request,
            "audit.html",
            who,
            entries=entries[:ENTRIES],
            subjects=_subjects(session, entries[:ENTRIES]),
            words=ACTIONS,
            unsaid=UNSAID,
            runs=session.execute(newest).all(),
            filters=filters,
            searched_to=following,
            newer=here if before else None,
            older=f"{here}before={following}" if following else None,
        )


def _searched(session: Session, filters: Filters, before: int | None) -> tuple[int, int, bool]:
    """Return the first and the last entry that a page looks through, and whether none before them can match."""
    since, until = filters.period
    last = before - 1 if before else session.scalar(select(func.max(AuditRow.seq))) or 0
    if until is not None:
        last = _last_before(session, last, until + CLOCK_SECONDS)
    first = max(1, last - SEARCHED + 1)
    if filters.run:
        # Its own entries count, which an index has.
        of_run = select(AuditRow.seq).where(AuditRow.run_id == filters.run, AuditRow.seq <= last)
        first = session.scalar(of_run.order_by(AuditRow.seq.desc()).offset(SEARCHED - 1).limit(1)) or 1
    begun = since is not None and _last_before(session, first, since - CLOCK_SECONDS) == first
    return first, last, first == 1 or begun


def _last_before(session: Session, last: int, instant: float) -> int:
    """Return the number of the last entry, of those up to `last`, before an instant; 0 if there is none."""
    first = 0
    while first < last:
        middle = (first + last + 1) // 2
        at = session.scalar(select(AuditRow.at).where(AuditRow.seq == middle))
        first, last = (middle, last) if at is not None and at < instant else (first, middle - 1)
    return first


@router.get("/audit.csv")
def download_audit(serving: Serving, who: Signed, filters: Filtered) -> Response:
    require_role(who.principal, "admin")
    with serving.reading(who.principal) as session:
        entries = _entries(session, filters, MAX_CSV_ROWS)
    columns = ("number", "at", "actor", "action", "subject", "run", "detail", "digest")
    rows = [
        (one.seq, one.at.isoformat(), one.actor, one.action, one.subject, one.run, json.dumps(one.detail), one.digest)
        for one in entries
    ]
    return as_csv("audit", columns, rows)


def _entries(session: Session, filters: Filters, most: int, *which: ColumnElement[bool]) -> list[AuditEntry]:
    """Return entries under these conditions, newest first, with the names of sites in place of their pseudonyms."""
    names = audit.names_of(session)
    sites = {f"{role}:{alias}": f"{role}:{name}" for alias, name in names.items() for role in ("site", "enrolment")}
    query = select(AuditRow).where(*which, *filters.within(AuditRow.at)).order_by(AuditRow.seq.desc()).limit(most)
    if filters.who:
        theirs = [actor for actor, name in sites.items() if filters.who.lower() in name.lower()]
        # The pseudonym of a site is not its name.
        other = containing(AuditRow.actor, filters.who) & AuditRow.actor.not_in(sites)
        query = query.where(AuditRow.actor.in_(theirs) | other)
    if filters.what:
        query = query.where(containing(AuditRow.action, filters.what))
    if filters.run:
        query = query.where(AuditRow.run_id == filters.run)
    entries = map(views.audit_view, session.scalars(query))
    return [named(names, one) for one in entries]


ACTIONS = {
    "run.create": "created the run", "run.annotate": "changed the run's tags or note", "run.pause": "paused the run",
    "run.change": "changed the run's settings", "run.remerge": "merged the run again",
    "run.resume": "resumed the run", "run.cancel": "cancelled the run", "run.complete": "completed the run",
    "round.open": "opened the round", "round.close": "closed the round", "round.commit": "committed the round",
    "round.ask": "asked more sites in the round",
    "round.abandon": "abandoned the round", "task.evaluate": "asked for an evaluation",
    "task.agree": "asked a helper to sign who sent", "task.open": "asked a helper to open the sum",
    "task.abandon": "asked a helper to give up the sum", "task.lease": "began the task",
    "task.release": "gave the task back", "task.expire": "ran out of time", "task.offer": "offered the task again",
    "task.accept": "sent a result: accepted", "task.merge": "merged the update",
    "task.leave_out": "left the update out", "task.reject": "sent a result: refused",
    "task.fail": "could not do the task", "task.withhold": "withheld the task", "task.cancel": "cancelled the task",
    "token.issue": "issued the token", "token.revoke": "revoked the token", "token.rotate": "rotated the token",
    "site.create": "created the site", "site.suspend": "suspended the site", "site.resume": "resumed the site",
    "site.withdraw": "withdrew the site",
    "worker.enrol": "declared its offer", "session.begin": "signed in", "session.end": "signed out",
    "enrolment.approve": "admitted the worker", "enrolment.decline": "declined the worker",
    "study.create": "created the study", "study.add": "added a member to the study",
    "study.remove": "removed a member from the study", "enrolment.redeem": "joined with a code",
    "version": "made the version",
    "run.base": "set the parent's version of the run",
    "version.adopt": "took the version from the parent's run",
    "version.retire": "removed old versions", "version.warning": "warned about the version",
}  # fmt: skip
"""The actions of the audit chain in words."""

UNSAID = ("worker", "token", "update", "audit_head", "declared")
"""Ids, fences and digests of an entry's detail, which its CSV has."""


def _subjects(session: Session, entries: Sequence[AuditEntry]) -> dict[str, str]:
    """Return the names of the subjects of entries, by id; a run's name also by the id of its entries' run."""
    ids = {one.subject for one in entries}
    work = {"train": "training from version", "evaluate": "evaluation of version"}
    work |= dict.fromkeys(HELPER_KINDS, "secure sum after version")
    names = {
        id_: f"{worker}, {work[kind]} {version} of {run}"
        for id_, worker, kind, version, run in session.execute(
            select_tasks(TaskRow.id, WORKER_NAME, TaskRow.kind, TaskRow.version_number, RunRow.name)
            .join(RunRow, RunRow.id == TaskRow.run_id)
            .where(TaskRow.id.in_(ids))
        )
    }
    rounds = select(RoundRow.id, RoundRow.number, RunRow.name).join_from(RoundRow, RunRow).where(RoundRow.id.in_(ids))
    names |= {id_: f"round {number} of {run}" for id_, number, run in session.execute(rounds)}
    workers = select(WorkerRow.id, WORKER_NAME).join_from(WorkerRow, SiteRow).where(WorkerRow.id.in_(ids))
    names |= dict(session.execute(workers).all())
    asked = (one for one in entries if one.action.startswith("enrolment."))
    names |= {one.subject: str(one.detail["worker"]) for one in asked}
    of_runs = ids | {one.run for one in entries if one.run}
    for table, wanted in ((RunRow, of_runs), (SiteRow, ids), (TokenRow, ids)):
        names |= dict(session.execute(select(table.id, table.name).where(table.id.in_(wanted))).all())
    return names


# ---------------------------------------------------------------- storage


@router.get("/storage")
def show_storage(request: Request, serving: Serving, who: Signed, sorting: Sorted) -> Response:
    with serving.reading(who.principal) as session:
        blobs, blob_bytes = views.blob_totals(session) if (whole := reads_all(session)) else (0, 0)
        unfinished = session.execute(
            select(func.count(), func.coalesce(func.sum(UploadRow.length), 0)).where(~UploadRow.complete)
        ).one()
        return render(
            request,
            "storage.html",
            who,
            whole=whole,
            blobs=blobs,
            blob_bytes=blob_bytes,
            free_bytes=serving.disk.free_bytes(),
            reserve=serving.settings.disk_reserve_bytes,
            has_room=serving.disk.has(),
            memory=serving.memory.share(),
            watermark=WATERMARK,
            uploads=unfinished[0],
            upload_bytes=unfinished[1],
            rows=sorting.sorted(_stores(session), OF_STORES),
            sorting=sorting,
            keeping=_keeping(serving.settings),
        )


OF_STORES: Mapping[str, Callable[[tuple[RunRow, int, int, int]], Any]] = {
    "name": lambda row: row[0].name.lower(),
    "state": lambda row: row[0].state,
    "versions": lambda row: row[0].version_number,
    "kept": lambda row: row[1],
    "blobs": lambda row: row[2],
    "bytes": lambda row: row[3],
    "whole": lambda row: row[1] * row[0].model_bytes,
}
"""The columns by which the runs of the storage page are sorted."""


def _stores(session: Session) -> list[tuple[RunRow, int, int, int]]:
    """Return the latest runs, each with the numbers of its stored versions and blobs, and the blobs' bytes."""
    runs = session.scalars(select(RunRow).order_by(RunRow.created_at.desc()).limit(RUNS)).all()
    ids = [run.id for run in runs]
    sizes = session.execute(
        select(RunBlobRow.run_id, func.count(), func.sum(BlobRow.size))
        .join_from(RunBlobRow, BlobRow)
        .where(RunBlobRow.run_id.in_(ids))
        .group_by(RunBlobRow.run_id)
    )
    by_run = {run_id: (count, int(size)) for run_id, count, size in sizes}
    kept = VersionRow.run_id.in_(ids) & VersionRow.retired_at.is_(None)
    counts = select(VersionRow.run_id, func.count()).where(kept).group_by(VersionRow.run_id)
    versions = dict(session.execute(counts).all())
    return [(run, versions.get(run.id, 0), *by_run.get(run.id, (0, 0))) for run in runs]


def _keeping(settings: CoordinatorSettings) -> list[tuple[str, str]]:
    versions = settings.keep_versions
    return [
        ("Versions of a run", "all" if versions is None else f"the first and the latest {versions}"),
        ("Updates", f"{span(settings.keep_updates_seconds)} after the end of their round"),
        ("Unreferenced blobs", span(settings.keep_unused_seconds)),
        ("Garbage collection", f"every {span(settings.gc_interval_seconds)}"),
    ]
