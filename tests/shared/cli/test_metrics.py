"""What `tessera run` shows and writes of a run's measurements, against a real coordinator."""

from __future__ import annotations

import csv
import io
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow.parquet as pq
import pytest

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run
from tessera.shared.methods.base import MethodSpec
from tessera.shared.metrics.rows import MetricRow
from tests.support.cli import process, tessera
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.telling import STILL, telling

# MLflow makes a database of its own, which takes a while on a busy machine.
MLFLOW_SECONDS = 110


class Scene:
    """A run of two rounds at two sites, over: measured at both and centrally."""

    def __init__(self, coordinator: LiveCoordinator) -> None:
        self.settings = {"TESSERA_URL": coordinator.url, "TESSERA_TOKEN": coordinator.token("viewer")}
        self.coordinator = coordinator
        client, model = coordinator.client(), small_model()
        with telling() as method:
            workers = [
                ScriptedWorker(
                    coordinator.client("site", site),
                    kinds=("train", "evaluate"),
                    datasets={"data": 10, **({"test": 5} if site == "a" else {})},
                    held_out={"data": 4},
                    methods=(method,),
                ).enrol()
                for site in "ab"
            ]
            self.run: Run = start_run(
                client,
                model,
                values(model),
                method=MethodSpec(name=method),
                rounds=2,
                cohort=Cohort(size=2, quorum=2),
                evaluation=Evaluation(dataset="test", sites=True),
            )
            while client.run(self.run.id).state != "completed":
                for worker in workers:
                    if task := worker.claim(0):
                        self._do(worker, task)

    def _do(self, worker: ScriptedWorker, task: Any) -> None:
        if task.kind == "train":
            # Names that a worker may choose, and that are no paths to MLflow.
            worker.train(task, **{"loss/": 1.0, "..": 2.0})
        elif not task.held_out:
            worker.evaluate(task, accuracy=0.5, macro_f1=0.5)
        else:
            # Site a is served better than site b.
            worker.evaluate(task, accuracy=0.75 if "test" in worker.datasets else 0.25)

    def say(self, *arguments: str, code: int = 0) -> subprocess.CompletedProcess[str]:
        return self._ended(tessera(*arguments, **self.settings), code)

    def say_alone(self, *arguments: str, code: int = 0, **settings: str) -> subprocess.CompletedProcess[str]:
        """The same as a process of its own."""
        return self._ended(process(*arguments, seconds=MLFLOW_SECONDS, **self.settings, **settings), code)

    @staticmethod
    def _ended(done: subprocess.CompletedProcess[str], code: int) -> subprocess.CompletedProcess[str]:
        assert (done.returncode, "Traceback" in done.stderr) == (code, False), done.stderr
        return done


@pytest.fixture(scope="module")
def scene(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Scene]:
    with LiveCoordinator(tmp_path_factory.mktemp("scene")) as live:
        yield Scene(live)


def test_a_run_s_measurements_are_comma_separated_values_on_stdout(scene: Scene) -> None:
    rows = list(csv.DictReader(io.StringIO(scene.say("run", "metrics", "test").stdout)))
    assert list(rows[0]) == list(MetricRow._fields)
    by_stage = {stage: sum(row["stage"] == stage for row in rows) for stage in ("central", "sites", "version")}
    # Three versions: two numbers, examples and bytes centrally, one number and these at each of two sites; one
    # number and three of coverage each of the two versions that were merged.
    assert by_stage == {"central": 12, "sites": 18, "version": 8}
    worst = [(row["version"], row["site"], row["value"]) for row in rows if row["metric"] == "accuracy.worst"]
    assert worst == [(str(number), "b", "0.25") for number in range(3)]


def test_all_forms_hold_the_same_rows(scene: Scene, tmp_path: Path) -> None:
    given = ("--csv", str(tmp_path / "m.csv"), "--parquet", str(tmp_path / "m.parquet"))
    told = scene.say("run", "metrics", "test", *given).stdout
    rows = json.loads(scene.say("run", "metrics", "test", "--json").stdout)["rows"]
    assert told.startswith(f"{len(rows)} rows to ")
    table = pq.read_table(tmp_path / "m.parquet")
    assert table.column_names == list(MetricRow._fields)
    assert table.to_pylist() == rows
    with (tmp_path / "m.csv").open(newline="") as file:
        assert [float(row["value"]) for row in csv.DictReader(file)] == [row["value"] for row in rows]


