"""The server optimizer's step from a merged round to the next version."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from tessera.shared.aggregation.server_optimizer import PREFIX, OptimizerMoment, OptimizerRule
from tessera.shared.methods.base import REFERENCE, CoordinatorHalf, State, Update
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import Array, ComputedTensor, DerivedTensor, SteppedTensor, Tensor
from tessera.shared.tensors.statistics import is_statistic

MEMORY = "memory/"
"""The prefix of the names of a run's memory of updates in its server state (`shared.rounds.update_memory`)."""

KEPT = (PREFIX, REFERENCE, MEMORY, "region/")
"""The prefixes of the server state that methods do not see."""


def merge(
    half: CoordinatorHalf[Any],
    optimizer: OptimizerRule,
    state: State,
    updates: Sequence[Update],
    release: Callable[[State, State], State] | None = None,
) -> State:
    """Return a method's next state, with each block that its merge changed stepped by the optimizer instead, but for
    running statistics.

    The method sees nothing of the optimizer's memory, nor of a memory of updates and the run's first adapters, which
    stay. Raises ValueError
    if its own has names like that. `release` returns the state that the optimizer gets, from the last one and the
    method's.
    """
    moments = {name: tensor for name, tensor in state.server_state.items() if name.startswith(KEPT)}
    own = {name: tensor for name, tensor in state.server_state.items() if name not in moments}
    merged = half.merge(replace(state, server_state=own), updates)
    if release:
        merged = release(state, merged)
    if taken := sorted(name for name in merged.server_state if name.startswith(KEPT)):
        raise ValueError(f"the method's memory has names that are kept for others: {taken[:8]}")
    model = dict(merged.model)
    if not optimizer.neutral:
        for name, tensor in merged.model.items():
            if tensor is not state.model[name] and not is_statistic(name):
                model[name], changed = _step(optimizer, name, state.model[name], tensor, moments)
                moments |= changed
    return replace(merged, model=model, server_state={**merged.server_state, **moments})


def _step(
    optimizer: OptimizerRule, name: str, base: Tensor, merged: Tensor, moments: Mapping[str, Tensor]
) -> tuple[Tensor, dict[str, Tensor]]:
    """Return a block's next value, and its moments by their names in memory."""
    g = negative_step(base, merged)
    entered = {
        letter: _entered(moment, moments.get(f"{PREFIX}{letter}/{name}"), g, base.dtype)
        for letter, moment in optimizer.moments().items()
    }

    def stepped(parts: Sequence[Array]) -> Array:
        start, now, *rest = map(_wide, parts)
        # Subtracted, because x - 0.0 is x for every x, while -0.0 + 0.0 is 0.0.
        moved: Array = start - optimizer.step(now, dict(zip(entered, rest, strict=True)))
        return moved

    new = ComputedTensor(base.shape, base.dtype, (base, g, *entered.values()), stepped)
    return new, {f"{PREFIX}{letter}/{name}": tensor for letter, tensor in entered.items()}


def negative_step(base: Tensor, merged: Tensor) -> Tensor:
    """Return base - merged, before `merged` is rounded: in 16 bits the rounding can be as large as the step."""
    if isinstance(merged, SteppedTensor) and merged.sources[0] is base:
        return merged.step
    exact = replace(merged, dtype="F64") if isinstance(merged, DerivedTensor) else merged
    return ComputedTensor(base.shape, "F64", (base, exact), lambda parts: _wide(parts[0]) - _wide(parts[1]))


def _entered(moment: OptimizerMoment, last: Tensor | None, gradient: Tensor, kind: DType) -> Tensor:
    """Return the moment with one more gradient in it: in float32, or in float64 for blocks of that."""

    def enter(parts: Sequence[Array]) -> Array:
        g, *before = map(_wide, parts)
        return moment.next(before[0] if before else np.full_like(g, moment.start), g)

    if last is not None and last.shape != gradient.shape:
        raise ValueError(f"a moment of shape {last.shape} is not one of a block of shape {gradient.shape}")
    sources = (gradient,) if last is None else (gradient, last)
    return ComputedTensor(gradient.shape, "F64" if kind == "F64" else "F32", sources, enter)


def _wide(part: Array) -> Array:
    return part.astype(np.float64, copy=False)
