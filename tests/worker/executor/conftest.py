from __future__ import annotations

import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tessera.worker.compute import Compute
from tessera.worker.data.overlap import ExampleDigests
from tessera.worker.executor import launcher, mapped
from tessera.worker.executor.executor import ProcessExecutor
from tessera.worker.executor.folder import dataset_file
from tessera.worker.executor.launcher import RankSettings
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.privacy.disclosed_counts import SubjectTables
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.handover import CheckedModel, TaskOutcome


def on_cpus(ranks: int, state: Path) -> ProcessExecutor:
    return ProcessExecutor(RankSettings(devices=("cpu",) * ranks, threads=1), state)


@dataclass
class InMemory:
    """An executor for data sets of this process, which ranks map as if earlier ones had loaded them."""

    ranks: ProcessExecutor
    here: Direct

    @property
    def kind(self) -> str:
        return self.ranks.kind

    @property
    def compute(self) -> Compute:
        return self.here.compute

    def digests(self, run: TaskRun, dataset: str) -> ExampleDigests:
        return self.here.digests(run, dataset)

    def subjects(self, run: TaskRun, dataset: str) -> SubjectTables:
        return self.here.subjects(run, dataset)

    def check(self, run: TaskRun, *given: Any) -> CheckedModel:
        self._settle()
        return self.ranks.check(run, *given)

    def execute(self, run: TaskRun, *given: Any) -> TaskOutcome:
        self._settle()
        folder = self.ranks.folder
        folder.mkdir(parents=True, exist_ok=True, mode=0o700)
        for name, dataset in self.here.datasets.items():
            mapped.write(dataset_file(folder / "home", name), mapped.plain(dataset))
        return self.ranks.execute(run, *given)

    def _settle(self) -> None:
        self.ranks.compute, self.ranks.micro_batch = self.here.compute, self.here.setup.micro_batch


@pytest.fixture
def _whole(monkeypatch: pytest.MonkeyPatch) -> None:
    """Supervisors and ranks are started as a worker starts them, in place of being forked."""
    monkeypatch.setattr(launcher, "subprocess", subprocess)


@pytest.fixture(scope="session")
def _executor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessExecutor]:
    made = on_cpus(2, tmp_path_factory.mktemp("state"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def executor(_executor: ProcessExecutor) -> ProcessExecutor:
    """Two ranks, which all tests share."""
    return _executor


@pytest.fixture(scope="session")
def _alone(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ProcessExecutor]:
    made = on_cpus(1, tmp_path_factory.mktemp("state"))
    made.start()
    yield made
    made.close()


@pytest.fixture
def alone(_alone: ProcessExecutor) -> ProcessExecutor:
    """One rank without a group, which all tests share."""
    return _alone


@pytest.fixture
def fresh_executor(tmp_path: Path) -> Iterator[ProcessExecutor]:
    """Two ranks of one test."""
    made = on_cpus(2, tmp_path)
    yield made
    made.close()
