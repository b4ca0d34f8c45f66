"""The precision of forward and backward passes."""

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext

import torch

from tessera.shared.run_settings import Training

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


def scale_of(scaler: torch.amp.GradScaler) -> dict[str, float]:
    """Return a scaler's scale and its number of steps since the last overflow; nothing for a scaler that is off."""
    state = scaler.state_dict()
    return {name: float(state[name]) for name in SCALE if name in state}


def restore_scale(scaler: torch.amp.GradScaler, kept: Mapping[str, float]) -> None:
    """Set a scaler's state to that of `scale_of`, unless it is off or there is none."""
    if scaler.is_enabled() and kept:
        scale, steps = (kept[name] for name in SCALE)
        scaler.load_state_dict({**scaler.state_dict(), **dict(zip(SCALE, (scale, int(steps)), strict=True))})


def allow_tf32(*, allowed: bool) -> None:
    """Set whether GPUs may compute products of float32 matrices, and convolutions, in TF32."""
    torch.backends.cuda.matmul.allow_tf32 = allowed
    torch.backends.cudnn.allow_tf32 = allowed


def multiplies_bfloat16() -> bool:
    """Return True if this machine's CPU has instructions for products of bfloat16. Without them torch takes 3 to 70
    times as long as in float32."""
    has_library: bool = torch.backends.mkldnn.is_available()  # type: ignore[no-untyped-call]
    return has_library and bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())  # noqa: SLF001


def half_of(training: Training, device: torch.device) -> torch.dtype | None:
    """Return the type of passes in 16 bits; None if they are in float32.

    A CPU computes in bfloat16 in place of float16, and in float32 if it has no instructions for bfloat16.
    """
    if training.precision == "float32" or (device.type == "cpu" and not multiplies_bfloat16()):
        return None
    return torch.float16 if training.precision == "float16" and device.type == "cuda" else torch.bfloat16


def autocast(training: Training, device: torch.device) -> AbstractContextManager[object]:
    """Return the context in which forward passes are computed in the run's precision."""
    half = half_of(training, device)
    return torch.autocast(device.type, dtype=half) if half else nullcontext()
