"""The memory that a task needs on its device, and what is available there."""

from collections.abc import Collection, Iterable
from pathlib import Path

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


def return_unused_memory() -> None:
    """Give the memory that this process no longer uses back to the machine, and to the GPUs for their other users."""
    return_freed_memory()
    if torch.cuda.is_initialized():  # type: ignore[no-untyped-call]
        torch.cuda.empty_cache()
