"""Ditto, FedBABU, FedBN and local training: what stays with a site, and what it trains for itself alone."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from transformers import PreTrainedModel

from tessera.shared.methods.base import MethodSpec, Participant, Plan, RunInfo, State
from tessera.shared.methods.registry import coordinator_half, worker_half
from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import Array
from tessera.shared.tensors.statistics import is_statistic
from tessera.worker.model.build import instantiate
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import evaluate
from tests.support.rounds import SGD, Rounds
from tests.support.tasks import CPU, NORMALISED, VIT, Subject, images, one_task

HEAD = {"classifier.weight", "classifier.bias"}
BODY = "vit.layernorm.weight"


def values_of(seed: int) -> dict[str, Array]:
    model = instantiate(VIT, "image-classification", seed=seed)
    return {name: parameter.detach().numpy() for name, parameter in model.named_parameters()}


# ---------------------------------------------------------------- Ditto


@pytest.mark.parametrize("schedule", [pytest.param("constant", marks=pytest.mark.long), "cosine"])
def test_what_ditto_sends_is_what_fedavg_sends_to_the_bit(schedule: str) -> None:
    settings = {"epochs": 2, "schedule": schedule, "round_number": 4, **SGD}
    _, result = one_task("ditto", {"own_epochs": 5}, **settings)
    _, plain = one_task("fedavg", **settings)
    assert {name: values.tobytes() for name, values in result.upload.items()} == {
        name: values.tobytes() for name, values in plain.upload.items()
    }
    assert set(result.keep) == {f"own/{name}" for name in result.upload}


def test_ditto_trains_the_site_s_own_model_towards_the_version() -> None:
    lam, rate = 0.5, 0.1
    version, own = instantiate(VIT, "image-classification", seed=1), instantiate(VIT, "image-classification", seed=2)
    vault = {f"own/{name}": values for name, values in values_of(2).items()}
    _, result = one_task("ditto", {"lam": lam, "own_epochs": 2}, batch_size=None, vault=vault, **SGD)
    (batch,) = images().batches(None, None)
    near = [parameter.detach().clone() for parameter in version.parameters()]
    for _ in range(2):
        own.zero_grad()
        own(**batch).loss.backward()
        with torch.no_grad():
            for parameter, origin in zip(own.parameters(), near, strict=True):
                step = lam * (parameter - origin) + (0 if parameter.grad is None else parameter.grad)
                parameter.sub_(rate * step)
    for name, parameter in own.named_parameters():
        np.testing.assert_allclose(result.keep[f"own/{name}"], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


def test_ditto_s_own_model_begins_as_the_version_and_goes_on_over_rounds() -> None:
    run = Rounds("ditto", {"lam": 0.0})
    run.play()
    first = run.harvests["a/w"]
    # Held by nothing and begun at the version, its first training differs by the order of the batches alone.
    assert all(np.allclose(first.keep[f"own/{name}"], sent, atol=1e-6) for name, sent in first.upload.items())
    kept = run.vaults["a/w"]["own/classifier.weight"].copy()
    run.play()
    assert np.abs(run.vaults["a/w"]["own/classifier.weight"] - kept).max() < 0.2
    assert not np.allclose(run.vaults["a/w"]["own/classifier.weight"], run.value("classifier.weight"), atol=1e-3)


def test_ditto_s_own_model_is_the_one_that_a_personal_evaluation_measures() -> None:
    context, _ = one_task("ditto", **SGD)
    vault = {f"own/{name}": values for name, values in values_of(2).items()}
    version = {block.name: context.read(block) for block in context.blocks}
    for kept, expected in ((vault, values_of(2)), ({}, version)):
        again = LocalTaskContext(context.model, "image-classification", Plan(), context.blocks, kept)
        half = half_of("ditto", again)
        for block in again.blocks:
            again.write(block, version[block.name])
        half.setup(again)
        assert half.personalization_phases(again) == ()
        assert all((again.read(block) == expected[block.name]).all() for block in again.blocks)


def half_of(method: str, context: LocalTaskContext, settings: dict[str, Any] | None = None) -> Any:
    facts = Rounds(method).facts
    assert facts.blocks == tuple(context.blocks)
    return worker_half(MethodSpec(name=method, settings=settings or {}), facts)


def test_a_personal_model_that_diverges_costs_neither_the_update_nor_the_model_before() -> None:
    settings = {"epochs": 20, **SGD}
    vault = {f"own/{name}": values for name, values in values_of(2).items()}
    with capture_logs() as logs:
        _, result = one_task("ditto", {"lam": 1000.0}, vault=vault, **settings)
    _, plain = one_task("fedavg", **settings)
    assert [log["event"] for log in logs if log["log_level"] == "warning"] == ["personal-model-diverged"]
    assert all(values.tobytes() == plain.upload[name].tobytes() for name, values in result.upload.items())
    assert all((result.keep[name] == values).all() for name, values in vault.items())


@pytest.mark.parametrize(("method", "name"), [("ditto", "lam"), ("fedprox", "mu")])
def test_a_term_that_no_step_can_follow_is_warned_of_at_the_start_alone(method: str, name: str) -> None:
    for weight, training, warned in ((19.0, {}, False), (21.0, {}, True), (21.0, {"optimizer": "adamw"}, False)):
        half = Rounds(method, {name: weight}, {**SGD, **training}).half
        assert any("training diverges" in said for said in half.warnings(State(0, {}))) is warned
        assert not half.warnings(State(1, {}))


# ---------------------------------------------------------------- FedBABU


def test_fedbabu_neither_trains_nor_sends_the_head() -> None:
    context, result = one_task("fedbabu", **SGD)
    begun = values_of(1)
    assert set(result.upload) == set(begun) - HEAD
    for block in context.blocks:
        assert (context.read(block) == begun[block.name]).all() == (block.name in HEAD), block.name


def test_fedbabu_s_head_is_the_first_version_s_in_every_round() -> None:
    run = Rounds("fedbabu")
    before = {name: run.value(name) for name in (*HEAD, BODY)}
    for _ in range(2):
        run.play()
    assert all((run.value(name) == before[name]).all() for name in HEAD)
    assert (run.value(BODY) != before[BODY]).any()


@pytest.mark.parametrize(("tune", "trained"), [("full", HEAD | {BODY}), ("body", {BODY}), ("head", HEAD)])
def test_fedbabu_fine_tunes_what_it_is_told_to(tune: str, trained: set[str]) -> None:
    context, _ = one_task("fedbabu", **SGD)
    (phase,) = half_of("fedbabu", context, {"tune": tune, "tune_epochs": 3}).personalization_phases(context)
    found = {block.name for block in phase.train.resolve(context.blocks)}
    assert (found & (HEAD | {BODY}), phase.epochs) == (trained, 3)


# ---------------------------------------------------------------- FedBN, local


def test_fedbn_keeps_its_norms_and_sends_all_else() -> None:
    context, result = one_task("fedbn")
    norms = {block.name for block in context.blocks if block.role == "norm"}
    assert norms == set(result.keep) >= {BODY}
    assert set(result.upload) == {block.name for block in context.blocks} - norms


def test_fedbn_sends_no_running_statistic_wherever_a_batch_norm_is() -> None:
    facts = RunInfo((*NORMALISED.blocks, *IN_HEAD), rounds=1)
    plan = coordinator_half(MethodSpec(name="fedbn"), facts).plan_for(State(0, {}), Participant("a/w", 1))
    sent = {block.name for block in plan.upload.resolve(facts.blocks)}
    kept = {block.name for block in worker_half(MethodSpec(name="fedbn"), facts).private().resolve(facts.blocks)}
    assert sent | kept == {block.name for block in facts.blocks}
    assert not sent & kept
    assert not {block.name for block in facts.blocks if is_statistic(block.name)} & sent
    assert {block.name for block in IN_HEAD} <= kept


IN_HEAD = [
    Block(tensor=f"classifier.norm.{name}", role="head", shape=(3,), dtype="F32")
    for name in ("weight", "running_var")
]
"""A batch normalisation in a classifier, whose role it has."""


class QuickStatistics(Subject):
    """A model whose running statistics are those of the last batch alone."""

    def model(self) -> PreTrainedModel:
        model = super().model()
        for module in model.modules():
            if isinstance(module, torch.nn.BatchNorm2d):
                module.momentum = 1.0
        return model


def test_a_site_whose_images_have_more_contrast_has_the_same_personal_scores_with_fedbn() -> None:
    subject = QuickStatistics(NORMALISED.config, NORMALISED.head, NORMALISED.data)
    plain = subject.data()
    scaled = replace(plain, tensors={**plain.tensors, "pixel_values": 8 * plain.tensors["pixel_values"]})
    sites = {"a/w": plain, "b/w": scaled}
    # Whole batches, on which a first convolution without bias followed by a normalisation removes any contrast.
    run = Rounds("fedbn", training={**SGD, "batch_size": None}, sites=sites, subject=subject)
    run.play()
    run.play()
    scores = []
    for name, data in sites.items():
        context = LocalTaskContext(subject.model(), subject.head, Plan(), run.facts.blocks, run.vaults[name])
        for block in context.blocks:
            context.write(block, run.value(block.name))
        context.restore(worker_half(MethodSpec(name="fedbn"), run.facts).private())
        scores.append(evaluate(context.model, context.head, Batches(data, 24, CPU), lambda: None))
    assert scores[0] == pytest.approx(scores[1], rel=1e-3)


def test_local_sends_nothing_and_goes_on_with_its_own_model() -> None:
    run = Rounds("local")
    before = {block.name: run.value(block.name) for block in run.facts.blocks}
    for _ in range(2):
        run.play()
    assert all((run.value(name) == values).all() for name, values in before.items())
    assert all(not result.upload for result in run.harvests.values())
    # Two rounds of one epoch from where it stopped, and not twice one epoch from the version.
    _, once = one_task("local", dataset=run.sites["a/w"], **SGD)
    _, twice = one_task("local", dataset=run.sites["a/w"], vault=once.keep, **SGD)
    assert all((run.vaults["a/w"][name] == values).all() for name, values in twice.keep.items())
    assert any((once.keep[name] != values).any() for name, values in twice.keep.items())


def test_one_site_alone_trains_locally_as_it_would_in_fedavg() -> None:
    alone = {"a/w": Rounds("local").sites["a/w"]}
    local, plain = Rounds("local", sites=alone), Rounds("fedavg", sites=alone)
    for _ in range(2):
        local.play()
        plain.play()
    assert all((local.vaults["a/w"][n.name] == plain.value(n.name)).all() for n in plain.facts.blocks)


def test_fedavg_with_one_site_is_centralised_training() -> None:
    run = Rounds("fedavg", sites={"a/w": Rounds("fedavg").sites["a/w"]})
    run.play()
    _, result = one_task("fedavg", dataset=run.sites["a/w"], **SGD)
    assert all((run.value(name) == values).all() for name, values in result.upload.items())


@pytest.mark.parametrize("method", ["fedper", "fedrep", "fedbn", "local"])
def test_what_is_private_is_asked_for_by_no_plan(method: str) -> None:
    facts = Rounds(method).facts
    chosen = MethodSpec(name=method)
    private = {block.name for block in worker_half(chosen, facts).private().resolve(facts.blocks)}
    plan = coordinator_half(chosen, facts).plan_for(State(0, {}), Participant("a/w", 1))
    assert private
    assert not private & {block.name for block in plan.upload.resolve(facts.blocks)}


@pytest.mark.parametrize(
    ("method", "settings"), [("fedper", {"private": [{"roles": ["norm"]}]}), ("fedbn", {}), ("fedavg", {})]
)
def test_a_head_that_was_kept_goes_out_by_no_task_that_keeps_something_else(
    method: str, settings: dict[str, Any]
) -> None:
    _, never_kept = one_task(method, settings)
    vault = {name: np.full_like(values, 7.0) for name, values in values_of(2).items() if name in HEAD}
    _, result = one_task(method, settings, vault=vault)
    assert set(result.upload) >= HEAD
    assert {name: values.tobytes() for name, values in result.upload.items()} == {
        name: values.tobytes() for name, values in never_kept.upload.items()
    }
