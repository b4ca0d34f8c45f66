"""A step that trains the adapters of some layers, beside all: `python -m benchmarks.chosen_layers [--turns 3]`.

A Llama of 16 layers and 60 million random weights, with LoRA of rank 8 on every matrix. SAFL plans K layers: the last
ones, or layers at equal distances from the first on, so that the backward pass reaches the first layer as it does for
any choice with it. Of each plan: the bytes of its update without a codec, the time of a step, and the memory that
training adds to that of the model. Beside them, a step of a model of K layers: it is what a method could save at most
that leaves the other layers out of the forward pass too. Each arm is a process of its own, in turns, and the medians
are compared. `choice` is what a round adds: the attention of four batches, without training.

`--device cuda` measures 1.1 billion weights in bfloat16, of 22 layers; `--turns 1` is enough there.
"""

from __future__ import annotations

import argparse
import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, Literal

import torch

from benchmarks.large_base import LARGE, SMALL
from benchmarks.measuring import MIB, OUT, Results, forget_peak, median, own_peak_bytes, resident_bytes
from benchmarks.steps import Bench
from tessera.shared.host_memory import return_freed_memory
from tessera.shared.methods.base import MethodSpec, Participant, RunInfo, State
from tessera.shared.methods.registry import coordinator_half, worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.model.spec import Lora
from tessera.shared.run_settings import Training
from tessera.worker.data.dataset import Dataset
from tessera.worker.training.batches import Batches

LLAMA = {
    "hidden_size": 512, "intermediate_size": 1408, "num_hidden_layers": 16, "num_attention_heads": 8,
    "num_key_value_heads": 4, "vocab_size": 12_000,
}  # fmt: skip
WORKER = Participant("site/worker", 64)


@dataclass(frozen=True)
class Size:
    device: Literal["cpu", "cuda"]
    config: dict[str, Any]
    batch: int
    tokens: int
    precision: Literal["float32", "bfloat16"] = "float32"

    @property
    def layers(self) -> int:
        return int(self.config["num_hidden_layers"])


CPU = Size("cpu", LLAMA, batch=4, tokens=64)
CUDA = Size("cuda", {**LARGE, "dtype": "bfloat16"}, batch=8, tokens=512, precision="bfloat16")
QUICK = Size("cpu", SMALL, batch=2, tokens=8)


@dataclass(frozen=True)
class Arm:
    """What trains. Its method is SAFL with these settings; without them all weights of a model without adapters."""

    trains: str
    layers: int
    """The number of layers that train."""
    settings: dict[str, Any] | None
    dropped: bool = False
    """True if the model has these layers alone."""
    chooses: bool = False
    """True if the choice is measured, and no step."""


@dataclass(frozen=True)
class Cost:
    upload_bytes: int
    seconds: float
    """Of a step: of this process's processors, or passed on a GPU."""
    bytes: int
    """The most memory of the steps, less the memory of the model."""


def arms(layers: int) -> Iterator[Arm]:
    yield Arm("all weights", layers, None)
    # Of a model with adapters the head would train too, which is larger than all adapters.
    adapters: dict[str, Any] = {"always": []}
    yield Arm("all adapters", layers, adapters | {"score": "last", "layers": layers})
    for count in sorted({layers // 2, round(layers / 3), layers // 8 or 1}, reverse=True):
        spread = [f"*.layers.{place * layers // count}" for place in range(count)]
        last = adapters | {"score": "last", "layers": count}
        yield Arm("last", count, last)
        yield Arm("spread", count, adapters | {"score": "fixed", "fixed": spread})
        yield Arm("last, others dropped", count, last, dropped=True)
    yield Arm("choice", round(layers / 3), adapters | {"tokens": {"where": "last"}}, chooses=True)


def measure(arm: Arm, size: Size, steps: int) -> Cost:
    """Return what an arm costs. It is meant for a process of its own, whose peak of memory begins here."""
    bench = Bench(torch.device(size.device), size.batch)
    config = {"model_type": "llama", **size.config}
    if arm.dropped:
        config["num_hidden_layers"] = arm.layers
    lora = None if arm.settings is None else Lora(rank=8, alpha=16)
    context = bench.work_on(config, "causal-lm", lora=lora)
    ids = torch.randint(
        config["vocab_size"], (4 * size.batch, size.tokens), generator=torch.Generator().manual_seed(0)
    )
    data = Dataset({"input_ids": ids, "attention_mask": torch.ones_like(ids), "labels": ids})
    train, spec = EVERYTHING, MethodSpec(name="safl", settings=arm.settings or {})
    facts = RunInfo(tuple(context.blocks), 1, training=Training(), lora=lora)
    if arm.settings is not None:
        context.plan = coordinator_half(spec, facts).plan_for(State(0, {}), WORKER)
        train = facts.trained(context.plan.train)
    take = bench.arm(context, train, data, precision=size.precision)
    if arm.chooses:

        def take(count: int) -> None:
            for _ in range(count):
                worker_half(spec, facts).select(context, Batches(data, size.batch, bench.device))

    # The first step imports and allocates; the moments and gradients of a task end with it.
    take(1)
    before = _memory(bench)
    began = bench.clock()
    take(steps)
    seconds = (bench.clock() - began) / steps
    peak = torch.cuda.max_memory_allocated() if size.device == "cuda" else own_peak_bytes(os.getpid())
    upload = 0 if arm.chooses else sum(block.nbytes for block in train.resolve(context.blocks))
    return Cost(upload, seconds, peak - before)


def _memory(bench: Bench) -> int:
    """Return the bytes of the model, from which on a peak counts."""
    if bench.device.type == "cuda":
        torch.cuda.reset_peak_memory_stats()
        return torch.cuda.memory_allocated()
    return_freed_memory()
    forget_peak(os.getpid())
    return resident_bytes([os.getpid()])


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.chosen_layers", description=__doc__)
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--steps", type=int, default=5, help="steps of an arm in a turn")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="a small model, once: to see that it works")
    given = parser.parse_args(arguments)
    size = replace(QUICK, device=given.device) if given.quick else {"cpu": CPU, "cuda": CUDA}[given.device]
    turns, steps = (1, 1) if given.quick else (given.turns, given.steps)
    every = list(arms(size.layers))
    results = Results(
        "chosen_layers" if size.device == "cpu" else "chosen_layers-cuda",
        f"a step on {size.batch} texts of {size.tokens} tokens, {size.layers} layers, {size.precision}, AdamW",
    )
    # One process at a time, and a new one for each measurement.
    context = get_context("forkserver")
    context.set_forkserver_preload(["benchmarks.steps", "peft"])
    with ProcessPoolExecutor(1, context, max_tasks_per_child=1) as processes:
        costs = [[processes.submit(measure, arm, size, steps).result() for arm in every] for _ in range(turns)]
    middle = [
        Cost(each[0].upload_bytes, median(cost.seconds for cost in each), round(median(cost.bytes for cost in each)))
        for each in zip(*costs, strict=True)
    ]
    whole = next(cost for arm, cost in zip(every, middle, strict=True) if arm.trains == "all adapters")
    for arm, cost in zip(every, middle, strict=True):
        results.add(
            trains=arm.trains,
            layers=arm.layers,
            upload_kB=cost.upload_bytes / 1000,
            ms=1000 * cost.seconds,
            of_all=cost.seconds / whole.seconds,
            MiB=cost.bytes / MIB,
            memory_of_all=cost.bytes / whole.bytes,
        )
    results.finish(given.out)


if __name__ == "__main__":
    main()
