"""A site's policy: limits on every task, checked against the worker's own block table."""

from collections.abc import Iterable, Mapping, Sequence
from functools import cache
from typing import Annotated, Literal, Self

from pydantic import (
    AfterValidator,
    Field,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    field_validator,
    model_validator,
)

from tessera.shared.api.descriptions import LEAST_STEP, LEAST_SUBJECTS
from tessera.shared.api.tasks import AdvertisedPolicy, Task
from tessera.shared.host_memory import available_bytes
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import EVERYTHING, Selector, ineffective, matcher
from tessera.shared.privacy.noise_shares import epsilon_of
from tessera.shared.run_settings import MAX_EPSILON, Budget, Privacy, Span, Training, Unit, UnitBudget
from tessera.shared.schedule import LEAST_BATCH_IN_SUM, trains_on_few
from tessera.shared.schema import MAX_NUMBER, Bytes, BytesOrRate, Label, TaskKind, Value
from tessera.shared.secure_sums.messages import NoiseTerms
from tessera.shared.validation_errors import in_one_line
from tessera.worker.governance.disclosure import DisclosureRule
from tessera.worker.state.privacy_ledger import OF_EXAMPLES, LedgerEntry, UnboundedUse, unbounded_in

GIB = 1 << 30
MAX_NUMBER_OF_SUBJECTS = 1_000_000
SHOWN = 8


REMEDIES = {
    "orchestrators": "If the site trusts this orchestrator, add its name to policy.orchestrators.",
    "studies": "If the site takes part in this study, add its name to policy.studies.",
    "require_privacy": "Start the run with `privacy` that meets policy.require_privacy; its `evaluations` lets "
    "versions be measured.",
    "max_run_upload_bytes": "Begin another run, or raise policy.max_run_upload_bytes.",
    "max_minutes_per_day": "Work resumes tomorrow; raise policy.max_minutes_per_day, or give the run smaller tasks.",
    "part": "Store the site's examples in their own file instead of using `part`.",
    "group": "Name the column of the groups in the data set's `group`, with a value in each row.",
    "tokenizer": "Name the model's tokenizer in the data set's settings, in place of 'run'.",
    "use": "Set `use = 'evaluate'` for a data set that nothing trains on; or give it a `held_out` share, and have "
    "the run set `evaluation.sites`.",
    "max_evaluations": "See past evaluations with `tessera worker check`, or raise policy.max_evaluations.",
    "max_run_evaluations": "Raise policy.max_run_evaluations, or have the run measure less (evaluation.every).",
    "privacy": "See the privacy spent with `tessera worker ledger`, and the data set's budget in the settings.",
    "overlap": "Have the names share a ledger: `ledger = NAME` in datasets.<name>, the same NAME in each. Then "
    "`tessera worker adopt --config FILE` moves into it what was spent under the names of their own.",
    "acknowledge_exact": "Set acknowledge_exact = true in the budget: it bounds what comes from now on. For a weekly "
    "budget, waiting until the use is eight days old does too.",
    "max_weekly_privacy": "Work resumes as past spending ages; raise policy.max_weekly_privacy, or spend less a run.",
    "max_total_privacy": "See the privacy spent with `tessera worker ledger`, and policy.max_total_privacy.",
    "run": "Begin a new run; or remove this one's file in runs_dir if the site knows why it changed.",
    "version": "Begin a new run; or `tessera worker adopt --run NAME` if the coordinator was restored from a backup.",
    "round": "Begin a new run; or `tessera worker adopt --run NAME` if the coordinator was restored from a backup.",
    "plan": "The method sends blocks outside the plan: fix the method.",
    "vault": "The method sends blocks that it keeps private: fix the method.",
    "private": "Have the run ask for blocks that its method does not keep at the sites.",
    "sums_repeated": "Start the run from another version, or with secure_sums.repeat_model: a person at the site "
    "then has to allow it (`tessera worker inbox`).",
    "secure_sums": "Begin a run without the settings that the refusal names. If it names a site's key, compare the "
    "fingerprints of the sites again (`tessera worker roster`).",
    "secure_sums.weight": "Keep secure_sums.weight as it is: the next round is planned with it.",
    "secure_sums.embeddings": "Have the run train no embeddings, as with adapters or fedfrozen, or set "
    "secure_sums.embeddings = true.",
    "require_secure_sums": "Start the run with `secure_sums`.",
    "require_client_privacy": "Start the run with `secure_sums` and with `client_privacy` that meets "
    "policy.require_client_privacy.",
    "min_batch": "Start the run with more steps or epochs, or with a larger batch_size.",
    "min_subjects": "Wait until more subjects have changed, or set min_subjects and count_step as they were.",
    "max_descriptions": "Raise policy.max_descriptions.",
    "max_attacks": "Raise policy.max_attacks.",
    "attack": "Remove `attack` from `kinds` in the settings: such counts leave no site with a rule of privacy.",
    "lora_rank": "Give this site a smaller rank in the run's lora_ranks, or raise resources.lora_rank.",
    "describe": "Remove `describe` from `kinds` in the settings; or set policy.figures_privacy, if the site's rules "
    "are for single examples.",
    "executor": "Begin a run by a method that trains by its plan alone, such as fedavg or lora, without privacy and "
    "secure sums; or remove [executor] from the settings.",
    "kinds": "Let other workers do it, or change `kinds` in the settings.",
}
"""Remedies by rule. For any other rule: change the run, or the policy setting of that name."""


