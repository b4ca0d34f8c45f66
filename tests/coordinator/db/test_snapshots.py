"""What the conductor remembers of a run is about that run of that database."""

from __future__ import annotations

from pathlib import Path

import pytest

from tessera.coordinator.db.snapshots import terms_of
from tests.support.storage import add_run, migrated

DIGEST = f"sha256:{'0' * 64}"
SPEC = {"name": "run", "method": {"name": "fedavg"}, "model": DIGEST, "version": DIGEST, "dataset": "data"}


@pytest.mark.parametrize("rounds", [(1, 2), (2, 1)])
def test_runs_of_two_databases_may_have_one_id(tmp_path: Path, rounds: tuple[int, int]) -> None:
    found = []
    for number in rounds:
        database = migrated(tmp_path / str(number))
        with database.transaction() as session:
            add_run(session).spec = {**SPEC, "rounds": number}
        with database.snapshot() as session:
            found.append(terms_of(session, "run").spec.rounds)
        database.close()
    assert tuple(found) == rounds
