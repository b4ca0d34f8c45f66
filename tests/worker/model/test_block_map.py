"""The block map, proven by a model's behaviour and not by the names of its tensors."""

import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedModel
from transformers.models.gpt_neox.modeling_gpt_neox import GPTNeoXAttention
from typer.testing import CliRunner

from tessera.shared.model.blocks import Block, check_table
from tessera.shared.model.spec import Model
from tessera.worker.cli.model import app
from tessera.worker.errors import UnknownArchitecture
from tessera.worker.model.block_map import block_table, named_tensors, tied_names
from tessera.worker.model.build import check_model, read_block, write_block
from tessera.worker.model.layouts import MappingError, MappingFile, read_mapping
from tests.support.paths import ROOT
from tests.support.tasks import NORMALISED

SIZES = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 48}
TEXT = {**SIZES, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1}
PIXELS = {**SIZES, "image_size": 8, "patch_size": 4}
GPT2 = {"n_embd": 32, "n_layer": 2, "n_head": 4, "vocab_size": 30, "bos_token_id": 0, "eos_token_id": 1}


class Mystery(nn.Module):
    """An attention that no table knows: values, keys and queries of two heads of four, one head after the other."""

    def __init__(self) -> None:
        super().__init__()
        self.wqkv = nn.Linear(32, 24, bias=False)
        self.out = nn.Linear(8, 32, bias=False)


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
    """Attention probabilities [batch, heads, queries, keys] of each layer, and each layer's output."""
    generator = torch.Generator().manual_seed(1)
    tower = model.get_submodule(case.tower)
    if case.pixels:
        inputs = {"pixel_values": torch.randn(2, 3, 8, 8, generator=generator)}
    else:
        inputs = {"input_ids": torch.randint(2, 30, (2, 6), generator=generator)}
    with torch.no_grad():
        out = tower(**inputs, output_attentions=True, output_hidden_states=True)
    return list(out.attentions), list(out.hidden_states[1:])


def change(model: PreTrainedModel, case: Case, role: str, layer: int, told: MappingFile | None = None) -> None:
    tensors, rng = named_tensors(model), np.random.default_rng(2)
    table = block_table(model, told)
    chosen = [b for b in table if b.role == role and b.layer == layer and b.name.startswith(case.tower)]
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
    model = AutoModelForCausalLM.from_config(config)
    roles = roles_of(block_table(model))
    assert roles["transformer.wte.weight"] == "embedding"
    assert ("lm_head.weight" in roles) is not tied
    assert tied_names(model) == ({"transformer.wte.weight": ["lm_head.weight"]} if tied else {})


def test_float_buffers_are_blocks_and_integer_buffers_are_not() -> None:
    model = tiny(CASES["bert"])
    model.get_submodule("encoder.layer.0").register_buffer("scale", torch.ones(3))
    model.get_submodule("encoder.layer.0").register_buffer("count", torch.ones(3, dtype=torch.int64))
    model.get_submodule("encoder.layer.0").register_buffer("scratch", torch.ones(3), persistent=False)
    roles = roles_of(block_table(model))
    assert roles["encoder.layer.0.scale"] == "other"
    assert not {"encoder.layer.0.count", "encoder.layer.0.scratch"} & set(roles)


def test_no_statistic_of_a_batch_norm_has_another_role_or_layer_than_its_scale() -> None:
    for table in (NORMALISED.blocks, block_table(conformer())):
        blocks = {block.name: block for block in table}
        means = [name.removesuffix("running_mean") for name in blocks if name.endswith(".running_mean")]
        assert means
        for path in means:
            parts = [blocks[path + name] for name in ("weight", "running_mean", "running_var")]
            assert {(part.role, part.layer) for part in parts} == {("norm", parts[0].layer)}, path


def conformer() -> PreTrainedModel:
    """A speech model with a batch normalisation in the middle of each layer."""
    sizes = {"conv_dim": (8, 8), "conv_stride": (2, 2), "conv_kernel": (2, 2), "num_feat_extract_layers": 2}
    config = AutoConfig.for_model("wav2vec2-conformer", **SIZES, **sizes, num_conv_pos_embeddings=4)
    with torch.device("meta"):
        return AutoModel.from_config(config)


