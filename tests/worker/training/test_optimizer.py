"""The optimizer of a phase, beside torch's plain one."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.run_settings import Training
from tessera.worker.training.optimization.optimizer import optimizer_of

ADAM: dict[str, Any] = {"optimizer": "adamw", "weight_decay": 0.01}
HEAVY: dict[str, Any] = {"optimizer": "sgd", "momentum": 0.9, "weight_decay": 0.01}


def laid_out(values: Tensor, layout: str) -> Tensor:
    return {"rows": values.clone(), "columns": values.t().clone().t(), "expanded": values[:, :1].expand(6, 8)}[layout]


def after_steps(optimizer: torch.optim.Optimizer, weight: nn.Parameter, layout: str) -> Tensor:
    for number in range(1, 4):
        weight.grad = laid_out(torch.linspace(-1, 2, 48).mul(number).sin().reshape(6, 8), layout)
        optimizer.step()
    return weight.detach()


@pytest.mark.parametrize("of_weight", ["rows", "columns"])
@pytest.mark.parametrize("of_gradient", ["rows", "columns", "expanded"])
@pytest.mark.parametrize("settings", [ADAM, HEAVY], ids=["adamw", "sgd"])
def test_the_order_of_weights_and_gradients_in_memory_changes_no_step(
    of_weight: str, of_gradient: str, settings: dict[str, Any]
) -> None:
    training, values = Training(learning_rate=0.1, batch_size=1, **settings), torch.linspace(-1, 1, 48).reshape(6, 8)
    weight, plain = nn.Parameter(laid_out(values, of_weight)), nn.Parameter(values.clone())
    rates = {"lr": 0.1, "weight_decay": 0.01, "foreach": False}
    reference = (
        torch.optim.AdamW([plain], **rates) if settings is ADAM else torch.optim.SGD([plain], momentum=0.9, **rates)
    )
    found = after_steps(optimizer_of({(0.1, 0.01): [weight]}, training), weight, of_gradient)
    torch.testing.assert_close(found, after_steps(reference, plain, of_gradient), rtol=1e-6, atol=1e-6)
