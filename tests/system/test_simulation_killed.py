"""A simulation as a process that is killed."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tessera.shared.updates.model_folder import ModelFolder
from tests.support.coordinator import until
from tests.support.processes import Process

FILE = """
rounds = 6
method = { name = "fedrep" }
training = { learning_rate = 0.01, batch_size = 16 }

[simulation]
sites = 3
threads = 1

[simulation.data]
kind = "digits"
part = { scheme = "dirichlet", alpha = 1 }
"""


@pytest.mark.long
def test_a_simulation_that_was_killed_ends_with_the_bits_of_one_that_was_not(
    vit: ModelFolder, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(FILE)

    def started(name: str) -> Process:
        command = ["simulate", str(tmp_path / "run.toml"), "--model", str(vit.path), "--out", str(tmp_path / name)]
        return Process(tmp_path, name + "-log", ["tessera.shared.cli", *command])

    def digest(name: str) -> str:
        return str(json.loads((tmp_path / name / "summary.json").read_text())["digest"])

    whole = started("whole")
    assert whole.popen.wait(100) == 0, whole.log.read_text()
    for version in (1, 3):
        broken = started("broken")
        until((tmp_path / "broken" / "versions" / f"{version:07}.json").exists, seconds=60)
        broken.kill()
    assert not (tmp_path / "broken" / "summary.json").exists()
    assert started("broken").popen.wait(100) == 0
    assert digest("broken") == digest("whole")
