"""Tests of comparisons of simulations, and of `tessera compare`."""

import json
from pathlib import Path
from typing import Any

import pytest
from scipy import stats
from typer.testing import CliRunner

from tessera.shared.problems import Invalid
from tessera.simulation.cli.compare import app
from tessera.simulation.comparison import SimulationComparison, finished, interval, paired

DIFFERENCES = [0.9, 2.1, -0.4, 1.7, 1.2, 0.3]


def simulated(folder: Path, method: str, accuracies: dict[int, float], *, rounds: int = 3) -> Path:
    """Write what `tessera simulate --seeds` leaves, made up."""
    for seed, accuracy in accuracies.items():
        own = folder / f"seed-{seed}"
        own.mkdir(parents=True)
        summary: dict[str, Any] = {
            "method": method,
            "seed": seed,
            "scores": {"accuracy": accuracy, f"{method}_loss": 1.0},
            "sites": {"accuracy": {"mean": accuracy - 0.1, "worst": 0.25}},
            "download_bytes": 2_000_000,
            "upload_bytes": 1_000_000,
            "simulated_seconds": {"0": 0.0, "3": 7200.0},
        }
        spec = {"seed": seed, "rounds": rounds, "method": {"name": method, "settings": {}}}
        (own / "summary.json").write_text(json.dumps(summary))
        (own / "simulation.json").write_text(json.dumps({"spec": spec, "sites": {"a": [seed, 2]}}))
    return folder


def test_interval_is_that_of_scipy() -> None:
    expected = stats.ttest_1samp(DIFFERENCES, 0).confidence_interval(0.95)
    assert interval(DIFFERENCES) == pytest.approx((expected.low, expected.high))


def test_differences_are_paired_by_key() -> None:
    assert paired({1: 3.0, 2: 5.0, 4: 1.0}, {2: 1.0, 1: 1.0}) == [2.0, 4.0]


def test_simulations_are_compared_on_the_seeds_of_all(tmp_path: Path) -> None:
    first = simulated(tmp_path / "fedavg", "fedavg", {0: 0.5, 1: 0.75, 2: 0.5})
    second = simulated(tmp_path / "safl", "safl", {2: 0.625, 1: 0.625, 0: 0.875, 10: 0.0})
    comparison = SimulationComparison.of([first, second])
    assert list(comparison.seeds) == [0, 1, 2]
    assert list(comparison.left_out()) == [(str(second), [10])]
    figures = comparison.figures()
    # What only one of them measured is not compared.
    assert list(figures) == [
        "accuracy", "accuracy (mean of sites)", "accuracy (worst site)", "megabytes down", "megabytes up",
        "simulated hours",
    ]  # fmt: skip
    own, other = figures["accuracy"][str(first)], figures["accuracy"][str(second)]
    assert (own.mean, own.difference, own.low) == (pytest.approx(7 / 12), None, None)
    less = [0.375, -0.125, 0.125]
    assert other.difference == pytest.approx(0.125)
    assert (other.low, other.high) == pytest.approx(interval(less))
    assert figures["accuracy (worst site)"][str(second)].difference == 0
    (said,) = set(SimulationComparison.of([first, second], [0.9]).remarks()) - set(comparison.remarks())
    assert said.startswith("the cost of a score is left out")


def test_local_is_compared_by_the_models_that_its_sites_use(tmp_path: Path) -> None:
    spread = {"sites": 2, "worst": 0.1}
    measured = {
        "fedavg": ({"accuracy": 0.6, "other": 1.0}, {"accuracy": {**spread, "mean": 0.65}}),
        "local": (
            {"accuracy": 0.1, "personal_accuracy": 0.8},
            {"accuracy": {**spread, "mean": 0.1}, "personal_accuracy": {"sites": 1, "mean": 0.85, "worst": 0.7}},
        ),
    }
    folders = [simulated(tmp_path / method, method, {0: 0.5}) for method in measured]
    for folder, (scores, sites) in zip(folders, measured.values(), strict=True):
        summary = json.loads((folder / "seed-0" / "summary.json").read_text())
        (folder / "seed-0" / "summary.json").write_text(json.dumps(summary | {"scores": scores, "sites": sites}))
    figures = SimulationComparison.of(folders).figures()
    means = {name: [one.mean for one in by_folder.values()] for name, by_folder in figures.items()}
    assert (means["accuracy"], means["accuracy (mean of sites)"]) == ([0.6, 0.8], [0.65, 0.85])
    own = [f"accuracy of the version{over}" for over in ("", " (mean of sites)", " (worst site)")]
    assert list(SimulationComparison.of(folders).remarks()) == [
        f"{folders[1]}: the scores are those of the sites' own models",
        f"{folders[1]}: only 1 of 2 sites had an own model: the scores are over these",
        f"{folders[0]}: not in all simulations, and left out: other",
        f"{folders[1]}: not in all simulations, and left out: {', '.join(own)}",
    ]
    result = CliRunner().invoke(app, [str(folder) for folder in folders])
    assert "left out: accuracy of the version" in result.stderr.replace("\n", " ")