def test_a_mapped_role_is_that_of_the_module_s_statistics_too(tmp_path: Path) -> None:
    model = mysterious()
    for layer in model.get_submodule("h").children():
        layer.attn.normed = nn.BatchNorm1d(8)
    rows = '[[tensors]]\nnames = "h.{layer}.attn.normed.weight"\nrole = "key"\n'
    rows += '[[tensors]]\nnames = "h.{layer}.attn.normed.bias"\nrole = "key"\n'
    table = {block.name: block for block in block_table(model, mapping(tmp_path, MYSTERY + rows))}
    assert {table[f"h.1.attn.normed.{name}"].role for name in ("weight", "running_mean", "running_var")} == {"key"}
    assert table["h.1.attn.normed.running_var"].layer == 1


def test_parameter_without_elements_is_no_block() -> None:
    model = tiny(CASES["bert"])
    model.get_submodule("pooler").register_parameter("registers", nn.Parameter(torch.empty(1, 0, 32)))
    assert "pooler.registers" not in roles_of(block_table(model))


def test_unknown_layout_is_refused_with_the_names_it_has() -> None:
    model = tiny(CASES["gpt2"])
    for layer in model.get_submodule("h").children():
        layer.attn = Mystery()
    with pytest.raises(UnknownArchitecture, match="no attention recognised in GPT2Model") as refusal:
        block_table(model)
    assert refusal.value.tensors == (
        "h.0.attn.out.weight",
        "h.0.attn.wqkv.weight",
        "h.1.attn.out.weight",
        "h.1.attn.wqkv.weight",
    )


def test_fused_projection_of_an_unproven_class_is_refused_whatever_its_name() -> None:
    class OtherAttention(GPTNeoXAttention):
        """Could order its rows in any of three ways."""

    config = AutoConfig.for_model("gpt_neox", **TEXT)
    model = AutoModel.from_config(config)
    for index, layer in enumerate(model.get_submodule("layers").children()):
        layer.attention = OtherAttention(config, index)
    with pytest.raises(UnknownArchitecture) as refusal:
        block_table(model)
    assert "layers.0.attention.query_key_value.weight" in refusal.value.tensors


@pytest.mark.parametrize("name", ["relative_positions", "rel_embeddings", "position_bias"])
def test_table_of_relative_positions_that_nothing_explains_is_refused(name: str) -> None:
    model = tiny(CASES["bert"])
    model.get_submodule("encoder").register_module(name, nn.Embedding(4, 4))
    with pytest.raises(UnknownArchitecture) as refusal:
        block_table(model)
    assert refusal.value.tensors == (f"encoder.{name}.weight",)


def test_one_unknown_layer_among_known_ones_is_refused() -> None:
    model = tiny(CASES["bert"])
    attention = model.get_submodule("encoder.layer.1.attention")
    attention.self = nn.ModuleDict({"Wqkv": nn.Linear(32, 96)})
    with pytest.raises(UnknownArchitecture) as refusal:
        block_table(model)
    assert "encoder.layer.1.attention.self.Wqkv.weight" in refusal.value.tensors
    assert not [name for name in refusal.value.tensors if "layer.0" in name]


def test_attention_with_a_projection_that_its_row_does_not_name_is_refused() -> None:
    model = tiny(CASES["bert"])
    model.get_submodule("encoder.layer.0.attention.self").register_module("gate", nn.Linear(32, 32))
    with pytest.raises(UnknownArchitecture, match="unknown role") as refusal:
        block_table(model)
    assert refusal.value.tensors == (
        "encoder.layer.0.attention.self.gate.bias",
        "encoder.layer.0.attention.self.gate.weight",
    )


def test_cross_attention_of_gpt2_has_queries_of_its_own_and_fuses_keys_and_values() -> None:
    model = AutoModel.from_config(AutoConfig.for_model("gpt2", **GPT2, add_cross_attention=True))
    table = {block.name: block for block in block_table(model)}
    assert table["h.0.crossattention.q_attn.weight"].role == "query"
    value = table["h.0.crossattention.c_attn.weight#value"]
    assert value.part is not None
    assert value.part.spans == ((32, 64),)
    assert "h.0.crossattention.c_attn.weight#query" not in table


