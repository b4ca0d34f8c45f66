"""What one process of a group hands to another arrives, mapped, and is not code; our exceptions arrive as raised."""

from __future__ import annotations

import errno
import json
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec, Plan, TrainingStats, UnsupportedRun
from tessera.shared.model.attention_stats import ByHead, LayerAttention
from tessera.shared.model.selectors import roles
from tessera.worker.data.dataset import Dataset, Padding, RowsOnDisk
from tessera.worker.data.groups import Groups
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.normalization import Normalized
from tessera.worker.data.prepared import Prepared
from tessera.worker.data.registry import load
from tessera.worker.faults.disk import Disk
from tessera.worker.faults.failures import failure_of
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.model.build import ModelMismatch
from tessera.worker.model.config import UnsafeConfig
from tessera.worker.model.prompts import PromptError
from tessera.worker.ranks import serialization
from tessera.worker.ranks.shared_dataset import dataset_of, parts_of
from tessera.worker.state.atomic_files import WriteFailed
from tessera.worker.task.errors import TaskFailure
from tests.support.paths import ROOT
from tests.support.pretrained import bert_tokenizer


def copied(given: object) -> Any:
    return serialization.loads(serialization.dumps(given))


def test_tensors_and_arrays_arrive_bit_for_bit_and_can_be_written_to(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "strided": torch.arange(12).reshape(3, 4).T,
        "scalar": torch.tensor(3.0),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    arrays = {
        "bf16": np.array([1.5, 2], ml_dtypes.bfloat16), "scalar": np.array(7), "empty": np.zeros((0, 2)),
        "big-endian": np.arange(3, dtype=">i4"), "text": np.array(["a", "bc"]),
    }  # fmt: skip
    serialization.write(tmp_path / "given", (tensors, arrays, "text"))
    before = (tmp_path / "given").read_bytes()
    read_tensors, read_arrays, text = serialization.read(tmp_path / "given")
    assert text == "text"
    for name, tensor in tensors.items():
        assert read_tensors[name].dtype == tensor.dtype
        assert torch.equal(read_tensors[name], tensor), name
    for name, array in arrays.items():
        assert (read_arrays[name].dtype, read_arrays[name].tolist()) == (array.dtype, array.tolist())
    read_tensors["strided"].zero_()
    assert (tmp_path / "given").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


TASK = Task.model_validate(
    {
        "id": "t", "token": 1, "kind": "train", "run": "r", "run_name": "demo", "round": 1, "rounds": 4, "seed": 0,
        "method": MethodSpec(name="fedavg", settings={"x": 1}), "plan": Plan(train=roles("head")), "dataset": "wards",
        "codec": "raw", "training": {"batch_size": 8}, "normalization": "participants", "model": f"sha256:{'a' * 64}",
        "version": {"number": 0, "digest": f"sha256:{'b' * 64}"}, "lease_seconds": 60.0,
        "inline_blobs": (b"\x00\xff",),
    }
)  # fmt: skip
POLICY = Policy.model_validate(
    {
        "orchestrators": ["a"], "never_send": ["head"], "max_epochs": 3, "hours": ["Mon-Fri 22:00-06:00"],
        "require_privacy": {"epsilon": 3.0, "delta": 1e-5},
    }
)  # fmt: skip


@pytest.mark.parametrize(
    "given",
    [
        TASK,
        POLICY,
        Policy(),
        Plan(train=roles("head")).train,
        Padding(5, {"input_ids": 1}),
        Normalized((0.5,), (0.1, 0.2)),
        TrainingStats(3, 2, float("inf"), 0.1),
        {
            "a": [1, 2.5, None, True, b"\x00\xff", b"", frozenset({"x", "y"})],
            3: ("x", {}, torch.Size([2, 3])),
            "path": Path("/x"),
            "kinds": (torch.device("cuda:1"), torch.float16),
        },
    ],
    ids=lambda given: type(given).__name__,
)
def test_a_record_arrives_as_it_was(given: object) -> None:
    assert copied(given) == given
    assert type(copied(given)) is type(given)


def test_groups_arrive_as_they_were() -> None:
    groups = Groups.of([b"b", b"a", b"b"])
    found = copied(groups)
    assert (found.count, found.numbers.tolist()) == (2, [1, 0, 1])
    assert found.keys.tolist() == groups.keys.tolist()


def test_a_record_may_hold_arrays_and_further_records() -> None:
    rows = {"block": ByHead(0, np.array([0.5]))}
    found = copied(LayerAttention(np.array([0.1, 0.2]), np.zeros(2), np.array([1.0]), 0.5, rows=rows))
    assert (found.mass.tolist(), found.rows["block"].mass.tolist()) == ([0.1, 0.2], [0.5])


@pytest.mark.parametrize(
    "given",
    [lambda: None, object(), {1, 2}, np.array([None]), type("Task", (), {})()],
    ids=lambda given: type(given).__name__,
)
def test_nothing_else_is_handed_over_and_no_file_is_left(given: object, tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="cannot be handed to another process"):
        serialization.write(tmp_path / "given", {"tensor": torch.ones(3), "more": given})
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    "form", [["Popen", ["args", "id"]], ["Task", "{}"], ["exception", "KeyboardInterrupt", ["tuple"], ["dict"]]]
)
def test_a_document_with_anything_else_is_refused(form: list[Any]) -> None:
    text = json.dumps(form).encode()
    with pytest.raises((KeyError, ValueError)):
        serialization.loads(text + len(text).to_bytes(8, "little"))


