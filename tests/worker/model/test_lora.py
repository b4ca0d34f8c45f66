"""Low-rank adapters: that they start as nothing, are blocks of their own, and become part of their matrices."""

from __future__ import annotations

import builtins
import importlib
import re
import sys
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.model.spec import Float32Role, Head, Lora, Model, stored_name
from tessera.shared.problems import Invalid
from tessera.shared.version import install_line
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import ConfigError, ModelMismatch
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import check_model, instantiate, merge_adapters
from tessera.worker.model.forward import forward
from tessera.worker.model.layouts import MappingFile, TensorPattern
from tests.support.duals import dual, pairs

SIZES = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 24, "vocab_size": 20,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
GPT2 = {"model_type": "gpt2", "n_embd": 16, "n_layer": 2, "n_head": 2, "vocab_size": 20, **SIZES}
CASES: dict[str, tuple[dict[str, Any], Head]] = {
    "bert": ({"model_type": "bert", **SIZES, "num_labels": 3}, "text-classification"),
    "bert in 16 bits": ({"model_type": "bert", **SIZES, "dtype": "bfloat16"}, "text-classification"),
    "albert, whose layers share their tensors": (
        {"model_type": "albert", **SIZES, "embedding_size": 16},
        "text-classification",
    ),
    "llama": ({"model_type": "llama", **SIZES, "num_key_value_heads": 1}, "causal-lm"),
    "gpt2, fused and transposed": (GPT2, "causal-lm"),
    "gpt_neox, fused head by head": ({"model_type": "gpt_neox", **SIZES}, "causal-lm"),
    "siglip, with torch's own attention": (dual("siglip"), "contrastive"),
}
EVERY = pytest.mark.parametrize("case", CASES)
NARROW = Lora(rank=2, alpha=6)
WIDE = Lora(rank=2, alpha=6, roles=("query", "key", "value", "output", "mlp"))
MIXED = Lora(rank=4, alpha=12, roles=WIDE.roles, ranks=(1, 4))


def made(case: str, lora: Lora | None = None) -> Any:
    config, head = CASES[case]
    return instantiate(config, head, seed=3, lora=lora).eval()


def logits(model: nn.Module, case: str) -> Tensor:
    head = CASES[case][1]
    given = {"input_ids": torch.tensor([[3, 5, 6, 7]]), "labels": torch.tensor([0])}
    if head == "contrastive":
        given = next(pairs("siglip", 3).batches(None))
    elif head == "causal-lm":
        given["labels"] = given["input_ids"]
    with torch.no_grad():
        found = forward(model, head, given).logits
    assert found is not None
    return found


def moved(model: nn.Module) -> nn.Module:
    """The model with its adapters away from their start."""
    generator = torch.Generator().manual_seed(1)
    for name, tensor in model.named_parameters():
        if ".lora_B." in name:
            tensor.detach().copy_(torch.randn(tensor.shape, generator=generator))
    return model


@EVERY
@pytest.mark.parametrize("lora", [NARROW, WIDE, MIXED], ids=["narrow", "wide", "mixed"])
def test_a_model_with_adapters_starts_as_the_model_without_them_bit_for_bit(case: str, lora: Lora) -> None:
    plain, adapted = made(case), made(case, lora)
    theirs = {stored_name(name): tensor for name, tensor in named_tensors(adapted).items()}
    assert all(torch.equal(tensor, theirs[name]) for name, tensor in named_tensors(plain).items())
    start = logits(plain, case)
    assert torch.equal(logits(adapted, case), start)
    assert not torch.equal(logits(moved(adapted), case), start)


@EVERY
@pytest.mark.parametrize("lora", [NARROW, WIDE, MIXED], ids=["narrow", "wide", "mixed"])
def test_what_was_there_keeps_its_role_layer_and_parts_beside_an_adapter(case: str, lora: Lora) -> None:
    before = {block.name: block for block in block_table(made(case))}
    table = block_table(made(case, lora))
    after = {stored_name(block.name): block for block in table}
    assert [name for name in after if name in before] == list(before)
    for name, block in before.items():
        assert after[name].model_copy(update={"tensor": block.tensor}) == block
    added = [block for name, block in after.items() if name not in before]
    assert added
    assert {block.role for block in added} == {"adapter"}
    config, head = CASES[case]
    document = Model(config=config, head=head, lora=lora, blocks=table)
    assert check_model(document) == table


