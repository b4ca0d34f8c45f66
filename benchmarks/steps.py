"""Time of a training step by what trains, beside full training: `python -m benchmarks.steps [--turns 5]`.

Frozen layers below the lowest trained block cost no backward pass. Each arm takes a few steps in turn, so that a busy
machine slows all of them alike, and the medians of the turns are compared. A plain PyTorch loop over the same batches
is one of the arms.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from time import process_time
from typing import Any

import torch

from benchmarks.measuring import OUT, Results, median
from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.blocks import layers_of
from tessera.shared.model.selectors import EVERYTHING, Selector, all_but, named, roles
from tessera.shared.model.spec import Head, Lora, Prompts
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer

CPU = torch.device("cpu")
BATCH = 16
Arm = Callable[[int], None]
"""A function that takes this many steps."""


def vit(width: int, layers: int, side: int) -> dict[str, Any]:
    return {
        "model_type": "vit", "image_size": side, "patch_size": 8, "num_channels": 3, "num_labels": 10,
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width,
    }  # fmt: skip


def clip(width: int, layers: int, side: int) -> dict[str, Any]:
    tower = {
        "hidden_size": width, "num_hidden_layers": layers, "num_attention_heads": 4, "intermediate_size": 4 * width,
    }  # fmt: skip
    return {
        "model_type": "clip", "projection_dim": width,
        "vision_config": {**tower, "image_size": side, "patch_size": 8},
        "text_config": {**tower, "vocab_size": 100, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    }  # fmt: skip


def images(side: int, *, texts: bool = False) -> Dataset:
    dice = torch.Generator().manual_seed(0)
    pixels = torch.randn(4 * BATCH, 3, side, side, generator=dice)
    classes = torch.randint(3, 100, (10, 8), generator=dice)
    classes[:, -1] = 2
    labels = torch.randint(0, 10, (4 * BATCH,), generator=dice)
    common = {"input_ids": classes} if texts else {}
    return Dataset({"pixel_values": pixels, "labels": labels}, common=common)


def work_on(config: dict[str, Any], head: Head = "image-classification", **more: Any) -> LocalTaskContext:
    model = instantiate(config, head, seed=0, **more)
    return LocalTaskContext(model, head, Plan(), block_table(model))


def arm(context: LocalTaskContext, train: Selector, data: Dataset) -> Arm:
    """Return the steps of the trainer where these blocks train."""

    def steps(count: int) -> None:
        training = Training(steps=count, batch_size=BATCH)
        half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), 1, training=training))
        Trainer(half, context, training, TrainingSetup(CPU), lambda: None).train([Phase(train)], data, 0)

    return steps


def plain(context: LocalTaskContext, data: Dataset) -> Arm:
    """Return the steps of a plain loop over the same model and batches."""

    def steps(count: int) -> None:
        model = context.model.train().requires_grad_()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, weight_decay=0.01)
        made = 0
        while made < count:
            for rows in torch.split(torch.randperm(data.examples), BATCH)[: count - made]:
                optimizer.zero_grad()
                loss = model(**{name: tensor[rows] for name, tensor in data.tensors.items()}).loss
                loss.backward()
                optimizer.step()
                loss.item()
                made += 1

    return steps


def in_turns(arms: dict[str, Arm], turns: int, steps: int) -> dict[str, float]:
    """Return the median processor time of a step in each arm, in seconds."""
    found: dict[str, list[float]] = {name: [] for name in arms}
    for turn in range(turns + 1):
        for name, take in arms.items():
            began = process_time()
            take(steps)
            if turn:  # the first allocates
                found[name].append((process_time() - began) / steps)
    return {name: median(seconds) for name, seconds in found.items()}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.steps", description=__doc__)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--steps", type=int, default=4, help="steps of an arm in a turn")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    given = parser.parse_args(arguments)
    width, layers, side = (16, 3, 16) if given.quick else (192, 12, 64)
    turns, steps = (1, 1) if given.quick else (given.turns, given.steps)
    data, context = images(side), work_on(vit(width, layers, side))
    blocks = layers_of([block for block in context.blocks if block.layer is not None])

    def layer_blocks(places: Sequence[int]) -> Selector:
        heads = [block.name for block in context.blocks if block.role == "head"]
        return named([*(block.name for place in places for block in blocks[place].blocks), *heads])

    third = layers // 3
    adapted = work_on(vit(width, layers, side), lora=Lora(rank=8, alpha=16))
    dual = work_on(clip(width, max(1, layers // 3), side), "contrastive", prompts=Prompts(vision=4, text=4))
    arms = {
        "full": arm(context, EVERYTHING, data),
        "plain loop": plain(context, data),
        "all_but_qk": arm(context, all_but("query", "key"), data),
        "last third": arm(context, layer_blocks(range(layers - third, layers)), data),
        "v_head": arm(context, roles("value", "head"), data),
        f"SAFL, {third} layers": arm(context, layer_blocks(range(2, layers, 3)), data),
        "LoRA": arm(adapted, roles("adapter", "head"), data),
        "head": arm(context, roles("head"), data),
        "dual encoder, full": arm(dual, all_but("prompt"), images(side, texts=True)),
        "dual encoder, prompts": arm(dual, roles("prompt"), images(side, texts=True)),
    }
    results = Results(
        "steps", f"a step on {BATCH} images of {side} x {side}, {layers} layers of width {width}, AdamW"
    )
    seconds = in_turns(arms, turns, steps)
    for name, each in seconds.items():
        whole = seconds["dual encoder, full" if name.startswith("dual") else "full"]
        results.add(trains=name, ms=1000 * each, of_full=each / whole)
    for name, limit in (("last third", 0.62), ("v_head", 0.75), ("LoRA", 0.78), ("head", 0.45)):
        results.aim(f"{name}, of full training", seconds[name] / seconds["full"], limit)
    results.aim("trainer, of a plain loop", seconds["full"] / seconds["plain loop"], 1 / 0.95)
    results.finish(given.out)


if __name__ == "__main__":
    main()
