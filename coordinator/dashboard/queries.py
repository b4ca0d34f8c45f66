"""Aggregates that the dashboard shows beyond the API, computed in the database."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import chain, groupby
from operator import add, attrgetter

from sqlalchemy import ColumnElement, String, case, cast, func, or_, select, true, tuple_
from sqlalchemy.orm import InstrumentedAttribute, Session, aliased

from tessera.coordinator.db import views
from tessera.coordinator.db.tables import (
    WORKER_NAME,
    AuditRow,
    RoundRow,
    RunRow,
    SiteRow,
    TaskRow,
    VersionRow,
    WorkerRow,
    select_tasks,
)
from tessera.shared.api.runs import Coverage, Round, Run
from tessera.shared.metrics.comparison import MAIN_SCORES, main_names, main_score
from tessera.shared.metrics.convergence import RoundCost
from tessera.shared.metrics.eta import TaskPace, expected_end
from tessera.shared.metrics.evaluation_bytes import round_of
from tessera.shared.metrics.site_spread import PERSONAL, SiteScores, weighs_labels
from tessera.shared.metrics.svg_charts import Band
from tessera.shared.schema import ACCEPTED, SCORED_LABELS

MAX_POINTS = 60
"""About the most versions in a chart: of longer runs every n-th version is shown."""
MAX_BARS = 60
CURVE_POINTS = 8
MAX_DRAWN = 1e15
PAST_ROUNDS = 5


@dataclass(frozen=True)
class TrafficTotals:
    """Bytes of updates and downloads, and those of whole models instead: one up for each update, and one down for
    each task that fetched anything. A site that evaluates a version has it already when it trains from it."""

    updates: int = 0
    up: int = 0
    down: int = 0
    evaluated: int = 0
    """Of the downloads, those for evaluations."""
    full: int = 0

    def __add__(self, other: "TrafficTotals") -> "TrafficTotals":
        return TrafficTotals(*map(add, vars(self).values(), vars(other).values()))

    @property
    def total(self) -> int:
        return self.up + self.down

    @property
    def saved(self) -> float | None:
        """The share of a full exchange that was not sent; None before the first update."""
        return 1 - self.total / self.full if self.updates else None


def moved_by_run(session: Session, run_id: str | None = None) -> dict[str, TrafficTotals]:
    """Return the traffic of each run, or of one run."""
    full = RunRow.model_bytes * (RunRow.updates + RunRow.fetches)
    sums = (RunRow.updates, RunRow.upload_bytes, RunRow.download_bytes, RunRow.evaluation_bytes, full)
    rows = session.execute(select(RunRow.id, *sums).where(RunRow.id == run_id if run_id else true()))
    return {run: TrafficTotals(*map(int, totals)) for run, *totals in rows}


def moved_by_round(session: Session, run: Run, first: int, last: int) -> dict[int, TrafficTotals]:
    """Return the traffic of a run by round, over all attempts, from round `first` to `last`."""
    by_round: dict[int, TrafficTotals] = defaultdict(TrafficTotals)
    number, received = TaskRow.version_number, TaskRow.download_bytes
    rows = session.execute(
        select(
            number,
            func.sum(case((TaskRow.kind == "train", 1), else_=0)),
            func.sum(TaskRow.upload_bytes),
            views.total(received),
            views.total(case((TaskRow.kind == "evaluate", received), else_=0)),
            func.sum(case((received > 0, 1), else_=0)),
        )
        .where(TaskRow.run_id == run.id, TaskRow.kind.in_(("train", "evaluate")))
        .where(number.between(first - 1, last), TaskRow.state.in_(ACCEPTED))
        .group_by(number)
    )
    for version, *sums in rows:
        updates, up, down, evaluated, fetches = map(int, sums)
        moved = TrafficTotals(updates, up, down, evaluated, run.model_bytes * (updates + fetches))
        by_round[round_of(version, run.spec.rounds)] += moved
    return by_round


@dataclass(frozen=True)
class RoundSum:
    """One attempt at a round, with the totals of its tasks; the first one with the downloads for evaluations too."""

    round: RoundRow
    asked: int
    accepted: int
    """The updates of its version, whichever rounds asked for them."""
    up: int
    down: int
    moved: TrafficTotals
    """The traffic of all accepted tasks of all attempts at the round."""
    coverage: Coverage | None
    """Of the version that it made."""

    @property
    def seconds(self) -> float | None:
        return self.round.closed_at - self.round.opened_at if self.round.closed_at else None


def round_sums(session: Session, run: Run, most: int, before: tuple[int, int] | None = None) -> list[RoundSum]:
    """Return the latest attempts at rounds, newest first: those before a number and attempt if given."""
    latest = select(RoundRow).where(RoundRow.run_id == run.id)
    if before is not None:
        latest = latest.where(tuple_(RoundRow.number, RoundRow.attempt) < tuple_(*before))
    rounds = session.scalars(latest.order_by(RoundRow.number.desc(), RoundRow.attempt.desc()).limit(most)).all()
    sums = session.execute(
        select(
            TaskRow.round_id,
            func.count(),
            func.sum(TaskRow.upload_bytes),
            views.total(TaskRow.download_bytes),
        )
        .where(TaskRow.round_id.in_([row.id for row in rounds]))
        .group_by(TaskRow.round_id)
    )
    by_round = {round_id: map(int, counts) for round_id, *counts in sums}
    counted = select(RoundRow.id, RoundRow.updates).where(RoundRow.id.in_(list(by_round)))
    updates: dict[str, int] = dict(session.execute(counted).all())
    moved = moved_by_round(session, run, rounds[-1].number, rounds[0].number) if rounds else {}
    numbers = [row.number for row in rounds if row.state == "committed"]
    made = select(VersionRow.number, VersionRow.scalars).where(VersionRow.run_id == run.id)
    covered = {number: Coverage.of(of) for number, of in session.execute(made.where(VersionRow.number.in_(numbers)))}
    found = []
    for row in rounds:
        asked, up, down = by_round.get(row.id, (0, 0, 0))
        evaluated = moved[row.number].evaluated if row.attempt == 1 else 0
        coverage = covered.get(row.number) if row.state == "committed" else None
        found.append(RoundSum(row, asked, updates.get(row.id, 0), up, down + evaluated, moved[row.number], coverage))
    return found


def round_costs(session: Session, run: Run) -> list[RoundCost]:
    """Return the costs of each ended attempt at a round, in order. The first attempt has the bytes of all."""
    number, kind = TaskRow.version_number, TaskRow.kind
    # By version, an index has all of it: by attempt, the database reads each task.
    spent = session.execute(
        select(number, views.total(TaskRow.download_bytes), views.total(TaskRow.upload_bytes))
        .where(TaskRow.run_id == run.id, (kind == "train") | ((kind == "evaluate") & TaskRow.state.in_(ACCEPTED)))
        .group_by(number)
    )
    down, up = Counter[int](), Counter[int]()
    for version, fetched, sent in spent:
        down[round_of(version, run.spec.rounds)] += int(fetched)
        up[round_of(version, run.spec.rounds)] += int(sent)
    rows = session.execute(
        select(RoundRow.number, RoundRow.attempt, RoundRow.state, RoundRow.opened_at, RoundRow.closed_at)
        .where(RoundRow.run_id == run.id, RoundRow.closed_at.is_not(None))
        .order_by(RoundRow.number, RoundRow.attempt)
    )
    return [
        RoundCost(
            number if state == "committed" else None,
            down[number] if attempt == 1 else 0,
            up[number] if attempt == 1 else 0,
            (closed or opened) - opened,
            (closed or opened) - run.created_at.timestamp(),
        )
        for number, attempt, state, opened, closed in rows
    ]


def stage_bands(session: Session, run_id: str) -> list[Band]:
    """Return the consecutive committed rounds of each stage, in order."""
    rows = session.execute(
        select(RoundRow.number, RoundRow.stage)
        .where(RoundRow.run_id == run_id, RoundRow.state == "committed")
        .order_by(RoundRow.number)
    )
    stages = ((stage, [row.number for row in group]) for stage, group in groupby(rows, attrgetter("stage")))
    return [Band(stage, numbers[0], numbers[-1]) for stage, numbers in stages]


def version_times(session: Session, run: Run) -> dict[int, float]:
    """Return when versions were made, in seconds since the run was created."""
    made = select(VersionRow.number, VersionRow.created_at).where(VersionRow.run_id == run.id)
    rows = session.execute(made.where(_is_shown(VersionRow.number, run)).order_by(VersionRow.number))
    return {number: at - run.created_at.timestamp() for number, at in rows}


def thinned(run: Run) -> int:
    """Return the step between shown versions, of which there are at most about `MAX_POINTS`."""
    return max(1, math.ceil(run.version.number / MAX_POINTS))


def evaluations(
    session: Session, run: Run, metric: str | None = None, *which: ColumnElement[bool]
) -> list[SiteScores]:
    """Return a run's evaluations under these conditions, with its main scores (or `metric`) alone: there may be a
    hundred thousand."""
    return _evaluations(session, metric, TaskRow.run_id == run.id, *which)[run.id]


def _evaluations(
    session: Session, metric: str | None, *which: ColumnElement[bool]
) -> defaultdict[str, list[SiteScores]]:
    """Return the evaluations of each run under these conditions."""
    # A site may have invented another name, which could break the path to it in the JSON.
    known = (metric,) if metric and re.fullmatch(r"[\w.-]+", metric, re.ASCII) else MAIN_SCORES
    names = [*known, *(PERSONAL + name for name in MAIN_SCORES)]
    columns = [TaskRow.metrics[name].as_float() for name in (SCORED_LABELS, *names)]
    task = (TaskRow.worker_id, TaskRow.run_id, TaskRow.version_number, TaskRow.held_out, TaskRow.examples)
    # Of thousands of rows, the session would look at each.
    tasks = session.connection().execute(select(*task, *columns).where(*views.EVALUATED, *which)).all()
    workers = _workers(session, {task[0] for task in tasks})
    by_run: defaultdict[str, list[SiteScores]] = defaultdict(list)
    for worker_id, run_id, version, held_out, examples, scored, *values in tasks:
        metrics = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        labels = int(examples or 0 if scored is None else scored)
        by_run[run_id].append(SiteScores(version, *workers[worker_id], held_out, labels, examples or 0, metrics))
    return by_run


def _workers(session: Session, ids: Collection[str]) -> dict[str, tuple[str, str]]:
    """Return each worker's name and site. A join would read them again for each of a worker's thousands of tasks."""
    rows = session.execute(select(WorkerRow.id, WORKER_NAME, SiteRow.name).join(SiteRow).where(WorkerRow.id.in_(ids)))
    return {worker_id: (name, site) for worker_id, name, site in rows}


def measured(
    session: Session, run: Run, every: Sequence[SiteScores], most: int = MAX_POINTS, best: Iterable[int] = ()
) -> list[SiteScores]:
    """Return all metrics of the evaluations of every n-th version that was evaluated, of the last, and of the `best`.

    `every` are the run's `evaluations`. Versions are counted among the evaluated ones, because a run may evaluate
    every tenth version only.
    """
    numbers = sorted({one.version for one in every})
    step = math.ceil((len(numbers) - 1) / most)
    shown = TaskRow.version_number.in_({*numbers[::step], numbers[-1], *best}) if step > 1 else true()
    task = (TaskRow.worker_id, TaskRow.version_number, TaskRow.held_out, TaskRow.examples)
    every_metric = select(*task, TaskRow.metrics, TaskRow.class_counts).order_by(TaskRow.version_number, TaskRow.id)
    of_run = (*views.EVALUATED, TaskRow.run_id == run.id)
    tasks = session.connection().execute(every_metric.where(*of_run, shown)).all()
    workers = _workers(session, {task[0] for task in tasks})
    return [
        SiteScores(
            version,
            *workers[worker_id],
            held_out,
            int(metrics.get(SCORED_LABELS, examples or 0)),
            examples or 0,
            metrics,
            views.stored_counts(counts),
        )
        for worker_id, version, held_out, examples, metrics, counts in tasks
    ]


def _is_shown(number: ColumnElement[int] | InstrumentedAttribute[int], run: Run) -> ColumnElement[bool]:
    return (number % thinned(run) == 0) | (number >= run.version.number)


def latest_scores(session: Session, runs: Sequence[str]) -> dict[str, Mapping[str, float]]:
    """Return the main scores of each run's latest version that was measured: of the sites' own models, if it has
    these."""
    task = aliased(TaskRow)
    newest = select(func.max(task.version_number)).where(
        task.run_id == RunRow.id, task.kind == "evaluate", task.state == "accepted"
    )
    which = RunRow.id.in_(runs) & (TaskRow.run_id == RunRow.id) & (TaskRow.version_number == newest.scalar_subquery())
    latest = _evaluations(session, None, which)
    found = {run: [main_score(latest[run], name) for name in main_names(latest[run])] for run in runs}
    return {
        run: {s.title: value for s in of_run if s for value in s.values.values()} for run, of_run in found.items()
    }


def score_curves(session: Session, runs: Sequence[tuple[Run, str]]) -> dict[str, list[float]]:
    """Return the named score of some versions of each run, in order, by the run's id.

    Each label counts alike, as in `latest_scores`. The database sums over the workers, of a few versions of each run.
    """
    curves: dict[str, dict[bool, list[float]]] = defaultdict(lambda: defaultdict(list))
    for name in {name for _, name in runs if name}:
        value = TaskRow.metrics[name].as_float()
        scored = TaskRow.metrics[SCORED_LABELS].as_float()
        labels = func.coalesce(scored, TaskRow.examples) if weighs_labels(name) else TaskRow.examples
        of_runs = or_(*(_at_some_versions(run) for run, title in runs if title == name))
        rows = session.execute(
            select(TaskRow.run_id, TaskRow.held_out, func.sum(value * labels) / func.sum(labels))
            # A database's float overflows with an error, and a site may report any value.
            .where(*views.EVALUATED, of_runs, func.abs(value) < MAX_DRAWN, labels > 0, labels < MAX_DRAWN)
            .group_by(TaskRow.run_id, TaskRow.held_out, TaskRow.version_number)
            .order_by(TaskRow.version_number)
        )
        for run_id, held_out, score in rows:
            curves[run_id][held_out].append(float(score))
    # Figures of the central data set and of sites are not mixed.
    return {run_id: found.get(False) or found[True] for run_id, found in curves.items()}


def _at_some_versions(run: Run) -> ColumnElement[bool]:
    last, every = run.version.number, run.spec.evaluation.every if run.spec.evaluation else 1
    step = every * max(1, math.ceil(last / (CURVE_POINTS * every)))
    return (TaskRow.run_id == run.id) & TaskRow.version_number.in_([*range(0, last, step), last])


def version_numbers(session: Session, run: Run, prefixes: tuple[str, ...]) -> dict[str, dict[int, float]]:
    """Return the method's metrics of versions, by name and version, for names with these prefixes."""
    rows = session.execute(
        select(VersionRow.number, VersionRow.scalars)
        .where(VersionRow.run_id == run.id, _is_shown(VersionRow.number, run))
        .order_by(VersionRow.number)
    )
    by_name: dict[str, dict[int, float]] = defaultdict(dict)
    for number, metrics in rows:
        for name, value in metrics.items():
            if name.startswith(prefixes):
                by_name[name][number] = value
    return by_name


