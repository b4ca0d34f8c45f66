from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.support.coordinator import LiveCoordinator

# How long one example takes says more about what else the machine does than about the code.
settings.register_profile("tessera", deadline=None)
settings.load_profile("tessera")


@pytest.fixture(autouse=True)
def seeded() -> None:
    """What a test draws without a generator of its own is the same each time, so that it fails always or never."""
    # Imported by those that need it, which takes seconds.
    if torch := sys.modules.get("torch"):
        torch.manual_seed(0)


@pytest.fixture
def coordinator(tmp_path: Path) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path / "coordinator") as live:
        yield live
