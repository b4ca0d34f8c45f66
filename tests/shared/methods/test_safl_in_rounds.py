"""SAFL's exploration, votes and memory over rounds: interruptions, absences, abandoned attempts, and privacy."""

from __future__ import annotations

from math import sqrt
from pathlib import Path
from statistics import fmean
from typing import Any

import pytest
import torch

from tessera.shared.metrics.selections import choices_of, selection_scalars
from tessera.shared.model.blocks import layers_of
from tessera.shared.model.spec import Lora
from tessera.shared.problems import Invalid
from tessera.shared.tensors.lazy import to_array
from tessera.simulation import Conditions, Result, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.policy import Policy
from tessera.worker.model.build import instantiate
from tessera.worker.state.privacy_ledger import Ledger
from tessera.worker.training.progress import rounded
from tests.support.tasks import VIT, images, untrained

FOUR = {**VIT, "num_hidden_layers": 4}
START = Weights.of(instantiate(FOUR, "image-classification", seed=1), FOUR, "image-classification")
LAYERS = [f"vit.layers.{index}" for index in range(4)]
STEADY = {"smoothing": 0.5, "hysteresis": 0.2, "explore": 0.3, "pick_every": 4}


def sites(count: int = 3) -> dict[str, Dataset]:
    whole = images(8 * count)
    return {name: whole.rows(range(8 * at, 8 * at + 8)) for at, name in zip(range(count), "abc", strict=False)}


def run(
    settings: dict[str, Any],
    out: Path | None = None,
    until: int | None = None,
    conditions: Conditions | None = None,
    start: Weights = START,
    **spec: Any,
) -> Result:
    chosen = {"layers": 1, "profile_batches": 1, **settings}
    wanted = {
        "method": {"name": "safl", "settings": {name: value for name, value in chosen.items() if value is not None}},
        "rounds": 4,
        "seed": 3,
        "training": {"learning_rate": 0.05, "batch_size": 8},
        **spec,
    }
    return simulate(wanted, start, sites(), out=out, until=until, conditions=conditions)


def digests(result: Result) -> list[str]:
    return [version.digest for version in result.versions]


@pytest.mark.parametrize("chooser", ["worker", "consensus", pytest.param("vote", marks=pytest.mark.long)])
def test_run_that_is_stopped_and_resumed_ends_with_the_same_bits(chooser: str, tmp_path: Path) -> None:
    settings = {"chooser": chooser, **STEADY}
    whole = run(settings, rounds=3)
    run(settings, out=tmp_path / "run", until=2, rounds=3)
    resumed = run(settings, out=tmp_path / "run", rounds=3)
    assert digests(resumed) == digests(whole)
    for site in "abc":
        kept, expected = resumed.kept(site), whole.kept(site)
        assert {n: v.tobytes() for n, v in kept.items()} == {n: v.tobytes() for n, v in expected.items()}


def test_every_layer_trains_in_time_over_absences_and_abandoned_attempts() -> None:
    conditions = Conditions(away={"b": (2, 3), "c": (4,)}, dropout=0.3)
    result = run({"pick_every": 4}, conditions=conditions, cohort={"quorum": 2, "max_attempts": 20}, rounds=6)
    rounds = choices_of(result.rounds)
    assert any(attempt.state == "abandoned" for attempt in result.rounds)
    assert len(rounds) == 6
    for first in range(3):
        sent = [layer for choices in rounds[first : first + 4] for layers in choices.values() for layer in layers]
        assert set(sent) == set(LAYERS)