def test_a_file_that_cannot_be_written_is_named(scene: Scene, tmp_path: Path) -> None:
    refused = scene.say("run", "metrics", "test", "--csv", str(tmp_path / "no" / "m.csv"), code=2)
    assert "m.csv cannot be written" in refused.stderr


@pytest.mark.long
def test_mlflow_gets_one_run_that_a_second_export_only_adds_to(scene: Scene, tmp_path: Path) -> None:
    given = ("run", "metrics", "test", "--mlflow", f"sqlite:///{tmp_path}/mlflow.db", "--experiment", "trials")
    first = json.loads(scene.say_alone(*given, "--json").stdout)
    assert json.loads(scene.say_alone(*given, "--json").stdout) == first
    read = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", READ, f"sqlite:///{tmp_path}/mlflow.db"],
        env={**os.environ, "MLFLOW_DISABLE_TELEMETRY": "true"},
        capture_output=True,
        text=True,
        check=True,
    )
    found = json.loads(read.stdout)
    assert found["tags"]["tessera.run"] == scene.run.id
    assert found["params"]["method.name"] == "telling"
    assert found["accuracy of b"] == [[0, 0.25], [1, 0.25], [2, 0.25]]
    assert found["metrics"]["fairness/accuracy.mean"] == 0.5
    assert found["metrics"]["version/moved"] == 2.0
    assert found["metrics"]["round/accepted"] == 2.0
    assert (found["metrics"]["train/loss_/a/w"], found["metrics"]["train/_/a/w"]) == (1.0, 2.0)


@pytest.mark.long
def test_a_store_that_mlflow_does_not_know_is_refused_with_one_that_it_does(scene: Scene) -> None:
    refused = scene.say_alone("run", "metrics", "test", "--mlflow", "odd://store", code=2)
    assert "MLflow cannot use this store: " in refused.stderr
    assert "such as sqlite:///mlflow.db" in refused.stderr


READ = """
import json, sys
from mlflow import MlflowClient
client = MlflowClient(tracking_uri=sys.argv[1])
(run,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
history = client.get_metric_history(run.info.run_id, "sites/accuracy/b/w")
found = {"tags": run.data.tags, "params": run.data.params, "metrics": run.data.metrics}
print(json.dumps(found | {"accuracy of b": [[metric.step, metric.value] for metric in history]}))
"""


def test_a_run_is_shown_with_its_sites_its_warnings_and_if_asked_its_numbers(scene: Scene) -> None:
    shown = scene.say("run", "show", "test").stdout
    lines = [line.split() for line in shown.splitlines()]
    assert ["warning", *STILL.split()] in lines
    row = next(line for line in lines if line[:2] == ["2", "accuracy"])
    assert row == ["2", "accuracy", "2", "0.500", "0.500", "0.250", "b", "0.250", "-"]
    assert "moved" not in shown
    assert "moved" in scene.say("run", "show", "test", "--scalars").stdout


def test_a_run_is_shown_as_json_with_all_of_that(scene: Scene) -> None:
    shown = json.loads(scene.say("run", "show", "test", "--json").stdout)
    assert [version["warnings"] for version in shown["versions"]] == [[], [], [STILL]]
    first, second = shown["rounds"]
    # The score is the central one.
    assert (first["scores"], first["scalars"]["moved"]) == ({"accuracy": 0.5, "macro_f1": 0.5}, 1.0)
    assert second["sites"]["accuracy"]["worst_site"] == "b"
    assert shown["sites"]["0"]["accuracy"]["deviation"] == 0.25


def test_watching_tells_what_a_method_warns_of_once(scene: Scene) -> None:
    lines = scene.say("run", "watch", "test").stdout.splitlines()
    assert [line.split(":")[0] for line in lines[:2]] == ["round 1 train", "round 2 train"]
    assert ", accuracy 0.500, macro_f1 0.500, worst site b: accuracy 0.250, " in lines[1]
    assert lines[2] == f"warning: {STILL}"
    assert [line for line in lines if STILL in line] == lines[2:3]
