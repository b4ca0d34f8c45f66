from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.coordinator import LiveCoordinator

# How long one example takes says more about what else the machine does than about the code.
settings.register_profile("tessera", deadline=None)
settings.load_profile("tessera")


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        yield live
