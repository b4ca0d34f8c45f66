from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator import LiveCoordinator
from tests.support.paths import ROOT


@pytest.fixture(scope="module")
def coordinator(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path_factory.mktemp("coordinator")) as live:
        yield live


@pytest.fixture(scope="session")
def deploy() -> Path:
    """The folder of what is deployed with."""
    return ROOT / "deploy"
