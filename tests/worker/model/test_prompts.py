"""Prompts in dual encoders: where they go in, that nothing else changes, and that they alone can be trained."""

from __future__ import annotations

from copy import deepcopy
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from torch import Tensor, nn
from transformers import PreTrainedModel

from tessera.shared.model.selectors import roles
from tessera.shared.model.spec import Fusion, Model, Prompts
from tessera.worker.errors import ConfigError
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import check_model, instantiate
from tessera.worker.model.forward import forward
from tessera.worker.model.prompts import (
    TEXT_TOWERS,
    TOWERS,
    VISION_TOWERS,
    PromptError,
    PromptTokens,
    caption_start,
    patch_features,
    prompts_of,
    text_features,
    towers_of,
)
from tessera.worker.training.freeze import Freeze
from tests.support.duals import FAMILIES, dual, pairs
from tests.support.variants import variants

PAIRS = sorted({*(f"{vision}+bert" for vision in VISION_TOWERS), *(f"dinov2+{text}" for text in TEXT_TOWERS)})
EACH_FAMILY = pytest.mark.parametrize("family", variants([*sorted(TOWERS), *PAIRS], FAMILIES))
BOTH = Prompts(vision=3, text=2)
DEEP = Prompts(vision=3, text=2, depth=2)


def made(family: str, prompts: Prompts | None = None) -> PreTrainedModel:
    return instantiate(dual(family), "contrastive", seed=4, prompts=prompts).eval()


def tokens_of(model: PreTrainedModel) -> PromptTokens:
    found = prompts_of(model)
    assert found is not None
    return found


def text_of(model: PreTrainedModel) -> Tensor:
    own = tokens_of(model).own("text")
    assert own is not None
    return own.detach()


def batch(family: str) -> dict[str, Tensor]:
    return next(pairs(family, 4).batches(None))


def logits(model: nn.Module, given: dict[str, Tensor]) -> Tensor:
    """[images, classes]"""
    with torch.no_grad():
        found = forward(model, "contrastive", given).logits
    assert found is not None
    return found


@EACH_FAMILY
def test_without_tokens_the_model_is_the_plain_one_bit_for_bit(family: str) -> None:
    plain, prompted = made(family), made(family, BOTH)
    plain_tensors = dict(plain.named_parameters())
    for name, tensor in prompted.named_parameters():
        assert name.startswith("prompts.") or torch.equal(tensor, plain_tensors[name])
    tokens_of(prompted).transforms = {"vision": lambda own: own[:0], "text": lambda own: own[:0]}
    assert torch.equal(logits(plain, batch(family)), logits(prompted, batch(family)))


@EACH_FAMILY
def test_text_prompts_that_are_embeddings_of_words_are_those_words_after_the_start(family: str) -> None:
    plain, prompted, given = made(family), made(family, Prompts(text=2)), batch(family)
    words = torch.tensor([6, 10])
    text_of(prompted).copy_(caption_start(prompted, words))
    ids, first = given["input_ids"], towers_of(plain.config).text_first
    # SigLIP's texts fill all 12 positions already, so that two columns of padding make room.
    spelt = torch.cat([ids[:, :first], words.expand(3, -1), ids[:, first:]], dim=1)[:, :12]
    expected = logits(plain, {**given, "input_ids": spelt})
    assert torch.equal(logits(prompted, given), expected)
    assert not torch.equal(expected, logits(plain, given))


@EACH_FAMILY
def test_vision_prompts_stand_after_the_class_token_and_before_the_patches(family: str) -> None:
    plain, prompted = made(family), made(family, Prompts(vision=3))
    put_in: list[Tensor] = []
    for model in (plain, prompted):
        embeddings = model.get_submodule("vision_model.embeddings")
        embeddings.register_forward_hook(lambda _module, _args, output: put_in.append(output))
        logits(model, batch(family))
    first = towers_of(plain.config).vision_first
    before, own, after = put_in[1].split([first, 3, put_in[0].shape[1] - first], dim=1)  # [images, tokens, width]
    assert torch.equal(torch.cat([before, after], dim=1), put_in[0])
    assert all(torch.equal(each, tokens_of(prompted).own("vision")) for each in own)