def by_worker(session: Session, run: Run, name: str) -> dict[str, dict[int, float]]:
    """Return a metric of each worker's update for each version, as the worker reports it."""
    # An update that is not merged yet is for the next version.
    version_number = func.coalesce(TaskRow.merged_in, TaskRow.version_number + 1)
    value = TaskRow.metrics[name].as_float()
    rows = session.execute(
        select_tasks(WORKER_NAME, version_number, value)
        .where(TaskRow.run_id == run.id, TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED))
        .where(_is_shown(version_number, run), value.is_not(None))
    )
    found: dict[str, dict[int, float]] = defaultdict(dict)
    for worker, version, measured_value in rows:
        found[worker][version] = measured_value
    return found


Shares = Mapping[str, Sequence[float]]


def layer_shares(session: Session, run: Run, most: int) -> tuple[list[str], Shares, Shares]:
    """Return the layers of a run's accepted updates, and the share of updates with blocks of each layer: by site, and
    by round or, of more than `most` rounds, by groups of rounds, named by the first."""
    step = math.ceil((run.version.number + 1) / most)
    first = TaskRow.version_number - TaskRow.version_number % step + 1
    trained = (TaskRow.run_id == run.id, TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED))
    tasks = session.connection().execute(
        select(TaskRow.worker_id, first, cast(TaskRow.layers, String)).where(*trained)
    )
    # Sites often choose the same layers: each choice is parsed once.
    read = cache(json.loads)
    by_worker: dict[str, list[list[str]]] = defaultdict(list)
    by_round: dict[int, list[list[str]]] = defaultdict(list)
    for worker_id, number, layers in tasks.all():
        by_worker[worker_id].append(read(layers))
        by_round[number].append(read(layers))
    by_site: dict[str, list[list[str]]] = defaultdict(list)
    for worker_id, (_, site) in _workers(session, by_worker.keys()).items():
        by_site[site] += by_worker[worker_id]
    names = sorted({layer for updates in by_site.values() for layer in chain(*updates)}, key=natural)
    sites = {site: _shares(updates, names) for site, updates in sorted(by_site.items())}
    return names, sites, {str(number): _shares(updates, names) for number, updates in sorted(by_round.items())}


