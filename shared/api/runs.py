"""Runs: their settings, rounds, previews and measurements. No message has a place for a site's own values."""

import operator
from collections.abc import Mapping
from datetime import datetime
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import (
    ConfigDict,
    Field,
    PositiveFloat,
    PositiveInt,
    field_validator,
    model_validator,
)

from tessera.shared.aggregation.mean import Normalization
from tessera.shared.aggregation.robust import Mean, Robust
from tessera.shared.aggregation.server_optimizer import NoOptimizer, ServerOptimizer
from tessera.shared.api.class_counts import MAX_CLASSES, Counts, SubgroupCounts
from tessera.shared.api.cohort import Cohort, DeadlineSeconds
from tessera.shared.api.descriptions import Description
from tessera.shared.api.membership import MembershipCounts
from tessera.shared.api.refusals import OTHER_CODEC, check_settings
from tessera.shared.api.rehearsals import Rehearsal
from tessera.shared.api.secure_sums import SecureSums
from tessera.shared.api.tasks import ClassName, ParentRun, TaskView, Unlimited
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.near_names import did_you_mean
from tessera.shared.problems import ProblemDocument
from tessera.shared.run_settings import ClientPrivacy, Privacy, Training, is_weak
from tessera.shared.schema import (
    DEFAULT_STUDY,
    SCORED_LABELS,
    Bytes,
    Condition,
    Digest,
    Label,
    Message,
    Rounds,
    RoundState,
    RunState,
    Seed,
    TaskKind,
    TaskState,
    Value,
)
from tessera.shared.secure_sums.messages import MAX_SENDERS, MOST_SENDERS, tolerance_of
from tessera.shared.updates.codecs import pipeline

# ---------------------------------------------------------------- runs

MAX_NEW_TOKENS = 1024
"""Limit on the tokens of a generated answer: each takes a forward pass."""


class Evaluation(Value):
    """Data on which new versions are measured: a central data set, each site's held-out examples, or both."""

    dataset: Label | None = Field(default=None, description="central: a worker that holds this data set evaluates")
    sites: bool = Field(default=False, description="each site that trains evaluates on its held-out examples")
    every: PositiveInt = Field(default=1, description="rounds between evaluations; the last version always counts")
    ignore: tuple[ClassName, ...] = Field(
        default=(),
        max_length=MAX_CLASSES,
        description='classes of the model that macro F1 leaves out, such as ["O"] for tokens of no entity',
    )

    subgroups: Label | None = Field(
        default=None,
        description="column of the sites' data sets, such as sex: figures of a classifier also for each of its "
        "values that a site's settings name",
        exclude_if=operator.not_,
    )
    specificity: tuple[Annotated[float, Field(gt=0, lt=1)], ...] = Field(
        default=(0.9,),
        max_length=4,
        description="specificities at which the sensitivity to each class is reported",
    )
    max_new_tokens: int = Field(
        default=0,
        ge=0,
        le=MAX_NEW_TOKENS,
        description="tokens that a language model generates for each chat at most, for exact match and ROUGE-L",
        exclude_if=operator.not_,
    )

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if self.dataset is None and not self.sites:
            raise ValueError("name a central dataset, or set sites, or leave evaluation out")
        return self

    def due(self, number: int, rounds: int) -> bool:
        """Return True if version `number` of a run of `rounds` rounds is measured."""
        return number % self.every == 0 or number == rounds

    def versions(self, rounds: int) -> int:
        """Return the number of measured versions of a run of `rounds` rounds."""
        return rounds // self.every + 1 + (rounds % self.every > 0)


class Signals(Value):
    """Measurements of each round that no method needs."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(("every",), lambda signals: signals.drift, "drift to true"),
    )

    drift: bool = Field(
        default=False,
        description="measure for each role of blocks how far sites move and disagree, with any method; reads the "
        "updates once more",
    )
    every: PositiveInt = Field(default=1, description="rounds from one measurement to the next")


class Bounds(Message):
    """Limits on one site's influence in a round; None for no limit."""

    max_examples: PositiveInt | None = None
    max_norm_of_median: float | None = None
    median_norm: float = 0.0
    """The largest median norm of any round so far: where a run converges, a site that returns may move further than
    the others without being an attacker. Norms are as the method scales them (`CoordinatorHalf.step_scale`)."""

    @property
    def summary(self) -> str:
        """Return the bounds in words, for people."""
        examples = f"at most {self.max_examples} examples" if self.max_examples else "any number of examples"
        norm = f"{self.max_norm_of_median:g} times the median norm" if self.max_norm_of_median else "any norm"
        return f"{examples}, {norm}"


