from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from tessera.worker.ranks import session
from tessera.worker.ranks.stages import DeviceStages
from tests.support import zygote

CPU = torch.device("cpu")


@pytest.fixture
def _forked(monkeypatch: pytest.MonkeyPatch) -> None:
    """Launchers and ranks are forked from a process that has their imports, which take seconds in each rank."""
    forking = SimpleNamespace(**{**vars(subprocess), "Popen": zygote.passing})
    monkeypatch.setattr(session, "subprocess", forking)


@pytest.fixture(scope="session")
def _stages(tmp_path_factory: pytest.TempPathFactory) -> Iterator[DeviceStages]:
    made = DeviceStages((CPU, CPU), tmp_path_factory.mktemp("state"), threads=1)
    yield made
    made.close()


@pytest.fixture
def stages(_stages: DeviceStages, _forked: None) -> DeviceStages:
    """Two ranks, which all tests share."""
    return _stages


@pytest.fixture
def fresh_stages(tmp_path: Path, _forked: None) -> Iterator[DeviceStages]:
    """Two ranks of one test."""
    made = DeviceStages((CPU, CPU), tmp_path, threads=1)
    yield made
    made.close()
