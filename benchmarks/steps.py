"""Time of a training step by what trains, beside full training: `python -m benchmarks.steps [--turns 5]`.

Frozen layers below the lowest trained block cost no backward pass. Each arm takes a few steps in turn, so that a busy
machine slows all of them alike, and the medians of the turns are compared. A plain PyTorch loop over the same batches
is one of the arms.

`--device cuda` measures a ViT-B/16 on images of 224 x 224 in seconds of the GPU, with the memory of each arm, and
full training in each precision, compiled, and with differential privacy.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from time import perf_counter, process_time
from typing import Any

import torch

from benchmarks.measuring import MIB, OUT, Results, median
from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.blocks import layers_of
from tessera.shared.model.selectors import EVERYTHING, Selector, all_but, named, roles
from tessera.shared.model.spec import Head, Lora
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.run_settings import Training
from tessera.worker.compute import Compute
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.sampling import sampling
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.precision import allow_tf32, gradient_scaler
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer

BATCH = 16
GPU_BATCH = 64
Arm = Callable[[int], None]
"""A function that takes this many steps."""


def vit(width: int, layers: int, side: int, patch: int = 8, heads: int = 4) -> dict[str, Any]:
    return {
        "model_type": "vit", "image_size": side, "patch_size": patch, "num_channels": 3, "num_labels": 10,
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * width,
    }  # fmt: skip


def images(side: int, count: int) -> Dataset:
    dice = torch.Generator().manual_seed(0)
    pixels = torch.randn(count, 3, side, side, generator=dice)
    labels = torch.randint(0, 10, (count,), generator=dice)
    return Dataset({"pixel_values": pixels, "labels": labels})


@dataclass(frozen=True)
class Bench:
    """The device, and the size of batches."""

    device: torch.device
    batch: int

    def work_on(self, config: dict[str, Any], head: Head = "image-classification", **more: Any) -> LocalTaskContext:
        model = instantiate(config, head, seed=0, **more).to(self.device)  # type: ignore[arg-type]
        return LocalTaskContext(model, head, Plan(), block_table(model))

    def trainer(self, context: LocalTaskContext, steps: int, compute: Compute, **more: Any) -> Trainer:
        training = Training(steps=steps, batch_size=self.batch, **more)
        half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), 1, training=training))
        scaler = gradient_scaler(training, self.device)
        return Trainer(
            half, context, training, TrainingSetup(self.device, compute=compute), lambda: None, scaler=scaler
        )

    def arm(
        self, context: LocalTaskContext, train: Selector, data: Dataset, compute: Compute | None = None, **more: Any
    ) -> Arm:
        """Return the steps of the trainer where these blocks train."""

        def steps(count: int) -> None:
            allow_tf32(allowed=bool(compute and compute.tf32))
            self.trainer(context, count, compute or Compute(), **more).train([Phase(train)], data, 0)
            allow_tf32(allowed=False)

        return steps

    def private(self, context: LocalTaskContext, train: Selector, data: Dataset) -> Arm:
        """Return noisy gradients, without the optimizer's step."""

        def steps(count: int) -> None:
            trainer = self.trainer(context, count, Compute())
            trainer.half.setup(context)
            context.model.train(mode=False)
            freeze = Freeze(context.model, train.resolve(context.blocks), keep_buffers=True)
            how = Mechanism(sampling(data.examples, self.batch), 1.0, 1.0)
            noisy = NoisyGradients(trainer, freeze, data, how, NoiseSource(bytes(32)))
            for _ in range(count):
                noisy.fill()
            noisy.close()

        return steps

    def plain(self, context: LocalTaskContext, data: Dataset) -> Arm:
        """Return the steps of a plain loop over the same model and batches, in float32."""

        def steps(count: int) -> None:
            model = context.model.train().requires_grad_()
            optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
            made = 0
            while made < count:
                for rows in torch.split(torch.randperm(data.examples), self.batch)[: count - made]:
                    optimizer.zero_grad()
                    batch = {name: tensor[rows].to(self.device) for name, tensor in data.tensors.items()}
                    loss = model(**batch).loss
                    loss.backward()
                    optimizer.step()
                    loss.item()
                    made += 1

        return steps

    def clock(self) -> float:
        """Return seconds: of this process's processors, or passed once the GPU has done its work."""
        if self.device.type == "cpu":
            return process_time()
        torch.cuda.synchronize()
        return perf_counter()

    def in_turns(self, arms: dict[str, Arm], turns: int, steps: int) -> tuple[dict[str, float], dict[str, float]]:
        """Return the median time of a step in each arm, in seconds, and the peak of the GPU's memory in MiB."""
        found: dict[str, list[float]] = {name: [] for name in arms}
        peaks: dict[str, float] = {}
        for turn in range(turns + 1):
            for name, take in arms.items():
                if self.device.type == "cuda":
                    torch.cuda.reset_peak_memory_stats()
                began = self.clock()
                take(steps)
                if turn:  # the first allocates
                    found[name].append((self.clock() - began) / steps)
                if self.device.type == "cuda":
                    peaks[name] = torch.cuda.max_memory_allocated() / MIB
        return {name: median(seconds) for name, seconds in found.items()}, peaks


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.steps", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of an arm in a turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    on_gpu = given.device == "cuda"
    width, layers, side, patch, heads = (768, 12, 224, 16, 12) if on_gpu else (192, 12, 64, 8, 4)
    turns, steps = given.turns, given.steps
    if given.quick:
        width, layers, side, patch, heads = 16, 3, 16, 8, 4
        turns, steps = 1, 1
    bench = Bench(torch.device(given.device), GPU_BATCH if on_gpu else BATCH)
    config = vit(width, layers, side, patch, heads)
    data, context = images(side, 4 * bench.batch), bench.work_on(config)
    blocks = layers_of([block for block in context.blocks if block.layer is not None])

    def layer_blocks(places: Sequence[int]) -> Selector:
        heads = [block.name for block in context.blocks if block.role == "head"]
        return named([*(block.name for place in places for block in blocks[place].blocks), *heads])

    third = layers // 3
    adapted = bench.work_on(config, lora=Lora(rank=8, alpha=16))
    arms = {
        "full": bench.arm(context, EVERYTHING, data),
        "plain loop": bench.plain(context, data),
        "all_but_qk": bench.arm(context, all_but("query", "key"), data),
        "last third": bench.arm(context, layer_blocks(range(layers - third, layers)), data),
        "v_head": bench.arm(context, roles("value", "head"), data),
        f"SAFL, {third} layers": bench.arm(context, layer_blocks(range(2, layers, 3)), data),
        "LoRA": bench.arm(adapted, roles("adapter", "head"), data),
        "head": bench.arm(context, roles("head"), data),
    }
    apart = bench.work_on(config)
    arms["head, private"] = bench.private(apart, roles("head"), data)
    full_private = {"full, private": bench.private(apart, EVERYTHING, data)}
    alone: dict[str, Arm] = {}
    """Arms that take too long for several turns."""
    if on_gpu:
        arms |= {
            "full, TF32": bench.arm(context, EVERYTHING, data, Compute(tf32=True)),
            "full, bfloat16": bench.arm(context, EVERYTHING, data, precision="bfloat16"),
            "full, float16": bench.arm(context, EVERYTHING, data, precision="float16"),
        }
        alone = {
            **full_private,
            "full, bfloat16, compiled": bench.arm(
                context, EVERYTHING, data, Compute(compile=True), precision="bfloat16"
            ),
        }
    else:
        arms |= full_private
    where = f" on a {torch.cuda.get_device_name()}" if on_gpu else ""
    results = Results(
        "steps-cuda" if on_gpu else "steps",
        f"a step on {bench.batch} images of {side} x {side}, {layers} layers of width {width}, AdamW{where}",
    )
    seconds: dict[str, float] = {}
    for group, count in ((arms, turns), (alone, 1)):
        found, peaks = bench.in_turns(group, count, steps)
        seconds |= found
        for name, each in found.items():
            memory = {"MiB": peaks[name]} if on_gpu else {}
            results.add(trains=name, ms=1000 * each, of_full=each / seconds["full"], **memory)
    if not on_gpu:
        for name, limit in (("last third", 0.62), ("v_head", 0.75), ("LoRA", 0.78), ("head", 0.45)):
            results.aim(f"{name}, of full training", seconds[name] / seconds["full"], limit)
    results.aim("trainer, of a plain loop", seconds["full"] / seconds["plain loop"], 1 / 0.95)
    results.finish(given.out)


if __name__ == "__main__":
    main()