def test_an_adapter_stands_beside_the_matrices_of_the_roles_and_has_their_layer_and_dtype() -> None:
    table = block_table(made("bert in 16 bits", NARROW))
    found = {block.name: (block.shape, block.layer, block.dtype) for block in table if block.role == "adapter"}
    where = "bert.encoder.layer.{}.attention.self.{}.lora_{}.default.weight"
    assert found == {
        where.format(layer, role, half): ((2, 16) if half == "A" else (16, 2), layer, "BF16")
        for layer in (0, 1)
        for role in ("query", "value")
        for half in "AB"
    }


def test_a_fused_matrix_is_adapted_whole() -> None:
    table = block_table(made("gpt2, fused and transposed", Lora(rank=2, alpha=2, roles=("value",))))
    adapters = [block for block in table if block.role == "adapter"]
    assert [block.shape for block in adapters] == [(2, 16), *[(16, 2)] * 3] * 2


def test_an_adapter_knows_the_roles_of_its_matrix() -> None:
    plain = [block for block in block_table(made("bert in 16 bits", NARROW)) if block.role == "adapter"]
    assert [block.adapts for block in plain] == [*[("query",)] * 2, *[("value",)] * 2] * 2
    fused = [block for block in block_table(made("gpt_neox, fused head by head", NARROW)) if block.role == "adapter"]
    matrix = {b.role: b.part for b in block_table(made("gpt_neox, fused head by head")) if b.role == "value"}
    first, *rows = fused[:4]
    # A is read by queries, keys and values alike; B's rows are divided as the matrix's outputs are.
    assert first.part is None
    assert set(first.adapts) == {"query", "key", "value"}
    assert [block.adapts for block in rows] == [("query",), ("key",), ("value",)]
    assert rows[2].part == matrix["value"]


@EVERY
@pytest.mark.parametrize("lora", [WIDE, MIXED], ids=["wide", "mixed"])
def test_the_update_is_alpha_over_rank_times_b_a_and_merging_adds_it_to_the_matrix(case: str, lora: Lora) -> None:
    plain, adapted = made(case), moved(made(case, lora))
    tensors, expected = named_tensors(adapted), logits(adapted, case)
    before = named_tensors(plain)
    updates: dict[str, Tensor] = {}
    for name, b in tensors.items():
        if ".lora_B." in name:
            a = tensors[name.replace(".lora_B.", ".lora_A.")]
            delta = 6 / 2 * b.detach() @ a.detach()  # [outputs, inputs]
            matrix = name.partition(".lora_B.")[0] + ".weight"
            delta = delta if before[matrix].shape == delta.shape and case[:4] != "gpt2" else delta.T
            updates[matrix] = updates.get(matrix, 0) + delta
    merge_adapters(adapted)
    merged = named_tensors(adapted)
    assert list(merged) == list(before)
    exact = {"rtol": 0.02, "atol": 0.02} if "16 bits" in case else {"rtol": 1e-4, "atol": 1e-5}
    for name, tensor in merged.items():
        change = (tensor - before[name]).detach()
        torch.testing.assert_close(change, updates.get(name, torch.zeros_like(change)), **exact)
    torch.testing.assert_close(logits(adapted, case), expected, **exact)


def test_torchs_own_attention_gets_no_adapter_that_it_would_never_call() -> None:
    names = [block.name for block in block_table(made("siglip, with torch's own attention", WIDE))]
    assert "vision_model.head.attention.out_proj.weight" in names
    assert any(".encoder.layers.0.self_attn.out_proj.lora_A." in name for name in names)


def test_a_mapping_finds_what_adapters_go_beside_by_the_names_without_them() -> None:
    rows = tuple(
        TensorPattern(names=f"*.{name}.*", role=role) for name, role in (("query", "value"), ("value", "query"))
    )
    swapped = MappingFile(model_type="bert", tensors=rows)
    config, head = CASES["bert"]
    lora = Lora(rank=1, alpha=1, roles=("value",))
    table = block_table(instantiate(config, head, lora=lora, mapping=swapped), swapped)
    adapted = {block.name.partition(".lora_")[0].rpartition(".")[2] for block in table if block.role == "adapter"}
    assert adapted == {"query"}
    assert {block.role for block in table if ".self.query.base_layer." in block.name} == {"value"}
    document = Model(config=config, head=head, lora=lora, blocks=table)
    assert check_model(document, swapped) == table
    with pytest.raises(ModelMismatch, match=r"self\.value\.lora_A.*unexpected"):
        check_model(document)


