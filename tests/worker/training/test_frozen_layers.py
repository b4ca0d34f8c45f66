"""Layers below the lowest trained block take part in no backward pass."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from tessera.shared.model.blocks import Role
from tessera.shared.model.selectors import Selector, named, roles
from tessera.worker.model.block_map import block_table
from tessera.worker.training.freeze import Freeze
from tests.support.tasks import ADAPTED, PLAIN, Subject


def layers_of(model: nn.Module) -> list[nn.Module]:
    return next(list(each) for each in model.modules() if isinstance(each, nn.ModuleList))


def second_layer(subject: Subject, *without: Role) -> Selector:
    blocks = [block for block in subject.blocks if block.layer == 1 and block.role not in without]
    return named([block.name for block in blocks])


@pytest.mark.parametrize(
    ("subject", "train", "expected"),
    [
        (PLAIN, roles("head"), [False, False]),
        (PLAIN, second_layer(PLAIN), [False, True]),
        (PLAIN, roles("value", "head"), [True, True]),
        (ADAPTED, roles("adapter"), [True, True]),
        (ADAPTED, second_layer(ADAPTED, "query", "key", "value", "output", "mlp", "norm"), [False, True]),
    ],
)
def test_gradients_flow_from_the_lowest_trained_block_upwards(
    subject: Subject, train: Selector, expected: list[bool]
) -> None:
    model, seen = subject.model(), []
    Freeze(model, train.resolve(block_table(model)))

    def watch(_: nn.Module, inputs: tuple[Tensor, ...], output: Any) -> None:
        seen.append((inputs[0].requires_grad, (output[0] if isinstance(output, tuple) else output).requires_grad))

    for layer in layers_of(model):
        layer.register_forward_hook(watch)
    (batch,) = subject.data().batches(None)
    model(**batch)
    # The embeddings' output, which is frozen in all of these, needs none either.
    assert seen[0][0] is False
    assert [needed for _, needed in seen] == expected
