"""The report of the study in Markdown: disagreement, agreement, and attention that moves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from statistics import fmean
from typing import get_args

from common.document import table_head, table_row
from evidence.client_drift.study import ALL, EQUAL, Results, Study
from evidence.pool import Figures
from evidence.statistics import shown_interval, shown_spread
from tessera.shared.model.blocks import Role


def lines(study: Study, results: Results) -> Iterator[str]:
    """Yield the report, line by line."""
    yield (
        f"{len(study.seeds)} seeds, {study.rounds} rounds, of which one in {study.every} is measured, and a freeze "
        f"after {study.warmup}. Means over rounds, ± standard deviation over seeds; differences are paired, with "
        "95 % t-intervals."
    )
    yield from _disagreement(study, results)
    yield from _agreement(study, results)
    yield from _attention(study, results)
    on = sorted({f"{run['machine']}, by the code of {run['code']}" for each in results.values() for run in each})
    yield f"\nOn {'; '.join(on)}."


def _disagreement(study: Study, results: Results) -> Iterator[str]:
    yield "\nDisagreement: rms distance of a site's step from the mean step, in percent of the blocks' length:\n"
    others = [arm for arm in results if arm != ALL]
    columns = ["role", f"{_early(study)}, {ALL}", *(f"{_late(study)}, {arm}" for arm in results)]
    yield from table_head([*columns, *(f"{arm} less {ALL}, in percent of it" for arm in others)])
    for role in _roles(results):
        early = _means(study, results, ALL, role, "disagreement", after=False)
        late = {arm: _means(study, results, arm, role, "disagreement", after=True) for arm in results}
        cells = [_cell(early, 100), *(_cell(values, 100) for values in late.values())]
        for arm in others:
            less = [100 * (value / was - 1) for value, was in zip(late[arm], late[ALL], strict=True)]
            cells.append(shown_interval(less, 2) if any(late[arm]) else "")
        yield table_row([role, *cells])


def _agreement(study: Study, results: Results) -> Iterator[str]:
    yield (
        "\nAgreement: length of the mean step, over that to expect from as much disagreement if the sites' steps had "
        "independent directions. It is 1 where they have:\n"
    )
    arms = [(arm, False) for arm in (ALL, EQUAL)] + [(arm, True) for arm in results]
    yield from table_head(["role", *(f"{_late(study) if after else _early(study)}, {arm}" for arm, after in arms)])
    for role in _roles(results):
        ratios = (_means(study, results, arm, role, "movement", over="noise", after=after) for arm, after in arms)
        yield table_row([role, *map(_cell, ratios)])


def _attention(study: Study, results: Results) -> Iterator[str]:
    versions = [0, *study.measured]
    end = str(versions[-1])
    yield "\nDistance of attention from that at the freeze, in percent of its length, mean over layers:\n"
    yield from table_head(["arm", *(f"version {number}" for number in versions), f"the last one, less {ALL}"])
    for arm, each in results.items():
        moved = [[100 * fmean(figures["attention"][str(number)]) for figures in each] for number in versions]
        last = [100 * fmean(figures["attention"][end]) for figures in results[ALL]]
        less = [value - other for value, other in zip(moved[-1], last, strict=True)]
        yield table_row([arm, *map(shown_spread, moved), "" if arm == ALL else shown_interval(less)])
    layers = range(len(results[ALL][0]["attention"][end]))
    yield "\nThe same in the last version, by layer:\n"
    yield from table_head(["arm", *(f"layer {number + 1}" for number in layers)])
    for arm, each in results.items():
        by_layer = ([100 * figures["attention"][end][layer] for figures in each] for layer in layers)
        yield table_row([arm, *map(shown_spread, by_layer)])


def _early(study: Study) -> str:
    return f"rounds 1 to {study.warmup}"


def _late(study: Study) -> str:
    return f"rounds {study.warmup + 1} to {study.rounds}"


def _roles(results: Results) -> list[Role]:
    return [role for role in get_args(Role) if role in results[ALL][0]["movement"]]


def _means(
    study: Study, results: Results, arm: str, role: str, measure: str, *, after: bool, over: str = ""
) -> list[float]:
    """Return the mean of each seed over the rounds before or after the freeze, of a measure or of its ratio."""
    rounds = [place for place, number in enumerate(study.measured) if (number > study.warmup) == after]

    def mean(figures: Figures, name: str) -> float:
        return fmean(figures[name][role][place] for place in rounds)

    found = [(mean(figures, measure), mean(figures, over) if over else 1.0) for figures in results[arm]]
    return [value / other if other else 0.0 for value, other in found]


def _cell(values: Sequence[float], factor: float = 1.0) -> str:
    return shown_spread([factor * value for value in values], 2) if any(values) else "frozen"
