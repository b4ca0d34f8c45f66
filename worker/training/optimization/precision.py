"""The precision of forward and backward passes."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager

import numpy as np
import torch

from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array
from tessera.worker.training.optimization.bfloat16_products import bfloat16_products

MIN_LOSS_SCALE = 2.0**-24
"""Gradients that overflow float16 at this scale, its smallest positive number, are not finite at any scale."""


SCALE = ("scale", "_growth_tracker")
"""The part of a scaler's state that training changes."""


def gradient_scaler(training: Training, device: torch.device) -> torch.amp.GradScaler:
    """Return a run's loss scaler, without which small gradients vanish in float16.

    On the CPU, 16 bits mean bfloat16, which needs no scaling.
    """
    scaled = training.precision == "float16" and device.type == "cuda"
    return torch.amp.GradScaler(device.type, enabled=scaled)


def scale_of(scaler: torch.amp.GradScaler) -> dict[str, Array]:
    """Return a scaler's scale and its number of steps since the last overflow; nothing for a scaler that is off."""
    state = scaler.state_dict()
    return {name: np.array(state[name], np.float64) for name in SCALE if name in state}


def restore_scale(scaler: torch.amp.GradScaler, kept: Mapping[str, Array]) -> None:
    """Set a scaler's state to that of `scale_of`, unless it is off or there is none."""
    if scaler.is_enabled() and kept:
        scale, steps = (kept[name].item() for name in SCALE)
        scaler.load_state_dict({**scaler.state_dict(), **dict(zip(SCALE, (scale, int(steps)), strict=True))})


def allow_tf32(*, allowed: bool) -> None:
    """Set whether GPUs may compute products of float32 matrices, and convolutions, in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


@contextmanager
def autocast(training: Training, device: torch.device) -> Iterator[None]:
    """Compute forward passes in the run's precision within the block. Without a GPU, bfloat16 replaces float16."""
    if training.precision == "float32":
        yield
        return
    half = torch.float16 if training.precision == "float16" and device.type == "cuda" else torch.bfloat16
    with torch.autocast(device.type, dtype=half), bfloat16_products(training, device):
        yield
