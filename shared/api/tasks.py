"""Tasks: a worker's claims, reports of progress and submissions."""

from __future__ import annotations

import json
import operator
from collections.abc import Hashable, Mapping
from datetime import datetime
from functools import cached_property
from typing import Annotated, Any, Literal, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_serializer,
    field_validator,
    model_validator,
)

from tessera.shared.aggregation.mean import Normalization
from tessera.shared.aggregation.robust import Mean, Robust
from tessera.shared.aggregation.server_optimizer import NoOptimizer, ServerOptimizer
from tessera.shared.api.class_counts import MAX_CLASSES, Counts, SubgroupCounts
from tessera.shared.api.descriptions import Description
from tessera.shared.api.membership import MembershipCounts
from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.api.secure_sums import HELPER_KINDS, MAX_STATEMENT_BYTES, SecureSums, SumTask
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.blocks import Block, Name
from tessera.shared.model.dataset_schema import DatasetSchema
from tessera.shared.model.selectors import EVERYTHING, Selector, matcher
from tessera.shared.problems import ProblemDocument
from tessera.shared.run_settings import Budget, ClientPrivacy, Privacy, Span, Training, UnitBudget, is_weak
from tessera.shared.schema import (
    ACCEPTED,
    DEFAULT_STUDY,
    MAX_CLAIM_BYTES,
    MAX_HELD,
    MAX_INLINE_BLOBS,
    MAX_LOG_EVENTS,
    MAX_PATTERN_STARS,
    MAX_PATTERNS,
    MAX_WITHHELD,
    MAX_WITHHELD_TERMS,
    PROTOCOL,
    SCORED_LABELS,
    AuditHead,
    Counted,
    Digest,
    Evaluated,
    Examples,
    Identifier,
    Label,
    LeaseSeconds,
    Measured,
    Message,
    Number,
    Phase,
    Reported,
    Resources,
    Rounds,
    Seed,
    Short,
    ShortText,
    TaskKind,
    TaskState,
    Value,
)
from tessera.shared.secure_sums.messages import SiteKeys
from tessera.shared.tensors.lazy import digest_of

ClassName = Annotated[str, Field(min_length=1, max_length=256)]
"""A class of the model, as `id2label` of its config names it."""


class Progress(Message):
    """A worker's progress with its task, as reported by the worker.

    `step` of `steps` while it trains or evaluates, `bytes` of `total_bytes` while it moves some; `loss` is the mean
    over the examples of the epoch so far.
    """

    phase: Phase
    activity: ShortText | None = None
    """Work that precedes the first step of the phase."""
    step: Counted | None = None
    steps: Counted | None = None
    loss: Number | None = None
    bytes: Counted | None = None
    total_bytes: Counted | None = None
    phase_seconds: dict[Phase, Annotated[float, Field(ge=0, lt=1 << 31)]] = {}
    """Time in each phase so far, in the order in which they began."""
    held_since: AwareDatetime | None = None
    """The instant from which on the finished update has waited for a person at its site to release it."""

    @property
    def doing(self) -> str:
        """The activity, or else the phase, for people."""
        return self.activity or ("held for release" if self.phase == "held" else self.phase)

    @property
    def seconds_left(self) -> float | None:
        """The estimated time until the last step of the phase, at its pace so far; None if it is unknown."""
        took = self.phase_seconds.get(self.phase)
        return took * max(0, self.steps - self.step) / self.step if took and self.steps and self.step else None


class LogEvent(Message):
    """A line of a worker's log tail: which step began or ended when, never a figure or a text."""

    at: datetime
    event: Phase | Literal["started", "claimed", "done", "failed", "given-back", "dropped", "refused"]
    run: Label | None = None
    round: Annotated[int, Field(ge=0, lt=1 << 31)] | None = None