class ParentVersion(Value):
    """A version of a parent's run on which its region trains, and the parent's plan for that."""

    number: int = Field(ge=0, lt=1 << 31, description="its number at the parent")
    version: Digest = Field(description="digest of its manifest at the region's coordinator")
    plan: Plan = Field(default=Plan(), description="what the sites train and send")


class RegionalRun(ParentRun):
    """A run whose versions come from a parent's run. The region's process (`tessera regional`) writes it."""

    rounds_each: PositiveInt = Field(default=1, description="rounds on each version of the parent")
    base: ParentVersion = Field(description="the parent's version on which the next rounds train")

    @property
    def stated(self) -> ParentRun:
        """The part that sites see."""
        return ParentRun.model_validate(self.model_dump(include=set(ParentRun.model_fields)))


class RunSpec(Value):
    """An orchestrator's definition of a run. `model` and `version` are digests of blobs uploaded before."""

    conditions: ClassVar[tuple[Condition, ...]] = (
        Condition(
            (
                "privacy", "client_privacy", "secure_sums", "signals", "codec", "upload_budget",
                "upload_seconds", "download_codec", "normalization", "robust", "server_optimizer", "max_examples",
                "max_update_norm", "max_norm_of_median", "keep_updates",
            ),
            lambda run: run.rounds > 0 or run.rehearsal,
            "rounds to 1 or more",
        ),
    )  # fmt: skip

    name: Label = Field(description="the run's name, for people; several runs may have the same")
    study: Label = Field(
        default=DEFAULT_STUDY,
        exclude_if=DEFAULT_STUDY.__eq__,
        description="the study whose sites may take part and whose members may read the run",
    )
    method: MethodSpec = Field(description="the algorithm and its settings")
    model: Digest = Field(description="digest of the table of the model's blocks")
    version: Digest = Field(description="digest of the manifest of the first version")
    dataset: Label = Field(description="what sites call the data to train on")
    rounds: Rounds = Field(
        description="rounds after which the run is complete; with 0 nothing trains, and each site measures the model "
        "once, as `evaluation` says"
    )
    seed: Seed = Field(default=0, description="decides every random choice of the run: cohorts, batches, noise")
    cohort: Cohort = Field(default=Cohort(), description="who takes part in a round, and for how long it waits")
    training: Training = Field(default=Training(), description="local training at each worker")
    privacy: Privacy | None = Field(
        default=None, description="differential privacy of each worker's training examples"
    )
    client_privacy: ClientPrivacy | None = Field(
        default=None,
        description="differential privacy of each site as a whole, by noise at the coordinator or, with secure_sums, "
        "at the sites",
    )
    secure_sums: SecureSums | None = Field(
        default=None,
        description="secure aggregation: the coordinator learns sums over sites alone",
    )
    evaluation: Evaluation | None = Field(
        default=None, description="the data on which versions are measured; without it a run has no scores"
    )
    describe: bool = Field(
        default=False,
        description="whether a run without rounds asks each site to describe its data set, or a run of one round "
        "with `secure_sums` asks for the sites' totals alone (`tessera data compare`)",
    )
    membership_attack: bool = Field(
        default=False,
        description="whether a run without rounds measures a membership inference attack on its model at each site "
        "that holds out examples (`tessera run attack`)",
    )
    rehearsal: Annotated[Rounds, Field(gt=0)] | None = Field(
        default=None,
        description="rounds of the run that a run without rounds rehearses (`tessera run rehearse`): each site "
        "trains two steps by these settings and sends a report alone",
    )
    signals: Signals = Field(
        default=Signals(),
        description="measurements of each round at the coordinator",
    )
    lora_ranks: dict[Label, PositiveInt] = Field(
        default={},
        exclude_if=operator.not_,
        description="the rank at which a site trains adapters: one of the model's (`tessera model init --lora-rank "
        "4,8,16`), and at most the site's `resources.lora_rank`. Other sites train the largest of these",
    )
    codec: str = Field(default=pipeline.LOSSLESS, max_length=128, description="how updates are written for the wire")
    upload_budget: Bytes | None = Field(
        default=None, description="the most bytes of an update, as in '5 MB'; coarser codecs are taken to keep to it"
    )
    upload_seconds: PositiveFloat | None = Field(
        default=None, description="longest upload of an update, at the rate that its worker declares"
    )
    download_codec: Literal["lossless", "int8"] = Field(
        default="lossless",
        description="int8 rounds each version's step to 8 bits, so that a worker with the version before downloads a "
        "quarter of the bytes",
    )
    normalization: Normalization = Field(
        default="participants",
        description="what the sum of a block's steps is divided by: the weight of the sites that sent the block, "
        "that of the whole cohort, or the latter times the probability that a site sends it",
    )
    robust: Robust = Field(
        default=Mean(), description="the rule that merges updates; all but mean tolerate attackers"
    )
    server_optimizer: ServerOptimizer = Field(
        default=NoOptimizer(), description="the step that the coordinator takes along the merged update"
    )
    max_examples: PositiveInt | Unlimited | None = Field(
        default=None,
        description="a site with more examples weighs as if it had this many; if left out, 4 times the median of "
        "the eligible sites' numbers when the first round opens, and no limit in a simulation",
    )
    keep_updates: Literal["round", "run"] = Field(
        default="round",
        description="how long the coordinator keeps updates: until a while after their round, or as long as the run, "
        "so that its rounds can be merged again without a site (`tessera coordinator remerge`)",
    )
    parent: RegionalRun | None = Field(
        default=None,
        exclude_if=operator.not_,
        description="the parent coordinator's run that a region's run is a part of; `tessera regional` sets it",
    )
    max_update_norm: float | None = Field(default=None, gt=0, description="updates of a larger l2 norm are refused")
    max_norm_of_median: Annotated[float, Field(gt=1, le=1e6)] | Unlimited | None = Field(
        default=None,
        description="updates whose l2 norm is more than this many times the round's median are not merged; if "
        "left out, 10 for the mean, and unlimited with a robust rule",
    )

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, codec: str) -> str:
        pipeline.parse(codec)
        return codec

    @model_validator(mode="before")
    @classmethod
    def _method_of_no_round(cls, given: Any) -> Any:
        """Add a method to a run without rounds: FedAvg keeps nothing at the sites, and changes no model."""
        has_none = isinstance(given, Mapping) and given.get("rounds") == 0 and "method" not in given
        return {**given, "method": {"name": "fedavg"}} if has_none else given

    @model_validator(mode="after")
    def _asks_for_something(self) -> Self:
        if self.describe and self.evaluation:
            raise ValueError("describe: the run only asks for descriptions; leave out [evaluation]")
        if self.describe and self.rounds and (self.rounds > 1 or not self.secure_sums or self.client_privacy):
            raise ValueError(
                "describe: the run only asks for descriptions; set rounds to 0, or to 1 with secure_sums alone"
            )
        if self.membership_attack and (self.rounds or self.evaluation or self.describe):
            raise ValueError(
                "membership_attack: the run only attacks; set rounds to 0, without [evaluation] and describe"
            )
        if self.rehearsal and (self.rounds or self.describe or self.membership_attack):
            raise ValueError(
                "rehearsal: the run only rehearses; set rounds to 0, without describe and membership_attack"
            )
        if self.rounds or self.rehearsal:
            return self
        if self.evaluation is None and not self.counts_subjects:
            raise ValueError("rounds is 0, and the run asks the sites for nothing: set [evaluation], or rounds")
        if self.cohort.size or self.cohort.target_updates or self.cohort.workers_per_site > 1:
            raise ValueError(
                "rounds is 0, so that each site is asked: leave out size, target_updates, workers_per_site"
            )
        return self

    @model_validator(mode="after")
    def _can_merge_again(self) -> Self:
        if self.keep_updates == "run" and (self.secure_sums or self.client_privacy):
            hidden = "secure_sums" if self.secure_sums else "client_privacy"
            raise ValueError(f"keep_updates: rounds with {hidden} cannot be merged again; leave keep_updates out")
        return self

    @model_validator(mode="after")
    def _rule_can_work(self) -> Self:
        if self.robust.neutral:
            return self
        if self.normalization == "inverse-probability":
            raise ValueError(
                f"dividing by probabilities is right for means, which {self.robust.rule} is not: divide by "
                "participants or cohort"
            )
        if (reached := self.cohort.quorum) < self.robust.least:
            raise ValueError(
                f"{self.robust.rule} with these settings needs updates of at least {self.robust.least} sites; "
                f"cohort.quorum is {reached}. Raise it to {self.robust.least}."
            )
        return self

    @model_validator(mode="after")
    def _can_be_regional(self) -> Self:
        """Refuse settings by which a region's mean would not be a mean of its sites' updates."""
        unfit = (
            "secure_sums",
            "client_privacy",
            "evaluation",
            "robust",
            "server_optimizer",
            "download_codec",
            "keep_updates",
        )
        changed = [name for name in unfit if getattr(self, name) != type(self).model_fields[name].get_default()]
        changed += [] if self.normalization == "participants" else ["normalization"]
        changed += ["cohort.mode"] if self.cohort.buffers else []
        if self.parent and (changed or not self.rounds):
            named = ", ".join(changed) or "parent"
            raise ValueError(f"parent: a region's run trains, and only averages updates: leave out {named}")
        return self

    def _unfit(self, mode: Literal["buffered", "unequal_steps"]) -> dict[str, str]:
        """Return the settings that declare that they do not go with a mode of cohorts, with the reasons. Methods are
        asked when the run is created."""
        codec = pipeline.parse(self.codec)
        declaring = {
            "secure_sums": (self.secure_sums,),
            "client_privacy": (self.client_privacy,),
            "privacy": (self.privacy,),
            "server_optimizer": (self.server_optimizer,),
            "robust": (self.robust,),
            "codec": (*codec.line, codec.lowrank),
        }
        return {
            name: declared.fault
            for name, ones in declaring.items()
            for one in ones
            if one is not None and not (declared := getattr(one, mode)).allows(one)
        }

    @model_validator(mode="after")
    def _can_be_fitted(self) -> Self:
        """Refuse settings that go with equal numbers of local steps alone."""
        if self.cohort.work == "fixed":
            return self
        by_groups = self.privacy is not None and self.privacy.unit == "group" and self.training.steps is None
        others = {
            "cohort.workers_per_site": (
                self.cohort.workers_per_site > 1,
                "a site's updates are pooled before they are divided",
            ),
            "privacy.unit": (
                by_groups,
                "only the site knows the number of groups, and so the steps of an epoch: set training.steps",
            ),
        }
        if unfit := self._unfit("unequal_steps") | {name: why for name, (is_set, why) in others.items() if is_set}:
            said = "; ".join(f"{name}: {why}" for name, why in unfit.items())
            raise ValueError(f"cohort.work 'fitted' does not go with {said}. Leave it out, or set work to 'fixed'")
        return self

    @model_validator(mode="after")
    def _can_be_buffered(self) -> Self:
        """Refuse settings that act on updates of one version alone."""
        if not self.cohort.buffers:
            return self
        others = {
            "normalization": (
                self.normalization == "inverse-probability",
                "a site is chosen by when it is idle, with no known probability",
            ),
            "cohort.workers_per_site": (self.cohort.workers_per_site > 1, "updates of one site would come apart"),
            "rounds": (not self.rounds and not self.rehearsal, "the run has no versions to make"),
            "robust": (
                self.cohort.memory and not self.robust.neutral,
                "cohort.memory would bring back the steps that the rule left out",
            ),
        }
        if unfit := self._unfit("buffered") | {name: why for name, (is_set, why) in others.items() if is_set}:
            said = "; ".join(f"{name}: {why}" for name, why in unfit.items())
            raise ValueError(f"cohort.mode 'buffer' does not go with {said}. Leave it out, or set mode to 'barrier'")
        return self

    @model_validator(mode="after")
    def _goes_together(self) -> Self:
        limited = {name for name in _LIMITS if getattr(self, name) not in (None, "unlimited")}
        changes = [
            *([] if self.robust.neutral else ["leave out robust"]),
            *(f"leave out {name}" for name in sorted(limited)),
            *(["leave out signals"] if self.signals.drift else []),
            *([] if self.sites_per_round else ["set client_privacy.expected_sites, or cohort.size"]),
        ]
        check_settings(self, self._beside_sums(), changes)
        if self.privacy and self.evaluation and self.evaluation.dataset == self.dataset:
            raise ValueError(
                f"exact figures of the examples of {self.dataset!r} undo privacy: evaluate on other data"
            )
        helpers, invited = self.secure_sums.helpers if self.secure_sums else (), self.cohort.sites
        if invited is not None and (outside := set(helpers) - set(invited)):
            raise ValueError(f"secure_sums.helpers: {', '.join(sorted(outside))} is not among cohort.sites")
        return self

    def _beside_sums(self) -> dict[str, str]:
        """Return the settings that do not go with secure sums and that no task has: only a coordinator that has the
        single updates, or that chooses the sites, could act on them."""
        if self.secure_sums is None:
            return {}
        bits, quorum = self.secure_sums.bits, self.secure_sums.quorum
        unfit = {
            # A lossless one would only have no effect.
            "codec": (self.codec != pipeline.LOSSLESS, OTHER_CODEC),
            "robust": (not self.robust.neutral, "it would compare single updates: leave it out"),
            "signals": (self.signals.drift, "drift compares single updates: leave it out"),
            "max_update_norm": (self.max_update_norm is not None, "no single norm is known: leave it out"),
            "max_norm_of_median": (self.max_norm_of_median is not None, "no single norm is known: leave it out"),
            "max_examples": (
                self.max_examples is not None,
                "each site weighs by its own settings (secure_sums.weight): leave it out",
            ),
            "secure_sums.bits": (
                (most := MOST_SENDERS[bits]) < (self.cohort.asked or MAX_SENDERS),
                f"{bits} have room for {most} sites: lower cohort.size, or leave it out",
            ),
            "cohort.workers_per_site": (self.cohort.workers_per_site > 1, "each site sends one update: set it to 1"),
            "cohort.quorum": (
                self.cohort.quorum < quorum,
                f"fewer than {quorum} updates open no sum: set it to {quorum}",
            ),
        }
        return {name: why for name, (is_set, why) in unfit.items() if is_set}

    def changed(self, changes: Mapping[str, Any]) -> Self:
        """Return the run with other values of these settings, which have the shape of a `RunPatch`. Raises pydantic's
        ValidationError."""
        cohort = {**self.cohort.model_dump(mode="json"), **changes.get("cohort", {})}
        return type(self).model_validate({**self.model_dump(mode="json"), **changes, "cohort": cohort})

    @property
    def asks(self) -> TaskKind:
        """The kind of task that the run asks of sites beside its rounds: the only one of a run without rounds."""
        if self.rehearsal:
            return "rehearse"
        if self.membership_attack:
            return "attack"
        return "describe" if self.describe and not self.rounds else "evaluate"

    @property
    def counts_subjects(self) -> bool:
        """True if one worker of each site counts its subjects: another with the same data would count them twice."""
        return self.asks in ("describe", "attack")

    @property
    def settings(self) -> dict[str, Any]:
        """The settings as a run's file would have them, with all defaults."""
        return self.model_dump(mode="json", exclude={"model", "version"}, exclude_none=True)

    @property
    def trained(self) -> Self:
        """The run that trains by these settings: that which a rehearsal rehearses, or the run itself."""
        return self.model_copy(update={"rounds": self.rehearsal, "rehearsal": None}) if self.rehearsal else self

    @property
    def lossy_settings(self) -> tuple[str, ...]:
        """The settings by which the coordinator may read other values than a worker sent."""
        given = {
            "codec": not pipeline.parse(self.codec).lossless,
            "upload_budget": self.upload_budget is not None,
            "upload_seconds": self.upload_seconds is not None,
        }
        return tuple(name for name, is_lossy in given.items() if is_lossy)

    @property
    def has_exact_sums(self) -> bool:
        """True if updates go into secure sums without noise of the sites, or with too little to count."""
        return self.secure_sums is not None and is_weak(self.client_privacy)

    @property
    def honest_sites(self) -> int | None:
        """The shares of noise that count in each sum; None unless sites add noise."""
        if self.client_privacy is None or self.secure_sums is None:
            return None
        colluding = tolerance_of(len(self.secure_sums.helpers))
        return self.client_privacy.honest_sites or self.secure_sums.quorum - colluding

    @property
    def shared_client_privacy(self) -> ClientPrivacy | None:
        """Client-level privacy as sites keep to it themselves; None if they do not, or if there is none."""
        if self.client_privacy is None or self.secure_sums is None:
            return None
        return self.client_privacy.model_copy(update={"honest_sites": self.honest_sites})

    @property
    def sites_per_round(self) -> int | None:
        """The number by which a noisy sum of all sites' steps is divided; None without client-level privacy."""
        return (self.client_privacy.expected_sites or self.cohort.size) if self.client_privacy else None


