"""What follows from the runs for each claim of the plan."""

from __future__ import annotations

from dataclasses import dataclass, replace
from statistics import fmean

from benchmarks.evidence.plan import Claim, Plan
from benchmarks.evidence.report.rows import Found, row, void
from benchmarks.evidence.statistics import described, equivalence_p, holm, paired, shown_interval

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
    adjusted: float | None = None
    """By Holm over the headline claims of its paper; None for others."""

    def verdict(self, significance: float) -> str:
        """Return what follows from the differences, in a word or some."""
        if self.hindrance:
            return self.hindrance
        if self.p is None:
            return "undecided: too few seeds"
        p, mean, margin = (
            self.p if self.adjusted is None else self.adjusted,
            fmean(self.differences),
            self.claim.margin,
        )
        if self.claim.kind == "equivalent":
            if p < significance:
                return "supported"
            low, high = described(self.differences)["low"], described(self.differences)["high"]
            return "refuted" if low > margin or high < -margin else "undecided"
        if p < significance:
            return "supported" if mean > 0 else "refuted: the other way round"
        if equivalence_p(self.differences, margin) < significance:
            return f"refuted: equal within {margin:g}"
        return "undecided"


def findings(plan: Plan, found: Found) -> list[Finding]:
    """Return every claim with its differences and p-values."""
    made = [_finding(plan, found, name, claim) for name, table in plan.tables.items() for claim in table.claims]
    families: dict[str, dict[str, float]] = {}
    for each in made:
        # Claims that are not tested yet count too: a family is as large as it was written down.
        if each.claim.headline:
            paper = plan.tables[each.table].paper
            families.setdefault(paper, {})[each.claim.name] = 1.0 if each.p is None or each.hindrance else each.p
    adjusted = {name: p for family in families.values() for name, p in holm(family).items()}
    return [replace(each, adjusted=adjusted.get(each.claim.name)) for each in made]


def _finding(plan: Plan, found: Found, name: str, claim: Claim) -> Finding:
    table = plan.tables[name]
    setting = table.setting(claim.setting) if claim.setting else table.concluding
    pair = [row(plan, found, name, setting, table.arm(arm)) for arm in (claim.arm, claim.against)]
    part = claim.part or table.part
    differences = paired(*(each.final(part, worst=claim.worst, absent=claim.absent) for each in pair))
    if not differences:
        return Finding(claim, name, differences, None, "not run")
    hindrance = "void" if void(plan, found, name, setting) else None
    if rising := [each.arm.name for each in pair if each.is_rising]:
        hindrance = hindrance or f"{NOT_FLAT}: {', '.join(rising)}"
    if len(differences) < 2:
        return Finding(claim, name, differences, None, hindrance)
    p = described(differences)["p"] if claim.kind == "greater" else equivalence_p(differences, claim.margin)
    return Finding(claim, name, differences, p, hindrance)


def flipped(full: Plan, found: Found, short: Plan, short_found: Found) -> list[str]:
    """Return the headline claims whose mean difference has another sign in the short check than in the full runs,
    where the interval of the full ones excludes 0."""
    known = {each.claim.name: each.differences for each in findings(full, found) if each.claim.headline}
    flips = []
    for each in findings(short, short_found):
        settled = known.get(each.claim.name, [])
        if len(settled) < 2 or not each.differences:
            continue
        low, high = described(settled)["low"], described(settled)["high"]
        mean = fmean(each.differences)
        if (low > 0 and mean < 0) or (high < 0 and mean > 0):
            flips.append(
                f"{each.claim.name}: {each.claim.arm} less {each.claim.against} is {mean:+.1f} here, and "
                f"{shown_interval(settled)} in the full runs"
            )
    return flips