@pytest.mark.long
def test_layer_that_is_tried_is_the_same_over_restarts_absences_and_abandoned_attempts(tmp_path: Path) -> None:
    conditions = Conditions(away={"a": (5,), "b": (2, 6)}, dropout=0.3)
    about: dict[str, Any] = {
        "conditions": conditions, "cohort": {"quorum": 2, "max_attempts": 20}, "rounds": 7,
        "training": {"learning_rate": 1e-5, "batch_size": 8},
    }  # fmt: skip
    whole = run({"explore_after": 4}, **about)
    assert any(attempt.state == "abandoned" for attempt in whole.rounds)
    for until in (4, 5):
        run({"explore_after": 4}, out=tmp_path / "run", until=until, **about)
    assert digests(run({"explore_after": 4}, out=tmp_path / "run", **about)) == digests(whole)
    rounds, alone = (choices_of(result.rounds) for result in (whole, run({}, **about)))
    # By attention alone layer 0 is in no update. In round 5 all sites but the absent one try it.
    assert {layer for choices in alone for layers in choices.values() for layer in layers} == set(LAYERS[1:])
    assert rounds[4] == {site: {LAYERS[0]} for site in "bc"}
    assert [*rounds[:4], *rounds[5:]] == [*alone[:4], *alone[5:]]


@pytest.mark.parametrize("within", [{}, {"within": ["value"]}], ids=["all", "values"])
def test_chosen_layers_of_a_llama_train_their_adapters_alone(within: dict[str, Any]) -> None:
    config = {
        "model_type": "llama", "vocab_size": 30, "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 4,
        "num_attention_heads": 2, "num_key_value_heads": 1,
    }  # fmt: skip
    document, begin = untrained(config, "causal-lm", seed=1, lora=Lora(rank=2, alpha=4))
    words = torch.randint(30, (8, 6), generator=torch.Generator().manual_seed(0))
    data = {"a": Dataset({"input_ids": words, "attention_mask": torch.ones_like(words), "labels": words})}
    settings = {"layers": 2, "always": [], "tokens": {"where": "last"}, **within}
    wanted = {"method": {"name": "safl", "settings": settings}, "rounds": 1, "training": {"learning_rate": 0.05}}
    result = simulate(wanted, Weights(document, begin), data)
    [[chosen]] = (choices.values() for choices in choices_of(result.rounds))
    assert len(chosen) == 2
    now = {name: to_array(value) for name, value in result.state().model.items()}
    moved = {name for name, value in begin.items() if value.tobytes() != now[name].tobytes()}
    layers = [layer for layer in layers_of(document.blocks) if layer.name in chosen]
    adapters = [block for layer in layers for block in layer.blocks if block.role == "adapter"]
    assert {role for block in adapters for role in block.adapts} > {"value"}
    assert moved == {block.name for block in adapters if not within or block.adapts == ("value",)}


def test_site_that_missed_an_election_trains_the_elected_layers() -> None:
    result = run({"chooser": "vote"}, conditions=Conditions(away={"b": (1,)}))
    for choices in choices_of(result.rounds):
        assert set(choices) == {"a", "b", "c"}
        assert len(set(choices.values())) == 1
    shares = [[version.scalars[f"vote.{i}"] for i in range(4)] for version in result.versions[1:]]
    # Two ballots of one vote each in the first round, and then three.
    assert all(sum(share) == pytest.approx(1) for share in shares)
    assert all(value * 2 == int(value * 2) for value in shares[0])


def test_abandoned_attempt_leaves_no_trace_in_what_a_site_remembers() -> None:
    """The mean of scores moves once a merged round, however often the round was tried."""
    settings = {"smoothing": 0.5, "explore": 0.3}
    calm = run(settings, rounds=1)
    tried = run(settings, rounds=1, conditions=Conditions(dropout=0.5), cohort={"quorum": 3, "max_attempts": 50})
    assert len(tried.rounds) > 1
    assert digests(tried)[-1] == digests(calm)[-1]
    for site in "abc":
        assert tried.kept(site)["safl/scores"].tobytes() == calm.kept(site)["safl/scores"].tobytes()


@pytest.mark.parametrize(("sharpness", "warned"), [(0.0, True), (20.0, False)])
def test_run_without_queries_and_keys_is_warned_of_a_collapse(sharpness: float, warned: bool) -> None:
    model = instantiate(FOUR, "image-classification", seed=1)
    for name, parameter in model.named_parameters():
        parameter.data *= sharpness if ("q_proj" in name or "k_proj" in name) else 1.0
    start = Weights.of(model, FOUR, "image-classification")
    result = run({}, rounds=1, start=start, conditions=Conditions(policy=Policy(min_evaluation_examples=8)))
    named = [text.split(":")[0] for text in result.versions[-1].warnings]
    assert ("attention collapse" in named) == warned
    assert (result.versions[-1].scalars["score_spread"] < 0.05) == warned


