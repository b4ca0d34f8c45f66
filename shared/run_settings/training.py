"""How a worker trains locally."""

from __future__ import annotations

from math import ceil
from typing import Literal

from pydantic import Field, PositiveInt

from tessera.shared.schema import Frozen


class Training(Frozen):
    """How a worker trains locally. The same for every method."""

    epochs: PositiveInt = Field(default=1, le=1000)
    batch_size: PositiveInt | None = Field(default=32, description="all examples in one batch if null")
    optimizer: Literal["adamw", "sgd"] = "adamw"
    learning_rate: float = Field(default=1e-4, gt=0, le=100)
    weight_decay: float = Field(default=0.01, ge=0, le=10)
    momentum: float = Field(default=0.0, ge=0, lt=1, description="for sgd")
    max_gradient_norm: float | None = Field(default=None, gt=0)
    precision: Literal["float32", "bfloat16", "float16"] = "float32"


def local_steps(training: Training, examples: int) -> int:
    """Return the optimizer steps that a worker makes in one phase over so many examples."""
    return training.epochs * ceil(examples / (training.batch_size or examples))
