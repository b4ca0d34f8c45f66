"""What a site allows, whatever a coordinator asks. Judged with the worker's own block table, never another's."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from typing import Any

from pydantic import Field, PositiveFloat, PositiveInt, field_validator, model_validator

from tessera.shared import renamed_keys
from tessera.shared.api.tasks import AdvertisedPolicy, Task
from tessera.shared.host_memory import available_bytes
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import EVERYTHING, Selector
from tessera.shared.run_settings import Budget, Span
from tessera.shared.schema import MAX_NUMBER, Frozen, Label, TaskKind
from tessera.worker.state.privacy_ledger import LedgerEntry, Use, exact_in

GIB = 1 << 30
SHOWN = 8


REMEDIES = {
    "orchestrators": "Add its name to policy.orchestrators, if the site knows and trusts who it is.",
    "require_privacy": "Start the run with `privacy` that meets policy.require_privacy; its `evaluations` lets "
    "versions be measured.",
    "max_run_upload_bytes": "The run has had its share; begin another, or raise policy.max_run_upload_bytes.",
    "max_minutes_per_day": "It goes on tomorrow; raise policy.max_minutes_per_day, or give the run smaller tasks.",
    "part": "Give the site's examples a file of their own, in place of `part`.",
    "use": "Set `use = 'evaluate'` for a data set that nothing trains on; or give it a `held_out` share, and have "
    "the run set `evaluation.sites`.",
    "max_evaluations": "See `tessera worker check` for what was measured, and raise policy.max_evaluations.",
    "privacy": "See `tessera worker ledger` for what was spent, and the data set's budget in the settings.",
    "overlap": "Have the names share a ledger: `ledger = NAME` in datasets.<name>, the same NAME in each.",
    "acknowledge_exact": "Set acknowledge_exact = true in the data set's budget: it bounds what comes from now on.",
    "max_weekly_privacy": "It goes on as the days pass; raise policy.max_weekly_privacy, or have runs spend less.",
    "run": "Begin a new run; or remove this one's file in runs_dir if the site knows why it changed.",
    "version": "Begin a new run; or remove this one's file in runs_dir if the site knows why it changed.",
    "round": "Begin a new run; or remove this one's file in runs_dir if the site knows why it changed.",
    "plan": "The method sends what the plan does not ask for: it needs mending.",
    "vault": "The method sends what it keeps: it needs mending.",
    "private": "Have the run ask for blocks that its method does not keep at the sites.",
    "kinds": "Let other workers do it, or change `kinds` in the settings.",
}
"""What to do about a violation, by rule. Of others: change the run, or the setting of that name in the policy."""


class PolicyViolation(Exception):
    """A task asks for what the site does not allow. `rule` is the setting that forbids it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail

    @property
    def remedy(self) -> str:
        """What whoever runs the worker can do about it."""
        return REMEDIES.get(self.rule, f"Have the run ask for less, or change policy.{self.rule} in the settings.")


def require(allowed: bool, rule: str, detail: str) -> None:
    """Raise PolicyViolation for what is not allowed."""
    if not allowed:
        raise PolicyViolation(rule, detail)


EVALUATIONS = "whether versions may be measured on examples that nothing trains on; the figures are exact"


def check_use(task: Task, *, for_evaluation: bool) -> None:
    """Refuse to measure a version on examples that train, and to train on a data set that the settings mark as
    `for_evaluation`. Raises PolicyViolation."""
    if task.kind == "train" and for_evaluation:
        raise PolicyViolation("use", f"the data set {task.dataset!r} is for evaluation, and nothing trains on it")
    if task.kind == "evaluate" and not task.held_out and not for_evaluation:
        raise PolicyViolation(
            "use", f"the data set {task.dataset!r} is for training, and no version is measured on what trains"
        )


