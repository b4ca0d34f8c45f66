"""The memory that a task needs on its device, and the free memory there."""

from pathlib import Path

import torch

from tessera.shared.host_memory import available_bytes
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training
from tessera.worker.model.device_memory import MARGIN_BYTES, free_bytes, needed_bytes

CPU = torch.device("cpu")


def test_weights_gradients_and_moments_of_the_trained_blocks_are_counted() -> None:
    base = Block(tensor="base", role="mlp", shape=(1000,), dtype="BF16")
    adapter = Block(tensor="adapter", role="adapter", shape=(10,), dtype="F32")
    stored = MARGIN_BYTES + 2 * 1000 + 4 * 10
    assert needed_bytes([base, adapter], [adapter], Training(optimizer="adamw")) == stored + 10 * (4 + 8)
    assert needed_bytes([base, adapter], [adapter], Training(optimizer="sgd", momentum=0.9)) == stored + 10 * (4 + 4)
    assert needed_bytes([base, adapter], [adapter], Training(optimizer="sgd")) == stored + 10 * 4
    assert needed_bytes([base, adapter], [], Training()) == stored


def test_what_linux_calls_available_is_free_on_the_cpu(tmp_path: Path) -> None:
    meminfo = tmp_path / "meminfo"
    meminfo.write_text("MemTotal:  9 kB\nMemFree:  1 kB\nMemAvailable:       4 kB\n")
    assert free_bytes(CPU, meminfo) == 4096
    assert free_bytes(CPU, tmp_path / "none") == available_bytes()
