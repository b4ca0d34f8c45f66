"""Frozen records from which `decide` decides: a run's state at one moment, and time limits."""

from dataclasses import dataclass

from tessera.shared.api.cohort import Cohort


@dataclass(frozen=True)
class TaskSnapshot:
    id: str
    site: str
    """Its name if the run requires it, or else any identifier: others are only counted."""
    state: str
    token: int
    attempts: int
    lease_expires_at: float | None
    present: bool = True
    """Its worker was seen recently, or may still appear."""
    offered_at: float = 0.0
    accepted_at: float | None = None


@dataclass(frozen=True)
class SumsSnapshot:
    """The state of a round's secure sums. Cancelled tasks are left out, and those that failed before the run was
    resumed."""

    helpers: int
    signatures: int
    """Helpers that must sign the set of senders."""
    agree: tuple[TaskSnapshot, ...] = ()
    openings: tuple[TaskSnapshot, ...] = ()
    is_open: bool = False
    """All masks of the senders have been summed."""


@dataclass(frozen=True)
class RoundSnapshot:
    id: str
    number: int
    state: str
    deadline_at: float
    tasks: tuple[TaskSnapshot, ...]
    sums: SumsSnapshot | None = None
    """For a run with secure sums."""
    earlier: tuple[float, ...] = ()
    """With `cohort.adaptive_deadline`: the seconds from the offer to the acceptance of the latest tasks of other
    rounds; infinite for those whose round closed without them."""


@dataclass(frozen=True)
class PendingEvaluation:
    """An evaluation of a version that has been offered to no live worker."""

    version: int
    worker: str | None = None
    """The worker to evaluate on its held-out data; None for any worker with the central data set."""


@dataclass(frozen=True)
class Answers:
    """The sites' answers to a run without rounds."""

    answered: int
    """Sites whose report was accepted."""
    asked: int
    """Sites that were offered a task."""
    is_full: bool = False
    """Each site that the run names has answered."""
    withheld: int = 0
    """Sites with live workers that were offered no task, or gave it back, until a person there has decided."""
    failed: tuple[str, ...] = ()
    """Workers whose last task since the run was last resumed failed, with its code."""


@dataclass(frozen=True)
class RunSnapshot:
    id: str
    state: str
    rounds: int
    """Number of rounds in the run's settings."""
    version: int
    """The number of the latest version, which is the number of rounds committed."""
    cohort: Cohort
    round: RoundSnapshot | None
    """The live round, if there is one."""
    abandoned: int
    """Attempts at the next round that were abandoned since the run was last resumed; 0 during a round."""
    eligible: int
    """Sites with live workers that could take part in the next round, 0 without a required one. During a round 0, or,
    in a run that buffers updates, the sites that are idle and have no task of this round yet."""
    idle_since: float
    """The instant of the run's last change: its creation, its resumption, or the last opening or end of a round."""
    evaluations: tuple[TaskSnapshot, ...]
    """Evaluations that have not ended."""
    unevaluated: tuple[PendingEvaluation, ...]
    """With attempts left: central ones oldest first, then those of the latest version at live sites."""
    evaluators: int
    """Live workers that could evaluate on the central data set."""
    abandoning: tuple[TaskSnapshot, ...] = ()
    """Unfinished tasks of helpers, to sign before the next round that they sign no set of an abandoned attempt."""
    abandoned_because: str = ""
    """The reason of the last abandoned attempt at the next round, with the workers that failed; empty without one."""
    goes_on: bool = False
    """Its last change was the commit of a round, whose cohort was here a moment ago."""
    done: int = 0
    """Live sites that have begun to train from as many versions as the run allows a site; 0 if the run would be below
    its quorum with these too."""
    answers: Answers | None = None
    """For a run without rounds."""
    adopts: bool = False
    """The parent has another version than a region's run trains on: it takes the place of the region's latest."""
    awaits_parent: bool = False
    """The region has done its rounds on the parent's version."""


@dataclass(frozen=True)
class Timeouts:
    """Time limits of waiting for workers, in seconds."""

    cohort_wait_seconds: float
    """For the full cohort, or for further sites, once there is a quorum."""
    evaluation_seconds: float
    """For the last evaluations, once all rounds are done."""
    lease_seconds: float
    """The length of a lease, which its worker renews."""
