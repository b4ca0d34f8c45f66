"""The arrangements of attention that are known: the tables that `blockmap` reads, and the file that adds to them.

`LAYOUTS` has one row for each arrangement of an attention's projections. Where a projection has a name of its own
the name is enough; where one matrix holds several of them the name is not (`query_key_value` is ordered in three ways
among the families here), so a fused row also names the classes of attention whose order it is.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Annotated, Any, Self

from pydantic import Field, PositiveInt, ValidationError, model_validator

from tessera.shared.model.blocks import Role
from tessera.shared.problems import message_of
from tessera.shared.schema import Frozen

Spans = tuple[tuple[int, int], ...]

Run = tuple[Role, int]
"""So many neighbouring rows of one role."""

Division = Callable[[Any, int], Sequence[Run]]
"""The runs that a fused projection repeats until its rows end: given the attention and the number of rows.

Untyped, because each division reads the attributes of its own classes of attention.
"""


def divided(runs: Sequence[Run], rows: int) -> dict[Role, Spans]:
    """Return each role's rows where `runs` follow one another, again and again, over so many rows.

    Raises ValueError if the rows end in the middle.
    """
    cycle = sum(count for _, count in runs)
    if min((count for _, count in runs), default=0) < 1 or rows % cycle:
        raise ValueError(f"{rows} rows are not a whole number of times {[tuple(run) for run in runs]}")
    spans: dict[Role, Spans] = {}
    start = 0
    while start < rows:
        for role, count in runs:
            spans[role] = (*spans.get(role, ()), (start, start + count))
            start += count
    return spans


# ---------------------------------------------------------------- how fused projections are ordered


def in_turn(*roles: Role) -> Division:
    """Equal runs, one for each role."""

    def divide(_: Any, rows: int) -> Sequence[Run]:
        return [(role, rows // len(roles)) for role in roles]

    return divide


def by_head(size: str) -> Division:
    """Query, key and value of one head, then of the next; `size` is the attribute that holds a head's."""

    def divide(attention: Any, _: int) -> Sequence[Run]:
        head = getattr(attention, size)
        return [("query", head), ("key", head), ("value", head)]

    return divide


def falcon(attention: Any, _: int) -> Sequence[Run]:
    """Return the queries of a group of heads, then their one key and value. How many make a group differs by
    generation."""
    if attention.new_decoder_architecture:
        group = attention.num_heads // attention.num_kv_heads
    else:
        group = attention.num_heads if attention.multi_query else 1
    head = attention.head_dim
    return [("query", group * head), ("key", head), ("value", head)]


def bigcode(attention: Any, _: int) -> Sequence[Run]:
    """Return all queries, one key, one value; without multi-query attention, head by head."""
    if attention.multi_query:
        return [("query", attention.embed_dim), ("key", attention.kv_dim), ("value", attention.kv_dim)]
    return [("query", attention.head_dim), ("key", attention.head_dim), ("value", attention.head_dim)]


def phi3(attention: Any, _: int) -> Sequence[Run]:
    """Return all queries, then the fewer keys, then the values."""
    config = attention.config
    queries = config.num_attention_heads * attention.head_dim
    keys = config.num_key_value_heads * attention.head_dim
    return [("query", queries), ("key", keys), ("value", keys)]


