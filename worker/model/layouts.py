"""Tables of the known attention layouts for the block map, and the mapping file that extends them.

`LAYOUTS` has one row for each arrangement of an attention's projections. A projection with a tensor of its own is
identified by name. The name of a fused tensor does not give the order of its parts (`query_key_value` has three
orders among these families), so a fused row also names the attention classes that use its order.
"""

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from tessera.shared.diagnostics import toml_of
from tessera.shared.model.blocks import Role
from tessera.shared.schema import Value
from tessera.shared.validation_errors import in_one_line

Spans = tuple[tuple[int, int], ...]

RowRun = tuple[Role, int]
"""A number of consecutive rows of one role."""

Division = Callable[[Any, int], Sequence[RowRun]]
"""A function from an attention and its number of rows to the runs that its fused projection repeats.

The attention is untyped, because each division reads the attributes of its own classes.
"""


def spans_by_role(runs: Sequence[RowRun], rows: int) -> dict[Role, Spans]:
    """Return the spans of each role if `runs` repeat over all `rows`. Raises ValueError if they end within a run."""
    cycle = sum(count for _, count in runs)
    if min((count for _, count in runs), default=0) < 1 or rows % cycle:
        raise ValueError(f"{rows} rows are not a multiple of {[tuple(run) for run in runs]}")
    spans: dict[Role, Spans] = {}
    start = 0
    while start < rows:
        for role, count in runs:
            spans[role] = (*spans.get(role, ()), (start, start + count))
            start += count
    return spans


# ---------------------------------------------------------------- how fused projections are ordered


