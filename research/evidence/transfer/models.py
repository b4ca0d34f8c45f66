"""Large models laid out without storage from their configs, and the memory of their activations.

No weights are read. The sizes are those that the models' authors publish.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any, Literal, get_args

import torch
from torch import nn
from transformers import PreTrainedModel

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Head, Lora, Prompts
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate

RANK = 8
TOKENS = 16
"""Prompt tokens of each tower."""

DEPTH = 12
"""Layers with prompts of their own, of the variant that has them."""

Variant = Literal["plain", "lora", "prompts", "deep prompts"]
PROMPTS: Mapping[Variant, Prompts] = {
    "prompts": Prompts(vision=TOKENS, text=TOKENS),
    "deep prompts": Prompts(vision=TOKENS, depth=DEPTH),
}
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Large:
    """A model, and the batch that its activations are counted for."""

    name: str
    config: Config
    head: Head
    examples: int
    tokens: int
    """Of each text."""

    def __hash__(self) -> int:
        return hash(self.name)

    @property
    def variants(self) -> tuple[Variant, ...]:
        return get_args(Variant) if self.head == "contrastive" else ("plain", "lora")

    @property
    def device(self) -> str:
        """Where activations are counted: the meta device, or the CPU where prompts find their place by the tokens."""
        return "cpu" if self.head == "contrastive" else "meta"

    def built(self, variant: Variant = "plain", device: str = "meta") -> PreTrainedModel:
        """Return the model; by default on the meta device, which has shapes and no values."""
        with torch.device(device):
            return instantiate(
                self.config,
                self.head,
                lora=Lora(rank=RANK, alpha=2 * RANK) if variant == "lora" else None,
                prompts=PROMPTS.get(variant),
            )

    def batch(self, device: str) -> dict[str, Any]:
        """Return a batch of the model's inputs."""
        with torch.device(device):
            texts = torch.zeros(self.examples, self.tokens, dtype=torch.long)
            labels = torch.zeros(self.examples, dtype=torch.long)
            pixels = torch.zeros(self.examples, 3, 224, 224)
        match self.head:
            case "image-classification":
                return {"pixel_values": pixels, "labels": labels}
            case "contrastive":
                return {"pixel_values": pixels, "input_ids": texts, "return_loss": True}
            case "causal-lm":
                return {"input_ids": texts, "labels": texts}
            case _:
                return {"input_ids": texts, "labels": labels}

    @property
    def described(self) -> str:
        """The batch in words."""
        match self.head:
            case "image-classification":
                return f"{self.examples} images"
            case "contrastive":
                return f"{self.examples} images, {self.examples} texts of {self.tokens} tokens"
            case _:
                return f"{self.examples} text{'s' * (self.examples > 1)} of {self.tokens} tokens"


BERT = Large("BERT-base", {"model_type": "bert", "num_labels": 2}, "text-classification", 16, 128)
VIT = Large("ViT-B/16", {"model_type": "vit", "num_labels": 10}, "image-classification", 16, 0)
CLIP = Large(
    "CLIP ViT-B/16",
    {"model_type": "clip", "projection_dim": 512, "vision_config": {"patch_size": 16}},
    "contrastive",
    16,
    77,
)
LLAMA = Large(
    "Llama 3 8B",
    {
        "model_type": "llama", "vocab_size": 128256, "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8,
    },
    "causal-lm",
    1,
    2048,
)  # fmt: skip
QWEN = Large(
    "Qwen2.5 7B",
    {
        "model_type": "qwen2", "vocab_size": 152064, "hidden_size": 3584, "intermediate_size": 18944,
        "num_hidden_layers": 28, "num_attention_heads": 28, "num_key_value_heads": 4, "tie_word_embeddings": False,
    },
    "causal-lm",
    1,
    2048,
)  # fmt: skip
MODELS = (BERT, VIT, CLIP, LLAMA, QWEN)


@cache
def table(large: Large, variant: Variant = "plain") -> tuple[Block, ...]:
    """Return the model's block table, by the product's block map."""
    return block_table(large.built(variant))


def activation_bytes(large: Large, model: PreTrainedModel, trained: Collection[Block], private: nn.Module) -> int:
    """Return the bytes that the forward pass of a batch keeps for the backward pass, in float32.

    Counted tensor by tensor, if only the tensors of the trained blocks and of the site's private module have
    gradients. Left out are parameters, and squares of attention probabilities, which the fused attention of a worker
    does not keep.
    """
    names = {block.tensor for block in trained}
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name in names)
    own = {_number(tensor) for tensor in (*model.parameters(), *model.buffers(), *private.parameters())}
    # Storages stay referenced, so that no later one has the number of an earlier one.
    seen: dict[int, tuple[torch.UntypedStorage, int]] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        square = tensor.ndim > 2 and tensor.shape[-1] == tensor.shape[-2]
        seen.setdefault(_number(tensor), (storage, 0 if square else storage.nbytes()))
        # An output that an operation itself keeps would otherwise refer to that operation, and never be freed.
        return tensor.detach()

    unchanged: Callable[[torch.Tensor], torch.Tensor] = lambda tensor: tensor  # noqa: E731
    model.train()
    with torch.autograd.graph.saved_tensors_hooks(keep, unchanged):
        output = model(**large.batch(str(model.device)))
    del output
    return sum(nbytes for number, (_, nbytes) in seen.items() if number not in own)


def _number(tensor: torch.Tensor) -> int:
    # Its only identity: tensors on the meta device have no address.
    return int(tensor.untyped_storage()._cdata)  # noqa: SLF001
