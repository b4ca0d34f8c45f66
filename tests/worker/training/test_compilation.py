"""Compiled training: the gradients of the model's own code, and the same names."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from torch import Tensor

from tessera.shared.methods.base import Plan
from tessera.shared.model.selectors import EVERYTHING, Selector, all_but, roles
from tessera.worker.compute import Compute
from tessera.worker.model.block_map import block_table
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.compilation import compiled
from tests.support.tasks import ADAPTED, PLAIN, Subject, one_task

# Of modules that the compiler imports.
pytestmark = pytest.mark.filterwarnings("ignore:.*is deprecated:DeprecationWarning")


def gradients(context: LocalTaskContext, train: Selector) -> dict[str, Tensor]:
    Freeze(context.model, train.resolve(context.blocks))
    context.model.zero_grad()
    (batch,) = PLAIN.data().batches(None)
    context.forward(batch).loss.backward()
    parameters = context.model.named_parameters()
    return {name: each.grad.clone() for name, each in parameters if each.grad is not None}


def compare(subject: Subject, backend: str, *trained: Selector) -> None:
    """Compare first gradients, for one trained set after the other."""
    model = subject.model()
    context = LocalTaskContext(model, subject.head, Plan(), block_table(model))
    names = set(model.state_dict())
    for train in trained:
        own = gradients(context, train)
        with compiled(model, partial(torch.compile, backend=backend)):
            assert set(model.state_dict()) == names
            found = gradients(context, train)
        assert found.keys() == own.keys()
        for name, gradient in own.items():
            torch.testing.assert_close(found[name], gradient, rtol=1e-4, atol=1e-6)


def test_the_traced_model_has_the_gradients_of_its_own_code() -> None:
    compare(PLAIN, "eager", roles("value"))


@pytest.mark.long
@pytest.mark.parametrize("subject", [PLAIN, ADAPTED])
def test_the_compiled_model_has_the_gradients_of_its_own_code(subject: Subject) -> None:
    compare(subject, "inductor", EVERYTHING, roles("value"), all_but("value"), EVERYTHING)


@pytest.mark.long
def test_compiled_training_ends_near_the_weights_of_plain_training() -> None:
    (plain, _), (fast, _) = (
        one_task("fedrep", compute=Compute(compile=flag), learning_rate=1e-3) for flag in (False, True)
    )
    for block in plain.blocks:
        torch.testing.assert_close(
            *(torch.from_numpy(each.read(block)) for each in (plain, fast)), rtol=1e-3, atol=1e-4
        )


def test_a_model_that_reads_its_features_runs_its_own_code_for_them() -> None:
    model = PLAIN.model()
    context = LocalTaskContext(model, PLAIN.head, Plan(), block_table(model))
    (batch,) = PLAIN.data().batches(None)
    expected = context.forward_with_features(batch)[1]
    with compiled(model, partial(torch.compile, backend="eager")):
        context.forward(batch)
        assert torch.equal(context.forward_with_features(batch)[1], expected)
    assert "forward" not in vars(model)
