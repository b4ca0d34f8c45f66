"""The attention profiler, held against the probabilities that the eager implementations put out."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from pydantic import ValidationError
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModel, PreTrainedModel

from tessera.shared.methods.base import Plan
from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import layers_of
from tessera.shared.run_settings import Training
from tessera.worker.attention.probabilities import CHUNK
from tessera.worker.attention.profile import _Context, _Frame, _token_masks, attention_profile
from tessera.worker.errors import UnknownAttention
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate, read_block, write_block
from tessera.worker.model.forward import forward
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.precision import multiplies_bfloat16
from tests.support.duals import dual, pairs
from tests.support.variants import variants
from tests.worker.model.test_zoo import LAYOUTS, OFTEN, WORDS, ZOO, Case, Subject, View

UNKNOWN = {"longt5": "LocalSelfAttention"}
"""Attention that cannot be measured, and the name in its refusal."""

SHORT = OFTEN | {"aimv2", "bart", "deberta-v2", "deepseek_v3", "gpt_neox", "qwen3", "wavlm"}
"""Families of each kind of attention. Of each layout, `make test` checks the rows by head."""

AVERAGED = {"wavlm"}
"""Attention whose output is the mean of its heads."""


def drawn(model_type: str, case: Case, **options: str) -> PreTrainedModel:
    return AutoModel.from_config(AutoConfig.for_model(model_type, **case.config), **options).eval()


def made(model_type: str, case: Case, attention: str | None = None) -> PreTrainedModel:
    model = drawn(model_type, case, **({"attn_implementation": attention} if attention else {}))
    model.load_state_dict(Subject(model_type, case).model.state_dict())
    return model


def profile(model: PreTrainedModel, case: Case, tokens: TaskTokens) -> dict[str, LayerAttention]:
    tower = model.get_submodule(case.tower)
    blocks = block_table(model)
    ran = [b for b in blocks if any(re.search(view.names, b.tensor) for view in case.views)] if case.tower else blocks
    return attention_profile(model, ran, [case.inputs], lambda batch: tower(**batch), tokens)


def expected(subject: Subject, view: View, position: int) -> list[tuple[np.ndarray, np.ndarray]]:
    """Of each layer's probabilities [batch, heads, queries, keys], the mass by head and the normalised entropy."""
    found = []
    for layer in subject.probabilities(view):
        p = layer.double()
        visible = (p > 0).sum(-1)
        entropy = torch.special.entr(p / p.sum(-1, keepdim=True)).sum(-1) / visible.clamp(min=2).log()
        choosing = visible > 1
        choosing[..., 1:] = True
        found.append((p[..., position].mean((0, 2)).numpy(), entropy[choosing].mean().numpy()))
    return found


def in_turn(names: Iterable[str], *variants: tuple[Any, ...]) -> list[Any]:
    """Each name with each variant. The long tests run all of them; `make test` runs one of each name in `SHORT`, in
    turn."""
    at, found = 0, []
    for name in names:
        at += name in SHORT
        for place, variant in enumerate(variants):
            short = name in SHORT and at % len(variants) == place
            found.append(pytest.param(name, *variant, marks=[] if short else pytest.mark.long))
    return found


def own(case: Case) -> list[View]:
    return [view for view in case.views if view.output != "cross_attentions"]


@pytest.mark.parametrize(
    ("model_type", "where", "position"), in_turn(sorted(set(ZOO) - set(UNKNOWN)), ("first", 0), ("last", -1))
)
def test_mass_and_entropy_are_those_of_the_eager_probabilities(model_type: str, where: Any, position: int) -> None:
    case, subject = ZOO[model_type], Subject(model_type, ZOO[model_type])
    found = profile(made(model_type, case), case, TaskTokens(where=where))
    seen = 0
    for view in own(case):
        stack = [layer.name for layer in layers_of(b for b in subject.blocks if re.search(view.names, b.tensor))]
        want = expected(subject, view, position)
        if len(stack) < len(want):  # layers that share their tensors are passed through several times
            want = [tuple(np.mean([each[i] for each in want], axis=0) for i in range(2))]
        assert len(stack) == len(want)
        for name, (heads, entropy) in zip(stack, want, strict=True):
            if model_type not in AVERAGED:
                np.testing.assert_allclose(found[name].heads, heads, atol=1e-5)
                np.testing.assert_allclose(found[name].entropy, entropy, atol=1e-5)
            np.testing.assert_allclose(found[name].mass.mean(), heads.mean(), atol=1e-5)
            seen += 1
    assert seen == len(found)


