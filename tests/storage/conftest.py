from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tessera.coordinator.db.engine import Database
from tests.support.storage import migrated


@pytest.fixture
def database(tmp_path: Path) -> Iterator[Database]:
    database = migrated(tmp_path)
    yield database
    database.close()
