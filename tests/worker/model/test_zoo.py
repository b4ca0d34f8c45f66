"""The block map of the whole zoo, proven by each model's behaviour: the names of its tensors prove nothing."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, PreTrainedModel

from tessera.shared.model.blocks import Block, check_table
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import read_block, write_block
from tessera.worker.training.freeze import Freeze
from tests.support.paths import ROOT
from tests.support.variants import variants

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
IDS = {"vocab_size": 40, "bos_token_id": 0, "eos_token_id": 1, "pad_token_id": 2}
TEXT = {**SIZES, **IDS, "max_position_embeddings": 64}
GROUPED = {**TEXT, "num_key_value_heads": 2}
HEADED = {**GROUPED, "head_dim": 8}
PIXELS = {**SIZES, "image_size": 8, "patch_size": 4}
GPT2 = {**IDS, "n_embd": 32, "n_layer": 2, "n_head": 4, "n_positions": 64}
DEBERTA = {**TEXT, "relative_attention": True, "pos_att_type": ["p2c", "c2p"], "max_relative_positions": 8}
EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
SPEECH = {
    **SIZES,
    "conv_dim": [8, 8],
    "conv_stride": [2, 2],
    "conv_kernel": [3, 3],
    "num_feat_extract_layers": 2,
    "num_conv_pos_embeddings": 4,
    "num_conv_pos_embedding_groups": 2,
}
BART = {
    **IDS,
    "d_model": 32,
    "encoder_layers": 2,
    "decoder_layers": 2,
    "encoder_attention_heads": 4,
    "decoder_attention_heads": 4,
    "encoder_ffn_dim": 48,
    "decoder_ffn_dim": 48,
    "decoder_start_token_id": 1,
}
T5 = {**IDS, "d_model": 32, "d_kv": 8, "d_ff": 48, "num_layers": 2, "num_decoder_layers": 2, "num_heads": 4}
LATENT = {
    **TEXT,
    "num_key_value_heads": 4,
    "q_lora_rank": 12,
    "kv_lora_rank": 10,
    "qk_rope_head_dim": 4,
    "qk_nope_head_dim": 6,
    "v_head_dim": 8,
    "n_routed_experts": 4,
    "n_group": 2,
    "topk_group": 1,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "first_k_dense_replace": 1,
}

TOKENS = torch.tensor([[3, 7, 11, 30, 5, 9], [21, 4, 4, 17, 33, 8]])
NOISE = torch.Generator().manual_seed(1)
IMAGES = {"pixel_values": torch.randn(2, 3, 8, 8, generator=NOISE)}
SOUNDS = {"input_values": torch.randn(2, 66, generator=NOISE)}
WORDS = {"input_ids": TOKENS}
PAIRS = {"input_ids": TOKENS, "decoder_input_ids": TOKENS[:, :4]}


@dataclass(frozen=True)
class View:
    """One kind of attention: the place of its probabilities in a model's output, and the names of its blocks."""

    output: str = "attentions"
    names: str = ""


@dataclass(frozen=True)
class Case:
    """A tiny config, what the model is run on, the kinds of attention, and the tower that is run (or all of it)."""

    config: dict[str, Any]
    inputs: dict[str, Tensor]
    views: tuple[View, ...] = (View(),)
    tower: str = ""


def text(config: dict[str, Any], **more: Any) -> Case:
    return Case({**config, **more}, WORDS)


def pixels(**more: Any) -> Case:
    return Case({**PIXELS, **more}, IMAGES)


def speech(**more: Any) -> Case:
    return Case({**SPEECH, **more}, SOUNDS)


def pair(config: dict[str, Any], own: str, cross: str, inputs: dict[str, Tensor] = PAIRS) -> Case:
    """An encoder-decoder: in the decoder, a name shows self-attention and attention to the encoder apart."""
    views = (
        View("encoder_attentions", r"encoder\."),
        View("decoder_attentions", rf"decoder\..*\.{own}\."),
        View("cross_attentions", rf"decoder\..*\.{cross}\."),
    )
    return Case(config, inputs, views)


