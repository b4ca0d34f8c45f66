"""The optimizer's moments, where a site keeps them between the rounds of a run."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError

from tessera.shared.methods.base import Phase
from tessera.shared.model.selectors import EVERYTHING, Selector, roles
from tessera.shared.problems import Invalid
from tessera.shared.run_settings import Training
from tessera.simulation import Conditions, Result, simulate
from tessera.worker.state.vault import Vault
from tessera.worker.training.optimization.moments import Moments
from tests.support.tasks import PLAIN
from tests.worker.training.test_trainer import GPT2, images, sentences, train, values_of, work_on
from tests.worker.training.test_training_loss import spec_of, start_of

ONE: dict[str, Any] = {"data": images(1), "weight_decay": 0.1}
"""One example, so that the order of a batch's examples, which changes bits, is the same in each epoch."""
TEXT: dict[str, Any] = {"data": sentences().rows(torch.tensor([0])), "weight_decay": 0.1}
STILL = {"resid_pdrop": 0.0, "attn_pdrop": 0.0, "embd_pdrop": 0.0}
ADAM: dict[str, Any] = {"optimizer": "adamw", "learning_rate": 0.05}
HEAVY: dict[str, Any] = {"optimizer": "sgd", "learning_rate": 0.1, "momentum": 0.9}


# As on a GPU, where the number of steps is on the device.
FUSED: dict[str, Any] = {**ADAM, "scaler": torch.amp.GradScaler("cpu", init_scale=1024.0)}


@pytest.mark.parametrize("optimizer", [ADAM, HEAVY, FUSED])
def test_rounds_with_kept_moments_step_as_one_optimizer_does(optimizer: dict[str, Any]) -> None:
    once, rounds, anew = (work_on(hidden_dropout_prob=0.0) for _ in range(3))
    train(once, steps=4, **ONE, **optimizer)
    kept = Moments({})
    for _ in range(2):
        # As the vault gives them back to the next round.
        kept = Moments.of({**kept.values, "other": np.zeros(1)})
        train(rounds, steps=2, moments=kept, **ONE, **optimizer)
        train(anew, steps=2, **ONE, **optimizer)
    assert values_of(rounds) == values_of(once) != values_of(anew)
    assert "other" not in kept.values


def test_the_moments_of_one_phase_are_not_those_of_another() -> None:
    context, expected, kept = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0), Moments({})
    train(context, Phase(EVERYTHING), steps=3, moments=kept, **ONE, **ADAM)
    for block in context.blocks:
        expected.write(block, context.read(block))
    # The second phase has no moments yet, so its step is a new optimizer's.
    train(context, Phase(EVERYTHING, name="own"), steps=1, moments=kept, **ONE, **ADAM)
    train(expected, Phase(EVERYTHING), steps=1, **ONE, **ADAM)
    assert values_of(context) == values_of(expected)
    phases = {name.split("/")[1] for name in kept.values}
    assert phases == {"train", "own"}


def test_blocks_go_on_with_their_own_moments_and_others_begin_with_new_ones() -> None:
    head, body = roles("head"), Selector(exclude=roles("head").include)
    context, expected, kept = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0), Moments({})
    train(context, Phase(head), steps=3, moments=kept, **ONE, **ADAM)
    train(context, Phase(EVERYTHING), steps=1, moments=kept, **ONE, **ADAM)
    # A step of the body alone, with a head of three steps, and one of this head's optimizer.
    own = Moments({})
    train(expected, Phase(head), steps=3, moments=own, **ONE, **ADAM)
    other = work_on(hidden_dropout_prob=0.0)
    for block in other.blocks:
        other.write(block, expected.read(block))
    train(expected, Phase(body), steps=1, **ONE, **ADAM)
    train(other, Phase(head), steps=1, moments=own, **ONE, **ADAM)
    for block in context.blocks:
        source = other if block.role == "head" else expected
        np.testing.assert_allclose(context.read(block), source.read(block), rtol=1e-5, atol=1e-7)
    # Moments of a block that a round leaves out stay for a later one.
    before = dict(kept.values)
    train(context, Phase(body), steps=1, moments=kept, **ONE, **ADAM)
    heads = {block.name for block in context.blocks if block.role == "head"}
    unchanged = {name for name in before if before[name] is kept.values[name]}
    assert unchanged == {name for name in before if name.rpartition("/")[2] in heads}


@pytest.mark.parametrize("optimizer", [ADAM, HEAVY])
def test_slices_of_a_fused_matrix_keep_moments_of_their_own_rows(optimizer: dict[str, Any]) -> None:
    once, rounds = (work_on(GPT2, "causal-lm", **STILL) for _ in range(2))
    train(once, Phase(roles("value")), steps=4, **TEXT, **optimizer)
    kept = Moments({})
    for _ in range(2):
        train(rounds, Phase(roles("value")), steps=2, moments=kept, **TEXT, **optimizer)
    assert values_of(rounds) == values_of(once)
    assert all(name.endswith("#value") for name in kept.values)


