"""What follows from the runs for each claim of the plan."""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, replace
from statistics import fmean

from evidence.plan import Claim, Plan
from evidence.report.rows import Found, no_drift, row, void
from evidence.statistics import described, shown_interval
from tessera.simulation.comparison.statistics import equivalence_p, holm, interval, paired

NOT_FLAT = "not flat"


@dataclass(frozen=True)
class Finding:
    """A claim with the differences that it is about, in points, one for each seed that both arms have."""

    claim: Claim
    table: str
    differences: list[float]
    p: float | None
    """Of its test; None below two seeds."""
    hindrance: str | None
    """Why nothing follows."""
    at_end: tuple[str, ...] = ()
    """The arms beyond whose learning rate none was tried."""
    adjusted: float | None = None
    """By Holm over the headline claims of its paper; None for others."""
    equal: float | None = None
    """The p-value that the difference is within the margin, by Holm too; None where the rules adjust none."""
    family: int = 1
    """Headline claims over which a difference beyond the margin is adjusted, by Bonferroni's rule."""

    def verdict(self, significance: float) -> str:
        """Return what follows from the differences, in a word or some, and which arm's learning rate is in doubt."""
        found = self._verdict(significance)
        return f"{found}; rate at an end: {', '.join(self.at_end)}" if self.at_end else found

    def _verdict(self, significance: float) -> str:
        if self.hindrance:
            return self.hindrance
        if self.p is None:
            return "undecided: too few seeds"
        p, margin = self.p if self.adjusted is None else self.adjusted, self.claim.margin
        low, high = interval(self.differences)
        if self.claim.kind == "equivalent":
            if p < significance:
                return "supported"
            least, most = interval(self.differences, 1 - significance / self.family)
            if least > margin or most < -margin:
                return "not equal: better" if least > margin else "refuted: worse"
            ends = interval(self.differences, 1 - 2 * significance)
            return f"undecided: {100 - 200 * significance:.0f} % interval [{ends[0]:+.1f}, {ends[1]:+.1f}]"
        if 2 / 2 ** len(self.differences) > significance:
            return "interval alone"
        if p < significance:
            return "supported" if low + high > 0 else "refuted: the other way round"
        if (equivalence_p(self.differences, margin) if self.equal is None else self.equal) < significance:
            if low > 0 or high < 0:
                return f"undecided: {'above' if low > 0 else 'below'} 0, within {margin:g}"
            return f"refuted: equal within {margin:g}"
        return "undecided"


def findings(plan: Plan, found: Found) -> list[Finding]:
    """Return every claim with its differences and p-values."""
    made = [_finding(plan, found, name, claim) for name, table in plan.tables.items() for claim in table.claims]
    # Claims that are not tested yet, or were deleted, count too: a family is as large as it was written down.
    families: dict[tuple[str, int], dict[str, float]] = {
        (paper, 1): {f"unrun {number}": 1.0 for number in range(count)} for paper, count in plan.unrun.items()
    }
    equal: dict[tuple[str, int], dict[str, float]] = {}
    for each in made:
        if each.claim.headline:
            table, untested = plan.tables[each.table], each.p is None or each.hindrance
            key = table.paper, table.rules
            families.setdefault(key, {})[each.claim.name] = 1.0 if untested else each.p or 0.0
            if table.rules == 2 and each.claim.kind == "greater":
                within = 1.0 if untested else equivalence_p(each.differences, each.claim.margin)
                equal.setdefault(key, {})[each.claim.name] = within
    adjusted = {name: p for family in families.values() for name, p in holm(family).items()}
    within_margin = {name: p for family in equal.values() for name, p in holm(family).items()}
    sizes = {name: len(family) for (_, rules), family in families.items() if rules == 2 for name in family}
    return [
        replace(
            each,
            adjusted=adjusted.get(each.claim.name),
            equal=within_margin.get(each.claim.name),
            family=sizes.get(each.claim.name, 1),
        )
        for each in made
    ]


def _finding(plan: Plan, found: Found, name: str, claim: Claim) -> Finding:
    table = plan.tables[name]
    setting = table.setting(claim.setting) if claim.setting else table.concluding
    pair = [row(plan, found, name, setting, table.arm(arm)) for arm in (claim.arm, claim.against)]
    part = claim.part or table.part
    seeds = plan.seeds_of(table, headline=claim.headline and setting == table.concluding)
    finals = [each.final(part, worst=claim.worst, absent=claim.absent) for each in pair]
    # Some arms have more seeds, for other claims.
    differences = paired(*({seed: value for seed, value in final.items() if seed in seeds} for final in finals))
    if not differences:
        return Finding(claim, name, differences, None, "not run")
    hindrances = []
    if void(plan, found, name, setting):
        hindrances.append("drift gate not passed" if no_drift(plan, found, name, setting) else "void")
    if diverged := [each.arm.name for each in pair if each.diverged]:
        hindrances.append(f"diverged: {', '.join(diverged)}")
    if len(differences) < len(seeds):
        hindrances.append(f"{len(differences)} of {len(seeds)} seeds")
    if rising := [each.arm.name for each in pair if each.is_rising]:
        hindrances.append(f"{NOT_FLAT}: {', '.join(rising)}")
    hindrance = "; ".join(hindrances) or None
    at_end, p = tuple(each.arm.name for each in pair if each.rate_at_end), None
    if len(differences) > 1:
        p = described(differences)["p"] if claim.kind == "greater" else equivalence_p(differences, claim.margin)
    return Finding(claim, name, differences, p, hindrance, at_end)


def directed(plan: Plan, found: Found) -> list[Finding]:
    """Return the findings of headline claims whose direction is known: nothing hinders a verdict, and the interval
    excludes 0."""

    def is_known(each: Finding) -> bool:
        if each.hindrance or each.p is None:
            return False
        low, high = interval(each.differences)
        return low > 0 or high < 0

    return [each for each in findings(plan, found) if each.claim.headline and is_known(each)]


@dataclass(frozen=True)
class Direction:
    """A known direction beside the differences in the short check, in points, by seed."""

    known: Finding
    here: list[float]

    @property
    def is_kept(self) -> bool:
        """True if the mean difference has the known sign."""
        return fmean(self.here) * fmean(self.known.differences) > 0

    def __str__(self) -> str:
        claim = self.known.claim
        return (
            f"{claim.name}: {claim.arm} less {claim.against} is {fmean(self.here):+.1f} here, and "
            f"{shown_interval(self.known.differences)} in the full runs"
        )


def directions(known: Collection[Finding], short: Plan, found: Found) -> list[Direction]:
    """Return each known direction for which the short check has runs of both arms, beside the differences in them.

    These are of all versions of the second half of the rounds, because the last two vary by some points.
    """
    made = [Direction(each, _early(short, found, each)) for each in known if each.table in short.tables]
    return [each for each in made if each.here]


def _early(short: Plan, found: Found, known: Finding) -> list[float]:
    table, arms = short.tables[known.table], (known.claim.arm, known.claim.against)
    if not {*arms} <= {arm.name for arm in table.arms}:
        return []
    curves = [
        row(short, found, known.table, table.concluding, table.arm(arm)).second_half(known.claim.part or table.part)
        for arm in arms
    ]
    return paired(*curves)
