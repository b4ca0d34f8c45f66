"""The short form of the storm. `make chaos` is the long one."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.chaos.__main__ import storm
from tests.chaos.weather import KINDS
from tests.support import databases


@pytest.mark.timeout(600)
@pytest.mark.long
def test_a_federation_comes_through_a_storm_with_the_bits_of_a_calm(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if databases.CHOSEN == "sqlite":
        pytest.skip("TESSERA_TEST_DATABASE rules PostgreSQL out")
    outcome = storm(tmp_path, seed=3, faults=len(KINDS), rounds=5, pause_seconds=0.4)
    assert not outcome.wrong, (outcome.wrong, capsys.readouterr().out)
    assert sum(outcome.faults.values()) == len(KINDS)
