"""Tests of comparisons of simulations, and of `tessera compare`."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from scipy import stats
from typer.testing import CliRunner

from tessera.shared.problems import Invalid
from tessera.simulation.cli.compare import app
from tessera.simulation.comparison.folders import SimulationComparison, finished
from tessera.simulation.comparison.statistics import effect_size, equivalence_p, holm, interval, paired, sign_flip_p

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


def test_equal_tests_of_equivalence_are_those_of_scipy() -> None:
    above = stats.ttest_1samp(DIFFERENCES, -1.5, alternative="greater").pvalue
    below = stats.ttest_1samp(DIFFERENCES, 1.5, alternative="less").pvalue
    assert equivalence_p(DIFFERENCES, 1.5) == pytest.approx(max(above, below))
    assert equivalence_p([0.5, 0.5], 1.0) == 0
    assert equivalence_p([1.5, 1.5], 1.0) == 1


def test_sign_flips_are_counted_exactly() -> None:
    # Of 8 patterns of 1, 2 and 3 the sum is 6 or -6 in two; of 1, 2 and -3 it is 0, which every pattern reaches.
    assert sign_flip_p([1.0, 2.0, 3.0]) == 2 / 8
    assert sign_flip_p([1.0, 2.0, -3.0]) == 1
    assert sign_flip_p([1.0] * 5) == 0.0625
    # Sums of 0.1 and others in another order are equal.
    assert sign_flip_p([0.1] * 10) == 2 / 1024
    expected = stats.permutation_test(
        (DIFFERENCES,), np.mean, permutation_type="samples", n_resamples=np.inf, alternative="two-sided"
    )
    assert sign_flip_p(DIFFERENCES) == pytest.approx(expected.pvalue)
    with pytest.raises(ValueError, match="21 differences have too many sign patterns: test at most 20"):
        sign_flip_p([1.0] * 21)


def test_effect_size_has_hedges_correction() -> None:
    # d_z of 1, 2, 3 is 2; with two degrees of freedom the correction is gamma(1) / (1 * gamma(1/2)) = 1 / sqrt(pi).
    assert effect_size([1.0, 2.0, 3.0]) == pytest.approx(2 / np.pi**0.5)
    assert effect_size([1.0, 1.0]) == float("inf")
    assert effect_size([0.0, 0.0]) == 0


def test_holm_multiplies_by_the_tests_left_and_never_falls() -> None:
    adjusted = holm({"a": 0.01, "b": 0.04, "c": 0.03, "d": 0.005})
    assert adjusted == pytest.approx({"d": 0.02, "a": 0.03, "c": 0.06, "b": 0.06})


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


def test_differences_are_tested_and_corrected_and_equal_within_a_margin(tmp_path: Path) -> None:
    seeds = range(6)
    folders = [
        simulated(tmp_path / name, name, {seed: 0.5 + 0.01 * seed + more(seed) for seed in seeds})
        for name, more in {
            "fedavg": lambda _: 0.0,
            "better": lambda seed: 0.02 + 0.001 * seed,
            "equal": lambda seed: 0.001 * (-1) ** seed,
        }.items()
    ]
    comparison = SimulationComparison.of(folders, margins={"accuracy": 0.01})
    _, better, equal = comparison.figures()["accuracy"].values()
    assert (better.p, better.holm_p) == (2 / 64, 4 / 64)
    assert (equal.p, equal.holm_p) == (1, 1)
    assert better.equivalence_p == pytest.approx(1, abs=1e-3)
    assert equal.equivalence_p == pytest.approx(equivalence_p([0.001, -0.001] * 3, 0.01))
    assert comparison.figures()["megabytes up"][str(folders[1])].equivalence_p is None

    result = CliRunner().invoke(app, [*map(str, folders), "--margin", "accuracy=0.01", "--format", "markdown"])
    table = [line for line in result.stdout.splitlines() if line.startswith("|")]
    assert table[0].endswith("| difference | 95 % interval | p | p (Holm) | equal within |")
    assert "| +0.0225 | +0.0205 to +0.0245 | 0.0312 | 0.0625 | ±0.01: p 1.0000 |" in table[3]
    assert table[4].endswith("| 1.0000 | 1.0000 | ±0.01: p <0.0001 |")
    assert "A difference is equal within a size if its p is below 0.05." in result.stdout


def test_a_table_for_latex_escapes_what_latex_would_read(tmp_path: Path) -> None:
    folders = [simulated(tmp_path / name, "m", {1: 0.5, 2: 0.75}) for name in ("a_b", "100%&c")]
    result = CliRunner().invoke(app, [*map(str, folders), "--format", "latex"])
    lines = result.stdout.splitlines()
    assert lines[0] == r"\begin{tabular}{llrrrrr}"
    assert lines[2] == r"at the end & simulation & mean & deviation & difference & 95 \% interval & p \\"
    assert lines[4].startswith("accuracy & ")
    assert r"a\_b & 0.6250 & 0.1768 &  &  &  \\" in lines[4]
    assert r"100\%\&c & 0.6250 & 0.1768 & +0.0000 & +0.0000 to +0.0000 & 1.0000 \\" in lines[5]
    assert "With 2 seeds no p is below 0.5." in result.stdout
    # In the default font encoding of LaTeX, < is another character.
    folders = [simulated(tmp_path / name, "m", {1: 0.5, 2: 0.75 + more}) for name, more in (("c", 0), ("d^2", 1e-6))]
    result = CliRunner().invoke(app, [*map(str, folders), "--margin", "accuracy=0.5", "--format", "latex"])
    assert r"$\pm$0.5: p $<$0.0001 \\" in result.stdout
    assert r"d\textasciicircum{}2 & " in result.stdout


def test_costs_of_a_score_are_tested_within_a_margin(tmp_path: Path) -> None:
    seeds = range(6)
    folders = [simulated(tmp_path / name, "m", dict.fromkeys(seeds, 0.9)) for name in "ab"]
    for folder, more in zip(folders, (0, 1), strict=True):
        for seed in seeds:
            file = folder / f"seed-{seed}" / "summary.json"
            measured = {"version": 3 + seed % 2 + more, "score": 0.9, "seconds": 1.0, "download_bytes": 1}
            curve = {"metric": "accuracy", "title": "accuracy", "points": [measured | {"upload_bytes": 1}]}
            file.write_text(json.dumps(json.loads(file.read_text()) | {"curve": curve}))
    options = ["--score", "0.9", "--margin", "rounds to 0.9=2", "--json"]
    document = json.loads(CliRunner().invoke(app, [*map(str, folders), *options]).stdout)
    cost = document["figures"]["rounds to 0.9"][str(folders[1])]
    assert (cost["difference"], cost["equivalence_p"]) == (1, equivalence_p([1.0] * 6, 2))
    assert document["margins"] == {"rounds to 0.9": 2}
    assert document["figures"]["accuracy"][str(folders[1])]["equivalence_p"] is None


def test_a_margin_is_refused_of_one_seed(tmp_path: Path) -> None:
    folders = [simulated(tmp_path / name, "m", {1: 0.5}) for name in "ab"]
    with pytest.raises(Invalid, match="a margin cannot be tested with one seed, 1") as refused:
        SimulationComparison.of(folders, margins={"accuracy": 0.01})
    assert "--seeds 0,1,2,3,4,5" in refused.value.advice


@pytest.mark.parametrize(
    ("margin", "said"),
    [
        ("accuracy", "'accuracy' is not FIGURE=SIZE"),
        ("accuracy=-1", "'accuracy=-1' is not FIGURE=SIZE"),
        ("acuracy=0.01", "'acuracy'; did you mean `accuracy`?"),
    ],
)
def test_a_margin_that_cannot_be_used_is_refused(tmp_path: Path, margin: str, said: str) -> None:
    folders = [simulated(tmp_path / name, "m", {1: 0.5, 2: 0.75}) for name in "ab"]
    result = CliRunner().invoke(app, [*map(str, folders), "--margin", margin])
    assert result.exit_code
    assert said in f"{result.exception}"
