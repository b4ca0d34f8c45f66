"""FedProto by hand: its loss, its prototypes, their mean, and the runs that it refuses."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.base import MethodSpec, State, UnsupportedRun, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.problems import Invalid
from tessera.shared.rounds.planning import begun
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate
from tests.support.rounds import SGD, Rounds, site_data
from tests.support.tasks import PLAIN, VIT, images, one_task, untrained

LABELS = images().inputs["labels"].numpy()
PROTOTYPES = np.random.default_rng(3).normal(size=(3, 16)).astype(np.float32)
PROTOTYPES[2] = 0


def test_a_step_moves_features_towards_the_prototypes_of_their_classes() -> None:
    lam, rate = 0.5, 0.1
    context, result = one_task(
        "fedproto", {"lam": lam}, server_state={"prototypes": PROTOTYPES}, batch_size=None, **SGD
    )
    model = instantiate(VIT, "image-classification", seed=1)
    (batch,) = images().batches(None, None)
    features = model.vit(batch["pixel_values"]).last_hidden_state[:, 0]
    loss = model(**batch).loss
    # Class 2 has no prototype. The mean is over all examples and over the 16 features.
    for place, label in enumerate(LABELS):
        if label != 2:
            near = torch.from_numpy(PROTOTYPES[label])
            loss = loss + lam * (features[place] - near).square().sum() / 16 / len(LABELS)
    loss.backward()
    blocks = {block.tensor: block for block in context.blocks}
    for name, parameter in model.named_parameters():
        step = 0 if parameter.grad is None else parameter.grad
        np.testing.assert_allclose(
            result.keep[blocks[name].name], (parameter - rate * step).detach().numpy(), rtol=1e-4, atol=1e-6
        )
    assert result.upload == {}


def test_a_site_sends_the_mean_features_of_each_class_by_the_model_that_it_keeps() -> None:
    context, result = one_task("fedproto", server_state={"prototypes": PROTOTYPES}, batch_size=7, **SGD)
    (batch,) = images().batches(None, None)
    with torch.no_grad():
        features = context.model.eval().vit(batch["pixel_values"]).last_hidden_state[:, 0].numpy()
    for label in range(3):
        expected = features[label == LABELS].mean(axis=0)
        np.testing.assert_allclose(result.extra["prototypes"].values[label], expected, rtol=1e-4, atol=1e-5)
    assert list(result.extra["counts"].values) == [(label == LABELS).sum() for label in range(3)]
    assert list(result.extra["prototypes"].examples) == list(result.extra["counts"].values)


def test_without_prototypes_a_site_trains_as_alone() -> None:
    zeros = np.zeros_like(PROTOTYPES)
    _, result = one_task("fedproto", {"lam": 9.0}, server_state={"prototypes": zeros}, **SGD)
    _, alone = one_task("local", **SGD)
    assert {n: v.tobytes() for n, v in result.keep.items()} == {n: v.tobytes() for n, v in alone.keep.items()}


def test_prototypes_of_another_shape_are_refused_before_training() -> None:
    for wrong in ({}, {"prototypes": np.zeros((2, 16), np.float32)}):
        with pytest.raises(UnsupportedRun, match="prototypes"):
            one_task("fedproto", {"lam": 9.0}, server_state=wrong, **SGD)


def update(site: str, examples: int, counts: list[float], prototypes: Array) -> Update:
    sent = {"counts": ArrayTensor(np.array(counts, np.float32)), "prototypes": ArrayTensor(prototypes)}
    return Update(site, examples, {}, extra=sent)


def test_prototypes_are_weighted_by_the_examples_of_their_class() -> None:
    half = coordinator_half(MethodSpec(name="fedproto"), PLAIN.facts())
    last = np.full((3, 16), 7, np.float32)
    ones = np.ones((3, 16), np.float32)
    updates = [
        update("a/w", 40, [30, 10, 0], ones),
        # It claims 40 examples of the run's limit of 20: each of its counts is half as much.
        update("b/w", 20, [20, 20, 0], 4 * ones),
        update("c/w", 10, [-50, 0, 0], 1e6 * ones),
    ]
    after = half.merge(State(1, {}, {"prototypes": ArrayTensor(last)}), updates)
    # (30 * 1 + 10 * 4) / 40 and (10 * 1 + 10 * 4) / 20; nobody has sent the third.
    expected = [1.75, 2.5, 7.0]
    np.testing.assert_allclose(to_array(after.server_state["prototypes"]), np.outer(expected, np.ones(16)), rtol=1e-6)
    assert after.round == 2


def test_models_stay_at_their_sites_and_prototypes_draw_them_together() -> None:
    drawn, alone = Rounds("fedproto", {"lam": 5.0}), Rounds("fedproto", {"lam": 0.0})
    apart = []
    for run in (drawn, alone):
        for _ in range(3):
            run.play()
        assert all(not harvest.upload for harvest in run.harvests.values())
        assert (run.value("classifier.weight") == Rounds("local").value("classifier.weight")).all()
        own = np.stack([harvest.extra["prototypes"].values for harvest in run.harvests.values()])
        known = np.stack([harvest.extra["counts"].values > 0 for harvest in run.harvests.values()])
        mean = to_array(run.state.server_state["prototypes"])
        apart.append(float(np.square(own - mean)[known].mean()))
    assert apart[0] < apart[1]


def spec(**wanted: Any) -> RunSpec:
    digest = f"sha256:{'0' * 64}"
    given = {"name": "r", "method": {"name": "fedproto"}, "model": digest, "version": digest, "dataset": "d"}
    return RunSpec.model_validate({**given, "rounds": 2, **wanted})


PRIVACY = {"epsilon": 4.0, "delta": 1e-5, "clip_norm": 1.0}


@pytest.mark.parametrize(
    ("wanted", "said"),
    [
        ({"privacy": PRIVACY}, "privacy would not cover: leave out privacy"),
        (
            {"client_privacy": PRIVACY, "normalization": "cohort", "cohort": {"size": 2}},
            "leave out client_privacy",
        ),
        (
            {"secure_sums": {"helpers": ["a", "b", "c"], "quorum": 3}, "cohort": {"quorum": 3}},
            "leave out secure_sums",
        ),
        ({"robust": {"rule": "median"}, "cohort": {"quorum": 3}}, "leave out robust"),
        ({"cohort": {"workers_per_site": 2}}, "leave out cohort.workers_per_site"),
        ({"codec": "delta+int8"}, "sends no blocks, so that codec would have no effect"),
        ({"server_optimizer": {"kind": "adam"}}, "sends no blocks, so that server_optimizer would"),
        ({"upload_budget": 10_000, "max_examples": 50}, ""),
    ],
)
def test_a_run_whose_guards_do_not_cover_prototypes_is_refused(wanted: dict[str, Any], said: str) -> None:
    document, start = untrained(VIT, "image-classification")
    first = State(0, {name: ArrayTensor(values) for name, values in start.items()})
    if not said:
        assert "prototypes" in begun(spec(**wanted), document, first).server_state
        return
    with pytest.raises(Invalid) as caught:
        begun(spec(**wanted), document, first)
    assert said in caught.value.errors[0].detail, caught.value.errors


def test_a_model_or_labels_without_one_class_for_each_example_are_refused() -> None:
    document, start = untrained({**VIT}, "features")
    first = State(0, {name: ArrayTensor(values) for name, values in start.items()})
    with pytest.raises(Invalid) as caught:
        begun(spec(), document, first)
    assert "gives each example one class" in caught.value.errors[0].detail
    several = images().inputs | {"labels": torch.rand(24, 3)}
    with pytest.raises(UnsupportedRun, match="needs one class for each example"):
        one_task("fedproto", server_state={"prototypes": PROTOTYPES}, dataset=Dataset(several), **SGD)


def test_a_simulation_withholds_the_prototypes_of_few_examples(tmp_path: Path) -> None:
    document, start = untrained(VIT, "image-classification")
    sites = {"a": site_data(0, 40), "b": site_data(1, 40)}
    counts = np.stack([np.bincount(data.inputs["labels"].numpy(), minlength=3) for data in sites.values()])
    conditions = Conditions.model_validate({"policy": {"min_evaluation_examples": 15}})
    given = {"method": {"name": "fedproto"}, "rounds": 1, "training": {"batch_size": 8, "learning_rate": 0.05}}
    result = simulate(given, Weights(document, start), sites, conditions=conditions, out=tmp_path / "run")
    assert all(outcome.upload_bytes > 0 for outcome in result.outcomes)
    prototypes = to_array(result.state().server_state["prototypes"])
    # Both have some examples of class 1, and one of each other class only a few.
    assert ((counts > 0) & (counts < 15)).sum() == 2
    assert list(prototypes.any(axis=1)) == list((counts >= 15).any(axis=0))


def test_a_site_measures_the_model_that_it_keeps(tmp_path: Path) -> None:
    document, start = untrained(VIT, "image-classification")
    sites = {name: replace(site_data(seed, 40), held_out=site_data(seed + 2, 30)) for seed, name in enumerate("ab")}
    given = {"method": {"name": "fedproto"}, "rounds": 1, "training": SGD, "evaluation": {"sites": True}}
    result = simulate(given, Weights(document, start), sites, out=tmp_path / "run")
    assert not result.unmeasured
    last = [measured for measured in result.measurements if measured.version == 1]
    assert [measured.site for measured in last if "personal_accuracy" in measured.metrics] == ["a", "b"]
