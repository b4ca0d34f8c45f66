"""The precision of forward and backward passes."""

from contextlib import AbstractContextManager, nullcontext

import torch

from tessera.shared.run_settings import Training

MIN_LOSS_SCALE = 2.0**-24
"""Gradients that overflow float16 at this scale, its smallest positive number, are not finite at any scale."""


def gradient_scaler(training: Training, device: torch.device) -> torch.amp.GradScaler:
    """Return a run's loss scaler, without which small gradients vanish in float16.

    On the CPU, 16 bits mean bfloat16, which needs no scaling.
    """
    scaled = training.precision == "float16" and device.type == "cuda"
    return torch.amp.GradScaler(device.type, enabled=scaled)


def autocast(training: Training, device: torch.device) -> AbstractContextManager[object]:
    """Return the context of the forward pass's precision. Where there is no GPU, bfloat16 replaces float16."""
    if training.precision == "float32":
        return nullcontext()
    half = torch.float16 if training.precision == "float16" and device.type == "cuda" else torch.bfloat16
    return torch.autocast(device.type, dtype=half)
