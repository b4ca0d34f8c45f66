"""What FedFrozen's measuring adds to a merge: `python -m small_tasks.warmup_cost [LAYERS [UPDATES]]`.

Layers of a transformer of width 768, in float32, are merged from updates in the lossless codec: decoded, averaged and
hashed, in memory, without a disk. Once as FedAvg does it and once as FedFrozen does in its warm-up, which reads query
and key, a sixth of a layer, a second time to see how far clients agree.
"""

from __future__ import annotations

import hashlib
import sys
import time
from collections.abc import Mapping, Sequence
from io import BytesIO

import numpy as np

from tessera.shared.methods.base import MethodSpec, RunInfo, State, Update
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block, Role
from tessera.shared.tensors.lazy import ArrayTensor, Tensor, as_bytes
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import TrainedBlock, read_update, write_update

WIDTH = 768
SHAPES: dict[Role, tuple[int, int]] = {
    "query": (WIDTH, WIDTH),
    "key": (WIDTH, WIDTH),
    "value": (WIDTH, WIDTH),
    "output": (WIDTH, WIDTH),
    "mlp": (WIDTH, 8 * WIDTH),
}
TRIES = 3
FEDAVG = MethodSpec(name="fedavg")
FEDFROZEN = MethodSpec(name="fedfrozen", settings={"signals": True})


def table(layers: int) -> tuple[Block, ...]:
    return tuple(
        Block(tensor=f"{layer}.{role}", role=role, layer=layer, shape=shape, dtype="F32")
        for layer in range(layers)
        for role, shape in SHAPES.items()
    )


def drawn(shape: tuple[int, int], size: float, rng: np.random.Generator) -> np.ndarray:
    return rng.standard_normal(shape, dtype=np.float32) * np.float32(size)


def update_of(
    blocks: Sequence[Block], model: Mapping[str, ArrayTensor], rng: np.random.Generator
) -> Mapping[str, Tensor]:
    """An update as it came over the wire, its steps a hundredth of the weights' size."""
    file = BytesIO()
    steps = {block.name: drawn(SHAPES[block.role], 2e-4, rng) for block in blocks}
    values = {name: ArrayTensor(model[name].values + step) for name, step in steps.items()}
    write_update(
        file, pipeline.LOSSLESS, [TrainedBlock(block, values[block.name], model[block.name]) for block in blocks]
    )
    data = file.getvalue()
    return read_update(lambda: BytesIO(data), len(data), {block.name: block for block in blocks}, model)


def seconds_to_merge(method: MethodSpec, state: State, updates: Sequence[Update], facts: RunInfo) -> float:
    """CPU seconds of the fastest of `TRIES`: other programs on the machine count less so."""
    taken = []
    for _ in range(TRIES):
        began = time.process_time()
        merged = coordinator_half(method, facts).merge(state, updates)
        for tensor in merged.model.values():
            digest = hashlib.sha256()
            for chunk in tensor.chunks():
                digest.update(as_bytes(chunk))
        taken.append(time.process_time() - began)
    return min(taken)


def main(layers: int = 4, count: int = 8) -> None:
    rng, blocks = np.random.default_rng(0), table(layers)
    model = {block.name: ArrayTensor(drawn(SHAPES[block.role], 2e-2, rng)) for block in blocks}
    updates = [Update(f"{index}/w", 10, update_of(blocks, model, rng)) for index in range(count)]
    facts, state = RunInfo(blocks, rounds=10), State(0, model)
    print(f"{count} updates of {sum(block.numel for block in blocks) / 1e6:.1f} M parameters, one thread")
    plain, watched = (seconds_to_merge(method, state, updates, facts) for method in (FEDAVG, FEDFROZEN))
    print(f"fedavg    {plain:6.2f} CPU s")
    print(f"fedfrozen {watched:6.2f} CPU s in its warm-up, {watched / plain - 1:+.0%}")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