PADDED = torch.tensor([[1, 1, 1, 1, 1, 1], [1, 1, 1, 1, 0, 0]])
LEFT = PADDED.flip(1)
TEXTS = sorted(name for name, case in ZOO.items() if case.inputs is WORDS)


def with_padding(model_type: str, mask: Tensor) -> tuple[Case, Subject]:
    case = replace(ZOO[model_type], inputs={**WORDS, "attention_mask": mask})
    return case, Subject(model_type, case)


@pytest.mark.parametrize(("model_type", "mask"), in_turn(TEXTS, (PADDED,), (LEFT,)))
def test_padding_counts_neither_as_a_query_nor_as_a_task_token(model_type: str, mask: Tensor) -> None:
    case, subject = with_padding(model_type, mask)
    found = profile(made(model_type, case), case, TaskTokens(where="last"))
    last = (torch.arange(6) * mask).amax(1)
    passes = subject.probabilities(own(case)[0])
    # Of each example's real queries, the mean probability of its last real token.
    want = [[p[i, :, mask[i].bool(), last[i]].mean().item() for i in range(2)] for p in passes]
    if len(found) < len(want):
        want = [np.mean(want, axis=0).tolist()]
    for layer, masses in zip(found.values(), want, strict=True):
        np.testing.assert_allclose(layer.mass, masses, atol=1e-5)


def test_task_tokens_may_be_given_by_their_ids() -> None:
    case, subject = ZOO["bert"], Subject("bert", ZOO["bert"])
    found = profile(made("bert", case), case, TaskTokens(where="ids", ids=(4, 11, 39)))
    # The first example has an 11 at its third place; the second has a 4 at its second and at its third.
    for layer, p in zip(found.values(), subject.probabilities(View()), strict=True):
        np.testing.assert_allclose(layer.mass, [p[0, :, :, 2].mean(), p[1, :, :, 1:3].mean()], atol=1e-5)


def test_an_example_without_a_task_token_has_no_mass() -> None:
    case = ZOO["bert"]
    found = profile(made("bert", case), case, TaskTokens(where="ids", ids=(11,)))
    assert all(layer.mass[0] > 0 == layer.mass[1] for layer in found.values())


def test_the_sink_is_the_probability_of_the_first_token_whatever_the_task() -> None:
    case, subject = ZOO["llama"], Subject("llama", ZOO["llama"])
    found = profile(made("llama", case), case, TaskTokens(where="last"))
    for layer, p in zip(found.values(), subject.probabilities(View()), strict=True):
        np.testing.assert_allclose(layer.sink, p[..., 0].mean((1, 2)), atol=1e-5)
        # The first query sees one token; the last of six sees all.
        assert (layer.sink > 1 / 6).all()


def test_batches_follow_one_another_in_the_order_of_their_examples() -> None:
    case = ZOO["bert"]
    model = made("bert", case)
    blocks = block_table(model)
    whole = attention_profile(model, blocks, [case.inputs], lambda batch: model(**batch), TaskTokens())
    halves = [{"input_ids": row[None]} for row in case.inputs["input_ids"]]
    parts = attention_profile(model, blocks, halves, lambda batch: model(**batch), TaskTokens())
    for name, layer in whole.items():
        np.testing.assert_allclose(parts[name].mass, layer.mass, atol=1e-6)
        np.testing.assert_allclose(parts[name].heads, layer.heads, atol=1e-6)
        assert parts[name].entropy == pytest.approx(layer.entropy, abs=1e-6)


