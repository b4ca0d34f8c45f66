"""AdamW over many small tensors, computed as one: calls for each take longer than their arithmetic."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from inspect import unwrap
from typing import Any

import torch
from torch import Tensor, nn

_STEP: Callable[[torch.optim.Optimizer], None] = unwrap(torch.optim.Adam.step)
"""Torch's own step, without the hooks, which are called around ours."""


@dataclass
class _Moments:
    """The moments of a group's parameters, one behind the other."""

    sizes: list[int]
    mean: Tensor
    square: Tensor


def can_join(tensor: Tensor) -> bool:
    """Return whether a tensor may be a parameter of `JoinedAdamW`."""
    return type(tensor) is nn.Parameter and tensor.dtype is torch.float32 and tensor.device.type == "cpu"


class JoinedAdamW(torch.optim.AdamW):
    """AdamW of float32 parameters on the CPU.

    Each element has the operations of torch's own AdamW in the same order, so it has the same bits. From the first
    step on in which a parameter has no gradient, or once `state` was set or asked for, steps are torch's own.
    """

    def __init__(self, params: Any, *, betas: tuple[float, float]) -> None:
        super().__init__(params, betas=betas, foreach=True)
        self._steps = 0
        self._joined: list[_Moments] = []
        self._is_spread = False

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closure is ever given
        """Take a step with the present gradients."""
        if any(parameter.grad is None for group in self.param_groups for parameter in group["params"]):
            self.spread()
        if self._is_spread or self.state:
            _STEP(self)
            return
        if not self._joined:
            self._joined = [_moments(group["params"]) for group in self.param_groups]
        self._steps += 1
        for group, moments in zip(self.param_groups, self._joined, strict=True):
            if moments.sizes:
                _move(group, moments, self._steps)

    def spread(self) -> None:
        """Put the moments so far into `state`, as torch has them, and leave further steps to torch."""
        self._is_spread = True
        if self.state:
            return
        for group, moments in zip(self.param_groups, self._joined, strict=False):
            parts = zip(
                torch.split(moments.mean, moments.sizes), torch.split(moments.square, moments.sizes), strict=True
            )
            for parameter, (mean, square) in zip(group["params"], parts, strict=True):
                self.state[parameter] = {
                    "step": torch.tensor(float(self._steps)),
                    "exp_avg": mean.view(parameter.shape),
                    "exp_avg_sq": square.view(parameter.shape),
                }


def _moments(parameters: Sequence[Tensor]) -> _Moments:
    sizes = [parameter.numel() for parameter in parameters]
    return _Moments(sizes, torch.zeros(sum(sizes)), torch.zeros(sum(sizes)))


def _move(group: dict[str, Any], moments: _Moments, steps: int) -> None:
    """Take a step of a group, as torch's `_multi_tensor_adam` does."""
    parameters, rate, (first, second), decay = (group[name] for name in ("params", "lr", "betas", "weight_decay"))
    gradients = torch.cat([parameter.grad.reshape(-1) for parameter in parameters])
    values = torch.cat([parameter.reshape(-1) for parameter in parameters])
    if decay != 0:
        values.mul_(1 - rate * decay)
    moments.mean.lerp_(gradients, 1 - first)
    moments.square.mul_(second).addcmul_(gradients, gradients, value=1 - second)
    root = moments.square.sqrt().div_((1 - second**steps) ** 0.5).add_(group["eps"])
    values.addcdiv_(moments.mean, root, value=(rate / (1 - first**steps)) * -1)
    for parameter, moved in zip(parameters, torch.split(values, moments.sizes), strict=True):
        parameter.copy_(moved.view(parameter.shape))
