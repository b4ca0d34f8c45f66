"""Models of wanted sizes with random weights, and data for workers that will not look at them."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
from safetensors.numpy import save_file

from benchmarks.federation import DATASET, PAIRS
from tessera.examples.processes import Processes, tessera
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName
from tessera.shared.model.spec import Model
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.model_folder import ModelFolder


def bert(hidden: int, layers: int, vocabulary: int, heads: int, positions: int) -> dict[str, Any]:
    return {
        "model_type": "bert", "vocab_size": vocabulary, "hidden_size": hidden, "num_hidden_layers": layers,
        "num_attention_heads": heads, "intermediate_size": 4 * hidden, "max_position_embeddings": positions,
        "num_labels": 2,
    }  # fmt: skip


@dataclass(frozen=True)
class Payload:
    """A model by the megabytes of its float32 weights."""

    config: Mapping[str, Any]
    head: str = "text-classification"
    options: tuple[str, ...] = ()


_SIZES = {
    "0.01": bert(12, 1, 20, 2, 8),
    "1": bert(96, 2, 300, 2, 64),
    "10": bert(256, 3, 300, 4, 64),
    "100": bert(512, 8, 300, 8, 64),
    "440": bert(768, 12, 30522, 12, 512),
}

_TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP_SIDE = 224
"""Pixels of the images that CLIP takes by default."""

PAYLOADS: Mapping[str, Payload] = {
    **{size: Payload(config) for size, config in _SIZES.items()},
    # CLIP ViT-B/32, with sixteen prompt tokens for its text tower.
    "prompts": Payload({"model_type": "clip", "projection_dim": 512}, "contrastive", ("--text-prompts", "16")),
    "few prompts": Payload(
        {
            "model_type": "clip", "projection_dim": 16, "text_config": {**_TOWER, "vocab_size": 64},
            "vision_config": _TOWER,
        }, "contrastive", ("--text-prompts", "4"),
    ),
}  # fmt: skip


TAIL = 8
"""Elements of the last block of `Weights`, too few for a codec to be worthwhile."""


@dataclass(frozen=True)
class Weights:
    """A model that only a coordinator reads, and no worker builds: layers of one block, all alike, and a short block
    at the end."""

    model: Model
    values: Array

    @classmethod
    def of(cls, nbytes: int, layers: int = 4) -> Self:
        """Return weights of about that many bytes of float32."""
        values = np.random.default_rng(0).standard_normal(max(1, nbytes // 4 // layers), np.float32) * np.float32(
            0.02
        )
        blocks = [
            Block(tensor=f"layer.{layer}.weight", role="mlp", layer=layer, shape=values.shape, dtype="F32")
            for layer in range(layers)
        ]
        blocks.append(Block(tensor="last.weight", role="head", layer=None, shape=(TAIL,), dtype="F32"))
        return cls(Model(config={"model_type": "bert"}, head="text-classification", blocks=tuple(blocks)), values)

    def blocks(self) -> Iterator[tuple[Block, memoryview]]:
        for block in self.model.blocks:
            # Were they alike to the bit, one blob would do for all.
            yield block, as_bytes(np.roll(self.values, block.layer or 0)[: block.numel])

    def files(self) -> dict[FileName, bytes]:
        return {}


def make(folder: Path, processes: Processes, size: str) -> ModelFolder:
    """A model folder, made by `tessera model init` in a process of its own, so that this one loads no torch."""
    payload, name = PAYLOADS[size], f"model-{size.replace(' ', '-')}"
    config, out = folder / f"{name}.json", folder / name
    config.write_text(json.dumps(payload.config), encoding="utf-8")
    words = ("--config", str(config), "--head", payload.head, "--random", *payload.options)
    processes.start(name, tessera("model", "init", str(out), *words), {})
    processes.finish(name)
    return ModelFolder.open(out)


def write_examples(folder: Path, count: int = 8) -> dict[str, Path]:
    """Write texts, and images with texts. Return the file of each by the name of its data set."""
    texts = {"input_ids": np.zeros((count, 8), np.int64), "labels": np.zeros(count, np.int64)}
    images = {"pixel_values": np.zeros((count, 3, CLIP_SIDE, CLIP_SIDE), np.float32)}
    files = {DATASET: folder / "texts.safetensors", PAIRS: folder / "pairs.safetensors"}
    save_file(texts, files[DATASET])
    save_file(texts | images, files[PAIRS])
    return files