class LiveValues(Message):
    """The state of a worker's machine at a heartbeat, for people only. Omitted values are unknown or not shown."""

    started_at: datetime | None = None
    cpus: Annotated[int, Field(ge=1, lt=1 << 20)] | None = None
    cpu_load: Measured | None = None
    """Processes that run or wait for a processor, as the mean of a minute."""
    memory_bytes: Counted | None = None
    memory_used_bytes: Counted | None = None
    """By this worker."""
    gpu_name: ShortText = ""
    gpu_memory_bytes: Counted | None = None
    gpu_memory_used_bytes: Counted | None = None
    """By all processes."""
    gpu_use: Annotated[float, Field(ge=0, le=1)] | None = None
    disk_free_bytes: Counted | None = None
    download_bytes_per_second: Measured | None = None
    upload_bytes_per_second: Measured | None = None
    log: tuple[LogEvent, ...] | None = Field(default=None, max_length=MAX_LOG_EVENTS)
    """The latest events, oldest first; None unless the site allows it."""


def _or_nothing(value: object, validate: ValidatorFunctionWrapHandler) -> Any:
    """Return None for an unreadable value that nothing depends on: it must not cost a worker its task or lease."""
    try:
        return validate(value)
    except ValidationError:
        return None


Shown = WrapValidator(_or_nothing)


class Receipt(Message):
    """The fate of an accepted update: merged or left out, and no more. While its round is under way it is still
    `accepted`."""

    task: Identifier
    token: int
    state: Literal["accepted", "merged", "left_out"]
    unmerged: tuple[Name, ...] = ()
    """The blocks of a merged update that stayed as they were in the version."""


class TaskView(Message):
    """A task as people see it."""

    id: str
    run: str
    round: int
    worker: str
    kind: TaskKind
    state: TaskState
    token: int
    attempts: int
    examples: int | None = None
    metrics: dict[str, float] = {}
    upload_bytes: int = 0
    download_bytes: int = 0
    progress: Progress | None = None
    layers: tuple[str, ...] = ()
    """Of which layers the accepted update holds blocks."""
    update: str | None = None
    """The digest of the submitted update."""
    merged_in: int | None = None
    """The version to which its update was assigned, once that version's round has closed; hidden from its site."""
    unmerged: tuple[str, ...] = ()
    """The blocks of a merged update that stayed as they were in the version."""
    receipt: Receipt | None = None
    """For the task's site, to which the state of an accepted task stays `accepted`."""
    audit_head: str | None = None
    """The last entry of the site's own audit chain when this was sent, if the worker reported it."""
    created_at: datetime | None = None
    problem: ProblemDocument | None = None

    @property
    def held_since(self) -> datetime | None:
        """The instant since which its finished update waits for a release at its site; None unless it does."""
        return self.progress.held_since if self.state == "leased" and self.progress else None

    @property
    def is_accepted(self) -> bool:
        """Return True if its report was accepted, even if it was left out later."""
        return self.state in ACCEPTED


# ---------------------------------------------------------------- tasks


NamePattern = Annotated[str, Field(max_length=256)]


