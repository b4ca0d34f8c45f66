"""A model as the coordinator knows it: a transformers config, a head, and a table of blocks. No code, no paths.

On disk a model is a folder in transformers' own layout (`config.json`, `model.safetensors`) with one more file,
`blocks.json`, which is the `Model` below. `from_pretrained` loads it as it is.
"""

import operator
from functools import cached_property
from itertools import pairwise
from typing import Annotated, Literal, Self

from pydantic import Field, JsonValue, PositiveFloat, model_validator

from tessera.shared.json_limits import read_document
from tessera.shared.model.blocks import MAX_BLOCKS, Block, Name, Role, check_table
from tessera.shared.model.preprocessing import FileName, FileRef
from tessera.shared.schema import Condition, Digest, Value

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
"""Head of the model, which selects the Auto class of transformers that builds it."""

MAX_DOCUMENT_BYTES = 32 << 20
"""The most that a model document or a manifest may have: both are JSON of a few hundred bytes a block."""

WEIGHTS_FILE = "model.safetensors"
BLOCKS_FILE = "blocks.json"


Modality = Literal["vision", "text"]
"""A tower of a dual encoder, and the prompts that go into it."""

MODALITIES: tuple[Modality, ...] = ("vision", "text")

MAX_TOKENS = 1024
"""The most prompt tokens that a tower may be given."""

MAX_DEPTH = 256
"""The most layers with prompts of their own."""

PROMPT_STD = 0.02
"""The standard deviation of prompts that start as noise: CoOp's, and that of most token embeddings."""


class Fusion(Value):
    """The combination of the federation's prompt and a site's own into one, both [tokens, width].

    `attention`: multi-head cross-attention from one (the query) to the other; the result, with a norm of at most the
    query's, is added to the query, and is zero at first. `mean`: the mean of both. `concat`: the federation's prompt,
    then the site's own. `plain`: attention without normalised inputs and without that bound, whose four matrices are
    random at first. Two are controls for studies of attention: `mlp`, a layer of as many parameters that joins
    each token of both, in place of attention; and `random-attention`, whose weights are random and never train.
    """

    conditions = (
        Condition(("heads",), lambda fusion: fusion.attends, "kind to attention"),
        Condition(("asks",), lambda fusion: fusion.adds, "kind to attention or mlp"),
    )

    kind: Literal["attention", "plain", "mean", "concat", "mlp", "random-attention"] = Field(
        default="attention",
        description="cross-attention between the prompts, the same without normalisation and bounds, their mean, or "
        "both side by side; or a control: an MLP of as many parameters, or attention that never trains",
    )
    asks: Literal["local", "global"] = Field(default="global", description="the prompts that are the queries")
    heads: Annotated[int, Field(ge=1, le=256)] = Field(default=8, description="of attention; a divisor of the width")

    @property
    def attends(self) -> bool:
        return self.kind in ("attention", "plain", "random-attention")

    @property
    def adds(self) -> bool:
        """True for a fusion that adds something to the prompts that are its queries."""
        return self.attends or self.kind == "mlp"

    @property
    def trains(self) -> bool:
        """True for a fusion with matrices that train."""
        return self.adds and self.kind != "random-attention"

    @property
    def differs_by_token(self) -> bool:
        """True for a fusion that adds nothing to a single prompt token."""
        return self.adds and self.kind != "plain"

    def matrices(self, width: int) -> dict[str, tuple[tuple[int, int], bool]]:
        """Return the fusion's matrices by name, for prompts of this width: the shape, [outputs, inputs], and whether
        the matrix starts random (Glorot and Bengio 2010, equation 16) or at zero."""
        random_output = self.kind in ("plain", "random-attention")
        if self.attends:
            inputs = dict.fromkeys(("query", "key", "value"), ((width, width), True))
            return {**inputs, "output": ((width, width), random_output)}
        hidden = 4 * width // 3
        mlp = {"hidden": ((hidden, 2 * width), True), "output": ((width, hidden), random_output)}
        return mlp if self.kind == "mlp" else {}

    def divides(self, width: int) -> bool:
        """Return True if there are no heads, or if they divide prompts of this width."""
        return not self.attends or width % self.heads == 0


class Prompts(Value):
    """Numbers of learnt tokens that are added to the input of each tower of a dual encoder.

    With a `depth` above 1 the inputs of as many layers have tokens of their own, which take the place of those of the
    layer before. With `fusion` the model also has the modules that fuse them with a site's own prompts, one for each
    tower, so that a run may average those too; the model itself does not use them.
    """

    vision: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    text: Annotated[int, Field(ge=0, le=MAX_TOKENS)] = 0
    fusion: Fusion | None = None
    depth: Annotated[int, Field(ge=1, le=MAX_DEPTH)] = 1

    def count(self, modality: Modality) -> int:
        return self.vision if modality == "vision" else self.text


