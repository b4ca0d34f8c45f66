"""How fast updates merge, alone and with each server optimizer: `python -m benchmarks.merging [MILLIONS [UPDATES]]`.

One block of that many million float32 parameters is merged from that many raw updates in memory, its result thrown
away: arithmetic alone, without codec, hash or disk. Printed is the size of the updates per CPU second, and what share
of it the plain mean has. The optimizers' moments are there already, as in every round but the first.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence

import numpy as np

from shared.blocks import Block
from shared.methods.contract import CoordinatorHalf, MethodSettings, RunFacts, State, Update
from shared.server_optimizer import Adagrad, Adam, Momentum, Plain, Rule, Yogi, merge
from shared.tensors import ArrayTensor, lockstep

OPTIMIZERS: tuple[Rule, ...] = (Plain(), Momentum(learning_rate=0.5, momentum=0.9), Adam(), Yogi(), Adagrad())
TRIES = 3


def seconds_to_merge(optimizer: Rule, base: ArrayTensor, sent: Sequence[ArrayTensor]) -> float:
    """CPU seconds of the fastest of `TRIES` merges of one block: other programs on the machine count less so."""
    block = Block(tensor="w", role="mlp", shape=base.shape, dtype=base.dtype)
    half = CoordinatorHalf(MethodSettings(), RunFacts((block,), rounds=1))
    memory = {f"server/{letter}/w": base for letter in "mv"}
    updates = [Update(f"{index}/w", 10, {"w": tensor}) for index, tensor in enumerate(sent)]
    taken = []
    for _ in range(TRIES):
        merged = merge(half, optimizer, State(0, {"w": base}, memory), updates)
        new = [tensor for tensor in (*merged.model.values(), *merged.memory.values()) if tensor is not base]
        began = time.process_time()
        for _ in lockstep(new):
            pass
        taken.append(time.process_time() - began)
    return min(taken)


def main(millions: int = 25, count: int = 8) -> None:
    rng = np.random.default_rng(0)
    base, *sent = (
        ArrayTensor(rng.random(millions * 1_000_000, dtype=np.float32) * np.float32(0.02)) for _ in range(count + 1)
    )
    gigabytes = count * base.values.nbytes / 1e9
    print(f"{count} updates of {millions} M parameters, {gigabytes:.1f} GB in all, one thread")
    mean = 0.0
    for optimizer in OPTIMIZERS:
        speed = gigabytes / seconds_to_merge(optimizer, base, sent)
        mean = mean or speed
        name = str(optimizer.model_dump()["kind"])
        print(f"{name:8} {speed:5.2f} GB/CPU s  {speed / mean:4.0%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