@EACH_FAMILY
def test_deep_prompts_take_the_place_of_those_of_the_layer_before(family: str) -> None:
    model, given = made(family, DEEP), batch(family)
    towers, before, after = towers_of(model.config), dict[str, Tensor](), dict[str, Tensor]()
    for tower in ("vision", "text"):
        stack = next(m for m in model.get_submodule(f"{tower}_model").modules() if isinstance(m, nn.ModuleList))
        stack[0].register_forward_hook(
            lambda _module, _args, out, tower=tower: before.update(
                {tower: out if isinstance(out, Tensor) else out[0]}
            )
        )
        stack[1].register_forward_hook(lambda _module, args, _out, tower=tower: after.update({tower: args[0]}))
    logits(model, given)
    for tower, first, count in (("vision", towers.vision_first, 3), ("text", towers.text_first, 2)):
        own = model.get_parameter(f"prompts.deep.{tower}")  # [1, tokens, width]
        assert all(torch.equal(each, own[0]) for each in after[tower][:, first : first + count])
        kept = [*range(first), *range(first + count, before[tower].shape[1])]
        assert torch.equal(after[tower][:, kept], before[tower][:, kept])
        assert not torch.equal(after[tower], before[tower])


@EACH_FAMILY
def test_deep_prompts_learn_and_go_with_the_prompts_before_them(family: str) -> None:
    plain, shallow, deep, given = made(family), made(family, BOTH), made(family, DEEP), batch(family)
    tensors = dict(deep.named_parameters())
    assert all(torch.equal(tensor, tensors[name]) for name, tensor in shallow.named_parameters())
    assert tensors.keys() - dict(shallow.named_parameters()).keys() == {"prompts.deep.vision", "prompts.deep.text"}
    table = block_table(deep)
    assert {b.name for b in table if b.role == "prompt"} == {name for name in tensors if name.startswith("prompts.")}
    assert check_model(Model(config=dual(family), head="contrastive", prompts=DEEP, blocks=table)) == table
    forward(deep, "contrastive", given).loss.backward()
    gradients = [deep.get_parameter(f"prompts.deep.{tower}").grad for tower in ("vision", "text")]
    assert all(each is not None and each.abs().sum() > 0 for each in gradients)
    with tokens_of(deep).transformed({"vision": lambda own: own[:0], "text": lambda own: own[:0]}):
        assert torch.equal(logits(deep, given), logits(plain, given))


def test_no_deep_prompt_is_inserted_a_layer_late_or_beyond_its_depth() -> None:
    config = dual("clip")
    towers = {name: {**config[name], "num_hidden_layers": 4} for name in ("vision_config", "text_config")}
    prompts = Prompts(vision=3, text=2, depth=3)
    model = instantiate({**config, **towers}, "contrastive", seed=4, prompts=prompts).eval()
    for tower, count in (("vision", 3), ("text", 2)):
        seen: list[Tensor] = []
        stack = model.get_submodule(f"{tower}_model.encoder.layers")
        for layer in stack:
            layer.register_forward_pre_hook(lambda _, args, seen=seen: seen.append(args[0]))
        logits(model, batch("clip"))
        deep = model.get_parameter(f"prompts.deep.{tower}")  # [2, tokens, width]
        found = [[bool((states[:, 1 : 1 + count] == own).all()) for own in deep] for states in seen]
        assert found == [[False, False], [True, False], [False, True], [False, False]], tower


def test_more_deep_prompts_than_layers_are_refused() -> None:
    with pytest.raises(PromptError, match="prompts in 3 layers, and the vision tower has 2: use a depth of at most"):
        made("clip", Prompts(vision=1, text=1, depth=3))


@EACH_FAMILY
def test_gradients_reach_both_prompts_and_training_them_changes_nothing_else(family: str) -> None:
    model, given = made(family, BOTH), batch(family)
    before = {name: tensor.detach().clone() for name, tensor in model.named_parameters()}
    freeze = Freeze(model, roles("prompt").resolve(block_table(model)))
    optimizer = torch.optim.AdamW(freeze.parameters, lr=0.1, weight_decay=0.5)
    forward(model, "contrastive", given).loss.backward()
    optimizer.step()
    trained = {name for name, tensor in model.named_parameters() if tensor.grad is not None}
    moved = {name for name, tensor in model.named_parameters() if not torch.equal(tensor, before[name])}
    assert trained == moved == {"prompts.vision", "prompts.text"}
    assert all(tensor.grad.abs().sum() > 0 for tensor in freeze.parameters if tensor.grad is not None)


@EACH_FAMILY
def test_the_prompts_are_blocks_of_the_run_and_the_document_builds_them(family: str) -> None:
    table = block_table(made(family, BOTH))
    found = {block.name: (block.shape, block.layer) for block in table if block.role == "prompt"}
    assert found == {"prompts.vision": ((3, 16), None), "prompts.text": ((2, 16), None)}
    document = Model(config=dual(family), head="contrastive", prompts=BOTH, blocks=table)
    assert check_model(document) == table
    assert [block for block in table if block.role != "prompt"] == list(block_table(made(family)))


