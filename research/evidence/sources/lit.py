"""A dual encoder of images and texts: DINOv2-S and MiniLM, with projections trained on two vendors' public emoji.

Only the projections are trained, on the features of towers that stay as they are (Zhai and others, "LiT: Zero-shot
transfer with locked-image text tuning", CVPR 2022, but with both towers locked). The caption of a drawing is its
name, its name with its subgroup, or its subgroup. So the model knows the classes of the task, from other concepts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy, log_softmax, normalize
from transformers import AutoModel, VisionTextDualEncoderModel
from transformers.modeling_outputs import ImageClassifierOutput
from transformers.modeling_utils import PreTrainedModel

from evidence.sources import dinov2, minilm
from evidence.sources.cached import made
from evidence.sources.emoji import Emoji
from evidence.sources.packages import digest_of
from evidence.sources.sites import Indices
from evidence.sources.training import PREDICTED_AT_ONCE
from evidence.sources.vit import Shape

LIT = Shape("lit", 6, 56)
"""On [CLS] of public concepts, a linear classifier finds more with 6 layers than with 4, and as much as with 12."""
WIDTH = 16
"""Tokens of a caption."""
CLASS_TOKENS = "classes.npy"
"""The captions of the classes as tokens, int64 [classes, WIDTH], padded with 0."""
FIRST_SCALE = 2.6592
"""The logarithm of the first scale of the logits: that of CLIP."""


@dataclass(frozen=True)
class Recipe:
    """Steps of AdamW on the projections. A batch has one drawing of each of some concepts."""

    steps: int = 400
    concepts: int = 256
    rate: float = 1e-3
    weight_decay: float = 0.1
    projection: int = 256
    seed: int = 0


def prepare(shape: Shape, whole: Path, text: Path, drawings: Path, out: Path, recipe: Recipe | None = None) -> bool:
    """Write the folder of a dual encoder, unless it was made of the same files with the same settings.

    `whole` is the folder of the backbone, `text` that of all of MiniLM, `drawings` the file of rendered emoji. Return
    True if it was made now.
    """
    recipe = recipe or Recipe()
    inputs = {
        "backbone": digest_of(whole / dinov2.WEIGHTS),
        "text": digest_of(text / dinov2.WEIGHTS),
        "drawings": digest_of(drawings),
        "shape": asdict(shape),
        "recipe": asdict(recipe),
    }
    return made(out, inputs, lambda folder: _train(shape, whole, text, Emoji.load(drawings), recipe, folder))


def _train(shape: Shape, whole: Path, text: Path, emoji: Emoji, recipe: Recipe, out: Path) -> None:
    towers = out / "vision", out / "text"
    dinov2.cut(whole, shape.layers, shape.side, towers[0])
    captions = captions_of(emoji)
    of_classes = [class_caption(name) for name in emoji.classes]
    flat = [caption for of_concept in captions for caption in of_concept]
    tokens = torch.from_numpy(minilm.cut(text, [*flat, *of_classes], WIDTH, towers[1]))
    rows = emoji.to_train_on()
    vision, words = (AutoModel.from_pretrained(folder, dtype=torch.float32).eval() for folder in towers)
    images = image_features(vision, emoji, rows)
    texts = text_features(words, tokens[: len(flat)]).reshape(len(captions), len(captions[0]), -1)
    torch.manual_seed(recipe.seed)
    model: Any = VisionTextDualEncoderModel.from_vision_text_pretrained(
        str(towers[0]), str(towers[1]), projection_dim=recipe.projection, logit_scale_init_value=FIRST_SCALE
    )
    model.float()
    fit(model, images, texts, torch.from_numpy(emoji.concepts[rows]), captions, recipe)
    model.save_pretrained(out)
    np.save(out / CLASS_TOKENS, tokens[len(flat) :].numpy())
    (towers[1] / "tokenizer.json").replace(out / "tokenizer.json")
    for folder in towers:
        for file in folder.iterdir():
            file.unlink()
        folder.rmdir()


# ---------------------------------------------------------------- captions


def captions_of(emoji: Emoji) -> list[tuple[str, str, str]]:
    """Return each concept's captions: its name, its name and its subgroup, and its subgroup."""
    return [
        (name, f"{name}, {class_caption(group)}", class_caption(group))
        for name, group in zip(emoji.names, emoji.subgroups, strict=True)
    ]


def class_caption(subgroup: str) -> str:
    """Return a subgroup's caption: `food fruit` for `food-fruit`."""
    return subgroup.replace("-", " ")


