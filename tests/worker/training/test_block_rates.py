"""Learning rates by the role of a block, as multiples of the run's."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from tessera.shared.methods.base import Phase
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.problems import Invalid
from tessera.simulation import simulate
from tests.support.rounds import SGD, Rounds
from tests.support.tasks import ADAPTED, PLAIN, Subject
from tests.worker.training.test_micro_batch import CASES
from tests.worker.training.test_trainer import GPT2, rates_of, train, work_on
from tests.worker.training.test_training_loss import spec_of, start_of

STEP: dict[str, Any] = {"batch_size": None, "optimizer": "sgd", "learning_rate": 0.1, "weight_decay": 0.0}


def test_each_block_moves_by_the_rate_of_its_role() -> None:
    plain, rated = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0)
    start = {block.name: plain.read(block).copy() for block in plain.blocks}
    train(plain, **STEP)
    train(rated, **STEP, rates={"head": 10.0, "query": 0.5})
    for block in plain.blocks:
        step = plain.read(block) - start[block.name]
        expected = {"head": 10.0, "query": 0.5}.get(block.role, 1.0) * step
        np.testing.assert_allclose(rated.read(block) - start[block.name], expected, rtol=1e-3, atol=1e-6)


@pytest.mark.parametrize(
    ("phase", "private"),
    [
        (Phase(EVERYTHING), 0.3),
        # The method's own rate, which is absolute, has precedence.
        (Phase(EVERYTHING, private_learning_rate=0.7), 0.7),
    ],
)
def test_modules_of_the_method_have_a_rate_of_their_own_and_the_schedule_scales_all(
    phase: Phase, private: float
) -> None:
    context = work_on()
    context.add_private("own", torch.nn.Linear(2, 2))
    rates = {"private": 3.0, "other": 0.1, "head": 2.0}
    with rates_of() as seen:
        train(context, phase, **STEP, rates=rates, schedule="linear", place=(2, 4))
    # A quarter of the run is over. The modules of the method have the role `other`, whose rate is not theirs.
    assert {round(rate, 6) for rate in seen[0]} >= {round(0.75 * rate, 6) for rate in (0.1, 0.2, private)}
    assert len(seen[0]) == 3 + ("other" in {block.role for block in context.blocks})


def test_without_rates_of_their_own_roles_make_one_group() -> None:
    with rates_of() as seen:
        train(work_on(), **STEP, rates={"private": 3.0})
    assert seen == [[0.1]]


def test_fednova_divides_out_the_rates_of_blocks() -> None:
    # As for FedAvg, twice the rate of all blocks is twice the rate of the run.
    roles = sorted({block.role for block in PLAIN.facts().blocks})
    found = [
        Rounds("fednova", training={**SGD, "learning_rate": rate, "epochs": 2, "rates": dict.fromkeys(roles, factor)})
        for rate, factor in ((0.1, 2.0), (0.2, 1.0))
    ]
    for rounds in found:
        rounds.play()
    for name in found[0].state.model:
        np.testing.assert_allclose(found[0].value(name), found[1].value(name), rtol=1e-4, atol=1e-6)


def test_a_run_trains_its_adapters_faster_than_its_head() -> None:
    start, moved = start_of(ADAPTED), {}
    for factor in (1.0, 4.0):
        spec = spec_of(rates={"adapter": factor})
        result = simulate({**spec, "method": {"name": "lora"}}, start, {"a": ADAPTED.data()})
        moved[factor] = {name: values - start.values[name] for name, values in result.arrays().items()}
    for block in start.model.blocks:
        factor = 4.0 if block.role == "adapter" else 1.0
        np.testing.assert_allclose(moved[4.0][block.name], factor * moved[1.0][block.name], rtol=1e-3, atol=1e-6)
    assert any(np.abs(moved[1.0][block.name]).max() > 0 for block in start.model.blocks if block.role == "adapter")


@pytest.mark.parametrize(
    ("subject", "method", "rates", "said"),
    [
        (PLAIN, "fedavg", {"heads": 2.0}, r"no block of the model has the role 'heads'; it has embedding, head,"),
        (
            Subject(GPT2, "causal-lm", lambda: CASES["continuations"][2]),
            "fedavg",
            {"value": 2.0},
            "is one tensor of the roles query and value, which need the same rate: set both alike",
        ),
        (PLAIN, "scaffold", {"head": 2.0}, r"leave training\.rates out, or set strength to 0"),
    ],
)
def test_rates_that_a_run_cannot_have_are_refused_at_its_creation(
    subject: Subject, method: str, rates: dict[str, float], said: str
) -> None:
    with pytest.raises(Invalid) as raised:
        simulate({**spec_of(rates=rates), "method": {"name": method}}, start_of(subject), {"a": subject.data()})
    (fault,) = raised.value.errors
    assert fault.pointer == ("/method" if method == "scaffold" else "/training/rates")
    assert said.replace("\\", "") in fault.detail


def test_a_rate_of_modules_that_the_method_does_not_add_fails_the_task_before_data_are_read() -> None:
    with pytest.raises(Exception, match=r"training\.rates\.private is for modules .* fedavg adds none: leave it out"):
        simulate(spec_of(rates={"private": 2.0}), start_of(PLAIN), {"a": PLAIN.data()})
