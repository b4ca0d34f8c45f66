"""The block map is proven by what the model does, not by what its tensors are called."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel

from shared.blocks import Block, check_table
from worker.blockmap import UnknownArchitecture, block_table, named_tensors
from worker.models import read_block, write_block

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1}
PIXELS = {**SIZES, "image_size": 8, "patch_size": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1}


@dataclass(frozen=True)
class Case:
    """A tiny config, the tower that is run (empty for the whole model), and the part of the names that is its own."""

    model_type: str
    config: dict[str, Any]
    tower: str = ""
    pixels: bool = False


CLIP = {"text_config": TEXT, "vision_config": PIXELS, "projection_dim": 8}
CASES = {
    "bert": Case("bert", TEXT),
    "vit": Case("vit", PIXELS, pixels=True),
    "clip-text": Case("clip", CLIP, tower="text_model"),
    "clip-vision": Case("clip", CLIP, tower="vision_model", pixels=True),
    "llama": Case("llama", {**TEXT, "num_key_value_heads": 2}),
    "qwen3": Case("qwen3", {**TEXT, "num_key_value_heads": 2, "head_dim": 8}),
    "gpt2": Case("gpt2", GPT2),
}


def tiny(case: Case) -> PreTrainedModel:
    torch.manual_seed(0)
    config = AutoConfig.for_model(case.model_type, **case.config)
    model = AutoModel.from_config(config, attn_implementation="eager").eval()
    assert isinstance(model, PreTrainedModel)
    return model


def run(model: PreTrainedModel, case: Case) -> tuple[list[Tensor], list[Tensor]]:
    """Attention probabilities [batch, heads, queries, keys] of each layer, and what each layer puts out."""
    generator = torch.Generator().manual_seed(1)
    tower = model.get_submodule(case.tower)
    if case.pixels:
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(2, 30, (2, 6), generator=generator)}
    with torch.no_grad():
        out = tower(**inputs, output_attentions=True, output_hidden_states=True)
    return list(out.attentions), list(out.hidden_states[1:])


def change(model: PreTrainedModel, case: Case, role: str, layer: int) -> None:
    tensors, rng = named_tensors(model), np.random.default_rng(2)
    chosen = [b for b in block_table(model) if b.role == role and b.layer == layer and b.name.startswith(case.tower)]
    assert chosen
    for block in chosen:
        noise = rng.normal(size=block.shape).astype(np.float32)
        write_block(tensors, block, read_block(tensors, block) + noise)


@pytest.fixture(params=CASES)
def case(request: pytest.FixtureRequest) -> Case:
    return CASES[request.param]


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("role", ["query", "key"])
def test_changing_queries_or_keys_changes_that_layers_attention_and_no_earlier_one(
    case: Case, role: str, layer: int
) -> None:
    model = tiny(case)
    before, _ = run(model, case)
    change(model, case, role, layer)
    after, _ = run(model, case)
    assert not torch.allclose(before[layer], after[layer], atol=1e-4)
    assert all(torch.equal(a, b) for a, b in zip(before[:layer], after[:layer], strict=True))


@pytest.mark.parametrize("layer", [0, 1])
@pytest.mark.parametrize("role", ["value", "output", "mlp"])
def test_changing_values_changes_the_layers_output_and_not_one_bit_of_its_attention(
    case: Case, role: str, layer: int
) -> None:
    model = tiny(case)
    before, puts_out = run(model, case)
    change(model, case, role, layer)
    after, now_puts_out = run(model, case)
    assert torch.equal(before[layer], after[layer])
    assert not torch.allclose(puts_out[layer], now_puts_out[layer], atol=1e-4)


def test_table_covers_every_tensor_exactly_once(case: Case) -> None:
    model = tiny(case)
    table = block_table(model)
    check_table(table)
    assert sum(block.numel for block in table) == sum(tensor.numel() for tensor in named_tensors(model).values())
    assert {block.tensor for block in table} == set(named_tensors(model))


def test_table_is_the_same_on_the_meta_device(case: Case) -> None:
    config = AutoConfig.for_model(case.model_type, **case.config)
    with torch.device("meta"):
        empty = AutoModel.from_config(config)
    assert next(empty.parameters()).device.type == "meta"
    assert block_table(empty) == block_table(tiny(case))


def roles_of(table: tuple[Block, ...]) -> dict[str, str]:
    return {block.name: block.role for block in table}


def test_gpt2_weight_divides_by_columns_and_its_bias_by_rows() -> None:
    table = {block.name: block for block in block_table(tiny(CASES["gpt2"]))}
    value = table["h.1.attn.c_attn.weight#value"]
    assert value.part is not None
    assert (value.part.axis, value.part.spans, value.shape) == (1, ((64, 96),), (32, 32))
    bias = table["h.1.attn.c_attn.bias#key"]
    assert bias.part is not None
    assert (bias.part.axis, bias.part.spans, bias.layer) == (0, ((32, 64),), 1)


def test_norms_of_queries_and_keys_belong_to_the_queries_and_keys() -> None:
    roles = roles_of(block_table(tiny(CASES["qwen3"])))
    assert roles["layers.0.self_attn.q_norm.weight"] == "query"
    assert roles["layers.0.self_attn.k_norm.weight"] == "key"
    assert roles["layers.0.input_layernorm.weight"] == "norm"


def test_two_towers_each_count_their_layers_from_zero() -> None:
    table = block_table(tiny(CASES["clip-text"]))
    queries = [(b.tensor.split(".")[0], b.layer) for b in table if b.role == "query" and b.tensor.endswith("weight")]
    assert queries == [("text_model", 0), ("text_model", 1), ("vision_model", 0), ("vision_model", 1)]
    roles = roles_of(table)
    assert roles["text_projection.weight"] == roles["visual_projection.weight"] == roles["logit_scale"] == "head"


def test_head_is_what_lies_outside_the_base_model_and_the_pooler_is_other() -> None:
    with_head = roles_of(block_table(AutoModelForMaskedLM.from_config(AutoConfig.for_model("bert", **TEXT))))
    assert with_head["cls.predictions.transform.LayerNorm.weight"] == "head"
    assert with_head["bert.embeddings.LayerNorm.weight"] == "norm"
    assert with_head["bert.embeddings.word_embeddings.weight"] == "embedding"
    assert roles_of(block_table(tiny(CASES["bert"])))["pooler.dense.weight"] == "other"


@pytest.mark.parametrize("tied", [True, False])
def test_tied_weights_are_one_block_under_their_first_name(tied: bool) -> None:
    config = AutoConfig.for_model("gpt2", **GPT2, tie_word_embeddings=tied)
    roles = roles_of(block_table(AutoModelForCausalLM.from_config(config)))
    assert roles["transformer.wte.weight"] == "embedding"
    assert ("lm_head.weight" in roles) is not tied


def test_float_buffers_are_blocks_and_integer_buffers_are_not() -> None:
    model = tiny(CASES["bert"])
    model.get_submodule("encoder.layer.0").register_buffer("scale", torch.ones(3))
    model.get_submodule("encoder.layer.0").register_buffer("count", torch.ones(3, dtype=torch.int64))
    model.get_submodule("encoder.layer.0").register_buffer("scratch", torch.ones(3), persistent=False)
    roles = roles_of(block_table(model))
    assert roles["encoder.layer.0.scale"] == "other"
    assert not {"encoder.layer.0.count", "encoder.layer.0.scratch"} & set(roles)


def test_unknown_layout_is_refused_with_the_names_it_has() -> None:
    config = AutoConfig.for_model("bloom", hidden_size=16, n_layer=1, n_head=2, vocab_size=20)
    with pytest.raises(UnknownArchitecture, match="LAYOUTS") as refusal:
        block_table(AutoModel.from_config(config))
    assert "h.0.self_attention.query_key_value.weight" in refusal.value.tensors


def test_one_unknown_layer_among_known_ones_is_refused() -> None:
    model = tiny(CASES["bert"])
    attention = model.get_submodule("encoder.layer.1.attention")
    attention.self = nn.ModuleDict({"Wqkv": nn.Linear(32, 96)})
    with pytest.raises(UnknownArchitecture) as refusal:
        block_table(model)
    assert "encoder.layer.1.attention.self.Wqkv.weight" in refusal.value.tensors
    assert not [name for name in refusal.value.tensors if "layer.0" in name]


def test_attention_with_a_projection_that_its_row_does_not_name_is_refused() -> None:
    # Cross-attention of GPT-2 fuses keys and values only; thirds of its 64 columns would be plausible and wrong.
    config = AutoConfig.for_model("gpt2", **{**GPT2, "n_embd": 36}, add_cross_attention=True)
    with pytest.raises(UnknownArchitecture, match="unknown role") as refusal:
        block_table(AutoModel.from_config(config))
    assert "h.0.crossattention.q_attn.weight" in refusal.value.tensors


def test_tensor_that_cannot_be_averaged_is_refused_by_name() -> None:
    model = tiny(CASES["bert"])
    whole = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    model.get_submodule("pooler.dense").register_parameter("weight", whole)
    with pytest.raises(ValueError, match=r"pooler\.dense\.weight is torch\.int8"):
        block_table(model)