Rank = Annotated[int, Field(ge=1, le=1024)]


class Lora(Value):
    """Low-rank adapters, alpha / rank * B A, beside each matrix that has a block of one of these roles."""

    rank: Rank
    alpha: PositiveFloat
    roles: Annotated[tuple[Role, ...], Field(min_length=1)] = ("query", "value")
    ranks: tuple[Rank, ...] = Field(default=(), max_length=16, exclude_if=operator.not_)
    """The ranks at which sites may train, ascending up to `rank`. Each adapter then consists of as many parts: the
    first rows of A and columns of B, those between the first rank and the second, and so on. All have the same scale,
    so that a part means the same at each site. Empty: every site trains the whole rank."""

    dora: bool = Field(default=False, exclude_if=operator.not_)
    """True for DoRA (Liu et al. 2024, arXiv 2402.09353): the sum of matrix and adapter has rows of learnt lengths."""

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if self.ranks and self.dora:
            raise ValueError("DoRA has one rank for all sites: the length of a row is that of the sum of all parts")
        if self.ranks and (self.ranks[-1] != self.rank or any(low >= high for low, high in pairwise(self.ranks))):
            raise ValueError(f"the ranks of sites ascend up to rank {self.rank}: {self.ranks}")
        return self

    @property
    def scale(self) -> float:
        return self.alpha / self.rank

    @property
    def parts(self) -> dict[str, int]:
        """The number of rows of A in each part, by the part's name in PEFT."""
        if not self.ranks:
            return {"default": self.rank}
        return {f"rank_{high}": high - low for low, high in pairwise((0, *self.ranks))}

    def rank_within(self, limit: float | None) -> int:
        """Return the largest rank at which a site with this limit trains, 0 if there is none."""
        return max((rank for rank in self.ranks or (self.rank,) if limit is None or rank <= limit), default=0)

    def parts_within(self, rank: int) -> list[str]:
        """Return the parts that a site of this rank trains."""
        return [name for name, top in zip(self.parts, self.ranks or (self.rank,), strict=True) if top <= rank]


Float32Role = Literal["head", "prompt", "adapter"]
"""A role whose blocks a model may have in float32 beside 16-bit others."""


def stored_name(tensor: str) -> str:
    """Return a tensor's name in a file of weights: as in transformers' own model, which `from_pretrained`
    builds.

    Where a matrix has an adapter beside it, PEFT moves it one step down, to `base_layer`.
    """
    return tensor.replace(".base_layer.", ".")


class Model(Value):
    """The definition of the model that every worker of a run builds: `config` is a transformers config as JSON, with
    its `model_type`.

    Tessera adds `prompts` and `lora` to the model that transformers builds from it.
    """

    config: dict[str, JsonValue]
    head: Head
    prompts: Prompts | None = None
    lora: Lora | None = None
    float32: tuple[Float32Role, ...] = ()
    """The roles of the blocks that are float32 where the config's dtype has 16 bits: in 16 bits a weight does not
    move under small steps."""
    blocks: tuple[Block, ...] = Field(min_length=1, max_length=MAX_BLOCKS)
    external: dict[Name, Digest] = Field(default_factory=dict, max_length=MAX_BLOCKS)
    """The digests of the blocks of an external base: they are in no version and never change, and each worker takes
    them from its own site."""
    preprocessing: dict[FileName, FileRef] = Field(default_factory=dict)
    """The files of the model's tokenizer and image processor, if it has any."""

    @classmethod
    def read(cls, raw: bytes) -> Self:
        """Return the model of a document. Raises ValueError."""
        return read_document(cls, raw)

    @model_validator(mode="after")
    def _whole(self) -> Self:
        if not isinstance(self.config.get("model_type"), str):
            raise ValueError("config has no model_type; give a transformers config such as config.json")
        check_table(self.blocks)
        if unknown := sorted(self.external.keys() - {block.name for block in self.blocks}):
            raise ValueError(f"the external base has blocks that the model lacks: {unknown[:8]}")
        shared = {block.tensor for block in self.stored} & {block.tensor for block in self.base}
        if shared or not self.stored:
            raise ValueError(f"versions need a block, and whole tensors, beside the external base: {sorted(shared)}")
        return self

    @cached_property
    def by_name(self) -> dict[str, Block]:
        return {block.name: block for block in self.blocks}

    @property
    def stored(self) -> tuple[Block, ...]:
        """The blocks of a version: all but those of an external base."""
        return tuple(block for block in self.blocks if block.name not in self.external)

    @property
    def base(self) -> tuple[Block, ...]:
        """The blocks of the external base; none for most models."""
        return tuple(block for block in self.blocks if block.name in self.external)

    @property
    def stored_bytes(self) -> int:
        return sum(block.nbytes for block in self.stored)

    @property
    def nbytes(self) -> int:
        return sum(block.nbytes for block in self.blocks)