# ---------------------------------------------------------------- features and projections


def image_features(vision: PreTrainedModel, emoji: Emoji, rows: Indices) -> Tensor:
    """Return the vision tower's features, float32 [rows, width]."""
    with torch.inference_mode():
        parts = np.array_split(rows, -(-len(rows) // PREDICTED_AT_ONCE))
        found = [vision(emoji.dataset(part).tensors["pixel_values"]).pooler_output for part in parts]
    # Tensors of inference mode take no part in training.
    return torch.cat(found).clone()


def text_features(words: PreTrainedModel, tokens: Tensor) -> Tensor:
    """Return the text tower's features, float32 [texts, width], of tokens [texts, WIDTH]."""
    with torch.inference_mode():
        found = [
            words(input_ids=part, attention_mask=(part != 0).long()).pooler_output
            for part in torch.split(tokens, PREDICTED_AT_ONCE)
        ]
    return torch.cat(found).clone()


def fit(
    model: Any,
    images: Tensor,
    texts: Tensor,
    concepts: Tensor,
    captions: Sequence[Sequence[str]],
    recipe: Recipe,
) -> None:
    """Train a dual encoder's projections and scale in place, on features.

    `images` is [drawings, width], `concepts` [drawings] has the concept of each, `texts` is [concepts, wordings,
    width], and `captions` are the texts themselves: equal ones are all right for an image.
    """
    trained = [model.visual_projection.weight, model.text_projection.weight, model.logit_scale]
    for weight in trained:
        weight.requires_grad_(True)
    optimizer = torch.optim.AdamW(trained, lr=recipe.rate, weight_decay=recipe.weight_decay)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, recipe.steps)
    generator = torch.Generator().manual_seed(recipe.seed)
    numbers = {
        caption: number for number, caption in enumerate(dict.fromkeys(each for of in captions for each in of))
    }
    same = torch.tensor([[numbers[caption] for caption in of] for of in captions])
    for _ in range(recipe.steps):
        # A random drawing of each concept, and of those the first ones in a random order.
        order = torch.randperm(len(images), generator=generator)
        _, first = np.unique(concepts[order].numpy(), return_index=True)
        chosen = order[torch.from_numpy(np.sort(first))[: recipe.concepts]]
        # One wording for the whole batch, so that no wording competes with another.
        wording = int(torch.randint(texts.shape[1], (), generator=generator))
        drawn = concepts[chosen]
        of_images = normalize(images[chosen] @ model.visual_projection.weight.T, dim=-1)
        of_texts = normalize(texts[drawn, wording] @ model.text_projection.weight.T, dim=-1)
        logits = model.logit_scale.exp() * of_images @ of_texts.T
        right = (same[drawn, wording][:, None] == same[drawn, wording]).float()
        right = right / right.sum(dim=1, keepdim=True)
        loss = -((right * log_softmax(logits, 1)).sum(1) + (right * log_softmax(logits.T, 1)).sum(1)).mean() / 2
        optimizer.zero_grad()
        loss.backward()  # type: ignore[no-untyped-call]
        optimizer.step()
        schedule.step()


# ---------------------------------------------------------------- classification


class LitClassifier(nn.Module):
    """A dual encoder as a classifier: an image's logits are its scaled similarities to the captions of the classes.

    The captions' embeddings stay as they are.
    """

    embeddings: Tensor
    scale: Tensor

    def __init__(self, model: VisionTextDualEncoderModel, tokens: Tensor) -> None:
        super().__init__()
        with torch.no_grad():
            embeddings = normalize(model.text_projection(text_features(model.text_model, tokens)), dim=-1)
        self.vision = model.vision_model
        self.projection = model.visual_projection
        self.register_buffer("embeddings", embeddings)
        self.register_buffer("scale", model.logit_scale.detach().exp())

    @classmethod
    def load(cls, folder: Path) -> Self:
        """Return the classifier of a prepared folder."""
        model = AutoModel.from_pretrained(folder, dtype=torch.float32).eval()
        return cls(model, torch.from_numpy(np.load(folder / CLASS_TOKENS)))

    def forward(self, pixel_values: Tensor, labels: Tensor | None = None) -> ImageClassifierOutput:
        """Return the logits, [images, classes], of images [images, 3, side, side], and the loss of int64 labels."""
        embedded = normalize(self.projection(self.vision(pixel_values).pooler_output), dim=-1)
        logits = self.scale * embedded @ self.embeddings.T
        return ImageClassifierOutput(loss=None if labels is None else cross_entropy(logits, labels), logits=logits)