def test_groups_of_falcon_divide_into_their_queries_one_key_and_one_value() -> None:
    # Four heads of 8 in two groups: 16 rows of queries, 8 of keys, 8 of values, twice.
    config = AutoConfig.for_model("falcon", **TEXT, new_decoder_architecture=True, num_kv_heads=2)
    parts = {b.role: b.part.spans for b in block_table(AutoModel.from_config(config)) if b.layer == 0 and b.part}
    assert parts == {"query": ((0, 16), (32, 48)), "key": ((16, 24), (48, 56)), "value": ((24, 32), (56, 64))}


def test_latent_is_a_key_and_only_what_unfolds_it_into_values_is_a_value() -> None:
    # Two heads, each 6 rows of keys and 8 of values.
    sizes = {"q_lora_rank": 12, "kv_lora_rank": 10, "qk_rope_head_dim": 4, "qk_nope_head_dim": 6, "v_head_dim": 8}
    config = AutoConfig.for_model("deepseek_v3", **{**TEXT, "num_attention_heads": 2}, **sizes, num_key_value_heads=2)
    with torch.device("meta"):
        table = {b.name: b for b in block_table(AutoModel.from_config(config)) if b.layer == 0}
    assert table["layers.0.self_attn.kv_a_proj_with_mqa.weight"].role == "key"
    [value] = [block for block in table.values() if block.role == "value"]
    assert value.name == "layers.0.self_attn.kv_b_proj.weight#value"
    assert value.part is not None
    assert value.part.spans == ((6, 14), (20, 28))


def test_shared_layers_count_once_for_each_set_of_tensors() -> None:
    config = {**TEXT, "embedding_size": 16, "num_hidden_layers": 6, "num_hidden_groups": 2}
    table = block_table(AutoModel.from_config(AutoConfig.for_model("albert", **config)))
    assert {block.layer for block in table if block.role == "query"} == {0, 1}


def test_attention_outside_the_stack_has_roles_and_no_layer() -> None:
    config = AutoConfig.for_model("siglip", text_config=TEXT, vision_config=PIXELS)
    table = {block.name: block for block in block_table(AutoModel.from_config(config))}
    pooling = table["vision_model.head.attention.in_proj_weight#value"]
    assert (pooling.role, pooling.layer) == ("value", None)


def test_tensor_that_cannot_be_averaged_is_refused_by_name() -> None:
    model = tiny(CASES["bert"])
    whole = nn.Parameter(torch.ones(2, 2, dtype=torch.int8), requires_grad=False)
    model.get_submodule("pooler.dense").register_parameter("weight", whole)
    with pytest.raises(ValueError, match=r"pooler\.dense\.weight is torch\.int8"):
        block_table(model)


# ---------------------------------------------------------------- a mapping from a file


MYSTERY = """
model_type = "gpt2"

[[tensors]]
names = "h.{layer}.attn.wqkv.*"
fused = [{ role = "value", rows = 4 }, { role = "key", rows = 4 }, { role = "query", rows = 4 }]

[[tensors]]
names = "h.{layer}.attn.out.*"
role = "output"
"""


def mapping(tmp_path: Path, content: str) -> MappingFile:
    file = tmp_path / "mapping.toml"
    file.write_text(content)
    return read_mapping(file)


def mysterious() -> PreTrainedModel:
    model = tiny(CASES["gpt2"])
    for layer in model.get_submodule("h").children():
        layer.attn = Mystery()
    return model


def test_mapping_explains_what_no_table_knows_and_the_rest_is_found_as_ever(tmp_path: Path) -> None:
    table = {block.name: block for block in block_table(mysterious(), mapping(tmp_path, MYSTERY))}
    value = table["h.1.attn.wqkv.weight#value"]
    assert value.part is not None
    assert (value.part.spans, value.layer, value.shape) == (((0, 4), (12, 16)), 1, (8, 32))
    assert table["h.0.attn.out.weight"].role == "output"
    assert (table["h.0.mlp.c_fc.weight"].role, table["h.0.mlp.c_fc.weight"].layer) == ("mlp", 0)


