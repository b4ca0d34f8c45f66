"""Every request and response of the API. Frozen; what is kept at a site has no place in any of them.

Requests that people write refuse fields they do not know, since a misspelt setting must not pass for a default.
Messages between coordinator and worker ignore them, so that versions one apart still understand each other.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable
from datetime import datetime
from fnmatch import fnmatchcase
from math import prod
from typing import Annotated, Generic, Literal, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    JsonValue,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    TypeAdapter,
    ValidationError,
    ValidatorFunctionWrapHandler,
    WrapValidator,
    field_validator,
    model_validator,
)

from shared import codecs
from shared.averaging import Divide
from shared.blocks import EVERYTHING, NUMPY_DTYPES, Block, DType, Frozen, Name, Selector
from shared.hours import Span
from shared.methods import Chosen
from shared.methods.contract import Plan
from shared.privacy import Budget, Privacy
from shared.problems import ProblemDocument
from shared.robust import Mean, Robust
from shared.server_optimizer import Plain, ServerOptimizer
from shared.training import Training

PROTOCOL = 1
"""The version of the worker protocol that this code speaks."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A name that people give: letters, digits, dot, dash and underscore."""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
"""What a coordinator calls a run or a task. Workers name files after them, so it can be nothing but a name."""

LARGEST_NUMBER = 1e100
"""Far above what anything is measured at, and with room for the sums and squares of those who read it."""

Number = Annotated[float, Field(ge=-LARGEST_NUMBER, le=LARGEST_NUMBER)]

Reported = Annotated[dict[Annotated[str, Field(pattern=r"^[ -~]{1,64}$")], Number], Field(max_length=4096)]
"""What a worker tells beside blocks. A few for each layer of a deep model, and well below what a body may have."""

Resources = Annotated[dict[Literal["memory_bytes", "upload_bytes_per_second"], PositiveFloat], Field(max_length=8)]
"""What a worker may spend on a task, as its site declares it."""

Bytes = Annotated[int, BeforeValidator(TypeAdapter(ByteSize).validate_python), Field(gt=0, lt=1 << 53)]
"""A number of bytes; also taken with its unit, as in '5 MB'."""

Examples = dict[Label, Annotated[NonNegativeInt, Field(lt=1 << 40)]]
"""How many there are, by data set."""

Short = Annotated[str, Field(max_length=128)]

MOST_PATTERNS = 256
"""Of a site's policy that it shows: each is compared with each block at every round."""

MOST_WITHHELD = 256

MOST_CLAIM_BYTES = 1 << 16
"""The longest claim, as JSON."""

MOST_WANTED = 4_096
"""Blobs that one request may ask for."""

Rounds = Annotated[int, Field(gt=0, le=1_000_000)]

Seed = Annotated[int, Field(ge=0, lt=1 << 53)]

LeaseSeconds = Annotated[float, Field(gt=0, le=86400)]

TaskKind = Literal["train", "evaluate"]
RunState = Literal["running", "paused", "completed", "failed", "cancelled"]
RoundState = Literal["open", "merging", "committed", "abandoned"]
TaskState = Literal[
    "offered", "leased", "accepted", "merged", "left_out", "rejected", "lapsed", "failed", "cancelled"
]
ACCEPTED: tuple[TaskState, ...] = ("accepted", "merged", "left_out")
"""The states of a task whose report was accepted, whatever became of it afterwards."""

TokenRole = Literal["admin", "orchestrator", "viewer", "site", "enrolment"]
EnrolmentState = Literal["pending", "approved", "declined", "expired"]

SecretHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The SHA-256 of a whole token: all that a coordinator keeps of one."""

Told = Annotated[str, Field(pattern=r"^[ -~]*$", max_length=64)]
"""What a worker says of itself, for people to read."""


class Message(BaseModel):
    """A value whose reader passes over fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def canonical(value: BaseModel) -> bytes:
    """The value as JSON in one form only, so that equal values have equal digests."""
    return json.dumps(value.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


# ---------------------------------------------------------------- versions


class MemoryEntry(Frozen):
    digest: Digest
    shape: tuple[PositiveInt, ...] = Field(max_length=8)
    dtype: DType

    @property
    def nbytes(self) -> int:
        return prod(self.shape) * NUMPY_DTYPES[self.dtype].itemsize


class Manifest(Frozen):
    """A version: the digest of each block, and what the method remembers. Its own digest is the version's.

    As a document it may name an earlier version's manifest as its root, and then has only the blocks that differ, so
    that a round which moves little of a model is not mostly manifest. `read` puts the others in.
    """

    blocks: dict[Name, Digest]
    memory: dict[Name, MemoryEntry] = {}
    numbers: dict[str, float] = {}
    root: Digest | None = None

    @classmethod
    def read(cls, document: bytes, fetch: Callable[[Digest], bytes]) -> Self:
        """The manifest of a document; its root's is fetched. Raises ValueError for what is none."""
        manifest = cls.model_validate_json(document)
        if manifest.root is None:
            return manifest
        root = cls.model_validate_json(fetch(manifest.root))
        if root.root is not None:
            raise ValueError(f"the root {manifest.root} of a manifest has itself a root")
        return manifest.model_copy(update={"blocks": root.blocks | manifest.blocks})

    def document(self, root: Manifest | None = None) -> bytes:
        """What is stored; `root` is the manifest that `self.root` names."""
        if root is None:
            return canonical(self)
        return canonical(self.model_copy(update={"blocks": self.changed(root)}))

    def changed(self, since: Manifest) -> dict[Name, Digest]:
        """The blocks that are other than in that manifest."""
        return {name: digest for name, digest in self.blocks.items() if since.blocks.get(name) != digest}

    @property
    def digests(self) -> set[Digest]:
        """The blobs that it refers to."""
        of_memory = {entry.digest for entry in self.memory.values()}
        return {*self.blocks.values(), *of_memory} | ({self.root} if self.root else set())


class VersionRef(Message):
    number: NonNegativeInt
    digest: Digest


class Wanted(Message):
    """Blobs to be read one behind the other, each once, from byte `start` of them all on."""

    digests: tuple[Digest, ...] = Field(min_length=1, max_length=MOST_WANTED, json_schema_extra={"uniqueItems": True})
    start: NonNegativeInt = Field(default=0, lt=1 << 53)

    @field_validator("digests")
    @classmethod
    def _each_once(cls, digests: tuple[Digest, ...]) -> tuple[Digest, ...]:
        if twice := [digest for digest, times in Counter(digests).items() if times > 1]:
            raise ValueError(f"{twice[0]} is named more than once")
        return digests


class Difference(Message):
    """A blob that makes one version of another: an update file with the blocks in which they differ."""

    digest: Digest
    nbytes: PositiveInt


class Version(VersionRef):
    """A version with what its method tells of it: numbers for programs, warnings as sentences for people."""

    created_at: datetime
    retired_at: datetime | None = None
    numbers: dict[str, float] = {}
    warnings: tuple[str, ...] = ()


# ---------------------------------------------------------------- runs


class Cohort(Frozen):
    """Who takes part in a round, and how long it may take. What is counted are sites: a site's token admits any
    number of workers, under names that the site chooses."""

    size: PositiveInt | None = Field(
        default=None, description="sites chosen per round; all that are live if left out"
    )
    workers_per_site: PositiveInt = Field(
        default=1, le=1000, description="workers of a chosen site that take part; their updates count as one"
    )
    enough: PositiveInt | None = Field(
        default=None, description="sites whose updates close a round before its deadline"
    )
    quorum: PositiveInt = Field(default=1, description="sites without whose updates a round is abandoned")
    deadline_seconds: float = Field(default=3600, gt=0, le=30 * 86400)
    tries: PositiveInt = Field(default=3, le=100, description="attempts at a round before the run pauses")
    task_tries: PositiveInt = Field(default=3, le=100, description="leases of a task before it counts as lapsed")
    sites: tuple[Label, ...] | None = Field(
        default=None, description="sites that may take part, be it to train or to evaluate; all if left out"
    )

    @model_validator(mode="after")
    def _reachable(self) -> Self:
        if self.size is not None and self.quorum > self.size:
            raise ValueError(f"a quorum of {self.quorum} cannot come from a cohort of {self.size}")
        return self


class Evaluation(Frozen):
    """What new versions are measured on: a central data set, what each site holds out, or both."""

    dataset: Label | None = Field(default=None, description="central: a worker that holds this data set evaluates")
    sites: bool = Field(default=False, description="each site that trains evaluates on what it holds out of its data")
    every: PositiveInt = Field(default=1, description="rounds between evaluations; the last version always counts")

    @model_validator(mode="after")
    def _measures_something(self) -> Self:
        if self.dataset is None and not self.sites:
            raise ValueError("name a central dataset, or set sites, or leave evaluation out")
        return self

    def due(self, number: int, rounds: int) -> bool:
        """Whether this version of a run of so many rounds is measured."""
        return number % self.every == 0 or number == rounds


Unlimited = Literal["unlimited"]


class Bounds(Message):
    """How much one site may count for in a round, at the most; None for no bound."""

    max_examples: PositiveInt | None = None
    max_norm_of_median: float | None = None
    median_norm: float = 0.0
    """The largest median norm of any round so far: where a run converges, a site that returns may move further than
    the others without being an attacker. Norms are as the method stretches them (`CoordinatorHalf.stretch`)."""

    @property
    def told(self) -> str:
        """The bounds in words, for people."""
        examples = f"at most {self.max_examples} examples" if self.max_examples else "any number of examples"
        norm = f"{self.max_norm_of_median:g} times the median norm" if self.max_norm_of_median else "any norm"
        return f"{examples}, {norm}"


class RunSpec(Frozen):
    """What an orchestrator asks for. `model` and `version` are digests of blobs uploaded before."""

    name: Label
    method: Chosen
    model: Digest
    version: Digest
    dataset: Label = Field(description="what sites call the data to train on")
    rounds: Rounds
    seed: Seed = 0
    cohort: Cohort = Cohort()
    training: Training = Training()
    privacy: Privacy | None = Field(default=None, description="differential privacy of what each worker trains on")
    evaluation: Evaluation | None = None
    codec: str = Field(default=codecs.LOSSLESS, max_length=128, description="how updates are written for the wire")
    upload_budget: Bytes | None = Field(
        default=None, description="the most bytes of an update, as in '5 MB'; coarser codecs are taken to keep to it"
    )
    upload_seconds: PositiveFloat | None = Field(
        default=None, description="the most that an update may take on the line that its worker declares"
    )
    divide: Divide = "participants"
    robust: Robust = Mean()
    server_optimizer: ServerOptimizer = Plain()
    max_examples: PositiveInt | Unlimited | None = Field(
        default=None,
        description="a site with more examples weighs as if it had this many; if left out, 4 times the median of "
        "what the willing sites have when the first round opens",
    )
    max_update_norm: float | None = Field(default=None, gt=0, description="updates of a larger l2 norm are refused")
    max_norm_of_median: Annotated[float, Field(gt=1, le=1e6)] | Unlimited | None = Field(
        default=None,
        description="updates of more times the round's median l2 norm are not merged; if left out, 10 for the mean, "
        "and unlimited with a robust rule",
    )

    @field_validator("codec")
    @classmethod
    def _known_codec(cls, codec: str) -> str:
        codecs.parse(codec)
        return codec

    @model_validator(mode="after")
    def _rule_can_work(self) -> Self:
        if self.robust.neutral:
            return self
        if self.divide == "inverse-probability":
            raise ValueError(
                f"dividing by probabilities is right for means, which {self.robust.rule} is not: divide by "
                "participants or cohort"
            )
        if (reached := self.cohort.quorum) < self.robust.least:
            raise ValueError(
                f"{self.robust.rule} takes updates of {self.robust.least} sites a round to bear what it is told to; "
                f"with a quorum of {reached} there may be fewer: raise cohort.quorum"
            )
        return self

    @model_validator(mode="after")
    def _private_throughout(self) -> Self:
        if self.privacy and self.training.precision == "float16":
            raise ValueError("privacy does not go with float16, whose scaled losses are not clipped: use bfloat16")
        if self.privacy and self.evaluation and self.evaluation.dataset == self.dataset:
            raise ValueError(
                f"exact figures of the examples of {self.dataset!r} undo privacy: evaluate on other data"
            )
        return self


class Run(Message):
    id: str
    state: RunState
    reason: str | None = None
    spec: RunSpec
    bounds: Bounds | None = None
    """In force since the run's first round opened, and the same for all its rounds; None until then."""
    version: VersionRef
    model_bytes: int
    revision: int
    created_at: datetime
    updated_at: datetime


class Objection(Message):
    """Why a worker would not take part: a rule of its policy, or what it lacks."""

    rule: str
    detail: str


class Ask(Message):
    """What a round asks of a worker, in blocks and bytes, before any codec. What it holds already is not fetched
    again."""

    stage: str
    fetch_blocks: int
    fetch_bytes: int
    train_blocks: int
    train_bytes: int
    upload_blocks: int
    upload_bytes: int


class Prospect(Message):
    """What is to be expected of a worker."""

    worker: str
    objections: tuple[Objection, ...] = ()
    """Why it would not take part; it would if there are none."""
    reservations: tuple[Objection, ...] = ()
    """What may keep one that takes part from doing so to the run's end, or make it late."""
    asked: Ask | None = None
    """What the first round asks of it; None if it would not take part, or is not drawn for that round."""


class Preview(Message):
    """What would become of a run if it were started now."""

    quorum: int
    willing: int
    """The sites that would take part."""
    awaiting: int
    """The sites that also would, once a person there has approved the run."""
    prospects: tuple[Prospect, ...]
    missing_sites: tuple[str, ...] = ()
    """Sites that the run invites and that no worker was ever heard of from."""
    warnings: tuple[str, ...] = ()


class RunPatch(Frozen):
    state: Literal["running", "paused", "cancelled"]


Phase = Literal["waiting", "fetching", "training", "evaluating", "uploading"]

Counted = Annotated[int, Field(ge=0, lt=1 << 53)]


class Progress(Message):
    """How far a worker is with its task, as it says itself.

    `step` of `steps` while it trains or evaluates, `bytes` of `of_bytes` while it moves some; `loss` is the mean over
    the examples of the epoch so far.
    """

    phase: Phase
    step: Counted | None = None
    steps: Counted | None = None
    loss: Number | None = None
    bytes: Counted | None = None
    of_bytes: Counted | None = None


def _or_nothing(value: object, validate: ValidatorFunctionWrapHandler) -> Progress | None:
    """What cannot be read of it is no reason to lose a lease."""
    try:
        read: Progress | None = validate(value)
    except ValidationError:
        return None
    return read


class Receipt(Message):
    """What became of an accepted update: whether it was merged, and no more. While its round is under way it is still
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
    leases: int
    examples: int | None = None
    numbers: dict[str, float] = {}
    upload_bytes: int = 0
    download_bytes: int = 0
    progress: Progress | None = None
    layers: tuple[str, ...] = ()
    """Of which layers the accepted update holds blocks."""
    update: str | None = None
    """The digest of the update that was handed in."""
    unmerged: tuple[str, ...] = ()
    """The blocks of a merged update that stayed as they were in the version."""
    receipt: Receipt | None = None
    """For the task's site, to which the state of an accepted task stays `accepted`."""
    audit_head: str | None = None
    """What the site's own audit had as its last entry when this left, if the worker said so."""
    created_at: datetime | None = None
    problem: ProblemDocument | None = None

    @property
    def is_accepted(self) -> bool:
        """Whether its report was accepted, whatever became of it afterwards."""
        return self.state in ACCEPTED


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
    tasks: tuple[TaskView, ...] = ()


class Measurement(Message):
    """One evaluation of one version, on a central data set or on what a site holds out of the run's own."""

    version: int
    dataset: str
    worker: str
    held_out: bool = False
    examples: int
    numbers: dict[str, float]

    @property
    def site(self) -> str:
        return self.worker.partition("/")[0]


# ---------------------------------------------------------------- tasks


class Mirror(Message):
    """What a site's policy would refuse, as far as it helps to plan: what may leave, how much, when, for whom. No
    promise of either side: the worker judges each task itself."""

    orchestrators: tuple[Short, ...] | None = Field(default=None, max_length=256)
    models: tuple[Short, ...] | None = Field(default=None, max_length=256)
    may_send: Selector = EVERYTHING
    never_send: tuple[Annotated[str, Field(max_length=512)], ...] = Field(default=(), max_length=MOST_PATTERNS)
    max_epochs: PositiveInt = 1 << 53
    max_batch: PositiveInt = 1 << 53
    max_model_bytes: PositiveInt = 1 << 53
    max_upload_bytes: PositiveInt = 1 << 53
    max_run_upload_bytes: PositiveInt | None = None
    max_upload_bytes_per_second: PositiveFloat | None = None
    max_task_seconds: PositiveFloat | None = None
    max_minutes_per_day: PositiveFloat | None = None
    hours: tuple[Span, ...] = Field(default=(), max_length=64)
    utc_offset_minutes: Annotated[int, Field(gt=-1440, lt=1440)] = 0
    """What the site's clock is ahead of UTC."""
    require_privacy: Budget | None = None
    budgets: dict[Label, Budget] = Field(default={}, max_length=256)
    """What all runs together may find out, by data set."""
    spent: dict[Label, PositiveFloat] = Field(default={}, max_length=256)
    """The least budget, at the same delta, that holds what they have found out so far of those data sets."""
    approve_runs: bool = False
    airlock: bool = False

    @field_validator("may_send")
    @classmethod
    def _soon_judged(cls, selector: Selector) -> Selector:
        if sum(1 + len(match.names or ()) for match in (*selector.include, *selector.exclude)) > MOST_PATTERNS:
            raise ValueError(f"at most {MOST_PATTERNS} conditions and names are taken")
        return selector

    def withholds(self, block: Block) -> bool:
        return any(fnmatchcase(block.name, pattern) for pattern in self.never_send)


class Claim(Message):
    """What a worker says of itself when it asks for a task. `datasets` gives the examples that it trains on of each,
    and `held_out` those that it keeps apart to evaluate on.

    `instance` is new for each process: who asks again because an answer was lost is given the same lease again,
    while a second process under the same name is not.
    """

    worker: Label
    instance: Annotated[str, Field(pattern=r"^[0-9a-f]{16,64}$")]
    protocol_min: int = PROTOCOL
    protocol_max: int = PROTOCOL
    kinds: tuple[TaskKind, ...] = Field(default=("train",), max_length=8)
    datasets: Examples = Field(max_length=256)
    held_out: Examples = Field(default={}, max_length=256)
    methods: tuple[Short, ...] = Field(default=(), max_length=256)
    device: Told = "cpu"
    version: Told = ""
    """Of the worker's own code; none of a worker that does not say."""
    resources: Resources = {}
    mirror: Mirror | None = None
    withheld: dict[Identifier, Annotated[str, Field(max_length=300)]] = Field(default={}, max_length=MOST_WITHHELD)
    """Runs that it is to be offered no task of, and why."""

    def shortened(self) -> Claim:
        """Return the claim without what a coordinator can do without, if it is longer than one takes: first why runs
        are withheld, then the mirror, which only helps to plan."""
        changes: tuple[dict[str, object], ...] = (
            {"withheld": dict.fromkeys(self.withheld, "withheld")},
            {"mirror": None},
        )
        claim = self
        for change in changes:
            if len(claim.model_dump_json().encode()) <= MOST_CLAIM_BYTES:
                break
            claim = claim.model_copy(update=change)
        return claim


EPSILON = "epsilon"
"""The name, among a task's numbers, of what all that the worker did for the run tells of one example at the most, by
its own ledger and at the run's delta."""

MOST_ALONG = 1024
"""Blobs that may come with a task."""


class Task(Message):
    """What one worker is asked to do in one round. Only who shows `token` may report on it."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    id: Identifier
    token: Annotated[int, Field(ge=0, lt=1 << 53)]
    kind: TaskKind
    run: Identifier
    run_name: Label
    round: NonNegativeInt
    rounds: Rounds
    seed: Seed
    method: Chosen
    plan: Plan
    dataset: Label
    held_out: bool = False
    """Whether to evaluate on what the worker holds out of the data set, rather than on the data set."""
    training: Training
    privacy: Privacy | None = None
    codec: str
    upload_budget: PositiveInt | None = None
    upload_seconds: PositiveFloat | None = None
    divide: Divide
    model: Digest
    version: VersionRef
    inline_bytes: NonNegativeInt = 0
    """An update of so many bytes may come with its submission."""
    orchestrator: Annotated[str, Field(max_length=64)] | None = None
    """Whose token started the run, as the coordinator tells it: worth as much as the coordinator's word."""
    lease_seconds: LeaseSeconds
    receipt: Receipt | None = None
    """Of the last update that was accepted from this worker in this run."""
    along: Annotated[tuple[bytes, ...], Field(max_length=MOST_ALONG)] = ()
    """Blobs that need not be fetched any more: what is new in the version, where that is little. A worker goes by the
    digests of what is here, and by nothing else."""

    @model_validator(mode="after")
    def _within_the_run(self) -> Self:
        if self.round > self.rounds:
            raise ValueError(f"there is no round {self.round} in a run of {self.rounds}")
        if self.held_out and self.kind != "evaluate":
            raise ValueError("nothing trains on what is held out")
        return self


class Heartbeat(Message):
    token: int
    progress: Annotated[Progress | None, WrapValidator(_or_nothing)] = None


class Lease(Message):
    lease_seconds: LeaseSeconds


AuditHead = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The digest, under the site's key, of the entry of its audit that says what left. By it the site finds what its
chain has lost; nobody else learns anything of it."""


class Submission(Message):
    """A finished `train` task: the digest of an update, and what goes with it. The update was uploaded before or, if
    the task says that so few bytes may be, is here."""

    model_config = ConfigDict(ser_json_bytes="base64", val_json_bytes="base64")

    token: int
    version: Digest
    update: Digest
    data: bytes | None = None
    examples: PositiveInt = Field(lt=1 << 40)
    numbers: Reported = {}
    download_bytes: NonNegativeInt = Field(default=0, lt=1 << 53)
    audit_head: AuditHead | None = None


class Evaluated(Message):
    """A finished `evaluate` task."""

    token: int
    version: Digest
    examples: PositiveInt = Field(lt=1 << 40)
    numbers: Reported
    download_bytes: NonNegativeInt = Field(default=0, lt=1 << 53)
    audit_head: AuditHead | None = None


GIVEN_BACK = frozenset({"awaiting-approval", "declined", "approval-ended"})
"""Codes of a failure that is none: a task is given back because its site has not agreed to the run."""


class Failure(Message):
    token: int
    code: str = Field(max_length=64)
    detail: str = Field(max_length=2000)


# ---------------------------------------------------------------- sites, tokens, status


class SiteSpec(Frozen):
    name: Label


class Site(Message):
    id: str
    name: str
    created_at: datetime
    suspended_at: datetime | None = None


class WorkerView(Message):
    id: str
    name: str
    site: str
    kinds: tuple[TaskKind, ...]
    datasets: dict[str, int]
    held_out: dict[str, int] = {}
    device: str
    version: str = ""
    """Of its code, as far as it says."""
    last_seen_at: datetime
    live: bool
    suspended: bool = False
    """With its site; a worker that is suspended is not live."""


class TokenSpec(Frozen):
    name: Label
    role: TokenRole
    site: Label | None = Field(default=None, description="for roles site and enrolment: whose workers it admits")
    expires_in_days: PositiveInt | None = Field(default=None, le=3650)
    uses: PositiveInt | None = Field(default=None, le=10_000, description="for role enrolment: how many workers")

    @model_validator(mode="after")
    def _site_only_for_sites(self) -> Self:
        if (self.role in ("site", "enrolment")) != (self.site is not None):
            raise ValueError("a token of role 'site' or 'enrolment' names its site, and no other role does")
        if (self.role == "enrolment") != (self.uses is not None):
            raise ValueError("a token of role 'enrolment' says how many workers it admits, and no other role does")
        return self


class Token(Message):
    """A token without its secret."""

    id: str
    name: str
    role: TokenRole
    site: str | None
    created_at: datetime
    expires_at: datetime | None
    revoked_at: datetime | None
    uses_left: int | None = None


class IssuedToken(Token):
    """A token with its secret, which is shown this once."""

    secret: str


class Rotation(Message):
    """Another secret for the token that is shown, by its hash."""

    secret_hash: SecretHash


class Rotated(Message):
    """For how long the secret before is admitted too."""

    grace_seconds: float


class EnrolmentSpec(Message):
    """A worker that asks to be admitted. Its secret stays with it; this is the hash that its token is to have."""

    site: Label | None = Field(
        default=None, description="the site that it says it is of; an enrolment token's, if shown"
    )
    worker: Label
    device: Told = ""
    version: Told = ""
    secret_hash: SecretHash


class Enrolment(Message):
    """What became of a worker's wish to be admitted. An administrator admits it by its `code`."""

    id: Identifier
    code: Annotated[str, Field(pattern=r"^[A-Z]{4}-[A-Z]{4}$")]
    state: EnrolmentState
    site: Label
    worker: Label
    device: Told = ""
    version: Told = ""
    address: str = ""
    created_at: datetime
    decided_at: datetime | None = None
    """When it was admitted or declined, told in lists."""
    expires_in_seconds: Annotated[float, Field(ge=0, le=86_400)]
    poll_seconds: Annotated[float, Field(ge=0.5, le=60)] = 2.0


class Approval(Frozen):
    """An administrator's yes. The code shows that it is the worker's that was meant, and not another's."""

    code: str = Field(max_length=16)
    site: Label = Field(description="the site that its worker is to be of, as it says or otherwise")
    create_site: bool = Field(default=False, description="whether to make the site if there is none")


class AuditEntry(Message):
    seq: int
    at: datetime
    actor: str
    action: str
    subject: str
    run: str | None
    detail: dict[str, JsonValue]
    previous: str
    digest: str


class Happening(Message):
    """One change of state, as those who listen are told of it: an entry of the audit chain without its detail."""

    seq: int
    at: datetime
    action: str
    subject: str
    run: str | None


class Status(Message):
    """The coordinator at a glance."""

    version: str
    protocol: int
    runs: dict[str, int]
    open_rounds: tuple[Round, ...]
    workers: tuple[WorkerView, ...]
    blobs: int
    blob_bytes: int


class About(Message):
    version: str
    protocol_min: int
    protocol_max: int


class Readiness(Message):
    ready: bool
    schema_at_head: bool
    store_writable: bool
    store_has_room: bool = True
    """Whether the disk has more free than the reserve."""


class UploadView(Message):
    id: str
    digest: Digest
    offset: int
    length: int
    complete: bool


T = TypeVar("T")


class Page(Message, Generic[T]):
    """A page of a collection; `next_cursor` is null on the last one."""

    items: tuple[T, ...]
    next_cursor: str | None = None