def test_settings_that_differ_are_named(tmp_path: Path) -> None:
    first = simulated(tmp_path / "a", "fedavg", {1: 0.5})
    second = simulated(tmp_path / "b", "safl", {1: 0.5}, rounds=4)
    third = simulated(tmp_path / "c", "fedavg", {1: 0.5})
    assert SimulationComparison.of([first, second, third]).settings() == {
        "/spec/method/name": ["fedavg", "safl", "fedavg"],
        "/spec/rounds": [3, 4, 3],
    }
    assert SimulationComparison.of([first, third]).settings() == {}
    # Settings of a later seed.
    simulated(first, "fedavg", {2: 0.5})
    simulated(third, "fedavg", {2: 0.5}, rounds=5)
    assert SimulationComparison.of([first, third]).settings() == {"/spec/rounds": [3, 5]}


def test_folders_that_cannot_be_compared_are_refused(tmp_path: Path) -> None:
    first = simulated(tmp_path / "a", "fedavg", {1: 0.5})
    second = simulated(tmp_path / "b", "safl", {2: 0.5})
    with pytest.raises(Invalid, match=r"no seed is in all folders: .*a has 1; .*b has 2"):
        SimulationComparison.of([first, second])
    for damaged in ("{", "[]", '{"seed": 2}'):
        (second / "seed-2" / "summary.json").write_text(damaged)
        with pytest.raises(Invalid, match=r"seed-2 has a summary\.json or simulation\.json that"):
            finished(second)
    # One that was stopped has no summary.
    (second / "seed-2" / "summary.json").unlink()
    with pytest.raises(Invalid, match="b has no finished simulation"):
        finished(second)


def test_the_command_prints_differences_with_their_intervals(tmp_path: Path) -> None:
    first = simulated(tmp_path / "a", "fedavg", {0: 0.5, 1: 0.75, 2: 0.5})
    second = simulated(tmp_path / "b", "safl", {0: 0.875, 1: 0.625, 2: 0.625, 3: 0.5})
    result = CliRunner().invoke(app, [str(first), str(second)])
    assert result.exit_code == 0
    low, high = interval([0.375, -0.125, 0.125])
    assert f"+0.1250  {low:+.4f} to {high:+.4f}" in " ".join(result.stdout.split("accuracy")[1].split("\n")[1:2])
    assert "/spec/method/name" in result.stdout
    assert "over seeds 0, 1, 2" in result.stdout
    assert "left out: seed 3" in result.stderr
    document = json.loads(CliRunner().invoke(app, [str(first), str(second), "--json"]).stdout)
    assert document["seeds"] == [0, 1, 2]
    assert document["figures"]["accuracy"][str(second)]["difference"] == pytest.approx(0.125)


def test_one_seed_has_no_interval(tmp_path: Path) -> None:
    first = simulated(tmp_path / "a", "fedavg", {1: 0.5})
    second = simulated(tmp_path / "b", "safl", {1: 0.75})
    result = CliRunner().invoke(app, [str(first), str(second)])
    assert "One seed shows no difference" in result.stdout
    assert " to " not in result.stdout.split("deviation")[1].split("One seed")[0]


def test_a_folder_is_not_compared_with_itself(tmp_path: Path) -> None:
    first = simulated(tmp_path / "a", "fedavg", {1: 0.5})
    for folders in ([first], [first, tmp_path / "." / "a"]):
        result = CliRunner().invoke(app, [str(each) for each in folders])
        assert isinstance(result.exception, Invalid)
