"""The base classes of every record and message, and the types of fields that several of them share.

Requests that people write refuse fields they do not know, since a misspelt setting must not pass for a default.
Messages between coordinator and worker ignore them, so that versions one apart still understand each other.
"""

import json
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any, ClassVar, Generic, Literal, NamedTuple, Self, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ByteSize,
    ConfigDict,
    Field,
    NonNegativeInt,
    TypeAdapter,
)
from pydantic_core import PydanticCustomError


class Condition(NamedTuple):
    """Settings of a record that have no effect unless a condition on the record holds."""

    settings: tuple[str, ...]
    holds: Callable[[Any], bool]
    remedy: str
    """The setting that makes them act, with its value."""


class Compatibility(NamedTuple):
    """The declaration by a method, rule, codec or protection whether it goes with a mode of cohorts."""

    fault: str = ""
    """The reason why it does not; empty if it does with all settings."""
    settings: str = ""
    """Its settings with which it does all the same, in words."""
    holds: Callable[[Any], bool] = lambda _: False
    """Returns True for settings like that."""

    def allows(self, settings: Any) -> bool:
        return not self.fault or self.holds(settings)

    @property
    def remedy(self) -> str:
        return f"set {self.settings}, or " if self.settings else ""


class Value(BaseModel):
    """An immutable record, with no unknown fields, and no number that JSON cannot carry."""

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    conditions: ClassVar[tuple[Condition, ...]] = ()
    """The settings that others can leave without effect: a new run with one of these is refused."""

    def model_copy(self, *, update: Mapping[str, Any] | None = None, deep: bool = False) -> Self:
        copied = super().model_copy(update=update, deep=deep)
        # Cached properties follow from fields that may have changed.
        for name in copied.__dict__.keys() - type(self).model_fields.keys():
            del copied.__dict__[name]
        return copied


def without_effect(record: Value) -> Iterator[tuple[str, str]]:
    """Yield the path of each setting, also of nested records, that differs from its default and has no effect, with
    the remedies."""
    fields = type(record).model_fields
    for settings, holds, remedy in record.conditions:
        for name in settings:
            if getattr(record, name) != fields[name].get_default(call_default_factory=True) and not holds(record):
                yield name, f"has no effect here: leave it out, or set {remedy}"
    for name in fields:
        if isinstance(value := getattr(record, name), Value):
            yield from ((f"{name}/{path}", said) for path, said in without_effect(value))


def needed_versions(record: Value) -> Iterator[tuple[str, str]]:
    """Yield the path of each setting, also of nested records, that differs from its default and is newer than Tessera
    0.1.0, with the version since which it exists: its field has `json_schema_extra={"since": "0.2.0"}`."""
    for name, info in type(record).model_fields.items():
        value, extra = getattr(record, name), info.json_schema_extra
        if isinstance(extra, dict) and "since" in extra and value != info.get_default(call_default_factory=True):
            yield name, str(extra["since"])
        if isinstance(value, Value):
            yield from ((f"{name}.{path}", since) for path, since in needed_versions(value))


PROTOCOL = 1
"""The version of the worker protocol that this code speaks."""

