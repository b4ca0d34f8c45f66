"""What the curves of saved runs tell without a new run: `python -m evidence.curves`.

Rounds and bytes until an accuracy, the layers that attention picks, and p-values over all headline claims. Everything
here was asked when the rows had been seen, so that it is exploratory. `--save` writes the document's part.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from common.document import table_head, table_row, write_block
from evidence import store
from evidence.plan import SITES, Claim, Plan, read
from evidence.report.findings import findings
from evidence.report.rows import Found, Row, row
from evidence.statistics import described, shown_interval
from tessera.simulation.comparison.statistics import equivalence_p, holm, paired

COMMAND = "python -m evidence.curves"
SHARES = (0.9, 0.95)
"""Of what the reference ends with."""
PICKS = "picks."
GPU = "NVIDIA"
"""The start of the name of a machine with a GPU."""


@dataclass(frozen=True)
class Reached:
    """What an arm takes until its mean curve stays at an accuracy."""

    rounds: int | None
    """None if it never does."""
    median_seed: float | None
    """The rounds until the median seed first has that share of what the reference ends with in the same seed."""
    up: float
    """Megabytes of all sites, the mean over seeds; nan if it never does, or has none to compare."""
    both: float


def mean_curve(curves: Mapping[int, Sequence[float]]) -> list[float]:
    """Return the mean over seeds of the score of every version."""
    return [fmean(values) for values in zip(*curves.values(), strict=True)]


def stays_from(curve: Sequence[float], aim: float) -> int | None:
    """Return the first version from which on a curve is never below the aim; None if its last one is."""
    version = 1 + max((version for version, score in enumerate(curve) if score < aim), default=-1)
    return version if version < len(curve) else None


def reached(each: Row, reference: Row, share: float) -> Reached:
    """Return the cost of an arm until a share of the reference's final score, on the examples of curves."""
    last, nan = each.plan.protocol.final_versions, float("nan")
    part = SITES if each.arm.personal else each.table.part
    of_reference, curves = reference.curves(part), each.curves(part)
    rounds = stays_from(mean_curve(curves), share * fmean(mean_curve(of_reference)[-last:]))
    firsts = [
        next((version for version, score in enumerate(curve) if score >= share * aim), len(curve))
        for seed, curve in curves.items()
        if seed in of_reference
        for aim in [fmean(of_reference[seed][-last:])]
    ]
    middle = median(firsts) if firsts else None
    if middle is not None and middle > each.rounds:
        middle = None
    if rounds is None or each.arm.central:
        return Reached(rounds, middle, nan, nan)
    up = fmean(sum(run["upload_bytes"][:rounds]) / 1e6 for run in each.runs.values() if "upload_bytes" in run)
    # Sites that measure a version have it, and fetch nothing to train.
    both = nan if each.arm.personal else fmean(moved[rounds] for moved in each.moved().values())
    return Reached(rounds, middle, up, both)


def _to_accuracy(plan: Plan, found: Found, name: str) -> Iterator[str]:
    table = plan.tables[name]
    rows = [each for arm in table.arms if (each := row(plan, found, name, table.concluding, arm)).runs]
    reference = next(each for each in rows if each.arm.name == table.reference)
    yield f"\n{name}, {table.concluding.name}:\n"
    columns = ["arm", "seeds"]
    for share in SHARES:
        columns += [f"{100 * share:.0f} %: rounds", "median seed", "up, %", "both ways, %"]
    yield from table_head([*columns, "all rounds: up, %", "both ways, %"])
    whole = fmean(reference.megabytes("upload")), fmean(moved[-1] for moved in reference.moved().values())
    for each in rows:
        cells = [each.arm.name, str(len(each.runs))]
        for share in SHARES:
            own, base = reached(each, reference, share), reached(reference, reference, share)
            cells += ["never" if own.rounds is None else str(own.rounds)]
            cells += ["never" if own.median_seed is None else f"{own.median_seed:g}"]
            cells += [_percent(own.up, base.up), _percent(own.both, base.both)]
        up, moved = each.megabytes("upload"), [] if each.arm.personal else [*each.moved().values()]
        cells.append(_percent(fmean(up), whole[0]) if up else "-")
        cells.append(_percent(fmean(one[-1] for one in moved), whole[1]) if moved and up else "-")
        yield table_row(cells)


def _percent(value: float, whole: float) -> str:
    # Unequal to itself: not a number.
    if value != value:
        return "-"
    share = 100 * value / whole
    return f"{share:.0f}" if share >= 1 else f"{share:.1g}"


def _layers(plan: Plan, found: Found) -> Iterator[str]:
    table = plan.tables["S-a"]
    rows = [
        each
        for setting in table.settings
        for arm in ("attention", "random", "random-site")
        if (each := row(plan, found, "S-a", setting, table.arm(arm))).runs
    ]
    layers = [pick["layer"] for pick in next(iter(rows[0].runs.values()))["picks"]]
    yield from table_head(["arm", "setting", "runs", *(f"layer {name.removeprefix(PICKS)}" for name in layers)])
    for each in rows:
        counts = [{pick["layer"]: pick["count"] for pick in run["picks"]} for run in each.runs.values()]
        total = sum(sum(of_run.values()) for of_run in counts)
        shares = [100 * sum(of_run[layer] for of_run in counts) / total for layer in layers]
        yield table_row([each.arm.name, each.setting.name, str(len(counts)), *(f"{share:.0f} %" for share in shares)])