def test_a_tower_that_reads_what_is_common_to_all_examples_is_not_per_example() -> None:
    torch.manual_seed(0)
    model = AutoModel.from_config(AutoConfig.for_model("clip", **ZOO["clip"].config)).eval()
    batch = {"pixel_values": torch.randn(2, 3, 8, 8), "input_ids": WORDS["input_ids"].repeat(3, 1)}
    blocks = block_table(model)
    found = attention_profile(model, blocks, [batch], lambda b: model(**b), TaskTokens(), lambda _: {"input_ids"})
    assert {(layer.per_example, len(layer.mass)) for name, layer in found.items() if "text" in name} == {(False, 6)}
    assert {(layer.per_example, len(layer.mass)) for name, layer in found.items() if "vision" in name} == {(True, 2)}


# ---------------------------------------------------------------- whose rows


def rows_of(model_type: str, case: Case | None = None) -> dict[str, dict[str, Any]]:
    """Of the last layer's blocks by name, the axis and the head of each row."""
    case = case or ZOO[model_type]
    layer = list(profile(made(model_type, case), case, TaskTokens()).values())[-1]
    return {
        name.rpartition("layers.1.")[2].rpartition("h.1.")[2]: {"axis": each.axis, "mass": each.mass}
        for name, each in layer.rows.items()
    } | {"heads": {"axis": 0, "mass": layer.heads}}


def test_rows_of_a_projection_have_the_mass_of_their_head_and_shared_keys_the_mean_of_theirs() -> None:
    rows = rows_of("llama")  # four query heads of width 8, two to a key
    heads = rows["heads"]["mass"]
    assert {name: each["axis"] for name, each in rows.items() if name != "heads"} == {
        "self_attn.q_proj.weight": 0,
        "self_attn.k_proj.weight": 0,
        "self_attn.v_proj.weight": 0,
        "self_attn.o_proj.weight": 1,
    }
    np.testing.assert_array_equal(rows["self_attn.q_proj.weight"]["mass"], np.repeat(heads, 8))
    np.testing.assert_array_equal(rows["self_attn.o_proj.weight"]["mass"], np.repeat(heads, 8))
    for name in ("k_proj", "v_proj"):
        shared = rows[f"self_attn.{name}.weight"]["mass"]
        np.testing.assert_allclose(shared, np.repeat([heads[:2].mean(), heads[2:].mean()], 8))


def test_a_fused_matrix_that_keeps_its_inputs_first_is_divided_along_its_columns() -> None:
    rows = rows_of("gpt2")
    axes = {name: each["axis"] for name, each in rows.items() if name != "heads"}
    weights = {f"attn.c_attn.weight#{role}": 1 for role in ("query", "key", "value")}
    biases = {f"attn.c_attn.bias#{role}": 0 for role in ("query", "key", "value")}
    assert axes == {**weights, **biases, "attn.c_proj.weight": 0}


def test_what_makes_a_latent_or_a_norm_belongs_to_no_head() -> None:
    names = set(rows_of("deepseek_v3")) - {"heads"}
    kept = {"self_attn.q_b_proj.weight", "self_attn.kv_b_proj.weight#key", "self_attn.kv_b_proj.weight#value"}
    assert names == {*kept, "self_attn.o_proj.weight"}


@pytest.mark.parametrize("model_type", variants(sorted(set(ZOO) - set(UNKNOWN)), LAYOUTS))
def test_every_family_has_rows_by_head_of_each_role(model_type: str) -> None:
    case, model = ZOO[model_type], drawn(model_type, ZOO[model_type])
    by_name = {block.name: block for block in block_table(model)}
    for layer in profile(model, case, TaskTokens()).values():
        assert {by_name[name].role for name in layer.rows} == {"query", "key", "value", "output"}
        for name, each in layer.rows.items():
            assert by_name[name].shape[each.axis] == len(each.mass)


