"""Secure sums over HTTP: a run's settings, and what the tasks of senders and helpers carry."""

from __future__ import annotations

from typing import ClassVar, Literal, get_args

from pydantic import Field, NonNegativeInt, field_validator

from tessera.shared.schema import AuditHead, Compatibility, Digest, Label, Message, Value
from tessera.shared.secure_sums.messages import LEAST_QUORUM, MAX_HELPERS, MAX_SENDERS, Agreement

HelperKind = Literal["agree", "open", "abandon"]
"""Tasks of helpers: to sign which sites sent an update, to return the sum of their masks, and to sign that they never
open the sum of an abandoned attempt."""

HELPER_KINDS: tuple[HelperKind, ...] = get_args(HelperKind)

MAX_STATEMENT_BYTES = 1 << 15
"""The longest envelope of an update, as JSON."""

MAX_DOCUMENT_BYTES = MAX_SENDERS * MAX_STATEMENT_BYTES


class SecureSums(Value):
    """Secure aggregation: the coordinator learns the sum of the sites' updates, and none of the updates. Without
    privacy beside it, the sum itself is exact."""

    buffered: ClassVar[Compatibility] = Compatibility("the terms of a sum name one version for all")
    unequal_steps: ClassVar[Compatibility] = Compatibility("the plan of a sum is the same for all sites")

    helpers: tuple[Label, ...] = Field(
        min_length=3,
        max_length=MAX_HELPERS,
        description="the sites that open sums together; with 4, one of them may be away or collude with the "
        "coordinator, with 7 two",
    )
    quorum: int = Field(
        default=5,
        ge=LEAST_QUORUM,
        le=MAX_SENDERS,
        description="a block that fewer sites sent is not opened, and stays as it was",
    )
    bits: Literal[16, 32] = Field(
        default=32,
        description="of each value in a sum: 16 halve the bytes of updates and of masks, and each site keeps what "
        "rounding drops for its next update",
    )
    repeat_model: bool = Field(
        default=False,
        description="sites may have sent updates from the same model into sums of other runs, as to compare methods: "
        "each site's operator has to allow it, since the difference of two sums may reveal a site's update",
    )

    @field_validator("helpers")
    @classmethod
    def _of_different_sites(cls, helpers: tuple[str, ...]) -> tuple[str, ...]:
        if len(set(helpers)) < len(helpers):
            raise ValueError("a site is named twice")
        return helpers


class SumTask(Message):
    """The subject of a task of a run with secure sums, beside its plan."""

    terms: Digest
    """The blob of the round's terms, or of the terms to be abandoned."""
    document: Digest | None = None
    """For a helper: the blob of the envelopes and signatures."""
    seeds: tuple[NonNegativeInt, ...] = Field(default=(), max_length=64)
    """For a helper that opens: the numbers of the seeds whose masks it sums up."""


class HelperReport(Message):
    """The result of a helper's task: its signature, or the digest of the mask sums, which it uploaded before."""

    token: int
    agreement: Agreement | None = None
    mask_sums: Digest | None = None
    download_bytes: NonNegativeInt = Field(default=0, lt=1 << 53)
    audit_head: AuditHead | None = None
