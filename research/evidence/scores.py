"""What a run's versions score on test parts, measured after the run.

The product measures one central data set. Several parts, of which most versions need only some examples, are measured
here on the versions that a simulation kept, with its own forward pass. Macro F1 is over the classes among the true or
predicted labels, as in the product.
"""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.metrics import f1_score

from common.names import LABELS, PERSONAL
from tessera.shared.model.spec import MODALITIES
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation import Result
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import load, write_block
from tessera.worker.model.forward import forward
from tessera.worker.model.prompts import prompts_of
from tessera.worker.training.optimization.image_features import READ_BY_TOWER, ImageFeatures, images_once
from tessera.worker.training.optimization.precision import autocast

BATCH = 128
ROUNDED = 5
MASK = "attention_mask"

Labels = NDArray[np.int64]


@dataclass(frozen=True)
class Part:
    """Examples to measure versions on."""

    name: str
    data: Dataset
    whole: Collection[int]
    """The versions that are measured on all examples."""
    curve: Collection[int]
    """The versions that are measured on the first `curve_examples`."""
    curve_examples: int
    site: str = ""


def measured(result: Result, start: Path, parts: Sequence[Part], device: str) -> list[dict[str, Any]]:
    """Return a row for each part and version: `part`, `site`, `version`, `curve`, `examples`, `accuracy`, `macro_f1`.

    Forward passes are in the precision of the run's training. A version on both lists of a part has two rows. Scores
    are from 0 to 1. Raises NotFound for a version that the simulation did not keep.
    """
    folder = ModelFolder.open(start)
    model, blocks, head = load(folder), folder.model.blocks, folder.model.head
    # transformers annotates `to` as if it were called without its model.
    model.to(torch.device(device))  # type: ignore[arg-type]
    model.train(mode=False)
    tensors, rows = named_tensors(model), list[dict[str, Any]]()
    images, of_tower = ImageFeatures(), [block for block in blocks if block.name.startswith(READ_BY_TOWER)]
    for version in sorted({number for part in parts for number in (*part.whole, *part.curve)}):
        values = result.arrays(version)
        for block in blocks:
            write_block(tensors, block, values[block.name])
        images.begin({block.name: hashlib.sha256(values[block.name].tobytes()).hexdigest() for block in of_tower})
        for part in parts:
            sizes = [(part.data.examples, False)] if version in part.whole else []
            sizes += [(min(part.curve_examples, part.data.examples), True)] if version in part.curve else []
            if not sizes:
                continue
            count = max(size for size, _ in sizes)
            kept = images_once(model, head, images, part.data, in_order=True)
            # As in the product's evaluations.
            once = kept if images.is_settled else nullcontext(part.data)
            with autocast(result.spec.training, torch.device(device)), once as data:
                predicted = predictions(model, head, data, count, device)
            true = part.data.tensors[LABELS][:count].numpy()
            for size, is_curve in sizes:
                about = {"part": part.name, "site": part.site, "version": version, "curve": is_curve}
                rows.append({**about, **scored(true[:size], predicted[:size])})
    return rows


def predictions(model: torch.nn.Module, head: Any, data: Dataset, count: int, device: str) -> Labels:
    """Return the most probable class of each of the first `count` examples, int64 [count]."""
    found = torch.zeros(count, dtype=torch.int64)
    with torch.inference_mode():
        for places, batch in _batches(data, count):
            there = {name: tensor.to(device) for name, tensor in batch.items()}
            logits = forward(model, head, there).logits
            if logits is None or logits.ndim != 2:
                raise ValueError(f"a model with the head {head} predicts no class of an example: use a classifier")
            found[places] = logits.argmax(dim=-1).cpu()
    return found.numpy()


def _batches(data: Dataset, count: int) -> Iterator[tuple[torch.Tensor, dict[str, torch.Tensor]]]:
    """Yield the places and inputs of batches. Texts of similar length go together, without common padding."""
    mask = data.tensors.get(MASK)
    lengths = torch.full((count,), 0) if mask is None else mask[:count].sum(dim=1)
    for places in torch.split(lengths.argsort(stable=True), BATCH):
        batch = data.read(places)
        if mask is not None:
            width = int(lengths[places].max())
            batch |= {name: batch[name][:, :width] for name in ("input_ids", MASK)}
        yield places, {**batch, **data.common}


def scored(true: Labels, predicted: Labels) -> dict[str, Any]:
    """Return the number of `examples`, `accuracy` and `macro_f1` of predictions."""
    return {
        "examples": len(true),
        "accuracy": round(float((true == predicted).mean()), ROUNDED),
        "macro_f1": round(float(f1_score(true, predicted, average="macro", zero_division=0)), ROUNDED),
    }


def majority(data: Dataset) -> dict[str, Any]:
    """Return the scores of an answer that is always the most frequent class."""
    true = data.tensors[LABELS].numpy()
    return scored(true, np.full_like(true, np.bincount(true).argmax()))


def zero_shot(start: Path, data: Dataset, device: str) -> dict[str, Any] | None:
    """Return the scores of a model before any training and without its prompts; None for a model that has none."""
    folder = ModelFolder.open(start)
    model = load(folder)
    if (prompts := prompts_of(model)) is None:
        return None
    model.to(torch.device(device))  # type: ignore[arg-type]
    model.train(mode=False)
    with prompts.transformed(dict.fromkeys(MODALITIES, lambda own: own[:0])):
        return scored(
            data.tensors[LABELS].numpy(), predictions(model, folder.model.head, data, data.examples, device)
        )


def at_sites(result: Result, versions: Collection[int], part: str) -> list[dict[str, Any]]:
    """Return the rows of what sites measured on their held-out examples in the run, with their own models if any."""
    rows = []
    for one in result.measurements:
        if one.held_out and one.version in versions:
            names = ("accuracy", "macro_f1")
            of_site = {name: one.metrics.get(PERSONAL + name, one.metrics[name]) for name in names}
            about = {"part": part, "site": one.site, "version": one.version, "curve": False}
            rows.append({**about, "examples": one.examples, **{k: round(v, ROUNDED) for k, v in of_site.items()}})
    return rows
