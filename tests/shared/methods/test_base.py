"""What must hold for every method that is found, whatever it computes."""

from __future__ import annotations

from functools import cache
from random import Random

import numpy as np
import pytest

from tessera.shared.methods.base import LocalResult, MethodSpec, Participant, Plan, RunInfo, State, Update
from tessera.shared.methods.registry import coordinator_half, methods
from tessera.shared.tensors.lazy import ArrayTensor, to_array
from tests.support.tasks import one_task, subject_of

EVERY_METHOD = pytest.mark.parametrize("method", sorted(methods()))
SETTINGS = {"feddyn": {"alpha": 0.0}}
"""For methods that by default merge to something beyond what was sent."""
COHORT = [Participant(name, 10) for name in ("a/w", "b/w", "c/w")]


@cache
def facts_of(method: str) -> RunInfo:
    # Some methods take no other optimizer.
    return subject_of(method).facts(optimizer="sgd")


def state_at(method: str, round_number: int) -> State:
    blocks = facts_of(method).blocks
    return State(round_number, {block.name: ArrayTensor(np.zeros(block.shape, np.float32)) for block in blocks})


def plans_of(method: str, round_number: int, cohort: list[Participant]) -> dict[str, Plan]:
    half = coordinator_half(MethodSpec(name=method), facts_of(method))
    return dict(half.plan(half.start(state_at(method, round_number)), cohort, Random(1)))


@cache
def harvest_of(method: str, round_number: int = 0) -> LocalResult:
    return one_task(method, round_number=round_number, subject=subject_of(method))[1]


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
                assert not selector or selector.resolve(facts_of(method).blocks)


@EVERY_METHOD
def test_nothing_that_is_kept_is_sent_and_nothing_is_sent_that_was_not_asked_for(method: str) -> None:
    for round_number in (0, 9):
        result = harvest_of(method, round_number)
        plan = plans_of(method, round_number, COHORT[:1])["a/w"]
        asked = {block.name for block in plan.upload.resolve(facts_of(method).blocks)}
        assert bool(result.upload) == bool(asked)
        assert set(result.upload) <= asked
        assert not set(result.upload) & set(result.keep)


@EVERY_METHOD
def test_a_single_update_is_merged_and_what_it_lacks_stays_as_it_was(method: str) -> None:
    result = harvest_of(method)
    half = coordinator_half(MethodSpec(name=method, settings=SETTINGS.get(method, {})), facts_of(method))
    state = state_at(method, 0)
    sent = {name: ArrayTensor(values) for name, values in result.upload.items()}
    after = half.merge(half.start(state), [Update("a/w", 10, sent, result.metrics)])
    assert after.round == 1
    for name, tensor in after.model.items():
        expected = sent[name] if name in sent else state.model[name]
        np.testing.assert_array_equal(to_array(tensor), to_array(expected), err_msg=name)


@EVERY_METHOD
def test_the_order_in_which_updates_are_given_changes_no_more_than_rounding(method: str) -> None:
    rng = np.random.default_rng(0)
    result = harvest_of(method)
    updates = [
        Update(
            worker.name,
            10 + i,
            {b.name: ArrayTensor(rng.normal(size=b.shape).astype("f4")) for b in facts_of(method).blocks},
            result.metrics,
        )
        for i, worker in enumerate(COHORT)
    ]
    merged = []
    # Each comes first, in the middle and last.
    for order in (updates, [*updates[1:], updates[0]], [updates[2], *updates[:2]]):
        half = coordinator_half(MethodSpec(name=method), facts_of(method))
        merged.append(half.merge(half.start(state_at(method, 0)), order).model)
    for model in merged[1:]:
        for name, tensor in model.items():
            np.testing.assert_allclose(to_array(tensor), to_array(merged[0][name]), rtol=1e-6, atol=1e-7)
