"""Rounds, metrics and comparisons as pandas tables."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import pandas as pd

from tessera.shared.metrics.classification import Figure, GroupFigures
from tessera.shared.metrics.comparison import RunComparison
from tessera.shared.metrics.rows import MetricRow


def rounds_table(rows: Sequence[Mapping[str, Any]]) -> pd.DataFrame:
    """Return a row for each attempt at a round, with the columns of all of them."""
    return pd.DataFrame(rows)


def metrics_table(rows: Iterable[MetricRow]) -> pd.DataFrame:
    """Return all metrics in long form: one value a row."""
    return pd.DataFrame(rows, columns=MetricRow._fields)


def figures_table(found: Iterable[GroupFigures]) -> pd.DataFrame:
    """Return a row for each figure of a classifier. Figures of all classes together have no class."""
    rows = [
        (one.version, one.site, one.subgroup, k, name, *figure)
        for one in found
        for k, figures in [
            (None, one.found.figures),
            *((k, each.figures) for k, each in enumerate(one.found.classes)),
        ]
        for name, figure in figures.items()
    ]
    return pd.DataFrame(rows, columns=["version", "site", "subgroup", "class", "figure", *Figure._fields])


def comparison_table(found: RunComparison) -> pd.DataFrame:
    """Return score, bytes and seconds of each run, by version; bytes and seconds are totals so far."""
    metric = found.metric or "score"
    columns = {
        (run.name, what): pd.Series(values, dtype="float64")
        for run in found.runs
        for what, values in ((metric, run.scores), ("bytes", run.bytes), ("seconds", run.seconds))
    }
    table = pd.DataFrame(columns, index=pd.Index(found.versions, name="version"))
    table.columns.names = ["run", ""]
    return table


def settings_table(found: RunComparison) -> pd.DataFrame:
    """Return the settings that differ, a column for each run; None where a run has no such setting."""
    names = [run.name for run in found.runs]
    return pd.DataFrame(list(found.settings.values()), index=[*found.settings], columns=names, dtype=object)
