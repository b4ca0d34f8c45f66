"""The executor loads the data sets of the settings, and the agent learns from it what it needs of them."""

from __future__ import annotations

import errno
import os
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from safetensors.torch import save_file

from tessera.worker.data.content import digests_of
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.launcher import RankSettings
from tessera.worker.executor.rank import Rank
from tessera.worker.faults.disk import is_of_disk
from tessera.worker.inventory import datasets_of, inventory_of
from tessera.worker.settings import SettingsError, WorkerSettings
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.training.progress import Report
from tests.support.tasks import CPU
from tests.worker.privacy.test_private_task import task as task_of


def settings_of(folder: Path, **datasets: Any) -> WorkerSettings:
    digits = {"kind": "digits", "held_out": 0.2, "privacy": {"epsilon": 3.0, "delta": 1e-5}}
    given = {"url": "http://127.0.0.1:1", "token": "t", "name": "w", "state_dir": folder / "state"}
    return WorkerSettings.model_validate({**given, "datasets": datasets or {"digits": digits}})


def notes(folder: Path, count: int = 8, first: int = 0) -> dict[str, Any]:
    """Texts of four patients."""
    tensors = {
        "input_ids": first + torch.arange(count)[:, None],
        "labels": torch.zeros(count),
        "group": torch.arange(count) // 2,
    }
    save_file(tensors, folder / "notes.safetensors")
    return {"kind": "arrays", "file": str(folder / "notes.safetensors")}


def run_of(dataset: str, check: Any = lambda: None) -> TaskRun:
    return TaskRun(cast("Any", None), task_of(dataset=dataset), check, Report(), cast("Any", None))


@pytest.fixture
def executors() -> Iterator[Any]:
    made = []

    def executor(settings: WorkerSettings, ranks: int = 1, devices: tuple[str, ...] = ()) -> ProcessExecutor:
        given = RankSettings(devices=devices or ("cpu",) * ranks, threads=1, sources=settings.sources)
        made.append(ProcessExecutor(given, settings.state_dir))
        return made[-1]

    yield executor
    for each in made:
        each.close()


@pytest.mark.parametrize("ranks", [1, 2])
def test_the_agent_learns_of_its_data_sets_what_loading_them_itself_would_show(
    tmp_path: Path, executors: Any, ranks: int
) -> None:
    settings = settings_of(tmp_path, notes=notes(tmp_path), digits={"kind": "digits", "held_out": 0.2})
    executor = executors(settings, ranks)
    found = executor.inventory()
    loaded = datasets_of(settings.sources)
    assert found == replace(inventory_of(settings.datasets, loaded), device="2 x cpu" if ranks == 2 else "cpu")
    assert (found.groups, found.datasets["notes"].groups, found.datasets["digits"].groups) == (4, 4, None)
    for name, data in loaded.items():
        digests, expected = executor.digests(run_of(name), name), digests_of(data)
        assert (digests.readable == expected.readable).all()
        assert digests.content == expected.content


def test_a_data_set_that_cannot_be_loaded_is_named_as_in_the_settings(tmp_path: Path, executors: Any) -> None:
    settings = settings_of(tmp_path, wards={"kind": "arrays", "file": str(tmp_path / "gone.safetensors")})
    executor = executors(settings)
    with pytest.raises(SettingsError, match=r"^datasets\.wards\.file: "):
        executor.inventory()
    assert not executor.folder.exists()


def test_a_full_disk_for_the_key_of_held_out_examples_is_no_fault_of_the_settings(
    tmp_path: Path, executors: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(_: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    settings = settings_of(tmp_path)
    executor = executors(settings)
    executor.folder.mkdir(parents=True)
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        Rank(executor.folder / "home", [CPU], None, settings.sources).load()
    with pytest.raises(SettingsError, match=r"held_out_key_file: .*: No space left on device") as refused:
        executor.inventory()
    assert is_of_disk(refused.value)


def test_a_device_that_is_not_there_is_named_as_in_the_settings(tmp_path: Path, executors: Any) -> None:
    executor = executors(settings_of(tmp_path), devices=("cuda:7",))
    with pytest.raises(SettingsError, match="device: there is no cuda:7 here, of 0 CUDA devices"):
        executor.inventory()
    assert not executor.folder.exists()


@pytest.mark.parametrize("change", [{"count": 10}, {"first": 1}], ids=["rows", "values"])
def test_later_processes_do_not_take_changed_files_for_the_data_set_of_the_inventory(
    tmp_path: Path, executors: Any, change: dict[str, int]
) -> None:
    executor = executors(settings_of(tmp_path, notes=notes(tmp_path)))
    executor.inventory()
    executor._launcher.close()
    assert len(executor.digests(run_of("notes"), "notes").readable) == 8
    executor._launcher.close()
    notes(tmp_path, **change)
    with pytest.raises(TaskFailure, match="cannot be read any more"):
        executor.digests(run_of("notes"), "notes")


def test_a_task_that_is_no_longer_wanted_does_not_wait_for_digests(tmp_path: Path, executors: Any) -> None:
    executor = executors(settings_of(tmp_path, notes=notes(tmp_path)))

    def check() -> None:
        raise Stopped

    with pytest.raises(Stopped):
        executor.digests(run_of("notes", check), "notes")


def test_other_users_cannot_read_what_the_executor_keeps(tmp_path: Path, executors: Any) -> None:
    executor = executors(settings_of(tmp_path, notes=notes(tmp_path)))
    executor.inventory()
    assert executor.folder.stat().st_mode & 0o077 == 0


def test_no_secret_of_the_worker_is_among_the_settings_of_its_executor(tmp_path: Path) -> None:
    sources = settings_of(tmp_path).sources
    document = RankSettings(devices=("cpu",), threads=1, sources=sources).model_dump_json()
    assert "token" not in document
    assert '"held_out":0.2' in document