class AdvertisedPolicy(Message):
    """The part of a site's policy that helps to plan: what may leave, how much, when, for whom. It binds neither
    side: the worker judges each task itself."""

    orchestrators: tuple[Short, ...] | None = Field(default=None, max_length=256)
    studies: tuple[Label, ...] | None = Field(default=None, max_length=256)
    models: tuple[Short, ...] | None = Field(default=None, max_length=256)
    may_send: Selector = EVERYTHING
    never_send: tuple[NamePattern, ...] = Field(default=(), max_length=MAX_PATTERNS)
    never_send_if_present: tuple[NamePattern, ...] = Field(default=(), max_length=MAX_PATTERNS)
    max_epochs: PositiveInt = 1 << 53
    max_batch: PositiveInt = 1 << 53
    min_batch: PositiveInt | None = None
    max_model_bytes: PositiveInt = 1 << 53
    max_upload_bytes: PositiveInt = 1 << 53
    max_run_upload_bytes: PositiveInt | None = None
    max_upload_bytes_per_second: PositiveFloat | None = None
    max_task_seconds: PositiveFloat | None = None
    max_minutes_per_day: PositiveFloat | None = None
    hours: tuple[Span, ...] = Field(default=(), max_length=64)
    utc_offset_minutes: Annotated[int, Field(gt=-1440, lt=1440)] = 0
    """The site's offset from UTC, in minutes."""
    require_privacy: UnitBudget | None = None
    require_secure_sums: bool = False
    embeddings_in_sums: bool = False
    """True if it sends rows of single tokens to secure sums without noise."""
    require_client_privacy: Budget | None = None
    """The most that a run's secure sums may reveal about the site as a whole."""
    budgets: dict[Label, UnitBudget] = Field(default={}, max_length=256)
    """Privacy budget for all runs together, by data set."""
    spent: dict[Label, PositiveFloat] = Field(default={}, max_length=256)
    """The least budget, at the same delta, that holds the privacy spent of those data sets so far."""
    max_weekly_privacy: UnitBudget | None = None
    """Privacy budget for all runs together in any seven days, of each data set. The part that is spent is not
    shown."""
    max_total_privacy: UnitBudget | None = None
    """Privacy budget for all runs and all data sets of the site together."""
    total_spent: PositiveFloat | None = None
    """The least budget, at the same delta, that holds what runs have found out so far of all of them."""
    approve_runs: bool = False
    airlock: bool = False
    own_script: bool = False
    """True if a script of the site's own trains, which counts as not private."""
    figures: Literal["exact", "rounded"] = "exact"
    figures_privacy: Budget | None = None
    """The privacy of one evaluation's figures for one example."""
    max_run_evaluations: PositiveInt | None = None
    evaluations_left: dict[Label, NonNegativeInt] = Field(default={}, max_length=256)
    """The versions that may still be measured on a data set over all runs, if fewer than one run may measure."""

    @model_validator(mode="after")
    def _soon_judged(self) -> Self:
        conditions = (*self.may_send.include, *self.may_send.exclude)
        patterns = (*self.all_never_sent, *(name for match in conditions for name in match.names or ()))
        if len(conditions) + len(patterns) > MAX_PATTERNS:
            raise ValueError(
                f"never_send, never_send_if_present and may_send have {len(conditions) + len(patterns)} patterns and "
                f"conditions together; at most {MAX_PATTERNS} are taken"
            )
        for pattern in patterns:
            if pattern.count("*") > MAX_PATTERN_STARS:
                raise ValueError(f"{pattern[:80]!r} has more than {MAX_PATTERN_STARS} stars")
            # Compiled in the time of the caller that declares it.
            matcher(pattern)
        return self

    def withholds(self, block: Block) -> bool:
        return any(matcher(pattern)(block.name) for pattern in self.all_never_sent)

    @cached_property
    def judgements(self) -> dict[Hashable, Any]:
        """A planner's findings about this policy, kept as long as the policy is."""
        return {}

    @property
    def all_never_sent(self) -> tuple[str, ...]:
        return (*self.never_send, *self.never_send_if_present)

    @property
    def rounds_figures(self) -> bool:
        """True if figures over examples leave rounded in all runs, on all data sets."""
        rules = (self.require_privacy, self.require_client_privacy, self.max_weekly_privacy, self.max_total_privacy)
        return self.figures == "rounded" or self.require_secure_sums or any((self.figures_privacy, *rules))


LiveTerms = Annotated[dict[Short, float], Field(max_length=8)]
"""Terms of a run that may change while it lives, by name."""


LEFT_OUT = "Tessera-Left-Out"
"""The header of an answer without a task that says which run leaves the worker out because its version is too old."""


