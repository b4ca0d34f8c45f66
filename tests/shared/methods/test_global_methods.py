"""FedNova, SCAFFOLD, FedDyn and MOON: their equations written out, and their neutral settings to the bit."""

from __future__ import annotations

import sys
from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from fractions import Fraction
from random import Random
from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.aggregation.local_work import effective_steps
from tessera.shared.methods.base import (
    MethodSpec,
    Participant,
    Plan,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.registry import coordinator_half, worker_half
from tessera.shared.model.selectors import roles
from tessera.shared.model.spec import Head
from tessera.shared.rounds.planning import initial_state, plans_of
from tessera.shared.run_settings import Training
from tessera.shared.schedule import rate_factors
from tessera.shared.tensors.lazy import Array, ArrayTensor, Tensor, to_array
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, write_block
from tessera.worker.training.context import LocalTaskContext
from tests.support.duals import dual, pairs
from tests.support.rounds import SGD, Rounds, same_bits, site_data
from tests.support.tasks import VIT, Subject, images, one_task
from tests.support.variants import variants

HEAD = "classifier.weight"
NAMES = ("a/w", "b/w", "c/w")


def full(value: float) -> ArrayTensor:
    return ArrayTensor(np.full(2, value, np.float32))


def half_of(method: str, settings: Mapping[str, Any] | None = None, **training: Any) -> Any:
    wanted = Training.model_validate({**SGD, **training})
    return coordinator_half(MethodSpec(name=method, settings=dict(settings or {})), RunInfo((), 9, training=wanted))


def update(worker: str, examples: int, value: float, **metrics: float) -> Update:
    return Update(worker, examples, {"w": full(value)}, metrics)


def of_site(site: str, worker: str, value: float, **metrics: float) -> Update:
    return Update(f"{site}/{worker}", 10, {"w": full(value)}, metrics, site)


def first(tensor: Tensor) -> float:
    return float(to_array(tensor)[0])


# ---------------------------------------------------------------- FedNova


def test_fednova_divides_each_step_by_the_work_behind_it() -> None:
    state = State(0, {"w": full(1.0)})
    updates = [update("a/w", 10, 2.0, effective_steps=2.0), update("b/w", 30, 5.0, effective_steps=6.0)]
    # p = 1/4, 3/4; tau_eff = 1/4 * 2 + 3/4 * 6 = 5; d = 5 * (1/4 * 1 / 2 + 3/4 * 4 / 6) = 3.125
    assert first(half_of("fednova", batch_size=5).merge(state, updates).model["w"]) == 4.125


def test_a_site_that_claims_work_without_end_does_not_lengthen_the_steps_of_the_others() -> None:
    state = State(0, {"w": full(0.0)})
    honest = [update(f"{letter}/w", 10, 1.0, effective_steps=10.0) for letter in "abc"]
    # What it claims makes 2^40 steps, and its weight is capped at 40 examples, which make 40.
    liar = update("x/w", 40, 0.0, effective_steps=2.0**40)
    # p = 1/7, 1/7, 1/7, 4/7; tau_eff = 3 / 7 * 10 + 4 / 7 * 40 = 190 / 7; d = 190 / 7 * (3 / 7 * 1 / 10)
    merged = half_of("fednova", batch_size=1).merge(state, [*honest, liar])
    assert first(merged.model["w"]) == pytest.approx(190 / 7 * 3 / 70)


def test_fednova_is_fedavg_to_the_bit_if_all_worked_alike() -> None:
    rng = np.random.default_rng(0)
    state = State(0, {"w": ArrayTensor(rng.normal(size=500).astype(np.float32))})
    updates = [
        Update(name, 7 + i, {"w": ArrayTensor(rng.normal(size=500).astype(np.float32))}, {"effective_steps": 7.3})
        for i, name in enumerate(NAMES)
    ]
    one, other = (to_array(half_of(m).merge(state, updates).model["w"]) for m in ("fednova", "fedavg"))
    assert one.tobytes() == other.tobytes()


def test_who_makes_few_steps_is_stretched_no_further_than_the_run_s_largest_norm() -> None:
    # Seven make 55 steps and stay where they were; one makes a single step.
    honest = [update(f"{letter}/w", 55, 0.0, effective_steps=55.0, update_norm=0.0) for letter in "abcdefg"]
    lone = update("x/w", 55, 0.5, effective_steps=1.0, update_norm=0.5 * 2**0.5)
    state = State(0, {"w": full(0.0)})

    def pull(most: float | None) -> float:
        facts = RunInfo((), 9, training=Training.model_validate({**SGD, "batch_size": 1}), max_update_norm=most)
        merged = coordinator_half(MethodSpec(name="fednova"), facts).merge(state, [*honest, lone])
        return float(np.linalg.norm(to_array(merged.model["w"])))

    # tau_eff = (7 * 55 + 1) / 8 = 48.25, which is 48.25 / 8 of its norm
    assert pull(None) == pytest.approx(48.25 / 8 * 0.5 * 2**0.5)
    assert pull(1.0) == pytest.approx(1.0 / 8)


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


@pytest.mark.parametrize("momentum", [0.0, 0.9])
@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_effective_steps_count_each_step_with_its_share_of_the_rate(momentum: float, schedule: Any) -> None:
    training = Training(optimizer="sgd", momentum=momentum, schedule=schedule, warmup=0.3)
    weight = torch.nn.Parameter(torch.zeros((), dtype=torch.float64))
    optimizer = torch.optim.SGD([weight], lr=1.0, momentum=momentum)
    for share in rate_factors(training, 6, 2, 3):
        optimizer.param_groups[0]["lr"] = share
        optimizer.zero_grad()
        weight.backward()
        optimizer.step()
    assert -weight.item() == pytest.approx(effective_steps(6, training, 2, 3))


@pytest.mark.parametrize("momentum", [0.0, 0.5])
@pytest.mark.parametrize("schedule", ["constant", "cosine"])
@pytest.mark.parametrize("mu", [0.5, 5.0, 10.0])
def test_fedprox_s_term_takes_back_a_part_of_each_step(mu: float, schedule: Any, momentum: float) -> None:
    training = Training(optimizer="sgd", learning_rate=0.1, momentum=momentum, schedule=schedule, steps=1)
    for steps in (1, 2, 7, 80):
        weight = torch.zeros(1, dtype=torch.float64, requires_grad=True)
        optimizer = torch.optim.SGD([weight], lr=0.1, momentum=momentum)
        for factor in rate_factors(training, steps, 1, 1):
            optimizer.param_groups[0]["lr"] = 0.1 * factor
            optimizer.zero_grad()
            # A constant gradient of -1, and the term.
            (-weight.sum() + mu / 2 * weight.square().sum()).backward()
            optimizer.step()
        counted = effective_steps(steps, training, mu=mu)
        assert counted == pytest.approx(weight.item() / 0.1, rel=1e-9)
        if not momentum and schedule == "constant":
            # The paper's equation.
            assert counted == pytest.approx((1 - (1 - 0.1 * mu) ** steps) / (0.1 * mu))
    with pytest.raises(ValueError, match=r"set training\.steps"):
        effective_steps(1 << 39, training, mu=mu)


def test_fedprox_counts_its_term_in_fitted_work_and_refuses_one_that_undoes_steps() -> None:
    training = Training(optimizer="sgd", learning_rate=0.5, steps=40)
    run = replace(half_of("fedprox").run, training=training, fitted=True)
    half = coordinator_half(MethodSpec(name="fedprox", settings={"mu": 1.0}), run)
    assert half.expected_steps(Plan(steps=2), 8) == 1.5
    assert half.expected_steps(Plan(), 8) == pytest.approx(2.0)
    with pytest.raises(UnsupportedRun, match="product is above 1"):
        coordinator_half(MethodSpec(name="fedprox", settings={"mu": 2.5}), run).start(State(0, {}))


def test_fednova_goes_the_same_way_under_a_schedule_whatever_the_sites_steps_are() -> None:
    half = half_of("fednova", batch_size=1, schedule="cosine", momentum=0.5, learning_rate=0.1)
    state = State(8, {"w": full(0.0)})
    plan = plans_of(half, state, [Participant("a/w", 2)], Random(0))["a/w"]
    assert plan.scalars == {"round": 9}
    updates = []
    # A constant gradient of 1, in the last of nine rounds, where rates differ most.
    for name, examples in (("a/w", 2), ("b/w", 8)):
        own = effective_steps(examples, half.run.training, 9, 9)
        half.check(plan, examples, {"effective_steps": own})
        updates.append(replace(update(name, examples, -0.1 * own, effective_steps=own), plan=plan))
    mean = 0.2 * updates[0].metrics["effective_steps"] + 0.8 * updates[1].metrics["effective_steps"]
    assert first(half.merge(state, updates).model["w"]) == pytest.approx(-0.1 * mean)
    # What was right without the schedule, or in another round, is not.
    for wrong in (effective_steps(8, half.run.training, 8, 9), 8.0):
        with pytest.raises(ValueError, match="8 examples make it"):
            half.check(plan, 8, {"effective_steps": wrong})


@pytest.mark.parametrize("method", ["fednova", "scaffold"])
def test_a_claim_of_examples_without_end_is_refused_under_a_schedule(method: str) -> None:
    half = half_of(method, batch_size=1, schedule="linear")
    steps = float(1 << 39)
    with pytest.raises(ValueError, match=r"set training\.steps"):
        half.check(Plan(), 1 << 39, {"effective_steps": steps, "steps": steps})


@pytest.mark.parametrize("momentum", [0.0, 0.3, 0.9, 1 - 1e-6, 1 - 1e-12, 1 - 2**-53])
@pytest.mark.parametrize("steps", [0, 1, 2, 7, 64, 201])
def test_effective_steps_are_the_sum_of_the_counters_for_every_momentum(momentum: float, steps: int) -> None:
    total = counter = Fraction(0)
    for _ in range(steps):
        counter = Fraction(momentum) * counter + 1
        total += counter
    made = effective_steps(steps, Training(optimizer="sgd", momentum=momentum))
    assert made == pytest.approx(float(total), rel=1e-13)


def test_a_claim_of_examples_without_end_costs_the_coordinator_no_loop_over_them() -> None:
    half = half_of("fednova", epochs=1000, batch_size=1, momentum=0.5)
    examples = (1 << 40) - 1
    # The closed form: (n - rho (1 - rho^n) / (1 - rho)) / (1 - rho) = 2 n - 2
    half.check(Plan(), examples, {"effective_steps": 2000.0 * examples - 2})


@pytest.mark.parametrize("method", ["fednova", "scaffold"])
@pytest.mark.parametrize("claimed", [None, 0.0, -1.0, 1.0, 5.0, 7.0, 20.0, float("nan")])
def test_less_or_more_work_than_the_plan_makes_of_the_examples_is_refused(method: str, claimed: float | None) -> None:
    name = {"fednova": "effective_steps", "scaffold": "steps"}[method]
    metrics = {} if claimed is None else {name: claimed}
    # Two epochs of 10 examples in batches of 4 are 6 steps: a claim of one would make the update count six times.
    half = half_of(method, epochs=2, batch_size=4)
    with pytest.raises(ValueError, match="10 examples make it 6"):
        half.check(Plan(), 10, metrics)
    half.check(Plan(), 10, {name: 6.0})


def test_work_that_was_added_up_step_by_step_is_not_refused_for_its_rounding() -> None:
    momentum, total, counter = 0.9, 0.0, 0.0
    for _ in range(3000):
        counter = momentum * counter + 1
        total += counter
    half_of("fednova", batch_size=1, momentum=momentum).check(Plan(), 3000, {"effective_steps": total})


# ---------------------------------------------------------------- SCAFFOLD


@pytest.mark.parametrize(("weigh", "share"), [("equal", 0.5), ("examples", 0.25)])
def test_scaffold_s_server_learns_the_controls_from_updates_and_step_counts(weigh: str, share: float) -> None:
    half = half_of("scaffold", {"weigh": weigh}, learning_rate=0.5)
    state = State(0, {"w": full(1.0)})
    updates = [update("a/w", 10, 0.0, steps=2.0), update("b/w", 30, 3.0, steps=4.0)]
    after = half.merge(state, updates)
    # Mean gradients: a (1 - 0) / (2 * 0.5) = 1, b (1 - 3) / (4 * 0.5) = -1
    assert first(after.server_state["control/w"]) == share * 1 + (1 - share) * -1
    assert first(after.model["w"]) == 1 + share * -1 + (1 - share) * 2
    # All took part again, so all of c gives way: w - 0.5 is a gradient of 0.5 / (1 * 0.5) = 1, from both.
    lower = first(after.model["w"]) - 0.5
    again = [update("a/w", 10, lower, steps=1.0), update("b/w", 30, lower, steps=1.0)]
    assert first(half.merge(after, again).server_state["control/w"]) == 1.0


def test_whoever_is_away_keeps_its_share_of_the_control() -> None:
    half = half_of("scaffold", learning_rate=0.5)
    every = [update(name, 10, 0.0, steps=2.0) for name in ("a/w", "b/w", "c/w", "d/w")]
    state = half.merge(State(0, {"w": full(1.0)}), every)
    assert first(state.server_state["control/w"]) == 1.0
    # From w = 0, gradients 1 and -2.5, of two sites of four: c = 1 + 2/4 * ((1 - 2.5) / 2 - 1) = 0.125
    after = half.merge(state, [update("a/w", 10, -1.0, steps=2.0), update("b/w", 30, 2.5, steps=2.0)])
    assert first(after.server_state["control/w"]) == 0.125
    assert first(after.model["w"]) == (-1 + 2.5) / 2


def test_the_control_is_spread_over_a_site_that_joins() -> None:
    half = half_of("scaffold", learning_rate=0.5)
    blocks = {"w": full(0.0), "v": full(0.0)}
    both = [Update(name, 10, {n: full(0.0) for n in "wv"}, {"steps": 2.0}) for name in ("a/w", "b/w")]
    state = half.merge(State(0, {name: full(1.0) for name in blocks}), both)
    # c_a = c_b = 1. Now c alone, of w alone: c_c = 0 - 1 + 3 / (2 * 0.5) = 2, and mean (1 + 1 + 2) / 3
    after = half.merge(state, [update("c/w", 10, -3.0, steps=2.0)])
    assert first(after.server_state["control/w"]) == pytest.approx(4 / 3)
    # Of v it has told nothing: mean (1 + 1 + 0) / 3
    assert first(after.server_state["control/v"]) == pytest.approx(2 / 3)


@pytest.mark.parametrize(
    ("method", "server_state"), [("scaffold", "control/w"), ("feddyn", "gradient/w")], ids=["scaffold", "feddyn"]
)
def test_names_that_a_site_invents_for_its_workers_are_one_of_the_population(method: str, server_state: str) -> None:
    half = half_of(method)
    outcomes = []
    for names in (["w"] * 6, [f"w{number}" for number in range(6)]):
        state = State(0, {"w": full(1.0)})
        for name in names:
            state = half.merge(state, [of_site("a", name, 0.0, steps=2.0), of_site("b", "w", 3.0, steps=2.0)])
        state = half.merge(state, [of_site("b", "w", 3.0, steps=2.0)])
        assert to_array(state.server_state["members"]).shape == (2, 2)
        outcomes.append(first(state.server_state[server_state]))
    assert outcomes[0] == outcomes[1]


def test_a_site_weighs_what_it_had_when_it_first_took_part() -> None:
    half = half_of("scaffold", {"weigh": "examples"}, learning_rate=0.5)
    state = half.merge(
        State(0, {"w": full(1.0)}), [update("a/w", 10, 0.0, steps=2.0), update("b/w", 30, 1.0, steps=2.0)]
    )
    # Weights 1/4 and 3/4, whatever a says later: from w = 0.75, w = 0.75 + 1/4 * 4
    after = half.merge(state, [update("a/w", 9999, 4.75, steps=2.0), update("b/w", 30, 0.75, steps=2.0)])
    assert first(after.model["w"]) == 1.75
    assert first(after.server_state["control/w"]) == 0.25 * -4


@pytest.mark.parametrize("weigh", ["equal", "examples"])
def test_sites_that_are_known_beforehand_count_before_they_have_come(weigh: str) -> None:
    half = half_of("scaffold", {"population": 4, "weigh": weigh}, learning_rate=0.5)
    after = half.merge(State(0, {"w": full(1.0)}), [update(name, 10, 0.0, steps=2.0) for name in ("a/w", "b/w")])
    # Two gradients of 1, of four sites
    assert first(after.server_state["control/w"]) == 0.5


def test_a_block_that_nobody_sent_keeps_its_control() -> None:
    server_state = {"control/w": full(4.0), "control/v": full(4.0)}
    state = State(0, {"w": full(1.0), "v": full(1.0)}, server_state=server_state)
    after = half_of("scaffold").merge(state, [update("a/w", 10, 0.0, steps=2.0)])
    assert after.server_state["control/v"] is server_state["control/v"]
    assert after.server_state["control/w"] is not server_state["control/w"]


def test_scaffold_corrects_each_gradient_by_c_minus_c_k_and_keeps_the_next_c_k() -> None:
    rate, c, own = 0.1, 0.3, 0.1
    model = instantiate(VIT, "image-classification", seed=1)
    shapes = {name: parameter.shape for name, parameter in model.named_parameters()}
    server_state = {f"control/{name}": np.full(shape, c, np.float32) for name, shape in shapes.items()}
    vault = {f"control/{name}": np.full(shape, own, np.float32) for name, shape in shapes.items()}
    _, result = one_task(
        "scaffold",
        epochs=2,
        batch_size=None,
        server_state=server_state,
        vault=vault,
        **{**SGD, "learning_rate": rate},
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
    assert result.metrics == {"steps": 2.0}
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(result.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)
        kept = own - c + (begun[name].numpy() - result.upload[name]) / (2 * rate)
        np.testing.assert_allclose(result.keep[f"control/{name}"], kept, rtol=1e-4, atol=1e-5)


def test_a_control_is_the_mean_gradient_under_a_schedule_as_under_a_constant_rate() -> None:
    """On w^2 / 2 from w = 1, whose gradient is w, in the last of three rounds."""
    for schedule in ("constant", "cosine"):
        training = Training.model_validate({**SGD, "schedule": schedule, "batch_size": 1})
        rates = [0.1 * share for share in rate_factors(training, 4, 3, 3)]
        gradients, end = [], 1.0
        for rate in rates:
            gradients.append(end)
            end -= rate * end
        mean = sum(rate * g for rate, g in zip(rates, gradients, strict=True)) / sum(rates)
        half = coordinator_half(MethodSpec(name="scaffold"), RunInfo((), 3, training=training))
        after = half.merge(State(2, {"w": full(1.0)}), [update("a/w", 4, end, steps=4.0)])
        assert first(after.server_state["control/w"]) == pytest.approx(mean, rel=1e-5)
        assert end < mean <= 1.0
        # Divided by steps times the rate, it would be outside of all gradients that there were.
        assert (schedule == "constant") == ((1 - end) / (4 * 0.1) > end)


def kept_mean(run: Rounds, name: str, weights: Mapping[str, float]) -> Array:
    """The weighted mean of what the sites keep under a name; zero for who keeps nothing yet."""
    kept = {worker: run.vaults[worker].get(name) for worker in NAMES}
    return sum(weights[worker] * values.astype(np.float64) for worker, values in kept.items() if values is not None)


COSINE = {"schedule": "cosine", "warmup": 0.2}
BY_TURNS = [NAMES[:2], NAMES[1:], NAMES, NAMES[:1]]


def shares(run: Rounds, weigh: str) -> dict[str, float]:
    """What each site counts in means over all who have taken part so far."""
    weights = {name: run.sites[name].examples if weigh == "examples" else 1 for name in NAMES if run.vaults[name]}
    return {name: weights.get(name, 0) / sum(weights.values()) for name in NAMES}


@pytest.mark.parametrize(
    ("weigh", "training"),
    [
        pytest.param("examples", {"epochs": 2}, id="examples-constant"),
        pytest.param("equal", COSINE, id="equal-cosine"),
        pytest.param("examples", COSINE, marks=pytest.mark.long, id="examples-cosine"),
        pytest.param("equal", {"epochs": 2}, marks=pytest.mark.long, id="equal-constant"),
    ],
)
def test_the_server_s_control_is_the_mean_of_those_that_the_sites_keep(weigh: str, training: dict[str, Any]) -> None:
    run = Rounds("scaffold", {"weigh": weigh}, {**SGD, **training})
    for cohort in BY_TURNS:
        run.play(*cohort)
        for block in run.facts.blocks:
            name = f"control/{block.name}"
            mean = kept_mean(run, name, shares(run, weigh))
            np.testing.assert_allclose(
                to_array(run.state.server_state[name]), mean, rtol=1e-5, atol=2e-6, err_msg=name
            )


def test_scaffold_of_no_strength_is_fedavg_to_the_bit_and_remembers_nothing() -> None:
    run, plain = Rounds("scaffold", {"strength": 0.0, "weigh": "examples"}), Rounds("fedavg")
    for _ in range(2):
        run.play()
        plain.play()
    assert same_bits(run, plain)
    assert run.vaults == {name: {} for name in NAMES}


def test_scaffold_s_first_round_is_fedavg_s_and_the_second_is_not() -> None:
    training = {**SGD, "epochs": 2}
    run, plain = Rounds("scaffold", {"weigh": "examples"}, training), Rounds("fedavg", training=training)
    for equal in (True, False):
        run.play()
        plain.play()
        assert np.array_equal(run.value(HEAD), plain.value(HEAD)) == equal


def test_scaffold_sums_the_rates_of_a_schedule_once_however_many_blocks_there_are() -> None:
    half = half_of("scaffold", schedule="cosine")

    def rates(blocks: int) -> int:
        """Return how often a merge asks for the rate of a step."""
        seen: Counter[object] = Counter()
        model = {f"w{number}": full(1.0) for number in range(blocks)}
        sent = [Update(name, 10, {block: full(0.0) for block in model}, {"steps": 20.0}) for name in NAMES]
        sys.setprofile(lambda frame, event, _: seen.update([frame.f_code] if event == "call" else []))
        try:
            half.merge(State(0, model), sent)
        finally:
            sys.setprofile(None)
        return seen[rate_factors.__code__]

    # The sum ends by asking once more.
    assert rates(1) == rates(50) == 21


def test_the_controls_are_fetched_only_once_there_are_any() -> None:
    half = half_of("scaffold")
    worker = Participant("a/w", 1)
    assert half.plan_for(State(0, {"w": full(1.0)}), worker).server_state == ()
    assert half.plan_for(State(1, {"w": full(1.0)}, server_state={"control/w": full(1.0)}), worker).server_state == (
        "control/*",
    )


@pytest.mark.parametrize("training", [{"optimizer": "adamw"}, {"momentum": 0.9}])
def test_scaffold_refuses_a_run_whose_steps_are_not_plain_sgd_s(training: dict[str, Any]) -> None:
    with pytest.raises(UnsupportedRun, match=r"set training\.optimizer to 'sgd' and training\.momentum to 0"):
        initial_state(half_of("scaffold", **training), State(0, {}))
    initial_state(half_of("scaffold", {"strength": 0.0}, **training), State(0, {}))


# ---------------------------------------------------------------- FedDyn


def test_feddyn_adds_the_mean_of_all_drifts_to_the_mean_of_those_present() -> None:
    half = half_of("feddyn", {"alpha": 0.5, "population": 4})

    def moved(worker: str, value: float) -> Update:
        return replace(update(worker, 10, value), plan=Plan(scalars={"alpha": 0.5}))

    after = half.merge(State(0, {"w": full(1.0)}), [moved("a/w", 2.0), moved("b/w", 4.0)])
    # The code's h_a = 1 and h_b = 3, of four sites: mean 1, which as a gradient is 0.5. w = (2 + 4) / 2 + 1 = 4
    assert first(after.server_state["gradient/w"]) == 0.5
    assert first(after.model["w"]) == 4.0
    # Then b and c: from 4, h_b = 3 - 1 = 2 and h_c = 2; mean (1 + 2 + 2) / 4 = 1.25; w = (3 + 6) / 2 + 1.25
    again = half.merge(after, [moved("b/w", 3.0), moved("c/w", 6.0)])
    assert first(again.server_state["gradient/w"]) == 0.625
    assert first(again.model["w"]) == 5.75


def test_feddyn_may_weigh_by_examples() -> None:
    half = half_of("feddyn", {"alpha": 0.5, "weigh": "examples"})
    after = half.merge(State(0, {"w": full(1.0)}), [update("a/w", 10, 2.0), update("b/w", 30, 4.0)])
    # 1/4 * 1 + 3/4 * 3 = 2.5, once as the mean's step and once as the drift's
    assert first(after.server_state["gradient/w"]) == 0.5 * 2.5
    assert first(after.model["w"]) == 6.0


def alphas(state: State, *cohort: tuple[str, int]) -> dict[str, float]:
    plans = half_of("feddyn", {"alpha": 0.1}).plan(state, [Participant(*worker) for worker in cohort], None)
    return {name: plan.scalars["alpha"] for name, plan in plans.items()}


def test_feddyn_holds_a_site_as_strongly_whoever_takes_part_with_it() -> None:
    sizes = {"a/w": 10, "b/w": 30, "c/w": 80}
    state = half_of("feddyn").merge(State(0, {"w": full(1.0)}), [update(name, n, 2.0) for name, n in sizes.items()])
    # The mean of all three is 40 examples: 0.1 / (10 / 40), 0.1 / (30 / 40) and 0.1 / (80 / 40)
    expected = {"a/w": 0.4, "b/w": pytest.approx(0.1 / 0.75), "c/w": 0.05}
    assert alphas(state, *sizes.items()) == expected
    for pair in (("a/w", "b/w"), ("a/w", "c/w"), ("b/w", "c/w")):
        assert alphas(state, *((name, sizes[name]) for name in pair)) == {name: expected[name] for name in pair}
    # Nor does what a site declares later count, or who declares without end and never sends.
    assert alphas(state, ("a/w", 77), ("x/w", 1 << 40))["a/w"] == 0.4


def test_in_the_first_round_nobody_s_declaration_decides_how_strongly_all_are_held() -> None:
    # The median is 20 examples.
    assert alphas(State(0, {}), ("a/w", 10), ("b/w", 20), ("x/w", 1 << 40))["a/w"] == 0.2


@pytest.mark.parametrize("reported", [1, 1000, 4000])
def test_a_joining_site_moves_the_model_by_what_it_declared_however_much_it_reports(reported: int) -> None:
    half = half_of("feddyn", {"alpha": 0.1})
    honest = dict.fromkeys(("a/w", "b/w", "c/w", "d/w"), 1000)
    cohort = [Participant(name, examples) for name, examples in {**honest, "x/w": 1}.items()]
    plans = half.plan(State(0, {}), cohort, None)
    sent = [*(update(name, examples, 0.0) for name, examples in honest.items()), update("x/w", reported, 1.0)]
    after = half.merge(State(0, {"w": full(0.0)}), [replace(each, plan=plans[each.worker]) for each in sent])
    # 1/5 in the mean of the models; in the sum 1/4001 of all examples, times alpha_k / alpha, which is 1000 / 1.
    assert first(after.model["w"]) == pytest.approx(1 / 5 + 1000 / 4001)
    # So what the site keeps, alpha_k times its step, counts for its share of the sum in later rounds too.
    assert sorted(to_array(after.server_state["members"])[:, 1].tolist()) == [1.0, 1000.0, 1000.0, 1000.0, 1000.0]


def test_a_joining_site_counts_no_more_examples_than_it_reports() -> None:
    half = half_of("feddyn", {"alpha": 0.1})
    plans = half.plan(State(0, {}), [Participant("a/w", 10), Participant("x/w", 1 << 40)], None)
    sent = [replace(update(name, 10, 0.0), plan=plan) for name, plan in plans.items()]
    after = half.merge(State(0, {"w": full(0.0)}), sent)
    assert to_array(after.server_state["members"])[:, 1].tolist() == [10.0, 10.0]


@pytest.mark.parametrize("weigh", ["equal", "examples"])
def test_feddyn_is_its_authors_code(weigh: str) -> None:
    """Three sites of 8, 16 and 24 examples, of whom all come once and then some: the code's arithmetic in numpy."""
    alpha, run = 0.1, Rounds("feddyn", {"alpha": 0.1, "weigh": weigh})
    counts = {name: run.sites[name].examples for name in NAMES}
    names = [block.name for block in run.facts.blocks]
    local = {name: dict.fromkeys(names, 0.0) for name in NAMES}
    for cohort in [NAMES, *BY_TURNS]:
        cloud = {name: run.value(name).astype(np.float64) for name in names}
        run.play(*cohort)
        for name in names:
            ends = {worker: run.harvests[worker].upload[name].astype(np.float64) for worker in cohort}
            for worker, end in ends.items():
                local[worker][name] += end - cloud[name]
            of_all = counts if weigh == "examples" else dict.fromkeys(NAMES, 1)
            mean = sum(of_all[w] * end for w, end in ends.items()) / sum(of_all[w] for w in cohort)
            mean += sum(of_all[w] * local[w][name] for w in NAMES) / sum(of_all.values())
            np.testing.assert_allclose(run.value(name), mean, rtol=1e-5, atol=2e-6, err_msg=name)
            weight = counts["a/w"] / 16 if weigh == "equal" else 1  # of a mean of 16
            kept = run.vaults["a/w"][f"gradient/{name}"]
            np.testing.assert_allclose(kept, alpha / weight * local["a/w"][name], rtol=1e-5, atol=2e-6)


def test_feddyn_descends_on_the_bent_objective_and_adds_up_the_drift() -> None:
    rate, alpha, own = 0.1, 0.5, 0.2
    model = instantiate(VIT, "image-classification", seed=1)
    vault = {f"gradient/{n}": np.full(p.shape, alpha * own, np.float32) for n, p in model.named_parameters()}
    settings = {"alpha": alpha, "weigh": "examples"}
    _, result = one_task("feddyn", settings, epochs=2, batch_size=None, vault=vault, **SGD)
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
        np.testing.assert_allclose(result.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)
        drift = own + result.upload[name] - begun[name].numpy()
        np.testing.assert_allclose(result.keep[f"gradient/{name}"], alpha * drift, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("weigh", [pytest.param("equal", marks=pytest.mark.long), "examples"])
def test_the_server_s_sum_of_gradients_is_that_of_those_that_the_sites_keep(weigh: str) -> None:
    run = Rounds("feddyn", {"alpha": 0.1, "weigh": weigh})
    for cohort in BY_TURNS:
        run.play(*cohort)
        for block in run.facts.blocks:
            name = f"gradient/{block.name}"
            # A site's share is that of its examples, whether that is in its mean's weight or in its alpha.
            mean = kept_mean(run, name, shares(run, "examples"))
            np.testing.assert_allclose(
                to_array(run.state.server_state[name]), mean, rtol=1e-5, atol=2e-7, err_msg=name
            )


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
        vault, result = run.vaults["a/w"], run.harvests["a/w"]
        assert all((vault[f"previous/{name}"] == values).all() for name, values in result.upload.items())


def test_moon_adds_the_contrast_of_features_to_the_loss() -> None:
    mu, temperature, rate = 0.7, 0.4, 0.1
    model, version, previous = (instantiate(VIT, "image-classification", seed=seed) for seed in (1, 1, 2))
    vault = {f"previous/{name}": p.detach().numpy() for name, p in previous.named_parameters()}
    settings = {"mu": mu, "temperature": temperature}
    _, result = one_task("moon", settings, epochs=2, batch_size=None, vault=vault, **SGD)
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
        np.testing.assert_allclose(result.upload[name], parameter.detach().numpy(), rtol=1e-4, atol=1e-6)


BERT = {
    "model_type": "bert", "vocab_size": 20, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 24, "max_position_embeddings": 12, "num_labels": 3,
}  # fmt: skip


def in_training(config: dict[str, Any], head: Head, *, normalised: bool = False) -> LocalTaskContext:
    """A model as it is while it trains; `normalised` puts a batch normalisation in front of its images."""
    model = instantiate(config, head, seed=1)
    if normalised:
        model.add_module("norm", torch.nn.BatchNorm2d(1))
        model.register_forward_pre_hook(
            lambda model, _, inputs: ((), {**inputs, "pixel_values": model.norm(inputs["pixel_values"])}),
            with_kwargs=True,
        )
    model.train()
    return LocalTaskContext(model, head, Plan(), block_table(model))


def values_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: tensor.detach().clone() for name, tensor in named_tensors(model).items()}


def test_moon_leaves_padding_out_of_the_features_of_texts() -> None:
    context = in_training(BERT, "token-classification")
    short = torch.tensor([[3, 4, 5]])
    plain = {"input_ids": short, "labels": torch.zeros_like(short)}
    padded = {name: torch.nn.functional.pad(tensor, (0, 5)) for name, tensor in plain.items()}
    mask = {"attention_mask": torch.tensor([[1, 1, 1, 0, 0, 0, 0, 0]])}
    version = values_of(context.model)
    expected = context.features(plain, version)
    torch.testing.assert_close(context.features({**padded, **mask}, version), expected)
    assert not torch.allclose(context.features(padded, version), expected)


def test_moon_contrasts_features_of_the_dropout_masks_that_the_loss_has() -> None:
    context = in_training({**VIT, "hidden_dropout_prob": 0.5}, "image-classification")
    (batch,) = images().batches(None, None)
    output, features = context.forward_with_features(batch)
    torch.testing.assert_close(context.model.get_submodule("classifier")(features), output.logits)


def test_moon_reads_the_models_that_do_not_train_without_dropout_and_leaves_the_modes_as_they_are() -> None:
    context = in_training({**VIT, "hidden_dropout_prob": 0.5}, "image-classification")
    context.model.get_submodule("classifier").eval()
    (batch,) = images().batches(None, None)
    modes = [module.training for module in context.model.modules()]
    one, other = (context.features(batch, values_of(context.model)) for _ in range(2))
    assert torch.equal(one, other)
    assert not one.requires_grad
    assert [module.training for module in context.model.modules()] == modes


def test_moon_moves_the_statistics_of_batches_once_a_batch() -> None:
    plain, contrasted = (in_training(VIT, "image-classification", normalised=True) for _ in range(2))
    contrasted.vault = {f"previous/{block.name}": contrasted.read(block) for block in contrasted.blocks}
    facts = RunInfo(tuple(plain.blocks), rounds=9)
    (batch,) = images().batches(None, None)
    for method, context in (("fedavg", plain), ("moon", contrasted)):
        half = worker_half(MethodSpec(name=method), facts)
        half.setup(context)
        half.loss(context, batch)
    expected, found = dict(plain.model.named_buffers()), dict(contrasted.model.named_buffers())
    assert expected["norm.running_mean"].any()
    assert all(torch.equal(found[name], buffer) for name, buffer in expected.items())


def test_moon_contrasts_the_images_of_a_dual_encoder() -> None:
    clip = Subject(dual("clip"), "contrastive", lambda: pairs("clip"))
    context = in_training(clip.config, clip.head)
    (batch,) = clip.data().batches(None, None)
    _, features = context.forward_with_features(batch)
    images_alone = context.model.vision_model(pixel_values=batch["pixel_values"]).pooler_output
    torch.testing.assert_close(features, images_alone)
    # The second round has the version and the last model to contrast.
    vault = one_task("moon", subject=clip, **SGD)[1].keep
    found, plain = (one_task(method, subject=clip, vault=vault, **SGD)[1].upload for method in ("moon", "fedavg"))
    name = "visual_projection.weight"
    assert not np.array_equal(found[name], plain[name])


def test_moon_refuses_a_model_without_a_head() -> None:
    scaled = RunInfo(block_table(instantiate(dual("siglip"), "contrastive")), 9)
    for half in (half_of("moon"), coordinator_half(MethodSpec(name="moon"), scaled)):
        with pytest.raises(UnsupportedRun, match=r"no module as its head.* begin a run with another method"):
            initial_state(half, State(0, {}))


# ---------------------------------------------------------------- for all of them


@pytest.mark.parametrize("method", variants(["scaffold", "feddyn", "moon"], {"scaffold", "moon"}))
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
    prefix = {"scaffold": "control/", "feddyn": "gradient/"}[method]
    vault: dict[str, Array] = {f"{prefix}{HEAD}": np.full((3, 16), 0.5, np.float32)}
    body = Plan.model_validate(
        {"train": {"exclude": [{"roles": ["head"]}]}, "upload": {"exclude": [{"roles": ["head"]}]}}
    )
    _, result = one_task(method, vault=vault, plan=body, dataset=site_data(1, 8), **SGD)
    assert (result.keep[f"{prefix}{HEAD}"] == 0.5).all()
    assert HEAD not in result.upload


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
    by_examples = {"weigh": "examples"}
    # FedAvg stands still from the second round on.
    for method, rounds, settings in (
        ("fedavg", 3, {}),
        ("scaffold", 6, by_examples),
        ("feddyn", 7, {"alpha": 0.1, **by_examples}),
    ):
        run = Rounds(method, settings, training, only=roles("head"))
        for _ in range(rounds):
            run.play()
        lengths[method] = joint_gradient(run)
    print(lengths)
    assert lengths["scaffold"] < 0.25 * lengths["fedavg"]
    assert lengths["feddyn"] < 0.6 * lengths["fedavg"]
