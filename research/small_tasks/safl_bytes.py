"""What SAFL saves in each direction, counted on block tables: `python -m small_tasks.safl_bytes [K [PRUNE]]`.

The paper (arXiv 2504.11793) trains K = 8 of 24 layers and says that it saves 75 % of the communication: 60 points by
the choice of layers and 15 by pruning. Here the plans of the method itself are counted, block by block, against a
FedAvg round that moves the whole model up and down. No weights are needed: the models are laid out without storage.

An update saves what is in no chosen layer. A download is what anybody changed: where workers choose by themselves,
the union of their choices, here of independent draws, which is the worst that can happen (expected: all layers times
1 - (1 - K/L)^N); where they train the same layers, no more than an update. Pruned rows are zeros in a difference,
which cost next to nothing encoded and are counted as nothing; they come down all the same.
"""

from __future__ import annotations

import sys
from collections.abc import Collection, Iterator, Mapping, Sequence
from math import prod
from random import Random
from typing import Any

import torch

from tessera.shared.methods.base import MethodSpec, Participant, Plan, RunInfo, State
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate

CLAIMED = 0.75
DRAWS = 50
COHORTS = (3, 5, 10)

GROUPED = {"num_attention_heads": 32, "num_key_value_heads": 8, "num_labels": 10}
CONFIGS: Mapping[str, Mapping[str, Any]] = {
    "24 layers, llama of 1.1 B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 5632, "num_hidden_layers": 24,
        "vocab_size": 32000, **GROUPED,
    },
    "24 layers, bert-large": {
        "model_type": "bert", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24,
        "num_attention_heads": 16, "vocab_size": 30522, "num_labels": 10,
    },
    "16 layers, Llama 3.2 1B": {
        "model_type": "llama", "hidden_size": 2048, "intermediate_size": 8192, "num_hidden_layers": 16,
        "vocab_size": 128256, **GROUPED,
    },
}  # fmt: skip
"""Llama of 24 layers is what the paper calls its model, and Llama 3.2 1B the only one of that name."""


def blocks_of(config: Mapping[str, Any]) -> tuple[Block, ...]:
    with torch.device("meta"):
        return block_table(instantiate(config, "text-classification"))


def plans(blocks: tuple[Block, ...], workers: int, seed: int, **settings: Any) -> list[Plan]:
    """What the method asks of so many workers in one round."""
    half = coordinator_half(MethodSpec(name="safl", settings=settings), RunInfo(blocks, rounds=1))
    state = half.start(State(0, {}))
    cohort = [Participant(str(number), 1) for number in range(workers)]
    return list(half.plan(state, cohort, Random(seed)).values())  # noqa: S311 (no secret: the same each time)


def nbytes(blocks: Collection[Block]) -> int:
    return sum(block.nbytes for block in blocks)


def pruned_bytes(blocks: Collection[Block], share: float) -> int:
    """What the rows of the layers' matrices come to that are given their old value back."""
    matrices = (block for block in blocks if block.layer is not None and len(block.shape) > 1)
    return sum(
        int(share * block.shape[0]) * prod(block.shape[1:]) * NUMPY_DTYPES[block.dtype].itemsize for block in matrices
    )


def union_bytes(blocks: tuple[Block, ...], workers: int, count: int) -> float:
    """The mean over draws of what so many workers change together if each draws its layers by itself."""
    total = 0
    for seed in range(DRAWS):
        asked = plans(blocks, workers, seed, score="random", layers=count)
        total += nbytes({block.name: block for plan in asked for block in plan.upload.resolve(blocks)}.values())
    return total / DRAWS


def rows(blocks: tuple[Block, ...], count: int, prune: float) -> Iterator[tuple[str, float, float]]:
    """Of each way to take part, the bytes up and down for one worker and round."""
    [same] = plans(blocks, 1, 0, score="last", layers=count)
    sent = same.upload.resolve(blocks)
    up, spared = nbytes(sent), pruned_bytes(sent, prune)
    yield "all choose the same", up, up
    yield f"  and {prune:.1%} of rows pruned", up - spared, up
    for workers in COHORTS:
        union = union_bytes(blocks, workers, count)
        yield f"{workers} workers, each by itself", up, union
        yield f"  and {prune:.1%} of rows pruned", up - spared, union


def table(blocks: tuple[Block, ...], count: int, prune: float) -> Iterator[str]:
    whole = nbytes(blocks)
    for name, up, down in rows(blocks, count, prune):
        saved = [1 - up / whole, 1 - down / whole, 1 - (up + down) / (2 * whole)]
        yield f"  {name:34}" + "".join(f"{share:9.1%}" for share in saved)


def main(count: int = 8, prune: float = 0.375) -> None:
    print(f"saved against the whole model each way; the paper says {CLAIMED:.0%}\n")
    for name, config in CONFIGS.items():
        blocks = blocks_of(config)
        layered = nbytes([block for block in blocks if block.layer is not None])
        print(f"{name}, K = {count}: {nbytes(blocks) / 1e9:.2f} GB, of it {layered / nbytes(blocks):.1%} in layers")
        print(f"  {'':34}" + "".join(f"{way:>9}" for way in ("up", "down", "both")))
        for line in table(blocks, count, prune):
            print(line)
        print()


def arguments(given: Sequence[str]) -> tuple[Any, ...]:
    return tuple(kind(text) for kind, text in zip((int, float), given, strict=False))


if __name__ == "__main__":
    main(*arguments(sys.argv[1:]))
