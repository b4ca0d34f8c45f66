"""What must hold for every method over several rounds: interruptions, absences, and a federation of one."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path

import pytest
import torch

from tessera.shared.methods.registry import methods
from tessera.shared.model.spec import Model
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import read_block
from tessera.worker.simulation import Conditions, Result, Weights, simulate
from tests.support.tasks import EACH_METHOD, FEW_METHODS, subject_of

ROUNDS = 3


@cache
def start_of(method: str) -> Weights:
    subject = subject_of(method)
    model = subject.model()
    blocks, tensors = block_table(model), named_tensors(model)
    document = Model(
        config=subject.config, head=subject.head, blocks=blocks, prompts=subject.prompts, lora=subject.lora
    )
    return Weights(document, {block.name: read_block(tensors, block) for block in blocks})


def sites_of(method: str, count: int) -> Mapping[str, Dataset]:
    whole = subject_of(method).data()
    rows = torch.arange(whole.examples).tensor_split(count)
    return {name: whole.rows(part) for name, part in zip("abc", rows, strict=False)}


def run(
    method: str, sites: int = 3, out: Path | None = None, until: int | None = None, **away: tuple[int, ...]
) -> Result:
    spec = {
        "name": "contract",
        "method": {"name": method},
        "rounds": ROUNDS,
        "seed": 3,
        # Some methods take no other optimizer.
        "training": {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 8},
    }
    data = sites_of(method, sites)
    return simulate(spec, start_of(method), data, out=out, until=until, conditions=Conditions(away=away))


def digests(result: Result) -> list[str]:
    return [version.digest for version in result.versions]


# In short, tests/worker/simulation/test_simulation.py shows the same of the methods that remember most.
@pytest.mark.long
@pytest.mark.parametrize("method", sorted(methods()))
def test_a_run_that_is_stopped_and_resumed_ends_with_the_same_bits(method: str, tmp_path: Path) -> None:
    whole = run(method)
    run(method, out=tmp_path / "run", until=2)
    resumed = run(method, out=tmp_path / "run")
    assert digests(resumed) == digests(whole)
    assert len(whole.versions) == ROUNDS + 1
    for site in "abc":
        kept, expected = resumed.kept(site), whole.kept(site)
        assert {name: values.tobytes() for name, values in kept.items()} == {
            name: values.tobytes() for name, values in expected.items()
        }


@EACH_METHOD
def test_a_worker_that_missed_a_round_takes_part_again(method: str) -> None:
    result = run(method, b=(2,))
    took_part = {attempt.number: {task.worker for task in attempt.tasks} for attempt in result.rounds}
    assert [("b/worker" in took_part[number]) for number in (1, 2, 3)] == [True, False, True]
    assert all(task.state == "merged" for attempt in result.rounds for task in attempt.tasks)
    assert len(result.versions) == ROUNDS + 1


@FEW_METHODS
def test_a_federation_of_one_goes_through_all_its_rounds(method: str) -> None:
    result = run(method, sites=1)
    assert len(result.versions) == ROUNDS + 1
    assert all(task.state == "merged" for attempt in result.rounds for task in attempt.tasks)
