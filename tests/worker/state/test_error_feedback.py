"""What a codec leaves out comes later, and never twice."""

from __future__ import annotations

import io
from typing import Any

import numpy as np
import pytest

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import ArrayTensor, unpacked
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update, write_update
from tessera.simulation import Stalled, Weights, simulate
from tessera.worker.model.build import instantiate
from tessera.worker.state.error_feedback import FORGET_TASKS, PREFIX, Feedback, without_feedback
from tests.simulation.test_simulation import SITES, spec
from tests.support.tasks import VIT

BLOCK = Block(tensor="w", role="mlp", shape=(300, 200), dtype="F32")
BASE = np.random.default_rng(0).normal(size=BLOCK.shape).astype(np.float32)


def change(seed: int) -> TrainedBlock:
    step = np.random.default_rng(seed).normal(size=BLOCK.shape).astype(np.float32) ** 3
    return TrainedBlock(BLOCK, ArrayTensor(BASE + np.float32(1e-3) * step), ArrayTensor(BASE))


def sent(codec: str, changes: list[TrainedBlock]) -> dict[str, EncodedTensor]:
    file = io.BytesIO()
    write_update(file, codec, changes)
    data = file.getvalue()
    return read_update(lambda: io.BytesIO(data), len(data), {"w": BLOCK}, {"w": ArrayTensor(BASE)})


def flat(parts: Any) -> np.ndarray:
    return np.concatenate([unpacked(part) for part in parts]).astype(np.float64)


@pytest.mark.parametrize("codec", ["delta+topk=0.02", "delta+topk=0.02+shuffle+zstd", "delta+lowrank=8+int8"])
def test_over_many_rounds_all_of_it_arrives(codec: str) -> None:
    feedback, wanted, arrived = Feedback("train"), np.zeros(BLOCK.numel), np.zeros(BLOCK.numel)
    errors = []
    for number in range(1, 9):
        plain = change(number)
        wanted += flat(plain.steps())
        (changed,) = feedback.add([plain])
        received = sent(codec, [changed])
        errors.append(feedback.settle([changed], received))
        arrived += flat(received["w"].steps())
        # To the last bit but for the rounding of one float32 addition a round.
        np.testing.assert_allclose(arrived + feedback.rests["w"].values, wanted, rtol=0, atol=number * 2.0**-27)
    assert all(0.1 < error < 1 for error in errors)


def test_what_is_kept_goes_through_the_vault_as_it_is() -> None:
    feedback = Feedback("train")
    (changed,) = feedback.add([change(1)])
    feedback.settle([changed], sent("delta+topk=0.02", [changed]))
    vault = {"own": np.ones(3), **feedback.kept()}
    again = Feedback.of(vault, "train")
    assert (again.rests["w"].task, again.task) == (1, 2)
    assert again.rests["w"].values.tobytes() == feedback.rests["w"].values.tobytes()
    assert list(without_feedback(vault)) == ["own"]


def test_a_rest_is_forgotten_with_its_stage_and_after_many_tasks_of_its_worker() -> None:
    feedback = Feedback("train")
    (changed,) = feedback.add([change(1)])
    feedback.settle([changed], sent("delta+topk=0.02", [changed]))
    for number in range(2, FORGET_TASKS + 2):
        assert not Feedback.of(feedback.kept(), "frozen").rests
        # A task of other blocks.
        feedback = Feedback.of(feedback.kept(), "train")
        assert (feedback.rests["w"].task, feedback.task) == (1, number)
    assert not Feedback.of(feedback.kept(), "train").rests
    assert Feedback("train").kept() == {}


def test_a_block_that_is_sent_whole_leaves_no_rest() -> None:
    feedback = Feedback("train")
    (changed,) = feedback.add([change(1)])
    feedback.settle([changed], sent("delta+topk=0.02", [changed]))
    (changed,) = feedback.add([change(2)])
    assert feedback.settle([changed], sent("bits+shuffle+zstd", [changed])) < 1e-3
    assert not feedback.rests


# ---------------------------------------------------------------- in a run


@pytest.fixture(scope="module")
def model() -> Weights:
    return Weights.of(instantiate(VIT, "image-classification", seed=1), VIT, "image-classification")


ONE, TWO = (dict(list(SITES.items())[:count]) for count in (1, 2))
SPARSE = "delta+topk=0.05+shuffle+zstd"


def rests(kept: dict[str, np.ndarray]) -> dict[str, bytes]:
    return {name: values.tobytes() for name, values in kept.items() if name.startswith(PREFIX + "rest/")}


def test_a_run_with_a_sparse_codec_keeps_rests_at_its_sites_and_tells_the_error(model: Weights) -> None:
    whole = simulate(spec(rounds=2), model, TWO)
    result = simulate(spec(rounds=2, codec=SPARSE), model, TWO)
    tasks = [task for made in result.rounds for task in made.tasks]
    assert all(0 < task.metrics["codec_error"] < 1 for task in tasks)
    assert all("codec_error" not in task.metrics for made in whole.rounds for task in made.tasks)
    assert result.outcomes[1].upload_bytes < 0.4 * whole.outcomes[1].upload_bytes
    assert all(rests(result.kept(site)) for site in TWO)


def test_what_was_refused_leaves_the_rests_as_they_were(model: Weights) -> None:
    run = spec(rounds=2, codec=SPARSE)
    free = simulate(run, model, TWO)
    norms = [max(task.metrics["update_norm"] for task in made.tasks) for made in free.rounds]
    # All of the second round's updates but the largest fit, and all of the first's.
    assert norms[0] < norms[1]
    bounded = simulate({**run, "max_update_norm": norms[1] * 0.999}, model, TWO)
    first = simulate({**run, "rounds": 2}, model, TWO, until=1)
    refused = [task.worker.partition("/")[0] for task in bounded.rounds[1].tasks if task.state == "rejected"]
    assert refused
    for site in TWO:
        same = rests(bounded.kept(site)) == rests(first.kept(site))
        assert same == (site in refused)


def test_a_run_with_a_budget_keeps_to_it_and_learns_of_the_error(model: Weights) -> None:
    whole = simulate(spec(rounds=1, codec="raw"), model, ONE)
    most = max(task.upload_bytes for task in whole.rounds[0].tasks) // 2
    result = simulate(spec(rounds=2, upload_budget=f"{most} B"), model, ONE)
    for made in result.rounds:
        for task in made.tasks:
            assert task.upload_bytes <= most
            assert 0 < task.metrics["codec_error"] < 0.5


def test_a_budget_that_no_codec_keeps_to_fails_the_task_and_says_so(model: Weights) -> None:
    with pytest.raises(Stalled, match=r"over-budget: the update needs about \d+ bytes even with the smallest codecs"):
        simulate(spec(rounds=1, upload_budget="1 kB", cohort={"max_attempts": 1}), model, ONE)