_LIMITS = ("max_examples", "max_update_norm", "max_norm_of_median")


class Coverage(Message):
    """The share of the eligible sites, and of their examples, that a version rests on. A site is eligible if it may
    take part and has declared the data set."""

    PREFIX: ClassVar[str] = "coverage."
    """Of its members among the metrics of a version."""

    sites: float
    """The share of the eligible sites whose update was merged."""
    examples: float
    """The share of the examples that they declared."""
    low: bool
    """Fewer examples than `cohort.min_coverage`, or a site among the largest that was left out of most rounds."""

    @classmethod
    def of(cls, metrics: Mapping[str, float]) -> Self | None:
        """Return the coverage of a version with these metrics; None for a version that no round made."""
        found = {name: metrics.get(cls.PREFIX + name) for name in cls.model_fields}
        return None if None in found.values() else cls.model_validate(found)

    @property
    def words(self) -> str:
        return f"{self.examples:.0%} of the examples, {self.sites:.0%} of the sites"


class BufferedPart(Message):
    """A site's part in the latest versions, at most 100, of a run that buffers updates."""

    updates: int = 0
    """Its updates that were merged into them."""
    staleness: float = 0.0
    """The median number of versions made between the start of an update and its merge."""
    most_stale: int = 0
    share: float = 0.0
    """Its mean share of the examples of the updates that a version was made of. It leaves out that stale updates
    count less, which differs by block."""
    weight: float
    """Its share of the examples of all sites that may take part."""
    is_behind: bool = False
    """Its share is below half of its weight, over enough versions to judge."""
    base: int | None = None
    """The version from which its present work started, or its update that waits."""
    waits: bool = False
    """Its update waits for the next version."""

    @property
    def doing(self) -> str:
        if self.base is None:
            return ""
        return f"{'its update waits' if self.waits else 'at work'}, from version {self.base}"