class Claim(Message):
    """A worker's request for a task, with its capabilities. `datasets` gives the number of training examples of each
    data set, and `held_out` the number that it reserves for evaluation.

    `instance` is new for each process: a process that asks again because an answer was lost gets the same lease
    again; a second process with the same name does not. A process takes over that of a killed one whose training it
    resumes. `state_id` and `started_at` distinguish a restarted worker from another one of the same name.
    """

    worker: Label
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    state_id: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] | None = None
    """The random id of its state folder; None of a worker without one."""
    started_at: NonNegativeFloat = 0.0
    """Start of the process by its machine's clock: of two copies of a state folder, the later one is the worker."""
    protocol_min: int = PROTOCOL
    protocol_max: int = PROTOCOL
    kinds: tuple[TaskKind, ...] = Field(default=("train",), max_length=8)
    datasets: Examples = Field(max_length=256)
    held_out: Examples = Field(default={}, max_length=256)
    schemas: dict[Label, DatasetSchema] = Field(default={}, max_length=256)
    """The inputs and the number of classes of each data set, as far as the site's settings fix them."""
    methods: tuple[Short, ...] = Field(default=(), max_length=256)
    augments: bool = False
    """True if it can change images in training, for which it needs an extra."""
    device: ShortText = "cpu"
    version: ShortText = ""
    """Of the worker's own code; none of a worker that does not say."""
    resources: Resources = {}
    advertised_policy: AdvertisedPolicy | None = None
    site_keys: SiteKeys | None = None
    """The site's public keys for secure sums, if it takes part in them."""
    withheld: dict[Identifier, Annotated[str, Field(max_length=300)]] = Field(default={}, max_length=MAX_WITHHELD)
    """Runs that it is to be offered no task of, and why."""
    withheld_terms: dict[Identifier, Annotated[tuple[LiveTerms, ...], Field(max_length=MAX_WITHHELD_TERMS)]] = Field(
        default={}, max_length=MAX_WITHHELD
    )
    """The terms of those that are withheld on these terms only: the worker takes the run once it has others."""
    holding: tuple[Identifier, ...] = Field(default=(), max_length=MAX_HELD)
    """Tasks whose finished updates wait for release: their leases last, and it asks for another task."""

    def document(self) -> str:
        """Return the claim as JSON without defaults, except for the protocol's, which differ between versions."""
        spoken = {"protocol_min": self.protocol_min, "protocol_max": self.protocol_max}
        return json.dumps(self.model_dump(mode="json", exclude_defaults=True) | spoken, separators=(",", ":"))

    def shortened(self) -> Claim:
        """Return the claim without its dispensable parts, if it is longer than a coordinator takes: first the reasons
        why runs are withheld, and on which terms, then the names of classes, the schemas and the advertised policy,
        which only help to plan."""
        nameless = {name: schema.model_copy(update={"class_names": ()}) for name, schema in self.schemas.items()}
        changes: tuple[dict[str, object], ...] = (
            {"withheld": dict.fromkeys(self.withheld, "withheld")},
            {"withheld_terms": {}},
            {"schemas": nameless},
            {"schemas": {}},
            {"advertised_policy": None},
        )
        claim = self
        for change in changes:
            if len(claim.model_dump_json().encode()) <= MAX_CLAIM_BYTES:
                break
            claim = claim.model_copy(update=change)
        return claim


Unlimited = Literal["unlimited"]

WORK_FACTOR = 4.0
"""Default limit on a site's fitted number of steps, as a multiple of the steps of `training`."""


MAX_STALENESS = 10
"""Default limit on the versions made since the base version of a buffered update."""