@cache
def half_of_memory() -> int:
    """Return half of the worker's memory limit, which is read once: each task validates a policy."""
    return available_bytes() // 2


class PolicyViolation(Exception):
    """A task that the site does not allow. `rule` is the setting that forbids it."""

    def __init__(self, rule: str, detail: str) -> None:
        super().__init__(f"{rule}: {detail}")
        self.rule = rule
        self.detail = detail

    @property
    def remedy(self) -> str:
        """The remedy for the worker's operator."""
        return REMEDIES.get(self.rule, f"Have the run ask for less, or change policy.{self.rule} in the settings.")


def require(allowed: bool, rule: str, detail: str) -> None:
    """Raise PolicyViolation unless `allowed`."""
    if not allowed:
        raise PolicyViolation(rule, detail)


EVALUATIONS = (
    "whether versions may be measured on examples that nothing trains on although the figures have no noise; with "
    "figures_privacy they may be anyway"
)


def check_use(task: Task, *, for_evaluation: bool) -> None:
    """Raise PolicyViolation for evaluation on training examples or training on a `for_evaluation` data set."""
    if task.trains and for_evaluation:
        raise PolicyViolation("use", f"the data set {task.dataset!r} is for evaluation only")
    if task.kind == "attack" and for_evaluation:
        raise PolicyViolation("use", f"the data set {task.dataset!r} is for evaluation: nothing was trained on it")
    if task.kind == "evaluate" and not task.held_out and not for_evaluation:
        raise PolicyViolation("use", f"the data set {task.dataset!r} is for training; no version is evaluated on it")


SINGLE_EXAMPLES = "the run protects single examples: it needs privacy.unit = 'group'"


class PrivacyFloor(Value):
    """The minimum privacy of a run that trains here, on any data set. Figures without noise need permission."""

    epsilon: float = Field(gt=0, le=1000, description="largest epsilon of a run")
    delta: float = Field(default=1e-5, gt=0, lt=0.1, description="largest delta of a run")
    noise_multiplier: float = Field(default=0.0, ge=0, le=1e6, description="the least noise, in clip norms")
    evaluations: bool = Field(default=False, description=EVALUATIONS)
    unit: Unit = Field(
        default="example",
        description="what a run has to protect as one: each example, or each group",
    )

    def check(self, task: Task, noise: Budget | None = None) -> None:
        """Check the kind and privacy of a task. `noise` is that of figures. Raises PolicyViolation."""
        rule, privacy = "require_privacy", task.privacy
        if not task.trains:
            require(
                permits_figures(self, noise),
                rule,
                f"this site requires privacy, and a version's figures have no noise{_of(self.unit, noise)}",
            )
            return
        if privacy is None:
            raise PolicyViolation(rule, "the run has no differential privacy, and this site requires it")
        covered = privacy.selection != "uncovered"
        require(covered, rule, "this site requires privacy, which covers no exact choice of blocks")
        floor = plain(self)
        require(
            floor.is_met_by(privacy), rule, f"{_guarantee(privacy, self.unit)}; this site requires {floor.in_words}"
        )

    def check_noise(self, noise_multiplier: float) -> None:
        """Check the noise of a task's steps. Raises PolicyViolation."""
        if noise_multiplier < self.noise_multiplier:
            raise PolicyViolation(
                "require_privacy",
                f"the run's target needs noise of {noise_multiplier:.3g} clip norms; this site requires "
                f"{self.noise_multiplier:g}",
            )