class SiteCoverage(Message):
    """A site's part in the latest rounds of a run."""

    site: str
    examples: int
    """As it declared."""
    missed: int
    """Rounds in a row, up to the latest, that were merged without an update of it; at most 100."""
    reason: str = ""
    """The reason for the latest of them, in words."""
    buffered: BufferedPart | None = None
    """For a run that buffers updates."""


class Run(Message):
    id: str
    state: RunState
    reason: str | None = None
    spec: RunSpec
    bounds: Bounds | None = None
    """In force since the run's first round opened, and the same for all its rounds; None until then."""
    version: VersionRef
    client_epsilon: float | None = None
    """Bound on the information about one site in all versions so far, at the delta of `client_privacy`; None without
    it."""
    coverage: Coverage | None = None
    """Of the latest version; None before the first round, and for sites."""
    model_bytes: int
    revision: int
    tags: tuple[str, ...] = ()
    """For people, to find the run and to group runs."""
    note: str = ""
    created_at: datetime
    updated_at: datetime

    @property
    def has_low_coverage(self) -> bool:
        return self.coverage is not None and self.coverage.low

    @property
    def shown_state(self) -> str:
        """The state for people, to whom a run that rests on a few of the sites must not look well."""
        return f"{self.state}, low coverage" if self.has_low_coverage else self.state


