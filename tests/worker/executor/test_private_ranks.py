"""Differential privacy in a rank group: nothing is refused after the charge that could be refused before."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import nn

from tessera.shared.methods.base import Phase
from tessera.shared.model.selectors import EVERYTHING
from tessera.worker.executor.group import Group
from tessera.worker.training.setup import TrainingSetup
from tests.worker.privacy.test_private_task import images, private_task, spent, trainer_of, work_on


def test_batch_normalisation_mixes_no_examples_and_needs_no_whole_batches(tmp_path: Path) -> None:
    context = work_on()
    context.model.add_module("further", nn.BatchNorm1d(2))
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        # A group refuses it where it mixes examples, which would be after the charge.
        trainer = replace(
            trainer_of(context), setup=TrainingSetup(torch.device("cpu"), ranks=Group(tmp_path, b"key"))
        )
        trainer = replace(trainer, private=private_task(tmp_path, training=trainer.training))
        assert trainer.train([Phase(EVERYTHING)], images(), seed=0).steps == 5
    finally:
        dist.destroy_process_group()
    assert len(spent(tmp_path)) == 1


class Planted:
    """An object whose pickle makes a file when it is read."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> object:
        return Path.touch, (self._path,)


def test_a_message_of_another_user_runs_no_code_in_a_rank(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        group, other = Group(tmp_path, b"key"), Group(tmp_path, b"guessed")
    finally:
        dist.destroy_process_group()
    with pytest.raises(RuntimeError, match="signed by no rank of this group"):
        group._verified(other._signed(Planted(tmp_path / "run")))
    assert not (tmp_path / "run").exists()
    assert group._verified(group._signed([1.5])) == [1.5]
