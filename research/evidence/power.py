"""How many seeds a claim needs, from the spread of saved differences: `python -m evidence.power`.

A headline claim of the first rules has ten seeds with runs of both arms. The table has how much their differences
vary, under the final figure of each rule, and how many other seeds would find a difference of the margin, or equality
within it, in four cases of five. Differences are taken for normal. `--save` writes the document's part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from math import sqrt
from statistics import fmean, stdev

from scipy.stats import chi, nct, norm
from scipy.stats import t as student

from common.document import table_head, table_row, write_block
from evidence import store
from evidence.plan import SITES, Claim, Plan, read
from evidence.report.rows import Found, row
from tessera.simulation.comparison.statistics import paired

COMMAND = "python -m evidence.power"
POWER = 0.8
MOST = 200
"""Seeds, above which no number is shown."""
POINTS = 400
"""Quantiles of a standard deviation over which the power of an equivalence test is averaged."""


def found_power(effect: float, deviation: float, seeds: int, significance: float) -> float:
    """Return the probability that a two-sided paired t-test of some seeds finds a mean difference."""
    freedom, shift = seeds - 1, effect / deviation * sqrt(seeds)
    bound = student.ppf(1 - significance / 2, freedom)
    return float(nct.sf(bound, freedom, shift) + nct.cdf(-bound, freedom, shift))


def equal_power(margin: float, deviation: float, seeds: int, significance: float) -> float:
    """Return the probability that two one-sided t-tests find equality within a margin, without any difference."""
    freedom, error = seeds - 1, deviation / sqrt(seeds)
    quantiles = [(place + 0.5) / POINTS for place in range(POINTS)]
    errors = chi.ppf(quantiles, freedom) / sqrt(freedom) * error
    reach = margin - student.ppf(1 - significance, freedom) * errors
    return float((2 * norm.cdf(reach.clip(min=0) / error) - 1).mean())


def needed(power: float, test: str, margin: float, deviation: float, significance: float) -> int | None:
    """Return the least seeds with this power, for a `test` that is `greater` or `equivalent`; None above MOST."""
    of = equal_power if test == "equivalent" else found_power
    return next((seeds for seeds in range(3, MOST + 1) if of(margin, deviation, seeds, significance) >= power), None)


def least_found(power: float, deviation: float, seeds: int, significance: float) -> float:
    """Return the smallest difference, to 0.05, that some seeds find with this power."""
    return next(
        step / 20 for step in range(1, 4000) if found_power(step / 20, deviation, seeds, significance) >= power
    )


def spreads(plan: Plan, found: Found) -> Iterator[tuple[Claim, int, list[float], list[float]]]:
    """Yield each headline claim of the first rules that has runs, with the number of its paper's headline claims, and
    with its differences under the last versions, and under the versions of the second half."""
    for name, table in plan.tables.items():
        if table.rules == 2:
            continue
        papers = [each for each in plan.tables.values() if each.paper == table.paper and each.rules == 1]
        family = plan.unrun.get(table.paper, 0) + sum(claim.headline for each in papers for claim in each.claims)
        for claim in (claim for claim in table.claims if claim.headline):
            pair = [row(plan, found, name, table.concluding, table.arm(arm)) for arm in (claim.arm, claim.against)]
            part = SITES if any(each.arm.personal for each in pair) else table.part
            last = paired(*(each.final(claim.part or part) for each in pair))
            second = paired(*(each.second_half(claim.part or part) for each in pair))
            if len(second) > 2:
                yield claim, family, last, second


def lines(plan: Plan, found: Found) -> Iterator[str]:
    """Yield the document's part, line by line."""
    significance, seeds = plan.protocol.significance, len(plan.protocol.headline_seeds)
    yield (
        f"`{COMMAND}` takes the standard deviation over seeds of the saved differences, under the mean of the last "
        f"{plan.protocol.final_versions} versions, and under that of all versions of the second half (on the "
        "examples of curves, 500 phrases or the sites' own). For each: the seeds with which a difference of the "
        "margin, or equality within it if the truth is 0, is found in "
        f"{100 * POWER:.0f} % of cases at {significance:g}; for the second half also at that divided by the headline "
        "claims of the paper, as Holm's procedure asks at worst; the power of equality with "
        f"{seeds} seeds; and the least difference that {seeds} seeds find. Exploratory: the spread in another "
        "regime, such as one with drift, is not known before it has run.\n"
    )
    yield from table_head([
        "claim", "sd, last versions", "sd, second half", "seeds, last", "seeds, second half", "the same, by family",
        f"equality with {seeds}, last", f"equality with {seeds}, second half", f"least difference of {seeds}",
    ])  # fmt: skip
    for claim, family, last, second in spreads(plan, found):
        one, other, margin = stdev(last), stdev(second), claim.margin
        numbers = (
            needed(POWER, claim.kind, margin, deviation, level)
            for deviation, level in ((one, significance), (other, significance), (other, significance / family))
        )
        yield table_row([
            f"{claim.name}, {claim.kind}", f"{one:.2f}", f"{other:.2f}",
            *(f"above {MOST}" if number is None else str(number) for number in numbers),
            f"{100 * equal_power(margin, one, seeds, significance):.0f} %",
            f"{100 * equal_power(margin, other, seeds, significance):.0f} %",
            f"{least_found(POWER, other, seeds, significance):.1f}",
        ])  # fmt: skip
    yield from _planned(plan, found)


def _planned(plan: Plan, found: Found) -> Iterator[str]:
    """Yield the runs that tables of the second rules have left, and what they take by those that are finished."""
    for name, table in plan.tables.items():
        if table.rules == 1:
            continue
        yield f"\nCells of {name}, with the mean CPU time of their saved rows:\n"
        yield from table_head(["setting", "arm", "seeds", "finished", "rates finished", "CPU minutes a row"])
        done = {job: run for job, run in found.items() if job.table == name and "cpu_seconds" in run}
        tuning = plan.protocol.tuning_seed
        for setting in table.settings:
            for arm in table.arms_of(setting):
                more = setting == table.concluding and arm.name in table.headliners
                of_arm = [job for job in done if (job.setting, job.arm) == (setting.name, arm.name)]
                rows = [job for job in of_arm if job.seed != tuning]
                took = f"{fmean(done[job]['cpu_seconds'] for job in rows) / 60:.0f}" if rows else "-"
                yield table_row([
                    setting.name, arm.name, str(len(plan.seeds_of(table, headline=more))), str(len(rows)),
                    str(len(of_arm) - len(rows)), took,
                ])  # fmt: skip


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="evidence.power", description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the document's part")
    given = parser.parse_args(arguments)
    plan = read()
    found = store.of_plan(plan, store.loaded())
    if given.save:
        write_block(COMMAND, lines(plan, found))
    else:
        print("\n".join(lines(plan, found)))


if __name__ == "__main__":
    main()
