"""What a worker tells of its machine and its work with heartbeats."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tessera.shared.schema import MAX_LOG_EVENTS
from tessera.worker.inventory import gpu_name
from tessera.worker.live_values import LiveMonitor
from tessera.worker.model.device_memory import use_of_gpus
from tessera.worker.training.progress import Report
from tests.worker.privacy.test_private_task import task as private_task

USE = {"cpu_load", "memory_used_bytes", "gpu_memory_used_bytes", "gpu_use"}


def monitor(folder: Path, *, shares_log: bool = False) -> LiveMonitor:
    return LiveMonitor(None, folder, lambda: 0, shares_log=shares_log)


def begun(*phases: tuple[float, str]) -> Report:
    report = Report(download_bytes=4_000_000)
    report.began = list(phases)  # type: ignore[arg-type]
    return report


def test_a_process_that_has_hidden_a_task_tells_no_use_of_the_machine_any_more(tmp_path: Path) -> None:
    task = private_task()
    for ends_early in (False, True):
        live = monitor(tmp_path)
        before = live.sample(task, Report())
        assert before.memory_used_bytes
        assert before.cpu_load is not None
        # One that ends before its first heartbeat has used memory too.
        live.ended(task, Report(hides=True), "failed") if ends_early else live.sample(task, Report(hides=True))
        told = live.sample(task, Report()).model_dump(exclude_none=True)
        assert not USE & told.keys()
        assert {"cpus", "memory_bytes", "disk_free_bytes", "started_at"} <= told.keys()


def test_the_log_is_told_only_if_the_site_allows_it_and_holds_names_and_instants(tmp_path: Path) -> None:
    task = private_task()
    report = begun((100.7, "fetching"), (102.7, "training"))
    report.metrics, report.loss = {"loss": 0.123}, 0.123
    assert monitor(tmp_path).sample(task, report).log is None
    allowed = monitor(tmp_path, shares_log=True)
    allowed.ended(task, report, "failed")
    log = allowed.sample(task, Report()).log
    assert log is not None
    assert [one.event for one in log] == ["started", "fetching", "training", "failed"]
    assert log[1].model_dump(mode="json") == {
        "at": "1970-01-01T00:01:40Z", "event": "fetching", "run": task.run_name, "round": task.round,
    }  # fmt: skip
    for _ in range(MAX_LOG_EVENTS):
        allowed.ended(task, report, "done")
    assert len(allowed.sample(task, report).log or ()) == MAX_LOG_EVENTS


def test_phases_and_the_line_are_timed_to_the_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("time.time", lambda: 110.0)
    report = begun((100.2, "fetching"), (102.3, "training"), (109.9, "uploading"))
    assert report.phase_seconds() == {"fetching": 2.0, "training": 8.0, "uploading": 0.0}
    assert monitor(tmp_path).sample(private_task(), report).download_bytes_per_second == 2_000_000


def test_values_that_cannot_be_read_are_left_out(tmp_path: Path) -> None:
    assert use_of_gpus([torch.device("cuda:63")]) == {}
    live = LiveMonitor("A100", tmp_path / "gone", lambda: 0, shares_log=False)
    told = live.sample(private_task().model_copy(update={"privacy": None}), Report())
    assert (told.gpu_memory_bytes, told.gpu_use, told.disk_free_bytes) == (None, None, None)


def test_the_values_of_several_gpus_are_reported_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # In place of the driver of a machine with two.
    gpus = [torch.device("cuda:0"), torch.device("cuda:1")]
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda gpu: f"A100 {gpu.index}")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: SimpleNamespace(total_memory=80))
    monkeypatch.setattr(torch.cuda, "device_memory_used", {gpus[0]: 10, gpus[1]: 30}.__getitem__)
    monkeypatch.setattr(torch.cuda, "utilization", {gpus[0]: 100, gpus[1]: 50}.__getitem__)
    live = LiveMonitor(gpu_name(gpus), tmp_path, lambda: 0, shares_log=False)
    values = live.sample(private_task().model_copy(update={"privacy": None}), Report(gpu_use=use_of_gpus(gpus)))
    assert (values.gpu_name, values.gpu_memory_bytes, values.gpu_memory_used_bytes, values.gpu_use) == (
        "2 x A100 0", 160, 40, 0.75,
    )  # fmt: skip
