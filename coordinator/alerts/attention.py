"""The conditions that need a person."""

from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any

from rich.filesize import decimal
from sqlalchemy import ColumnElement, Row, exists, func, select
from sqlalchemy.orm import Session

from tessera.coordinator.alerts.audit_sink import backlog
from tessera.coordinator.alerts.certificate import outdated
from tessera.coordinator.db.coverage import behind
from tessera.coordinator.db.snapshots import candidates, has_quorum, live_workers, terms_of
from tessera.coordinator.db.studies import is_present, reads_all
from tessera.coordinator.db.tables import (
    IS_LEASED,
    EnrolmentRow,
    RunRow,
    SiteRow,
    TaskRow,
    VersionRow,
    WorkerRow,
    one_of,
)
from tessera.coordinator.domain.eligibility import listed, withheld_reason
from tessera.coordinator.domain.lifecycle import LIVE_RUN
from tessera.coordinator.domain.workers import LiveWorker, sites_of
from tessera.coordinator.limits.disk import DiskSpace
from tessera.coordinator.limits.memory import WATERMARK, Memory
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.runs import Coverage

MAX_RUNS = 20
"""Runs that are looked at in each state, and sites; the latest changed runs first."""

LATELY_SECONDS = 86_400.0

AWAY_SECONDS = 600.0
"""Silence after which a site that takes part in a run counts as away, and time that a run waits for workers before
people are notified: longer than a worker takes to start or restart."""

LAG_SECONDS = 300.0
"""Age of the oldest entry that the audit's sink lacks, from which people are notified."""

FAULTY = {
    "failed": ("tasks-failed", "task", "The workers could not do them.", "Each names its cause and remedy.", "warn"),
    "rejected": (
        "updates-rejected",
        "update",
        "They did not match the plan or could not be read.",
        "Each names the block and the fault.",
        "bad",
    ),
}
"""By a task's state: the code, noun, detail, remedy and weight of an alert."""


@dataclass(frozen=True)
class Alert:
    """A condition that needs a person. Notices contain the code, the title and the link, and so no text of a worker;
    the detail is for the dashboard alone."""

    code: str
    title: str
    detail: str
    remedy: str = ""
    link: str = ""
    """Relative to the dashboard."""
    weight: str = "warn"
    key: str = ""
    """Distinguishes conditions of one code; a condition that recurs at once has another."""
    lasting_seconds: float = 0.0
    """Time for which it must last before people are notified of it."""


def alerts(
    session: Session, now: float, settings: CoordinatorSettings, disk: DiskSpace, memory: Memory
) -> Iterator[Alert]:
    """Yield everything that needs a person now; for readers of all studies alone, also this process's disk and
    memory."""
    live = live_workers(session, now - settings.liveness_seconds)
    yield from _of_runs(session, now, live)
    yield from _of_sites(session, now)
    pending = (EnrolmentRow.state == "pending") & (EnrolmentRow.expires_at > now)
    waiting = session.scalars(select(EnrolmentRow.id).where(pending).order_by(EnrolmentRow.created_at)).all()
    if waiting:
        yield Alert(
            "enrolment-pending",
            f"{counted(len(waiting), 'worker')} {'waits' if len(waiting) == 1 else 'wait'} for enrolment",
            "Each shows a code on its machine.",
            "An administrator compares the code and admits or declines the worker.",
            "/approvals",
            # Strangers may ask: they cause one notice until the first of them is answered or has expired.
            key=waiting[0],
        )
    for run, workers in withheld_runs(session, live):
        yield Alert(
            "run-withheld",
            f"{run.name} waits for sites",
            f"{listed([name for name, _ in workers])} will not take part before their sites agree.",
            "A person at each site approves it there.",
            "/approvals",
            key=run.id,
        )
    for run, held in held_updates(session):
        waits = "An update waits" if len(held) == 1 else f"{len(held)} updates wait"
        yield Alert(
            "update-held",
            f"{waits} for a release in {run.name}",
            f"Held at {listed([name for name, _ in held])}.",
            "A person at each site releases its update there.",
            "/approvals",
            key=run.id,
            lasting_seconds=AWAY_SECONDS,
        )
    yield from _of_tasks(session, now)
    if not reads_all(session):
        return
    if shortage := disk.shortage():
        yield Alert(
            "disk-low",
            "The disk is nearly full",
            f"{decimal(disk.free_bytes())} are free, but {shortage}: uploads and merges are refused.",
            "Free disk space, or keep fewer versions (setting keep_versions).",
            "/storage",
            "bad",
        )
    if (share := memory.share()) > WATERMARK:
        detail = f"{share:.0%} are in use: no upload starts."
        yield Alert("memory-low", "Memory is low", detail, "Give the process more memory.", weight="bad")
    behind = backlog(session, settings.audit_sink) if settings.audit_sink else None
    if behind and now - behind.since > LAG_SECONDS:
        yield Alert(
            "audit-sink",
            "The audit's sink is behind",
            f"Entries from number {behind.first} on wait for {settings.audit_sink}. {behind.reason}",
            "Check the receiver: the entries are kept, and sent in order when it answers.",
            weight="bad",
        )
    # `doctor` and the log tell what is wrong with a file that cannot be read.
    with suppress(OSError, ValueError):
        for found in outdated(settings, datetime.fromtimestamp(now, UTC)):
            title = f"A certificate {'expires soon' if found.verdict == 'warn' else 'is not valid'}"
            weight = "warn" if found.verdict == "warn" else "bad"
            yield Alert("certificate", title, f"{found.detail}.", found.remedy, weight=weight, key=found.verdict)