@pytest.mark.parametrize("model_type", ["bert", "bloom", "codegen", "falcon", "gpt_neox", "llama", "phi3", "xlnet"])
def test_a_heads_rows_move_the_probabilities_of_that_head_alone(model_type: str) -> None:
    subject = Subject(model_type, ZOO[model_type])
    layer = list(profile(subject.model, subject.case, TaskTokens()).values())[-1]
    [query] = [b for b in subject.blocks if b.name in layer.rows and b.role == "query" and len(b.shape) > 1][-1:]
    before, values = subject.probabilities(View())[-1], read_block(subject.tensors, query)
    axis, width = layer.rows[query.name].axis, query.shape[layer.rows[query.name].axis] // 4
    changed = np.moveaxis(values.copy(), axis, 0)
    changed[2 * width : 3 * width] += np.random.default_rng(0).normal(size=changed[:width].shape).astype(np.float32)
    write_block(subject.tensors, query, np.ascontiguousarray(np.moveaxis(changed, 0, axis)))
    moved = (subject.probabilities(View())[-1] - before).abs().amax((0, 2, 3)) > 1e-6
    assert moved.tolist() == [False, False, True, False]


def test_a_look_at_attention_has_the_precision_of_the_run_and_its_sums_that_of_float32() -> None:
    found = {}
    for precision in ("float32", "bfloat16"):
        model = instantiate(
            {**ZOO["bert"].config, "model_type": "bert", "initializer_range": 0.5}, "text-classification", seed=1
        )
        training = Training.model_validate({"precision": precision})
        context = LocalTaskContext(model, "text-classification", Plan(), block_table(model), training=training)
        found[precision] = context.attention([{"input_ids": torch.arange(1, 7)[None]}], TaskTokens())
    for name, layer in found["float32"].items():
        rough = found["bfloat16"][name]
        # A CPU without instructions for bfloat16 computes in float32.
        assert np.array_equal(rough.heads, layer.heads) != multiplies_bfloat16()
        np.testing.assert_allclose(rough.heads, layer.heads, atol=0.02)
    # The attention to all tokens adds up to one, closer than in bfloat16.
    one_by_one = [
        context.attention([{"input_ids": torch.arange(1, 7)[None]}], TaskTokens(where="ids", ids=(n,)))
        for n in range(1, 7)
    ]
    for name in found["bfloat16"]:
        total = np.sum([each[name].heads for each in one_by_one], axis=0)
        np.testing.assert_allclose(total, 1, atol=1e-6)


# ---------------------------------------------------------------- side effects and memory


def test_the_model_is_left_as_it_was() -> None:
    case = Case({**ZOO["bert"].config, "hidden_dropout_prob": 0.5}, WORDS)
    model = made("bert", case)
    model.train()
    model.pooler.eval()
    modes = [module.training for module in model.modules()]
    state, weights = torch.get_rng_state(), [tensor.clone() for tensor in model.state_dict().values()]
    profile(model, case, TaskTokens())
    assert [module.training for module in model.modules()] == modes
    assert torch.equal(torch.get_rng_state(), state)
    assert all(torch.equal(a, b) for a, b in zip(model.state_dict().values(), weights, strict=True))
    assert model.config._attn_implementation == "sdpa"
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())
    assert model(**case.inputs).last_hidden_state.requires_grad


def test_a_model_whose_forward_pass_fails_is_left_as_it_was_too() -> None:
    case = ZOO["bert"]
    model = made("bert", case).train()
    with pytest.raises(IndexError):
        profile(model, replace(case, inputs={"input_ids": torch.full((1, 3), 999)}), TaskTokens())
    assert model.training
    assert not any(module._forward_hooks or module._forward_pre_hooks for module in model.modules())


