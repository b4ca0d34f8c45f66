"""What must hold for every method that is found, whatever it computes."""

from __future__ import annotations

from itertools import permutations
from random import Random

import numpy as np
import pytest

from shared.methods import Chosen, coordinator_half, methods
from shared.methods.contract import Participant, Plan, RunFacts, State, Update
from shared.tensors import ArrayTensor, to_array
from shared.training import Training
from tests.support.tasks import VIT, one_task
from worker.blockmap import block_table
from worker.models import instantiate

EVERY_METHOD = pytest.mark.parametrize("method", sorted(methods()))
BLOCKS = block_table(instantiate(VIT, "image-classification", seed=1))
# Some methods take no other optimizer.
FACTS = RunFacts(BLOCKS, rounds=10, training=Training(optimizer="sgd"))
SETTINGS = {"feddyn": {"alpha": 0.0}}
"""For methods that by default merge to something beyond what was sent."""
COHORT = [Participant(name, 10) for name in ("a/w", "b/w", "c/w")]


def state_at(round_number: int) -> State:
    return State(round_number, {b.name: ArrayTensor(np.zeros(b.shape, np.float32)) for b in BLOCKS})


def plans_of(method: str, round_number: int, cohort: list[Participant]) -> dict[str, Plan]:
    half = coordinator_half(Chosen(name=method), FACTS)
    return dict(half.plan(half.start(state_at(round_number)), cohort, Random(1)))


@EVERY_METHOD
def test_settings_survive_the_wire(method: str) -> None:
    settings = methods()[method].settings()
    assert type(settings).model_validate_json(settings.model_dump_json()) == settings


@EVERY_METHOD
def test_plans_are_the_same_each_time_and_survive_the_wire(method: str) -> None:
    for round_number in range(10):
        plans = plans_of(method, round_number, COHORT)
        assert plans == plans_of(method, round_number, COHORT)
        assert plans == {name: Plan.model_validate_json(plan.model_dump_json()) for name, plan in plans.items()}


@EVERY_METHOD
def test_every_selector_of_every_plan_selects_something(method: str) -> None:
    for round_number in range(10):
        for plan in plans_of(method, round_number, COHORT).values():
            for selector in (plan.fetch, plan.train, plan.upload):
                # Nothing at all is what a plan may ask for; a match for nothing is a misspelling.
                assert not selector or selector.resolve(BLOCKS)


@EVERY_METHOD
def test_nothing_that_is_kept_is_sent_and_nothing_is_sent_that_was_not_asked_for(method: str) -> None:
    for round_number in (0, 9):
        _, harvest = one_task(method, round_number=round_number)
        asked = {b.name for b in plans_of(method, round_number, COHORT[:1])["a/w"].upload.resolve(BLOCKS)}
        assert bool(harvest.upload) == bool(asked)
        assert set(harvest.upload) <= asked
        assert not set(harvest.upload) & set(harvest.keep)


@EVERY_METHOD
def test_a_single_update_is_merged_and_what_it_lacks_stays_as_it_was(method: str) -> None:
    _, harvest = one_task(method)
    half, state = coordinator_half(Chosen(name=method, settings=SETTINGS.get(method, {})), FACTS), state_at(0)
    sent = {name: ArrayTensor(values) for name, values in harvest.upload.items()}
    after = half.merge(half.start(state), [Update("a/w", 10, sent, harvest.numbers)])
    assert after.round == 1
    for name, tensor in after.model.items():
        expected = sent[name] if name in sent else state.model[name]
        np.testing.assert_array_equal(to_array(tensor), to_array(expected), err_msg=name)


@EVERY_METHOD
def test_the_order_in_which_updates_are_given_changes_no_more_than_rounding(method: str) -> None:
    rng = np.random.default_rng(0)
    _, harvest = one_task(method)
    updates = [
        Update(
            worker.name,
            10 + i,
            {b.name: ArrayTensor(rng.normal(size=b.shape).astype("f4")) for b in BLOCKS},
            harvest.numbers,
        )
        for i, worker in enumerate(COHORT)
    ]
    merged = []
    for order in permutations(updates):
        half = coordinator_half(Chosen(name=method), FACTS)
        merged.append(half.merge(half.start(state_at(0)), order).model)
    for model in merged[1:]:
        for name, tensor in model.items():
            np.testing.assert_allclose(to_array(tensor), to_array(merged[0][name]), rtol=1e-6, atol=1e-7)
