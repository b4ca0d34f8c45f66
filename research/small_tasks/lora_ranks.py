"""Scores of LoRA with sites of mixed ranks, by average: `python -m small_tasks.lora_ranks [--seeds 5]`.

A small vision transformer is trained on digits that lie on their side. Three sites with other classes each then adapt
it to upright digits, its head as it is: all with the smallest rank, all with the largest, or each with its own. The
difference is to the smallest rank, from the same seed.
"""

from __future__ import annotations

import argparse
import statistics
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from common.figures import Results
from tessera.shared.model.blocks import Role
from tessera.shared.model.spec import Head, Lora, stored_name
from tessera.shared.tensors.lazy import Array
from tessera.simulation import Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import instantiate, read_block

VIT: dict[str, Any] = {
    "model_type": "vit", "image_size": 8, "patch_size": 2, "num_channels": 1, "num_labels": 10, "hidden_size": 32,
    "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 64, "hidden_dropout_prob": 0.0,
    "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
HEAD: Head = "image-classification"
RANKS = {"north": 1, "south": 2, "west": 8}
ROLES: tuple[Role, ...] = ("query", "key", "value", "output", "mlp")
ARMS: dict[str, tuple[tuple[int, ...], dict[str, Any]]] = {
    "rank 1 at all sites": ((1,), {}),
    "rank 8 at all sites": ((8,), {}),
    "mixed, factors": ((1, 2, 8), {}),
    "mixed, partition": ((1, 2, 8), {"average": "partition"}),
    "mixed, stack": ((1, 2, 8), {"average": "stack"}),
    "mixed, residual": ((1, 2, 8), {"average": "residual"}),
}
"""The ranks of the model, and the settings of the method."""
TRAINING = {"optimizer": "adamw", "learning_rate": 0.003, "batch_size": 32, "weight_decay": 0.0}


def base(seed: int) -> dict[str, Array]:
    """Return the values of the model that has learnt digits on their side."""
    images = load("digits", {"split": "train"})
    turned = Dataset({**images.tensors, "pixel_values": images.tensors["pixel_values"].transpose(2, 3)})
    start = Weights.of(instantiate(VIT, HEAD, seed=seed), VIT, HEAD)
    spec = {"method": {"name": "fedavg"}, "rounds": 1, "seed": seed, "training": {**TRAINING, "epochs": 20}}
    return simulate(spec, start, {"centre": turned}).arrays(1)


def adapted(values: dict[str, Array], ranks: Sequence[int], seed: int) -> Weights:
    """Return the model with adapters; their scale is the same for all ranks."""
    whole = max(ranks)
    lora = Lora(rank=whole, alpha=2 * whole, roles=ROLES, ranks=tuple(ranks) if len(ranks) > 1 else ())
    model = instantiate(VIT, HEAD, seed=seed, lora=lora)
    blocks, tensors = block_table(model), named_tensors(model)
    start = {b.name: values.get(stored_name(b.name), read_block(tensors, b)) for b in blocks}
    document = Weights.of(model, VIT, HEAD).model.model_copy(update={"lora": lora, "blocks": blocks})
    return Weights(document, start)


def sites(seed: int) -> dict[str, Dataset]:
    """Divide the upright digits by class: each site has most of a third of the classes, and a tenth of the others."""
    images, rng = load("digits", {"split": "train"}), np.random.default_rng(seed)
    labels = images.tensors["labels"].numpy()
    home = np.where(rng.random(len(labels)) < 0.8, labels % 3, rng.integers(0, 3, len(labels)))
    return {name: images.rows(torch.from_numpy(np.flatnonzero(home == place))) for place, name in enumerate(RANKS)}


def score(values: dict[str, Array], arm: str, rounds: int, seed: int) -> float:
    ranks, settings = ARMS[arm]
    spec = {
        "method": {"name": "lora", "settings": {"train_head": False, **settings}},
        "rounds": rounds,
        "seed": seed,
        "training": {**TRAINING, "epochs": 1},
        "lora_ranks": RANKS if len(ranks) > 1 else {},
        "evaluation": {"dataset": "test", "every": rounds},
    }
    test = load("digits", {"split": "test"})
    return simulate(spec, adapted(values, ranks, seed), sites(seed), test=test).scores()[rounds]["accuracy"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=6)
    chosen = parser.parse_args()
    seeds = range(1, chosen.seeds + 1)
    bases = {seed: base(seed) for seed in seeds}
    results = Results("lora_ranks", "Accuracy of LoRA with sites of mixed ranks on digits, by average")
    smallest: list[float] = []
    for arm in ARMS:
        found = [score(bases[seed], arm, chosen.rounds, seed) for seed in seeds]
        smallest = smallest or found
        differences = [one - other for one, other in zip(found, smallest, strict=True)]
        accuracy, mean = statistics.fmean(found), statistics.fmean(differences)
        spread = statistics.stdev(differences) if len(differences) > 1 else None
        results.add(arm=arm, accuracy=accuracy, difference=mean, deviation=spread)
    results.show()
    results.write()


if __name__ == "__main__":
    main()
