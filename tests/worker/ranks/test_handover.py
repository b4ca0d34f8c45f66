"""What one process of a group hands to another arrives, mapped; and exceptions arrive as they were raised."""

from __future__ import annotations

from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from tessera.shared.problems import RoundClosed
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.model.build import ModelMismatch
from tessera.worker.ranks import handover
from tessera.worker.ranks.faults import packed, unpacked
from tessera.worker.task.errors import TaskFailure


def test_tensors_and_arrays_arrive_bit_for_bit_and_can_be_written_to(tmp_path: Path) -> None:
    tensors = {
        "bf16": torch.tensor([[1.5, -2.0]], dtype=torch.bfloat16),
        "strided": torch.arange(12).reshape(3, 4).T,
        "scalar": torch.tensor(3.0),
        "mask": torch.tensor([True, False]),
        "empty": torch.zeros(0, 3),
    }
    arrays = {"bf16": np.array([1.5, 2], ml_dtypes.bfloat16), "scalar": np.array(7), "empty": np.zeros((0, 2))}
    handover.write(tmp_path / "given", (tensors, arrays, "text"))
    before = (tmp_path / "given").read_bytes()
    read_tensors, read_arrays, text = handover.read(tmp_path / "given")
    assert text == "text"
    for name, tensor in tensors.items():
        assert read_tensors[name].dtype == tensor.dtype
        assert torch.equal(read_tensors[name], tensor), name
    for name, array in arrays.items():
        assert (read_arrays[name].dtype, read_arrays[name].tolist()) == (array.dtype, array.tolist())
    read_tensors["strided"].zero_()
    assert (tmp_path / "given").read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_a_handover_that_fails_leaves_no_file(tmp_path: Path) -> None:
    with pytest.raises(AttributeError, match="lambda"):
        handover.write(tmp_path / "given", {"tensor": torch.ones(3), "function": lambda: None})
    assert list(tmp_path.iterdir()) == []


def test_a_data_set_arrives_and_gets_loaders_of_its_new_process(tmp_path: Path) -> None:
    handover.write(tmp_path / "given", Dataset({"labels": torch.arange(5)}, loaders=LoaderProcesses(2)))
    arrived = handover.read(tmp_path / "given")
    assert arrived.tensors["labels"].tolist() == [0, 1, 2, 3, 4]
    assert arrived.loaders.count == 2


@pytest.mark.parametrize(
    "fault",
    [
        TaskFailure("no-receipt", "text"),
        PolicyViolation("max_epochs", "text"),
        ModelMismatch(["one", "two"]),
        RoundClosed("text", retry_after_seconds=2),
        torch.OutOfMemoryError("text"),
    ],
)
def test_an_exception_arrives_as_it_was_raised(fault: Exception) -> None:
    arrived = unpacked(packed(fault))
    assert type(arrived) is type(fault)
    assert (str(arrived), vars(arrived)) == (str(fault), vars(fault))


def test_an_exception_that_no_process_can_send_arrives_by_its_name() -> None:
    arrived = unpacked(packed(ValueError(lambda: "secret")))
    assert isinstance(arrived, TaskFailure)
    assert (arrived.code, str(arrived)) == ("failed", "ValueError in a rank; the worker's own log has more")
