"""The report on a membership inference attack: losses of subjects that a site trained on, and of held-out ones."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from tessera.shared.api.class_counts import Count
from tessera.shared.api.descriptions import DisclosedCounts

LOSS_EDGES = tuple(2.0 ** (k / 8) for k in range(-160, 41))
"""The edges of the bins of losses: from a millionth to 32, in steps of 9 %."""

LOSS_BINS = len(LOSS_EDGES) + 1

ByLoss = Annotated[tuple[Count, ...], Field(min_length=LOSS_BINS, max_length=LOSS_BINS)]


class MembershipCounts(DisclosedCounts):
    """Counts of subjects by their mean loss under the attacked version."""

    members: ByLoss
    """Of the training examples."""
    others: ByLoss
    """Of the held-out examples."""
    known: bool
    """True if the site's own history has the version as one of a run that the site sent updates to; False if this is
    assumed."""

    @model_validator(mode="after")
    def _are_suppressed(self) -> Self:
        self.require_suppressed("members", self.members)
        self.require_suppressed("others", self.others)
        return self

    @property
    def subjects(self) -> tuple[int, ...]:
        """The counts of all subjects."""
        return (*self.members, *self.others)

    @property
    def figures(self) -> dict[str, float]:
        """The numbers of subjects, for people at the site."""
        return {"members": float(sum(self.members)), "others": float(sum(self.others))}