def _p(claim: Claim, differences: Sequence[float]) -> float:
    """Return the p-value of a claim's test: of equality within its margin, or of a difference."""
    if claim.kind == "equivalent":
        return equivalence_p(differences, claim.margin)
    return float(described(differences)["p"])


def _families(plan: Plan, found: Found) -> Iterator[str]:
    unrun = {f"{paper} {number}": 1.0 for paper, count in plan.unrun.items() for number in range(count)}
    made = [each for each in findings(plan, found) if each.claim.headline and plan.tables[each.table].rules == 1]
    second: dict[str, float] = {}
    for each in made:
        table = plan.tables[each.table]
        pair = [
            row(plan, found, each.table, table.concluding, table.arm(a)) for a in (each.claim.arm, each.claim.against)
        ]
        part = SITES if any(one.arm.personal for one in pair) else table.part
        second[each.claim.name] = _p(each.claim, paired(*(one.second_half(part) for one in pair)))
    planned = {each.claim.name: 1.0 if each.hindrance or each.p is None else each.p for each in made}
    by_all, of_second = holm({**planned, **unrun}), holm({**second, **unrun})
    significance = plan.protocol.significance
    supported = sum(by_all[name] < significance for name in planned) or "none"
    yield (
        f"The plan corrects by Holm over the headline claims of one paper. Over all {len(by_all)}, deleted ones "
        f"included, {supported} of them is below {significance:g}. The last column is the same for the mean of the "
        "second half, which was chosen when rows had been seen: exploratory, and the claim about a row that is not "
        "flat is in it.\n"
    )
    yield from table_head(
        ["claim", "p", "by paper", f"over all {len(by_all)}", "second half: p", f"over all {len(by_all)}"]
    )
    for each in made:
        name = each.claim.name
        cells = [
            "-" if each.hindrance else f"{planned[name]:.3g}",
            "-" if each.hindrance else f"{each.adjusted or 0:.3g}",
        ]
        cells += ["-" if each.hindrance else f"{by_all[name]:.3g}", f"{second[name]:.3g}", f"{of_second[name]:.3g}"]
        yield table_row([name, *cells])


def _others(plan: Plan, found: Found) -> Iterator[str]:
    def pair(name: str, one: str, other: str) -> list[Row]:
        table = plan.tables[name]
        return [row(plan, found, name, table.concluding, table.arm(arm)) for arm in (one, other)]

    yield from table_head(["difference", "runs", "seeds", "points", "positive", "p"])
    worst = pair("P-a", "pfeddc", "nothing-averaged")
    finals = [each.final(SITES, worst=True) for each in worst]
    yield _difference("worst site, pfeddc less nothing-averaged", "all", paired(*finals))
    rates = pair("F-t", "dropped-rate", "fedavg")
    for where, is_gpu in (("CPUs", False), ("one GPU", True)):
        of_kind = [
            {
                seed: value
                for seed, value in each.final(each.table.part).items()
                if all(one.runs[seed]["machine"].startswith(GPU) == is_gpu for one in rates if seed in one.runs)
            }
            for each in rates
        ]
        yield _difference("dropped-rate less fedavg", where, paired(*of_kind))
    yield _difference("dropped-rate less fedavg", "all", paired(*(each.final(each.table.part) for each in rates)))


def _difference(name: str, runs: str, differences: Sequence[float]) -> str:
    about = described(differences)
    cells = [
        str(about["n"]),
        shown_interval(differences),
        f"{about['positive']} of {about['n']}",
        f"{about['p']:.3g}",
    ]
    return table_row([name, runs, *cells])


def lines(plan: Plan, found: Found) -> Iterator[str]:
    """Yield the document's part, line by line."""
    yield "Asked when the rows had been seen, so all of it is exploratory.\n"
    yield "### Rounds and bytes to an accuracy\n"
    yield (
        "Rounds until the mean curve over seeds stays at a share of what the reference ends with, on the examples of "
        "curves; beside it, those until the median seed first has that share of what the reference ends with in the "
        "same seed. Bytes are in % of those that the reference took to the same accuracy, and in the last two "
        "columns of those that it took for all rounds: these compare at equal rounds, not at equal bytes or "
        "accuracy. What personal arms fetch is not comparable."
    )
    for name, table in plan.tables.items():
        if table.rules == 1:
            yield from _to_accuracy(plan, found, name)
    yield "\n### Layers that are picked\n"
    yield "Of all picks by all sites in all rounds, in S-a:\n"
    yield from _layers(plan, found)
    yield "\n### All headline claims as one family\n"
    yield from _families(plan, found)
    yield "\n### The worst site by ten seeds, and a dropped rate by machine\n"
    yield from _others(plan, found)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="evidence.curves", description=__doc__)
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