def codegen(_: Any, rows: int) -> Sequence[Run]:
    """Four blocks, one for each processor that it was first trained on, each of queries, values, keys."""
    return [("query", rows // 12), ("value", rows // 12), ("key", rows // 12)]


def latent(attention: Any, _: int) -> Sequence[Run]:
    """Return what unfolds the latent: the keys of a head, without their rotary part, and its values."""
    return [("key", attention.qk_nope_head_dim), ("value", attention.v_head_dim)]


# ---------------------------------------------------------------- which projections an attention has


@dataclass(frozen=True)
class ModelLayout:
    """One arrangement of an attention's projections, by the names of the attention's children.

    `whole` and `fused` are all there in an attention that the row explains, `optional` may be. `beside` are paths
    from the attention's parent, for families whose attention leaves its output projection to a sibling. `classes`
    are the attentions that the row is for; without them it is for all that hold these names.
    """

    whole: Mapping[str, Role] = field(default_factory=dict)
    fused: Mapping[str, Division] = field(default_factory=dict)
    optional: Mapping[str, Role] = field(default_factory=dict)
    beside: Mapping[str, Role] = field(default_factory=dict)
    classes: frozenset[str] = frozenset()

    def __post_init__(self) -> None:
        if self.fused and not self.classes:
            raise ValueError("a row with a fused projection names the classes that order it so")

    @property
    def required(self) -> frozenset[str]:
        return frozenset({*self.whole, *self.fused})


# What some families add to the scores within the attention. It belongs to the kernel.
_NORMS: Mapping[str, Role] = {"q_norm": "query", "k_norm": "key", "q_layernorm": "query", "k_layernorm": "key"}
_PROJECTIONS: Mapping[str, Role] = {"q_proj": "query", "k_proj": "key", "v_proj": "value"}
_LATENTS = frozenset(
    {
        "DeepseekV2Attention",
        "DeepseekV3Attention",
        "Glm4MoeLiteAttention",
        "MiniCPM3Attention",
        "YoutuAttention",
    }
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
        classes=frozenset({"DisentangledSelfAttention"}),
    ),
    # Llama, Qwen, Gemma, ViT. Grouped queries only make the key and value projections narrower. GPT-OSS has sinks,
    # one more key for each head, and Swin a table of relative positions.
    ModelLayout(
        whole={**_PROJECTIONS, "o_proj": "output"},
        optional={**_NORMS, "sinks": "key", "relative_position_bias": "key"},
    ),
    # CLIP, BART, OPT, Whisper, wav2vec 2. WavLM has a table of relative positions, gated by what asks.
    ModelLayout(
        whole={**_PROJECTIONS, "out_proj": "output"},
        optional={
            **_NORMS,
            "rel_attn_embed": "key",
            "gru_rel_pos_linear": "query",
            "gru_rel_pos_const": "query",
        },
    ),
    # What AIMv2 pools with: the class token asks as it is.
    ModelLayout(
        whole={"k_proj": "key", "v_proj": "value", "output_proj": "output", "cls_token": "query"},
        classes=frozenset({"Aimv2AttentionPoolingHead"}),
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
        fused={"in_proj_weight": in_turn("query", "key", "value"), "in_proj_bias": in_turn("query", "key", "value")},
        classes=frozenset({"MultiheadAttention"}),
    ),
    # GPT-2, and its cross-attention.
    ModelLayout(
        whole={"c_proj": "output"},
        fused={"c_attn": in_turn("query", "key", "value")},
        classes=frozenset({"GPT2Attention", "ImageGPTAttention"}),
    ),
    ModelLayout(
        whole={"q_attn": "query", "c_proj": "output"},
        fused={"c_attn": in_turn("key", "value")},
        classes=frozenset({"GPT2Attention"}),
    ),
    # StarCoder.
    ModelLayout(whole={"c_proj": "output"}, fused={"c_attn": bigcode}, classes=frozenset({"GPTBigCodeAttention"})),
    # GPT-NeoX.
    ModelLayout(
        whole={"dense": "output"},
        fused={"query_key_value": by_head("head_size")},
        optional={"dense_bias": "output"},
        classes=frozenset({"GPTNeoXAttention", "GPTNeoXJapaneseAttention"}),
    ),
    # BLOOM and Persimmon.
    ModelLayout(
        whole={"dense": "output"},
        fused={"query_key_value": by_head("head_dim")},
        optional=_NORMS,
        classes=frozenset({"BloomAttention", "PersimmonAttention"}),
    ),
    # Falcon.
    ModelLayout(whole={"dense": "output"}, fused={"query_key_value": falcon}, classes=frozenset({"FalconAttention"})),
    # MPT.
    ModelLayout(
        whole={"out_proj": "output"},
        fused={"Wqkv": in_turn("query", "key", "value")},
        classes=frozenset({"MptAttention"}),
    ),
    # ModernBERT.
    ModelLayout(
        whole={"Wo": "output"},
        fused={"Wqkv": in_turn("query", "key", "value")},
        classes=frozenset({"ModernBertAttention"}),
    ),
    # Phi-3.
    ModelLayout(whole={"o_proj": "output"}, fused={"qkv_proj": phi3}, classes=frozenset({"Phi3Attention"})),
    # CodeGen.
    ModelLayout(whole={"out_proj": "output"}, fused={"qkv_proj": codegen}, classes=frozenset({"CodeGenAttention"})),
    # TimeSformer.
    ModelLayout(
        fused={"qkv": in_turn("query", "key", "value")},
        beside={"output.dense": "output"},
        classes=frozenset({"TimesformerSelfAttention"}),
    ),
    # DeepSeek's latent attention. The latent feeds keys and values alike; it moves the scores, so it is a key.
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
    "Bottleneck": {"attention": "key"},  # MobileBERT's, which narrows what queries and keys are made of
    "Data2VecVisionEncoder": {"relative_position_bias": "key"},
    "DebertaEncoder": {"rel_embeddings": "key", "LayerNorm": "key"},
    "DebertaV2Encoder": {"rel_embeddings": "key", "LayerNorm": "key"},
    "MPNetEncoder": {"relative_attention_bias": "key"},
}
"""What enters the scores from outside the attention, by the class that holds it."""

MLPS = frozenset(
    {"mlp", "intermediate", "output", "fc1", "fc2", "ff", "ffn", "ffn_output", "feed_forward", "DenseReluDense"}
)

OWN_HEADS = frozenset({"visual_projection", "text_projection", "logit_scale", "logit_bias", "classifier"})

ATTENTION_LIKE = re.compile(
    r"attn|attention|qkv|(^|[._])(q|k|v|query|key|value)([._]|$)|(^|[._])rel(ative)?_|position_bias", re.IGNORECASE
)


# ---------------------------------------------------------------- a mapping from a file


class MappingError(ValueError):
    """A mapping cannot be read, or does not fit the model that it is used for."""


class Piece(Frozen):
    """So many neighbouring rows of one role, in a fused tensor."""

    role: Role
    rows: PositiveInt


class TensorPattern(Frozen):
    """What the tensors are whose whole name the pattern matches: of one role, or fused.

    In the pattern `*` stands for anything and `{layer}` for a number, which becomes the block's layer.
    """

    names: Annotated[str, Field(min_length=1, max_length=512)]
    role: Role | None = None
    fused: tuple[Piece, ...] = ()
    axis: Annotated[int, Field(ge=-8, le=7)] = 0

    @model_validator(mode="after")
    def _one_meaning(self) -> Self:
        if (self.role is None) == (not self.fused):
            raise ValueError("give either role or fused")
        if self.axis and not self.fused:
            raise ValueError("axis is for fused tensors")
        if self.names.count("{layer}") > 1:
            raise ValueError("{layer} stands once in a pattern")
        return self

    def match(self, name: str) -> re.Match[str] | None:
        """Return the match of a tensor's name, with a group `layer` if the pattern has one; none for another
        tensor."""
        pattern = re.escape(self.names).replace(re.escape("{layer}"), r"(?P<layer>\d+)").replace(r"\*", ".*")
        return re.fullmatch(pattern, name)


class MappingFile(Frozen):
    """The mapping of one architecture, as docs/blockmap.md describes the file."""

    model_type: Annotated[str, Field(min_length=1, max_length=128)]
    tensors: tuple[TensorPattern, ...] = Field(min_length=1)


def read_mapping(path: Path) -> MappingFile:
    """Return the mapping of a TOML file. Raises MappingError for one that cannot be read or has an unknown key."""
    try:
        return MappingFile(**tomllib.loads(path.read_text(encoding="utf-8")))
    except OSError as fault:
        raise MappingError(f"{path} cannot be read: {fault.strerror}") from fault
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as fault:
        raise MappingError(f"{path} is not TOML: {fault}") from fault
    except ValidationError as fault:
        told = "; ".join(f"{'.'.join(map(str, e['loc'])) or 'mapping'}: {message_of(e)}" for e in fault.errors())
        raise MappingError(f"{path}: {told}") from fault
