"""Sweeps: combinations that are checked before the first begins, processes, resumption, and the table."""

from __future__ import annotations

import csv
import json
import os
import shutil
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from subprocess import CompletedProcess
from xml.etree import ElementTree as ET

import psutil
import pytest

from tessera.shared.problems import Invalid
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.cli import sweep
from tessera.simulation.config import read_file
from tests.support.cli import forked, tessera
from tests.support.paths import ROOT
from tests.support.tasks import VIT

PAPERS = sorted((ROOT / "examples" / "papers").glob("*.toml"))


def made(folder: Path, config: object) -> Path:
    (folder / "config.json").write_text(json.dumps(config))
    init = ("model", "init", str(folder / "model"), "--config", str(folder / "config.json"))
    assert tessera(*init, "--head", "image-classification", "--random").returncode == 0
    return folder / "model"


@pytest.fixture(scope="module")
def file(tmp_path_factory: pytest.TempPathFactory, files: dict[str, Path]) -> Path:
    """A simulation of three sites, one of which misses the only round."""
    folder = tmp_path_factory.mktemp("sweep")
    sites = (f'[simulation.sites.{name}]\nkind = "arrays"\nfile = "{data}"\n' for name, data in files.items())
    (folder / "run.toml").write_text(
        f'model = "{made(folder, VIT)}"\nrounds = 1\ncohort.max_attempts = 1\nmethod.name = "fedavg"\n'
        "training.batch_size = 8\n[simulation]\nthreads = 1\naway = { south = [1] }\n"
        "policy.min_evaluation_examples = 1\n"
        f'[simulation.test]\nkind = "arrays"\nfile = "{files["north"]}"\n{"".join(sites)}'
    )
    return folder / "run.toml"


def swept(file: Path, out: Path, *options: str) -> CompletedProcess[str]:
    return forked("simulate", str(file), "--out", str(out), "--seeds", "0,1", "--processes", "2", *options)


RATES = ("--vary", "training.learning_rate=0.001,0.5")


