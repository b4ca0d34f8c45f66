"""Every update is checked before it is accepted (invariant I10): its form first, then each value in it, streamed."""

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from io import BytesIO
from itertools import accumulate
from math import isfinite, sqrt

import numpy as np

from tessera.shared.api.versions import Manifest
from tessera.shared.methods.base import UPDATE_NORM, Plan
from tessera.shared.model.spec import Model
from tessera.shared.problems import MAX_FAULTS, Fault, InvalidUpdate
from tessera.shared.rounds.blob_store import BlobStore
from tessera.shared.rounds.versions import States
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import PIECE, Array, Tensor, ZeroTensor, numel, squares
from tessera.shared.updates.codecs.delta import difference
from tessera.shared.updates.errors import Malformed
from tessera.shared.updates.update_file import (
    DecodedTensor,
    EncodedTensor,
    UpdateTensor,
    decoded,
    of_whole,
    read_update,
)

MAX_TIMES = 2.0**23
"""Limit on the norm of a block's step, in multiples of the version's norm, with 1 added to both mean squares for
blocks that start at zero. In float32, a sum with such a step retains no bit of the version: it replaces it."""


@dataclass
class HeldUpdates:
    """Checked updates that wait in this process to be merged, with small blocks decoded, up to `limit_bytes`."""

    limit_bytes: int
    blocks: dict[str, Mapping[str, UpdateTensor]] = field(default_factory=dict)
    """By the update's digest, then by name."""
    held_bytes: int = 0
    starts: dict[tuple[str, DType], Array] = field(default_factory=dict)
    """The values of small blocks of the version, by digest and type."""

    def start_of(self, base: Tensor) -> Array:
        """Return the values of a small block of the version, or of zeros."""
        if isinstance(base, ZeroTensor):
            return next(base.chunks())
        key = (getattr(base, "digest", ""), base.dtype)
        if key not in self.starts:
            (self.starts[key],) = base.chunks()
        return self.starts[key]

    def hold(self, digest: str, blocks: Mapping[str, UpdateTensor]) -> None:
        nbytes = sum(tensor.block.nbytes for tensor in blocks.values())
        if digest not in self.blocks and self.held_bytes + nbytes <= self.limit_bytes:
            self.blocks[digest] = blocks
            self.held_bytes += nbytes

    def clear(self) -> None:
        """Release all, at the end of a round."""
        self.blocks.clear()
        self.starts.clear()
        self.held_bytes = 0


@dataclass(frozen=True)
class Inspector:
    blobs: BlobStore
    states: States
    held: HeldUpdates | None = None
    """Checked updates that wait for a merge in this process; None to read them again."""

    def open(
        self, digest: str, model: Model, manifest: Manifest, plan: Plan, data: bytes | None = None
    ) -> dict[str, EncodedTensor]:
        """Return an update's blocks, lazily decoded, by name; `data` has its bytes if it is not stored.

        Raises InvalidUpdate if its form is wrong.
        """
        bases: dict[str, Tensor] = {
            block.name: self.states.tensor(block, manifest) for block in plan.upload.resolve(model.blocks)
        }
        self.blobs.expect({manifest.blocks[name] for name in bases})
        asked = {block.name: block for block in plan.sent(model.blocks)}
        bases = {name: bases.get(name) or ZeroTensor(block.shape, block.dtype) for name, block in asked.items()}
        if data is not None:
            return read_update(partial(BytesIO, data), len(data), asked, bases)
        return read_update(partial(self.blobs.open, digest), self.blobs.size(digest), asked, bases)

    def hold(self, digest: str, blocks: Mapping[str, UpdateTensor]) -> None:
        """Hold a checked update, if this inspector holds any."""
        if self.held:
            self.held.hold(digest, blocks)

    def start_of(self, base: Tensor) -> Array:
        """Return the values of a small block of a version."""
        return self.held.start_of(base) if self.held else next(base.chunks())

    def release(self) -> None:
        """Release the updates that are held, once they are merged."""
        if self.held:
            self.held.clear()

    def reopen(self, digest: str, model: Model, manifest: Manifest, plan: Plan) -> Mapping[str, UpdateTensor]:
        """Return the blocks of an update that was checked, as `open` does."""
        held = self.held.blocks.get(digest) if self.held else None
        return self.open(digest, model, manifest, plan) if held is None else held

    def checked(
        self,
        digest: str,
        model: Model,
        manifest: Manifest,
        plan: Plan,
        max_norm: float | None,
        data: bytes | None = None,
        most_weight: int | None = None,
    ) -> tuple[Mapping[str, float], Sequence[str]]:
        """Read the whole update and return its norm as a metric, and the names of its blocks in the order of
        the table. `most_weight` is the limit on the examples behind a block; None if no block may name any.

        Raises InvalidUpdate naming every block that cannot be decoded, is not finite or is absurdly far from its
        version, or a norm out of bounds.
        """
        sent = self.open(digest, model, manifest, plan, data)
        blocks: Mapping[str, UpdateTensor] = sent
        if self.held:
            # Below, each block that is malformed is named.
            with suppress(Malformed):
                blocks = decoded(sent, self.held.start_of)
        extra = {each.block.name for each in plan.extra}
        if lacking := sorted(extra - blocks.keys()):
            raise of_whole("extra-missing", f"the update lacks {', '.join(lacking)}", "Send all arrays of the plan.")
        if plan.upload and blocks.keys() <= extra:
            raise of_whole("no-block", "the update holds no block", "Send at least one of the blocks asked for.")
        _require_weights(sent, most_weight)
        faults: list[Fault] = []
        squares, usual = 0.0, small_step_squares(blocks)
        for name, tensor in blocks.items():
            try:
                found = usual[name] if name in usual else step_squares(tensor, tensor.base)
                squares += 0 if name in extra else found
            except Malformed as fault:
                faults.append(Fault(pointer=name, detail=str(fault)[:300], code=fault.code))
            if len(faults) >= MAX_FAULTS:
                break
        if faults:
            raise InvalidUpdate(f"{len(faults)} blocks of the update cannot be used", errors=faults)
        norm = sqrt(squares)
        if not isfinite(norm):
            raise of_whole("norm-overflow", "the update is so far from its version that its l2 norm overflows")
        if max_norm is not None and norm > max_norm:
            said = f"the update's l2 norm is {norm:.6g}; this run takes at most {max_norm:.6g}"
            raise of_whole("norm-limit", said)
        self.hold(digest, blocks)
        return {UPDATE_NORM: norm}, [block.name for block in model.blocks if block.name in blocks]


