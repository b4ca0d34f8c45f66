"""Rounds with secure sums: their scales, their check on arrival, and the mean of an opened sum."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from typing import Any, NamedTuple

import numpy as np
from pydantic import ValidationError

from tessera.shared.aggregation.mean import Normalization
from tessera.shared.api.runs import RunSpec
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import Plan, State
from tessera.shared.model.spec import Model
from tessera.shared.privacy.noise_shares import MAX_EXPONENT
from tessera.shared.problems import faults_of
from tessera.shared.rounds.blob_store import BlobStore
from tessera.shared.rounds.client_privacy import noise_share, noise_terms
from tessera.shared.rounds.planning import task_of, training_seed
from tessera.shared.schema import Digest
from tessera.shared.secure_sums.committee import SenderSet, sender_set
from tessera.shared.secure_sums.envelope import own_blocks
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.masked_update import RingTensor, read_ring
from tessera.shared.secure_sums.messages import (
    Envelope,
    RingBlock,
    SiteKeys,
    Terms,
    levels_of,
)
from tessera.shared.secure_sums.opened import MeanStep, OpenedSum
from tessera.shared.tensors.lazy import SteppedTensor, Tensor, numel, squares
from tessera.shared.updates.update_file import of_whole


class Precision(NamedTuple):
    """The units of integers: bits after the point of a value of a usual size, and the room for large ones."""

    step: int
    """Bits beside the last round's root mean square step."""
    first: int
    """Bits beside the version's own values, for a block without a known step."""
    largest: float
    """Units that the largest value of the last step may take. A site that moved it alone sent as many times that as
    there are senders, and has room for twice as much. With less room, values that single sites move would be cut
    off, the step and the next unit would shrink with them, and nothing of them would arrive after some rounds."""

    @classmethod
    def of(cls, bits: int, senders: int) -> Precision:
        """Return the precision of sums of these bits.

        With 32, rounding adds an error of less than a thousandth of a step, but for first steps of less than 1e-4 of
        the values. With 16, steps of sixteen times the last ones, and at first of four times the values, have room: a
        site keeps what is beyond for its next update.
        """
        levels = levels_of(bits, senders)
        room, largest = math.floor(math.log2(levels)), levels / (2 * senders)
        return cls(12, min(22, room - 5), largest) if bits == 32 else cls(room - 4, room - 2, largest)


def terms_of_round(
    spec: RunSpec,
    model: Model,
    plans: Mapping[str, Plan],
    keys: Mapping[str, SiteKeys],
    max_weight: int,
    state: State,
    before: State | None,
    *,
    run: str,
    attempt: int,
    version: VersionRef,
    values: Digest,
) -> Terms:
    """Return the terms of the round after a version. `keys` are the public keys of the helpers' sites, `max_weight`
    is the largest weight of a planned site, and `before` the state of the version before. Raises ValueError if the
    plans differ."""
    assert spec.secure_sums is not None  # noqa: S101 (for the types)
    plan = next(iter(plans.values()))
    if differing := sorted(worker for worker, other in plans.items() if other != plan):
        raise ValueError(f"secure_sums needs one plan for all sites, and {differing[:4]} have others")
    number = version.number + 1
    about: dict[str, Any] = {
        "task_id": "terms",
        "token": 0,
        "kind": "train",
        "held_out": False,
        "seed": training_seed(spec, number, ""),
        "lease_seconds": 1.0,
    }
    task = task_of(spec, plan, version, run=run, number=number, **about)
    quorum = spec.secure_sums.quorum
    senders = max(quorum, len(plans))
    bits = spec.secure_sums.bits
    blocks, noise = ring_blocks(model, plans.values(), state, before, Precision.of(bits, senders)), None
    if spec.client_privacy:
        share = noise_share(spec, sum(block.elements for block in blocks.values()), senders)
        noise, max_weight = noise_terms(spec, share), 1
        blocks = {name: RingBlock(elements=one.elements, exponent=share.exponent) for name, one in blocks.items()}
    return Terms(
        run=run,
        round=number,
        attempt=attempt,
        version=version.digest,
        values=values,
        repeat_model=spec.secure_sums.repeat_model,
        settings=task.alike_digest,
        helpers=tuple(keys[site] for site in spec.secure_sums.helpers),
        quorum=quorum,
        max_senders=senders,
        max_weight=max_weight,
        bits=bits,
        blocks=blocks,
        noise=noise,
    )


def ring_blocks(
    model: Model, plans: Collection[Plan], state: State, before: State | None, precision: Precision
) -> dict[str, RingBlock]:
    """Return the blocks that plans upload, with a scale each from the last step, or else from their values."""
    found = {}
    for block in model.blocks:
        if any(plan.upload.holds(block) for plan in plans):
            present = state.model[block.name]
            exponent = exponent_of(present, before.model[block.name] if before else present, precision)
            found[block.name] = RingBlock(elements=block.numel, exponent=exponent)
    return found