class Ineligibility(Message):
    """A reason why a worker would not take part: a rule of its policy, or a missing capability."""

    rule: str
    detail: str


class RoundWorkload(Message):
    """A round's work for one worker, in blocks and bytes, before any codec. Blocks that the worker has are not
    fetched again."""

    stage: str
    fetch_blocks: int
    fetch_bytes: int
    train_blocks: int
    train_bytes: int
    upload_blocks: int
    upload_bytes: int
    largest_update_bytes: int | None = None
    """Less than `upload_bytes` if the worker chooses among the blocks, as in SAFL."""


class WorkerPreview(Message):
    """A worker's expected part in a run."""

    worker: str
    ineligibilities: tuple[Ineligibility, ...] = ()
    """Reasons why it would not take part; if empty, it would."""
    warnings: tuple[Ineligibility, ...] = ()
    """Reasons why it may leave the run before its end, or be late."""
    workload: RoundWorkload | None = None
    """Its work in the first round; None if it would not take part, or is not drawn for that round."""
    never_sends: tuple[str, ...] = ()
    """In words, the blocks of the model that each of the site's rules keeps back."""
    evaluations_left: int | None = None
    """The versions that its site would still measure; None if it measures none, or does not advertise it."""


class Preview(Message):
    """Forecast of a run if it were started now."""

    quorum: int
    eligible: int
    """The sites that would take part."""
    awaiting_approval: int
    """The sites that also would, once a person there has approved the run."""
    workers: tuple[WorkerPreview, ...]
    lacking: tuple[str, ...] = ()
    """Required sites (`cohort.require`) that would not take part: no round would be merged."""
    missing_sites: tuple[str, ...] = ()
    """Sites that the run invites and that no worker was ever heard of from."""
    warnings: tuple[str, ...] = ()

    @property
    def remarks_on_sites(self) -> list[str]:
        """A sentence for each missing site, with the known site that it may have meant."""
        known = {one.worker.partition("/")[0] for one in self.workers}
        return [
            f"no worker has ever connected from the site {name!r}{did_you_mean(name, known)}"
            for name in self.missing_sites
        ]


