"""Statistics of runs, rounds, tasks and sites for monitoring, read from the tables.

History is not read: commits of rounds come from the audit chain, from the start of the process on.
"""

import threading
from collections import Counter
from collections.abc import Callable
from typing import Literal, NamedTuple

from sqlalchemy import func, select
from sqlalchemy.orm import Session, aliased

from tessera.coordinator.db.studies import is_present
from tessera.coordinator.db.tables import AuditRow, RoundRow, RunRow, SiteRow, TaskRow, VersionRow, WorkerRow, one_of
from tessera.coordinator.db.views import GOES_ON, latest_measurements, total
from tessera.coordinator.domain.lifecycle import LIVE_ROUND, LIVE_RUN
from tessera.shared.api.runs import Coverage, RunSpec
from tessera.shared.metrics.site_spread import MEANS_OF_SITES, PERSONAL, spreads

MAX_RUNS = 100
"""Maximum number of live runs with series of their own, the latest first: a monitor stores each series."""

MAX_SITES = 1_000
"""The same of sites, those that were silent longest first."""

MEASURED = frozenset(("loss", "accuracy", "mae", "choice_accuracy", "exact_match", "rouge_l", *MEANS_OF_SITES))
"""Metrics that are exported. Workers may report others, but each name would be a series that a worker chose."""

AT_SITES = MEASURED | {PERSONAL + name for name in MEASURED}

Place = Literal["central", "sites"]


class RunFigures(NamedTuple):
    """A live run. Figures of its last committed round are 0 before there is one."""

    run: str
    name: str
    version: int
    rounds: int
    cohort: int
    """Sites that were asked."""
    updates: int
    """The sites with an accepted update: the updates of one site's workers count as one."""
    upload_bytes: int
    download_bytes: int
    coverage: float
    """The share of the sites' examples that its latest version rests on."""
    measured: dict[tuple[Place, str], float]
    """By place and name, of the latest version that was measured there; at sites, the mean over their examples."""


def tasks_in_hand(session: Session) -> list[tuple[str, str, int]]:
    """Return the kind, state and number of the tasks of live rounds, of earlier tasks whose updates the next version
    may take, and of live runs' evaluations that are not over."""
    pending = (TaskRow.kind == "evaluate") & TaskRow.state.in_(("offered", "leased", "expired"))
    pending &= TaskRow.run_id.in_(select(RunRow.id).where(RunRow.state.in_(LIVE_RUN)))
    of_rounds = TaskRow.round_id.in_(select(RoundRow.id).where(one_of(RoundRow.state, *LIVE_ROUND)))
    # Each is read by an index: one condition for all would read every task.
    goes_on = GOES_ON & TaskRow.run_id.in_(select(RunRow.id).where(RunRow.state.in_(LIVE_RUN))) & ~of_rounds
    found = Counter[tuple[str, str]]()
    for which in (of_rounds | pending, goes_on):
        counts = select(TaskRow.kind, TaskRow.state, func.count()).where(which).group_by(TaskRow.kind, TaskRow.state)
        for kind, state, count in session.execute(counts):
            found[kind, state] += count
    return [(*key, count) for key, count in found.items()]


def silences(session: Session, now: float) -> list[tuple[str, float]]:
    """Return each site that has workers, with the seconds since any of them was heard of."""
    seen = func.max(WorkerRow.last_seen_at)
    rows = session.execute(
        select(SiteRow.name, seen)
        .join(WorkerRow, WorkerRow.site_id == SiteRow.id)
        .where(is_present(session), SiteRow.withdrawn_at.is_(None))
        .group_by(SiteRow.name)
        .order_by(seen)
        .limit(MAX_SITES)
    )
    return [(name, max(0.0, now - last)) for name, last in rows]


def run_figures(session: Session) -> list[RunFigures]:
    """Return the live runs that were created last."""
    runs = session.scalars(
        select(RunRow).where(RunRow.state.in_(LIVE_RUN)).order_by(RunRow.created_at.desc()).limit(MAX_RUNS)
    )
    return [_figures(session, run) for run in runs]


def _figures(session: Session, run: RunRow) -> RunFigures:
    spec = RunSpec.model_validate(run.spec)
    last = (RoundRow.run_id == run.id) & (RoundRow.number == run.version_number) & (RoundRow.state == "committed")
    # A site's token admits as many workers as the site likes.
    sites = select(func.count(WorkerRow.site_id.distinct())).join(TaskRow, TaskRow.worker_id == WorkerRow.id)
    up, down = func.sum(TaskRow.upload_bytes), total(TaskRow.download_bytes)
    covered = Coverage.of(session.get_one(VersionRow, (run.id, run.version_number)).scalars)
    assigned = (TaskRow.run_id == run.id) & (TaskRow.merged_in == run.version_number)
    updates, upload_bytes, download_bytes = session.execute(sites.add_columns(up, down).where(assigned)).one()
    return RunFigures(
        run=run.id,
        name=spec.name,
        version=run.version_number,
        rounds=spec.rounds,
        cohort=session.scalar(sites.join(RoundRow, RoundRow.id == TaskRow.round_id).where(last)) or 0,
        updates=updates,
        upload_bytes=int(upload_bytes or 0),
        download_bytes=int(download_bytes or 0),
        coverage=covered.examples if covered else 0.0,
        measured=_measured(session, run.id, spec),
    )


def _measured(session: Session, run_id: str, spec: RunSpec) -> dict[tuple[Place, str], float]:
    central = latest_measurements(session, run_id, spec, ~TaskRow.held_out)
    at_sites = spreads(latest_measurements(session, run_id, spec, TaskRow.held_out.is_(True)), AT_SITES)
    figures: dict[tuple[Place, str], float] = {
        ("sites", name): spread.mean if name.removeprefix(PERSONAL) in MEANS_OF_SITES else spread.weighted_mean
        for by_name in at_sites.values()
        for name, spread in by_name.items()
    }
    return figures | {
        ("central", name): value for one in central for name, value in one.metrics.items() if name in MEASURED
    }


class RoundDurations(NamedTuple):
    """Durations of one round."""

    round_seconds: float
    """From its opening."""
    merge_seconds: float
    """From the closing of the round, including the time that the merge waited."""


class Commits:
    """Every round's commit since an instant, each once: a counter that begins at 0 with its process, as others do."""

    def __init__(self, since: float, tell: Callable[[RoundDurations], None]) -> None:
        self._since = since
        self._tell = tell
        self._lock = threading.Lock()
        self._seq: int | None = None

    def follow(self, session: Session) -> None:
        """Report the commits since the last call."""
        with self._lock:
            if self._seq is None:
                # From the end, where it is.
                before = select(AuditRow.seq).where(AuditRow.at < self._since)
                self._seq = session.scalar(before.order_by(AuditRow.seq.desc()).limit(1)) or 0
            last = session.scalar(select(func.max(AuditRow.seq))) or 0
            closed, new = aliased(AuditRow), AuditRow.seq.between(self._seq + 1, last)
            closed_at = select(func.max(closed.at)).where(
                closed.subject == AuditRow.subject, closed.action == "round.close"
            )
            rows = session.execute(
                select(AuditRow.at, RoundRow.opened_at, closed_at.scalar_subquery())
                .join(RoundRow, RoundRow.id == AuditRow.subject)
                .where(new, AuditRow.action == "round.commit")
            )
            for at, opened, closed_at_ in rows:
                self._tell(RoundDurations(max(0.0, at - opened), max(0.0, at - (closed_at_ or at))))
            self._seq = last