def test_a_sweep_pairs_by_seed_resumes_and_refuses_the_folder_of_another(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    answer = swept(file, out, *RATES, "--score", "2", "--score", "0")
    assert answer.returncode == 0, answer.stderr
    table = csv.DictReader((out / "sweep.csv").read_text().splitlines())
    rows = {(row["training.learning_rate"], row["figure"]): row for row in table}
    scores = {
        rate: [json.loads((out / f"learning_rate={rate}" / f"seed-{n}" / "summary.json").read_text()) for n in (0, 1)]
        for rate in ("0.001", "0.5")
    }
    slow, fast = ([each["scores"]["loss"] for each in of_rate] for of_rate in scores.values())
    less = [one - other for one, other in zip(fast, slow, strict=True)]
    row = rows["0.5", "loss"]
    assert float(row["difference"]) == pytest.approx(sum(less) / 2)
    assert float(row["low"]) < float(row["difference"]) < float(row["high"])
    # A score that no seed reached is said, and one that the first version has cost nothing.
    assert (rows["0.5", "rounds to 2"]["mean"], rows["0.5", "rounds to 2"]["lacking"]) == ("", "2")
    assert float(rows["0.5", "megabytes both ways to 0"]["mean"]) == 0
    assert "never with 2 seeds" in (out / "sweep.md").read_text()
    assert len(list(ET.parse(out / "sweep.svg").iter("{http://www.w3.org/2000/svg}circle"))) == 2  # noqa: S314 (ours)

    # One is half done, and the others are not computed again.
    half, whole = out / "learning_rate=0.5" / "seed-1", out / "learning_rate=0.001" / "seed-0"
    digest = json.loads((half / "summary.json").read_text())["digest"]
    for lost in (half / "summary.json", *half.glob("coordinator.db*")):
        lost.unlink()
    before = (whole / "coordinator.db").stat().st_mtime_ns
    # What the machine is used for may change, and not what determines results.
    again = swept(file, out, *RATES, "--set", "simulation.loaded=2")
    assert "3 of them finished before" in again.stderr
    assert json.loads((half / "summary.json").read_text())["digest"] == digest
    assert (whole / "coordinator.db").stat().st_mtime_ns == before

    other = swept(file, out, *RATES, "--set", "training.batch_size=4")
    assert other.returncode == 2
    assert "holds a sweep with other settings" in other.stderr
    assert "/spec/training/batch_size: was 8 and is 4" in other.stderr


def test_a_combination_that_fails_is_named_with_its_reason_and_the_others_go_on(file: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    # One of three sites is away.
    answer = swept(file, out, "--vary", "cohort.quorum=3,2", "--json")
    assert answer.returncode == 1
    *events, end = map(json.loads, answer.stdout.splitlines())
    assert sorted(event["failure"] is None for event in events) == [False, False, True, True]
    failed, done = end["rows"]
    assert "seed 0: " in failed["failure"]
    assert "quorum" in failed["failure"]
    assert (done["failure"], end["baseline"]) == (None, "quorum=2")
    assert done["figures"]["accuracy"]["mean"] >= 0
    assert "quorum=3, seed 1: " in answer.stderr
    assert "Stalled" in (out / "quorum=3" / "seed-0" / "failure.txt").read_text()


@pytest.mark.parametrize(
    ("options", "told"),
    [
        (["--vary", "method.lauers=1,2"], "lauers=1:"),
        (["--vary", "trainig.epochs=1,2"], "did you mean `training`?"),
        (["--vary", "training.epochs=1,none"], "epochs=none:"),
        # The method itself refuses it, once it sees the model.
        (["--set", "method.name=safl", "--vary", "method.layers=1,9"], "layers=9: the method cannot do this run"),
        (["--vary", "simulation.sites.north.file=nowhere"], "file=nowhere: simulation.sites.north.file: nowhere"),
        (["--vary", "training.epochs=1,1.0"], "has 1.0 twice"),
        (["--vary", "training.epochs=2020-01-01"], "/training/epochs: must be a whole number"),
        (["--vary", "method.mu=1", "--vary", "method.settings.mu=2"], "are varied, and set the same"),
        (["--vary", "training={ epochs = 1 }", "--vary", "training.epochs=2"], "are varied, and set the same"),
        (["--vary", "sweep.seeds=[0],[1]"], "sweep.seeds cannot be varied"),
        (["--vary", "training.epochs"], "is not KEY=VALUE,VALUE..."),
        (["--vary", "seed=1,2"], "Give seeds with --seeds"),
        (["--processes", "2"], "is about the simulations of --vary"),
    ],
)
def test_a_value_that_cannot_be_meant_is_refused_before_the_first_simulation(
    file: Path, tmp_path: Path, options: Sequence[str], told: str
) -> None:
    answer = tessera("simulate", str(file), "--out", str(tmp_path / "out"), *options)
    assert answer.returncode == 2
    assert told in " ".join(answer.stderr.split())
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- combinations and processes


def test_no_two_combinations_have_the_same_folder() -> None:
    given = [
        "method.name=fedavg,safl",
        "training.rates={ head = 2 },{ head = 3 }",
        "data.file=a/b,a_b",
        "a.x=1",
        "b.x=2",
    ]
    found = sweep.combinations(sweep.varied(given, {}))
    assert len({one.folder for one in found}) == len(found) == 8
    assert found[0].name == "name=fedavg, rates={ head = 2 }, file=a/b, a.x=1, b.x=2"
    assert found[0].settings[2] == 'data.file="a/b"'


def test_an_option_replaces_the_values_of_the_file() -> None:
    assert sweep.varied(["a=3"], {"a": [1, 2], "b": [True]}) == {"b": [True], "a": [3]}


def jobs(folder: Path, count: int) -> list[sweep.Job]:
    return [sweep.Job(one, 0, folder / one.folder) for one in sweep.combinations({"a": list(range(count))})]


def test_an_interrupt_ends_all_processes(tmp_path: Path) -> None:
    def run(job: sweep.Job) -> None:
        (tmp_path / f"pid-{os.getpid()}").touch()
        while True:
            # The last of both to come interrupts this process alone, as `kill -INT` does.
            if job.combination.values["a"] == 1 and len(list(tmp_path.glob("pid-*"))) == 2:
                os.kill(os.getppid(), signal.SIGINT)
                signal.pause()
            time.sleep(0.01)

    with pytest.raises(KeyboardInterrupt):
        sweep.work(jobs(tmp_path, 4), run, 2, lambda *_: None)
    pids = [int(path.name.removeprefix("pid-")) for path in tmp_path.glob("pid-*")]
    assert len(pids) == 2
    assert not any(map(psutil.pid_exists, pids))


def test_a_process_that_is_killed_takes_no_other_along(tmp_path: Path) -> None:
    def run(job: sweep.Job) -> None:
        if job.combination.values["a"] == 1:
            os.kill(os.getpid(), signal.SIGKILL)

    ended: dict[str, str | None] = {}
    sweep.work(jobs(tmp_path, 3), run, 2, lambda job, _, reason: ended.update({job.combination.name: reason}))
    assert (ended["a=0"], ended["a=2"]) == (None, None)
    assert "SIGKILL; with too little memory, give fewer --processes" in (ended["a=1"] or "")


def test_the_reason_of_a_failure_may_be_longer_than_a_pipe_holds(tmp_path: Path) -> None:
    def run(_: sweep.Job) -> None:
        raise ValueError("x" * 200_000)

    reasons = []
    sweep.work(jobs(tmp_path, 1), run, 1, lambda *ended: reasons.append(ended[2]))
    assert reasons == ["x" * 200_000]


def test_a_model_within_the_results_of_a_sweep_is_not_replaced_by_them(file: Path, tmp_path: Path) -> None:
    model = shutil.copytree(file.parent / "model", tmp_path / "epochs=1" / "seed-0" / "model")
    answer = tessera(
        "simulate", str(file), "--model", str(model), "--out", str(tmp_path), "--vary", "training.epochs=1"
    )
    assert answer.returncode == 2
    assert "would replace that" in answer.stderr


# ---------------------------------------------------------------- the papers' own


def test_the_papers_sweeps_can_begin(tmp_path: Path) -> None:
    start = ModelFolder.open(made(tmp_path, json.loads((ROOT / "examples" / "digits" / "vit.json").read_text())))
    assert [path.stem for path in PAPERS] == ["fedfrozen-warmup", "heterogeneity", "safl-epsilon", "safl-layers"]
    for path in PAPERS:
        table = read_file(path).sweep
        assert table
        found = sweep.combinations(sweep.varied([], table.vary))
        files, _ = sweep.checked(path, [], found, start, table.seeds[0])
        # The comment says how many.
        assert f"{len(files) * len(table.seeds)} simulations, about " in path.read_text()


def test_a_seed_that_a_file_has_twice_is_simulated_once(file: Path) -> None:
    sweep = read_file(file, ["sweep.seeds=[1, 0, 1]", 'sweep.vary={ "training.epochs" = [1] }']).sweep
    assert sweep
    assert sweep.seeds == (1, 0)


def test_a_sweep_table_that_varies_nothing_is_refused(file: Path) -> None:
    with pytest.raises(Invalid, match="does not describe a valid federation") as caught:
        read_file(file, ["sweep.seeds=[0]"])
    assert caught.value.errors[0].pointer == "/sweep/vary"
