from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.coordinator.db.engine import Database
from tests.support.coordinator import Clock, LiveCoordinator
from tests.support.storage import migrated


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    """One coordinator for all tests of a module, each of which looks at runs and sites of its own."""
    with LiveCoordinator(tmp_path_factory.mktemp("standing")) as live:
        yield live


@pytest.fixture
def clock() -> Clock:
    return Clock()


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = migrated(tmp_path)
    yield database
    database.close()
