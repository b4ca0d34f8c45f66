"""Running statistics of batch normalisation: a version's variance is a mean of those that the sites sent."""

from __future__ import annotations

from dataclasses import replace
from io import BytesIO
from typing import Any

import numpy as np
import pytest

from tessera.shared.aggregation.local_work import EFFECTIVE_STEPS
from tessera.shared.aggregation.mean import average
from tessera.shared.aggregation.server_optimizer import Adam, Momentum, NoOptimizer, OptimizerRule
from tessera.shared.methods.base import MethodSpec, Plan, RunInfo, State, Update
from tessera.shared.methods.feddyn import SIZE
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.shared.rounds.server_step import merge
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import ArrayTensor, to_array
from tessera.shared.updates.rounded_steps import LEAST_ELEMENTS, rounded
from tessera.shared.updates.update_file import TrainedBlock, read_update, write_update

WEIGHT, VARIANCE = "bn.weight", "bn.running_var"
BLOCKS = tuple(Block(tensor=name, role="norm", shape=(2,), dtype="F32") for name in (WEIGHT, VARIANCE))
SGD = Training.model_validate({"optimizer": "sgd", "learning_rate": 0.1, "epochs": 1, "batch_size": 32})


def trained(variance: float, steps: int) -> float:
    """Return a running variance after these steps on a batch whose variance is 0.3, as torch updates it."""
    return 0.9**steps * variance + (1 - 0.9**steps) * 0.3


@pytest.mark.parametrize(
    ("method", "settings", "optimizer"),
    [
        ("fedavg", {}, NoOptimizer()),
        ("fedavg", {}, Momentum(momentum=0.9)),
        ("fedavg", {}, Adam(learning_rate=0.9)),
        ("fednova", {}, NoOptimizer()),
        ("feddyn", {"alpha": 0.01, "weigh": "examples"}, NoOptimizer()),
    ],
)
def test_a_variance_stays_between_those_that_sites_sent(
    method: str, settings: dict[str, Any], optimizer: OptimizerRule
) -> None:
    sizes = {"a": 1600, "b": 1600, "c": 6400}
    half = coordinator_half(MethodSpec(name=method, settings=settings), RunInfo(BLOCKS, 9, training=SGD))
    state = State(0, {name: ArrayTensor(np.ones(2, np.float32)) for name in (WEIGHT, VARIANCE)})
    for _ in range(4):
        variance = float(to_array(state.model[VARIANCE])[0])
        sent = {site: trained(variance, examples // 32) for site, examples in sizes.items()}
        updates = [
            Update(
                f"{site}/w",
                examples,
                {
                    WEIGHT: ArrayTensor(to_array(state.model[WEIGHT]) - np.float32(0.1)),
                    VARIANCE: ArrayTensor(np.full(2, sent[site], np.float32)),
                },
                {EFFECTIVE_STEPS: examples / 32},
                site,
                plan=Plan(scalars={SIZE: float(examples)}),
            )
            for site, examples in sizes.items()
        ]
        merged = merge(half, optimizer, state, updates)
        held = {
            kind: {name: ArrayTensor(to_array(tensor), tensor.dtype) for name, tensor in tensors.items()}
            for kind, tensors in (("model", merged.model), ("server_state", merged.server_state))
        }
        state = replace(merged, round=state.round + 1, **held)
        found = float(to_array(state.model[VARIANCE])[0])
        assert min(sent.values()) - 1e-6 <= found <= max(sent.values()) + 1e-6


def test_a_rare_sender_moves_a_variance_to_its_own_and_no_further() -> None:
    model = {name: ArrayTensor(np.ones(2, np.float32)) for name in (WEIGHT, VARIANCE)}
    sent = {name: ArrayTensor(np.full(2, 0.25, np.float32)) for name in model}
    found = average(model, [(1.0, sent), (1.0, {})], "inverse-probability", lambda _: 0.25)
    assert {name: float(to_array(tensor)[0]) for name, tensor in found.items()} == {WEIGHT: -0.5, VARIANCE: 0.25}


@pytest.mark.parametrize("codec", ["delta+int8+zstd", "delta+int4+zstd", "delta+topk=0.05+shuffle+zstd"])
def test_a_lossy_codec_rounds_no_statistic(codec: str) -> None:
    rng = np.random.default_rng(0)
    blocks = [of_size(block, 64) for block in BLOCKS]
    bases = {block.name: ArrayTensor(np.ones(64, np.float32)) for block in blocks}
    new = {block.name: np.exp(rng.uniform(-7, 1, 64)).astype(np.float32) for block in blocks}
    file = BytesIO()
    write_update(file, codec, [TrainedBlock(b, ArrayTensor(new[b.name]), bases[b.name]) for b in blocks])
    data = file.getvalue()
    read = read_update(lambda: BytesIO(data), len(data), {b.name: b for b in blocks}, bases)
    assert to_array(read[VARIANCE]).tobytes() == new[VARIANCE].tobytes()
    assert to_array(read[WEIGHT]).tobytes() != new[WEIGHT].tobytes()


def test_a_version_in_8_bits_has_its_statistics_as_they_are() -> None:
    before = {name: ArrayTensor(np.ones(LEAST_ELEMENTS, np.float32)) for name in (WEIGHT, VARIANCE)}
    after = {name: ArrayTensor(np.linspace(1e-5, 3, LEAST_ELEMENTS, dtype=np.float32)) for name in before}
    found = rounded(before, after, 0)
    assert [found[name] is after[name] for name in (WEIGHT, VARIANCE)] == [False, True]


def of_size(block: Block, count: int) -> Block:
    return block.model_copy(update={"shape": (count,)})
