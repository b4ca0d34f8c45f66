"""The first layers of DINOv2-S, adapted to photographs of clothes: the vision models of the federations.

A model of the first layers alone was never trained to be read after them, and small images have few patches. So it is
first fine-tuned on the public items of Fashion-MNIST, which no federation has. The folder has the classifier that
this trained; a federation that starts from a new one leaves `classifier.*` out.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import torch
from transformers import AutoModelForImageClassification
from transformers.modeling_utils import PreTrainedModel

from evidence.sources import dinov2
from evidence.sources.cached import made
from evidence.sources.fashion import CLASSES, Fashion
from evidence.sources.packages import digest_of
from evidence.sources.training import Budget, train

SEED = 0
BUDGET = Budget(steps=300, batch_size=32, rate=2e-4)


@dataclass(frozen=True)
class Shape:
    """A model's name, its layers, and the side of its images in pixels."""

    name: str
    layers: int
    side: int


VIT4 = Shape("vit4", 4, 56)
VIT6 = Shape("vit6", 6, 84)
VIT12 = Shape("vit12", 12, 112)
"""For a GPU."""
SHAPES = {shape.name: shape for shape in (VIT4, VIT6, VIT12)}


def prepare(shape: Shape, whole: Path, items: Path, out: Path, budget: Budget = BUDGET) -> bool:
    """Write the folder of an adapted model, unless it was made of the same files with the same settings.

    `whole` is the folder of the backbone, `items` the file of Fashion-MNIST. Return True if it was made now.
    """
    inputs = {
        "backbone": digest_of(whole / dinov2.WEIGHTS),
        "items": digest_of(items),
        "shape": asdict(shape),
        "budget": asdict(budget),
        "seed": SEED,
    }
    return made(out, inputs, lambda folder: _adapt(shape, whole, Fashion.load(items), budget, folder))


def _adapt(shape: Shape, whole: Path, fashion: Fashion, budget: Budget, out: Path) -> None:
    dinov2.cut(whole, shape.layers, shape.side, out)
    model = classifier(out, CLASSES)
    train(model, fashion.dataset(fashion.public, shape.side), budget, SEED)
    model.save_pretrained(out)


def classifier(folder: Path, classes: int) -> PreTrainedModel:
    """Return the image classifier of a folder, float32. A classifier that is not there starts from zeros."""
    model, loaded = AutoModelForImageClassification.from_pretrained(
        folder, num_labels=classes, output_loading_info=True, dtype=torch.float32
    )
    if loaded["missing_keys"]:
        torch.nn.init.zeros_(model.classifier.weight)
        torch.nn.init.zeros_(model.classifier.bias)
    found: PreTrainedModel = model
    return found