def test_a_tensor_whose_slices_have_moments_of_different_age_begins_anew() -> None:
    context, fresh, kept = work_on(GPT2, "causal-lm", **STILL), work_on(GPT2, "causal-lm", **STILL), Moments({})
    train(context, Phase(roles("value")), steps=3, moments=kept, **TEXT, **ADAM)
    for block in fresh.blocks:
        fresh.write(block, context.read(block))
    both = Phase(roles("value", "query"))
    train(context, both, steps=1, moments=kept, **TEXT, **ADAM)
    train(fresh, both, steps=1, **TEXT, **ADAM)
    assert values_of(context) == values_of(fresh)
    assert {float(values) for name, values in kept.values.items() if "/step/" in name} == {1.0}


def test_phases_of_different_names_do_not_share_moments() -> None:
    context, kept = work_on(), Moments({})
    train(context, Phase(EVERYTHING), Phase(EVERYTHING, name="own"), moments=kept, **ADAM)
    first, second = (
        {name.removeprefix(f"moments/{phase}/"): each for name, each in kept.values.items() if f"/{phase}/" in name}
        for phase in ("train", "own")
    )
    assert first.keys() == second.keys()
    assert any(not np.array_equal(first[name], second[name]) for name in first)


def test_modules_that_a_method_adds_keep_moments_too() -> None:
    found = []
    for lengths in ((4,), (2, 2)):
        kept, context = Moments({}), work_on(hidden_dropout_prob=0.0)
        own = torch.nn.Conv2d(1, 1, 1)
        with torch.no_grad():
            own.weight.fill_(1.0)
        own.bias = None
        context.add_private("own", own)
        context.model.register_forward_pre_hook(
            lambda model, _, inputs: ((), {**inputs, "pixel_values": model.own(inputs["pixel_values"])}),
            with_kwargs=True,
        )
        for steps in lengths:
            train(context, steps=steps, moments=kept, **ONE, **ADAM)
        found.append(own.weight.item())
        assert "moments/train/exp_avg/own.weight" in kept.values
    assert found[0] == found[1] != 1.0


# ---------------------------------------------------------------- rounds


def run(out: Path | None = None, until: int | None = None, method: str = "fedavg", **training: Any) -> Result:
    spec = spec_of(**{**ADAM, "batch_size": 4, **training})
    data = {"a": images(12), "b": images(20)}
    conditions = Conditions(away={"b": (2,)})
    given = {**spec, "method": {"name": method}, "rounds": 3}
    return simulate(given, start_of(PLAIN), data, out=out, until=until, conditions=conditions)


def test_a_run_keeps_moments_in_the_vault_and_goes_on_with_them_after_a_restart(tmp_path: Path) -> None:
    whole = run(keep_moments=True)
    run(tmp_path / "run", 2, keep_moments=True)
    resumed = run(tmp_path / "run", keep_moments=True)
    assert resumed.versions[-1].digest == whole.versions[-1].digest != run().versions[-1].digest
    kept = {site: resumed.kept(site) for site in "ab"}
    # Three steps a round of 12 examples, and five of 20: the second site missed a round.
    steps = {site: {float(each) for name, each in kept[site].items() if "/step/" in name} for site in "ab"}
    assert steps == {"a": {9.0}, "b": {10.0}}
    for file in (tmp_path / "run").rglob("current.safetensors"):
        assert file.stat().st_mode & 0o777 == 0o600


def test_methods_see_no_moments_and_each_of_their_phases_keeps_its_own() -> None:
    kept = run(until=1, method="ditto", keep_moments=True).kept("a")
    names = {tuple(name.split("/")[:2]) for name in kept if name.startswith("moments/")}
    assert names == {("moments", "train"), ("moments", "own")}
    plain = run(until=1, method="ditto").kept("a")
    assert {name for name in kept if not name.startswith("moments/")} == plain.keys()


@pytest.mark.long
def test_a_private_run_keeps_moments_of_noisy_gradients_at_no_further_cost() -> None:
    pytest.importorskip("opacus")
    spec = {**spec_of(**ADAM), "rounds": 2, "privacy": {"epsilon": 8, "delta": 1e-3, "clip_norm": 1}}
    kept, anew = (
        simulate(
            {**spec, "training": {**spec["training"], "batch_size": 4, "keep_moments": keep}},
            start_of(PLAIN),
            {"a": images(20)},
        )
        for keep in (True, False)
    )
    spent = [[task.metrics["epsilon"] for attempt in one.rounds for task in attempt.tasks] for one in (kept, anew)]
    assert spent[0] == spent[1]
    assert kept.versions[1].digest == anew.versions[1].digest
    assert kept.versions[2].digest != anew.versions[2].digest


def test_moments_of_blocks_that_were_not_merged_stay_as_they_were(tmp_path: Path) -> None:
    vault = Vault(tmp_path)
    names = [f"moments/train/{name}/{block}" for name in ("exp_avg", "step") for block in ("a", "b")]
    vault.stage("run", "1", 1, dict.fromkeys(names, np.zeros(2))).commit()
    vault.stage("run", "2", 1, dict.fromkeys(names, np.ones(2))).commit(["b"])
    assert {name: values[0] for name, values in vault.load("run").items()} == {
        name: float(name.endswith("/a")) for name in names
    }


def test_runs_that_cannot_keep_moments_are_refused() -> None:
    with pytest.raises(ValidationError, match="sgd without momentum has no moments: set momentum or optimizer"):
        Training(optimizer="sgd", keep_moments=True)
    with pytest.raises(Invalid) as raised:
        run(method="fednova", keep_moments=True, optimizer="sgd", momentum=0.9)
    assert "counts a site's momentum from zero in each round" in raised.value.errors[0].detail
