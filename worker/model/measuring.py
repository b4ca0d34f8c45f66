"""Running a model to learn something about it, and leaving it as it was."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import nn


@contextmanager
def measuring(model: nn.Module) -> Iterator[None]:
    """Within, the model is in evaluation mode. Afterwards its modules' modes, what of it needs gradients, and the
    state of torch's random numbers are what they were."""
    modes = [(module, module.training) for module in model.modules()]
    needs = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
    devices = sorted({parameter.device.index for parameter, _ in needs if parameter.is_cuda})
    model.train(mode=False)
    try:
        with torch.random.fork_rng(devices=devices):
            yield
    finally:
        for module, training in modes:
            module.training = training
        for parameter, needed in needs:
            parameter.requires_grad_(needed)