def bart(**more: Any) -> Case:
    return pair({**BART, "max_position_embeddings": 64, **more}, "self_attn", "encoder_attn")


def towers(**more: Any) -> Case:
    return Case(
        {"text_config": TEXT, "vision_config": PIXELS, **more}, WORDS, (View(names="text_model"),), "text_model"
    )


ZOO = {
    # Projections of their own.
    "aimv2": towers(projection_dim=8),
    "albert": text(TEXT, embedding_size=16),
    "bart": bart(),
    "beit": pixels(use_relative_position_bias=True),
    "bert": text(TEXT),
    "bert-generation": text(TEXT),
    "biogpt": text(TEXT),
    "blenderbot": bart(),
    "camembert": text(TEXT),
    "clip": towers(projection_dim=8),
    "cohere": text(GROUPED),
    "cohere2": text(HEADED),
    "data2vec-audio": speech(),
    "data2vec-vision": pixels(use_relative_position_bias=True),
    "deberta-v2": text(DEBERTA, position_buckets=8, share_att_key=False, norm_rel_ebd="layer_norm"),
    "deit": pixels(),
    "dinov2": pixels(),
    "dinov3_vit": pixels(),
    "distilbert": Case(
        {"vocab_size": 40, "dim": 32, "n_layers": 2, "n_heads": 4, "hidden_dim": 48, "max_position_embeddings": 64},
        WORDS,
    ),
    "electra": text(TEXT, embedding_size=16),
    "ernie": text(TEXT),
    "esm": text(TEXT, position_embedding_type="rotary"),
    "exaone4": text(HEADED),
    "gemma": text(HEADED),
    "gemma2": text(HEADED),
    "gemma3_text": text(HEADED),
    "glm": text(HEADED),
    "glm4": text(HEADED),
    "gpt_neo": text(
        {**IDS, "hidden_size": 32, "num_layers": 2, "num_heads": 4, "attention_types": [[["global", "local"], 1]]}
    ),
    "gpt_oss": text(HEADED, num_local_experts=4),
    "gptj": text(GPT2, rotary_dim=4),
    "granite": text(GROUPED),
    "helium": text(HEADED),
    "hubert": speech(),
    "llama": text(GROUPED),
    "longt5": pair(T5, "SelfAttention", "EncDecAttention"),
    "m2m_100": bart(),
    "marian": bart(),
    "mbart": bart(),
    "megatron-bert": text(TEXT),
    "mistral": text(GROUPED),
    "mixtral": text(GROUPED, num_local_experts=4),
    "mobilebert": text(TEXT, embedding_size=32, intra_bottleneck_size=32, initializer_range=0.5),
    "mpnet": text(TEXT),
    "mt5": pair(T5, "SelfAttention", "EncDecAttention"),
    "nemotron": text(GROUPED),
    "nomic_bert": text(TEXT),
    "olmo": text(GROUPED),
    "olmo2": text(GROUPED),
    "olmoe": text(GROUPED, num_experts=4, num_experts_per_tok=2),
    "opt": text({**IDS, **SIZES, "ffn_dim": 48, "word_embed_proj_dim": 32, "max_position_embeddings": 64}),
    "pegasus": bart(),
    "phi": text(TEXT, qk_layernorm=True),
    "qwen2": text(GROUPED),
    "qwen3": text(HEADED),
    "qwen3_moe": text(HEADED, **EXPERTS),
    "rembert": text(TEXT),
    "roberta": text(TEXT),
    "roformer": text(TEXT, embedding_size=32),
    "siglip": towers(),
    "smollm3": text(GROUPED),
    "stablelm": text(GROUPED, qk_layernorm=True),
    "starcoder2": text(GROUPED),
    "switch_transformers": pair(T5, "SelfAttention", "EncDecAttention"),
    "t5": pair(T5, "SelfAttention", "EncDecAttention"),
    "umt5": pair(T5, "SelfAttention", "EncDecAttention"),
    "videomae": Case(
        {**PIXELS, "num_frames": 4, "tubelet_size": 2}, {"pixel_values": torch.randn(2, 4, 3, 8, 8, generator=NOISE)}
    ),
    "vit": pixels(),
    "vit_msn": pixels(),
    "wav2vec2": speech(),
    "wav2vec2-bert": Case(
        {**SIZES, "feature_projection_input_dim": 8}, {"input_features": torch.randn(2, 10, 8, generator=NOISE)}
    ),
    "wavlm": speech(),
    "whisper": pair(
        {**BART, "num_mel_bins": 8, "max_source_positions": 16, "max_target_positions": 32},
        "self_attn",
        "encoder_attn",
        {"input_features": torch.randn(2, 8, 32, generator=NOISE), "decoder_input_ids": TOKENS[:, :4]},
    ),
    "xglm": text({**IDS, "d_model": 32, "num_layers": 2, "attention_heads": 4, "ffn_dim": 48}),
    "xlm-roberta": text(TEXT),
    "xlnet": text({**IDS, "d_model": 32, "n_layer": 2, "n_head": 4, "d_inner": 48}),
    # Several projections in one matrix.
    "bloom": text({**IDS, "hidden_size": 32, "n_layer": 2, "n_head": 4}),
    "codegen": text(GPT2, rotary_dim=4, n_ctx=64),
    "deberta": text(DEBERTA),
    "falcon": text(TEXT, multi_query=True),
    "gpt2": text(GPT2),
    "gpt_bigcode": text(GPT2),
    "gpt_neox": text(TEXT),
    "gpt_neox_japanese": text(TEXT),
    "imagegpt": text(GPT2),
    "modernbert": text(TEXT),
    "mpt": text(
        {"d_model": 32, "n_layers": 2, "n_heads": 4, "expansion_ratio": 2, "max_seq_len": 64, "vocab_size": 40}
    ),
    "persimmon": text(TEXT),
    "phi3": text(GROUPED),
    "timesformer": Case(
        {**PIXELS, "num_frames": 2},
        {"pixel_values": torch.randn(2, 2, 3, 8, 8, generator=NOISE)},
        (View(names=r"layer\.\d+\.attention\."),),
    ),
    # Keys and values from one latent.
    "deepseek_v2": text(LATENT),
    "deepseek_v3": text(LATENT),
    "glm4_moe_lite": text(LATENT),
    "minicpm3": text(LATENT),
    "youtu": text(LATENT),
}

