"""Tiny dual encoders, and images to be told apart by the names of their classes."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tessera.worker.data.dataset import Dataset

START, PADDING, END = 3, 1, 2
SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
}  # fmt: skip
VISION = {**SIZES, "image_size": 8, "patch_size": 4, "num_patches": 4}
TEXT = {
    **SIZES, "vocab_size": 30, "max_position_embeddings": 12, "projection_size": 16, "bos_token_id": START,
    "pad_token_id": PADDING, "eos_token_id": END,
}  # fmt: skip

# In old CLIPs a text ends at its highest id, and their configs call 2 its end. Here they name another.
CLIP_TEXT = {**TEXT, "eos_token_id": 29}
CLASSES = torch.tensor([[START, 7, 8, 29, 29, 29], [START, 9, 29, 29, 29, 29], [START, 5, 11, 12, 4, 29]])

FAMILIES = {"aimv2", "altclip", "clip", "dinov2+camembert", "siglip", "siglip2", "vit+bert"}
"""Families with and without tokens before the prompts, with positions from the padding, with patches in a row, and
pairs: the long tests run the others that have prompts."""


def dual(model_type: str) -> dict[str, Any]:
    """The config of a dual encoder of two layers a tower, 16 wide, for images of 8 x 8 and texts of up to 12.

    `dinov2+bert` is a pair of such towers.
    """
    vision, paired, words = model_type.partition("+")
    if paired:
        towers = {"vision_config": {**VISION, "model_type": vision}, "text_config": {**TEXT, "model_type": words}}
        return {"model_type": "vision-text-dual-encoder", "projection_dim": 16, **towers}
    text = CLIP_TEXT if model_type in {"clip", "clipseg", "metaclip_2", "aimv2"} else TEXT
    return {"model_type": model_type, "text_config": dict(text), "vision_config": dict(VISION), "projection_dim": 16}


def classes(model_type: str) -> Tensor:
    """The names of three classes, [classes, tokens], started, ended and padded as the family has it."""
    ids = CLASSES if dual(model_type)["text_config"]["eos_token_id"] == 29 else CLASSES.where(CLASSES != 29, END)
    # SigLIP's texts have no start, and are padded to their full length.
    return torch.cat([ids[:, 1:], ids[:, -1:].expand(-1, 7)], dim=1) if model_type.startswith("siglip") else ids


def pairs(model_type: str, count: int = 24) -> Dataset:
    """Random images with random classes, and what the classes are called."""
    generator = torch.Generator().manual_seed(5)
    labels = torch.randint(0, 3, (count,), generator=generator)
    tensors = {"labels": labels, "pixel_values": torch.randn(count, 3, 8, 8, generator=generator)}
    if model_type == "siglip2":
        tensors["pixel_values"] = torch.randn(count, 4, 48, generator=generator)
        tensors["pixel_attention_mask"] = torch.ones(count, 4, dtype=torch.long)
        tensors["spatial_shapes"] = torch.full((count, 2), 2)
    return Dataset(tensors, {"input_ids": classes(model_type)})
