"""What the rules see of a run, frozen at one moment."""

from __future__ import annotations

from dataclasses import dataclass

from tessera.shared.api.runs import Cohort


@dataclass(frozen=True)
class TaskSnapshot:
    id: str
    site: str
    """Whichever way of naming it: sites are counted."""
    state: str
    token: int
    attempts: int
    lease_expires_at: float | None
    present: bool = True
    """Whether its worker was heard of lately, or may still be about to be."""


@dataclass(frozen=True)
class RoundSnapshot:
    id: str
    number: int
    state: str
    deadline_at: float
    tasks: tuple[TaskSnapshot, ...]


@dataclass(frozen=True)
class PendingEvaluation:
    """A version that is to be measured, and that nobody who is here has been asked to."""

    version: int
    worker: str | None = None
    """Who is to do it on what it holds out; None for whoever holds the central data set."""


@dataclass(frozen=True)
class RunSnapshot:
    id: str
    state: str
    rounds: int
    """Rounds asked for."""
    version: int
    """The number of the latest version, which is the number of rounds committed."""
    cohort: Cohort
    round: RoundSnapshot | None
    """The live round, if there is one."""
    abandoned: int
    """Attempts at the next round that were abandoned since the run was last resumed."""
    eligible: int
    """Sites with live workers that could take part in a round."""
    idle_since: float
    """When the run was last changed: created, resumed, or its last round ended."""
    evaluations: tuple[TaskSnapshot, ...]
    """Evaluations that are not over."""
    unevaluated: tuple[PendingEvaluation, ...]
    """With tries left: central versions oldest first, and of the latest at sites whom it still lacks of the live."""
    evaluators: int
    """Live workers that could evaluate on the central data set."""
