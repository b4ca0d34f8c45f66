"""A model as the coordinator knows it: a transformers config, a head, and a table of blocks. No code, no paths.

On disk a model is a folder in transformers' own layout (`config.json`, `model.safetensors`) with one more file,
`blocks.json`, which is the `Model` below. `from_pretrained` loads it as it is.
"""

from __future__ import annotations

from functools import cached_property
from typing import Literal, Self

from pydantic import Field, JsonValue, model_validator

from shared.blocks import Block, Frozen, check_table

Head = Literal[
    "image-classification",
    "text-classification",
    "token-classification",
    "masked-lm",
    "causal-lm",
    "seq2seq-lm",
    "contrastive",
    "features",
]
"""Which of transformers' Auto classes builds the model: what is put on top of the stack."""

MAX_DOCUMENT_BYTES = 64 << 20
"""The most that a model document or a manifest may have: both are JSON of a few hundred bytes a block."""

WEIGHTS_FILE = "model.safetensors"
BLOCKS_FILE = "blocks.json"


class Model(Frozen):
    """What every worker of a run builds: `config` is a transformers config as JSON, `model_type` among it."""

    config: dict[str, JsonValue]
    head: Head
    blocks: tuple[Block, ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; give a transformers config such as config.json")
        check_table(self.blocks)
        return self

    @cached_property
    def by_name(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)