class CohortTerms(Message):
    """A run's rules of cohorts (`shared.api.runs.Cohort`), without the names of other sites."""

    mode: Literal["barrier", "buffer"] = Field(default="barrier", exclude_if="barrier".__eq__)
    max_staleness: PositiveInt = Field(default=MAX_STALENESS, exclude_if=MAX_STALENESS.__eq__)
    staleness: Literal["sqrt", "none"] = Field(default="sqrt", exclude_if="sqrt".__eq__)
    memory: bool = Field(default=False, exclude_if=operator.not_)
    mixing: PositiveFloat | None = Field(default=None, exclude_if=operator.not_)
    max_updates_per_site: PositiveInt | None = Field(default=None, exclude_if=operator.not_)
    size: PositiveInt | None = None
    workers_per_site: PositiveInt = 1
    target_updates: PositiveInt | None = None
    quorum: PositiveInt = 1
    deadline_seconds: PositiveFloat = 3600
    work: Literal["fixed", "fitted"] = Field(default="fixed", exclude_if="fixed".__eq__)
    work_factor: Annotated[float, Field(gt=1, le=1000)] = Field(default=WORK_FACTOR, exclude_if=WORK_FACTOR.__eq__)
    invited: NonNegativeInt | None = None
    """The number of sites that may take part; None for all."""
    invited_digest: Digest | None = None
    """Of their names: two runs that invite others have other terms."""


class ParentRun(Value):
    """The parent's run that a region's run is a part of, as the region's operator states it."""

    coordinator: Annotated[str, Field(pattern=r"^https?://[!-~]+$", max_length=256)] = Field(
        description="the parent coordinator's URL"
    )
    run: Identifier = Field(description="the parent's run")
    orchestrator: Annotated[str, Field(pattern=r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e]*$", max_length=64)] | None = (
        Field(default=None, description="who started the parent's run, as the parent coordinator says")
    )
    terms: Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")] = Field(
        description="digest of the terms of the parent's run, as its task states them"
    )


MERGING = (
    "cohort", "robust", "server_optimizer", "max_examples", "max_update_norm", "max_norm_of_median",
)  # fmt: skip
"""Fields of a task that say which sites a round asks, and how their updates are merged."""

ALIKE = frozenset(
    {
        "rounds", "method", "plan", "dataset", "training", "privacy", "client_privacy", "codec", "secure_sums",
        "upload_budget", "upload_seconds", "normalization", "model", "seed", "describe", *MERGING,
    }
)  # fmt: skip
"""Fields of a training task that decide what is trained and sent. In a secure sum they are the same for all sites: if
the others got a learning rate of almost zero, the sum would be one site's update."""


class NamedTask(Message):
    """The part of a task by which a worker reports that it cannot read the rest."""

    id: Identifier
    token: Annotated[int, Field(ge=0, lt=1 << 53)]