Tags = Annotated[tuple[Label, ...], Field(max_length=16)]


LIVE_SETTINGS: Mapping[str, Any] = {"rounds": True, "cohort": {"quorum", "deadline_seconds"}}
"""The settings that a live run may change."""


class CohortPatch(Value):
    quorum: PositiveInt | None = None
    deadline_seconds: DeadlineSeconds | None = None


class RunPatch(Value):
    """Changes of a run; what is left out stays. The last two act from the next round on, but a longer deadline is
    that of the open round too."""

    model_config = ConfigDict(json_schema_extra={"minProperties": 1})

    state: Literal["running", "paused", "cancelled"] | None = None
    tags: Tags | None = None
    note: Annotated[str, Field(max_length=2000)] | None = None
    rounds: Annotated[Rounds, Field(gt=0)] | None = None
    cohort: CohortPatch | None = None

    @model_validator(mode="after")
    def _changes_something(self) -> Self:
        if not self.model_fields_set:
            raise ValueError("name what to change: state, tags, note, rounds or cohort")
        return self


class Round(Message):
    """One attempt at a round. `version` is the number of the version that it made, once committed."""

    run: str
    number: int
    attempt: int
    state: RoundState
    stage: str
    opened_at: datetime
    deadline_at: datetime
    closed_at: datetime | None = None
    reason: str | None = None
    version: int | None = None
    updates: int | None = None
    """Accepted updates for its version, whichever rounds asked for them; of an abandoned attempt, its own that no
    version took. None where its tasks have sent all of its updates."""
    tasks: tuple[TaskView, ...] = ()
    """That it asked for; of the open round of a run that buffers updates, read alone, also those that go on."""

    @property
    def accepted(self) -> int:
        """The number of accepted updates."""
        return sum(task.is_accepted for task in self.tasks) if self.updates is None else self.updates


class SiteReport(Message):
    """A worker's task in a run without rounds, and the report of its site."""

    site: Label
    worker: str
    device: str = ""
    """As the worker declares it now."""
    state: TaskState
    problem: ProblemDocument | None = None
    description: Description | None = None
    rehearsal: Rehearsal | None = None
    membership: MembershipCounts | None = None


class Measurement(Message):
    """One evaluation of one version, on a central data set or on the examples that a site holds out of the run's
    own."""

    version: int
    dataset: str
    worker: str
    held_out: bool = False
    examples: int
    metrics: dict[str, float]
    class_counts: Counts | None = None
    subgroup_counts: SubgroupCounts = Field(default={}, exclude_if=operator.not_)
    download_bytes: int = 0

    @property
    def site(self) -> str:
        return self.worker.partition("/")[0]

    @property
    def labels(self) -> int:
        """The number of labels that were scored, over which its metrics are means."""
        return int(self.metrics.get(SCORED_LABELS, self.examples))