def in_turn(*roles: Role) -> Division:
    """Return the division into one run of equal length per role."""
    return lambda _, rows: [(role, rows // len(roles)) for role in roles]


def by_head(size: str) -> Division:
    """Return the division into query, key and value of each head in turn; `size` names the attribute of its width."""
    roles: tuple[Role, ...] = ("query", "key", "value")
    return lambda attention, _: [(role, getattr(attention, size)) for role in roles]


def falcon(attention: Any, _: int) -> Sequence[RowRun]:
    """Return the queries of a group of heads, then their one key and value; generations differ in group size."""
    if attention.new_decoder_architecture:
        group = attention.num_heads // attention.num_kv_heads
    else:
        group = attention.num_heads if attention.multi_query else 1
    head = attention.head_dim
    return [("query", group * head), ("key", head), ("value", head)]


def bigcode(attention: Any, _: int) -> Sequence[RowRun]:
    """Return all queries, one key and one value; without multi-query attention, one run of each per head."""
    if attention.multi_query:
        return [("query", attention.embed_dim), ("key", attention.kv_dim), ("value", attention.kv_dim)]
    return by_head("head_dim")(attention, 0)


def phi3(attention: Any, _: int) -> Sequence[RowRun]:
    """Return all queries, then the fewer keys, then the values."""
    config = attention.config
    queries = config.num_attention_heads * attention.head_dim
    keys = config.num_key_value_heads * attention.head_dim
    return [("query", queries), ("key", keys), ("value", keys)]


def codegen(_: Any, rows: int) -> Sequence[RowRun]:
    """Return four groups of queries, values and keys, one per processor of the original training."""
    return [("query", rows // 12), ("value", rows // 12), ("key", rows // 12)]


def latent(attention: Any, _: int) -> Sequence[RowRun]:
    """Return the rows that unfold the latent: per head its keys, without their rotary part, and its values."""
    return [("key", attention.qk_nope_head_dim), ("value", attention.v_head_dim)]


# ---------------------------------------------------------------- which projections an attention has


@dataclass(frozen=True)
class ModelLayout:
    """One arrangement of an attention's projections, by the names of the attention's children.

    `whole` and `fused` are required, `optional` are not. `beside` are paths from the attention's parent, for families
    that keep the output projection in a sibling. `classes` restricts the row to attentions of these classes.
    """

    whole: Mapping[str, Role] = field(default_factory=dict)
    fused: Mapping[str, Division] = field(default_factory=dict)
    optional: Mapping[str, Role] = field(default_factory=dict)
    beside: Mapping[str, Role] = field(default_factory=dict)
    classes: AbstractSet[str] = frozenset()

    def __post_init__(self) -> None:
        if self.fused and not self.classes:
            raise ValueError("a row with a fused projection must name its classes")

    @property
    def required(self) -> frozenset[str]:
        return frozenset({*self.whole, *self.fused})


_QKV = in_turn("query", "key", "value")
# Norms that some families apply to queries and keys. They change the scores, so they belong to the kernel.
_NORMS: Mapping[str, Role] = {"q_norm": "query", "k_norm": "key", "q_layernorm": "query", "k_layernorm": "key"}
_PROJECTIONS: Mapping[str, Role] = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
_LATENTS = frozenset(
    {"DeepseekV2Attention", "DeepseekV3Attention", "Glm4MoeLiteAttention", "MiniCPM3Attention", "YoutuAttention"}
)
_LATENT: Mapping[str, Role] = {"kv_a_proj_with_mqa": "key", "kv_a_layernorm": "key", "o_proj": "output"}

LAYOUTS: tuple[ModelLayout, ...] = (
    # BERT and those built like it. data2vec has a table of relative positions.
    ModelLayout(
        whole={"query": "query", "key": "key", "value": "value"},
        optional={"relative_position_bias": "key"},
        beside={"output.dense": "output"},
    ),
    # ALBERT.
    ModelLayout(
        whole={"query": "query", "key": "key", "value": "value", "dense": "output"}, optional={"LayerNorm": "norm"}
    ),
    # DeBERTa, the second.
    ModelLayout(
        whole={"query_proj": "query", "key_proj": "key", "value_proj": "value"},
        optional={"pos_query_proj": "query", "pos_key_proj": "key"},
        beside={"output.dense": "output"},
    ),
    # DeBERTa, the first.
    ModelLayout(
        whole={"q_bias": "query", "v_bias": "value"},
        fused={"in_proj": by_head("attention_head_size")},
        optional={"pos_q_proj": "query", "pos_proj": "key"},
        beside={"output.dense": "output"},
        classes={"DisentangledSelfAttention"},
    ),
    # Llama, Qwen, Gemma, ViT. Grouped queries only make the key and value projections narrower. GPT-OSS has sinks,
    # one more key for each head, and Swin a table of relative positions.
    ModelLayout(
        whole={**_PROJECTIONS, "o_proj": "output"},
        optional={**_NORMS, "sinks": "key", "relative_position_bias": "key"},
    ),
    # CLIP, BART, OPT, Whisper, wav2vec 2. WavLM has a table of relative positions, gated by the query side.
    ModelLayout(
        whole={**_PROJECTIONS, "out_proj": "output"},
        optional={**_NORMS, "rel_attn_embed": "key", "gru_rel_pos_linear": "query", "gru_rel_pos_const": "query"},
    ),
    # AIMv2's pooling: the class token itself is the query.
    ModelLayout(
        whole={"k_proj": "key", "v_proj": "value", "output_proj": "output", "cls_token": "query"},
        classes={"Aimv2AttentionPoolingHead"},
    ),
    # Phi.
    ModelLayout(whole={**_PROJECTIONS, "dense": "output"}, optional=_NORMS),
    # T5 and MPNet.
    ModelLayout(
        whole={"q": "query", "k": "key", "v": "value", "o": "output"}, optional={"relative_attention_bias": "key"}
    ),
    # XLNet.
    ModelLayout(
        whole={"q": "query", "k": "key", "v": "value", "o": "output", "r": "key", "seg_embed": "key"},
        optional={"r_r_bias": "query", "r_s_bias": "query", "r_w_bias": "query", "layer_norm": "norm"},
    ),
    # DistilBERT and XLM.
    ModelLayout(whole={"q_lin": "query", "k_lin": "key", "v_lin": "value", "out_lin": "output"}),
    # Wav2Vec2-BERT.
    ModelLayout(
        whole={"linear_q": "query", "linear_k": "key", "linear_v": "value", "linear_out": "output"},
        optional={"distance_embedding": "key", "linear_pos": "key", "pos_bias_u": "query", "pos_bias_v": "query"},
    ),
    # torch's own, as in the pooling head of SigLIP.
    ModelLayout(
        whole={"out_proj": "output"},
        fused={"in_proj_weight": _QKV, "in_proj_bias": _QKV},
        classes={"MultiheadAttention"},
    ),
    # GPT-2, and its cross-attention.
    ModelLayout(whole={"c_proj": "output"}, fused={"c_attn": _QKV}, classes={"GPT2Attention", "ImageGPTAttention"}),
    ModelLayout(
        whole={"q_attn": "query", "c_proj": "output"},
        fused={"c_attn": in_turn("key", "value")},
        classes={"GPT2Attention"},
    ),
    # StarCoder.
    ModelLayout(whole={"c_proj": "output"}, fused={"c_attn": bigcode}, classes={"GPTBigCodeAttention"}),
    # GPT-NeoX.
    ModelLayout(
        whole={"dense": "output"},
        fused={"query_key_value": by_head("head_size")},
        optional={"dense_bias": "output"},
        classes={"GPTNeoXAttention", "GPTNeoXJapaneseAttention"},
    ),
    # BLOOM and Persimmon.
    ModelLayout(
        whole={"dense": "output"},
        fused={"query_key_value": by_head("head_dim")},
        optional=_NORMS,
        classes={"BloomAttention", "PersimmonAttention"},
    ),
    # Falcon.
    ModelLayout(whole={"dense": "output"}, fused={"query_key_value": falcon}, classes={"FalconAttention"}),
    # MPT.
    ModelLayout(whole={"out_proj": "output"}, fused={"Wqkv": _QKV}, classes={"MptAttention"}),
    # ModernBERT.
    ModelLayout(whole={"Wo": "output"}, fused={"Wqkv": _QKV}, classes={"ModernBertAttention"}),
    # Phi-3.
    ModelLayout(whole={"o_proj": "output"}, fused={"qkv_proj": phi3}, classes={"Phi3Attention"}),
    # CodeGen.
    ModelLayout(whole={"out_proj": "output"}, fused={"qkv_proj": codegen}, classes={"CodeGenAttention"}),
    # TimeSformer.
    ModelLayout(fused={"qkv": _QKV}, beside={"output.dense": "output"}, classes={"TimesformerSelfAttention"}),
    # DeepSeek's latent attention. The latent feeds keys and values; it changes the scores, so it is a key.
    ModelLayout(
        whole={"q_a_proj": "query", "q_a_layernorm": "query", "q_b_proj": "query", **_LATENT},
        fused={"kv_b_proj": latent},
        classes=_LATENTS,
    ),
    ModelLayout(whole={"q_proj": "query", **_LATENT}, fused={"kv_b_proj": latent}, classes=_LATENTS),
)

SCORES: Mapping[str, Mapping[str, Role]] = {
    "BeitLayer": {"relative_position_bias": "key"},
    "BeitModel": {"shared_position_bias": "key"},
    "Bottleneck": {"attention": "key"},  # MobileBERT's, which narrows the input of queries and keys
    "Data2VecVisionEncoder": {"relative_position_bias": "key"},
    "DebertaEncoder": {"rel_embeddings": "key", "LayerNorm": "key"},
    "DebertaV2Encoder": {"rel_embeddings": "key", "LayerNorm": "key"},
    "MPNetEncoder": {"relative_attention_bias": "key"},
}
"""Tensors that enter the scores from outside the attention, by the class of the module that contains them."""

MLPS = frozenset(
    {"mlp", "intermediate", "output", "fc1", "fc2", "ff", "ffn", "ffn_output", "feed_forward", "DenseReluDense"}
)

OWN_HEADS = frozenset({"visual_projection", "text_projection", "logit_scale", "logit_bias", "classifier"})

ATTENTION_LIKE = re.compile(
    r"attn|attention|qkv|(^|[._])(q|k|v|query|key|value)([._]|$)|(^|[._])rel(ative)?_|position_bias", re.IGNORECASE
)


# ---------------------------------------------------------------- a mapping from a file


class MappingError(ValueError):
    """A mapping that cannot be read or does not fit its model."""


class FusedRows(Value):
    """A number of consecutive rows of one role in a fused tensor."""

    role: Role
    rows: PositiveInt


class TensorPattern(Value):
    """The role, or the fused parts, of all tensors whose full name matches a pattern.

    In the pattern, `*` matches any text and `{layer}` a number, which becomes the block's layer.
    """

    names: Annotated[str, Field(min_length=1, max_length=512)]
    role: Role | None = None
    fused: tuple[FusedRows, ...] = ()
    axis: Annotated[int, Field(ge=-8, le=7)] = 0

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if (self.role is None) == (not self.fused):
            raise ValueError("give either role or fused")
        if self.axis and not self.fused:
            raise ValueError("axis is only for fused tensors: give fused, or leave axis out")
        if self.names.count("{layer}") > 1:
            raise ValueError("{layer} may occur only once in a pattern")
        return self

    def match(self, name: str) -> re.Match[str] | None:
        """Return the match of a tensor's name, with a group `layer` if the pattern has one, or None."""
        pattern = re.escape(self.names).replace(re.escape("{layer}"), r"(?P<layer>\d+)").replace(r"\*", ".*")
        return re.fullmatch(pattern, name)


class MappingFile(Value):
    """The mapping file of one architecture (format: docs/blockmap.md)."""

    model_type: Annotated[str, Field(min_length=1, max_length=128)]
    tensors: tuple[TensorPattern, ...] = Field(min_length=1)


def read_mapping(path: Path) -> MappingFile:
    """Return the mapping in a TOML file. Raises MappingError if it cannot be read or is invalid."""
    try:
        return MappingFile(**toml_of(path.read_bytes()))
    except OSError as fault:
        raise MappingError(f"{path} cannot be read: {fault.strerror}") from fault
    except tomllib.TOMLDecodeError as fault:
        raise MappingError(f"{path} is not valid TOML: {fault}") from fault
    except ValidationError as fault:
        raise MappingError(f"{path}: {in_one_line(fault, 'mapping', MappingFile)}") from fault
