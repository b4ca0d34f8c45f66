"""Training that resumes from a checkpoint ends with the same bits as training that was never interrupted."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor

from tessera.shared.methods.base import LocalResult, MethodSpec, Phase, Plan, RunInfo, TaskContext, WorkerHalf
from tessera.shared.methods.registry import methods
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset, RowsOnDisk
from tessera.worker.model.block_map import block_table
from tessera.worker.state.checkpoints import CheckpointKey, Checkpoints
from tessera.worker.training.checkpoints import Document, TrainingCheckpoints
from tests.support.tasks import ADAPTED, PLAIN, PROMPTED, Subject, images, one_task, subject_of

KEY = CheckpointKey(
    run="run-1", round=1, task="task-1", model="m", base="b", plan="p", settings="s", data="d", libraries="l",
    device="cpu",
)  # fmt: skip


class Killed(BaseException):
    """Stands for the end of the process."""


def resumed(
    folder: Path, kills: Sequence[int], every: int, train: Callable[..., tuple[Any, LocalResult]]
) -> tuple[LocalResult, int]:
    """The result of a task that is killed before these steps of its own, with a checkpoint every few steps, and the
    number of steps that its last process made."""
    for kill in [*kills, None]:
        steps = 0

        def check() -> None:
            nonlocal steps
            if steps == kill:  # noqa: B023  (it is called within this pass)
                raise Killed
            steps += 1

        # A new process has other dice, and its checkpoints are read from the disk.
        random.seed(), torch.manual_seed(steps), np.random.seed(None)  # noqa: NPY002
        stored = Checkpoints(folder).of_task(KEY)
        checkpoints = TrainingCheckpoints(stored, every, clock=lambda: float(steps))
        try:
            _, result = train(check=check, checkpoints=checkpoints)
        except Killed:
            continue
        return result, steps
    raise AssertionError


def flat(result: LocalResult) -> dict[str, object]:
    arrays = {**{f"up/{name}": v for name, v in result.upload.items()}, **result.keep}
    return {**{name: values.tobytes() for name, values in arrays.items()}, **result.metrics}


def kept_before(method: str, subject: Subject, settings: Mapping[str, Any], **training: Any) -> dict[str, Array]:
    """What a site keeps of an earlier round."""
    _, result = one_task(method, settings, subject=subject, **training)
    return dict(result.keep)


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "adamw, three epochs": ("fedavg", {}, {"epochs": 3, "optimizer": "adamw"}),
    "steps that end within an epoch": ("fedavg", {}, {"epochs": None, "steps": 7, "optimizer": "adamw"}),
    "a schedule and momentum": ("fedavg", {}, {"epochs": 2, "momentum": 0.9, "schedule": "cosine"}),
    "two phases": ("fedrep", {"head_epochs": 2}, {"optimizer": "adamw"}),
    "a model of its own": ("ditto", {}, {"epochs": 2, "momentum": 0.9}),
    "an anchor and a past model": ("moon", {}, {"epochs": 2}),
    "corrections from the vault": ("scaffold", {}, {"epochs": 2}),
    "private modules": ("pfeddc", {}, {"epochs": 3, "optimizer": "adamw"}),
    "chosen layers": ("safl", {"layers": 1}, {"epochs": 2}),
}
LONG = [
    pytest.param(method, {}, {"epochs": 3, "optimizer": "sgd"}, id=method, marks=pytest.mark.long)
    for method in sorted(methods())
]
SHORT = [pytest.param(*case, id=name) for name, case in CASES.items()]


@pytest.mark.parametrize(("method", "settings", "training"), [*SHORT, *LONG])
def test_a_task_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, method: str, settings: dict[str, Any], training: dict[str, Any]
) -> None:
    subject = subject_of(method)
    if subject is PLAIN:
        subject = replace(subject, config={**subject.config, "hidden_dropout_prob": 0.1})
    training = {"optimizer": "sgd", **training}
    vault = kept_before(method, subject, settings, **training)
    whole_steps = 0

    def train(**more: Any) -> tuple[Any, LocalResult]:
        return one_task(method, settings, subject=subject, vault=vault, **training, **more)

    def count() -> None:
        nonlocal whole_steps
        whole_steps += 1

    _, undisturbed = train(check=count)
    # With a checkpoint every second step, one kill comes just after a checkpoint and another loses a step.
    for number, kills in enumerate([(whole_steps // 2,), (3, whole_steps // 3 + 1)]):
        result, steps = resumed(tmp_path / str(number), kills, 2, train)
        assert flat(result) == flat(undisturbed)
        assert steps < whole_steps  # the last process did not begin anew
