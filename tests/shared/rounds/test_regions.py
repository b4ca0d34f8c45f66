"""The steps of a region's run, as sums by hand."""

from __future__ import annotations

import io
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import pytest

from tessera.shared.aggregation.server_optimizer import NoOptimizer
from tessera.shared.methods.base import MethodSpec, RunInfo, State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.spec import Model
from tessera.shared.rounds.regions import COUNTS, EXAMPLES, PARENT, ROUNDS, SITES, STEP, counts_of, with_steps
from tessera.shared.rounds.server_step import merge
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.shared.updates.update_file import TrainedBlock, read_update, write_update
from tessera.worker.task.upload import STEPS
from tests.support.federation import values
from tests.support.regions import typed_model

NEW = {PARENT: 7.0, ROUNDS: 0.0, EXAMPLES: 0.0, SITES: 0.0}


def half_of(model: Model) -> Any:
    return coordinator_half(MethodSpec(name="fedavg"), RunInfo(model.blocks, 3))


def state_of(model: Model, blocks: Mapping[str, Array]) -> State:
    return State(0, {b.name: ArrayTensor(blocks[b.name], b.dtype) for b in model.blocks}, scalars=NEW)


def update_of(model: Model, state: State, name: str, examples: int, steps: Mapping[str, Array], codec: str) -> Update:
    """What a worker sends, read from its file as a coordinator does."""
    changes = [
        TrainedBlock(model.by_name[block], state.model[block], state.model[block], step.reshape(-1))
        for block, step in steps.items()
    ]
    file = io.BytesIO()
    write_update(file, codec, changes)
    blocks = {change.block.name: change.block for change in changes}
    sent = read_update(partial(io.BytesIO, file.getvalue()), len(file.getvalue()), blocks, state.model)
    return Update(name, examples, sent)


def region_of(model: Model, state: State, updates: Sequence[Update]) -> State:
    half = half_of(model)
    return with_steps(half, state, merge(half, NoOptimizer(), state, updates), updates)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
def test_a_16_bit_model_is_rounded_once_as_without_regions(dtype: str) -> None:
    model = typed_model(dtype)
    state = state_of(model, values(model))
    rng = np.random.default_rng(1)
    # Steps far below a unit in the last place of most weights of 16 bits.
    moved = {
        name: {b.name: rng.normal(0, 1e-3, b.shape).astype(np.float32) for b in model.blocks} for name in "abcde"
    }
    examples = dict(zip("abcde", (3, 7, 20, 1, 11), strict=True))
    sent = {n: update_of(model, state, n, examples[n], moved[n], STEPS) for n in "abcde"}
    flat = merge(half_of(model), NoOptimizer(), state, list(sent.values()))
    merged = []
    for members in ("abc", "de"):
        region = region_of(model, state, [sent[name] for name in members])
        steps = {b.name: to_array(region.server_state[STEP + b.name]) for b in model.blocks}
        total = sum(examples[name] for name in members)
        merged.append(update_of(model, state, members, total, steps, STEPS))
    nested = merge(half_of(model), NoOptimizer(), state, merged)
    for block in model.blocks:
        wide = [to_array(one.model[block.name]).astype(np.float64) for one in (flat, nested)]
        ulp = np.spacing(np.abs(to_array(flat.model[block.name]).astype(np.float32)))
        if dtype != "F32":
            # A sum in float32 that differs in its last bit falls on the other side of a tie once in thousands.
            assert (wide[0] == wide[1]).mean() > 0.998
            bits = {"BF16": 8, "F16": 11}[dtype]
            ulp = 2.0 ** (np.floor(np.log2(np.abs(wide[0]) + 1e-30)) - bits + 1)
        assert (np.abs(wide[0] - wide[1]) <= np.maximum(ulp, 1e-7)).all()
        # Rounded at the region first, most steps would be gone.
        twice = [w.astype(NUMPY_DTYPES[dtype]) for w in wide]
        assert np.array_equal(*twice) or dtype == "F32" or (twice[0] == twice[1]).mean() > 0.998


def test_steps_add_up_over_rounds_on_one_version_of_the_parent() -> None:
    model = typed_model("F32", 4)
    state = state_of(model, {b.name: np.zeros(b.shape, np.float32) for b in model.blocks})
    head, mlp = "head.weight", "layer.0.mlp.weight"
    ones = {n: np.ones(model.by_name[n].shape, np.float32) for n in (head, mlp)}
    for sizes in ((10, 30), (10, 60)):
        both = update_of(model, state, "a", sizes[0], ones, STEPS)
        part = update_of(model, state, "b", sizes[1], {head: 3 * ones[head]}, STEPS)
        state = region_of(model, state, [both, part])
    # head: (10 * 1 + 30 * 3) / 40 = 2.5, then (10 * 1 + 60 * 3) / 70; mlp: one site's 1, twice.
    assert np.allclose(to_array(state.server_state[STEP + head]), 2.5 + 190 / 70)
    assert np.array_equal(to_array(state.server_state[STEP + mlp]), 2 * ones[mlp])
    assert STEP + "layer.0.output.weight" not in state.server_state
    counts = counts_of([b.name for b in model.blocks], state.scalars, to_array(state.server_state[COUNTS]))
    # Means over both rounds: (40 + 70) / 2 examples at 2 sites; of mlp 10 at one.
    assert (counts.examples, counts.sites, counts.of_blocks) == (55, 2, {head: (55, 2), mlp: (10, 1)})
    assert (state.scalars[PARENT], state.scalars[ROUNDS]) == (7.0, 2.0)