def test_only_readers_of_rows_on_disk_are_pickled() -> None:
    folder = ROOT / "worker" / "ranks"
    uses = {path.name for path in folder.rglob("*.py") if "pickle" in path.read_text()}
    assert uses == {"shared_dataset.py", "stages.py"}
    assert "recv()" not in "".join(path.read_text() for path in folder.rglob("*.py"))


@pytest.mark.parametrize(
    "fault",
    [
        TaskFailure("no-receipt", "text"),
        PolicyViolation("max_epochs", "text"),
        ModelMismatch(["one", "two"]),
        UnsupportedRun("text"),
        torch.OutOfMemoryError("text"),
    ],
)
def test_an_exception_arrives_as_it_was_raised(fault: Exception) -> None:
    arrived = copied(fault)
    assert type(arrived) is type(fault)
    assert (str(arrived), vars(arrived)) == (str(fault), vars(fault))


class OfAMethod(UnsupportedRun):
    """An exception of a method from another package."""


@pytest.mark.parametrize("fault", [PromptError("text"), UnsafeConfig("text"), OfAMethod("text")])
def test_an_exception_of_a_further_class_is_reported_as_by_one_process(fault: Exception) -> None:
    assert failure_of(copied(fault)) == failure_of(fault)
    assert failure_of(fault)[1] == "text"


def test_a_full_disk_of_a_rank_is_no_failure_of_the_task(tmp_path: Path) -> None:
    for fault in (WriteFailed(errno.ENOSPC, "full", str(tmp_path / "file")), OSError(errno.EMFILE, "too many")):
        arrived = copied(fault)
        assert (arrived.errno, arrived.filename) == (fault.errno, fault.filename)
        assert Disk([tmp_path]).note(arrived)


@pytest.mark.parametrize("fault", [ValueError("secret"), KeyError(3), OSError(2, "secret", "secret")])
def test_any_other_exception_arrives_by_its_name_alone(fault: Exception) -> None:
    arrived = copied(fault)
    assert isinstance(arrived, TaskFailure)
    wanted = f"{type(fault).__name__} in a rank; the worker's own log has more"
    assert (arrived.code, str(arrived)) == ("failed", wanted)


def handed(dataset: Dataset, folder: Path) -> Dataset:
    serialization.write(folder / "given", parts_of(dataset))
    return dataset_of(serialization.read(folder / "given"))


def test_a_data_set_arrives_with_what_it_holds_out_and_gets_loaders_of_its_new_process(tmp_path: Path) -> None:
    held_out = Dataset({"labels": torch.tensor([7])})
    common = {"input_ids": torch.tensor([[1, 2]])}
    arrived = handed(
        Dataset({"labels": torch.arange(5)}, common, held_out=held_out, loaders=LoaderProcesses(2)), tmp_path
    )
    assert arrived.tensors["labels"].tolist() == [0, 1, 2, 3, 4]
    assert arrived.common["input_ids"].tolist() == [[1, 2]]
    assert arrived.held_out is not None
    assert arrived.held_out.tensors["labels"].tolist() == [7]
    assert isinstance(arrived.loaders, LoaderProcesses)
    assert arrived.loaders.count == 2


def test_a_reader_that_no_process_can_send_is_refused(tmp_path: Path) -> None:
    stored = RowsOnDisk(lambda places: torch.zeros(len(places)), torch.arange(3), (), torch.float32)
    with pytest.raises(AttributeError, match="lambda"):
        handed(Dataset({"labels": torch.arange(3)}, on_disk={"x": stored}), tmp_path)


def sentences(folder: Path, prepared: Prepared) -> Dataset:
    """Texts whose tokens stay in a file."""
    (folder / "notes.csv").write_text("text,label\nthe cat,0\nthe dog sat,1\n")
    tokenizer = bert_tokenizer(folder / "bert", ("the", "cat", "dog", "sat"))
    options = {"file": str(folder / "notes.csv"), "tokenizer": str(tokenizer), "in_memory": False}
    return load("text", options, prepared=prepared)


def test_tokens_in_a_file_of_the_worker_are_mapped_by_each_rank(tmp_path: Path) -> None:
    dataset = sentences(tmp_path, Prepared(tmp_path / "prepared"))
    (found,), (wanted,) = (list(each.batches(None)) for each in (handed(dataset, tmp_path), dataset))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in wanted.items()
    }


def test_tokens_in_a_file_without_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="mmap"):
        handed(sentences(tmp_path, Prepared()), tmp_path)