VARIANTS = {
    "falcon, all heads": ("falcon", text(TEXT, multi_query=False)),
    "falcon, groups": ("falcon", text(TEXT, new_decoder_architecture=True, num_kv_heads=2)),
    "falcon, with biases": ("falcon", text(TEXT, new_decoder_architecture=True, num_kv_heads=2, bias=True)),
    "gpt_bigcode, all heads": ("gpt_bigcode", text(GPT2, multi_query=False)),
    "deberta-v2, shared projections": ("deberta-v2", text(DEBERTA, position_buckets=8, share_att_key=True)),
    "deepseek_v3, queries without a latent": ("deepseek_v3", text({**LATENT, "q_lora_rank": None})),
    "albert, two groups": ("albert", text(TEXT, embedding_size=16, num_hidden_groups=2)),
    "wav2vec2-bert, relative": (
        "wav2vec2-bert",
        Case(
            {**SIZES, "feature_projection_input_dim": 8, "position_embeddings_type": "relative"},
            {"input_features": torch.randn(2, 10, 8, generator=NOISE)},
        ),
    ),
    "clip, vision": (
        "clip",
        Case(
            {"text_config": TEXT, "vision_config": PIXELS, "projection_dim": 8},
            IMAGES,
            (View(names="vision_model"),),
            "vision_model",
        ),
    ),
}