def test_layer_of_a_pattern_is_the_layer_of_the_block(tmp_path: Path) -> None:
    row = '[[tensors]]\nnames = "h.*.mlp.c_{layer}*"\nrole = "other"\n'
    model = mysterious()
    model.get_submodule("h.0.mlp").register_module("c_7", nn.Linear(2, 2))
    table = {block.name: block for block in block_table(model, mapping(tmp_path, MYSTERY + row))}
    assert (table["h.0.mlp.c_7.weight"].role, table["h.0.mlp.c_7.weight"].layer) == ("other", 7)


def test_mapping_is_stronger_than_the_table_and_may_divide_the_last_axis(tmp_path: Path) -> None:
    swapped = """
model_type = "gpt2"
[[tensors]]
names = "h.*.attn.c_attn.*"
axis = -1
fused = [{ role = "value", rows = 32 }, { role = "key", rows = 32 }, { role = "query", rows = 32 }]
"""
    table = {block.name: block for block in block_table(tiny(CASES["gpt2"]), mapping(tmp_path, swapped))}
    for name, axis in (("h.0.attn.c_attn.weight#value", 1), ("h.0.attn.c_attn.bias#value", 0)):
        part = table[name].part
        assert part is not None
        assert (part.axis, part.spans) == (axis, ((0, 32),))


def test_attention_that_is_mapped_whole_needs_no_row_that_fits_what_stands_beside_it(tmp_path: Path) -> None:
    model = tiny(CASES["bert"])
    for layer in model.get_submodule("encoder.layer").children():
        layer.attention.output = nn.ModuleDict({"mix": nn.Linear(32, 32)})
    with pytest.raises(UnknownArchitecture, match=r"no output\.dense beside"):
        block_table(model)
    names = {"self.query": "query", "self.key": "key", "self.value": "value", "output.mix": "output"}
    rows = [f'[[tensors]]\nnames = "*.attention.{name}.*"\nrole = "{role}"\n' for name, role in names.items()]
    table = block_table(model, mapping(tmp_path, 'model_type = "bert"\n' + "".join(rows)))
    roles = {block.name: (block.role, block.layer) for block in table}
    assert roles["encoder.layer.1.attention.self.value.weight"] == ("value", 1)
    assert roles["encoder.layer.1.attention.output.mix.weight"] == ("output", 1)


