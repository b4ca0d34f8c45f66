"""All measurements of a run in long form: one value a row."""

import csv
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from functools import cache
from typing import NamedTuple, TextIO

from tessera.shared.api.class_counts import ALL
from tessera.shared.api.runs import Evaluation, Measurement, Round, Run
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Version
from tessera.shared.metrics.classification import flat, group_figures
from tessera.shared.metrics.comparison import History
from tessera.shared.metrics.convergence import Clock
from tessera.shared.metrics.evaluation_bytes import evaluation_bytes
from tessera.shared.metrics.selections import SENT
from tessera.shared.metrics.site_spread import Spread, spreads
from tessera.shared.sanitize import fit_for_table


class MetricRow(NamedTuple):
    """One value. Fields that do not apply to it are None.

    `stage` is the kind of the row: the plan's stage for results of workers and rounds, `central` and `sites` for
    evaluations, `figures` for those that follow from counts, `fairness` for statistics over sites (`worst` names its
    site), and `version` for the method's metrics.
    `convergence` are rounds, time and bytes until scores, and jitter.
    """

    run: str
    version: int | None
    round: int | None
    attempt: int | None
    stage: str
    dataset: str | None
    site: str | None
    worker: str | None
    metric: str
    value: float


def rows_of(
    run: Run,
    rounds: Iterable[Round],
    versions: Iterable[Version],
    measurements: Iterable[Measurement],
    reach: Sequence[float] = (),
    clock: Clock = "wall",
) -> Iterator[MetricRow]:
    """Yield the rows of a run: its rounds in order, the measurements and metrics of each version, and the cost of the
    scores to `reach`.

    An attempt at a round that was abandoned has rows too, with no version: its cost was spent.
    Of a run whose sites choose layers, each update has a row for each layer that it holds.
    """
    found, versions, rounds = list(measurements), list(versions), list(rounds)
    chosen = {version.number for version in versions if SENT in version.scalars}
    evaluated = evaluation_bytes(found, run.spec.rounds)
    for round_ in rounds:
        yield from _round(run, round_, evaluated[round_.number, round_.attempt], chosen)
    for one in found:
        yield from _measured(run, one)
    if evaluation := run.spec.evaluation:
        yield from _figures(run, evaluation, found)
    for number, by_name in spreads(found).items():
        yield from _fairness(run, number, by_name)
    for version in versions:
        for name, value in sorted(version.scalars.items()):
            yield MetricRow(run.id, version.number, None, None, "version", None, None, None, name, value)
    if converged := History.of(run, rounds, found, clock).convergence(reach):
        for number, name, value in converged.rows():
            yield MetricRow(run.id, number, None, None, "convergence", None, None, None, name, value)


def _round(run: Run, round_: Round, evaluation_bytes: int, chosen: Collection[int]) -> Iterator[MetricRow]:
    where = (run.id, round_.version, round_.number, round_.attempt, round_.stage, run.spec.dataset)
    for task in round_.tasks:
        site, _, worker = task.worker.partition("/")
        picks = {f"picked.{layer}": 1.0 for layer in task.layers} if round_.version in chosen else {}
        if run.spec.cohort.buffers and task.merged_in is not None:
            picks["staleness"] = float(task.merged_in - task.round)
        for name, value in (_task(task) | picks).items():
            yield MetricRow(*where, site, worker, name, value)
    totals = {
        "asked": float(len(round_.tasks)),
        "accepted": float(round_.accepted),
        "upload_bytes": float(sum(task.upload_bytes for task in round_.tasks)),
        "download_bytes": float(sum(task.download_bytes for task in round_.tasks) + evaluation_bytes),
    }
    if round_.closed_at:
        totals["seconds"] = (round_.closed_at - round_.opened_at).total_seconds()
    for name, value in totals.items():
        yield MetricRow(*where, None, None, name, value)


def _task(task: TaskView) -> dict[str, float]:
    """Return the metrics and costs of an accepted update; nothing for one that was not accepted."""
    if not task.is_accepted:
        return {}
    cost = {"upload_bytes": float(task.upload_bytes), "download_bytes": float(task.download_bytes)}
    return {**task.metrics, "examples": float(task.examples or 0), **cost}


def _measured(run: Run, one: Measurement) -> Iterator[MetricRow]:
    site, _, worker = one.worker.partition("/")
    stage = "sites" if one.held_out else "central"
    cost = {"examples": float(one.examples), "download_bytes": float(one.download_bytes)}
    for name, value in {**one.metrics, **cost}.items():
        yield MetricRow(run.id, one.version, None, None, stage, one.dataset, site, worker, name, value)


def _figures(run: Run, evaluation: Evaluation, found: Sequence[Measurement]) -> Iterator[MetricRow]:
    for one in group_figures(found, evaluation.specificity, quick=True):
        subgroup = "" if one.subgroup == ALL else f"{evaluation.subgroups}/{one.subgroup}/"
        for name, value in flat(one.found):
            where = (run.id, one.version, None, None, "figures", run.spec.dataset, one.site, None)
            yield MetricRow(*where, subgroup + name, value)


def _fairness(run: Run, version: int, by_name: Mapping[str, Spread]) -> Iterator[MetricRow]:
    for name, spread in by_name.items():
        for figure, value in asdict(spread).items():
            if isinstance(value, int | float):
                site = spread.worst_site if figure == "worst" else None
                where = (run.id, version, None, None, "fairness", run.spec.dataset, site, None)
                yield MetricRow(*where, f"{name}.{figure}", float(value))


def write_csv(rows: Iterable[MetricRow], file: TextIO) -> None:
    """Write comma-separated values with a header; what does not apply is empty.

    `file` is to be opened with newline="". Floats are written so that they read back as the same
    bits. No cell is a formula to a spreadsheet: workers name some of the metrics.
    """
    writer = csv.writer(file, lineterminator="\n")
    writer.writerow(MetricRow._fields)
    # The same few texts again and again.
    fit = cache(fit_for_table)
    writer.writerows([fit(cell) if isinstance(cell, str) else cell for cell in row] for row in rows)
