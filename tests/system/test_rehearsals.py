"""An orchestrator rehearses a run at two sites, of which one cannot do it, with the commands that people use."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.tasks import VIT
from tests.system.test_data_comparison import hospital, wards

RUN = """
name = "wards"
dataset = "wards"
rounds = 7
method = { name = "fedavg" }
training = { batch_size = 4, epochs = 2, learning_rate = 0.01 }
"""


def rehearse(coordinator: LiveCoordinator, folder: Path, *options: str) -> Any:
    given = (str(folder / "run.toml"), "--model", str(folder / "model"), *options)
    token = coordinator.token("orchestrator")
    return tessera("run", "--url", coordinator.url, "rehearse", *given, TESSERA_TOKEN=token)


def test_an_orchestrator_learns_what_a_run_takes_and_which_site_would_fail(
    coordinator: LiveCoordinator, tmp_path: Path
) -> None:
    (tmp_path / "run.toml").write_text(RUN)
    (tmp_path / "config.json").write_text(json.dumps({**VIT, "num_channels": 3}))
    made = ("--config", str(tmp_path / "config.json"), "--head", "image-classification", "--random")
    assert tessera("model", "init", str(tmp_path / "model"), *made).returncode == 0
    patients = {"benign": 6, "malignant": 5, "unclear": 4}
    north, south = (wards(tmp_path / f"{name}-images", patients) for name in ("north", "south"))
    with (
        hospital(coordinator, tmp_path, "north", north),
        hospital(coordinator, tmp_path, "south", {**south, "size": 16}),
        hospital(coordinator, tmp_path, "west", north, kinds=["evaluate"]),
    ):
        until(lambda: len(list(coordinator.client().workers())) == 3)
        done = rehearse(coordinator, tmp_path, "--json")
        short = rehearse(coordinator, tmp_path, "--set", "cohort.quorum=2")
    assert done.returncode == 0, done.stderr
    told = json.loads(done.stdout)
    (of_north, of_south) = told["forecast"]["workers"]
    # 30 images, 4 a step, twice.
    assert (of_north["worker"], of_north["report"]["examples"], of_north["report"]["steps"]) == ("north/w", 30, 16)
    assert told["forecast"]["slowest"] == "north/w"
    assert told["forecast"]["seconds"] > 7 * of_north["report"]["train_seconds"]
    assert told["forecast"]["upload_bytes"] == 7 * of_north["report"]["update_bytes"]
    assert of_south["fault"].startswith("input-mismatch: the data set 'wards' does not fit the model: images are")
    assert of_south["remedy"]
    assert told["faults"][1].startswith("west/w is not asked: kinds: it does not")
    # The same as a table, and with a quorum that the sites do not reach.
    assert short.returncode == 3
    assert "time   unknown: fewer sites than the quorum of 2 trained" in short.stdout
    assert "south/w: input-mismatch" in short.stdout