class Task(Message):
    """One worker's work in one round. A report on it must carry its `token`."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    id: Identifier
    token: Annotated[int, Field(ge=0, lt=1 << 53)]
    kind: TaskKind
    run: Identifier
    run_name: Label
    study: Label = Field(default=DEFAULT_STUDY, exclude_if=DEFAULT_STUDY.__eq__)
    round: NonNegativeInt
    rounds: Rounds
    seed: Seed
    method: MethodSpec
    plan: Plan
    dataset: Label
    held_out: bool = False
    """True to evaluate on the worker's held-out examples of the data set, rather than on the data set."""
    ignore: tuple[ClassName, ...] = Field(default=(), max_length=MAX_CLASSES)
    """The classes that the macro F1 of an evaluation leaves out."""
    subgroups: Label | None = Field(default=None, exclude_if=operator.not_)
    """The column by whose values an evaluation counts."""
    max_new_tokens: Annotated[int, Field(ge=0, le=1024)] = Field(default=0, exclude_if=operator.not_)
    """The most tokens that a language model generates for each chat of an evaluation."""
    describe: bool = Field(default=False, exclude_if=operator.not_)
    """True to send a description of the data set into a secure sum, in place of training."""
    training: Training
    privacy: Privacy | None = None
    client_privacy: ClientPrivacy | None = None
    """The run's bound on the information about one site in all versions together. With `honest_sites` the site clips
    its update and adds its share of the noise; without, the coordinator says that it does, which no worker can
    verify."""
    codec: str
    secure_sums: SecureSums | None = None
    """The run's settings of secure sums."""
    sums: SumTask | None = None
    """The terms of the round's secure sum, and a helper's part in it."""
    upload_budget: PositiveInt | None = None
    upload_seconds: PositiveFloat | None = None
    normalization: Normalization
    cohort: CohortTerms = CohortTerms()
    robust: Robust = Mean()
    server_optimizer: ServerOptimizer = NoOptimizer()
    max_examples: PositiveInt | Unlimited | None = None
    max_update_norm: float | None = None
    max_norm_of_median: float | Unlimited | None = None
    """With those above, how the run chooses sites and merges their updates. The worker cannot verify it, and needs it
    for the approval of a run: versions that differ in this alone would show single updates."""
    keep_updates: Literal["round", "run"] = "round"
    """The time that the coordinator keeps updates, by its word: until after their round, or as long as the run."""
    parent: ParentRun | None = Field(default=None, exclude_if=operator.not_)
    """The run that gets the mean of the region's updates; None if the coordinator is no region's."""
    model: Digest
    version: VersionRef
    inline_bytes: NonNegativeInt = 0
    """Size up to which an update may be sent with its submission."""
    stream_bytes: NonNegativeInt = 0
    """Size up to which an update may be sent behind its submission (`shared.api.framing`), never whole in memory."""
    orchestrator: Annotated[str, Field(max_length=64)] | None = None
    """Name of the token that started the run. The coordinator asserts it; the worker cannot verify it."""
    lease_seconds: LeaseSeconds
    receipt: Receipt | None = None
    """Of the last update that was accepted from this worker in this run."""
    audit_head: Annotated[AuditHead | None, Shown] = None
    """The head that the worker reported with the result of its latest accepted task, of any run: its own audit has
    that entry, unless it is an older copy."""
    inline_blobs: Annotated[tuple[bytes, ...], Field(max_length=MAX_INLINE_BLOBS)] = ()
    """Blobs that need not be fetched any more: what is new in the version, where that is little. A worker goes by the
    digests of these bytes, and by nothing else."""

    @field_serializer("robust", "server_optimizer")
    def _with_its_name(self, rule: BaseModel) -> dict[str, Any]:
        # Also where a message leaves defaults out, among which the names are.
        return rule.model_dump(mode="json")

    @model_validator(mode="after")
    def _within_the_run(self) -> Self:
        if self.round > self.rounds:
            raise ValueError(f"there is no round {self.round} in a run of {self.rounds}")
        if self.held_out and self.kind != "evaluate":
            raise ValueError("no task trains on held-out examples")
        if self.describe and (self.kind not in ("train", *HELPER_KINDS) or self.secure_sums is None):
            raise ValueError("describe is for the round of a run with secure_sums")
        return self

    @property
    def local_training(self) -> Training:
        """The settings of local training, with the plan's own number of steps."""
        return self.training.of_steps(self.plan.steps)

    @property
    def trains(self) -> bool:
        """True if it trains by its plan, or rehearses that."""
        return self.kind in ("train", "rehearse") and not self.describe

    @property
    def trainings(self) -> int:
        """The most versions from which a site trains in the run."""
        return min(self.rounds, self.cohort.max_updates_per_site or self.rounds)

    @property
    def describes(self) -> bool:
        """True if it describes a data set, alone or in a secure sum."""
        return self.kind == "describe" or (self.kind == "train" and self.describe)

    @property
    def in_exact_sum(self) -> bool:
        """True if the update goes into a secure sum without noise of the sites, or with too little to count."""
        return self.secure_sums is not None and is_weak(self.client_privacy)

    @property
    def is_covered(self) -> bool:
        """True if its course may reveal nothing of an example: under differential privacy, and in secure sums. A
        helper's tasks use no examples."""
        covered = self.privacy is not None or self.secure_sums is not None or self.sums is not None
        return covered and self.kind not in HELPER_KINDS

    @property
    def alike_digest(self) -> Digest:
        """The digest of the fields that are the same for all sites of a round with secure sums."""
        fields = self.model_dump(mode="json", include=set(ALIKE))
        return digest_of(json.dumps(fields, sort_keys=True, separators=(",", ":")).encode())


