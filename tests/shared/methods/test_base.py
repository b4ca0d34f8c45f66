"""What must hold for every method that is found, whatever it computes."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from pathlib import Path
from random import Random

import numpy as np
import pytest

from tessera.shared.aggregation.local_work import EFFECTIVE_STEPS
from tessera.shared.methods.base import (
    LocalResult,
    MethodSpec,
    Participant,
    Plan,
    RunInfo,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.methods.registry import FOLDERS, coordinator_half, methods, own_file_digest
from tessera.shared.tensors.lazy import ArrayTensor, to_array
from tests.support.tasks import fetched, one_task, subject_of

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


def averages(method: str) -> bool:
    """Whether a method is one of Tessera's, or says that nothing but the mean of the updates counts."""
    if own_file_digest(method) is None:
        return True
    try:
        coordinator_half(MethodSpec(name=method), facts_of(method)).check_merge("secure_sums")
    except UnsupportedRun:
        return False
    return True


AVERAGING = pytest.mark.parametrize("method", [name for name in sorted(methods()) if averages(name)])
"""Methods of which a single update is the next version."""


def started(method: str, round_number: int) -> State:
    half = coordinator_half(MethodSpec(name=method), facts_of(method))
    return half.start(state_at(method, round_number))


def plans_of(method: str, round_number: int, cohort: list[Participant]) -> dict[str, Plan]:
    half = coordinator_half(MethodSpec(name=method), facts_of(method))
    return dict(half.plan(started(method, round_number), cohort, Random(1)))


@cache
def harvest_of(method: str, round_number: int = 0) -> LocalResult:
    plan = plans_of(method, round_number, COHORT[:1])["a/w"]
    given = fetched(started(method, round_number), plan)
    result = one_task(method, round_number=round_number, plan=plan, server_state=given, subject=subject_of(method))[1]
    half = coordinator_half(MethodSpec(name=method), facts_of(method))
    # The worker reports it beside what `collect` returns.
    worked = {EFFECTIVE_STEPS: half.expected_steps(plan, 10)} if half.normalizes else {}
    return replace(result, metrics={**result.metrics, **worked})


def updates_of(method: str) -> list[Update]:
    """An update of each of the cohort, whose blocks are random."""
    rng, result, sent = np.random.default_rng(0), harvest_of(method), []
    extra = {name: ArrayTensor(each.values) for name, each in result.extra.items()}
    for number, (name, plan) in enumerate(sorted(plans_of(method, 0, COHORT).items())):
        asked = plan.upload.resolve(facts_of(method).blocks)
        blocks = {block.name: ArrayTensor(rng.normal(size=block.shape).astype("f4")) for block in asked}
        sent.append(Update(name, 10 + number, blocks, result.metrics, plan=plan, extra=extra))
    return sent


def merged(method: str, updates: list[Update]) -> dict[str, np.ndarray]:
    """The next version's blocks and server state."""
    half = coordinator_half(MethodSpec(name=method), facts_of(method))
    after = half.merge(started(method, 0), updates)
    assert after.round == 1
    return {name: to_array(tensor) for part in (after.model, after.server_state) for name, tensor in part.items()}


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
        assert {name: each.values.shape for name, each in result.extra.items()} == {
            e.name: e.shape for e in plan.extra
        }


@EVERY_METHOD
def test_the_same_updates_give_the_same_bits_and_tensors_of_the_same_shapes(method: str) -> None:
    once, again = (merged(method, updates_of(method)) for _ in range(2))
    assert {name: values.tobytes() for name, values in once.items()} == {
        name: values.tobytes() for name, values in again.items()
    }
    shapes = {name: values.shape for name, values in once.items()}
    assert shapes.items() >= {block.name: block.shape for block in facts_of(method).blocks}.items()


@AVERAGING
def test_a_single_update_is_merged_and_what_it_lacks_stays_as_it_was(method: str) -> None:
    result = harvest_of(method)
    half = coordinator_half(MethodSpec(name=method, settings=SETTINGS.get(method, {})), facts_of(method))
    state = state_at(method, 0)
    sent = {name: ArrayTensor(values) for name, values in result.upload.items()}
    extra = {name: ArrayTensor(each.values) for name, each in result.extra.items()}
    after = half.merge(half.start(state), [Update("a/w", 10, sent, result.metrics, extra=extra)])
    assert after.round == 1
    for name, tensor in after.model.items():
        expected = sent[name] if name in sent else state.model[name]
        np.testing.assert_array_equal(to_array(tensor), to_array(expected), err_msg=name)


@AVERAGING
def test_the_order_in_which_updates_are_given_changes_no_more_than_rounding(method: str) -> None:
    first, *others = updates_of(method)
    in_order = merged(method, [first, *others])
    # The first one comes last, and the last one first.
    for order in ([*others, first], [others[-1], first, *others[:-1]]):
        again = merged(method, order)
        for block in facts_of(method).blocks:
            np.testing.assert_allclose(again[block.name], in_order[block.name], rtol=1e-6, atol=1e-7)


STACKING = """
import numpy as np

from tessera.shared.methods.base import CoordinatorHalf, Method, MethodSettings, Plan, UnsupportedRun
from tessera.shared.model.selectors import roles
from tessera.shared.tensors.lazy import ArrayTensor, to_array


class StackingCoordinator(CoordinatorHalf[MethodSettings]):
    def start(self, state):
        if self.run.lora is None:
            raise UnsupportedRun("stacking needs adapters")
        return state

    def plan_for(self, state, worker):
        return Plan(train=roles("adapter"), upload=roles("adapter"))

    def merge(self, state, updates):
        # The base moves by the mean of the products, and adapters begin at a product of zero again.
        scale, examples = self.run.lora.alpha / self.run.lora.rank, sum(update.examples for update in updates)
        changed = {}
        for name in (name for name in state.model if ".lora_B." in name):
            base, other = name.partition(".lora_B.")[0] + ".base_layer.weight", name.replace("lora_B", "lora_A")
            moved = to_array(state.model[base]).astype(np.float64)
            for update in updates:
                product = to_array(update.blocks[name]) @ to_array(update.blocks[other])
                moved += scale * update.examples / examples * product
            changed[base] = ArrayTensor(moved.astype(np.float32))
            changed[name] = ArrayTensor(np.zeros(state.model[name].shape, np.float32))
        return state.advanced(changed)


METHOD = Method(name="stacking", coordinator=StackingCoordinator, source="FLoRA, arXiv 2409.05976, equation (8)")
"""


def test_a_method_that_does_not_average_passes_what_every_method_must(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "stacking.py").write_text(STACKING)
    monkeypatch.setenv(FOLDERS, str(tmp_path))
    methods.cache_clear()
    try:
        assert not averages("stacking")
        test_settings_survive_the_wire("stacking")
        test_plans_are_the_same_each_time_and_survive_the_wire("stacking")
        test_every_selector_of_every_plan_selects_something("stacking")
        test_nothing_that_is_kept_is_sent_and_nothing_is_sent_that_was_not_asked_for("stacking")
        test_the_same_updates_give_the_same_bits_and_tensors_of_the_same_shapes("stacking")
        one = updates_of("stacking")[0]
        down = next(name for name in one.blocks if ".lora_B." in name)
        assert not merged("stacking", [one])[down].any()
        assert to_array(one.blocks[down]).any()
    finally:
        methods.cache_clear()
