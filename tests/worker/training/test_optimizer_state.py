"""An optimizer that goes on from saved tensors makes the steps of one that was never stopped."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from tessera.worker.training.optimization.optimizer_state import optimizer_tensors, set_optimizer_tensors

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]

OPTIMIZERS: dict[str, MakeOptimizer] = {
    "adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1),
    "fused adamw": lambda parameters: torch.optim.AdamW(parameters, lr=0.1, fused=True),
    "momentum": lambda parameters: torch.optim.SGD(parameters, lr=0.1, momentum=0.9),
    "plain sgd": lambda parameters: torch.optim.SGD(parameters, lr=0.1),
}


def step(optimizer: torch.optim.Optimizer, parameters: dict[str, nn.Parameter], number: int) -> None:
    for parameter in parameters.values():
        parameter.grad = torch.full_like(parameter, 0.5 * number) * parameter.detach()
    optimizer.step()


def parameters_from(values: dict[str, Tensor]) -> dict[str, nn.Parameter]:
    return {name: nn.Parameter(value.clone()) for name, value in values.items()}


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_an_optimizer_with_saved_tensors_makes_the_same_next_steps(optimizer: str) -> None:
    start = {"a.weight": torch.arange(6.0).reshape(2, 3), "b.bias": torch.ones(3)}
    whole = parameters_from(start)
    running = OPTIMIZERS[optimizer](list(whole.values()))
    step(running, whole, 1)
    step(running, whole, 2)

    kept = {name: tensor.clone() for name, tensor in optimizer_tensors(running, whole).items()}
    resumed = parameters_from({name: parameter.detach() for name, parameter in whole.items()})
    # The groups' order does not matter: tensors go by name.
    other = OPTIMIZERS[optimizer](list(reversed(resumed.values())))
    set_optimizer_tensors(other, resumed, kept)

    step(running, whole, 3)
    step(other, resumed, 3)
    assert all(torch.equal(whole[name], resumed[name]) for name in whole)
    assert len(kept) == {"adamw": 6, "fused adamw": 6, "momentum": 2, "plain sgd": 0}[optimizer]


def test_a_tensor_of_an_unknown_parameter_is_refused() -> None:
    parameter = nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([parameter])
    with pytest.raises(KeyError, match="bias"):
        set_optimizer_tensors(optimizer, {"a.weight": parameter}, {"b.bias/exp_avg": torch.ones(2)})