@EACH_FAMILY
def test_text_features_are_those_of_the_models_own_pass(family: str) -> None:
    plain, prompted, given = made(family), made(family, BOTH), batch(family)
    own = text_of(prompted)
    tokens_of(prompted).transforms = {"text": lambda prompts: prompts + 0.1}
    changed = made(family, BOTH)
    text_of(changed).copy_(own + 0.1)

    def in_a_pass(model: PreTrainedModel) -> Tensor:
        inputs = {name: tensor for name, tensor in given.items() if name != "labels"}
        features = model(**inputs).text_embeds
        return features / features.norm(dim=-1, keepdim=True)

    with torch.no_grad():
        torch.testing.assert_close(text_features(prompted, given), in_a_pass(changed))
        torch.testing.assert_close(text_features(prompted, given, lambda own: own), in_a_pass(made(family, BOTH)))
        torch.testing.assert_close(text_features(prompted, given, lambda own: own[:0]), in_a_pass(plain))
        # Other prompts are for that pass alone.
        torch.testing.assert_close(in_a_pass(prompted), in_a_pass(changed))


def test_no_table_gets_past_a_model_that_lacks_its_prompts() -> None:
    table = block_table(made("clip", BOTH))
    with pytest.raises(ValueError, match=r"prompts\.text: missing"):
        check_model(Model(config=dual("clip"), head="contrastive", blocks=table))
    with pytest.raises(ValueError, match=r"prompts\.vision: shape"):
        check_model(Model(config=dual("clip"), head="contrastive", prompts=Prompts(vision=9, text=2), blocks=table))


def test_what_goes_in_may_be_made_of_the_prompts_and_have_another_length() -> None:
    plain, prompted, given = made("clip", Prompts(text=4)), made("clip", Prompts(text=2)), batch("clip")
    more = torch.randn(2, 16)
    text_of(plain).copy_(torch.cat([text_of(prompted), more]))
    tokens_of(prompted).transforms["text"] = lambda own: torch.cat([own, more])
    assert torch.equal(logits(prompted, given), logits(plain, given))


@pytest.mark.parametrize("name", ["prompts.text", "prompts.deep.text"])
def test_a_copy_of_the_model_puts_its_own_prompts_in(name: str) -> None:
    model, given = made("clip", DEEP), batch("clip")
    copied, before = deepcopy(model), logits(model, given)
    copied.get_parameter(name).data.fill_(1.0)
    assert torch.equal(logits(model, given), before)
    assert not torch.equal(logits(copied, given), before)


@pytest.mark.parametrize("masked", [False, True])
def test_only_padding_makes_way_and_a_text_that_does_not_fit_is_refused(masked: bool) -> None:
    given = batch("clip")
    texts = given["input_ids"][:2]  # [2, 6], of which four and three columns are no padding

    def with_prompts(count: int) -> Tensor:
        mask = {"attention_mask": (texts != 29).long() | (texts == 29).long().cumsum(1).eq(1)} if masked else {}
        return logits(
            made("clip", Prompts(text=count)), {**given, "input_ids": texts, "labels": given["labels"] % 2, **mask}
        )

    assert with_prompts(8).shape == (4, 2)
    with pytest.raises(PromptError, match="9 text prompts and texts of 6 tokens do not fit the 12 positions"):
        with_prompts(9)


def test_padding_that_is_masked_stays_masked() -> None:
    model, given = made("chinese_clip", BOTH), batch("chinese_clip")
    ids = given["input_ids"]
    mask = torch.ones_like(ids)
    mask[:, 5:] = 0
    changed = ids.clone()
    changed[:, 5:] = 20
    there = logits(model, {**given, "attention_mask": mask})
    assert torch.equal(there, logits(model, {**given, "input_ids": changed, "attention_mask": mask}))
    assert not torch.equal(there, logits(model, {**given, "attention_mask": torch.ones_like(ids)}))


def test_old_clips_that_end_a_text_at_its_highest_id_still_find_the_end() -> None:
    config = dual("clip")
    config["text_config"]["eos_token_id"] = 2
    ends: list[Tensor] = []
    model = instantiate(config, "contrastive", prompts=Prompts(text=3)).eval()
    model.get_submodule("text_projection").register_forward_pre_hook(lambda _, args: ends.append(args[0]))
    model.get_submodule("text_model.final_layer_norm").register_forward_hook(
        lambda _module, _args, output: ends.append(output)
    )
    logits(model, batch("clip"))
    states, pooled = ends  # [classes, 6 + 3, width] and [classes, width]
    assert all(torch.equal(pooled[text], states[text, at + 3]) for text, at in enumerate((3, 2, 5)))