Digest = Annotated[str, Field(pattern=r"^sha256:[0-9a-f]{64}$")]
Label = Annotated[str, Field(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$")]
"""A name that people give: letters, digits, dot, dash and underscore."""

DEFAULT_STUDY = "default"
"""The study that always exists, to which runs, sites and callers belong unless another is named."""

Identifier = Annotated[str, Field(pattern=r"^[A-Za-z0-9-]{1,64}$")]
"""Id of a run or a task. Workers name files after it, so it cannot contain a path."""

MAX_NUMBER = 1e100
"""Far above what anything is measured at, and with room for the sums and squares of those who read it."""

Number = Annotated[float, Field(ge=-MAX_NUMBER, le=MAX_NUMBER)]

_Metrics = dict[Annotated[str, Field(pattern=r"^[ -~]{1,64}$")], Number]

Reported = Annotated[_Metrics, Field(max_length=4096)]
"""Metrics that a worker reports of its training: room for several per layer of a deep model, within the limit of a
body."""

Evaluated = Annotated[_Metrics, Field(max_length=64)]
"""Metrics of an evaluation, of the version and of a worker's own model; of each, up to 16 are a method's own. Pages
and exports compute each of them over the sites, for every version that they show."""

_SIZE_TEXT = re.compile(r"[0-9_]*\.?[0-9]+ *[A-Za-z]*")
_BYTE_SIZE: TypeAdapter[int] = TypeAdapter(ByteSize)


def _size(given: object) -> object:
    """Return a size with its unit in bytes. Raises ValueError: `ByteSize` by itself takes '2,5 MB' for 2 bytes."""
    if not isinstance(given, str):
        return given
    if not _SIZE_TEXT.fullmatch(given.strip()):
        raise PydanticCustomError("byte_size", "no size")
    return _BYTE_SIZE.validate_python(given)


Bytes = Annotated[int, BeforeValidator(_size), Field(gt=0, lt=1 << 53)]
BytesOrZero = Annotated[int, BeforeValidator(_size), Field(ge=0, lt=1 << 53)]
BytesOrRate = Annotated[float, BeforeValidator(_size), Field(gt=0)]
"""A number of bytes; also taken with its unit, as in '5 MB'."""

Resources = Annotated[
    dict[Literal["memory_bytes", "upload_bytes_per_second", "lora_rank", "seconds_per_step"], BytesOrRate],
    Field(max_length=8),
]
"""Resources of a worker for a task, as declared by its site; `lora_rank` is the largest rank of adapters, and
`seconds_per_step` the time of a usual training step."""

Examples = dict[Label, Annotated[NonNegativeInt, Field(lt=1 << 40)]]
"""Number of examples by data set."""

Short = Annotated[str, Field(max_length=128)]

MAX_PATTERNS = 64
"""Patterns of a site's policy that it shows, all together: each is compared with each block."""

MAX_PATTERN_STARS = 8
"""A pattern with many stars takes milliseconds to compile, and to compare with a name that it nearly matches."""

MAX_WITHHELD = 256
MAX_WITHHELD_TERMS = 16
"""Terms of one withheld run that a claim names."""

MAX_HELD = 32
"""Updates that one worker holds for release at most: each keeps a lease."""

MAX_CLAIM_BYTES = 1 << 16
"""The longest claim, as JSON."""

MAX_BLOBS_PER_REQUEST = 4_096
"""Blobs that one request may ask for."""

Rounds = Annotated[int, Field(ge=0, le=1_000_000)]

Seed = Annotated[int, Field(ge=0, lt=1 << 53)]

LeaseSeconds = Annotated[float, Field(gt=0, le=86400)]

TaskKind = Literal["train", "evaluate", "describe", "rehearse", "attack", "agree", "open", "abandon"]
RunState = Literal["running", "paused", "completed", "cancelled"]
RoundState = Literal["open", "merging", "committed", "abandoned"]
TaskState = Literal[
    "offered", "leased", "accepted", "merged", "left_out", "rejected", "expired", "failed", "cancelled"
]
ACCEPTED: tuple[TaskState, ...] = ("accepted", "merged", "left_out")
"""States of a task whose report was accepted, including those after the round's end."""

TokenRole = Literal["admin", "orchestrator", "viewer", "site", "enrolment"]
EnrolmentState = Literal["pending", "approved", "declined", "expired"]

SecretHash = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""The SHA-256 of a whole token. A coordinator keeps it, and not the token."""

ShortText = Annotated[str, Field(pattern=r"^[ -~]*$", max_length=64)]
"""A worker's description of itself, for people."""


class Message(BaseModel):
    """A value whose reader passes over fields that it does not know."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


def canonical(value: BaseModel) -> bytes:
    """Return the value as JSON in one form only, so that equal values have equal digests."""
    return json.dumps(value.model_dump(mode="json"), sort_keys=True, separators=(",", ":")).encode()


Phase = Literal["waiting", "fetching", "training", "evaluating", "describing", "held", "uploading"]

Counted = Annotated[int, Field(ge=0, lt=1 << 53)]
Measured = Annotated[float, Field(ge=0, lt=1 << 53)]

MAX_LOG_EVENTS = 20
"""Events of a worker's log tail in a heartbeat."""


EPSILON = "epsilon"
"""Name of the metric that bounds what all of the worker's work for the run reveals about one example: the epsilon of
its own ledger at the run's delta."""

SCORED_LABELS = "labels"
"""Name of an evaluation's number of scored labels, the weight of its other metrics; sent where it is not the number
of examples."""

CHOICE_ACCURACY = "choice_accuracy"
"""Name of the share of questions whose right answer the model finds more likely than the others."""

EXACT_MATCH, ROUGE_L = "exact_match", "rouge_l"
"""Names of the scores of generated answers."""

MAX_INLINE_BLOBS = 1024
"""Blobs that may come with a task."""


AuditHead = Annotated[str, Field(pattern=r"^[0-9a-f]{64}$")]
"""Digest, under the site's key, of the last entry of its audit chain. The site can find lost entries by it;
others learn nothing."""


GIVEN_BACK = frozenset({"awaiting-approval", "declined", "approval-ended"})
"""Codes of tasks that a worker returns because its site has not approved the run; they do not count as failures."""


T = TypeVar("T")


class Page(Message, Generic[T]):
    """A page of a collection; `next_cursor` is null on the last one."""

    items: tuple[T, ...]
    next_cursor: str | None = None
