"""A data protection officer asks how well a trained model gives its training examples away, with one command."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from tessera.shared.api.runs import Evaluation, Training
from tests.coordinator.dashboard.conftest import signed_in
from tests.support.cli import tessera
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import start_run
from tests.support.tasks import DIGITS_VIT, untrained
from tests.system.test_data_comparison import hospital


def digits(index: int) -> dict[str, Any]:
    return {"kind": "digits", "held_out": 0.4, "part": {"scheme": "iid", "count": 6, "index": index}}


def test_an_attack_on_a_run_is_one_command_and_a_table(coordinator: LiveCoordinator, tmp_path: Path) -> None:
    client = coordinator.client()
    token = coordinator.token("orchestrator")

    def run(*words: str) -> Any:
        return tessera("run", "--url", coordinator.url, *words, TESSERA_TOKEN=token)

    with (
        hospital(coordinator, tmp_path, "north", digits(0)),
        hospital(coordinator, tmp_path, "south", digits(1)),
        hospital(coordinator, tmp_path, "west", digits(2), kinds=["train", "evaluate"]),
    ):
        until(lambda: len(list(client.workers())) == 3)
        trained = start_run(
            client,
            *untrained(DIGITS_VIT, "image-classification"),
            name="wards",
            dataset="wards",
            training=Training(optimizer="adamw", learning_rate=0.01, batch_size=32, epochs=3),
            evaluation=Evaluation(sites=True),
        )
        until(lambda: client.run(trained.id).state == "completed")
        done = run("attack", "--from", "wards@1")
        told = json.loads(run("attack", "--from", "wards@1", "--json").stdout)
        nobody = run(
            "attack", "--from", "wards@1", "--set", "cohort.sites=['west']", "--set", "cohort.deadline_seconds=3"
        )
    assert done.returncode == 0, done.stderr
    assert "north: of two records, of which the model was trained on one, an attacker who has both" in done.stdout
    assert "west/w is not asked: kinds: it does not attack" in done.stdout
    pooled, north, south = told["attack"]
    assert (pooled["where"], north["where"], south["where"]) == ("all sites", "north", "south")
    assert all(one["known"] for one in told["attack"])
    assert north["members"] > north["others"] > 50
    assert 0 < pooled["figures"]["auroc"]["low"] < pooled["figures"]["auroc"]["high"] < 1
    assert nobody.returncode == 3
    (asked,) = [one for one in client.runs() if one.id == told["run"]]
    shown = run("show", asked.id)
    assert "found at 10 % false alarms" in shown.stdout
    page = signed_in(coordinator).see(f"/runs/{asked.id}")
    (row,) = [row for row in page.rows if row[0] == "north"]
    assert row[1:3] == [str(north["members"]), str(north["others"])]
