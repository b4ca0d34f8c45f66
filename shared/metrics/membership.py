"""Figures of a membership inference attack, computed from the counts that sites send. `membership_figures` returns
them for the reports of a run, as for the dossier.

The attack takes a subject for a member if its loss is below a threshold (Yeom et al. 2018, arXiv 1709.01604). Its
report has the share of members found at few false alarms, and not a mean alone (Carlini et al. 2022, arXiv
2112.03570). Attacks with shadow models find more, so that low figures are no proof.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np

from tessera.shared.api.membership import LOSS_BINS, MembershipCounts
from tessera.shared.api.runs import Run, SiteReport
from tessera.shared.metrics.classification import Figure, auroc, sensitivity
from tessera.shared.metrics.data_comparison import silent_sites

FALSE_ALARMS = (0.01, 0.1)
"""The shares of others that the attack takes for members, at which its share of found members is reported."""

COARSEST = 0.2
"""The largest share of the members, or of the others, that one count may stand for."""


@dataclass(frozen=True)
class MembershipFigures:
    """The figures of an attack at one site, or at several together."""

    where: str
    units: tuple[str, ...]
    """The units of the subjects: examples, groups, or both."""
    members: int
    others: int
    known: bool
    """True if the sites' own histories have the version as one that was trained on their members."""
    figures: Mapping[str, Figure]
    """`auroc`, and the share of members found at each share of false alarms, as `tpr_at_0.01`; without those that the
    counts are too coarse for."""

    @classmethod
    def of(cls, where: str, counts: Sequence[MembershipCounts]) -> MembershipFigures:
        """Return the figures of the sum of several sites' counts."""
        # Scores rise as losses fall.
        members, others = (
            sum((np.array(getattr(each, name)[::-1]) for each in counts), np.zeros(LOSS_BINS, np.int64))
            for name in ("members", "others")
        )
        # Each site's counts say where as many subjects as its minimum are, and not where each of them is.
        coarse = [sum(each.minimum for each in counts) / max(1, int(each.sum())) for each in (members, others)]
        figures: dict[str, Figure] = {}
        if max(coarse) <= COARSEST:
            figures["auroc"] = _widened(auroc(members, others), sum(coarse) / 8)
            figures |= {
                f"tpr_at_{share:g}": sensitivity(members, others, 1 - share)
                for share in FALSE_ALARMS
                if share >= coarse[1]
            }
        units = tuple(sorted({each.unit for each in counts}))
        known = all(each.known for each in counts)
        return cls(where, units, int(members.sum()), int(others.sum()), known, figures)

    @property
    def sentence(self) -> str:
        """The result in words, for readers who are not engineers."""
        if "auroc" not in self.figures:
            return f"{self.where}: too few subjects for a figure."
        found = self.figures["auroc"]
        low, high = (round(100 * (end or 0.0)) for end in (found.low, found.high))
        what = " or ".join({"example": "records", "group": "groups such as patients"}[unit] for unit in self.units)
        said = (
            f"{self.where}: of two {what}, of which the model was trained on one, an attacker who has both picks the "
            f"right one {100 * found.value:.0f} of 100 times ({low} to {high}); a guess is right 50 times."
        )
        return said if self.known else f"{said} That the model was trained on these members is assumed."


def _widened(figure: Figure, by: float) -> Figure:
    """Return a figure with a wider interval. Wider by an eighth of the shares that one count stands for, it had the
    truth in it 95 to 100 times of 100, in trials with 50 to 2,000 subjects of each kind."""
    return figure._replace(low=max(0.0, (figure.low or 0.0) - by), high=min(1.0, (figure.high or 0.0) + by))


def membership_figures(reports: Iterable[SiteReport]) -> list[MembershipFigures]:
    """Return the figures of a run's attack: of all sites together, and of each site that sent counts.

    Sites that only assume that the version was trained on their members would hide the others' result: they count
    in the sum only if no site knows.
    """
    found = {each.site: each.membership for each in reports if each.membership}
    pooled = [each for each in found.values() if each.known] or list(found.values())
    of_sites = [MembershipFigures.of(site, [each]) for site, each in sorted(found.items())]
    together = "all sites" if len(pooled) == len(found) else f"{len(pooled)} of {len(found)} sites"
    return [MembershipFigures.of(together, pooled), *of_sites] if pooled else []


@dataclass(frozen=True)
class AttackResult:
    """The result of a run's attack as a table and sentences."""

    columns = ("site", "members", "others", "AUROC", "found at 1 % false alarms", "found at 10 % false alarms")
    names = ("auroc", *(f"tpr_at_{share:g}" for share in FALSE_ALARMS))

    found: Sequence[MembershipFigures]
    silent: Mapping[str, str]
    """The reason of each site without counts."""

    @classmethod
    def of(cls, run: Run, reports: Sequence[SiteReport]) -> AttackResult:
        """Return the result of a run with these reports."""
        answered = [each.site for each in reports if each.membership]
        return cls(membership_figures(reports), silent_sites(run, reports, answered))

    @property
    def rows(self) -> list[tuple[str, ...]]:
        """The cells of each row as text; empty where there is no figure."""
        return [
            (one.where, str(one.members), str(one.others), *(str(one.figures.get(name, "")) for name in self.names))
            for one in self.found
        ]

    @property
    def sentences(self) -> list[str]:
        """The figures in words, and the reasons of sites without any."""
        told = self.found[:1] if len(self.found) == 2 else self.found
        return [*(one.sentence for one in told), *(f"{site}: {reason}" for site, reason in self.silent.items())]

    def as_json(self) -> list[dict[str, Any]]:
        """Return the figures as JSON objects, each with its interval."""
        return [
            {**asdict(one), "figures": {name: figure._asdict() for name, figure in one.figures.items()}}
            for one in self.found
        ]
