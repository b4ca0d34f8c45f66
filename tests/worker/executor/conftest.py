from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.worker.executor import launcher
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.launcher import RankSettings
from tests.support import zygote


def on_cpus(ranks: int, state: Path) -> ProcessExecutor:
    return ProcessExecutor(RankSettings(devices=("cpu",) * ranks, threads=1), state, {})


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors and ranks are forked from a process that has their imports, which take seconds in each rank."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": zygote.reading})
    monkeypatch.setattr(launcher, "subprocess", forking)


@pytest.fixture(scope="session")
def _executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessExecutor]:
    made = on_cpus(2, tmp_path_factory.mktemp("state"))
    yield made
    made.close()


@pytest.fixture
def executor(_executor: ProcessExecutor, _forked: None) -> ProcessExecutor:
    """Two ranks, which all tests share."""
    return _executor


@pytest.fixture(scope="session")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessExecutor]:
    made = on_cpus(1, tmp_path_factory.mktemp("state"))
    yield made
    made.close()


@pytest.fixture
def alone(_alone: ProcessExecutor, _forked: None) -> ProcessExecutor:
    """One rank without a group, which all tests share."""
    return _alone


@pytest.fixture
def fresh_executor(tmp_path: Path, _forked: None) -> Iterator[ProcessExecutor]:
    """Two ranks of one test."""
    made = on_cpus(2, tmp_path)
    yield made
    made.close()
