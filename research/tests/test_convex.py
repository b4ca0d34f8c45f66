"""Methods against client drift, in short, on problems whose minimum is known: see `evidence.convex`."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import BertConfig, BertModel

from common.document import block, tidied
from evidence.convex import papers
from evidence.convex.__main__ import COMMAND, SAVED, OtherStudy, main
from evidence.convex.problem import Problem, images, one_token_model, phrases
from evidence.convex.report import lines, paired
from evidence.convex.runs import limit, ordered, read, write
from evidence.convex.study import (
    ARMS,
    PREFIX,
    STEPS,
    Arm,
    Outcome,
    Scenario,
    differs,
    install,
    rounded,
    run,
    scenarios,
)
from evidence.sources.phrases import CHAPTERS, Encoded
from evidence.sources.prepare import MODEL, PHRASES
from tessera.shared.methods.registry import methods
from tests.paths import variants

BY_NAME = {arm.name: arm for arm in ARMS}
STATEFUL = [BY_NAME["scaffold"], BY_NAME["feddyn alpha=1.0"]]
ROUNDING = 1e-6
"""Of float32 on the way of some rounds."""


@pytest.fixture
def head_only() -> Iterator[None]:
    install(methods())
    yield
    for name in [name for name in methods() if name.startswith(PREFIX)]:
        del methods()[name]


@pytest.fixture(scope="module")
def problem() -> Problem:
    return images()


def named(arm: Arm) -> str:
    return arm.name


# ---------------------------------------------------------------- the problem


@pytest.mark.parametrize("objective", ["equal", "examples"])
def test_at_the_minimum_the_sites_gradients_cancel(problem: Problem, objective: str) -> None:
    weights = problem.objectives[objective]
    least = problem.minima[objective]
    slopes = [weight * problem.gradient(site, least) for site, weight in weights.items()]
    assert np.abs(np.sum(slopes, axis=0)).max() < 1e-9
    assert all(np.abs(problem.gradient(site, least)).max() > 0.05 for site in weights)


def test_the_hessian_is_the_slope_of_the_gradient(problem: Problem) -> None:
    random = np.random.default_rng(0)
    head, direction = random.normal(size=problem.shape), random.normal(size=problem.shape)
    ahead, behind = (problem.gradient("west", head + step * direction) for step in (1e-5, -1e-5))
    curved = problem.curved("west", problem.probabilities("west", head), direction)
    assert curved == pytest.approx((ahead - behind) / 2e-5, rel=1e-6, abs=1e-8)


def bert(pieces: int) -> BertModel:
    """A BERT whose pooler is the identity, and whose last layer norm ignores one element."""
    torch.manual_seed(0)
    sizes = BertConfig(
        vocab_size=pieces,
        hidden_size=16,
        num_hidden_layers=2,
        num_attention_heads=2,
        intermediate_size=8,
        max_position_embeddings=24,
    )
    model = BertModel(sizes)
    model.train(mode=False)
    with torch.no_grad():
        model.get_parameter("pooler.dense.weight").copy_(torch.eye(16))
        model.get_parameter("encoder.layer.1.output.LayerNorm.weight").copy_(torch.linspace(0, 1, 16))
        model.get_parameter("encoder.layer.1.output.LayerNorm.bias").copy_(torch.linspace(-0.1, 0.1, 16))
    return model


def test_a_token_has_the_features_of_its_phrase() -> None:
    whole, tokens = bert(30), torch.randint(1, 30, (7, 6), generator=torch.Generator().manual_seed(0))
    tokens[3, 4:] = 0
    model, config = one_token_model(whole, tokens.numpy(), seed=0)
    assert config["vocab_size"] == 7
    with torch.no_grad():
        read = model.base_model(input_ids=torch.arange(7)[:, None]).pooler_output
        expected = whole(input_ids=tokens, attention_mask=(tokens != 0).long()).pooler_output
    assert read.numpy() == pytest.approx(expected.numpy(), abs=1e-5)


def test_sites_of_phrases_share_no_phrase_and_differ_in_chapters(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    tokens = random.integers(1, 30, (900, 6))
    wordings, labels = np.repeat([0, 1, 2], 300), random.integers(0, CHAPTERS, 900)
    Encoded(tokens, wordings, random.integers(0, 90, 900), labels).save(tmp_path / PHRASES)
    bert(30).save_pretrained(tmp_path / MODEL)
    found = phrases(tmp_path, 1, sizes=(10, 20, 30, 40))
    assert found.sites == ["icd-9-10", "term-20", "title-30", "icd-9-40"]
    assert sum(dataset.examples for dataset in found.data.values()) == found.start.model.config["vocab_size"] == 100
    shares = [labels.mean(axis=0) for labels in found.labels.values()]
    assert min(np.abs(own - other).sum() for own in shares[:1] for other in shares[1:]) > 0.5


# ---------------------------------------------------------------- the papers' equations


def test_fednova_divides_each_step_by_its_number_of_steps(problem: Problem) -> None:
    steps = {"east": 1, "north": 2, "south": 4, "west": 8}
    start = np.zeros(problem.shape)
    plain, nova = (kind(problem, steps, {}) for kind in (papers.FedAvg, papers.FedNova))
    weights = problem.objectives["examples"]
    whole = sum(weights.values())
    moved = {site: plain.local(site, start, lambda _: np.zeros(())) for site in problem.sites}
    effective = sum(weights[site] / whole * steps[site] for site in problem.sites)
    expected = effective * np.sum([weights[s] / whole * moved[s] / steps[s] for s in problem.sites], axis=0)
    assert nova.round(start, problem.sites) == pytest.approx(expected, rel=1e-12)
    equal = dict.fromkeys(problem.sites, STEPS)
    both = [kind(problem, equal, {}).round(start, problem.sites) for kind in (papers.FedAvg, papers.FedNova)]
    assert both[0] == pytest.approx(both[1], rel=1e-12)


@pytest.mark.long
def test_with_small_steps_fednova_nears_the_minimum_and_fedavg_does_not(problem: Problem) -> None:
    near, far = (limit(problem, kind, 1 / 64) for kind in (papers.FedNova, papers.FedAvg))
    assert near < far / 4
    assert limit(problem, papers.FedNova, 1 / 4) > 4 * near


@pytest.mark.parametrize(("alpha", "diverges"), [(1.0, False), (4.0, True)])
def test_feddyn_diverges_where_a_small_sites_alpha_exceeds_two_over_the_rate(
    problem: Problem, alpha: float, diverges: bool
) -> None:
    sizes = problem.objectives["examples"]
    of_smallest = alpha * (sum(sizes.values()) / len(sizes)) / min(sizes.values())
    assert (problem.rate * of_smallest > 2) == diverges
    method = papers.FedDyn(problem, dict.fromkeys(problem.sites, STEPS), {"alpha": alpha})
    head = np.zeros(problem.shape)
    for _ in range(30):
        head = method.round(head, problem.sites)
    least = problem.minima["examples"]
    assert (np.linalg.norm(head - least) > 100 * np.linalg.norm(least)) == diverges


# ---------------------------------------------------------------- the product


# Some tens of rounds of a whole federation, 2 to 4 s of CPU each: fewer do not tell a slow method from a wrong one.
# In short, tests/shared/methods/test_global_methods.py shows the same of three sites.
@pytest.mark.long
@pytest.mark.parametrize(
    ("name", "scenario", "rounds"),
    [
        ("scaffold", "drawn", 45),
        ("scaffold", "away", 35),
        ("scaffold weigh=examples", "drop-outs", 40),
        ("feddyn alpha=1.0", "drawn", 50),
    ],
)
def test_the_minimum_is_reached_without_some_sites(
    problem: Problem, head_only: None, name: str, scenario: str, rounds: int
) -> None:
    found = run(problem, BY_NAME[name], scenarios(problem, rounds)[scenario], rounds)
    assert found.distances[-1] < 2
    assert found.invariant is not None
    assert found.invariant < ROUNDING


def test_without_a_correction_the_sites_drift_decides(problem: Problem, head_only: None) -> None:
    found = run(problem, BY_NAME["fedavg"], scenarios(problem, 10)["all"], 10)
    assert found.paper is not None
    assert found.distances[-1] == pytest.approx(found.paper, rel=1e-4)
    assert found.distances[-1] > 30
    # The slowest site makes four steps of 4 s, and two models move for 2 s each.
    assert found.seconds == tuple(20.0 * number for number in range(1, 11))


@pytest.mark.parametrize("name", variants(["fednova", "scaffold", "feddyn alpha=1.0"], {"scaffold"}))
def test_sites_that_train_for_a_time_do_as_the_equations(problem: Problem, name: str) -> None:
    scenario = scenarios(problem, 3)["by time"]
    steps = scenario.steps(problem)
    assert steps == {"east": 4, "north": 16, "south": 8, "west": 4}
    install(methods(), steps)
    try:
        found = run(problem, BY_NAME[name], scenario, 3)
    finally:
        for installed in [installed for installed in methods() if installed.startswith(PREFIX)]:
            del methods()[installed]
    # FedDyn's first round does not know the sizes of all sites yet.
    assert found.distances[-1] == pytest.approx(found.paper, rel=0.2 if name.startswith("feddyn") else 1e-3)


# In short, tests/shared/methods/test_receipts_in_rounds.py shows this and the next of a small transformer.
@pytest.mark.long
@pytest.mark.parametrize("arm", STATEFUL, ids=named)
def test_after_abandoned_attempts_a_site_keeps_what_the_server_counts(
    problem: Problem, head_only: None, arm: Arm
) -> None:
    found = run(problem, arm, scenarios(problem, 6)["abandoned"], 6)
    assert found.abandoned > 0
    assert found.seconds[-1] > 6 * found.seconds[0] - 1
    assert found.invariant is not None
    assert found.invariant < ROUNDING


@pytest.mark.long
@pytest.mark.parametrize("arm", STATEFUL, ids=named)
def test_a_site_that_was_left_out_keeps_what_the_server_counts(problem: Problem, head_only: None, arm: Arm) -> None:
    found = run(problem, arm, Scenario("left out", "", {"max_norm_of_median": 1.01}), 5)
    assert found.left_out > 0
    assert found.invariant is not None
    assert found.invariant < ROUNDING


# ---------------------------------------------------------------- the study


def outcome(distances: tuple[float, ...]) -> Outcome:
    seconds = tuple(20.0 * number for number in range(1, len(distances) + 1))
    return Outcome(distances, seconds, 1.0, None, 0, 0, 0.0)


def test_a_level_is_reached_where_the_distance_stays_below_it() -> None:
    found = outcome((30.0, 9.0, 11.0, 8.0, 0.5))
    assert (found.first(10), found.first(1), found.first(0.1)) == (4, 5, None)
    assert found.figures()["reached"] == {"10": [4, 80.0], "1": [5, 100.0]}
    assert [rounded(value) for value in (0.0, 12.345, 0.00012345, float("inf"))] == [0.0, 12.3, 0.000123, 1e99]


def test_runs_that_cannot_differ_are_left_out(problem: Problem) -> None:
    known = scenarios(problem)
    left_out = {(arm.name, name) for name, scenario in known.items() for arm in ARMS if not differs(arm, scenario)}
    assert left_out == {
        *(("fednova", name) for name in ("drawn", "away", "drop-outs", "abandoned")),
        ("fedprox", "abandoned"),
    }


def test_differences_to_fedavg_are_paired_by_seed() -> None:
    def of(distance: float) -> Mapping[str, object]:
        return outcome((distance,)).figures()

    found = {("fedavg", "all", 1): of(5.0), ("fedavg", "all", 2): of(7.0)}
    runs = {("scaffold", "all", 1): of(1.0), ("scaffold", "all", 2): of(2.0), ("scaffold", "all", 3): of(0.0)}
    assert paired(found | runs, runs) == [-4.0, -5.0]


@pytest.mark.long
def test_the_command_resumes_prints_and_refuses_other_settings(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = ["--problem", "images", "--scenarios", "batches", "--seeds", "1", "--out", str(tmp_path)]
    main(["fednova", *arguments, "--rounds", "1"])
    assert "| fednova |" in capsys.readouterr().out
    file = tmp_path / "images" / "runs.json"
    written = json.loads(file.read_text())
    assert list(written["runs"]) == ["fednova | batches | 1"]
    assert (tmp_path / "convex.png").stat().st_size > 0
    main(["fednova", *arguments, "--rounds", "1"])
    assert json.loads(file.read_text()) == written
    with pytest.raises(OtherStudy, match="name another folder with --out, or remove it"):
        main(["fednova", *arguments, "--rounds", "2"])
    with pytest.raises(SystemExit):
        main([*arguments, "--save"])
    assert "leave --problem and --rounds out" in capsys.readouterr().err


def test_results_are_the_same_when_read_again(tmp_path: Path) -> None:
    settings, found, limits = read(SAVED)
    write(tmp_path / "again.json", settings, found, limits)
    assert (tmp_path / "again.json").read_bytes() == SAVED.read_bytes()


def test_the_document_has_the_tables_of_the_saved_runs() -> None:
    _, found, limits = read(SAVED)
    assert block(COMMAND) == tidied(lines(ordered(found, list(scenarios(images()))), limits))