def exponent_of(present: Tensor, before: Tensor, precision: Precision) -> int:
    """Return the exponent of a block's unit from its last step, or else from its values."""
    moved = largest = 0.0
    if present != before:
        for value, start in zip(present.chunks(), before.chunks(), strict=True):
            step = np.asarray(value - start, np.float32)
            moved += squares(step)
            largest = max(largest, float(step.max(initial=0)), -float(step.min(initial=0)))
    size = (moved or sum(squares(np.asarray(chunk, np.float32)) for chunk in present.chunks())) / numel(present)
    if not (size and math.isfinite(size)):
        # Zero so far: as for values of about 1.
        return -precision.first
    exponent = math.floor(math.log2(size) / 2) - (precision.step if moved else precision.first)
    if largest:
        exponent = max(exponent, math.ceil(math.log2(largest / precision.largest)))
    return max(-MAX_EXPONENT, min(exponent, MAX_EXPONENT))


def check_masked(
    text: str | None,
    terms: Terms,
    site: str,
    weight: int | None,
    update: str,
    asked: Collection[str],
    blobs: BlobStore,
    data: bytes | None,
    identity: str | None = None,
) -> tuple[Envelope, tuple[str, ...]]:
    """Return the envelope of a masked update, and its blocks. `data` has the update's bytes if it is not stored;
    `weight` and `identity` are the weight and key that the worker declares, if known.

    Its values say nothing, so only its form is checked, and that the envelope is about it. Raises InvalidUpdate.
    """
    try:
        envelope = Envelope.model_validate_json(text or "{}")
        _require((envelope.site, envelope.update) == (site, update), "it is of another site or another update")
        # Helpers would refuse the whole set: an envelope is better refused alone.
        _require(identity in (None, envelope.identity), "it is under another key than its worker declares")
        declared = f"its weight is {envelope.weight}; its worker declares {weight}"
        _require(weight in (None, envelope.weight), declared)
        blocks = own_blocks(envelope, terms)
        unasked = sorted(set(blocks) - set(asked))
        _require(not unasked, f"the plan does not ask for {unasked[:4]}")
        opened = partial(BytesIO, data) if data is not None else partial(blobs.open, update)
        read_ring(opened, len(data) if data is not None else blobs.size(update), terms, blocks)
    except (ValidationError, SumRefused) as fault:
        detail = faults_of(fault)[0].detail if isinstance(fault, ValidationError) else str(fault)
        raise of_whole("envelope-unusable", f"the envelope of the masked update cannot be used: {detail}") from None
    return envelope, blocks


def _require(holds: bool, otherwise: str) -> None:
    if not holds:
        raise SumRefused("malformed", otherwise)


@dataclass(frozen=True)
class Sums:
    """The opened sums of a round: its senders' signed envelopes, and the sums of their masks."""

    terms: Terms
    envelopes: Mapping[str, Envelope]
    """By worker."""
    mask_sums: Sequence[str]
    """The digests of the helpers' sums, which together have the masks from each seed once."""

    @property
    def senders(self) -> SenderSet:
        return sender_set(self.terms, list(self.envelopes.values()))

    def moved(
        self, state: State, blobs: BlobStore, normalization: Normalization, divisor: int | None = None
    ) -> dict[str, Tensor]:
        """Return the blocks that enough sites sent, moved by the sites' mean step, or by their sum over `divisor`."""
        found = self.senders
        files = {e.site: self._ring(blobs, e.update, e.block_names(self.terms)) for e in found.envelopes}
        masks = [self._ring(blobs, digest, sorted(found.senders)) for digest in self.mask_sums]
        whole = sum(envelope.weight for envelope in found.envelopes)
        moved: dict[str, Tensor] = {}
        for name, sites in found.senders.items():
            base, ring = state.model[name], self.terms.blocks[name]
            updates = [files[site][name] for site in sites]
            total = OpenedSum(updates, [each[name] for each in masks], self.terms.bits, ring.elements)
            weight = divisor or (found.weight(name) if normalization == "participants" else whole)
            # Subtracted, because x - 0.0 is x for every x, while -0.0 + 0.0 is 0.0.
            factor = -self.terms.max_weight * 2.0**ring.exponent / weight
            moved[name] = SteppedTensor(base.shape, base.dtype, (base, MeanStep(total, factor, base.shape)))
        return moved

    def _ring(self, blobs: BlobStore, digest: str, blocks: Sequence[str]) -> dict[str, RingTensor]:
        return read_ring(partial(blobs.open, digest), blobs.size(digest), self.terms, blocks)
