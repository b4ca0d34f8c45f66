"""Sums of differences of many small tensors, computed as those of one."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from math import prod

import numpy as np

from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import (
    CHUNK,
    PIECE,
    Array,
    OverwrittenTensor,
    SteppedTensor,
    StepsOf,
    Tensor,
    WeightedSum,
    numel,
)


@dataclass(frozen=True, eq=False)
class TensorBundle:
    """Small tensors of one type, one behind the other, in a single chunk."""

    parts: tuple[Tensor, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return (sum(map(numel, self.parts)),)

    @property
    def dtype(self) -> DType:
        return self.parts[0].dtype

    def chunks(self) -> Iterator[Array]:
        # By `map`, which does not hold the chunk until it is asked for another.
        return map(TensorBundle._whole, [self])

    def _whole(self) -> Array:
        whole, at = np.empty(self.shape, NUMPY_DTYPES[self.dtype]), 0
        for part in self.parts:
            # Copied while its file is open: reading a part of a closed file brings in pages that nothing releases.
            for chunk in part.chunks():
                whole[at : at + chunk.size] = chunk
                at += chunk.size
        return whole


def bundles(groups: Sequence[Sequence[Tensor]]) -> list[list[int]]:
    """Return the places of the groups to compute together: each alone, but for sums over equally weighted senders of
    small tensors that share no source, which are up to `CHUNK` elements together."""
    found: list[list[int]] = []
    open_: dict[tuple[object, ...], tuple[list[int], int]] = {}
    for place, group in enumerate(groups):
        key = _alike(group[0]) if len(group) == 1 else None
        size = numel(group[0])
        bundle, room = open_.get(key, ([], 0)) if key else ([], 0)
        if room < size:
            bundle, room = [], CHUNK
            found.append(bundle)
        bundle.append(place)
        if key:
            open_[key] = bundle, room - size
    return found


def _alike(tensor: Tensor) -> tuple[object, ...] | None:
    """Return the properties that bundled sums have in common; None for another tensor or a large one."""
    if type(tensor) not in (SteppedTensor, OverwrittenTensor) or not 0 < prod(tensor.shape) <= PIECE:
        return None
    base, step, *sender = tensor.sources  # type: ignore[attr-defined]
    if type(step) is not WeightedSum or any(isinstance(source, StepsOf) for source in step.sources):
        return None
    types = tuple(source.dtype for source in (base, *step.sources, *sender))
    return type(tensor), tensor.dtype, step.dtype, step.weights, types


def bundled(tensors: Sequence[SteppedTensor]) -> SteppedTensor:
    """Return the tensors of a bundle one behind the other, as one that is computed in the same way."""
    base = TensorBundle(tuple(tensor.sources[0] for tensor in tensors))
    steps = [tensor.step for tensor in tensors]
    senders = [TensorBundle(parts) for parts in zip(*(step.sources[1:] for step in steps), strict=True)]
    step = replace(steps[0], shape=base.shape, sources=(base, *senders))
    # A third source is the only sender.
    return replace(tensors[0], shape=base.shape, sources=(base, step, *senders[: len(tensors[0].sources) - 2]))
