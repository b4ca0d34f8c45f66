"""A small CLIP of our own, pre-trained here on digits with their names, and image-text data to adapt it to.

Pre-training sees a third of the training images, upright and clean. The sites have the rest, each as another scanner
would have taken them (`Shift`), so that there is something for prompts to adapt to. The classes are named by texts of
one wording: in several wordings, captions of one class in a batch would repel each other.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch.nn.functional import cross_entropy
from transformers import CLIPConfig, CLIPModel

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load

NAMES = ("zero", "one", "two", "three", "four", "five", "six", "seven", "eight", "nine")
WORDS = ("[PAD]", "[START]", "a", "photo", "of", "the", "digit", *NAMES, "[END]")
TOKENS = 16
PRETRAINED_SHARE = 1 / 3
STEPS = 300

SIZES = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4,
    "attention_dropout": 0.0,
}  # fmt: skip
CONFIG = {
    "model_type": "clip",
    "projection_dim": 32,
    "vision_config": {**SIZES, "image_size": 8, "patch_size": 2, "num_channels": 1},
    "text_config": {
        **SIZES, "vocab_size": len(WORDS), "max_position_embeddings": TOKENS, "bos_token_id": 1, "pad_token_id": 0,
        "eos_token_id": len(WORDS) - 1,
    },
}  # fmt: skip


def class_names() -> dict[str, torch.Tensor]:
    """`input_ids` and `attention_mask`, int64 [10, 8], of `a photo of the digit seven` and so on."""
    texts = [("[START]", "a", "photo", "of", "the", "digit", name, "[END]") for name in NAMES]
    ids = torch.tensor([[WORDS.index(word) for word in text] for text in texts])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def pairs() -> tuple[Dataset, Dataset, Dataset]:
    """Return the examples of pre-training, the examples that the sites share, and the test part."""
    train, test = (load("digits", {"split": split}) for split in ("train", "test"))
    order = torch.randperm(train.examples, generator=torch.Generator().manual_seed(0))
    cut = int(train.examples * PRETRAINED_SHARE)
    parts = (train.rows(order[:cut]), train.rows(order[cut:]), test)
    first, rest, last = (Dataset(part.tensors, class_names()) for part in parts)
    return first, rest, last


def pretrained(folder: Path, seed: int, steps: int = STEPS) -> None:
    """Train the CLIP and save it as transformers does."""
    torch.manual_seed(seed)
    model = CLIPModel(CLIPConfig.from_dict(CONFIG))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    first, _, _ = pairs()
    dice = torch.Generator().manual_seed(seed)
    done = 0
    while done < steps:
        for batch in first.batches(64, dice):
            labels = batch.pop("labels")
            optimizer.zero_grad()
            cross_entropy(model(**batch).logits_per_image, labels).backward()  # type: ignore[no-untyped-call]
            optimizer.step()
            done += 1
    model.save_pretrained(folder)