def test_roles_without_a_matrix_are_refused() -> None:
    with pytest.raises(ConfigError, match="no linear layer with a role among norm, prompt"):
        made("bert", Lora(rank=2, alpha=2, roles=("norm", "prompt")))


def test_a_worker_without_peft_is_told_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def without_peft(name: str, *rest: Any) -> Any:
        if name.partition(".")[0] == "peft":
            raise ModuleNotFoundError("No module named 'peft'", name="peft")
        return real(name, *rest)

    monkeypatch.delitem(sys.modules, "tessera.worker.model.lora", raising=False)
    monkeypatch.setattr(builtins, "__import__", without_peft)
    with pytest.raises(ConfigError, match=rf"No module named 'peft'.*{re.escape(install_line('lora'))}"):
        made("bert", NARROW)
    monkeypatch.undo()
    importlib.import_module("tessera.worker.model.lora")


def _matrices(values: Mapping[str, Any], role: str) -> dict[str, Any]:
    """Each layer's rows of `c_attn` of this role with its adapter's product added, [inputs, outputs], by layer."""
    found = {}
    for layer in range(2):
        at = f"transformer.h.{layer}.attn.c_attn"
        b, a = values[f"{at}.lora_B.default.weight#{role}"], values[f"{at}.lora_A.default.weight"]
        found[at] = values[f"{at}.base_layer.weight#{role}"] + NARROW.alpha / NARROW.rank * (b @ a).T
    return found


@pytest.mark.parametrize("scope", ["all_but_qk", "attn_vo"])
def test_fedfrozen_freezes_the_kernel_of_a_model_with_adapters(scope: str) -> None:
    if scope == "attn_vo":
        config: dict[str, Any] = {**GPT2, "tie_word_embeddings": False}
    else:
        config = GPT2
    plain = Weights.of(instantiate(config, "causal-lm", seed=3, lora=NARROW), config, "causal-lm")
    model = replace(plain, model=plain.model.model_copy(update={"lora": NARROW}))
    tokens = torch.randint(3, 18, (8, 5), generator=torch.Generator().manual_seed(0))
    sites = {name: Dataset({"input_ids": tokens + n, "labels": tokens + n}) for n, name in enumerate(("a", "b"))}
    spec = {
        "method": {"name": "fedfrozen", "settings": {"warmup_rounds": 1, "scope": scope}},
        "rounds": 3,
        "training": {"optimizer": "adamw", "weight_decay": 0.1, "learning_rate": 0.01, "batch_size": 4},
    }
    result = simulate(spec, model, sites, conditions=Conditions(keep_versions="all"))
    warm, last = (result.arrays(number) for number in (1, 3))
    for role in ("query", "key"):
        before, after = _matrices(warm, role), _matrices(last, role)
        assert all((before[at] == after[at]).all() for at in before), f"the {role} rows moved"
    assert all((_matrices(warm, "value")[at] != values).any() for at, values in _matrices(last, "value").items())


@pytest.mark.parametrize("head", ["text-classification", "causal-lm"])
def test_beside_a_base_of_16_bits_adapters_and_a_classifier_are_float32_and_move(head: Head) -> None:
    """At 1e-4 AdamW moves no weight of 16 bits: it is a thousandth of the distance between two of them."""
    config = {"model_type": "llama", **SIZES, "num_key_value_heads": 1, "dtype": "bfloat16", "num_labels": 3}
    roles: tuple[Float32Role, ...] = ("head", "adapter") if head == "text-classification" else ("adapter",)
    model = instantiate(config, head, seed=3, lora=NARROW, float32=roles)
    table = block_table(model)
    assert {block.dtype for block in table if block.role in roles} == {"F32"}
    assert {block.dtype for block in table if block.role not in roles} == {"BF16"}
    document = Model(config=config, head=head, lora=NARROW, float32=roles, blocks=table)
    assert check_model(document) == table
    tensors = named_tensors(model)
    before = {name: tensor.detach().clone() for name, tensor in tensors.items()}
    trained = [tensors[block.tensor] for block in table if block.role in roles]
    optimizer = torch.optim.AdamW(trained, lr=1e-4)
    ids = torch.tensor([[3, 5, 6, 7]])
    labels = ids if head == "causal-lm" else torch.tensor([2])
    for _ in range(3):
        optimizer.zero_grad()
        forward(model, head, {"input_ids": ids, "labels": labels}).loss.backward()
        optimizer.step()
    moved = {name for name, tensor in tensors.items() if not torch.equal(tensor, before[name])}
    assert moved == {block.tensor for block in table if block.role in roles}


