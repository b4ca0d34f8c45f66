"""Aggregates that the dashboard shows beyond the API, computed in the database."""

import json
import math
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from functools import cache
from itertools import groupby
from operator import add, attrgetter
from typing import Any

from sqlalchemy import ColumnElement, Row, String, case, cast, func, or_, select, true, tuple_
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
)
from tessera.shared.api.runs import Measurement, Round, Run
from tessera.shared.metrics.comparison import MAIN_SCORES, main_names, main_score
from tessera.shared.metrics.convergence import RoundCost
from tessera.shared.metrics.evaluation_bytes import round_of
from tessera.shared.metrics.site_spread import PERSONAL, Evaluated
from tessera.shared.metrics.svg_charts import Band
from tessera.shared.rounds.eta import Pace, expected_end
from tessera.shared.schema import ACCEPTED, SCORED_LABELS

MAX_POINTS = 60
"""About the most versions in a chart: of longer runs every n-th version is shown."""
MAX_BARS = 60
CURVE_POINTS = 8
MAX_DRAWN = 1e15
PAST_ROUNDS = 5
ALL = ""
"""In place of a layer's name: all updates."""


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


def moved_by_round(
    session: Session, run: Run, first: int, last: int, kinds: Sequence[str] = ("train", "evaluate")
) -> dict[int, TrafficTotals]:
    """Return the traffic of a run by round, over all attempts, from round `first` to `last`."""
    by_round: dict[int, TrafficTotals] = defaultdict(TrafficTotals)
    versions = TaskRow.version_number.between(first - 1, last)
    up, down, number = TaskRow.upload_bytes, TaskRow.download_bytes, TaskRow.version_number
    fetches = func.sum(case((down > 0, 1), else_=0)).label("fetches")
    sums = (func.count().label("tasks"), func.sum(up).label("up"), views.total(down).label("down"), fetches)
    accepted = TaskRow.state.in_(ACCEPTED) & TaskRow.kind.in_(kinds)
    which = select(number, TaskRow.kind, *sums).where(TaskRow.run_id == run.id, versions, accepted)
    for row in session.execute(which.group_by(number, TaskRow.kind)):
        by_round[round_of(row.version_number, run.spec.rounds)] += _totals(run.model_bytes, row)
    return by_round


def _totals(model_bytes: int, row: Row[Any]) -> TrafficTotals:
    down = int(row.down)
    updates, evaluated = (row.tasks, 0) if row.kind == "train" else (0, down)
    return TrafficTotals(updates, int(row.up), down, evaluated, model_bytes * (updates + int(row.fetches)))


@dataclass(frozen=True)
class RoundSum:
    """One attempt at a round, with the totals of its tasks; the first one with the downloads for evaluations too."""

    round: RoundRow
    asked: int
    accepted: int
    up: int
    down: int
    moved: TrafficTotals
    """The traffic of all accepted tasks of all attempts at the round."""

    @property
    def seconds(self) -> float | None:
        return self.round.closed_at - self.round.opened_at if self.round.closed_at else None


def round_sums(session: Session, run: Run, most: int, before: tuple[int, int] | None = None) -> list[RoundSum]:
    """Return the latest attempts at rounds, newest first: those before a number and attempt if given."""
    latest = select(RoundRow).where(RoundRow.run_id == run.id)
    if before is not None:
        latest = latest.where(tuple_(RoundRow.number, RoundRow.attempt) < tuple_(*before))
    rounds = session.scalars(latest.order_by(RoundRow.number.desc(), RoundRow.attempt.desc()).limit(most)).all()
    accepted = TaskRow.state.in_(ACCEPTED)
    sums = session.execute(
        select(
            TaskRow.round_id,
            func.count(),
            func.sum(case((accepted, 1), else_=0)),
            func.sum(TaskRow.upload_bytes),
            views.total(TaskRow.download_bytes),
        )
        .where(TaskRow.round_id.in_([row.id for row in rounds]))
        .group_by(TaskRow.round_id)
    )
    by_round = {round_id: map(int, counts) for round_id, *counts in sums}
    moved = moved_by_round(session, run, rounds[-1].number, rounds[0].number) if rounds else {}
    found = []
    for row in rounds:
        asked, taken, up, down = by_round.get(row.id, (0, 0, 0, 0))
        evaluated = moved[row.number].evaluated if row.attempt == 1 else 0
        found.append(RoundSum(row, asked, taken, up, down + evaluated, moved[row.number]))
    return found


