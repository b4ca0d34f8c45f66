from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.coordinator import LiveCoordinator


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        yield live