def _of_runs(session: Session, now: float, live: Sequence[LiveWorker]) -> Iterator[Alert]:
    paused = select(RunRow).where(RunRow.state == "paused").order_by(RunRow.updated_at.desc()).limit(MAX_RUNS)
    for row in session.scalars(paused):
        why, remedy = row.reason or "A person paused it.", "Fix what the reason names, then resume the run."
        # Its revision may still change: a merge that has begun ends.
        key = f"{row.id}/{row.resumed_at}"
        yield Alert("run-paused", f"{row.name} is paused", why, remedy, f"/runs/{row.id}", key=key)
    latest = (
        select(RunRow.id, RunRow.name, RunRow.changes, VersionRow.number, VersionRow.scalars, VersionRow.warnings)
        .join(VersionRow, (VersionRow.run_id == RunRow.id) & (VersionRow.number == RunRow.version_number))
        .order_by(RunRow.updated_at.desc())
        .limit(MAX_RUNS)
    )
    for run in session.execute(latest.where(RunRow.state == "completed", RunRow.updated_at >= now - LATELY_SECONDS)):
        yield from _low_coverage(run)
    for run in session.execute(latest.where(RunRow.state == "running")):
        invited, link = terms_of(session, run.id, run.changes), f"/runs/{run.id}"
        if not has_quorum(session, invited, live):
            able = sites_of(candidates(session, invited, live))
            detail = f"{counted(len(able), 'live site')} could train on {invited.spec.dataset}; "
            detail += f"{invited.spec.cohort.lack(able)}."
            title, remedy = f"{run.name} waits for workers", "See which sites are silent."
            yield Alert("run-waiting", title, detail, remedy, link, key=run.id, lasting_seconds=AWAY_SECONDS)
        yield from _low_coverage(run)
        if invited.spec.cohort.buffers and (names := behind(session, session.get_one(RunRow, run.id))):
            title = f"{run.name} counts {counted(len(names), 'site')} too little"
            detail = (
                f"The share of {listed(names)} in its latest versions is below half of their share of the examples."
            )
            remedy = "Its page shows the part of each site; a larger target_updates waits for slower ones."
            yield Alert("run-behind", title, detail, remedy, link, key=run.id)
        for warning in run.warnings:
            yield Alert("run-warning", f"{run.name} warns", warning, link=link, key=run.id)


def _low_coverage(run: Row[Any]) -> Iterator[Alert]:
    covered = Coverage.of(run.scalars)
    if covered and covered.low:
        detail = f"Version {run.number} rests on {covered.words}."
        remedy = "Its page names the sites that were left out, and why; a longer deadline waits for slow ones."
        title, link = f"{run.name} rests on few of its sites", f"/runs/{run.id}"
        yield Alert("run-coverage", title, detail, remedy, link, key=run.id)


