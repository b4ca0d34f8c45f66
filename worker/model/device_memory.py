"""The memory that a task needs on its device, and what is available there."""

from collections.abc import Collection, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from statistics import fmean

import torch

from tessera.shared.host_memory import available_bytes, return_freed_memory
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.worker.model.four_bits import stored_bytes

MARGIN_BYTES = 128 << 20
"""For activations, at least, and the libraries' own buffers."""

GRADIENT_BYTES = 4
MOMENT_BYTES = 4

MEMINFO = Path("/proc/meminfo")

UNREADABLE = (OSError, ValueError, AttributeError, RuntimeError, ImportError, AssertionError)
"""Errors of values that the driver does not report."""


def needed_bytes(
    blocks: Iterable[Block],
    trained: Iterable[Block],
    training: Training,
    four_bits: Collection[str] = (),
    shards: int = 1,
) -> int:
    """Return the bytes of a model's blocks, and of gradients and optimizer moments in float32 of the trained ones,
    with a margin. Activations depend on the batch and are not counted. `four_bits` names the matrices in 4 bits,
    and `shards` is the number of devices that divide all this."""
    moments = 2 if training.optimizer == "adamw" else int(training.momentum > 0)
    each = GRADIENT_BYTES + moments * MOMENT_BYTES
    nbytes = stored_bytes(blocks, four_bits) + each * sum(block.numel for block in trained)
    return MARGIN_BYTES + -(-nbytes // shards)


def free_bytes(device: torch.device, meminfo: Path = MEMINFO) -> int:
    """Return the bytes that this process can still take on a device."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        # torch keeps freed memory.
        return int(free) + torch.cuda.memory_reserved(device) - torch.cuda.memory_allocated(device)
    limit = available_bytes()
    try:
        lines = dict(line.split(":", 1) for line in meminfo.read_text().splitlines())
        return min(limit, int(lines["MemAvailable"].split()[0]) << 10)
    except (OSError, KeyError, ValueError):
        return limit


def use_of_gpus(devices: Sequence[torch.device]) -> dict[str, float]:
    """Return the memory of the GPUs, the part of it that is in use and their load, without those that the driver does
    not report. Empty for CPUs."""
    use: dict[str, float] = {}
    if devices[0].type != "cuda":
        return use
    if len(devices) == 1:
        with suppress(*UNREADABLE):
            free, use["gpu_memory_bytes"] = torch.cuda.mem_get_info(devices[0])
            use["gpu_memory_used_bytes"] = use["gpu_memory_bytes"] - free
    else:
        # Other processes use these. To ask for the free memory as above would take some of each for this process.
        with suppress(*UNREADABLE):
            use["gpu_memory_bytes"] = sum(torch.cuda.get_device_properties(gpu).total_memory for gpu in devices)
            use["gpu_memory_used_bytes"] = sum(map(torch.cuda.device_memory_used, devices))
    with suppress(*UNREADABLE):
        use["gpu_use"] = fmean(map(torch.cuda.utilization, devices)) / 100
    return use


def return_unused_memory() -> None:
    """Give the memory that this process no longer uses back to the machine, and to the GPUs for their other users."""
    return_freed_memory()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
