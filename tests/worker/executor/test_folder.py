"""What the agent and its executor hand each other in files arrives as it was."""

from __future__ import annotations

import errno
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest
import torch

from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.model.selectors import roles
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.data.registry import load
from tessera.worker.errors import HiddenFailure, ModelMismatch, TaskFailure, UnsafeConfig
from tessera.worker.executor import mapped
from tessera.worker.executor.folder import (
    FailureRecord,
    ResultRecord,
    read_arrays,
    read_document,
    write_arrays,
    write_document,
)
from tessera.worker.executor.rank import _failure
from tessera.worker.faults.failures import failure_of
from tessera.worker.governance.policy import Policy, PolicyViolation
from tessera.worker.state.atomic_files import WriteFailed
from tessera.worker.training.progress import Report
from tests.support.pretrained import bert_tokenizer
from tests.support.tables import on_disk

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


def test_arrays_arrive_bit_for_bit_and_can_be_written_to(tmp_path: Path) -> None:
    arrays = {
        "bf16": np.array([1.5, 2], ml_dtypes.bfloat16), "scalar": np.array(7), "empty": np.zeros((0, 2)),
        "mask": np.array([True, False]), "strided": np.arange(12, dtype=np.float32).reshape(3, 4).T,
    }  # fmt: skip
    write_arrays(tmp_path / "given", arrays)
    before = (tmp_path / "given").read_bytes()
    found = read_arrays(tmp_path / "given")
    for name, array in arrays.items():
        assert (found[name].dtype, found[name].tolist()) == (array.dtype, array.tolist())
    found["strided"][:] = 0
    assert (tmp_path / "given").read_bytes() == before
    with pytest.raises(ValueError, match="no file can hold arrays of object"):
        write_arrays(tmp_path / "more", {"odd": np.array([None])})
    assert [path.name for path in tmp_path.iterdir()] == ["given"]


def test_figures_that_are_not_finite_arrive(tmp_path: Path) -> None:
    report = Report(metrics={"loss": float("inf")}, loss=float("nan"))
    report.begin("training", steps=3)
    write_document(tmp_path / "result", ResultRecord(examples=3, metrics={"a": float("-inf")}, report=report))
    found = read_document(ResultRecord, tmp_path / "result")
    assert (found.metrics, found.report.metrics) == ({"a": float("-inf")}, report.metrics)
    assert (found.report.began, found.report.steps) == (report.began, 0 + 3)


@pytest.mark.parametrize("policy", [POLICY, Policy()])
def test_a_policy_arrives_as_it_was(policy: Policy) -> None:
    assert Policy.model_validate(policy.model_dump(mode="json", exclude_defaults=True)) == policy


@pytest.mark.parametrize(
    "fault",
    [
        TaskFailure("no-base", "text"),
        ModelMismatch(["one", "two"]),
        UnsafeConfig("text"),
        MemoryError("text"),
        ValueError("secret"),
        OSError(2, "secret", "secret"),
    ],
    ids=lambda fault: type(fault).__name__,
)
def test_a_failure_arrives_as_the_coordinator_gets_it(fault: Exception) -> None:
    record = _failure(fault)
    assert (record.code, record.detail) == failure_of(fault)
    assert "secret" not in record.model_dump_json()


def test_a_violation_names_its_rule_and_a_hidden_failure_its_class() -> None:
    assert _failure(PolicyViolation("max_epochs", "text")).rule == "max_epochs"
    assert _failure(HiddenFailure("KeyError")) == FailureRecord(code="failed", detail="KeyError", hidden=True)


def test_a_full_disk_of_a_rank_is_no_failure_of_the_task() -> None:
    record = _failure(WriteFailed(errno.ENOSPC, "full", "file"))
    assert record.disk == (errno.ENOSPC, "full", "file")


def handed(dataset: Dataset, folder: Path) -> Dataset:
    mapped.write(folder / "given", dataset)
    return mapped.read(folder / "given")


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
    data = on_disk({"labels": torch.arange(3)}, lambda places: torch.zeros(len(places)), ())
    with pytest.raises(AttributeError, match="lambda"):
        handed(data, tmp_path)


def sentences(folder: Path, prepared: PreparedFolder) -> Dataset:
    """Texts whose tokens stay in a file."""
    (folder / "notes.csv").write_text("text,label\nthe cat,0\nthe dog sat,1\n")
    tokenizer = bert_tokenizer(folder / "bert", ("the", "cat", "dog", "sat"))
    options = {"file": str(folder / "notes.csv"), "tokenizer": str(tokenizer), "in_memory": False}
    return load("text", options, prepared=prepared)


def test_tokens_in_a_file_of_the_worker_are_mapped_by_each_rank(tmp_path: Path) -> None:
    dataset = sentences(tmp_path, PreparedFolder(tmp_path / "prepared"))
    (found,), (wanted,) = (list(each.batches(None)) for each in (handed(dataset, tmp_path), dataset))
    assert {name: tensor.tolist() for name, tensor in found.items()} == {
        name: tensor.tolist() for name, tensor in wanted.items()
    }


def test_tokens_in_a_file_without_a_name_are_refused(tmp_path: Path) -> None:
    with pytest.raises(TypeError, match="mmap"):
        handed(sentences(tmp_path, PreparedFolder()), tmp_path)
