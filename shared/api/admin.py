"""Sites, tokens, enrolments, the audit chain and the coordinator's status."""

from datetime import datetime
from typing import Annotated, Literal, Self

from pydantic import (
    Field,
    JsonValue,
    PositiveInt,
    model_validator,
)

from tessera.shared.schema import (
    DEFAULT_STUDY,
    EnrolmentState,
    Identifier,
    Label,
    Message,
    RoundState,
    RunState,
    SecretHash,
    ShortText,
    TaskKind,
    TaskState,
    TokenRole,
    Value,
)

# ---------------------------------------------------------------- sites, tokens, status


Studies = Annotated[tuple[Label, ...], Field(min_length=1, max_length=64)]


class StudySpec(Value):
    name: Label
    purpose: Annotated[str, Field(max_length=2000)] = ""


class StudyMember(Value):
    """A member of a study: a site or token by its id, or a person as the audit names it, `issuer#subject`."""

    kind: Literal["site", "token", "person"]
    member: str = Field(min_length=1, max_length=2048)
    name: str | None = Field(default=None, description="its name, in answers")


class Study(Message):
    name: str
    purpose: str = ""
    created_at: datetime | None = None
    """None for the study `default`, which always exists."""
    members: tuple[StudyMember, ...] = ()
    """Its sites; for administrators also its tokens and people."""


class SiteSpec(Value):
    name: Label
    studies: Studies = (DEFAULT_STUDY,)


class Site(Message):
    id: str
    name: str
    created_at: datetime
    suspended_at: datetime | None = None
    withdrawn_at: datetime | None = None


WITHDRAWAL = (
    "A withdrawal is final. It ends the site's tasks, refuses its tokens for good, and erases here its updates, "
    "figures, declarations and names. It does not undo training: versions into which its updates were merged keep "
    "their influence, and so do copies of them. Earlier backups and audit sinks keep the site's entries and names."
)
"""The effect of a withdrawal and its limits, for people who decide on one."""


class InfluencedRun(Message):
    """A run with versions into which an update of a withdrawn site was merged."""

    run: str
    name: str
    first_version: int


class Withdrawal(Message):
    """A site that has withdrawn, under the name that remains of it, and the runs that still contain its influence."""

    id: str
    name: str
    runs: list[InfluencedRun]


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
    revoked: bool = False
    """Its token was revoked; a worker whose token is revoked is not live."""


class TokenSpec(Value):
    name: Label
    role: TokenRole
    studies: Studies | None = Field(
        default=None, description="for roles orchestrator and viewer; the study `default` if left out"
    )
    site: Label | None = Field(default=None, description="for roles site and enrolment: whose workers it admits")
    expires_in_days: PositiveInt | None = Field(default=None, le=3650)
    uses: PositiveInt | None = Field(default=None, le=10_000, description="for role enrolment: how many workers")

    @model_validator(mode="after")
    def _site_only_for_sites(self) -> Self:
        if (self.role in ("site", "enrolment")) != (self.site is not None):
            raise ValueError("a token of role 'site' or 'enrolment' names its site, and no other role does")
        if (self.role == "enrolment") != (self.uses is not None):
            raise ValueError("a token of role 'enrolment' says how many workers it admits, and no other role does")
        if self.studies and self.role not in ("orchestrator", "viewer"):
            raise ValueError("only a token of role 'orchestrator' or 'viewer' names studies")
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
    last_used_at: datetime | None = None
    """To within a minute."""


class IssuedToken(Token):
    """A token with its secret, which is shown this once."""

    secret: str


class Rotation(Message):
    """Another secret for the token that is shown, by its hash."""

    secret_hash: SecretHash


class RotationResult(Message):
    """For how long the secret before is admitted too."""

    grace_seconds: float


class EnrolmentSpec(Message):
    """A worker that asks to be admitted. Its secret stays with it; this is the hash that its token is to have."""

    site: Label | None = Field(
        default=None, description="the site that it says it is of; an enrolment token's, if shown"
    )
    worker: Label
    device: ShortText = ""
    version: ShortText = ""
    secret_hash: SecretHash


class Enrolment(Message):
    """A worker's request for admission, and its outcome. An administrator approves it by its `code`."""

    id: Identifier
    code: Annotated[str, Field(pattern=r"^[A-Z]{4}-[A-Z]{4}$")]
    state: EnrolmentState
    site: Label
    worker: Label
    device: ShortText = ""
    version: ShortText = ""
    address: str = ""
    created_at: datetime
    decided_at: datetime | None = None
    """Time of the approval or refusal; only in lists."""
    expires_in_seconds: Annotated[float, Field(ge=0, le=86_400)]
    poll_seconds: Annotated[float, Field(ge=0.5, le=60)] = 2.0


class Approval(Value):
    """An administrator's yes. The code shows that it is the worker's that was meant, and not another's."""

    code: str = Field(max_length=16)
    site: Label = Field(description="the site that its worker is to be of, as it says or otherwise")
    create_site: bool = Field(default=False, description="whether to make the site if there is none")
    studies: Studies = Field(default=(DEFAULT_STUDY,), description="of a site that is made")


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


class ChangeEvent(Message):
    """One change of state, as sent to listeners: an entry of the audit chain without its detail."""

    seq: int
    at: datetime
    action: str
    subject: str
    run: str | None


class OpenRound(Message):
    """An open or merging round, with the numbers of its tasks by their state."""

    number: int
    attempt: int
    stage: str
    state: RoundState
    opened_at: datetime
    deadline_at: datetime
    tasks: dict[str, int]


class LiveRun(Message):
    """The progress of a running or paused run."""

    run: str
    name: str
    state: RunState
    reason: str | None
    """The reason of a pause."""
    method: str
    version: int
    rounds: int
    round: OpenRound | None
    warnings: tuple[str, ...]
    """Of the latest version."""


class Concern(Message):
    """A condition that needs a person, as the dashboard's overview lists it."""

    code: str
    title: str
    detail: str
    remedy: str
    weight: Literal["warn", "bad"]


class FailureGroup(Message):
    """The latest tasks of a run that failed, or whose updates were refused, for one reason."""

    run: str
    name: str
    state: TaskState
    code: str
    tasks: int
    workers: tuple[str, ...]
    latest_at: datetime | None
    detail: str
    """Of the newest of them."""
    remedy: str


class Status(Message):
    """The coordinator at a glance, on one page: the lists are bounded, the totals count everything."""

    version: str
    protocol: int
    runs: dict[str, int]
    """The number of runs in each state."""
    live_runs: tuple[LiveRun, ...]
    """The last changed ones."""
    workers: int
    live_workers: int
    needs_attention: tuple[Concern, ...]
    needs_attention_total: int
    failures: tuple[FailureGroup, ...]
    """The tasks that failed last, the newest first."""
    blobs: int | None
    """This and what follows is of all studies, and None for a caller who does not read them all."""
    blob_bytes: int | None
    free_disk_bytes: int | None
    memory_share: float | None
    """The share of this process's memory limit that is in use; 0 without a limit."""


class About(Message):
    version: str
    protocol_min: int
    protocol_max: int


class Readiness(Message):
    ready: bool
    schema_at_head: bool
    database_intact: bool = True
    """False once the database said that it is damaged."""
    store_writable: bool
    store_has_space: bool = True
    """True if the disk has more free space than the reserve."""
    conducts: bool = True
    """False if the child process that moves rounds on has not looked at them for a minute."""