def test_a_run_that_would_train_16_bits_is_refused_with_the_way_out() -> None:
    config: dict[str, Any] = {**dual("clip"), "dtype": "bfloat16"}
    weights = Weights.of(instantiate(config, "contrastive", seed=3), config, "contrastive")
    spec = {"method": {"name": "fedavg"}, "rounds": 1}
    with pytest.raises(Invalid) as refusal:
        simulate(spec, weights, {"north": pairs("clip", 6)}, test=None)
    assert "blocks of 16 bits" in str(refusal.value.errors)
    assert "--dtype float32" in str(refusal.value.errors)


DORA = WIDE.model_copy(update={"dora": True})


@EVERY
def test_a_model_with_dora_starts_as_without_and_merging_its_adapters_changes_no_output(case: str) -> None:
    config, head = CASES[case]
    model = made(case, DORA)
    table = block_table(model)
    assert check_model(Model(config=config, head=head, lora=DORA, blocks=table)) == table
    lengths = [block for block in table if ".lora_magnitude_vector." in block.name]
    assert {block.role for block in lengths} == {"adapter"}
    assert {role for block in lengths for role in block.adapts} >= {"query", "value"}
    exact = {"rtol": 0.02, "atol": 0.02} if "16 bits" in case else {"rtol": 1e-4, "atol": 1e-5}
    torch.testing.assert_close(logits(model, case), logits(made(case), case), **exact)
    after = logits(moved(model), case)
    merge_adapters(model)
    torch.testing.assert_close(logits(model, case), after, **exact)


def test_dora_scales_each_row_of_the_sum_to_its_learnt_length() -> None:
    model: Any = moved(made("bert", DORA))
    path = "bert.encoder.layer.0.attention.self.query"
    values = {name.removeprefix(f"{path}."): tensor.detach() for name, tensor in named_tensors(model).items()}
    lengths = values["lora_magnitude_vector.default.weight"]
    whole = values["base_layer.weight"] + 3 * values["lora_B.default.weight"] @ values["lora_A.default.weight"]
    merge_adapters(model)
    expected = lengths[:, None] * whole / whole.norm(dim=1, keepdim=True)
    torch.testing.assert_close(named_tensors(model)[f"{path}.weight"].detach(), expected)


def test_a_run_with_dora_trains_its_lengths_and_is_refused_where_they_cannot() -> None:
    config, head = CASES["bert"]
    with pytest.raises(ValueError, match="DoRA has one rank"):
        Lora(rank=4, alpha=4, ranks=(2, 4), dora=True)
    plain = Weights.of(instantiate(config, head, seed=3, lora=DORA), config, head)
    model = replace(plain, model=plain.model.model_copy(update={"lora": DORA}))
    tokens = torch.randint(3, 18, (8, 5), generator=torch.Generator().manual_seed(0))
    sites = {name: Dataset({"input_ids": tokens + n, "labels": tokens[:, 0] % 3}) for n, name in enumerate("ab")}
    spec = {"method": {"name": "lora"}, "rounds": 1, "training": {"learning_rate": 0.01, "batch_size": 4}}
    result = simulate(spec, model, sites, conditions=Conditions(keep_versions="all"))
    start, end = result.arrays(0), result.arrays(1)
    moved_names = [name for name in end if (start[name] != end[name]).any()]
    assert any(".lora_magnitude_vector." in name for name in moved_names)
    for changes, said in (
        ({"method": {"name": "lora", "settings": {"average": "stack"}}}, "DoRA has lengths of rows"),
        ({"privacy": {"epsilon": 8.0, "delta": 1e-3, "clip_norm": 1.0}}, "without --dora"),
    ):
        with pytest.raises(Invalid) as refusal:
            simulate(spec | changes, model, sites)
        assert said in str(refusal.value.errors)