class Largest(TorchDispatchMode):
    """Notes the most elements of any tensor that an operation makes."""

    elements = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = function(*args, **(kwargs or {}))
        for each in made if isinstance(made, tuple) else (made,):
            if isinstance(each, Tensor) and each.untyped_storage().nbytes() > 0:
                self.elements = max(self.elements, each.untyped_storage().nbytes() // each.element_size())
        return made


@pytest.mark.parametrize("model_type", variants(["bert", "llama"], {"llama"}))
def test_of_a_long_sequence_no_whole_matrix_of_probabilities_is_ever_held(model_type: str) -> None:
    length, heads = 2000, 4
    config = {**ZOO[model_type].config, "max_position_embeddings": length}
    case = Case(config, {"input_ids": torch.randint(3, 40, (1, length))})
    model = AutoModel.from_config(AutoConfig.for_model(model_type, **config)).eval()
    with Largest() as largest:
        found = profile(model, case, TaskTokens())
    assert all(0 < layer.mass[0] < 1 for layer in found.values())
    assert largest.elements <= CHUNK < heads * length**2 / 8


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize("model_type", UNKNOWN)
def test_an_attention_that_is_not_of_all_tokens_to_all_is_refused_by_its_name(model_type: str) -> None:
    case = ZOO[model_type]
    with pytest.raises(UnknownAttention, match=UNKNOWN[model_type]):
        profile(made(model_type, case), case, TaskTokens())


def test_an_attention_that_calls_nothing_known_is_refused_by_its_layers_name(monkeypatch: pytest.MonkeyPatch) -> None:
    case = ZOO["bert"]
    model = made("bert", case)
    for layer in model.encoder.layer:
        monkeypatch.setattr(layer.attention.self, "forward", lambda states, *_, **__: (states, None))
    with pytest.raises(UnknownAttention, match=r"encoder\.layer\.0, encoder\.layer\.1"):
        profile(model, case, TaskTokens())


def test_task_tokens_by_id_are_refused_where_tokens_have_none() -> None:
    with pytest.raises(UnknownAttention, match=r"layers\.0\.attention have no input ids"):
        profile(made("vit", ZOO["vit"]), ZOO["vit"], TaskTokens(where="ids", ids=(1,)))


def test_a_mask_that_the_model_is_not_handed_masks_nothing() -> None:
    case, model = ZOO["vit"], made("vit", ZOO["vit"])
    batch = {**case.inputs, "attention_mask": torch.tensor([[1, 0], [1, 1]])}
    found = attention_profile(
        model, block_table(model), [batch], lambda batch: model(batch["pixel_values"]), TaskTokens()
    )
    for name, layer in profile(model, case, TaskTokens()).items():
        np.testing.assert_array_equal(found[name].mass, layer.mass)


def test_padding_of_another_length_than_the_tokens_is_refused() -> None:
    attention = made("bert", ZOO["bert"]).encoder.layer[0].attention.self
    context = _Context(examples=1, ids=torch.tensor([[3, 4, 5]]), mask=torch.tensor([[1, 0]]))
    with pytest.raises(UnknownAttention, match=r"over \[1, 3\] tokens, and its padding mask over \[1, 2\]"):
        _token_masks(TaskTokens(), context, (1, 3), _Frame("self", attention, (), {}))


def test_patches_that_are_padding_count_no_more_than_words_that_are() -> None:
    model = instantiate(dual("siglip2"), "contrastive", seed=4)
    blocks = [block for block in block_table(model) if block.tensor.startswith("vision_model.")]
    [batch] = pairs("siglip2", 1).batches(None)
    # Of four patches two are real, and so the image is one of two patches.
    batch["spatial_shapes"] = torch.tensor([[1, 2]])
    padded = {**batch, "pixel_attention_mask": torch.tensor([[1, 1, 0, 0]])}
    patches = ("pixel_values", "pixel_attention_mask")
    alone = {name: tensor[:, :2] if name in patches else tensor for name, tensor in batch.items()}

    def found(batch: dict[str, Tensor]) -> dict[str, LayerAttention]:
        return attention_profile(
            model, blocks, [batch], lambda b: forward(model, "contrastive", b), TaskTokens(where="last")
        )

    for name, layer in found(alone).items():
        assert layer.mass[0] > 0
        np.testing.assert_allclose(found(padded)[name].mass, layer.mass, atol=1e-5)
        assert found(padded)[name].entropy == pytest.approx(layer.entropy, abs=1e-5)


def test_ids_are_for_task_tokens_by_id_only() -> None:
    for wrong in ({"where": "ids"}, {"where": "first", "ids": (1,)}):
        with pytest.raises(ValidationError, match="give ids if"):
            TaskTokens.model_validate(wrong)
