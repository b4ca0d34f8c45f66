"""Where checkpoints lie: which is found, which is removed, and who may read it."""

from __future__ import annotations

import stat
from pathlib import Path

import pytest
import torch
from structlog.testing import capture_logs

from tessera.shared.api.tasks import TaskView
from tessera.shared.problems import NotFound
from tessera.worker.state.checkpoints import INSTANCE, CheckpointKey, Checkpoints
from tessera.worker.training.checkpoints import CheckpointFile

KEY = CheckpointKey(
    run="run-1", round=1, task="task-1", model="m", base="b", plan="p", settings="s", data="d", libraries="l",
    device="cpu",
)  # fmt: skip
TENSORS = {
    "weight": torch.arange(6.0).reshape(2, 3),
    "half": torch.tensor([1.5, float("nan")], dtype=torch.bfloat16),
    "step": torch.tensor(3.0),
    "state": torch.arange(9, dtype=torch.uint8),
    "nothing": torch.zeros(0, 4),
    "across": torch.arange(6.0).reshape(2, 3).t(),
}


def files(folder: Path) -> list[str]:
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file())


def written(folder: Path, key: CheckpointKey = KEY) -> Path:
    CheckpointFile.of(Checkpoints(folder).of_task(key)).write({"place": 1}, TENSORS)
    return folder / key.run / f"checkpoint-{key.task}.safetensors"


def test_the_next_process_reads_what_was_written_and_only_its_owner_may(tmp_path: Path) -> None:
    path = written(tmp_path)
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    found = CheckpointFile.of(Checkpoints(tmp_path).of_task(KEY))
    assert found.document == {"place": 1}
    with found.tensors() as tensors:
        assert sorted(tensors) == sorted(TENSORS)
        for name, tensor in TENSORS.items():
            assert tensors[name].dtype == tensor.dtype
            assert torch.equal(tensors[name].nan_to_num(), tensor.nan_to_num()), name


@pytest.mark.parametrize("part", sorted(set(CheckpointKey.model_fields) - {"run", "task"}))
def test_a_checkpoint_under_another_key_is_removed(tmp_path: Path, part: str) -> None:
    written(tmp_path)
    other = KEY.model_copy(update={part: 2 if part == "round" else "other"})
    with capture_logs() as logs:
        assert Checkpoints(tmp_path).of_task(other).document is None
    assert [(line["event"], line["differs"]) for line in logs] == [("checkpoint-removed", [part])]
    assert files(tmp_path) == []


def test_another_task_of_the_run_removes_it_and_another_run_does_not(tmp_path: Path) -> None:
    path = written(tmp_path)
    Checkpoints(tmp_path).of_task(KEY.model_copy(update={"run": "run-2"}))
    assert path.exists()
    Checkpoints(tmp_path).of_task(KEY.model_copy(update={"task": "task-2"}))
    assert not path.exists()


def test_a_rank_s_checkpoint_counts_also_where_the_worker_cannot_note_its_name(tmp_path: Path) -> None:
    path = written(tmp_path)
    checkpoint = Checkpoints(tmp_path).of_task(KEY)
    # As on a full disk, the file cannot be written.
    (tmp_path / INSTANCE).mkdir()
    with capture_logs() as logs:
        checkpoint.note_instance()
    assert [line["event"] for line in logs] == ["checkpoint-not-written"]
    assert checkpoint.reread()
    (tmp_path / INSTANCE).rmdir()
    checkpoint.note_instance()
    assert files(tmp_path) == sorted([INSTANCE, str(path.relative_to(tmp_path))])


@pytest.mark.parametrize("nbytes", [0, 7, 400, -1])
def test_a_torn_file_is_reported_and_removed(tmp_path: Path, nbytes: int) -> None:
    path = written(tmp_path)
    path.write_bytes(path.read_bytes()[:nbytes])
    with capture_logs() as logs:
        assert Checkpoints(tmp_path).of_task(KEY).document is None
    assert [line["event"] for line in logs] == ["checkpoint-unreadable"]
    assert not path.exists()


def test_the_last_checkpoint_stays_if_the_next_cannot_be_written(tmp_path: Path) -> None:
    written(tmp_path)
    checkpoint = Checkpoints(tmp_path).of_task(KEY)

    class Full(dict[str, torch.Tensor]):
        def values(self):  # type: ignore[no-untyped-def]
            yield torch.zeros(2, 3)
            raise OSError(28, "No space left on device")

    with pytest.raises(OSError, match="No space"):
        CheckpointFile.of(checkpoint).write({"place": 2}, Full(TENSORS))
    assert Checkpoints(tmp_path).of_task(KEY).document == {"place": 1}
    assert files(tmp_path) == ["run-1/checkpoint-task-1.safetensors"]


@pytest.mark.parametrize(
    ("state", "stays"), [("leased", True), ("offered", True), ("expired", True), ("accepted", False), (None, False)]
)
def test_the_checkpoint_of_a_task_that_nobody_can_claim_any_more_is_removed(
    tmp_path: Path, state: str | None, stays: bool
) -> None:
    path = written(tmp_path)

    def ask(task: str) -> TaskView:
        if state is None:
            problem = NotFound("there is no such task")
            problem.from_document = True
            raise problem
        given = {"id": task, "run": "run-1", "round": 1, "worker": "a", "kind": "train", "state": state}
        return TaskView.model_validate({**given, "token": 1, "attempts": 1})

    Checkpoints(tmp_path).settle(ask)
    assert path.exists() == stays


def test_a_process_takes_over_the_name_of_one_that_left_a_checkpoint_and_only_once(tmp_path: Path) -> None:
    first = Checkpoints(tmp_path)
    CheckpointFile.of(first.of_task(KEY)).write({}, TENSORS)
    second = Checkpoints(tmp_path)
    assert second.instance == first.instance
    # It was killed before it wrote a checkpoint of its own: its successor waits for the lease's end.
    third = Checkpoints(tmp_path)
    assert third.instance != first.instance


def test_a_task_that_ended_leaves_neither_checkpoint_nor_name(tmp_path: Path) -> None:
    checkpoint = Checkpoints(tmp_path).of_task(KEY)
    CheckpointFile.of(checkpoint).write({}, TENSORS)
    assert files(tmp_path) == [INSTANCE, "run-1/checkpoint-task-1.safetensors"]
    checkpoint.remove()
    assert list(tmp_path.iterdir()) == []


def test_an_identifier_that_could_be_a_path_is_refused(tmp_path: Path) -> None:
    for part in ("run", "task"):
        with pytest.raises(ValueError, match="invalid identifier"):
            Checkpoints(tmp_path).of_task(KEY.model_copy(update={part: "../x"}))
