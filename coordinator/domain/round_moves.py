"""The actions that move a round."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Open:
    """Open the run's next round: plan it, and offer a task to each worker of its cohort."""

    number: int


@dataclass(frozen=True)
class Ask:
    """Offer tasks of the run's open round to idle sites. Only a run that buffers updates asks again."""

    number: int


@dataclass(frozen=True)
class Close:
    """Close a round to updates, and assign the accepted ones to the next version."""

    round: str
    reason: str


@dataclass(frozen=True)
class Merge:
    """Compute the next version from a closed round's updates, and commit it."""

    round: str


@dataclass(frozen=True)
class Abandon:
    """End a round without a version."""

    round: str
    reason: str


@dataclass(frozen=True)
class Adopt:
    """Take the parent's version as the latest version of a region's run."""


RoundAction = Open | Ask | Close | Merge | Abandon | Adopt
