"""When a task's checkpoint is removed, and what may leave while there is one."""

from __future__ import annotations

import errno
from pathlib import Path

import pytest
import torch

from tessera.shared.problems import (
    Forbidden,
    LeaseLost,
    RoundClosed,
    TaskCancelled,
    Unauthenticated,
    Unavailable,
)
from tessera.worker.errors import TrainingDiverged
from tessera.worker.state.atomic_files import ACCESS, WRITES
from tessera.worker.state.audit import NO_HEAD, StateRolledBack
from tessera.worker.state.checkpoints import CheckpointKey, Checkpoints, TaskCheckpoint
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.resumption import ending
from tessera.worker.training.checkpoints import CheckpointFile

KEY = CheckpointKey(
    run="run-1", round=1, task="task-1", model="m", base="b", plan="p", settings="s", data="d", libraries="l",
    device="cpu",
)  # fmt: skip


@pytest.fixture
def checkpoint(tmp_path: Path) -> TaskCheckpoint:
    made = Checkpoints(tmp_path).of_task(KEY)
    CheckpointFile.of(made).write({}, {"weight": torch.ones(2)})
    return made


def left(folder: Path) -> bool:
    return any(folder.glob("*/checkpoint-*"))


@pytest.mark.parametrize(
    "end", [Stopped(), LeaseLost("x"), Unavailable("x"), Unauthenticated("x"), Forbidden("x"), KeyboardInterrupt()]
)
def test_a_task_that_may_be_offered_again_keeps_its_checkpoint(
    checkpoint: TaskCheckpoint, tmp_path: Path, end: BaseException
) -> None:
    with pytest.raises(type(end)), ending(checkpoint):
        raise end
    assert left(tmp_path)


@pytest.mark.parametrize("number", sorted(WRITES | ACCESS))
def test_a_fault_of_the_disk_does_not_make_a_task_be_trained_and_charged_again(
    checkpoint: TaskCheckpoint, tmp_path: Path, number: int
) -> None:
    written = OSError(number, "no", "update")
    for end in (written, StateRolledBack("x", NO_HEAD)):
        with pytest.raises(type(end)), ending(checkpoint):
            raise end
    assert left(tmp_path)


GONE = FileNotFoundError(errno.ENOENT, "no", "x")


@pytest.mark.parametrize(
    "end", [RoundClosed("x"), TaskCancelled("x"), TrainingDiverged("x"), ValueError("x"), GONE, None]
)
def test_a_task_that_is_over_does_not(checkpoint: TaskCheckpoint, tmp_path: Path, end: Exception | None) -> None:
    if end:
        with pytest.raises(type(end)), ending(checkpoint):
            raise end
    else:
        with ending(checkpoint):
            pass
    assert not left(tmp_path)