def round_costs(session: Session, run: Run) -> list[RoundCost]:
    """Return what each attempt at a round that has ended cost, in order."""
    down, up = (func.coalesce(views.total(each), 0) for each in (TaskRow.download_bytes, TaskRow.upload_bytes))
    rows = session.execute(
        select(RoundRow.number, RoundRow.attempt, RoundRow.state, RoundRow.opened_at, RoundRow.closed_at, down, up)
        # By the round alone: with the run too, SQLite reads all tasks of the run for each round.
        .outerjoin(TaskRow, TaskRow.round_id == RoundRow.id)
        .where(RoundRow.run_id == run.id, RoundRow.closed_at.is_not(None))
        .group_by(RoundRow.id)
        .order_by(RoundRow.number, RoundRow.attempt)
    )
    moved = moved_by_round(session, run, 1, run.spec.rounds, ("evaluate",))
    return [
        RoundCost(
            number if state == "committed" else None,
            int(fetched) + (moved[number].evaluated if attempt == 1 else 0),
            int(sent),
            (closed or opened) - opened,
            (closed or opened) - run.created_at.timestamp(),
        )
        for number, attempt, state, opened, closed, fetched, sent in rows
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


def thinned(run: Run) -> int:
    """Return the step between shown versions, of which there are at most about `MAX_POINTS`."""
    return max(1, math.ceil(run.version.number / MAX_POINTS))


def evaluations(
    session: Session, run: Run, metric: str | None = None, *which: ColumnElement[bool]
) -> list[Evaluated]:
    """Return a run's evaluations under these conditions, with its main scores (or `metric`) alone: there may be a
    hundred thousand."""
    return _evaluations(session, metric, TaskRow.run_id == run.id, *which)[run.id]


def _evaluations(
    session: Session, metric: str | None, *which: ColumnElement[bool]
) -> defaultdict[str, list[Evaluated]]:
    """Return the evaluations of each run under these conditions."""
    # A site may have invented another name, which could break the path to it in the JSON.
    known = (metric,) if metric and re.fullmatch(r"[\w.-]+", metric, re.ASCII) else MAIN_SCORES
    names = [*known, *(PERSONAL + name for name in MAIN_SCORES)]
    columns = [TaskRow.metrics[name].as_float() for name in (SCORED_LABELS, *names)]
    task = (TaskRow.run_id, TaskRow.version_number, TaskRow.held_out, TaskRow.examples)
    # Of thousands of rows, the session would look at each.
    rows = session.connection().execute(
        select(WORKER_NAME, SiteRow.name, *task, *columns)
        .join_from(TaskRow, WorkerRow)
        .join(SiteRow)
        .where(*views.EVALUATED, *which)
        .order_by(TaskRow.version_number, TaskRow.id)
    )
    by_run: defaultdict[str, list[Evaluated]] = defaultdict(list)
    for worker, site, run_id, version, held_out, examples, scored, *values in rows:
        metrics = {name: value for name, value in zip(names, values, strict=True) if value is not None}
        labels = int(examples or 0 if scored is None else scored)
        by_run[run_id].append(Evaluated(version, worker, site, held_out, labels, metrics))
    return by_run


def measured(
    session: Session, run: Run, every: Sequence[Evaluated], most: int = MAX_POINTS, best: Iterable[int] = ()
) -> list[Measurement]:
    """Return the evaluations of every n-th version that was evaluated, of the last, and of the `best`.

    `every` are the run's `evaluations`. Versions are counted among the evaluated ones, because a run may evaluate
    every tenth version only.
    """
    numbers = sorted({one.version for one in every})
    step = math.ceil((len(numbers) - 1) / most)
    if step <= 1:
        return views.measurements(session, run.id, run.spec)
    shown = {*numbers[::step], numbers[-1], *best}
    return views.measurements(session, run.id, run.spec, TaskRow.version_number.in_(shown))


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
        labels = func.coalesce(TaskRow.metrics[SCORED_LABELS].as_float(), TaskRow.examples)
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
    # What is not merged yet is for the next version.
    version_number = func.coalesce(TaskRow.merged_in, TaskRow.version_number + 1)
    value = TaskRow.metrics[name].as_float()
    rows = session.execute(
        select(WORKER_NAME, version_number, value)
        .join_from(TaskRow, WorkerRow)
        .join(SiteRow)
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
    first = (TaskRow.version_number - TaskRow.version_number % step + 1).label("first")
    written = cast(TaskRow.layers, String).label("written")
    rows = session.connection().execute(
        select(SiteRow.name, first, written, func.count())
        .join_from(TaskRow, WorkerRow)
        .join(SiteRow)
        .where(TaskRow.run_id == run.id, TaskRow.kind == "train", TaskRow.state.in_(ACCEPTED))
        .group_by(SiteRow.name, first, written)
        .order_by(first)
    )
    # Sites often choose the same layers: each choice is parsed once.
    read = cache(json.loads)
    by_site: dict[str, Counter[str]] = defaultdict(Counter)
    by_round: dict[str, Counter[str]] = defaultdict(Counter)
    for site, number, layers, count in rows:
        trained = (ALL, *read(layers))
        for held in (by_site[site], by_round[str(number)]):
            if count == 1:
                held.update(trained)
            else:
                held.update(dict.fromkeys(trained, count))
    names = sorted({layer for held in by_site.values() for layer in held if layer != ALL}, key=natural)
    in_order = dict(sorted(by_site.items())), by_round
    sites, rounds = ({key: [held[n] / held[ALL] for n in names] for key, held in of.items()} for of in in_order)
    return names, sites, rounds


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
        [Pace.of(task, begun.get(task.id)) for task in round_.tasks],
    )
    return None if end is None else views.instant(end)
