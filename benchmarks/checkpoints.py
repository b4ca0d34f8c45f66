"""Costs of a task's checkpoints: `python -m benchmarks.checkpoints [--minutes 10]`.

A ViT trains with AdamW in a process of its own, which writes a checkpoint after each step and ends before the last
one. Another process resumes. A checkpoint's time is given as a share of a task's time with one every `--minutes`.
Memory is the peak of anonymous memory: files that are read through a map are not part of it.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from time import monotonic
from typing import Any

from benchmarks.measuring import MIB, OUT, PeakMemory, Results, anonymous_bytes, apart, median

STEPS = 5
BATCH = 2
WIDTHS = (384, 768)
"""Of a ViT-S and a ViT-B."""
MOST_SHARE = 0.03


class Interrupted(Exception):
    """The end of the process that writes checkpoints."""


def measure(folder: Path, width: int, *, every_step: bool) -> dict[str, float]:
    """Train from the start, or from a checkpoint in the folder. Return seconds and the peak of memory."""
    # The process that starts this one has no need of torch.
    import torch  # noqa: PLC0415

    from tessera.shared.methods.base import MethodSpec, Plan, RunInfo  # noqa: PLC0415
    from tessera.shared.methods.registry import worker_half  # noqa: PLC0415
    from tessera.shared.run_settings import Training  # noqa: PLC0415
    from tessera.worker.data.dataset import Dataset  # noqa: PLC0415
    from tessera.worker.model.block_map import block_table  # noqa: PLC0415
    from tessera.worker.model.build import instantiate  # noqa: PLC0415
    from tessera.worker.state.checkpoints import CheckpointKey, Checkpoints  # noqa: PLC0415
    from tessera.worker.training.checkpoints import CheckpointFile, Position, TrainingCheckpoints  # noqa: PLC0415
    from tessera.worker.training.context import LocalTaskContext  # noqa: PLC0415
    from tessera.worker.training.setup import TrainingSetup  # noqa: PLC0415
    from tessera.worker.training.trainer import Trainer  # noqa: PLC0415

    seconds: list[float] = []

    class Timed(TrainingCheckpoints):
        def write(self, position: Position, document: dict[str, Any], tensors: Mapping[str, torch.Tensor]) -> None:
            began = monotonic()
            super().write(position, document, tensors)
            seconds.append(monotonic() - began)

    key = CheckpointKey(**{name: 1 if name == "round" else "x" for name in CheckpointKey.model_fields})
    config: dict[str, Any] = {
        "model_type": "vit", "image_size": 32, "patch_size": 16, "hidden_size": width, "num_hidden_layers": 12,
        "num_attention_heads": width // 32, "intermediate_size": 4 * width, "num_labels": 10,
    }  # fmt: skip
    model = instantiate(config, "image-classification", seed=1)
    examples = STEPS * BATCH
    data = Dataset({"pixel_values": torch.randn(examples, 3, 32, 32), "labels": torch.arange(examples) % 10})
    context = LocalTaskContext(model, "image-classification", Plan(), block_table(model))
    training = Training(batch_size=BATCH, optimizer="adamw")
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1, training=training))
    stored = CheckpointFile.of(Checkpoints(folder).of_task(key))
    checkpoints = Timed(stored, 0 if every_step else float("inf"))

    def check() -> None:
        if len(seconds) == STEPS - 1:
            raise Interrupted

    trainer = Trainer(half, context, training, TrainingSetup(torch.device("cpu")), check, checkpoints=checkpoints)
    began = monotonic()
    with PeakMemory({"own": [os.getpid()]}, 0.002, anonymous_bytes) as memory, suppress(Interrupted):
        trainer.train(half.phases(context, half.select(context, ())), data, seed=0)
    train_s = monotonic() - began
    file_bytes = sum(path.stat().st_size for path in folder.glob("*/checkpoint-*"))
    return {
        "weights": sum(parameter.numel() for parameter in model.parameters()),
        "file_MiB": file_bytes / MIB,
        "checkpoint_s": median(seconds),
        "train_s": train_s,
        "peak_MiB": memory.peaks["own"] / MIB,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.checkpoints", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="between two checkpoints")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--width", type=int, default=0, help=argparse.SUPPRESS)
    parser.add_argument("--every-step", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(given.measure, given.width, every_step=given.every_step)))
        return
    results = Results("checkpoints", f"a checkpoint of a ViT under AdamW, every {given.minutes:g} minutes")
    for width in (32, 64) if given.quick else WIDTHS:
        with tempfile.TemporaryDirectory(prefix="tessera-checkpoints-") as name:
            command = ("benchmarks.checkpoints", "--measure", name, "--width", str(width))
            plain = apart(*command)
            writing = apart(*command, "--every-step")
            resuming = apart(*command)
        share = writing["checkpoint_s"] / (60 * given.minutes)
        results.add(
            weights=writing["weights"],
            file_MiB=writing["file_MiB"],
            checkpoint_s=writing["checkpoint_s"],
            share=share,
            resume_s=resuming["train_s"],
            plain_peak_MiB=plain["peak_MiB"],
            writing_peak_MiB=writing["peak_MiB"],
            resuming_peak_MiB=resuming["peak_MiB"],
        )
        results.aim(f"share of the time at width {width}", share, MOST_SHARE)
    most = resuming["peak_MiB"] / plain["peak_MiB"]
    results.aim("memory of resuming beside that of starting", most, 1.05)
    results.finish(given.out)


if __name__ == "__main__":
    main()
