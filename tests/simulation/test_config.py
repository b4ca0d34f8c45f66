"""`tessera simulate`: its file, what it prints and writes, and what it refuses."""

from __future__ import annotations

import csv
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from transformers import AutoModelForImageClassification
from typer.testing import CliRunner, Result

from tessera.shared.cli.main import app
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.config import SimulationFile, read_file
from tessera.worker.data.registry import load
from tests.support.cli import forked
from tests.support.coordinator import refusing
from tests.support.paths import ROOT
from tests.support.tasks import VIT

GOOD = """
rounds = 2
model = "model"
method = { name = "fedper" }
training = { batch_size = 8, learning_rate = 0.05 }
evaluation = { sites = true }

[simulation]
sites = 3
threads = 1

[simulation.data]
kind = "arrays"
file = "data.safetensors"
held_out = 0.25
part = { scheme = "dirichlet", alpha = 1 }

[simulation.policy]
min_evaluation_examples = 1

[simulation.test]
kind = "arrays"
file = "data.safetensors"
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the command runs: 120 images of three classes, and a file."""
    dice = torch.Generator().manual_seed(0)
    labels = torch.arange(120) % 3
    save_file(
        {"pixel_values": torch.randn(120, 1, 8, 8, generator=dice), "labels": labels}, tmp_path / "data.safetensors"
    )
    (tmp_path / "run.toml").write_text(GOOD)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def read(*settings: str) -> SimulationFile:
    return read_file(Path("run.toml"), settings)


def examples(*settings: str) -> dict[str, tuple[int, int]]:
    """How many examples each site trains on and holds out."""
    loaded = {name: site.load() for name, site in read(*settings).table.population(seed=0).items()}
    return {name: (data.examples, data.held_out.examples if data.held_out else 0) for name, data in loaded.items()}


# ---------------------------------------------------------------- the file


@pytest.mark.usefixtures("folder")
def test_a_number_of_sites_divide_the_data_and_each_holds_some_out() -> None:
    found = examples()
    assert list(found) == ["site-1", "site-2", "site-3"]
    assert sum(map(sum, found.values())) == 120
    # A quarter of 120, with a standard deviation of 4.7.
    assert 15 < sum(held_out for _, held_out in found.values()) < 45
    assert read("simulation.sites=10").table.names[:2] == ["site-01", "site-02"]


@pytest.mark.usefixtures("folder")
def test_sites_can_have_names_and_one_site_has_all() -> None:
    assert list(examples('simulation.sites=["north", "south"]')) == ["north", "south"]
    ((trained, held_out),) = examples("simulation.sites=1").values()
    assert trained + held_out == 120


@pytest.mark.usefixtures("folder")
def test_the_seed_decides_what_is_held_out() -> None:
    table = read("simulation.sites=1").table
    first, same, other = (table.population(seed)["site-1"].load().held_out for seed in (0, 0, 1))
    assert first
    assert same
    assert other
    assert torch.equal(first.tensors["pixel_values"], same.tensors["pixel_values"])
    assert first.tensors["pixel_values"].tolist() != other.tensors["pixel_values"].tolist()


def test_data_that_change_are_those_of_the_file_from_their_round_on(folder: Path) -> None:
    images = torch.randn(30, 1, 8, 8, generator=torch.Generator().manual_seed(1))
    save_file({"pixel_values": images, "labels": torch.zeros(30, dtype=torch.int64)}, folder / "later.safetensors")
    changes = '[simulation.changes.site-2.5]\nkind = "arrays"\nfile = "later.safetensors"\nheld_out = 0.5\n'
    (folder / "run.toml").write_text(GOOD + changes)
    sites = read().table.population(seed=0)
    later = sites["site-2"].load(since=5)
    assert later.held_out
    assert later.examples + later.held_out.examples == 30
    assert [sites["site-2"].since(number) for number in (1, 4, 5, 9)] == [0, 0, 5, 5]
    assert not sites["site-1"].changes
    with refusing("invalid", r"^simulation\.changes\.site-2\.5\.file: nowhere"):
        read("simulation.changes.site-2.5.file=nowhere").table.population(seed=0)["site-2"].load(since=5)


def test_sites_can_have_data_of_their_own(folder: Path) -> None:
    own = '[simulation.sites.north]\nkind = "arrays"\nfile = "data.safetensors"\n'
    resources = "[simulation.resources.north]\nmemory_bytes = 1e9\n"
    (folder / "run.toml").write_text(f'rounds = 1\nmethod.name = "fedavg"\n{own}{resources}')
    (north,) = read().table.population(seed=0).values()
    assert north.load().examples == 120
    assert north.resources == {"memory_bytes": 1e9}
    assert read().model is None


