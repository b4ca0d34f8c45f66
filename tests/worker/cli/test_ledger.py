"""`tessera worker ledger`: a person sees what was spent, by whom, and of how much."""

from __future__ import annotations

import json
import os
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import VersionRef
from tessera.shared.methods.base import MethodSpec, Plan
from tessera.shared.run_settings import Budget, Unit
from tessera.worker.cli.worker import app
from tessera.worker.privacy.accountant import epsilon, least_budget
from tessera.worker.state.database import DATABASE_FILE
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger, NoisyFigures, NoisySteps, OneInGroup
from tests.support.chain_rows import ChainRows

KEY = b"k" * 32
SETTINGS = """
url = "http://127.0.0.1:9"
token = "tsr_secret"
name = "north-1"
state_dir = "{folder}"
audit_key = "{key}"

[datasets.wards]
kind = "digits"
privacy = {{ epsilon = 8.0, delta = 1e-6 }}

[datasets.open]
kind = "digits"
"""
DIGEST = f"sha256:{'0' * 64}"
STEPS = NoisySteps(noise_multiplier=2.0, sampling_rate=0.2, steps=10)


@pytest.fixture
def config(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in [name for name in os.environ if name.startswith("TESSERA_")]:
        monkeypatch.delenv(name)
    file = tmp_path / "worker.toml"
    file.write_text(SETTINGS.format(folder=tmp_path, key=KEY.hex()))
    return file


def spend(folder: Path, run: str, number: int, token: int, unit: Unit = "example") -> None:
    task = Task(
        id=f"{run}-{number}", token=token, kind="train", run=run, run_name=f"run-{run}", round=number, rounds=3,
        seed=0, method=MethodSpec(name="fedavg"), plan=Plan(), dataset="wards", training=Training(), codec="raw",
        normalization="participants", model=DIGEST, version=VersionRef(number=0, digest=DIGEST), lease_seconds=60.0,
    )  # fmt: skip
    with Ledger(folder, KEY).page("wards") as page:
        page.spend(TaskRef.of(task), 100, Budget(epsilon=3.0, delta=1e-5), [STEPS], unit=unit)


def test_what_was_spent_is_shown_by_run_and_in_all(config: Path) -> None:
    for run, number, token in (("a", 1, 1), ("a", 1, 2), ("a", 2, 3), ("b", 1, 4)):
        spend(config.parent, run, number, token)
    result = CliRunner().invoke(app, ["ledger", "--config", str(config), "--json"])
    shown = json.loads(result.stdout)
    nothing = {"unit": "example", "epsilon": 0.0, "delta": None, "budget": None, "exact": {}, "runs": []}
    assert shown["open"] == nothing
    assert (shown["wards"]["budget"], shown["wards"]["delta"]) == (8.0, 1e-6)
    assert shown["wards"]["epsilon"] == least_budget([STEPS] * 4, 1e-6) > epsilon([STEPS] * 4, 1e-6)
    first, second = shown["wards"]["runs"]
    assert (first["name"], first["rounds"], first["tasks"], first["target"]) == ("run-a", 2, 3, 3.0)
    assert first["epsilon"] == pytest.approx(epsilon([STEPS] * 3, 1e-5))
    assert (second["rounds"], second["tasks"]) == (1, 1)


def test_what_evaluations_spend_is_shown_beside_the_run_s_target_and_counts_for_the_budget(config: Path) -> None:
    spend(config.parent, "a", 1, 1)
    task, figures = TaskRef("a", "run-a", 1, "a-1", 2), NoisyFigures(rho=0.1)
    with Ledger(config.parent, KEY).page("wards") as page:
        page.spend(task, 100, Budget(epsilon=2.0, delta=1e-6), [figures])
    shown = json.loads(CliRunner().invoke(app, ["ledger", "--config", str(config), "--json"]).stdout)["wards"]
    (run,) = shown["runs"]
    assert (run["epsilon"], run["figures"], run["target"]) == (
        pytest.approx(epsilon([STEPS], 1e-5)), epsilon([figures], 1e-6), 3.0,
    )  # fmt: skip
    assert shown["epsilon"] == least_budget([STEPS, figures], 1e-6)
    assert "figures 2." in CliRunner().invoke(app, ["ledger", "--config", str(config)]).stdout


def test_a_budget_that_protects_nothing_is_shown_as_such(config: Path) -> None:
    config.write_text(config.read_text().replace("epsilon = 8.0", "epsilon = 900"))
    assert "900: no protection" in CliRunner().invoke(app, ["ledger", "--config", str(config)]).stdout


def test_people_see_a_table(config: Path) -> None:
    spend(config.parent, "a", 1, 1)
    lines = CliRunner().invoke(app, ["ledger", "--config", str(config)]).stdout.splitlines()
    assert lines[0].split() == ["data", "set", "run", "rounds", "tasks", "unit", "epsilon", "at", "most", "delta"]
    assert lines[1].split()[:5] == ["wards", "run-a", "1", "1", "example"]
    assert lines[2].split()[:3] == ["wards", "all", "runs"]
    assert lines[2].split()[-2:] == ["8", "1e-06"]


def test_each_run_is_shown_in_its_unit_and_the_sum_in_that_of_the_budget(config: Path) -> None:
    spend(config.parent, "a", 1, 1)
    spend(config.parent, "b", 1, 2, "group")
    result = CliRunner().invoke(app, ["ledger", "--config", str(config), "--json"])
    shown = json.loads(result.stdout)["wards"]
    assert [(run["unit"], run["epsilon"]) for run in shown["runs"]] == [
        ("example", epsilon([STEPS], 1e-5)), ("group", epsilon([STEPS], 1e-5)),
    ]  # fmt: skip
    assert (shown["unit"], shown["epsilon"]) == ("example", least_budget([STEPS, OneInGroup(STEPS)], 1e-6))
    file = config.read_text().replace("delta = 1e-6 }", 'delta = 1e-6, unit = "group" }')
    config.write_text(file)
    lines = CliRunner().invoke(app, ["ledger", "--config", str(config)]).stdout.splitlines()
    assert " ".join(lines[3].split()).startswith("wards all runs - - group training of examples unbounded since ")


def test_a_ledger_that_was_rewritten_is_said_to_be_so(config: Path) -> None:
    spend(config.parent, "a", 1, 1)
    file = ChainRows(config.parent, "ledger wards")
    file.write_bytes(file.read_bytes().replace(b'"steps":10', b'"steps":1'))
    result = CliRunner().invoke(app, ["ledger", "--config", str(config)])
    assert result.exit_code == 1
    assert "ledger wards, entry 1: this was changed" in " ".join(result.stderr.split())


def test_a_ledger_that_may_not_be_read_is_told_in_one_line(config: Path) -> None:
    # A folder in its place fails for every user; a file's rights would not stop root, as whom tests may run.
    file = config.parent / DATABASE_FILE
    file.mkdir()
    result = CliRunner().invoke(app, ["ledger", "--config", str(config)])
    assert result.exit_code == 1
    assert f"{file} cannot be read" in result.stderr.replace("\n", "")
