"""Tables of a run's metrics: over sites, of its method, of outliers, and of privacy spent."""

from collections.abc import Iterable, Iterator, Mapping

from rich.table import Table

from tessera.shared.api.runs import Round
from tessera.shared.api.versions import Version
from tessera.shared.metrics.classification import FigureTables
from tessera.shared.metrics.site_spread import Spread, headlines
from tessera.shared.rounds.outliers import ABSENT, COSINE, DISTANCE, LEFT_OUT, NORM
from tessera.shared.run_settings import Privacy, with_meaning
from tessera.shared.schema import EPSILON
from tessera.shared.terminal import output

SPREAD_COLUMNS = ("version", "at sites", "sites", "mean", "weighted", "worst", "where", "deviation", "worst tenth")
SCORE_COLUMNS = ("round", "worker", "norm", "distance", "cosine", "")
EPSILON_COLUMNS = ("worker", "epsilon", "delta", "unit", "round")
MAX_SHOWN_CLASSES = 10
"""The most classes whose confusion matrix a terminal shows."""
NUMBER_COLUMNS = ("version", "number", "value")


def spread_table(by_version: Mapping[int, Mapping[str, Spread]]) -> Table:
    """Return accuracies over sites (losses where there are none), of each version and of the personal models."""
    rows = [_row(number, name, names[name]) for number, names in by_version.items() for name in headlines(names)]
    return output.table(SPREAD_COLUMNS, rows, right={*SPREAD_COLUMNS} - {"at sites", "where"})


def _row(number: int, name: str, spread: Spread) -> tuple[object, ...]:
    shares = [output.share(value) for value in (spread.mean, spread.weighted_mean, spread.worst)]
    rest = (spread.worst_site, output.share(spread.deviation), output.share(spread.worst_decile))
    return (number, name.replace("_", " "), spread.sites, *shares, *rest)


def number_table(versions: Iterable[Version]) -> Table:
    rows = [(version.number, name, f"{value:.6g}") for version in versions for name, value in version.scalars.items()]
    return output.table(NUMBER_COLUMNS, rows, right=("version", "value"))


def epsilon_table(rounds: Iterable[Round], privacy: Privacy | None) -> Table:
    """Return the epsilon that each worker has spent of the run's `privacy`, as of its latest update. `rounds` are in
    order, oldest first."""
    bound = (f"{privacy.delta:g}", privacy.unit) if privacy else (None, None)
    spent = {
        task.worker: (
            task.worker,
            with_meaning(task.metrics[EPSILON], f"{task.metrics[EPSILON]:.4g}"),
            *bound,
            round_.number,
        )
        for round_ in rounds
        for task in round_.tasks
        if task.is_accepted and EPSILON in task.metrics
    }
    rows = [spent[worker] for worker in sorted(spent)]
    return output.table(EPSILON_COLUMNS, rows, right=("epsilon", "delta", "round"))


def score_table(rounds: Iterable[Round]) -> Table:
    """Return the distance of each update from the others of its round, for committed rounds."""
    rows = [
        (
            round_.number,
            task.worker,
            *(_score(task.metrics.get(name)) for name in (NORM, DISTANCE, COSINE)),
            "left out" if task.metrics.get(LEFT_OUT) else "",
        )
        for round_ in rounds
        if round_.state == "committed"
        for task in round_.tasks
        if task.is_accepted
    ]
    table = output.table(SCORE_COLUMNS, rows, right=("round", "norm", "distance", "cosine"))
    if any(None in row for row in rows):
        table.caption, table.caption_justify = ABSENT, "left"
    return table


def figure_tables(found: FigureTables) -> Iterator[Table]:
    """Yield the tables of a version's figures: by class, by subgroup and site, and its confusion matrix."""
    for titles, *rows in filter(lambda table: len(table) > 1, (found.classes, found.parts)):
        columns = [str(title).replace("_", " ") for title in titles]
        yield output.table(columns, rows, right=columns[1:])
    if found.confusion and len(found.names) <= MAX_SHOWN_CLASSES:
        matrix = [(name, *row) for name, row in zip(found.names, found.confusion, strict=True)]
        yield output.table(("true class, predicted", *found.names), matrix, right=found.names)


def _score(value: float | None) -> str | None:
    return None if value is None else f"{value:.2f}"
