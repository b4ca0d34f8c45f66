"""A worker's settings of how its device computes."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

MicroBatch = int | Literal["auto"] | None
"""Number of examples in a forward and backward pass: a whole batch if None, as many as fit if `auto`."""


class Compute(BaseModel):
    """The table `compute` of a worker's settings. The defaults change no bit."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    tf32: bool = Field(
        default=False,
        description="whether a GPU may multiply float32 matrices with 10 bits of mantissa, which is several times as "
        "fast",
    )
    compile: bool = Field(
        default=False,
        description="whether torch.compile compiles the forward and backward passes of training, which takes a "
        "minute or more at the start of a run and needs a C++ compiler, or Triton on a GPU",
    )
    base_bits: Literal[4] | None = Field(
        default=None,
        description="4: the matrices of a base beside adapters are rounded to 4 bits, which takes about a quarter of "
        "their memory. Tasks that train them are refused. Needs the extra `quantized`",
    )
    shard: bool = Field(
        default=False,
        description="whether several devices divide a model's parameters among them (fully_shard), for models that "
        "do not fit one device. Slower, and not for every run",
    )

    @model_validator(mode="after")
    def _shards_alone(self) -> Self:
        beside = [name for name in ("compile", "base_bits") if getattr(self, name)]
        if self.shard and beside:
            raise ValueError(
                f"shard works with neither compile nor base_bits: remove {' and '.join(beside)} or shard"
            )
        return self