@pytest.mark.parametrize(
    ("least", "names"), [(8, {"score_spread", *(f"entropy.{at}" for at in range(4))}), (9, set())]
)
def test_a_site_of_few_examples_sends_no_figure_that_is_only_watched(least: int, names: set[str]) -> None:
    result = run({}, rounds=1, conditions=Conditions(policy=Policy(min_evaluation_examples=least)))
    (metrics, *_) = [task.metrics for each in result.rounds for task in each.tasks]
    watched = {name: value for name, value in metrics.items() if name.startswith(("entropy.", "score_spread"))}
    assert set(watched) == names
    assert all(value == rounded(value) for value in watched.values())


@pytest.mark.parametrize(("chooser", "warned"), [("worker", True), ("consensus", False)])
def test_sites_that_choose_apart_are_warned_of_a_mismatch(chooser: str, warned: bool) -> None:
    result = run({"chooser": chooser, "explore": 0.9 if warned else 0.0})
    warnings = [text.split(":")[0] for outcome in result.outcomes for text in outcome.warnings]
    assert ("aggregation mismatch" in warnings) == warned
    rounds = choices_of(result.rounds)
    overlaps = [version.scalars["overlap"] for version in result.versions if "overlap" in version.scalars]
    assert overlaps == [selection_scalars([], choices)["overlap"] for choices in rounds]


def test_noisy_choices_are_charged_where_there_is_something_to_choose(tmp_path: Path) -> None:
    pytest.importorskip("opacus")
    privacy = {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0, "selection": "noisy"}
    charged = {}
    for name, settings in {"some": {"hysteresis": 0.5, "explore": 0.3}, "none": {"pick_every": 4}}.items():
        out = tmp_path / name
        result = run(settings, out=out, rounds=2, privacy=privacy)
        events = [event.kind for entry in Ledger(out / "sites" / "a").read("data") for event in entry.events]
        charged[name] = events.count("noisy-choice")
        metrics = {metric for each in result.rounds for task in each.tasks for metric in task.metrics}
        assert not any(metric.startswith(("score", "vote", "entropy")) for metric in metrics)
    # With one layer a round, the calendar fills every place.
    assert charged["none"] == 0
    assert 0 < charged["some"] <= 2


def test_clipping_by_layer_is_charged_as_clipping_of_the_whole_and_has_the_noise_of_the_chosen_layers(
    tmp_path: Path,
) -> None:
    pytest.importorskip("opacus")
    settings, norms, events = {"score": "last", "profile_batches": None, "layers": 3}, {}, {}
    training = {"optimizer": "sgd", "learning_rate": 0.05, "batch_size": 8}
    for clip in ("whole", "per-layer"):
        privacy = {"epsilon": 1.0, "delta": 1e-3, "clip_norm": 1.0, "clip": clip}
        result = run(settings, out=tmp_path / clip, rounds=1, privacy=privacy, training=training)
        events[clip] = [
            event for entry in Ledger(tmp_path / clip / "sites" / "a").read("data") for event in entry.events
        ]
        norms[clip] = [task.metrics["update_norm"] for each in result.rounds for task in each.tasks]
    assert events["whole"] == events["per-layer"]
    # Noise dwarfs eight clipped gradients: of three layers, and of what always trains.
    assert fmean(norms["per-layer"]) == pytest.approx(fmean(norms["whole"]) * sqrt(4), rel=0.1)


def test_clipping_by_layer_is_refused_where_no_two_layers_train() -> None:
    privacy = {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0, "clip": "per-layer"}
    with pytest.raises(Invalid) as refused:
        run({"score": "last", "profile_batches": None, "always": []}, privacy=privacy, rounds=1)
    (fault,) = refused.value.errors
    assert (fault.pointer, fault.detail.rpartition(": ")[2]) == ("/privacy/clip", "leave it out")