class Heartbeat(Message):
    token: int
    progress: Annotated[Progress | None, Shown] = None
    live: Annotated[LiveValues | None, Shown] = None


class Release(Heartbeat):
    """An unfinished task that its worker returns, and why, unless it was asked to stop."""

    code: str | None = Field(default=None, max_length=64)
    detail: str = Field(default="", max_length=2000)


class Lease(Message):
    lease_seconds: LeaseSeconds


class Submission(Message):
    """A finished `train` task: the digest of an update, and what goes with it. The update was uploaded before or, if
    the task says that so few bytes may be, is here."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    token: int
    version: Digest
    update: Digest
    data: bytes | None = None
    examples: PositiveInt = Field(lt=1 << 40)
    envelope: Annotated[str, Field(max_length=MAX_STATEMENT_BYTES)] | None = None
    """For secure sums: the signed envelope of the masked update, as JSON."""
    metrics: Reported = {}
    download_bytes: NonNegativeInt = Field(default=0, lt=1 << 53)
    audit_head: AuditHead | None = None
    progress: Annotated[Progress | None, Shown] = None


class EvaluationResult(Message):
    """A finished `evaluate` task."""

    token: int
    version: Digest
    examples: PositiveInt = Field(lt=1 << 40)
    metrics: Evaluated
    """With the number of scored labels where it is not that of the examples, as `labels`."""
    class_counts: Counts | None = None
    """Of a site that permits them."""
    subgroup_counts: SubgroupCounts = {}
    """Likewise, by the value of the run's subgroup column."""
    download_bytes: NonNegativeInt = Field(default=0, lt=1 << 53)
    audit_head: AuditHead | None = None
    progress: Annotated[Progress | None, Shown] = None

    @field_validator("metrics")
    @classmethod
    def _counts_labels(cls, metrics: dict[str, float]) -> dict[str, float]:
        labels = metrics.get(SCORED_LABELS, 1.0)
        if not (1 <= labels < 1 << 40 and labels.is_integer()):
            raise ValueError(f"{SCORED_LABELS} is the number of scored labels, a whole number from 1 to 2^40 - 1")
        return metrics

    @model_validator(mode="after")
    def _counts_each_label(self) -> Self:
        scored = self.metrics.get(SCORED_LABELS, self.examples)
        if self.class_counts and self.class_counts.total != scored:
            raise ValueError(f"class_counts has {self.class_counts.total} labels, of {scored:g} that were scored")
        if len(sizes := {len(each.labels) for each in self.subgroup_counts.values()}) > 1:
            raise ValueError(f"subgroup_counts are of different numbers of classes: {sorted(sizes)}")
        if sum(each.total for each in self.subgroup_counts.values()) > scored:
            raise ValueError(f"subgroup_counts has more labels than the {scored:g} that were scored")
        return self


REPORTS: Mapping[str, str] = {"describe": "description", "rehearse": "rehearsal", "attack": "membership"}
"""The names of sites' reports, by the kind of task of a run without rounds."""


class ReportResult(Message):
    """A finished task of a run without rounds: the description of a data set, or the report on a rehearsal or on a
    membership inference attack."""

    token: int
    description: Description | None = None
    rehearsal: Rehearsal | None = None
    membership: MembershipCounts | None = None
    audit_head: AuditHead | None = None
    progress: Annotated[Progress | None, Shown] = None

    @model_validator(mode="after")
    def _reports_one_thing(self) -> Self:
        if len(self._reports) != 1:
            raise ValueError(f"send one of {', '.join(REPORTS.values())}")
        return self

    @property
    def _reports(self) -> list[tuple[str, Message]]:
        found = ((kind, getattr(self, name)) for kind, name in REPORTS.items())
        return [(kind, report) for kind, report in found if report is not None]

    @property
    def of_kind(self) -> tuple[str, Message]:
        """The kind of task, and its report."""
        return self._reports[0]


class Failure(Message):
    token: int
    code: str = Field(max_length=64)
    detail: str = Field(max_length=2000)
