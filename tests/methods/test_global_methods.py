"""FedNova, SCAFFOLD, FedDyn and MOON: their equations written out, and their neutral settings to the bit."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest
import torch

from shared.blocks import roles
from shared.methods import Chosen, coordinator_half, worker_half
from shared.methods.contract import Participant, Plan, RunFacts, State, Unsuited, Update, begin
from shared.methods.fednova import effective_steps
from shared.model import Head
from shared.tensors import Array, ArrayTensor, Tensor, to_array
from shared.training import Training
from tests.support.rounds import SGD, Rounds, same_bits, site_data
from tests.support.tasks import VIT, images, one_task
from worker.blockmap import block_table, named_tensors
from worker.models import instantiate, write_block
from worker.work import LocalWork

HEAD = "classifier.weight"
NAMES = ("a/w", "b/w", "c/w")


def full(value: float) -> ArrayTensor:
    return ArrayTensor(np.full(2, value, np.float32))


def half_of(method: str, settings: Mapping[str, Any] | None = None, **training: Any) -> Any:
    wanted = Training.model_validate({**SGD, **training})
    return coordinator_half(Chosen(name=method, settings=dict(settings or {})), RunFacts((), 9, training=wanted))


def update(worker: str, examples: int, value: float, **numbers: float) -> Update:
    return Update(worker, examples, {"w": full(value)}, numbers)


def first(tensor: Tensor) -> float:
    return float(to_array(tensor)[0])


# ---------------------------------------------------------------- FedNova


def test_fednova_divides_each_step_by_the_work_behind_it() -> None:
    state = State(0, {"w": full(1.0)})
    updates = [update("a/w", 10, 2.0, effective_steps=1.0), update("b/w", 30, 5.0, effective_steps=4.0)]
    # p = 1/4, 3/4; tau_eff = 1/4 * 1 + 3/4 * 4 = 3.25; d = 3.25 * (1/4 * 1 / 1 + 3/4 * 4 / 4) = 3.25
    assert first(half_of("fednova").merge(state, updates).model["w"]) == 4.25


def test_fednova_is_fedavg_to_the_bit_if_all_worked_alike() -> None:
    rng = np.random.default_rng(0)
    state = State(0, {"w": ArrayTensor(rng.normal(size=500).astype(np.float32))})
    updates = [
        Update(name, 7 + i, {"w": ArrayTensor(rng.normal(size=500).astype(np.float32))}, {"effective_steps": 7.3})
        for i, name in enumerate(NAMES)
    ]
    one, other = (to_array(half_of(m).merge(state, updates).model["w"]) for m in ("fednova", "fedavg"))
    assert one.tobytes() == other.tobytes()


@pytest.mark.parametrize(
    ("training", "expected"),
    [
        ({"optimizer": "sgd"}, 3.0),
        # c = 1, 1.5, 1.75 with rho = 1/2, which add up to 4.25
        ({"optimizer": "sgd", "momentum": 0.5}, 4.25),
        ({"optimizer": "adamw", "momentum": 0.5}, 3.0),
    ],
)
def test_effective_steps_of_three(training: dict[str, Any], expected: float) -> None:
    assert effective_steps(3, Training.model_validate(training)) == expected


def test_effective_steps_are_what_momentum_makes_of_a_constant_gradient() -> None:
    # With gradient 1 and rate 1 the parameter ends at minus the sum that the paper calls |a|_1.
    weight = torch.nn.Parameter(torch.zeros(()))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=0.9)
    for _ in range(6):
        optimizer.zero_grad()
        weight.backward()
        optimizer.step()
    assert -weight.item() == pytest.approx(effective_steps(6, Training(optimizer="sgd", momentum=0.9)), rel=1e-6)


def test_fednova_sends_the_model_and_one_number() -> None:
    _, harvest = one_task("fednova", epochs=2, **SGD)
    _, plain = one_task("fedavg", epochs=2, **SGD)
    # 24 examples in batches of 8, twice
    assert harvest.numbers == {"effective_steps": 6.0}
    assert harvest.keep == {}
    assert all((harvest.upload[name] == plain.upload[name]).all() for name in plain.upload)


@pytest.mark.parametrize("method", ["fednova", "scaffold"])
@pytest.mark.parametrize("claimed", [None, 0.0, -1.0, 21.0, float("nan")])
def test_more_or_less_work_than_there_can_have_been_is_refused(method: str, claimed: float | None) -> None:
    name = {"fednova": "effective_steps", "scaffold": "steps"}[method]
    numbers = {} if claimed is None else {name: claimed}
    # Two epochs of 10 examples are at most 20 steps.
    half = half_of(method, epochs=2)
    with pytest.raises(ValueError, match="10 examples allow from 1 to 20"):
        half.check(Plan(), 10, numbers)
    half.check(Plan(), 10, {name: 20.0})


# ---------------------------------------------------------------- SCAFFOLD


def test_scaffold_s_server_learns_the_controls_from_updates_and_step_counts() -> None:
    half = half_of("scaffold", learning_rate=0.5)
    state = State(0, {"w": full(1.0)})
    updates = [update("a/w", 10, 0.0, steps=2.0), update("b/w", 30, 3.0, steps=4.0)]
    after = half.merge(state, updates)
    # Mean gradients: a (1 - 0) / (2 * 0.5) = 1, b (1 - 3) / (4 * 0.5) = -1; c = 1/4 * 1 + 3/4 * -1 = -0.5
    assert first(after.memory["control/w"]) == -0.5
    assert first(after.model["w"]) == 1 + 0.25 * -1 + 0.75 * 2
    # All took part again, so all of c gives way: w = 2.25, (2.25 - 1.25) / (1 * 0.5) = 2 from both.
    again = [update("a/w", 10, 1.25, steps=1.0), update("b/w", 30, 1.25, steps=1.0)]
    assert first(half.merge(after, again).memory["control/w"]) == 2.0


def test_of_a_larger_population_only_those_present_move_the_control() -> None:
    half = half_of("scaffold", {"population": 8, "weigh": "equal"}, learning_rate=0.5)
    state = State(0, {"w": full(1.0)}, memory={"control/w": full(4.0)})
    updates = [update("a/w", 10, 0.0, steps=2.0), update("b/w", 30, 3.5, steps=2.0)]
    # Gradients 1 and -2.5, two sites of eight: c = 4 + 2/8 * ((1 - 2.5) / 2 - 4) = 2.8125
    after = half.merge(state, updates)
    assert first(after.memory["control/w"]) == 2.8125
    assert first(after.model["w"]) == 1 + (-1 + 2.5) / 2


def test_a_block_that_nobody_sent_keeps_its_control() -> None:
    memory = {"control/w": full(4.0), "control/v": full(4.0)}
    state = State(0, {"w": full(1.0), "v": full(1.0)}, memory=memory)
    after = half_of("scaffold").merge(state, [update("a/w", 10, 0.0, steps=2.0)])
    assert after.memory["control/v"] is memory["control/v"]
    assert after.memory["control/w"] is not memory["control/w"]


def test_scaffold_corrects_each_gradient_by_c_minus_c_k_and_keeps_the_next_c_k() -> None:
    rate, c, own = 0.1, 0.3, 0.1
    model = instantiate(VIT, "image-classification", seed=1)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    memory = {f"control/{name}": np.full(shape, c, np.float32) for name, shape in shapes.items()}
    vault = {f"control/{name}": np.full(shape, own, np.float32) for name, shape in shapes.items()}
    _, harvest = one_task(
        "scaffold", epochs=2, batch_size=None, memory=memory, vault=vault, **{**SGD, "learning_rate": rate}
    )
    (batch,) = images().batches(None, None)
    begun = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        model.zero_grad()
        model(**batch).loss.backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(rate * (parameter.grad - own + c))
    assert harvest.numbers == {"steps": 2.0}
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(harvest.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)
        kept = own - c + (begun[name].numpy() - harvest.upload[name]) / (2 * rate)
        np.testing.assert_allclose(harvest.keep[f"control/{name}"], kept, rtol=1e-4, atol=1e-5)


def kept_mean(run: Rounds, name: str, weights: Mapping[str, float]) -> Array:
    """The weighted mean of what the sites keep under a name; zero for who keeps nothing yet."""
    kept = {worker: run.vaults[worker].get(name) for worker in NAMES}
    return sum(weights[worker] * values.astype(np.float64) for worker, values in kept.items() if values is not None)


BY_TURNS = [NAMES[:2], NAMES[1:], NAMES, NAMES[:1], NAMES[1:]]


@pytest.mark.parametrize(("weigh", "cohorts"), [("examples", [NAMES] * 4), ("equal", BY_TURNS)])
def test_the_server_s_control_is_the_mean_of_those_that_the_sites_keep(weigh: str, cohorts: list[list[str]]) -> None:
    settings = {"weigh": weigh, "population": 3 if weigh == "equal" else None}
    run = Rounds("scaffold", settings, {**SGD, "epochs": 2})
    sizes = {name: run.sites[name].examples / 48 if weigh == "examples" else 1 / 3 for name in NAMES}
    for cohort in cohorts:
        run.play(*cohort)
        for block in run.facts.blocks:
            name = f"control/{block.name}"
            mean = kept_mean(run, name, sizes)
            np.testing.assert_allclose(to_array(run.state.memory[name]), mean, rtol=1e-5, atol=2e-6, err_msg=name)


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_a_population_by_turns_needs_equal_weights(method: str) -> None:
    with pytest.raises(ValueError, match="needs weigh = 'equal'"):
        half_of(method, {"weigh": "examples", "population": 9})


def test_scaffold_of_no_strength_is_fedavg_to_the_bit_and_remembers_nothing() -> None:
    run, plain = Rounds("scaffold", {"strength": 0.0}), Rounds("fedavg")
    for _ in range(2):
        run.play()
        plain.play()
    assert same_bits(run, plain)
    assert run.vaults == {name: {} for name in NAMES}


def test_scaffold_s_first_round_is_fedavg_s_and_the_second_is_not() -> None:
    run, plain = Rounds("scaffold", training={**SGD, "epochs": 2}), Rounds("fedavg", training={**SGD, "epochs": 2})
    for equal in (True, False):
        run.play()
        plain.play()
        assert np.array_equal(run.value(HEAD), plain.value(HEAD)) == equal


def test_the_controls_are_fetched_only_once_there_are_any() -> None:
    half = half_of("scaffold")
    worker = Participant("a/w", 1)
    assert half.plan_for(State(0, {"w": full(1.0)}), worker).memory == ()
    assert half.plan_for(State(1, {"w": full(1.0)}, memory={"control/w": full(1.0)}), worker).memory == ("control/*",)


@pytest.mark.parametrize("training", [{"optimizer": "adamw"}, {"momentum": 0.9}])
def test_scaffold_refuses_a_run_whose_steps_are_not_plain_sgd_s(training: dict[str, Any]) -> None:
    with pytest.raises(Unsuited, match=r"set training\.optimizer to 'sgd' and training\.momentum to 0"):
        begin(half_of("scaffold", **training), State(0, {}))
    begin(half_of("scaffold", {"strength": 0.0}, **training), State(0, {}))


# ---------------------------------------------------------------- FedDyn


def test_feddyn_adds_the_mean_of_all_drifts_to_the_mean_of_those_present() -> None:
    half = half_of("feddyn", {"population": 4})
    after = half.merge(State(0, {"w": full(1.0)}), [update("a/w", 10, 2.0), update("b/w", 30, 4.0)])
    # h_a = 1, h_b = 3, of four sites: mean 1. w = (2 + 4) / 2 + 1 = 4
    assert first(after.memory["drift/w"]) == 1.0
    assert first(after.model["w"]) == 4.0
    # Then b and c: from 4, h_b = 3 - 1 = 2 and h_c = 2; mean (1 + 2 + 2) / 4 = 1.25; w = (3 + 6) / 2 + 1.25
    again = half.merge(after, [update("b/w", 30, 3.0), update("c/w", 5, 6.0)])
    assert first(again.memory["drift/w"]) == 1.25
    assert first(again.model["w"]) == 5.75


def test_feddyn_may_weigh_by_examples() -> None:
    half = half_of("feddyn", {"weigh": "examples"})
    after = half.merge(State(0, {"w": full(1.0)}), [update("a/w", 10, 2.0), update("b/w", 30, 4.0)])
    # 1/4 * 1 + 3/4 * 3 = 2.5, once as the mean's step and once as the drift's
    assert first(after.memory["drift/w"]) == 2.5
    assert first(after.model["w"]) == 6.0


def test_feddyn_holds_a_small_site_harder() -> None:
    cohort = [Participant("a/w", 10), Participant("b/w", 30)]
    plans = half_of("feddyn", {"alpha": 0.1}).plan(State(0, {}), cohort, None)
    # The mean is 20 examples: 0.1 / (10 / 20) and 0.1 / (30 / 20)
    assert {name: plan.numbers["alpha"] for name, plan in plans.items()} == {
        "a/w": 0.2,
        "b/w": pytest.approx(0.1 / 1.5),
    }


def test_feddyn_descends_on_the_bent_objective_and_adds_up_the_drift() -> None:
    rate, alpha, own = 0.1, 0.5, 0.2
    model = instantiate(VIT, "image-classification", seed=1)
    vault = {f"drift/{name}": np.full(p.shape, own, np.float32) for name, p in model.named_parameters()}
    settings = {"alpha": alpha, "weigh": "examples"}
    _, harvest = one_task("feddyn", settings, epochs=2, batch_size=None, vault=vault, **SGD)
    (batch,) = images().batches(None, None)
    begun = {name: parameter.detach().clone() for name, parameter in model.named_parameters()}
    for _ in range(2):
        model.zero_grad()
        bent = sum((p - begun[n] + own).square().sum() for n, p in model.named_parameters())
        (model(**batch).loss + alpha / 2 * bent).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.sub_(rate * parameter.grad)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(harvest.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)
        drift = own + harvest.upload[name] - begun[name].numpy()
        np.testing.assert_allclose(harvest.keep[f"drift/{name}"], drift, rtol=1e-5, atol=1e-6)


def test_the_server_s_drift_is_the_mean_of_those_that_the_sites_keep() -> None:
    run = Rounds("feddyn", {"alpha": 0.1, "population": 3})
    for cohort in BY_TURNS:
        run.play(*cohort)
        for block in run.facts.blocks:
            name = f"drift/{block.name}"
            mean = kept_mean(run, name, dict.fromkeys(NAMES, 1 / 3))
            np.testing.assert_allclose(to_array(run.state.memory[name]), mean, rtol=1e-5, atol=2e-6, err_msg=name)


def test_feddyn_without_alpha_weighed_by_examples_is_fedavg_to_the_bit() -> None:
    run, plain = Rounds("feddyn", {"alpha": 0.0, "weigh": "examples"}), Rounds("fedavg")
    for _ in range(2):
        run.play()
        plain.play()
    assert same_bits(run, plain)
    assert run.vaults == {name: {} for name in NAMES}


# ---------------------------------------------------------------- MOON


def test_moon_without_its_term_is_fedavg_to_the_bit_and_keeps_nothing() -> None:
    run, plain = Rounds("moon", {"mu": 0.0}), Rounds("fedavg")
    for _ in range(2):
        run.play()
        plain.play()
    assert same_bits(run, plain)
    assert run.vaults == {name: {} for name in NAMES}


def test_moon_keeps_what_it_handed_in_and_contrasts_it_from_then_on() -> None:
    run, plain = Rounds("moon"), Rounds("fedavg")
    for equal in (True, False):
        run.play()
        plain.play()
        assert np.array_equal(run.value(HEAD), plain.value(HEAD)) == equal
        vault, harvest = run.vaults["a/w"], run.harvests["a/w"]
        assert all((vault[f"previous/{name}"] == values).all() for name, values in harvest.upload.items())


def test_moon_adds_the_contrast_of_features_to_the_loss() -> None:
    mu, temperature, rate = 0.7, 0.4, 0.1
    model, version, previous = (instantiate(VIT, "image-classification", seed=seed) for seed in (1, 1, 2))
    vault = {f"previous/{name}": p.detach().numpy() for name, p in previous.named_parameters()}
    settings = {"mu": mu, "temperature": temperature}
    _, harvest = one_task("moon", settings, epochs=2, batch_size=None, vault=vault, **SGD)
    (batch,) = images().batches(None, None)

    def features(vit: torch.nn.Module) -> torch.Tensor:
        return vit.vit(pixel_values=batch["pixel_values"]).last_hidden_state[:, 0]

    cosine = torch.nn.CosineSimilarity(dim=-1)
    for _ in range(2):
        model.zero_grad()
        z, z_g, z_p = features(model), features(version).detach(), features(previous).detach()
        similarities = torch.stack([cosine(z, z_g), cosine(z, z_p)], dim=1) / temperature
        contrast = torch.nn.functional.cross_entropy(similarities, torch.zeros(24, dtype=torch.long))
        (model(**batch).loss + mu * contrast).backward()
        with torch.no_grad():
            for parameter in model.parameters():
                if parameter.grad is not None:
                    parameter.sub_(rate * parameter.grad)
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(harvest.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


BERT = {
    "model_type": "bert", "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 12, "num_labels": 3,
}  # fmt: skip


def in_training(config: dict[str, Any], head: Head, *, normalised: bool = False) -> LocalWork:
    """A model as it is while it trains; `normalised` puts a batch normalisation in front of its images."""
    model = instantiate(config, head, seed=1)
    if normalised:
        model.add_module("norm", torch.nn.BatchNorm2d(1))
        model.register_forward_pre_hook(
            lambda model, _, inputs: ((), {**inputs, "pixel_values": model.norm(inputs["pixel_values"])}),
            with_kwargs=True,
        )
    model.train()
    return LocalWork(model, head, Plan(), block_table(model))


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


def test_moon_leaves_padding_out_of_the_features_of_texts() -> None:
    work = in_training(BERT, "token-classification")
    short = torch.tensor([[3, 4, 5]])
    plain = {"input_ids": short, "labels": torch.zeros_like(short)}
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in plain.items()}
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0]])}
    version = values_of(work.model)
    expected = work.features(plain, version)
    torch.testing.assert_close(work.features({**padded, **mask}, version), expected)
    assert not torch.allclose(work.features(padded, version), expected)


def test_moon_contrasts_features_of_the_dropout_masks_that_the_loss_has() -> None:
    work = in_training({**VIT, "hidden_dropout_prob": 0.5}, "image-classification")
    (batch,) = images().batches(None, None)
    output, features = work.forward_with_features(batch)
    torch.testing.assert_close(work.model.get_submodule("classifier")(features), output.logits)


def test_moon_reads_the_models_that_do_not_train_without_dropout_and_leaves_the_modes_as_they_are() -> None:
    work = in_training({**VIT, "hidden_dropout_prob": 0.5}, "image-classification")
    work.model.get_submodule("classifier").eval()
    (batch,) = images().batches(None, None)
    modes = [module.training for module in work.model.modules()]
    one, other = (work.features(batch, values_of(work.model)) for _ in range(2))
    assert torch.equal(one, other)
    assert not one.requires_grad
    assert [module.training for module in work.model.modules()] == modes


def test_moon_moves_the_statistics_of_batches_once_a_batch() -> None:
    plain, contrasted = (in_training(VIT, "image-classification", normalised=True) for _ in range(2))
    contrasted.vault = {f"previous/{block.name}": contrasted.read(block) for block in contrasted.blocks}
    facts = RunFacts(tuple(plain.blocks), rounds=9)
    (batch,) = images().batches(None, None)
    for method, work in (("fedavg", plain), ("moon", contrasted)):
        half = worker_half(Chosen(name=method), facts)
        half.prepare(work)
        half.loss(work, batch)
    expected, found = dict(plain.model.named_buffers()), dict(contrasted.model.named_buffers())
    assert expected["norm.running_mean"].any()
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_moon_refuses_a_model_without_a_head() -> None:
    with pytest.raises(Unsuited, match="no head of its own"):
        begin(half_of("moon"), State(0, {}))


# ---------------------------------------------------------------- for all of them


@pytest.mark.parametrize("method", ["scaffold", "feddyn", "moon"])
def test_a_site_that_missed_rounds_comes_back_with_what_it_kept(method: str) -> None:
    run = Rounds(method)
    run.play()
    kept = {name: values.copy() for name, values in run.vaults["a/w"].items()}
    run.play("b/w", "c/w")
    assert all((run.vaults["a/w"][name] == values).all() for name, values in kept.items())
    run.play()
    assert any((run.vaults["a/w"][name] != values).any() for name, values in kept.items())


@pytest.mark.parametrize("method", ["scaffold", "feddyn"])
def test_what_is_kept_of_blocks_that_were_not_trained_stays(method: str) -> None:
    prefix = {"scaffold": "control/", "feddyn": "drift/"}[method]
    vault: dict[str, Array] = {f"{prefix}{HEAD}": np.full((3, 16), 0.5, np.float32)}
    body = Plan.model_validate(
        {"train": {"exclude": [{"roles": ["head"]}]}, "upload": {"exclude": [{"roles": ["head"]}]}}
    )
    _, harvest = one_task(method, vault=vault, plan=body, dataset=site_data(1, 8), **SGD)
    assert (harvest.keep[f"{prefix}{HEAD}"] == 0.5).all()
    assert HEAD not in harvest.upload


def joint_gradient(run: Rounds) -> float:
    """The length of the head's gradient over all sites' examples together, at the run's version."""
    model = instantiate(VIT, "image-classification", seed=1)
    for block in run.facts.blocks:
        write_block(named_tensors(model), block, run.value(block.name))
    total = sum(site.examples for site in run.sites.values())
    losses = [
        model(**batch).loss * site.examples for site in run.sites.values() for batch in site.batches(None, None)
    ]
    gradient = torch.autograd.grad(sum(losses) / total, model.classifier.weight)[0]
    return float(gradient.norm())


def test_where_sites_differ_scaffold_and_feddyn_go_where_the_joint_gradient_vanishes_and_fedavg_does_not() -> None:
    # The head alone on frozen features is a convex problem; ten local steps drift far towards each site's own labels.
    training = {**SGD, "learning_rate": 0.2, "batch_size": None, "epochs": 10}
    lengths = {}
    for method, settings in (("fedavg", {}), ("scaffold", {}), ("feddyn", {"alpha": 0.1, "weigh": "examples"})):
        run = Rounds(method, settings, training, only=roles("head"))
        for _ in range(10):
            run.play()
        lengths[method] = joint_gradient(run)
    print(lengths)
    assert lengths["scaffold"] < 0.25 * lengths["fedavg"]
    assert lengths["feddyn"] < 0.6 * lengths["fedavg"]