def _require_weights(sent: Mapping[str, EncodedTensor], most: int | None) -> None:
    """Raise InvalidUpdate for a block with more examples of its own than these, or with any if `most` is None."""
    for name, tensor in sent.items():
        if tensor.weight is not None and (most is None or tensor.weight > most):
            why = "the run's method weighs updates, not blocks" if most is None else f"the update is of {most}"
            raise of_whole("weight-unusable", f"{name} names {tensor.weight} examples of its own; {why}")


class NotFinite(Malformed):
    """A block holds NaN or infinity."""


class TooFar(Malformed):
    """A block is finite, and absurdly far from its version."""


def small_step_squares(blocks: Mapping[str, Tensor]) -> dict[str, float]:
    """Return `step_squares` of the blocks that are decoded in memory, whose differences are computed as one. Blocks
    with values that are not finite or far from the version's are left out."""
    groups: dict[DType, dict[str, DecodedTensor]] = {}
    for name, tensor in blocks.items():
        if isinstance(tensor, DecodedTensor):
            groups.setdefault(tensor.dtype, {})[name] = tensor
    found: dict[str, float] = {}
    with np.errstate(over="ignore", invalid="ignore"):
        for group in groups.values():
            values, starts = ([getattr(one, each) for one in group.values()] for each in ("values", "start"))
            steps = difference(np.concatenate(values), np.concatenate(starts))
            ends = accumulate(own.size for own in values)
            for (name, own), end in zip(group.items(), ends, strict=True):
                found[name] = squares(steps[end - own.values.size : end])
    limits = {name: MAX_TIMES**2 * numel(blocks[name]) for name in found}
    return {name: total for name, total in found.items() if total <= limits[name]}


def step_squares(tensor: Tensor, base: Tensor) -> float:
    """Return the sum of squares of the difference, infinite if it overflows. Raises NotFinite, TooFar, and
    CodecError."""
    total = 0.0
    # Decoding is in here too: hostile scales overflow the scaled values, which are then not finite.
    with np.errstate(over="ignore", invalid="ignore"):
        starts = [tensor.start] if isinstance(tensor, DecodedTensor) else base.chunks()
        for chunk, start in zip(tensor.chunks(), starts, strict=True):
            for at in range(0, chunk.size, PIECE):
                values = chunk[at : at + PIECE]
                found = squares(difference(values, start[at : at + PIECE]))
                # A value that is not finite makes the sum so.
                if not isfinite(found):
                    if wrong := int((~np.isfinite(values)).sum()):
                        raise NotFinite("not-finite", f"{wrong} or more values are NaN or infinite")
                    found = _wide_squares(values, start[at : at + PIECE])
                total += found
        # A version of zeros would allow this much, so only larger steps need the version's own norm.
        before = (
            sum(_narrow_squares(start) for start in base.chunks()) if total > MAX_TIMES**2 * numel(tensor) else 0.0
        )
    if total > MAX_TIMES**2 * (before + numel(tensor)):
        moved, was = sqrt(total / numel(tensor)), sqrt(before / numel(tensor))
        detail = f"its values moved by {moved:.3g} and were {was:.3g} (root mean squares): nothing of them is left"
        raise TooFar("too-far", detail)
    return total


def _narrow_squares(values: Array) -> float:
    """Return the sum of squares of values as float32, infinite if they overflow it."""
    return squares(values.astype(np.float32, copy=False))


def _wide_squares(values: Array, start: Array) -> float:
    """Return the same in float64, which overflows on no finite float32."""
    step = values.astype(np.float64) - start.astype(np.float64)
    return float(np.einsum("i,i", step, step))