def _shares(updates: Sequence[Sequence[str]], names: Sequence[str]) -> list[float]:
    """Return the share of updates with blocks of each layer."""
    held = Counter(chain(*updates))
    return [held[name] / len(updates) for name in names]


def natural(name: str) -> tuple[str, int]:
    """Return a sort key by the number at the end of a name."""
    stack, _, number = name.rpartition(".")
    return stack, int(number) if number.isdecimal() else 0


def short_layers(names: Sequence[str]) -> list[str]:
    """Return layers by number, with the index of their stack if there are several."""
    parts = [(stack, number) for stack, _, number in (name.rpartition(".") for name in names)]
    stacks = sorted({stack for stack, _ in parts})
    return [number if len(stacks) == 1 else f"{stacks.index(stack)}.{number}" for stack, number in parts]


# ---------------------------------------------------------------- forecasts


def past_seconds(session: Session, run_id: str, stage: str) -> list[float]:
    """Return the durations of the latest rounds of a stage, in seconds."""
    rows = session.execute(
        select(RoundRow.closed_at, RoundRow.opened_at)
        .where(RoundRow.run_id == run_id, RoundRow.state == "committed", RoundRow.stage == stage)
        .order_by(RoundRow.number.desc())
        .limit(PAST_ROUNDS)
    )
    return [closed - opened for closed, opened in rows if closed is not None]


def forecast(session: Session, now: float, round_: Round) -> datetime | None:
    """Return the expected end of an open round."""
    if round_.state not in ("open", "merging"):
        return None
    leased = (AuditRow.action == "task.lease") & AuditRow.subject.in_([task.id for task in round_.tasks])
    latest = select(AuditRow.subject, func.max(AuditRow.at)).where(leased).group_by(AuditRow.subject)
    begun = dict(session.execute(latest).all())
    end = expected_end(
        round_.opened_at.timestamp(),
        now,
        round_.deadline_at.timestamp(),
        past_seconds(session, round_.run, round_.stage),
        [TaskPace.of(task, begun.get(task.id)) for task in round_.tasks],
    )
    return None if end is None else views.instant(end)