class ClientPrivacyFloor(Budget):
    """The minimum privacy of this site as a whole, in sums to which the sites add the noise themselves."""

    colluders: NonNegativeInt = Field(
        default=1,
        description="senders of a sum that may reveal their noise to the coordinator, or add none; a run may count "
        "the noise of the others alone",
    )
    evaluations: bool = Field(default=False, description=EVALUATIONS)
    total_epsilon: float | None = Field(
        default=None,
        gt=0,
        le=MAX_EPSILON,
        description="largest epsilon of all runs together, at the same delta; unlimited if left out",
    )

    @property
    def total(self) -> Budget | None:
        """The bound over all runs; None if there is none."""
        return Budget(epsilon=self.total_epsilon, delta=self.delta) if self.total_epsilon else None

    def check_total(self, rho: float) -> None:
        """Check the zCDP of all runs together, including the round that is about to begin or to leave. Raises
        PolicyViolation."""
        needed = epsilon_of(rho, self.delta)
        allowed = self.total_epsilon is None or needed <= self.total_epsilon
        require(
            allowed,
            "require_client_privacy",
            f"this round would bring what all runs reveal of this site to an epsilon of {needed:.4g} at delta "
            f"{self.delta:g}, and the site allows {self.total_epsilon} (total_epsilon)",
        )

    def check(self, noise: NoiseTerms | None, quorum: int) -> None:
        """Check the noise of sums over at least `quorum` sites. Raises PolicyViolation."""
        rule = "require_client_privacy"
        if noise is None:
            raise PolicyViolation(rule, "the run's sums are exact, and this site requires noise from each site")
        met = noise.epsilon <= self.epsilon and noise.delta <= self.delta
        has = f"epsilon {noise.epsilon:g} at delta {noise.delta:g}"
        require(met, rule, f"the run has {has} for each site; this site requires {self.bound}")
        require(
            noise.honest_sites + self.colluders <= quorum,
            rule,
            f"the run counts the noise of {noise.honest_sites} of {quorum} sites; with {self.colluders} that may "
            f"collude, this site counts {quorum - self.colluders}",
        )


def _guarantee(privacy: Privacy, unit: Unit) -> str:
    """Return a run's guarantee, in words, and the bound that follows from it for another unit."""
    has = f"the run has {privacy.in_words}"
    if privacy.unit == unit:
        return has
    bound = privacy.in_unit(unit)
    follows = f"epsilon {bound.epsilon:g} at delta {bound.delta:.2g}" if bound else "no bound"
    return f"{has}, from which {follows} follows for each {unit}"