class PrivacyFloor(Frozen):
    """The least privacy that a run must have to train here, on whatever data set. Exact figures need a permission."""

    epsilon: float = Field(gt=0, le=1000, description="the most that a run may tell of one example")
    delta: float = Field(default=1e-5, gt=0, lt=0.1, description="at the most")
    noise_multiplier: float = Field(default=0.0, ge=0, le=1e6, description="the least noise, in clip norms")
    evaluations: bool = Field(default=False, description=EVALUATIONS)

    def check(self, task: Task) -> None:
        """Judge what a task is, before what it would spend. Raises PolicyViolation."""
        rule, privacy = "require_privacy", task.privacy
        if task.kind == "evaluate":
            require(self.evaluations, rule, "this site requires privacy, and a version's figures are exact")
            return
        if privacy is None:
            raise PolicyViolation(rule, "the run has no differential privacy, and this site requires it")
        covered = privacy.selection != "uncovered"
        require(covered, rule, "this site requires privacy, which covers no exact choice of blocks")
        asked = f"epsilon {privacy.epsilon:g} at delta {privacy.delta:g}"
        told = f"the run has {asked}; this site requires {self.epsilon:g} at {self.delta:g}"
        require(privacy.epsilon <= self.epsilon and privacy.delta <= self.delta, rule, told)

    def check_noise(self, noise_multiplier: float) -> None:
        """Judge the noise that a task's steps would have. Raises PolicyViolation."""
        if noise_multiplier < self.noise_multiplier:
            raise PolicyViolation(
                "require_privacy",
                f"the run's target comes to noise of {noise_multiplier:.3g} clip norms; this site requires "
                f"{self.noise_multiplier:g}",
            )


class Allowance(Budget):
    """What all runs together may find out of one example of a data set. Runs without privacy may not train on it."""

    evaluations: bool = Field(default=False, description=EVALUATIONS)
    acknowledge_exact: bool = Field(
        default=False,
        description="whether it bounds what comes after, although the data set was used without privacy before",
    )

    def uncovered(self, entries: Iterable[LedgerEntry]) -> list[tuple[LedgerEntry, Use]]:
        """Return what of a data set's ledger no noise covers and the site does not answer for, oldest first."""
        # What nothing trains on is measured by the budget's own leave.
        allowed = ("evaluation",) if self.evaluations else ()
        return (
            [] if self.acknowledge_exact else [(entry, use) for entry, use in exact_in(entries) if use not in allowed]
        )

    def check_exact(self, dataset: str, entries: Iterable[LedgerEntry]) -> None:
        """Judge what a data set's ledger has of exact uses. Raises PolicyViolation."""
        if uncovered := self.uncovered(entries):
            entry, use = uncovered[0]
            raise PolicyViolation(
                "acknowledge_exact",
                f"what is told of {dataset!r} is unbounded since {entry.at:%Y-%m-%d} ({use} without noise, "
                f"{f'run {entry.run_name!r}' if entry.run else 'no run'}), so no budget holds for it",
            )

    def check(self, task: Task) -> None:
        """Judge what a task on the data set is, before what it would spend. Raises PolicyViolation."""
        if task.kind == "train" and task.privacy is None:
            raise PolicyViolation("privacy", f"the data set {task.dataset!r} has a budget, and the run no privacy")
        if task.kind == "train" and task.privacy and task.privacy.selection == "uncovered":
            raise PolicyViolation("privacy", f"{task.dataset!r} has a budget, which covers no exact choice of blocks")
        if task.kind == "evaluate" and not self.evaluations:
            raise PolicyViolation("privacy", f"no version is measured on {task.dataset!r}, which has a budget")


