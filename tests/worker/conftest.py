from __future__ import annotations

from collections.abc import Iterator

import pytest

from tessera.worker.data import loaders
from tessera.worker.data.loaders import LoaderProcesses


@pytest.fixture
def processes(monkeypatch: pytest.MonkeyPatch) -> Iterator[LoaderProcesses]:
    """Loaders that are given a minute on a busy machine. Two of three batches each are enough to be out of order."""
    monkeypatch.setattr(loaders, "LOOK_SECONDS", 60.0)
    made = LoaderProcesses(2)
    yield made
    made.close()
