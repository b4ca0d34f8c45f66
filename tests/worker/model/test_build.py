"""Building from a config that may be hostile, block access, freezing, and `tessera model`."""

import json
import threading
from pathlib import Path
from typing import Any

import ml_dtypes
import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from torch import nn
from torch.nn.modules.module import register_module_parameter_registration_hook
from transformers import AutoModelForCausalLM, AutoModelForImageClassification
from typer.testing import CliRunner

from tessera.shared.model.blocks import TensorSlice
from tessera.shared.model.config_safety import INTERNAL
from tessera.shared.model.selectors import all_but, roles
from tessera.shared.model.spec import Head, Model
from tessera.worker.cli.model import app
from tessera.worker.errors import ConfigError, ModelMismatch, UnsafeConfig
from tessera.worker.model import config as config_module
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import _bounded, check_model, instantiate, laid_out, read_block, write_block
from tessera.worker.model.config import check_config, config_from
from tessera.worker.training.freeze import Freeze
from tests.support.tasks import Subject, images, one_task

SIZES = {"hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24}
BERT: dict[str, Any] = {"model_type": "bert", **SIZES, "vocab_size": 20, "num_labels": 3}
VIT: dict[str, Any] = {"model_type": "vit", **SIZES, "image_size": 8, "patch_size": 4, "num_labels": 3}
GPT2: dict[str, Any] = {
    "model_type": "gpt2",
    "n_embd": 16,
    "n_layer": 2,
    "n_head": 2,
    "vocab_size": 20,
    "bos_token_id": 0,
    "eos_token_id": 1,
}


def described(config: dict[str, Any], head: Head) -> Model:
    return Model(config=config, head=head, blocks=block_table(instantiate(config, head)))


def bits(model: nn.Module, model_blocks: Model) -> dict[str, bytes]:
    tensors = named_tensors(model)
    return {block.name: read_block(tensors, block).tobytes() for block in model_blocks.blocks}


def test_build_gives_the_model_of_the_table_and_the_same_weights_for_the_same_seed() -> None:
    model = described(BERT, "text-classification")
    state = torch.get_rng_state()
    built = laid_out(model, seed=3)
    assert torch.equal(state, torch.get_rng_state())
    assert block_table(built) == model.blocks
    assert {tensor.dtype for tensor in named_tensors(built).values()} == {torch.float32}
    assert bits(built, model) == bits(laid_out(model, seed=3), model) != bits(laid_out(model, seed=4), model)


def test_every_difference_from_the_table_is_listed_at_once_and_sorted() -> None:
    model = described(GPT2, "causal-lm")
    table = {block.name: block for block in model.blocks}
    table["transformer.ln_f.weight"] = table["transformer.ln_f.weight"].model_copy(update={"role": "query"})
    table["transformer.ln_f.bias"] = table["transformer.ln_f.bias"].model_copy(update={"dtype": "F16"})
    table["transformer.wpe.weight"] = table["transformer.wpe.weight"].model_copy(update={"shape": (9, 16)})
    table["extra"] = table.pop("transformer.wte.weight").model_copy(update={"tensor": "extra"})
    with pytest.raises(ModelMismatch) as mismatch:
        check_model(model.model_copy(update={"blocks": tuple(table.values())}))
    starts = ["extra: missing", "transformer.ln_f.bias: dtype", "transformer.ln_f.weight: role is norm, not query"]
    starts += ["transformer.wpe.weight: shape", "transformer.wte.weight: unexpected"]
    assert [fault[: len(start)] for fault, start in zip(mismatch.value.faults, starts, strict=True)] == starts


def test_parts_that_swap_queries_and_values_are_a_mismatch() -> None:
    model = described(GPT2, "causal-lm")
    name = "transformer.h.0.attn.c_attn.bias#"
    spans = {"query": ((32, 48),), "value": ((0, 16),)}
    swapped = tuple(
        b.model_copy(update={"part": TensorSlice(label=b.role, axis=0, spans=spans[b.role])})
        if b.name in {f"{name}query", f"{name}value"}
        else b
        for b in model.blocks
    )
    with pytest.raises(ModelMismatch, match=r"c_attn\.bias#query: part"):
        check_model(model.model_copy(update={"blocks": swapped}))


@pytest.mark.parametrize(
    ("key", "value"),
    [
        ("auto_map", {"AutoModel": "evil.Model"}),
        ("trust_remote_code", True),
        ("custom_pipelines", {}),
        ("quantization_config", {"quant_method": "bitsandbytes"}),
        ("attn_implementation", "someone/kernel"),
        ("experts_implementation", "someone/kernel"),
        ("_attn_implementation", "someone/kernel"),
        ("_attn_implementation_internal", "someone/kernel"),
        ("name_or_path", "someone/model"),
        ("transformers_weights", "../weights.safetensors"),
        ("use_kernels", True),
        ("backbone", "someone/model"),
        ("attribute_map", {"hidden_size": "_attn_implementation"}),
        ("sub_configs_defaults", {}),
        ("get_text_config", 1),
        ("dtype", "load"),
        ("torch_dtype", "classes"),
        ("num_hidden_layers", 10**9),
        ("num_labels", 10**9),
        ("model_type", "timm_wrapper"),
    ],
)
def test_unsafe_key_is_refused_by_name_at_any_depth(key: str, value: object) -> None:
    for config in ({**BERT, key: value}, {**BERT, "text_config": {"more": [{key: value}]}}):
        with pytest.raises(UnsafeConfig, match=key):
            check_config(config)
        with pytest.raises(UnsafeConfig, match=key):
            instantiate(config, "features")


def test_labels_may_be_called_anything() -> None:
    check_config({**BERT, "label2id": {"_background": 0, "auto_map": 1}, "id2label": {"0": "_background"}})


def test_unknown_model_type_and_deep_nesting_are_refused() -> None:
    with pytest.raises(UnsafeConfig, match="no-such-model"):
        check_config({"model_type": "no-such-model"})
    nested: dict[str, Any] = {}
    for _ in range(500):
        nested = {"a": nested}
    with pytest.raises(UnsafeConfig, match="nested"):
        check_config({**BERT, "a": nested})


def test_a_coordinator_knows_each_name_that_transformers_uses_itself() -> None:
    assert {name for name in config_module._INTERNAL if name.startswith("_")} == config_module._INTERNAL - INTERNAL


def test_config_that_becomes_a_hub_backbone_by_default_is_refused() -> None:
    with pytest.raises(UnsafeConfig, match="hub"):
        instantiate({"model_type": "detr"}, "features")


@pytest.mark.parametrize(
    "config", [{**BERT, "hidden_size": "wide"}, {**BERT, "self": 1}, {**BERT, "hidden_size": 15}]
)
def test_config_that_transformers_does_not_accept_is_one_kind_of_error(config: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match="bert"):
        instantiate(config, "features")


def test_config_from_which_transformers_takes_entries_stays_as_it_is() -> None:
    config: dict[str, Any] = {"model_type": "idefics2", "vision_config": {"model_type": "idefics2_vision"}}
    config_from(config)
    assert config["vision_config"] == {"model_type": "idefics2_vision"}


def test_head_that_the_model_type_lacks_is_a_config_error() -> None:
    with pytest.raises(
        ConfigError, match="a vit cannot have the head causal-lm; it can: image-classification, features"
    ):
        instantiate(VIT, "causal-lm")


@pytest.mark.parametrize("size", [{"num_hidden_layers": 1_000_000}, {"vocab_size": 2**50}])
def test_config_larger_than_its_table_is_given_up_early(size: dict[str, int]) -> None:
    model, made = described(BERT, "features"), list[nn.Parameter]()
    counting = register_module_parameter_registration_hook(lambda _, __, parameter: made.append(parameter))
    with pytest.raises(ModelMismatch, match="far larger"):
        check_model(model.model_copy(update={"config": {**BERT, **size}}))
    counting.remove()
    assert 0 < len(made) < 8 * len(model.blocks) + 100


def test_bound_counts_what_is_laid_out_and_not_what_another_thread_allocates() -> None:
    # The bound is eight times the table's 50 kB and 1 MiB; a 1,000 x 1,000 matrix has 4 MB.
    model, made = described(BERT, "features"), list[nn.Module]()
    with _bounded(model):
        thread = threading.Thread(target=lambda: made.append(nn.Linear(1000, 1000)))
        thread.start()
        thread.join()
        with torch.device("meta"), pytest.raises(ModelMismatch, match="far larger"):
            nn.Linear(1000, 1000)
    assert len(made) == 1


def test_block_written_is_the_block_read_and_leaves_the_other_parts_alone() -> None:
    model = described(GPT2, "causal-lm")
    tensors = named_tensors(laid_out(model))
    name = "transformer.h.0.attn.c_attn.weight"
    values = np.arange(256, dtype="<f4").reshape(16, 16)
    before = {block.name: read_block(tensors, block) for block in model.blocks}
    write_block(tensors, model.by_name[f"{name}#key"], values)
    assert torch.equal(tensors[name][:, 16:32], torch.from_numpy(values))
    for block in model.blocks:
        now = read_block(tensors, block)
        assert now.flags.c_contiguous
        assert np.array_equal(now, values if block.name == f"{name}#key" else before[block.name])


def test_bfloat16_crosses_bit_for_bit_and_from_read_only_memory() -> None:
    model = described({**GPT2, "dtype": "bfloat16"}, "causal-lm")
    tensors = named_tensors(laid_out(model))
    block = model.by_name["transformer.h.1.attn.c_attn.bias#value"]
    patterns = np.arange(0x4000, 0x4010, dtype="<u2").view(ml_dtypes.bfloat16)
    patterns.flags.writeable = False
    write_block(tensors, block, patterns)
    assert read_block(tensors, block).tobytes() == patterns.tobytes()
    assert tensors[block.tensor].dtype is torch.bfloat16
    assert tensors[block.tensor][32].item() == float(patterns[0]) == 2.0


def test_block_read_does_not_change_when_the_model_is_trained_further() -> None:
    model = described(BERT, "features")
    tensors = named_tensors(laid_out(model))
    block = model.by_name["embeddings.word_embeddings.weight"]
    before = read_block(tensors, block)
    tensors[block.tensor].data.fill_(7)
    assert not (before == 7).any()


def test_values_of_another_shape_or_dtype_are_refused_and_nothing_is_written() -> None:
    model = described(BERT, "features")
    tensors = named_tensors(laid_out(model))
    block = model.by_name["encoder.layer.0.attention.self.query.bias"]
    before = read_block(tensors, block)
    for wrong in (np.ones(15, "<f4"), np.ones((1, 16), "<f4"), np.ones(16, "<f8"), np.ones(16, ">f4")):
        with pytest.raises(ValueError, match=r"query\.bias"):
            write_block(tensors, block, wrong)
    assert np.array_equal(read_block(tensors, block), before)


def test_block_of_another_model_is_a_mismatch() -> None:
    wide = described({**GPT2, "n_embd": 32}, "causal-lm")
    tensors = named_tensors(laid_out(described(GPT2, "causal-lm")))
    for name in ("transformer.ln_f.weight", "transformer.h.0.attn.c_attn.bias#value"):
        with pytest.raises(ModelMismatch, match=name):
            read_block(tensors, wide.by_name[name])


def train(model: nn.Module, freeze: Freeze, steps: int = 4) -> float:
    """Trains under strong weight decay on made-up tokens; gives the largest gradient seen in a frozen place."""
    optimizer = torch.optim.AdamW(freeze.parameters, lr=0.01, weight_decay=0.5)
    generator = torch.Generator().manual_seed(5)
    for _ in range(steps):
        tokens = torch.randint(2, 20, (4, 6), generator=generator)
        labels = tokens[:, 0] % 3 if "Sequence" in type(model).__name__ else tokens
        optimizer.zero_grad()
        model(input_ids=tokens, labels=labels).loss.backward()
        freeze.mask_gradients()
        torch.nn.utils.clip_grad_norm_(freeze.parameters, 1.0)
        optimizer.step()
        freeze.restore()
    return max(float(row.abs().max()) for row in frozen_gradients(freeze)) if freeze.parameters else 0.0


def frozen_gradients(freeze: Freeze) -> list[torch.Tensor]:
    # The fused weight is [16, 48] and its bias [48]: all but the last 16 outputs are queries and keys.
    return [p.grad[..., :32] for p in freeze.parameters if p.grad is not None and p.shape[-1] == 48] or [
        torch.zeros(1)
    ]


def test_only_gpt2s_values_move_under_adamw_with_weight_decay() -> None:
    model = described(GPT2, "causal-lm")
    built = laid_out(model)
    before = bits(built, model)
    chosen = roles("value").resolve(model.blocks)
    assert train(built, Freeze(built, chosen)) == 0.0
    after = bits(built, model)
    assert {name for name in before if before[name] != after[name]} == {block.name for block in chosen}


def test_masked_gradients_alone_do_not_keep_a_frozen_slice() -> None:
    model = described(GPT2, "causal-lm")
    built = laid_out(model)
    before = bits(built, model)
    freeze = Freeze(built, roles("value").resolve(model.blocks))
    freeze.restore = lambda: None  # type: ignore[method-assign]
    train(built, freeze)
    assert (
        before["transformer.h.0.attn.c_attn.weight#query"]
        != bits(built, model)["transformer.h.0.attn.c_attn.weight#query"]
    )


def test_berts_queries_and_keys_stay_bit_identical_while_the_rest_trains() -> None:
    model = described(BERT, "text-classification")
    built = laid_out(model)
    before = bits(built, model)
    train(built, Freeze(built, all_but("query", "key").resolve(model.blocks)))
    after = bits(built, model)
    kernel = {block.name for block in roles("query", "key").resolve(model.blocks)}
    assert all(before[name] == after[name] for name in kernel)
    assert before["classifier.weight"] != after["classifier.weight"]
    assert (
        before["bert.encoder.layer.0.attention.self.value.weight"]
        != (after["bert.encoder.layer.0.attention.self.value.weight"])
    )


def test_freezing_again_for_another_phase_trains_what_was_frozen() -> None:
    model = described(BERT, "text-classification")
    built = laid_out(model)
    Freeze(built, roles("head").resolve(model.blocks))
    body = Freeze(built, all_but("head").resolve(model.blocks))
    assert all(parameter.requires_grad for parameter in body.parameters)
    assert not built.get_parameter("classifier.weight").requires_grad
    assert len(body.parameters) == len(model.blocks) - 2


def test_parameters_without_elements_do_not_train() -> None:
    without = {**VIT, "model_type": "dinov2_with_registers", "num_register_tokens": 0, "num_channels": 1}
    built = instantiate(without, "image-classification")
    assert Freeze(built, block_table(built)).parameters
    assert not built.get_parameter("dinov2_with_registers.embeddings.register_tokens").requires_grad
    # Ditto adds the distance of each tensor that trains.
    one_task("ditto", subject=Subject(without, "image-classification", images), optimizer="sgd")


def test_untrained_buffer_that_a_step_moves_is_put_back() -> None:
    norm = nn.BatchNorm1d(3)
    freeze, mean = Freeze(norm, ()), norm.get_buffer("running_mean")
    mean += 1
    freeze.restore()
    assert torch.equal(mean, torch.zeros(3))


def tessera_model(*arguments: object) -> tuple[int, str, str]:
    result = CliRunner().invoke(app, [str(argument) for argument in arguments])
    assert result.exception is None or isinstance(result.exception, SystemExit)
    return result.exit_code, result.stdout, result.stderr


def config_file(folder: Path, config: dict[str, Any]) -> Path:
    file = folder / "config.json"
    file.write_text(json.dumps(config))
    return file


@pytest.mark.parametrize(
    ("config", "head", "auto"),
    [(VIT, "image-classification", AutoModelForImageClassification), (GPT2, "causal-lm", AutoModelForCausalLM)],
)
def test_init_makes_a_folder_that_transformers_loads(
    tmp_path: Path, config: dict[str, Any], head: Head, auto: Any
) -> None:
    out = tmp_path / "model"
    assert (
        tessera_model(
            "init", out, "--config", config_file(tmp_path, config), "--head", head, "--random", "--seed", 7
        )[0]
        == 0
    )
    model = Model.model_validate_json((out / "blocks.json").read_bytes())
    loaded, info = auto.from_pretrained(out, output_loading_info=True)
    assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys"))
    assert set(load_file(out / "model.safetensors")) == {block.tensor for block in model.blocks}
    assert bits(loaded, model) == bits(laid_out(model, seed=7), model)
    assert [path.name for path in tmp_path.iterdir() if path.name.startswith(".")] == []


def test_config_in_the_document_passes_the_check_and_names_no_origin(tmp_path: Path) -> None:
    source = {**VIT, "_name_or_path": "a/b", "transformers_version": "4.1", "architectures": ["X"], "auto_map": {}}
    file = config_file(tmp_path, source)
    assert (
        tessera_model("init", tmp_path / "m", "--config", file, "--head", "image-classification", "--random")[0] == 0
    )
    model = Model.model_validate_json((tmp_path / "m" / "blocks.json").read_bytes())
    check_config(model.config)
    assert not {"_name_or_path", "transformers_version", "architectures", "auto_map"} & set(model.config)
    assert model.config["dtype"] == "float32"
    assert len(model.config["id2label"]) == 3  # type: ignore[arg-type]


def test_pretrained_takes_the_weights_and_gives_the_head_as_many_labels_as_asked(tmp_path: Path) -> None:
    first, second = tmp_path / "first", tmp_path / "second"
    config = config_file(tmp_path, VIT)
    tessera_model("init", first, "--config", config, "--head", "image-classification", "--random", "--seed", 1)
    more = ("--pretrained", "--labels", "a, b, c, d, e")
    code, _, said = tessera_model("init", second, "--config", first, "--head", "image-classification", *more)
    old, new = load_file(first / "model.safetensors"), load_file(second / "model.safetensors")
    assert code == 0
    assert "new and random: classifier.bias, classifier.weight" in said
    assert new["classifier.weight"].shape == (5, 16)
    assert [*json.loads((second / "config.json").read_text())["id2label"].values()] == [*"abcde"]
    for odd in ("0", "one", "a,,b", "a,b,a"):
        code, _, said = tessera_model(
            "init", tmp_path / "odd", "--config", first, "--head", "image-classification", "--labels", odd
        )
        assert (code, f"{odd!r} is neither a number of classes nor two names" in said) == (2, True)
    assert all(torch.equal(old[name], new[name]) for name in old if not name.startswith("classifier"))


def test_pretrained_weights_of_another_architecture_are_refused(tmp_path: Path) -> None:
    first, config = tmp_path / "first", config_file(tmp_path, VIT)
    tessera_model("init", first, "--config", config, "--head", "image-classification", "--random")
    config_file(first, BERT)
    again = ("--config", first, "--head", "text-classification", "--pretrained")
    code, _, error = tessera_model("init", tmp_path / "second", *again)
    assert code == 2
    assert "they lack bert.embeddings.LayerNorm.bias" in error
    assert not (tmp_path / "second").exists()


def test_blocks_counts_parameters_and_bytes_by_layer_and_role(tmp_path: Path) -> None:
    out = tmp_path / "model"
    tessera_model("init", out, "--config", config_file(tmp_path, GPT2), "--head", "causal-lm", "--random")
    rows = json.loads(tessera_model("blocks", out, "--json")[1])
    # A value projection is a 16 x 16 weight and a bias of 16, four bytes each.
    value = {"layer": 1, "role": "value", "blocks": 2, "parameters": 272, "bytes": 1088}
    assert value in rows
    model = Model.model_validate_json((out / "blocks.json").read_bytes())
    assert sum(row["bytes"] for row in rows) == model.nbytes
    code, printed, _ = tessera_model("blocks", out)
    assert code == 0
    assert "value" in printed
    assert "1,088" in printed


def test_init_does_not_overwrite_and_leaves_what_was_there(tmp_path: Path) -> None:
    out = tmp_path / "model"
    out.mkdir()
    (out / "mine").write_text("kept")
    code, _, error = tessera_model("init", out, "--config", config_file(tmp_path, VIT), "--head", "features")
    assert code == 2
    assert "exists already" in error
    assert [path.name for path in out.iterdir()] == ["mine"]


@pytest.mark.parametrize(
    ("config", "says"),
    [
        ({**VIT, "quantization_config": {}}, "quantization_config"),
        ({"model_type": "convbert", **SIZES, "vocab_size": 20}, "conv_kernel_layer"),
        ({"hidden_size": 16}, "model_type"),
    ],
)
def test_bad_config_is_one_line_and_exit_code_two(tmp_path: Path, config: dict[str, Any], says: str) -> None:
    file = config_file(tmp_path, config)
    code, out, error = tessera_model("init", tmp_path / "m", "--config", file, "--head", "features", "--random")
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert says in error
    assert [path.name for path in tmp_path.iterdir()] == ["config.json"]


@pytest.mark.parametrize("content", ["{", "[]", '{"config": {}, "head": "features", "blocks": []}'])
def test_blocks_of_something_else_is_one_line_and_exit_code_two(tmp_path: Path, content: str) -> None:
    (tmp_path / "blocks.json").write_text(content)
    code, out, error = tessera_model("blocks", tmp_path)
    assert (code, out, error.count("\n")) == (2, "", 1)
    assert "blocks.json" in error
    assert tessera_model("blocks", tmp_path / "nowhere")[0] == 2
