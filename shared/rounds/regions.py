"""A region's run: rounds on a version of a parent's run, whose steps together are one update for the parent.

The region's coordinator merges its sites' updates as in any run. A version then also has the steps from the parent's
version before they are rounded to the model's type, and the examples and senders behind each block, in its server
state. They begin again once the parent's next version has taken the place of the region's own.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import CoordinatorHalf, State, Update
from tessera.shared.rounds.server_step import negative_step
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import Array, ArrayTensor, ComputedTensor, Tensor, to_array

PREFIX = "region/"
"""The prefix of the names of a region's values in server state and scalars, which methods do not see."""
STEP = f"{PREFIX}step/"
"""That of a block's step from the parent's version: float32, or float64 for a block of that."""
COUNTS = f"{PREFIX}counts"
"""The examples and, below them, the sites behind each block in the model's order: float64 [2, blocks]. Of several
rounds, the sum of the examples and the fewest sites."""
PARENT = f"{PREFIX}parent_version"
"""The scalar with the number of the parent's version on which the region trains."""
ROUNDS = f"{PREFIX}rounds"
"""The scalar with the number of rounds since."""
EXAMPLES = f"{PREFIX}examples"
"""The scalar with the sum of the examples of these rounds."""
SITES = f"{PREFIX}sites"
"""The scalar with the number of sites in the smallest of them."""


@dataclass(frozen=True)
class RegionCounts:
    """The examples and the sites behind a region's update."""

    examples: int
    sites: int
    of_blocks: Mapping[str, tuple[int, int]]
    """The examples and the sites behind each block that any site sent."""


def begun(spec: RunSpec, state: State) -> State:
    """Return the state before the first round on the parent's version, which is that of `spec.parent`."""
    if spec.parent is None:
        return state
    number = float(spec.parent.base.number)
    return replace(state, scalars={**state.scalars, PARENT: number, ROUNDS: 0.0, EXAMPLES: 0.0, SITES: 0.0})


def with_steps(half: CoordinatorHalf[Any], before: State, after: State, updates: Sequence[Update]) -> State:
    """Return a merged version with the region's steps so far. `updates` are those of the sites."""
    memory = dict(after.server_state)
    counts = _counts(half, updates)
    if COUNTS in before.server_state:
        last = to_array(before.server_state[COUNTS])
        moved = (last[0] > 0) & (counts[0] > 0)
        fewest = np.where(moved, np.minimum(last[1], counts[1]), np.maximum(last[1], counts[1]))
        counts = np.stack([last[0] + counts[0], fewest])
    memory[COUNTS] = ArrayTensor(counts, "F64")
    for name, tensor in after.model.items():
        if tensor is not before.model[name]:
            memory[STEP + name] = _step(before.model[name], tensor, before.server_state.get(STEP + name))
    scalars, sites = before.scalars, float(len(updates))
    counted = {
        PARENT: scalars[PARENT],
        ROUNDS: scalars[ROUNDS] + 1,
        EXAMPLES: scalars[EXAMPLES] + sum(update.examples for update in updates),
        SITES: min(scalars[SITES] or sites, sites),
    }
    return replace(after, server_state=memory, scalars={**after.scalars, **counted})


def counts_of(names: Sequence[str], scalars: Mapping[str, float], counts: Array) -> RegionCounts:
    """Return the counts of a version. Numbers of examples are means over its rounds. `names` are of all blocks."""
    rounds = int(scalars[ROUNDS])

    def per_round(examples: float) -> int:
        return -(-int(examples) // rounds)

    of_blocks = {n: (per_round(e), int(s)) for n, e, s in zip(names, *counts, strict=True) if e}
    return RegionCounts(per_round(scalars[EXAMPLES]), int(scalars[SITES]), of_blocks)


def _counts(half: CoordinatorHalf[Any], updates: Sequence[Update]) -> Array:
    found = np.zeros((2, len(half.run.blocks)))
    for place, block in enumerate(half.run.blocks):
        senders = [update.examples for update in updates if block.name in update.blocks]
        found[:, place] = sum(senders), len(senders)
    return found


def _step(base: Tensor, merged: Tensor, last: Tensor | None) -> Tensor:
    """Return the step from the parent's version: that of this round, and of the rounds before it."""
    turned = negative_step(base, merged)
    sources = (turned,) if last is None else (turned, last)
    dtype: DType = "F64" if base.dtype == "F64" else "F32"

    def added(parts: Sequence[Array]) -> Array:
        step: Array = -parts[0]
        return step if last is None else parts[1] + step

    return ComputedTensor(base.shape, dtype, sources, added)
