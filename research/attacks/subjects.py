"""The models and data that are attacked: small transformers from configs, and examples from a seed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from attacks.site import Version
from common.arrays import Array
from tessera.shared.model.spec import Prompts
from tessera.worker.data.dataset import Dataset

WORDS = 400
"""The number of words. Word 0 is padding, which no text has."""
CLASSES = 4
WIDTH = 64
LENGTH = 12
"""The words of a text."""

PROMPT_TOKENS = 8
PIXELS = 8
START, END = 3, 29
CLASS_TEXTS = torch.tensor([
    [START, 7, 8, END, END, END],
    [START, 9, END, END, END, END],
    [START, 5, 11, 12, 4, END],
    [START, 14, 6, END, END, END],
])  # fmt: skip
"""The names of the classes of image and text pairs, [classes, tokens], which every party of such a run knows."""


def text_config(**changed: Any) -> dict[str, Any]:
    """Return the config of a BERT of two layers without dropout."""
    return {
        "model_type": "bert", "vocab_size": WORDS, "hidden_size": WIDTH, "num_hidden_layers": 2,
        "num_attention_heads": 2, "intermediate_size": 2 * WIDTH, "max_position_embeddings": LENGTH,
        "num_labels": CLASSES, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, **changed,
    }  # fmt: skip


def text_model(seed: int, **changed: Any) -> Version:
    """Return a new text classifier. `initializer_range` is the standard deviation of its weights, 0.02 as in BERT."""
    return Version.of(text_config(**changed), "text-classification", seed)


def pair_config(spread: float = 1.0) -> dict[str, Any]:
    """Return the config of a CLIP of two layers a tower. `spread` multiplies the standard deviations of weights."""
    sizes = {
        "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 64,
        "hidden_dropout_prob": 0.0, "attention_dropout": 0.0, "initializer_factor": spread,
    }  # fmt: skip
    text = {
        **sizes, "vocab_size": 30, "max_position_embeddings": 6 + PROMPT_TOKENS, "projection_size": 32,
        "bos_token_id": START, "pad_token_id": 1, "eos_token_id": END,
    }  # fmt: skip
    vision = {**sizes, "image_size": PIXELS, "patch_size": 4}
    return {
        "model_type": "clip", "text_config": text, "vision_config": vision, "projection_dim": 32,
        "initializer_factor": spread,
    }  # fmt: skip


def pair_model(seed: int, spread: float = 1.0) -> Version:
    """Return a new dual encoder with text prompts."""
    return Version.of(pair_config(spread), "contrastive", seed, Prompts(text=PROMPT_TOKENS))


def texts(seed: int, count: int, shares: Sequence[float] = ()) -> Dataset:
    """Return texts of random words with random labels, of classes in these shares or in equal ones."""
    rng = np.random.default_rng(seed)
    words = rng.integers(1, WORDS, (count, LENGTH))
    return Dataset({"input_ids": torch.from_numpy(words), "labels": torch.from_numpy(labels(rng, count, shares))})


def pairs(seed: int, count: int, shares: Sequence[float] = ()) -> Dataset:
    """Return random images with random classes, and the names of the classes."""
    rng = np.random.default_rng(seed)
    pixels = rng.normal(size=(count, 3, PIXELS, PIXELS)).astype(np.float32)
    tensors = {"pixel_values": torch.from_numpy(pixels), "labels": torch.from_numpy(labels(rng, count, shares))}
    return Dataset(tensors, {"input_ids": CLASS_TEXTS})


def labels(rng: np.random.Generator, count: int, shares: Sequence[float]) -> Array:
    """Draw labels, int64 [count]."""
    return rng.choice(CLASSES, size=count, p=shares or None)