def _of_sites(session: Session, now: float) -> Iterator[Alert]:
    heard = select(WorkerRow.site_id).where(WorkerRow.last_seen_at >= now - AWAY_SECONDS)
    running = select(RunRow.id).where(RunRow.state == "running")
    takes_part = exists().where(TaskRow.worker_id == WorkerRow.id, TaskRow.run_id.in_(running))
    needed = select(WorkerRow.site_id).where(~WorkerRow.revoked, takes_part)
    away = select(SiteRow).where(
        is_present(session), SiteRow.suspended_at.is_(None), SiteRow.id.not_in(heard), SiteRow.id.in_(needed)
    )
    for site in session.scalars(away.order_by(SiteRow.name).limit(MAX_RUNS)):
        detail = "It took part in a run that is running, and none of its workers has called for ten minutes."
        remedy = "Ask the site whether its worker runs; suspend the site if it has left."
        yield Alert("site-away", f"{site.name} is away", detail, remedy, "/sites", key=site.id)


def _of_tasks(session: Session, now: float) -> Iterator[Alert]:
    # A task may fail long after it was offered; its lease ends with it.
    faulty = one_of(TaskRow.state, "failed", "rejected") & (TaskRow.lease_expires_at >= now - LATELY_SECONDS)
    counts = select(TaskRow.state, func.count()).where(faulty).group_by(TaskRow.state).order_by(TaskRow.state)
    for state, count in session.execute(counts).all():
        code, noun, detail, remedy, weight = FAULTY[state]
        yield Alert(code, f"{counted(count, noun)} {state} within a day", detail, remedy, "/failures", weight)


def counted(count: int, noun: str) -> str:
    return f"{count} {noun}" if count == 1 else f"{count} {noun}s"


def held_updates(session: Session, *which: ColumnElement[bool]) -> list[tuple[RunRow, list[tuple[str, datetime]]]]:
    """Return the runs with updates that wait for a release at their sites, each with the workers and since when; only
    updates under these conditions."""
    rows = (
        select(RunRow, TaskRow.progress, SiteRow.name, WorkerRow.name)
        .join_from(TaskRow, RunRow, RunRow.id == TaskRow.run_id)
        .join(WorkerRow, WorkerRow.id == TaskRow.worker_id)
        .join(SiteRow, SiteRow.id == WorkerRow.site_id)
        .where(IS_LEASED, TaskRow.kind == "train", *which)
        .order_by(RunRow.created_at, SiteRow.name, WorkerRow.name)
    )
    found: dict[str, tuple[RunRow, list[tuple[str, datetime]]]] = {}
    for run, progress, site, worker in session.execute(rows):
        if held := (progress or {}).get("held_since"):
            found.setdefault(run.id, (run, []))[1].append((f"{site}/{worker}", datetime.fromisoformat(held)))
    return list(found.values())


def withheld_runs(session: Session, live: Sequence[LiveWorker]) -> list[tuple[RunRow, Sequence[tuple[str, str]]]]:
    """Return the live runs that live workers do not join before a person at their site approves, each with these
    workers' names and their sites' reasons."""
    by_run: dict[str, list[tuple[LiveWorker, str]]] = {}
    for worker in live:
        for run_id, reason in worker.declared.get("withheld", {}).items():
            by_run.setdefault(run_id, []).append((worker, str(reason)))
    rows = select(RunRow).where(RunRow.id.in_(by_run), RunRow.state.in_(LIVE_RUN)).order_by(RunRow.created_at)
    found: list[tuple[RunRow, Sequence[tuple[str, str]]]] = []
    for row in session.scalars(rows).all():
        # Only of a changed run, whose settings can thus be read.
        terms = terms_of(session, row.id, row.changes) if row.changes else None
        still = [one for one in by_run[row.id] if terms is None or withheld_reason(terms, one[0].declared)]
        if still:
            found.append((row, [(worker.name, reason) for worker, reason in still]))
    return found