class Allowance(UnitBudget):
    """A privacy budget over all runs: of a data set, of one in any seven days, or of all data sets together. Runs
    without privacy may not train on data with a budget."""

    evaluations: bool = Field(default=False, description=EVALUATIONS)
    acknowledge_exact: bool = Field(
        default=False,
        description="whether the budget applies from now on although the data set was used without privacy before",
    )

    def uncovered(self, entries: Iterable[LedgerEntry]) -> list[tuple[LedgerEntry, UnboundedUse]]:
        """Return the ledger's uses that no budget of this unit bounds and that the site has not acknowledged, oldest
        first."""
        # `evaluations` permits exact evaluation.
        allowed = ("evaluation",) if self.evaluations else ()
        uses = () if self.acknowledge_exact else unbounded_in(entries, self.unit)
        return [(entry, use) for entry, use in uses if use not in allowed]

    def check_exact(self, what: str, entries: Iterable[LedgerEntry]) -> None:
        """Check the ledgers of `what` for uses that the budget does not bound. Raises PolicyViolation."""
        if uncovered := self.uncovered(entries):
            entry, use = uncovered[0]
            how = "with noise for single examples" if use == OF_EXAMPLES else f"{use} without noise"
            raise PolicyViolation(
                "acknowledge_exact",
                f"the privacy loss of {what} is unbounded since {entry.at:%Y-%m-%d} ({how}, "
                f"{f'run {entry.run_name!r}' if entry.run else 'no run'}), so no budget holds for it",
            )

    def check(self, task: Task, noise: Budget | None = None, *, rule: str = "privacy") -> None:
        """Check the kind and privacy of a task on data that the budget covers. `noise`: the privacy of its figures.
        Raises PolicyViolation."""
        what = f"the data set {task.dataset!r}" if rule == "privacy" else "this site"
        privacy = task.privacy
        if not task.trains:
            has = f"{what} has a budget that does not allow evaluations without noise{_of(self.unit, noise)}"
            require(permits_figures(self, noise), rule, has)
        elif privacy is None:
            raise PolicyViolation(rule, f"{what} has a budget, but the run has no differential privacy")
        else:
            covered = privacy.selection != "uncovered"
            require(covered, rule, f"{what} has a budget, which covers no exact choice of blocks")
            require(self.counts(privacy), rule, f"{what} has a budget for each group, and {SINGLE_EXAMPLES}")


def permits_figures(rule: PrivacyFloor | ClientPrivacyFloor | Allowance, noise: Budget | None) -> bool:
    """Return True if a rule of privacy permits figures with this noise, which protects single examples."""
    return rule.evaluations or (not isinstance(rule, ClientPrivacyFloor) and rule.unit == "example" and bool(noise))


def _of(unit: Unit, noise: Budget | None) -> str:
    """Return, for a sentence, that figures lack noise of the unit although they have it of an example."""
    return " of whole groups" if noise and unit == "group" else ""


def _matchable(pattern: str) -> str:
    if not (pattern.isascii() and pattern.isprintable() and pattern == pattern.strip() and pattern):
        raise ValueError(
            f"{pattern!r} matches no block: names of blocks are of printable ASCII characters, without spaces around"
        )
    return pattern


Pattern = Annotated[str, AfterValidator(_matchable)]
"""A shell pattern for names of blocks."""


