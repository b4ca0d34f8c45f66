"""How a run's sites fare, and what its method tells, as tables for people."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

from rich.table import Table

from tessera.shared.api.runs import Round
from tessera.shared.api.tasks import TaskView
from tessera.shared.api.versions import Version
from tessera.shared.cli.render import output
from tessera.shared.metrics.site_spread import PERSONAL, Spread
from tessera.shared.rounds.outliers import ABSENT, COSINE, DISTANCE, LEFT_OUT, NORM
from tessera.shared.schema import EPSILON

SPREAD_COLUMNS = ("version", "at sites", "sites", "mean", "weighted", "worst", "where", "deviation", "worst tenth")
SCORE_COLUMNS = ("round", "worker", "norm", "distance", "cosine", "")
NUMBER_COLUMNS = ("version", "number", "value")

# One number tells most of how well a version does; the others are in `tessera run metrics`.
TELLING = ("accuracy", "loss")


def spread_table(by_version: Mapping[int, Mapping[str, Spread]]) -> Table:
    """Return the versions' accuracies over sites, of the version itself and of the sites' own models; losses where
    there are none."""
    rows = [_row(number, name, names[name]) for number, names in by_version.items() for name in telling(names)]
    return output.table(SPREAD_COLUMNS, rows, right={*SPREAD_COLUMNS} - {"at sites", "where"})


def telling(names: Mapping[str, Spread]) -> Iterator[str]:
    """Yield the one number of a version, and the one of the sites' own models, that tell most of how well they do."""
    for prefix in ("", PERSONAL):
        yield from [prefix + name for name in TELLING if prefix + name in names][:1]


def _row(number: int, name: str, spread: Spread) -> tuple[object, ...]:
    shares = [output.share(value) for value in (spread.mean, spread.weighted_mean, spread.worst)]
    rest = (spread.worst_site, output.share(spread.deviation), output.share(spread.worst_decile))
    return (number, name.replace("_", " "), spread.sites, *shares, *rest)


def number_table(versions: Iterable[Version]) -> Table:
    rows = [(version.number, name, f"{value:.6g}") for version in versions for name, value in version.scalars.items()]
    return output.table(NUMBER_COLUMNS, rows, right=("version", "value"))


def epsilon_table(rounds: Iterable[Round]) -> Table:
    """Return what each worker said with its latest update that it has spent of the run's epsilon, of rounds from the
    oldest on."""
    spent = {
        task.worker: (task.worker, f"{task.metrics[EPSILON]:.4g}", round_.number)
        for round_ in rounds
        for task in round_.tasks
        if task.is_accepted and EPSILON in task.metrics
    }
    rows = [spent[worker] for worker in sorted(spent)]
    return output.table(("worker", "epsilon", "round"), rows, right=("epsilon", "round"))


def score_table(rounds: Iterable[Round]) -> Table:
    """Return how far each worker's update is from the others of its round, for those rounds that made a version."""
    rows = [
        (
            round_.number,
            task.worker,
            *(_score(task.metrics.get(name)) for name in (NORM, DISTANCE, COSINE)),
            _aside(task),
        )
        for round_ in rounds
        if round_.state == "committed"
        for task in round_.tasks
        if task.is_accepted
    ]
    made = output.table(SCORE_COLUMNS, rows, right=("round", "norm", "distance", "cosine"))
    if any(None in row for row in rows):
        made.caption, made.caption_justify = ABSENT, "left"
    return made


def _score(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"


def _aside(task: TaskView) -> str:
    return "left out" if task.metrics.get(LEFT_OUT) else ""