@pytest.mark.usefixtures("folder")
@pytest.mark.parametrize(
    ("setting", "pointer", "told"),
    [
        ("method.name=fedavgg", "/method/name", "did you mean `fedavg`? (TESSERA_METHODS is not set)"),
        ("simulation.sits=3", "/simulation/sits", "did you mean `sites`?"),
        ("simulation.sites=0", "/simulation/sites", "at least 1"),
        ("simulation.data.part={}", "/simulation/data/part/scheme", "required"),
        ("simulation.data.part.count=4", "/simulation", "data.part.count: there are 3 sites; leave it out"),
        ("simulation.sites={ a = { kind = 'arrays' } }", "/simulation", "leave out data"),
        ("simulation.dropout=1", "/simulation/dropout", "less than 1"),
        ("simulation.away={ site-1 = [0] }", "/simulation/away", "greater than 0"),
        (
            "simulation.away={ site-02 = [3] }",
            "/simulation",
            "away: there is no site 'site-02'; did you mean `site-2`?",
        ),
        (
            "simulation.resources={ north = { memory_bytes = 1e9 } }",
            "/simulation",
            "resources: there is no site 'north'; it can be site-1, site-2, site-3",
        ),
        (
            "simulation.changes={ site-9 = { 3 = { kind = 'arrays', file = 'f' } } }",
            "/simulation",
            "changes: there is no site 'site-9'; did you mean",
        ),
        ("simulation.changes={ site-1 = { 1 = { kind = 'arrays' } } }", "/simulation/changes", "at least 2"),
        ("rounds=none", "/rounds", "whole number"),
    ],
)
def test_what_is_wrong_is_named(setting: str, pointer: str, told: str) -> None:
    with refusing("invalid") as caught:
        read(setting)
    assert any(fault.pointer.startswith(pointer) and told in fault.detail for fault in caught.value.errors)


@pytest.mark.usefixtures("folder")
def test_data_that_cannot_be_had_are_named_with_their_table() -> None:
    with refusing("invalid", r"^simulation\.data\.file: nowhere"):
        examples("simulation.data.file=nowhere")
    with refusing("invalid", r"^simulation\.data\.part: 120 rows cannot be divided among 200 sites"):
        examples("simulation.sites=200")
    with refusing("invalid", r"^simulation\.test\.kind: there is no 'rumour'"):
        read("simulation.test.kind=rumour").table.central()


def test_a_file_without_sites_or_model_is_refused_with_the_remedy(folder: Path) -> None:
    (folder / "run.toml").write_text('rounds = 1\nmethod.name = "fedavg"\n')
    with refusing("invalid", r"has no \[simulation\] table"):
        read()
    with refusing("invalid", "the model is 3, not a folder's name"):
        read("model=3")


def test_the_examples_file_makes_a_federation() -> None:
    wanted = read_file(ROOT / "examples" / "digits" / "simulation.toml")
    assert wanted.table.names == ["site-1", "site-2", "site-3", "site-4"]
    assert wanted.table.central() is not None


# ---------------------------------------------------------------- the command


def tessera(*arguments: str) -> Result:
    return CliRunner().invoke(app, arguments)


def made(folder: Path) -> None:
    (folder / "vit.json").write_text(json.dumps(VIT))
    init = ("model", "init", str(folder / "model"), "--config", str(folder / "vit.json"))
    assert tessera(*init, "--head", "image-classification", "--random").exit_code == 0


def events(stdout: str) -> list[dict[str, Any]]:
    return [json.loads(line) for line in stdout.splitlines()]