class Policy(Value):
    """A site's rules. By default any installed method may use any configured data set within these limits."""

    orchestrators: tuple[str, ...] | None = Field(
        default=None,
        description="orchestrators whose runs are accepted, by the coordinator's name for them; all if left out",
    )
    studies: tuple[Label, ...] | None = Field(
        default=None, description="studies whose runs are accepted, as the coordinator reports them; all if left out"
    )
    methods: tuple[str, ...] | None = Field(default=None, description="methods allowed; all installed if left out")
    datasets: tuple[Label, ...] | None = Field(default=None, description="data sets that runs may use")
    models: tuple[str, ...] | None = Field(default=None, description="transformers' model types that runs may use")
    may_send: Selector = Field(default=EVERYTHING, description="blocks that may leave")
    never_send: tuple[Pattern, ...] = Field(
        default=(),
        description="names of blocks that never leave, as shell patterns; stronger than may_send. A run whose model "
        "has no such block is refused",
    )
    never_send_if_present: tuple[Pattern, ...] = Field(
        default=(), description="the same for blocks that only some models have: other runs are not refused"
    )
    max_epochs: PositiveInt = Field(default=100, description="passes over the data in one task, over all phases")
    max_batch: PositiveInt = Field(default=65_536, description="examples in one batch")
    min_batch: PositiveInt | None = Field(
        default=None,
        description="fewest examples in a batch of a task that makes less than one pass over the data; none if left "
        f"out, and {LEAST_BATCH_IN_SUM} at least in secure sums without noise",
    )
    max_attempts: PositiveInt = Field(default=10, description="updates of one round that one worker submits")
    max_task_seconds: PositiveFloat = Field(
        default=7 * 86400.0,
        description="longest duration of a task, regardless of lease renewals, without its time in Slurm's queue",
    )
    min_evaluation_examples: PositiveInt = Field(
        default=20,
        description="fewest examples over which a version is evaluated, or a training's loss or signals or a row of "
        "an extra array leave",
    )
    max_evaluations: PositiveInt = Field(
        default=1_000,
        description="evaluations on one data set over all runs, counted over the workers that share runs_dir",
    )
    max_run_evaluations: PositiveInt = Field(
        default=100, description="evaluations in one run, counted over the workers that share runs_dir"
    )
    min_subjects: int = Field(
        default=LEAST_SUBJECTS,
        ge=LEAST_SUBJECTS,
        le=MAX_NUMBER_OF_SUBJECTS,
        description="fewest subjects (groups, or examples without one) of a count in a description or an attack, "
        "where fewer are sent as none, and of a class, or a class in a subgroup, in an evaluation with "
        "`send_class_counts`, which is without the others",
    )
    count_step: int = Field(
        default=LEAST_STEP,
        ge=LEAST_STEP,
        le=MAX_NUMBER_OF_SUBJECTS,
        description="counts in descriptions and attacks are rounded to multiples of it",
    )
    max_descriptions: PositiveInt = Field(
        default=100,
        description="descriptions of one data set over all runs, counted over the workers that share runs_dir",
    )
    max_attacks: PositiveInt = Field(
        default=5,
        description="membership inference attacks on one data set over all runs, failed ones too, counted over the "
        "workers that share runs_dir: each may reveal something of single subjects",
    )
    figures: Literal["exact", "rounded"] = Field(
        default="exact",
        description="'rounded': in all runs, evaluations leave as sums that one example moves by at most one step, "
        "and no metrics of training leave; 'exact': only in private runs, in secure sums and under a rule of privacy",
    )
    figures_privacy: Budget | None = Field(
        default=None,
        description="privacy of the figures of one evaluation for one example: noise on their rounded sums, in all "
        "runs, which the data set's budgets pay for; no noise if left out",
    )
    send_class_counts: bool = Field(
        default=False,
        description="whether counts leave with an evaluation: of each class and each bin of confidence, the "
        "confusion matrix and binned scores, or sums of numbers and errors, also by the subgroups that a run names; "
        "never under privacy",
    )
    max_model_bytes: Bytes = Field(
        default_factory=half_of_memory,
        description="largest model; half of the worker's memory limit if left out",
    )
    max_upload_bytes: Bytes = Field(default=16 * GIB, description="largest update")
    max_lease_seconds: PositiveFloat = Field(default=3600.0, description="longest lease to accept")
    max_run_upload_bytes: Bytes | None = Field(
        default=None,
        description="largest total upload of one run over all rounds, counted over the workers that share runs_dir",
    )
    max_upload_bytes_per_second: BytesOrRate | None = Field(
        default=None, ge=16_384, description="upload rate limit; none if left out"
    )
    max_minutes_per_day: PositiveFloat | None = Field(
        default=None, description="working time per day of the site's calendar, kept over restarts"
    )
    hours: tuple[Span, ...] = Field(
        default=(), description="when tasks are claimed, by the site's own clock: 'Mon-Fri 19:00-07:00'"
    )
    require_privacy: PrivacyFloor | None = Field(
        default=None, description="minimum differential privacy of runs that train here"
    )
    max_weekly_privacy: Allowance | None = Field(
        default=None, description="privacy budget per data set over all runs in any seven days"
    )
    max_total_privacy: Allowance | None = Field(
        default=None,
        description="privacy budget of all data sets together whose ledgers are in ledger_dir, over all runs",
    )
    approve_runs: bool = Field(
        default=False, description="whether a person must approve each run before its first task"
    )
    airlock: bool = Field(default=False, description="whether a person must release each update before it leaves")
    require_secure_sums: bool = Field(
        default=False, description="whether updates leave only under masks, so that the coordinator cannot read them"
    )
    require_client_privacy: ClientPrivacyFloor | None = Field(
        default=None, description="minimum privacy of this site as a whole, by noise in secure sums"
    )

    @field_validator("hours")
    @classmethod
    def _has_hours(cls, hours: tuple[Span, ...]) -> tuple[Span, ...]:
        # Everywhere else an empty list allows nothing.
        if not hours:
            raise ValueError("is empty; leave it out to work at all hours")
        return hours

    @model_validator(mode="after")
    def _can_be_advertised(self) -> Self:
        try:
            self.advertised_policy({}, 0)
        except ValidationError as fault:
            raise ValueError(
                f"{in_one_line(fault, 'patterns', AdvertisedPolicy)}. Claims carry this rule to the coordinator, and "
                "have no room for more of it: shorten it, for instance by patterns that stand for several names"
            ) from None
        return self

    @property
    def disclosure(self) -> DisclosureRule:
        """The limits on counts of a data set."""
        return DisclosureRule(self.min_subjects, self.count_step)

    def allows_method(self, name: str) -> bool:
        return self.methods is None or name in self.methods

    def allows_dataset(self, name: str) -> bool:
        return self.datasets is None or name in self.datasets

    def advertised_policy(
        self,
        budgets: Mapping[str, UnitBudget],
        utc_offset_minutes: int,
        spent: Mapping[str, float] | None = None,
        total_spent: float | None = None,
        evaluations_left: Mapping[str, int] | None = None,
    ) -> AdvertisedPolicy:
        """Return the part of the policy advertised to the coordinator for planning; it holds no secrets.

        `spent` has the epsilon spent of each data set with a budget, and `total_spent` that of all data sets under
        `max_total_privacy`. `evaluations_left` has the number of further evaluations of each data set.
        """
        floor, total, weekly = self.require_privacy, self.max_total_privacy, self.max_weekly_privacy
        of_site = self.require_client_privacy
        shown = {name: getattr(self, name) for name in AdvertisedPolicy.model_fields if name in Policy.model_fields}
        return AdvertisedPolicy.model_validate(
            {
                **shown,
                "utc_offset_minutes": utc_offset_minutes,
                "require_privacy": plain(floor) if floor else None,
                "require_client_privacy": Budget(epsilon=of_site.epsilon, delta=of_site.delta) if of_site else None,
                "budgets": {name: plain(most) for name, most in budgets.items()},
                # The loss may be unbounded at this delta.
                "spent": {name: min(epsilon, MAX_NUMBER) for name, epsilon in (spent or {}).items() if epsilon},
                "max_weekly_privacy": plain(weekly) if weekly else None,
                "max_total_privacy": plain(total) if total else None,
                "total_spent": min(total_spent, MAX_NUMBER) if total_spent else None,
                "evaluations_left": evaluations_left or {},
            }
        )

    def _withholds(self, block: Block) -> bool:
        return any(matcher(pattern)(block.name) for pattern in self.all_never_sent)

    @property
    def all_never_sent(self) -> tuple[str, ...]:
        return (*self.never_send, *self.never_send_if_present)

    def check_request(self, task: Task, kinds: Sequence[TaskKind]) -> None:
        """Check what applies to a helper's task too: its kind and lease, and the orchestrator and study of its run.
        Raises PolicyViolation."""
        for kind in (task.kind, "describe") if task.describes else (task.kind,):
            require(kind in kinds, "kinds", f"this worker does not {kind}")
        if self.orchestrators is not None and task.orchestrator not in self.orchestrators:
            who = repr(task.orchestrator[:80]) if task.orchestrator else "an unnamed orchestrator"
            raise PolicyViolation("orchestrators", f"runs of {who} are not accepted here")
        detail = f"runs of the study {task.study!r} are not accepted here"
        require(self.studies is None or task.study in self.studies, "studies", detail)
        lease, longest = task.lease_seconds, self.max_lease_seconds
        detail = f"a lease of {lease} s is longer than the {longest} s allowed"
        require(lease <= longest, "max_lease_seconds", detail)

    def check_task(self, task: Task, kinds: Sequence[TaskKind]) -> None:
        """Check a task on data before a version is fetched for it. Raises PolicyViolation."""
        self.check_request(task, kinds)
        method, dataset = task.method.name, task.dataset
        require(self.allows_method(method), "methods", f"the method {method[:80]!r} is not allowed here")
        require(self.allows_dataset(dataset), "datasets", f"runs may not use the data set {dataset!r}")
        noise = self.figures_privacy
        if self.require_privacy:
            self.require_privacy.check(task, noise)
        if self.max_total_privacy:
            self.max_total_privacy.check(task, noise, rule="max_total_privacy")
        if self.max_weekly_privacy:
            self.max_weekly_privacy.check(task, noise, rule="max_weekly_privacy")
        if (of_site := self.require_client_privacy) and not task.trains:
            detail = "this site requires privacy for itself as a whole, and a version's figures have no noise"
            require(of_site.evaluations, "require_client_privacy", detail)

    def check_unmasked(self) -> None:
        """Check that updates may leave without secure sums. Raises PolicyViolation."""
        detail = "the run has no secure sums, so that the coordinator could read the update"
        require(not self.require_secure_sums, "require_secure_sums", detail)
        detail = "the run has no secure sums, so that this site could not add the noise itself"
        require(self.require_client_privacy is None, "require_client_privacy", detail)

    def check_epochs(self, epochs: int) -> None:
        most = self.max_epochs
        require(epochs <= most, "max_epochs", f"{epochs} epochs are more than the {most} allowed")

    def check_work(self, training: Training, units: int, *, in_exact_sum: bool) -> None:
        """Check that an update does not come from too few of the examples, or groups. Raises PolicyViolation."""
        least = max(self.min_batch or 0, LEAST_BATCH_IN_SUM if in_exact_sum else 0)
        detail = f"a task of less than one pass over the data, with batches of fewer than {least}, shows a few"
        require(not trains_on_few(training, units, least), "min_batch", detail)

    def check_batch(self, size: int | None, units: int, examples_per_unit: int = 1) -> None:
        """Check the batch size; one batch of everything if `size` is None. `units` are examples, or groups of at
        most `examples_per_unit` each. Raises PolicyViolation."""
        largest, most = min(size or units, units) * examples_per_unit, self.max_batch
        require(largest <= most, "max_batch", f"a batch of {largest} is more than the {most} allowed")

    def check_measured(self, examples: int) -> None:
        least = self.min_evaluation_examples
        detail = f"metrics of {examples} examples reveal too much of each; at least {least} are required"
        require(examples >= least, "min_evaluation_examples", detail)

    def check_measurements(self, dataset: str, times: int, of_run: int) -> None:
        """Check the numbers of evaluations on a data set and in a run, including the one about to start."""
        most = self.max_evaluations
        detail = f"{most} versions were measured on the data set {dataset!r}, the most that the policy allows"
        require(times <= most, "max_evaluations", detail)
        most = self.max_run_evaluations
        detail = f"{most} versions of the run were measured here, the most that the policy allows"
        require(of_run <= most, "max_run_evaluations", detail)

    def check_duration(self, seconds: float) -> None:
        most = self.max_task_seconds
        require(seconds <= most, "max_task_seconds", f"the task takes longer than the {most:g} s allowed")

    def check_day(self, used_seconds: float) -> None:
        """Check today's working time. Raises PolicyViolation."""
        if (most := self.max_minutes_per_day) is not None:
            detail = f"the {most:g} minutes of this day are used up"
            require(used_seconds <= 60 * most, "max_minutes_per_day", detail)

    def check_run_upload(self, nbytes: int) -> None:
        """Check the total upload of a run, including the update about to leave. Raises PolicyViolation."""
        if (most := self.max_run_upload_bytes) is not None:
            detail = f"the run's updates would total {nbytes} bytes, more than the {most} allowed"
            require(nbytes <= most, "max_run_upload_bytes", detail)

    def check_model_type(self, model_type: str) -> None:
        allowed = self.models is None or model_type in self.models
        require(allowed, "models", f"the model type {model_type[:80]!r} is not allowed here")

    def check_model(self, nbytes: int, what: str = "a model") -> None:
        """Check the size of a model, or of the server state that a plan fetches. Raises PolicyViolation."""
        most = self.max_model_bytes
        require(nbytes <= most, "max_model_bytes", f"{what} of {nbytes} bytes is larger than the {most} allowed")

    def check_tied(self, asked: Iterable[Block], tied: Mapping[str, Iterable[str]]) -> None:
        """Check the blocks that a plan uploads by the further names of their tensors. Raises PolicyViolation."""
        names = [(name, block) for block in asked for name in tied.get(block.tensor, ())]
        if refused := [f"{name} ({block.name})" for name, block in names if self._withholds(_named(block, name))]:
            raise PolicyViolation("never_send", f"these blocks never leave: {_listed(refused)}")

    def check_effect(self, blocks: Sequence[Block], further: Iterable[str] | None = None) -> None:
        """Check that each rule about blocks that never leave is about some block of a model. `further` has names
        that are in no table of blocks; None if they are unknown. Raises PolicyViolation."""
        for rule, detail in ineffective(self.never_send, self.may_send, blocks, further):
            raise PolicyViolation(rule, detail)

    def check_upload(self, asked: Iterable[Block]) -> None:
        """Check the blocks that a plan uploads. Raises PolicyViolation naming them."""
        blocks = tuple(asked)
        if refused := [block.name for block in blocks if self._withholds(block)]:
            raise PolicyViolation("never_send", f"these blocks never leave: {_listed(refused)}")
        if refused := [block.name for block in blocks if not self.may_send.holds(block)]:
            raise PolicyViolation("may_send", f"these blocks may not leave: {_listed(refused)}")

    def check_plan(
        self,
        blocks: Sequence[Block],
        asked: Sequence[Block],
        tied: Mapping[str, Iterable[str]],
        further: Iterable[str] = (),
    ) -> None:
        """Check the blocks that a plan uploads, of a model's `blocks`, by all names of its tied tensors. `further`
        has names in no table. Raises PolicyViolation."""
        self.check_effect(blocks, {*(name for names in tied.values() for name in names), *further})
        self.check_upload(asked)
        self.check_tied(asked, tied)

    def check_private(self, asked: Iterable[Block]) -> None:
        """Raise PolicyViolation for blocks of the plan that the method keeps at the site."""
        if refused := [block.name for block in asked]:
            raise PolicyViolation("private", f"the method keeps these at the site: {_listed(refused)}")

    def check_egress(self, names: Iterable[str], nbytes: int, asked: Sequence[Block], kept: Iterable[str]) -> None:
        """Check the names in an update file against the plan, the policy and the method's private state.

        Raises PolicyViolation.
        """
        names = set(names)
        if unasked := names - {block.name for block in asked}:
            raise PolicyViolation("plan", f"the plan does not include {_listed(unasked)}")
        self.check_upload(block for block in asked if block.name in names)
        if private := names & set(kept):
            raise PolicyViolation("vault", f"the method keeps these and sends them too: {_listed(private)}")
        if nbytes > self.max_upload_bytes:
            raise PolicyViolation(
                "max_upload_bytes", f"an update of {nbytes} bytes is larger than the {self.max_upload_bytes} allowed"
            )


def _named(block: Block, tensor: str) -> Block:
    return block.model_copy(update={"tensor": tensor})


def plain(budget: PrivacyFloor | UnitBudget) -> UnitBudget:
    """Return the bound on the privacy loss, without a site's other terms."""
    return UnitBudget(epsilon=budget.epsilon, delta=budget.delta, unit=budget.unit)


def _listed(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:SHOWN]) + (f" and {len(ordered) - SHOWN} more" if len(ordered) > SHOWN else "")