TABLES = {
    "beit": "layers.1.relative_position_bias.relative_position_bias_table",
    "deberta": "encoder.rel_embeddings.weight",
    "deberta-v2": "encoder.LayerNorm.weight",
    "gpt_oss": "layers.1.self_attn.sinks",
    "mobilebert": "encoder.layer.1.bottleneck.attention.dense.weight",
    "mpnet": "encoder.relative_attention_bias.weight",
    "t5": "encoder.block.0.layer.0.SelfAttention.relative_attention_bias.weight",
    "wavlm": "encoder.layers.0.attention.rel_attn_embed.weight",
    "xlnet": "layer.1.rel_attn.r",
}
"""Tensors that change a score and are no projection of queries or keys."""

OFTEN = {"albert", "bert", "bloom", "clip", "gpt2", "llama", "t5", "vit", "wav2vec2", "xlnet"}
"""Tied and shared tensors, tables outside the blocks, fused matrices, towers, weight normalisation."""
LAYOUTS = OFTEN | {
    "aimv2", "codegen", "data2vec-vision", "deberta", "deberta-v2", "deepseek_v3", "distilbert", "falcon",
    "gpt_bigcode", "gpt_neox", "modernbert", "mpt", "phi", "phi3", "qwen3", "siglip", "timesformer", "wav2vec2-bert",
    "wavlm",
}  # fmt: skip
"""A family of each row of `worker/model/layouts.py`, and of each kind of attention."""


class Subject:
    """A tiny random model, its inputs, and its blocks."""

    def __init__(self, model_type: str, case: Case) -> None:
        config = AutoConfig.for_model(model_type, **case.config)
        with torch.random.fork_rng():
            torch.manual_seed(0)
            model = AutoModel.from_config(config, attn_implementation="eager").eval()
        assert isinstance(model, PreTrainedModel)
        self.model, self.case = model, case
        self.tensors = named_tensors(model)
        self.blocks = block_table(model)

    def run(self) -> Any:
        return self.model.get_submodule(self.case.tower)(**self.case.inputs, output_attentions=True, use_cache=False)

    def probabilities(self, view: View) -> list[Tensor]:
        """Of each layer, [batch, heads, queries, keys] (XLNet keeps the batch and the heads last)."""
        with torch.no_grad():
            return list(self.run()[view.output])

    def output(self) -> Tensor:
        with torch.no_grad():
            return self.run().last_hidden_state

    def seen(self, view: View, role: str) -> list[Block]:
        return [b for b in self.blocks if b.role == role and re.search(view.names, b.tensor)]

    @contextmanager
    def changed(self, blocks: list[Block]) -> Iterator[None]:
        rng = np.random.default_rng(2)
        before = {block: read_block(self.tensors, block) for block in blocks}
        for block, values in before.items():
            write_block(self.tensors, block, values + rng.normal(size=block.shape).astype(np.float32))
        yield
        for block, values in before.items():
            write_block(self.tensors, block, values)

    def bits(self) -> dict[str, bytes]:
        return {block.name: read_block(self.tensors, block).tobytes() for block in self.blocks}


def assert_covers_every_tensor_once(subject: Subject) -> None:
    check_table(subject.blocks)
    assert {block.tensor for block in subject.blocks} == set(subject.tensors)
    assert sum(block.numel for block in subject.blocks) == sum(t.numel() for t in subject.tensors.values())


def assert_roles_are_what_the_attention_does(subject: Subject, view: View) -> None:
    before, put_out = subject.probabilities(view), subject.output()
    layers = sorted({b.layer for b in subject.seen(view, "value") if b.layer is not None})
    assert layers
    for layer in layers:
        for role in ("query", "key", "value", "output"):
            blocks = [b for b in subject.seen(view, role) if b.layer == layer]
            assert blocks
            with subject.changed(blocks):
                after = subject.probabilities(view)
                assert all(torch.equal(a, b) for a, b in zip(before[:layer], after[:layer], strict=True))
                if role in {"query", "key"}:
                    assert not torch.allclose(before[layer], after[layer], atol=1e-4), (view, layer, role)
                else:
                    assert torch.equal(before[layer], after[layer]), (view, layer, role)
                    assert not torch.allclose(put_out, subject.output(), atol=1e-4), (view, layer, role)