def test_it_runs_to_its_end_writes_what_came_out_and_goes_on_where_it_was(folder: Path) -> None:
    made(folder)
    answer = tessera("simulate", "run.toml")
    assert answer.exit_code == 0, answer.stderr
    first, second, *rest = answer.stdout.splitlines()
    assert first.startswith("round 1 body: 3 of 3 updates, accuracy 0.")
    assert second.startswith("round 2 body: 3 of 3 updates, accuracy 0.")
    assert any(line.startswith("accuracy (worst site)") for line in rest)
    assert any(line.startswith("accuracy of the version (worst site)") for line in rest)
    out = folder / "run-output"
    with (out / "measurements.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert {row["metric"] for row in rows if row["stage"] == "sites"} >= {"accuracy", "personal_accuracy", "loss"}
    assert {row["version"] for row in rows if row["stage"] == "central"} == {"0", "1", "2"}
    summary = json.loads((out / "summary.json").read_text())
    assert (summary["version"], summary["method"]) == (2, "fedper")
    model = AutoModelForImageClassification.from_pretrained(out / "model")
    assert sum(parameter.numel() for parameter in model.parameters()) > 1000
    assert ModelFolder.open(out / "model").model == ModelFolder.open(folder / "model").model

    again = tessera("simulate", "run.toml", "--json")
    assert [event["event"] for event in events(again.stdout)] == ["end"]
    assert events(again.stdout)[0]["runs"][0]["digest"] == summary["digest"]
    other = tessera("simulate", "run.toml", "--set", "rounds=3")
    assert (other.exit_code, "/spec/rounds: was 2 and is 3" in other.stderr) == (2, True)


def test_a_process_of_its_own_prints_json_and_nothing_else(folder: Path) -> None:
    made(folder)
    # Not in this process, in which the tests direct all logs elsewhere.
    answer = forked("simulate", "run.toml", "--json", "--set", "rounds=1")
    assert (answer.returncode, "info" in answer.stderr) == (0, False), answer.stderr
    assert [event["event"] for event in events(answer.stdout)] == ["round", "end"]


def images(file: Path, side: int) -> None:
    save_file({"pixel_values": torch.zeros(30, 1, side, side), "labels": torch.arange(30) % 3}, file)


@pytest.mark.parametrize("processes", [pytest.param(1, marks=pytest.mark.long), 2])
def test_at_the_end_it_tells_why_tasks_failed_and_versions_were_not_measured(folder: Path, processes: int) -> None:
    made(folder)
    images(folder / "large.safetensors", 16)
    own = '[simulation.sites.{0}]\nkind = "arrays"\nfile = "{1}.safetensors"\n'
    begin = 'rounds = 1\nmodel = "model"\nmethod = {{ name = "fedavg" }}\n[simulation]\nthreads = 1\nprocesses = {}\n'
    test = '[simulation.test]\nkind = "arrays"\nfile = "large.safetensors"\n'
    text = begin.format(processes) + own.format("north", "data") + own.format("south", "large") + test
    (folder / "run.toml").write_text(text)
    # A second command computes nothing, and tells the same.
    for answer in (tessera("simulate", "run.toml"), tessera("simulate", "run.toml")):
        assert answer.exit_code == 0, answer.stderr
        assert "round 1  south/worker  failed: input-mismatch: the data set 'data' does not fit" in answer.stdout
        assert "versions 0 to 1  evaluator/worker  input-mismatch: the data set 'test'" in answer.stdout
    answer = tessera("simulate", "run.toml", "--json")
    (run,) = events(answer.stdout)[-1]["runs"]
    assert [(one["version"], one["worker"]) for one in run["unmeasured"]] == [
        (0, "evaluator/worker"),
        (1, "evaluator/worker"),
    ]


def test_a_worker_that_is_to_stay_silent_is_no_failure(folder: Path) -> None:
    made(folder)
    answer = tessera("simulate", "run.toml", "--set", "simulation.dropout=0.5", "--set", "rounds=3")
    assert answer.exit_code == 0, answer.stderr
    assert re.search("[12] of 3 updates", answer.stdout)
    assert "without an update" not in answer.stdout


def test_over_seeds_it_tells_mean_and_deviation(folder: Path) -> None:
    made(folder)
    options = ("--seeds", "3,5", "--out", "both", "--json", "--set", "rounds=1")
    answer = tessera("simulate", "run.toml", *options)
    assert answer.exit_code == 0, answer.stderr
    *rounds, end = events(answer.stdout)
    assert [event["event"] for event in rounds] == ["round", "round"]
    assert [run["seed"] for run in end["runs"]] == [3, 5]
    low, high = sorted(run["scores"]["loss"] for run in end["runs"])
    # Of two values the mean is in the middle, and the deviation is their distance over the root of two.
    assert end["over_seeds"]["loss of the version"]["mean"] == pytest.approx((low + high) / 2)
    assert end["over_seeds"]["loss of the version"]["deviation"] == pytest.approx((high - low) / 2**0.5)
    assert (folder / "both" / "seed-5" / "model" / "config.json").is_file()


@pytest.mark.parametrize("options", [("--out", "."), ("--out", "..", "--seeds", "1")])
def test_it_does_not_replace_the_model_that_it_starts_from(
    folder: Path, monkeypatch: pytest.MonkeyPatch, options: tuple[str, ...]
) -> None:
    (own := folder / "seed-1").mkdir()
    for name in ("run.toml", "data.safetensors"):
        (folder / name).rename(own / name)
    made(own)
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    monkeypatch.chdir(own)
    answer = tessera("simulate", "run.toml", *options)
    assert (answer.exit_code, "would replace" in answer.stderr, "another --out" in answer.stderr) == (2, True, True)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_what_it_cannot_do_it_says_in_a_line(folder: Path) -> None:
    def said(*arguments: str) -> tuple[int, str]:
        answer = tessera("simulate", "run.toml", *arguments)
        return answer.exit_code, answer.stderr

    code, stderr = said()
    assert (code, "there is no folder model" in stderr, "tessera model init" in stderr) == (2, True, True)
    made(folder)
    code, stderr = said("--set", "simulation.device=cuda:7")
    assert (code, "error: simulation.device: there is no cuda:7 here" in stderr) == (2, True)
    code, stderr = said("--seeds", "1,one")
    assert (code, "'1,one' is no list" in stderr) == (2, True)
    code, stderr = said("--set", "cohort.quorum=4")
    assert (code, "round 1 cannot open: 3 sites are there, and the quorum is 4" in stderr) == (3, True)


# ---------------------------------------------------------------- from Python


def test_the_example_of_the_documents_runs(folder: Path) -> None:
    made(folder)
    (folder / "model").rename(folder / "digits-model")
    data = load("arrays", {"file": "data.safetensors"})
    section = (ROOT / "docs" / "simulating.md").read_text().partition("## From Python")[2]
    example = section.partition("```python\n")[2].partition("```")[0]
    exec(example, {"dataset": data, "load_south": lambda: data, "test": data})  # noqa: S102 (our own)
    assert (folder / "trained" / "config.json").is_file()