def test_mapping_must_claim_every_tensor_of_the_attention(tmp_path: Path) -> None:
    without_output = MYSTERY[: MYSTERY.rindex("[[tensors]]")]
    with pytest.raises(UnknownArchitecture) as refusal:
        block_table(mysterious(), mapping(tmp_path, without_output))
    assert refusal.value.tensors == ("h.0.attn.out.weight", "h.1.attn.out.weight")


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (MYSTERY + '[[tensors]]\nnames = "h.*.nothing"\nrole = "mlp"', r"no tensor matches h\.\*\.nothing"),
        (MYSTERY + '[[tensors]]\nnames = "*.out.weight"\nrole = "mlp"', "h.0.attn.out.weight is matched by two rows"),
        (MYSTERY.replace("rows = 4", "rows = 5"), "24 rows are not a multiple of"),
        (MYSTERY.replace("fused", "axis = 2\nfused"), "has no axis 2"),
        (MYSTERY.replace("gpt2", "bert"), "the mapping is for bert, but the model is a gpt2"),
    ],
)
def test_mapping_that_does_not_fit_is_refused(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(MappingError, match=says):
        block_table(mysterious(), mapping(tmp_path, content))


@pytest.mark.parametrize(
    ("content", "says"),
    [
        ("model_type =", "is not valid TOML"),
        ('model_type = "x"', "tensors: required, but missing"),
        (MYSTERY + "heads = 4", "tensors.1.heads: unknown key"),
        (MYSTERY + 'fused = [{ role = "key", rows = 4 }]', "give either role or fused"),
        (MYSTERY + "axis = 1", "axis is only for fused tensors"),
        (MYSTERY.replace("rows = 4", "rows = 0"), "greater than 0"),
        (MYSTERY.replace("output", "outputs"), "tensors.1.role"),
        (MYSTERY.replace("h.{layer}", "{layer}.{layer}"), "may occur only once"),
    ],
)
def test_mapping_that_makes_no_sense_is_refused_when_it_is_read(tmp_path: Path, content: str, says: str) -> None:
    with pytest.raises(MappingError, match=says):
        mapping(tmp_path, content)
    with pytest.raises(MappingError, match="cannot be read"):
        read_mapping(tmp_path / "nowhere.toml")


# ---------------------------------------------------------------- `tessera model`

CONVBERT = {**TEXT, "model_type": "convbert"}


def tessera_model(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    return result.exit_code, result.stdout, result.stderr


def written(file: Path, content: str) -> Path:
    file.write_text(content)
    return file


def documented_mapping(tmp_path: Path) -> Path:
    document = (ROOT / "docs" / "blockmap.md").read_text()
    first, *_ = re.findall(r"```toml\n(.*?)```", document, re.DOTALL)
    return written(tmp_path / "convbert.toml", first)


def test_blocks_of_a_config_of_seven_billion_parameters_are_counted_without_allocating_them(tmp_path: Path) -> None:
    config = {"model_type": "llama", "dtype": "bfloat16", "hidden_size": 4096, "intermediate_size": 11008}
    more = {"num_hidden_layers": 32, "num_attention_heads": 32, "vocab_size": 32000}
    file = written(tmp_path / "config.json", json.dumps({**config, **more}))
    code, printed, _ = tessera_model("blocks", file, "--head", "causal-lm", "--json")
    rows = json.loads(printed)
    assert code == 0
    assert sum(row["parameters"] for row in rows) == 6_738_415_616
    # 4096 x 4096 weights of two bytes each.
    assert {"layer": 31, "role": "value", "blocks": 1, "parameters": 1 << 24, "bytes": 1 << 25} in rows
    assert json.loads(tessera_model("blocks", tmp_path, "--json")[1]) != rows  # features alone have no head


def test_mapping_of_the_document_is_what_convbert_lacks(tmp_path: Path) -> None:
    config = written(tmp_path / "config.json", json.dumps(CONVBERT))
    code, _, error = tessera_model("blocks", config)
    assert (code, error.count("\n")) == (2, 1)
    assert "conv_kernel_layer" in error
    mapped = documented_mapping(tmp_path)
    assert tessera_model("blocks", config, "--mapping", mapped)[0] == 0
    out = tmp_path / "model"
    options = ("--config", config, "--head", "masked-lm", "--mapping", mapped, "--random")
    assert tessera_model("init", out, *options)[0] == 0
    document = Model.model_validate_json((out / "blocks.json").read_bytes())
    with pytest.raises(UnknownArchitecture):
        check_model(document)
    check_model(document, read_mapping(mapped))
    block = document.by_name["convbert.encoder.layer.1.attention.self.conv_out_layer.weight"]
    assert (block.role, block.layer) == ("value", 1)
    again = ("--config", out, "--head", "masked-lm", "--mapping", mapped, "--pretrained")
    assert tessera_model("init", tmp_path / "again", *again)[0] == 0


def test_mapping_of_the_document_gives_roles_that_do_as_they_say(tmp_path: Path) -> None:
    case = Case("convbert", TEXT)
    model, told = tiny(case), read_mapping(documented_mapping(tmp_path))
    before, puts_out = run(model, case)
    change(model, case, "value", 1, told)
    after, now_puts_out = run(model, case)
    assert all(torch.equal(a, b) for a, b in zip(before, after, strict=True))
    assert not torch.allclose(puts_out[1], now_puts_out[1], atol=1e-4)


def test_table_of_blocks_needs_no_head_and_no_mapping(tmp_path: Path) -> None:
    config = written(tmp_path / "config.json", json.dumps({**TEXT, "model_type": "bert"}))
    assert tessera_model("init", tmp_path / "model", "--config", config, "--head", "features", "--random")[0] == 0
    for option in (("--head", "features"), ("--mapping", config)):
        code, _, error = tessera_model("blocks", tmp_path / "model", *option)
        assert (code, error.count("\n")) == (2, 1)
        assert "are for configs" in error
