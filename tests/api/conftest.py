from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.support.coordinator import LiveCoordinator


@pytest.fixture(scope="module")
def standing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    """One coordinator for all tests of a module, each of which leaves it as it found it."""
    with LiveCoordinator(tmp_path_factory.mktemp("standing")) as live:
        yield live