def assert_each_fused_row_is_of_its_role(subject: Subject, view: View) -> None:
    """Row by row: the gradient of a layer's probabilities reaches all query and key rows, and no value row."""
    fused = [b for b in subject.blocks if b.part and len(b.shape) > 1 and re.search(view.names, b.tensor)]
    layers = sorted({block.layer for block in fused if block.layer is not None})
    probabilities = subject.run()[view.output] if layers else ()
    for layer in layers:
        subject.model.zero_grad()
        weighted = (probabilities[layer] * torch.randn(probabilities[layer].shape, generator=NOISE)).sum()
        weighted.backward(retain_graph=True)
        for block in (block for block in fused if block.layer == layer):
            assert block.part
            gradient = subject.tensors[block.tensor].grad
            assert gradient is not None
            rows = gradient.movedim(block.part.axis, 0).flatten(1).abs().sum(1)[block.part.index()]
            assert not rows.any() if block.role == "value" else rows.all(), block.name
    subject.model.zero_grad()


def assert_only_values_are_trained(subject: Subject) -> None:
    values = [block for block in subject.blocks if block.role == "value"]
    before, put_out = subject.bits(), subject.output()
    freeze = Freeze(subject.model, values)
    optimizer = torch.optim.AdamW(freeze.parameters, lr=0.1, weight_decay=0.5)
    for _ in range(2):
        optimizer.zero_grad()
        (subject.run().last_hidden_state * torch.randn(put_out.shape, generator=NOISE)).sum().backward()
        freeze.mask_gradients()
        optimizer.step()
        freeze.restore()
    after = subject.bits()
    moved = {name for name in before if before[name] != after[name]}
    used = {b.name for view in subject.case.views for b in subject.seen(view, "value") if b.layer is not None}
    assert used <= moved <= {block.name for block in values}
    assert not torch.allclose(put_out, subject.output(), atol=1e-4)


def prove(model_type: str, case: Case) -> None:
    subject = Subject(model_type, case)
    assert_covers_every_tensor_once(subject)
    for view in case.views:
        assert_roles_are_what_the_attention_does(subject, view)
        assert_each_fused_row_is_of_its_role(subject, view)
    assert_only_values_are_trained(subject)


@pytest.mark.parametrize("model_type", variants(ZOO, LAYOUTS))
def test_queries_and_keys_move_the_attention_and_values_do_not_and_what_is_frozen_stays(model_type: str) -> None:
    prove(model_type, ZOO[model_type])


@pytest.mark.parametrize("variant", VARIANTS)
def test_so_it_is_for_the_other_arrangements_of_a_family(variant: str) -> None:
    prove(*VARIANTS[variant])


@pytest.mark.parametrize("model_type", TABLES)
def test_what_else_moves_the_scores_is_a_query_or_a_key(model_type: str) -> None:
    subject = Subject(model_type, ZOO[model_type])
    view = subject.case.views[0]
    [block] = [block for block in subject.blocks if block.name == TABLES[model_type]]
    assert block.role in {"query", "key"}
    before = subject.probabilities(view)
    with subject.changed([block]):
        after = subject.probabilities(view)
    assert not torch.allclose(before[-1], after[-1], atol=1e-4)


def test_document_names_the_families_that_are_proven() -> None:
    document = (ROOT / "docs" / "blockmap.md").read_text()
    _, families, _ = re.split(r"<!-- /?families -->", document)
    assert re.findall(r"`([^`]+)`", families) == sorted(ZOO)