@pytest.mark.parametrize("family", ["bert", "align", "groupvit", "tipsv2"])
def test_a_model_that_takes_no_prompts_is_refused_by_name(family: str) -> None:
    config: dict[str, Any] = {**dual("clip"), "model_type": family} if family != "bert" else {"model_type": "bert"}
    with (
        torch.device("meta"),
        pytest.raises(ConfigError, match=f"{family} does not support prompts; these families do: aimv2"),
    ):
        instantiate(config, "features", prompts=BOTH)


@pytest.mark.parametrize(
    ("pair", "refusal"),
    [
        (
            "dinov3_vit+bert",
            "the vision tower dinov3_vit does not support prompts: pair one of these, clip_vision_mo",
        ),
        ("vit+distilbert", "the text tower distilbert does not support prompts: pair one of these, bert, camembert"),
    ],
)
def test_a_pair_with_a_tower_that_takes_no_prompts_is_refused_with_those_that_do(pair: str, refusal: str) -> None:
    with torch.device("meta"), pytest.raises(PromptError, match=refusal):
        instantiate(dual(pair), "contrastive", prompts=BOTH)


@pytest.mark.parametrize("family", ["dinov2+bert", "vit+bert"])
def test_a_pair_reads_the_prompts_after_both_class_tokens_and_pools_these(family: str) -> None:
    model, given = made(family, BOTH), batch(family)
    states: dict[str, Any] = {}
    for tower in ("vision_model", "text_model"):
        model.get_submodule(tower).register_forward_hook(
            lambda _module, _args, output, tower=tower: states.update({tower: output.last_hidden_state})
        )
    logits(model, given)
    # An image of four patches and its class token, and texts of six tokens.
    assert states["vision_model"].shape == (4, 1 + 3 + 4, 16)
    assert states["text_model"].shape == (3, 6 + 2, 16)


def test_more_text_prompts_than_positions_are_refused_before_anything_is_trained() -> None:
    with pytest.raises(PromptError, match="12 text prompts leave no room in 12 positions"):
        made("clip", Prompts(text=12))
    # AltCLIP's positions begin after the id of its padding, 1: of 12 there are 10 left.
    with pytest.raises(PromptError, match="10 text prompts leave no room in 10 positions"):
        made("altclip", Prompts(text=10))
    with pytest.raises(PromptError, match="10 text prompts leave no room in 10 positions"):
        made("dinov2+roberta", Prompts(text=10))


@pytest.mark.parametrize("wrong", [{"vision": -1}, {"text": 2000}, {"tokens": 1}, {"fusion": {"heads": 0}}])
def test_prompts_out_of_bounds_are_refused(wrong: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        Prompts.model_validate(wrong)


MATCHED = ["altclip", "chinese_clip", "clip", "clipseg", "metaclip_2", *PAIRS]


@pytest.mark.parametrize("family", variants(MATCHED, FAMILIES))
def test_features_of_patches_are_those_of_the_path_of_the_class_token(family: str) -> None:
    model, inputs = made(family, Prompts(vision=3, text=2)), batch(family)
    del inputs["labels"]
    # As many as a task inserts in place of the model's.
    tokens_of(model).transforms = {"vision": lambda own: torch.cat([own, own])}
    with torch.no_grad():
        output = model(**inputs)
        states = output.vision_model_output.last_hidden_state
        others = 1 + 6 + getattr(model.config.vision_config, "num_register_tokens", 0) + family.startswith("deit")
        assert patch_features(model, output).shape[:2] == (len(states), 4) == (len(states), states.shape[1] - others)
        # The class token, taken for a patch, has the image's own feature.
        output.vision_model_output.last_hidden_state = torch.cat([states[:, :others], states[:, :1]], dim=1)
        torch.testing.assert_close(patch_features(model, output)[:, 0], output.image_embeds)


@pytest.mark.parametrize("family", ["siglip", "siglip2", "aimv2"])
def test_a_model_that_pools_patches_by_attention_has_no_features_of_patches(family: str) -> None:
    with pytest.raises(PromptError, match=r"no features of patches.*choose CLIP"):
        patch_features(made(family, BOTH), None)


def test_a_fusion_whose_heads_do_not_divide_the_prompts_is_refused() -> None:
    for kind in ("attention", "random-attention"):
        with pytest.raises(ConfigError, match="width 16 do not divide among 3 heads"):
            made("clip", Prompts(vision=2, text=2, fusion=Fusion(heads=3, kind=kind)))


def test_heads_need_not_divide_the_width_of_a_tower_without_prompts() -> None:
    config = dual("clip")
    wide = {**config, "vision_config": {**config["vision_config"], "hidden_size": 24}}
    prompts = Prompts(vision=2, fusion=Fusion(heads=3))
    assert set(tokens_of(instantiate(wide, "contrastive", seed=4, prompts=prompts)).fusion) == {"vision"}
