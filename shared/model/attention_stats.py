"""Attention statistics of a model's layers, measured by a worker on its own data."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, model_validator

from tessera.shared.schema import Value
from tessera.shared.tensors.lazy import Array


class TaskTokens(Value):
    """The tokens that carry the task: where attention counts as attention to the task."""

    where: Literal["first", "last", "ids"] = Field(
        default="first",
        description="the first token ([CLS]), the last that is no padding (where decoders read), or given input ids",
    )
    ids: tuple[NonNegativeInt, ...] = Field(default=(), max_length=4096, description="for ids")

    @model_validator(mode="after")
    def _ids_if_asked(self) -> Self:
        if (self.where == "ids") != bool(self.ids):
            raise ValueError("give ids if, and only if, task tokens are where the ids are")
        return self


@dataclass(frozen=True)
class ByHead:
    """The rows of a block along `axis`, and of each the attention mass of the head that it belongs to."""

    axis: int
    mass: Array
    """float64 [rows]"""


@dataclass(frozen=True)
class LayerAttention:
    """Attention of one layer, with padding masked out of rows and columns."""

    mass: Array
    """float64 [examples], in [0, 1]: the probability on a task token, mean over heads, queries and task tokens.

    In a tower that reads what is common to all examples, such as the names of classes, [batches x texts].
    """
    sink: Array
    """float64 [examples], in [0, 1]: the probability on the first token, mean over heads and queries."""
    heads: Array
    """float64 [heads]: the mass of each head, mean over examples."""
    entropy: float
    """In [0, 1]: the entropy of a query's probabilities over the largest that its visible keys allow, in the mean."""
    per_example: bool = True
    """True if the layer reads examples; False if it reads tokens that all examples have in common."""
    rows: Mapping[str, ByHead] = field(default_factory=dict)
    """The layer's blocks whose rows or columns belong to heads, by name."""