class Policy(Frozen):
    """A site's rules. By default any installed method may use any data set that the settings name, within bounds."""

    orchestrators: tuple[str, ...] | None = Field(
        default=None, description="who may start runs, by the name that the coordinator gives; anybody if left out"
    )
    methods: tuple[str, ...] | None = Field(default=None, description="methods allowed; all installed if left out")
    datasets: tuple[Label, ...] | None = Field(default=None, description="data sets that runs may use")
    models: tuple[str, ...] | None = Field(default=None, description="transformers' model types that runs may use")
    may_send: Selector = Field(default=EVERYTHING, description="blocks that may leave")
    never_send: tuple[str, ...] = Field(
        default=(), description="names of blocks that never leave, as shell patterns; stronger than may_send"
    )
    max_epochs: PositiveInt = Field(default=100, description="passes over the data in one task, over all phases")
    max_batch: PositiveInt = Field(default=65_536, description="examples in one batch")
    max_attempts: PositiveInt = Field(default=10, description="updates of one round that one worker hands in")
    max_task_seconds: PositiveFloat = Field(default=7 * 86400.0, description="however often its lease is renewed")
    min_evaluation_examples: PositiveInt = Field(
        default=20, description="fewest examples that a version is measured on"
    )
    max_evaluations: PositiveInt = Field(
        default=10_000, description="versions measured on one data set over all runs, from all who share runs_dir"
    )
    max_model_bytes: PositiveInt = Field(
        default_factory=lambda: available_bytes() // 2,
        description="the largest model that is built; half of the memory that the worker may have if left out",
    )
    max_upload_bytes: PositiveInt = 16 * GIB
    max_lease_seconds: PositiveFloat = 3600.0
    max_run_upload_bytes: PositiveInt | None = Field(
        default=None, description="the most that leaves for one run over all its rounds, from all who share runs_dir"
    )
    max_upload_bytes_per_second: float | None = Field(
        default=None, ge=16_384, description="what uploads are slowed down to; as fast as the line if left out"
    )
    max_minutes_per_day: PositiveFloat | None = Field(
        default=None, description="work on tasks in one day of the site's calendar, kept over restarts"
    )
    hours: tuple[Span, ...] = Field(
        default=(), description="when tasks are claimed, by the site's own clock: 'Mon-Fri 19:00-07:00'"
    )
    require_privacy: PrivacyFloor | None = Field(
        default=None, description="the least differential privacy of a run that trains here"
    )
    max_weekly_privacy: Budget | None = Field(
        default=None,
        description="the most that all runs together may tell of one example of a data set in any seven days",
    )
    approve_runs: bool = Field(
        default=False, description="whether a person has to approve each run before anything is done for it"
    )
    airlock: bool = Field(default=False, description="whether a person has to release each update before it leaves")

    @model_validator(mode="before")
    @classmethod
    def _has_present_names(cls, given: Any) -> Any:
        return renamed_keys.refuse_old(given, renamed_keys.POLICY, "[policy] ")

    @field_validator("hours")
    @classmethod
    def _has_hours(cls, hours: tuple[Span, ...]) -> tuple[Span, ...]:
        # Of every other list, an empty one lets nobody in.
        if not hours:
            raise ValueError("is empty; leave it out to work at all hours")
        return hours

    def allows_method(self, name: str) -> bool:
        return self.methods is None or name in self.methods

    def allows_dataset(self, name: str) -> bool:
        return self.datasets is None or name in self.datasets

    def advertised_policy(
        self, budgets: Mapping[str, Budget], utc_offset_minutes: int, spent: Mapping[str, float] | None = None
    ) -> AdvertisedPolicy:
        """Return what of it a coordinator is shown, to plan with: no promise, and nothing secret."""
        floor = self.require_privacy
        shown = {name: getattr(self, name) for name in AdvertisedPolicy.model_fields if name in Policy.model_fields}
        return AdvertisedPolicy.model_validate(
            {
                **shown,
                "utc_offset_minutes": utc_offset_minutes,
                "require_privacy": Budget(epsilon=floor.epsilon, delta=floor.delta) if floor else None,
                "budgets": {name: Budget(epsilon=most.epsilon, delta=most.delta) for name, most in budgets.items()},
                # At a delta that nothing was planned for, there may be no bound at all.
                "spent": {name: min(epsilon, MAX_NUMBER) for name, epsilon in (spent or {}).items() if epsilon},
            }
        )

    def _withholds(self, block: Block) -> bool:
        return any(fnmatchcase(block.name, pattern) for pattern in self.never_send)

    def check_task(self, task: Task, kinds: Sequence[TaskKind]) -> None:
        """Judge a task by itself, before anything is fetched for it. Raises PolicyViolation."""
        require(task.kind in kinds, "kinds", f"this worker does not {task.kind}")
        if self.orchestrators is not None and task.orchestrator not in self.orchestrators:
            who = repr(task.orchestrator[:80]) if task.orchestrator else "whom the coordinator does not name"
            raise PolicyViolation("orchestrators", f"runs of {who} are not taken here")
        method, dataset, lease, longest = task.method.name, task.dataset, task.lease_seconds, self.max_lease_seconds
        require(self.allows_method(method), "methods", f"the method {method[:80]!r} is not allowed here")
        require(self.allows_dataset(dataset), "datasets", f"runs may not use the data set {dataset!r}")
        if task.kind == "train":
            self.check_epochs(task.training.epochs)
        if self.require_privacy:
            self.require_privacy.check(task)
        told = f"a lease of {lease} s is longer than the {longest} s allowed"
        require(lease <= longest, "max_lease_seconds", told)

    def check_epochs(self, epochs: int) -> None:
        most = self.max_epochs
        require(epochs <= most, "max_epochs", f"{epochs} epochs are more than the {most} allowed")

    def check_batch(self, size: int | None, examples: int) -> None:
        """Judge the batches that so many examples make; all in one if `size` is None. Raises PolicyViolation."""
        largest, most = min(size or examples, examples), self.max_batch
        require(largest <= most, "max_batch", f"a batch of {largest} is more than the {most} allowed")

    def check_measured(self, examples: int) -> None:
        least = self.min_evaluation_examples
        told = f"figures of {examples} examples tell too much of each; {least} are wanted"
        require(examples >= least, "min_evaluation_examples", told)

    def check_measurements(self, dataset: str, times: int) -> None:
        """Judge how often versions were measured on a data set, with the one that is about to be."""
        most = self.max_evaluations
        told = f"{most} versions were measured on the data set {dataset!r}, as many as are allowed"
        require(times <= most, "max_evaluations", told)

    def check_duration(self, seconds: float) -> None:
        most = self.max_task_seconds
        require(seconds <= most, "max_task_seconds", f"the task takes longer than the {most:g} s allowed")

    def check_day(self, used_seconds: float) -> None:
        """Judge how long was worked today. Raises PolicyViolation."""
        if (most := self.max_minutes_per_day) is not None:
            told = f"the {most:g} minutes of this day are used up"
            require(used_seconds <= 60 * most, "max_minutes_per_day", told)

    def check_run_upload(self, nbytes: int) -> None:
        """Judge what all updates of a run come to, with the one that is about to leave. Raises PolicyViolation."""
        if (most := self.max_run_upload_bytes) is not None:
            told = f"the run's updates would come to {nbytes} bytes, more than the {most} allowed"
            require(nbytes <= most, "max_run_upload_bytes", told)

    def check_model_type(self, model_type: str) -> None:
        allowed = self.models is None or model_type in self.models
        require(allowed, "models", f"the model type {model_type[:80]!r} is not allowed here")

    def check_model(self, nbytes: int, what: str = "a model") -> None:
        """Judge what would be held of a model's size: the model, or the server state that a plan fetches."""
        most = self.max_model_bytes
        require(nbytes <= most, "max_model_bytes", f"{what} of {nbytes} bytes is larger than the {most} allowed")

    def check_upload(self, asked: Iterable[Block]) -> None:
        """Judge the blocks that a plan asks for, before they are trained. Raises PolicyViolation naming them."""
        blocks = tuple(asked)
        if refused := [block.name for block in blocks if self._withholds(block)]:
            raise PolicyViolation("never_send", f"these blocks never leave: {_listed(refused)}")
        if refused := [block.name for block in blocks if not self.may_send.holds(block)]:
            raise PolicyViolation("may_send", f"these blocks may not leave: {_listed(refused)}")

    def check_private(self, asked: Iterable[Block]) -> None:
        """Judge those of a plan's blocks that the method keeps at the site. Raises PolicyViolation naming them."""
        if refused := [block.name for block in asked]:
            raise PolicyViolation("private", f"the method keeps these at the site: {_listed(refused)}")

    def check_egress(self, names: Iterable[str], nbytes: int, asked: Sequence[Block], kept: Iterable[str]) -> None:
        """Judge what is about to leave: the names in an update file of `nbytes`, against what the plan asked for,
        what the site allows, and what the method meant to keep. Raises PolicyViolation."""
        names = set(names)
        if unasked := names - {block.name for block in asked}:
            raise PolicyViolation("plan", f"the plan did not ask for {_listed(unasked)}")
        self.check_upload(block for block in asked if block.name in names)
        if private := names & set(kept):
            raise PolicyViolation("vault", f"the method keeps these and sends them too: {_listed(private)}")
        if nbytes > self.max_upload_bytes:
            raise PolicyViolation(
                "max_upload_bytes", f"an update of {nbytes} bytes is larger than the {self.max_upload_bytes} allowed"
            )


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
