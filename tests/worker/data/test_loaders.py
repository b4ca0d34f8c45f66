"""Loaders: the same batches as without them, and no process that outlives its worker."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from torch import Tensor

from tessera.worker.data import loaders as module
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError, LoaderFailed
from tessera.worker.training.batches import Batches
from tests.support.coordinator import until
from tests.support.processes import Process
from tests.support.scans import write_scans

CPU = torch.device("cpu")
COUNT = 11


@pytest.fixture
def scans(tmp_path: Path) -> Path:
    return write_scans(tmp_path / "scans", COUNT)


def opened(folder: Path, loaders: LoaderProcesses | None = None, **options: Any) -> Dataset:
    size = {} if "processor" in options else {"size": 4}
    return load("images", {"folder": str(folder), "in_memory": False, **size, **options}, loaders=loaders)


def passes(dataset: Dataset) -> list[dict[str, Tensor]]:
    """The batches of two passes in an order drawn anew for each, of one that ends early, and of one that resumes."""
    batches = Batches(dataset, 4, CPU, torch.Generator().manual_seed(3))
    first = [batch for _ in range(2) for batch in batches]
    resumed = Batches(dataset, 4, CPU, torch.Generator().manual_seed(4), skip=1)
    return [*first, next(iter(batches)), *batches, *resumed]


def same(one: list[dict[str, Tensor]], other: list[dict[str, Tensor]]) -> bool:
    return all(
        a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def test_loaders_give_the_batches_of_a_thread_and_name_what_they_cannot_read(
    scans: Path, processes: LoaderProcesses
) -> None:
    state = torch.random.get_rng_state()
    dataset = opened(scans, processes)
    assert same(passes(dataset), passes(opened(scans)))
    started = pids(processes)
    # A part, and what is held out, are read by the same loaders.
    chosen = torch.tensor([7, 2, 9, 2])
    assert same(list(Batches(dataset.rows(chosen), 3, CPU)), list(Batches(opened(scans).rows(chosen), 3, CPU)))
    assert pids(processes) == started
    assert torch.equal(torch.random.get_rng_state(), state)
    processes.count = 3
    processes.close()
    assert same(passes(dataset), passes(opened(scans)))
    (scans / "1" / "05.png").unlink()
    with pytest.raises(DataError, match=r"05\.png cannot be read"):
        list(Batches(dataset, 4, CPU))


def test_loader_that_is_killed_fails_the_pass_with_a_remedy(scans: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "LOOK_SECONDS", 0.2)
    processes = LoaderProcesses(1)
    dataset = opened(scans, processes)
    batches = iter(Batches(dataset, 1, CPU))
    next(batches)
    for loader in pids(processes):
        os.kill(loader, signal.SIGKILL)
    with pytest.raises(LoaderFailed, match=r"loaders: .*lower `loaders` in the worker's settings from 1"):
        list(batches)
    # The next pass has others.
    assert same(list(Batches(dataset, 4, CPU)), list(Batches(opened(scans), 4, CPU)))
    processes.close()


def test_loaders_go_on_after_a_sigterm_to_all_processes(scans: Path) -> None:
    processes = LoaderProcesses(2)
    dataset = opened(scans, processes)
    batches = iter(Batches(dataset, 1, CPU))
    next(batches)
    started = pids(processes)
    # As Slurm and systemd send it. The worker itself gives its task back.
    for child in psutil.Process().children(recursive=True):
        # A process of an earlier test may have ended, and not be awaited yet.
        with suppress(psutil.NoSuchProcess):
            if child.pid in started or "forkserver" in " ".join(child.cmdline()):
                child.send_signal(signal.SIGTERM)
    list(batches)
    assert same(list(Batches(dataset, 4, CPU)), list(Batches(opened(scans), 4, CPU)))
    assert pids(processes) == started
    processes.close()


def pids(processes: LoaderProcesses) -> list[int]:
    assert processes._loader is not None
    return [process.pid for process in processes._loader._iterator._workers]  # type: ignore[union-attr]


ORPHANS = """
import time, torch
from tessera.worker.data.dataset import RowRequest
from tessera.worker.data.loaders import LoaderProcesses
loaders = LoaderProcesses(2)
requests = [RowRequest(torch.tensor([place]).numpy()) for place in range(9)]
# The inputs are called as the places.
assert [list(batch) for batch in loaders.read(dict.fromkeys, requests)] == [[place] for place in range(9)]
print(*[process.pid for process in loaders._loader._iterator._workers], flush=True)
time.sleep(600)
"""


AHEAD = """
import sys, psutil
from tessera.worker.data.loaders import LoaderProcesses
from tessera.worker.data.registry import load
for in_memory in (True, False):
    load("images", {"folder": sys.argv[1], "size": 4, "in_memory": in_memory}, loaders=LoaderProcesses(1))
    print(sum("forkserver" in " ".join(child.cmdline()) for child in psutil.Process().children()))
"""


def test_a_process_that_leaves_its_loaders_open_ends() -> None:
    code = ORPHANS.replace("time.sleep(600)", "")
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, timeout=600, check=False).returncode == 0


@pytest.mark.long
def test_what_loaders_import_is_imported_while_the_worker_starts(scans: Path) -> None:
    found = subprocess.run([sys.executable, "-c", AHEAD, str(scans)], capture_output=True, text=True, check=True)
    assert found.stdout.split() == ["0", "1"]


def test_no_loader_outlives_a_worker_that_is_killed(tmp_path: Path) -> None:
    worker = Process(tmp_path, "worker", ["tests.support.code", ORPHANS])
    until(lambda: worker.said("\n"))
    loaders = [psutil.Process(int(pid)) for pid in worker.log.read_text().split()]
    started = [*loaders, *psutil.Process(worker.pid).children(recursive=True)]
    assert len(loaders) == 2
    worker.kill()
    until(lambda: not any(map(is_running, started)))


def is_running(process: psutil.Process) -> bool:
    """Return whether a process has not ended. Nobody may wait for one whose parent was killed."""
    with suppress(psutil.NoSuchProcess):
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False
