"""Features of images that are computed once: what a task computes does not change, only how often."""

from __future__ import annotations

import gc
from collections.abc import Collection, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook
from transformers import PreTrainedModel

from tessera.shared.methods.base import Plan
from tessera.shared.model.selectors import NOTHING
from tessera.shared.model.spec import Prompts
from tessera.simulation import Conditions, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.governance.policy import Policy
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward
from tessera.worker.model.prompts import TOWERS, VISION_TOWERS
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.optimization import image_features
from tessera.worker.training.optimization.image_features import ImageFeatures, images_once
from tests.support.duals import dual, pairs
from tests.support.tables import on_disk
from tests.support.tasks import CPU, PROMPTED, one_task
from tests.support.variants import variants

TESTED = [*sorted(TOWERS.keys() - {"siglip2"}), *sorted(f"{vision}+bert" for vision in VISION_TOWERS)]
SGD: dict[str, Any] = {"optimizer": "sgd", "weight_decay": 0.0, "learning_rate": 0.05, "epochs": 3, "batch_size": 5}
EXAMPLES = 24


def made(family: str = "clip", prompts: Prompts | None = None) -> PreTrainedModel:
    model = instantiate(dual(family), "contrastive", seed=1, prompts=prompts)
    model.train(mode=False)
    return model


def batches_of(data: Dataset, size: int | None = 5, seed: int | None = None) -> Batches:
    return Batches(data, size, CPU, None if seed is None else torch.Generator().manual_seed(seed))


def logits(model: PreTrainedModel, batches: Batches) -> Tensor:
    """[images, classes]"""
    found = [forward(model, "contrastive", batch).logits for batch in batches]
    return torch.cat([each for each in found if each is not None]).detach()


def once(
    model: PreTrainedModel,
    kept: ImageFeatures,
    data: Dataset,
    changed: Collection[str] = (),
    *,
    in_order: bool = False,
) -> AbstractContextManager[Dataset]:
    return images_once(model, "contrastive", kept, data, changed, in_order=in_order)


@contextmanager
def counting(model: nn.Module) -> Iterator[list[int]]:
    """Yield the numbers of images of the vision tower's passes, as they are made."""
    passes = list[int]()
    with model.get_submodule("vision_model.embeddings").register_forward_hook(
        lambda _module, _args, output: passes.append(len(output))
    ):
        yield passes


@pytest.mark.parametrize("prompts", [None, Prompts(vision=3, text=2)], ids=["plain", "prompts"])
@pytest.mark.parametrize("family", variants(TESTED, {"clip", "siglip", "vit+bert"}))
def test_each_image_passes_through_the_tower_once_and_the_logits_are_the_same(
    family: str, prompts: Prompts | None
) -> None:
    model, kept, data = made(family, prompts), ImageFeatures(), pairs(family)
    expected = logits(model, batches_of(data, 1))
    with counting(model) as passes:
        for size in (5, 7):
            with once(model, kept, data) as places:
                assert torch.allclose(logits(model, batches_of(places, size)), expected, atol=1e-5)
        assert sum(passes) == data.examples
    # Afterwards the tower is as before.
    assert torch.equal(logits(model, batches_of(data, 1)), expected)


def test_features_have_the_same_bits_whatever_order_they_were_asked_in() -> None:
    model, data, found = made(), pairs("clip"), list[Tensor]()
    for seed in (None, 1, 2):
        kept = ImageFeatures()
        with once(model, kept, data) as places:
            logits(model, batches_of(places, 7, seed))
            found.append(logits(model, batches_of(places)))
    assert torch.equal(found[0], found[1])
    assert torch.equal(found[0], found[2])


@pytest.mark.parametrize(
    ("method", "settings"),
    [("promptfl", {}), pytest.param("fedpgp", {}, marks=pytest.mark.long), ("pfeddc", {"modalities": ["text"]})],
)
def test_text_prompts_learn_the_same_from_features(
    method: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    _, found = one_task(method, settings, subject=PROMPTED, **SGD)
    monkeypatch.setattr(image_features, "MAX_BYTES", 0)
    _, expected = one_task(method, settings, subject=PROMPTED, **SGD)
    start = PROMPTED.model().get_parameter("prompts.text").detach().numpy()
    values, others = found.upload["prompts.text"], expected.upload["prompts.text"]
    assert abs(values - others).max() < 1e-5 < abs(values - start).max()


@contextmanager
def counting_everywhere() -> Iterator[list[int]]:
    """Yield the numbers of images of all CLIP towers' passes, of models that the block makes too."""
    passes = list[int]()

    def note(module: nn.Module, _args: Any, output: Any) -> None:
        if type(module).__name__ == "CLIPVisionEmbeddings":
            passes.append(len(output))

    with register_module_forward_hook(note):
        yield passes


def passes_of(method: str, settings: dict[str, Any], **training: Any) -> int:
    """Return the number of images that pass through the vision tower in a task of three passes over them."""
    with counting_everywhere() as passes:
        one_task(method, settings, subject=PROMPTED, **{**SGD, **training})
    return sum(passes)


@pytest.mark.parametrize(
    ("method", "settings", "times"),
    [
        ("promptfl", {"modalities": ["text"]}, 1),
        ("pfeddc", {"modalities": ["text"]}, 1),
        ("promptfl", {"modalities": ["vision"]}, 3),
        ("pfeddc", {}, 3),
        ("fedavg", {}, 3),
    ],
)
def test_a_tower_that_trains_or_has_prompts_of_the_site_computes_each_pass(
    method: str, settings: dict[str, Any], times: int
) -> None:
    assert passes_of(method, settings) == times * EXAMPLES


def test_a_tower_that_trains_in_another_phase_or_round_computes_each_pass() -> None:
    whole = {"full_fine_tuning": True}
    # The head of a dual encoder is the text tower here; its body trains afterwards, and SAFL may choose any layer.
    assert passes_of("fedrep", {"private": [{"names": ["text_model.*"]}]}, epochs=1, **whole) == 2 * EXAMPLES
    assert passes_of("safl", {"layers": 1, "score": "last"}, **whole) == 3 * EXAMPLES


def test_augmented_images_are_computed_in_each_pass() -> None:
    pytest.importorskip("kornia")
    assert passes_of("promptfl", {}, augmentation={"horizontal_flip": True}) == 3 * EXAMPLES


def computes_each_pass(model: PreTrainedModel, data: Dataset, kept: ImageFeatures | None = None, **more: Any) -> bool:
    with once(model, kept or ImageFeatures(), data, **more) as found:
        return found is data


def test_an_output_that_is_not_constant_is_not_kept() -> None:
    data = pairs("clip")
    assert not computes_each_pass(made(), data)
    assert not computes_each_pass(made(), data, changed=["text_model.embeddings.token_embedding.weight"])
    for changed in ("vision_model.post_layernorm.weight", "prompts.vision", "prompts.deep.vision"):
        assert computes_each_pass(made(), data, changed=[changed])
    random = made("vit+bert")
    random.get_submodule("vision_model").config.hidden_dropout_prob = 0.1  # type: ignore[union-attr]
    # It is of the training mode alone.
    assert not computes_each_pass(random, pairs("vit+bert"))
    random.train()
    assert computes_each_pass(random, pairs("vit+bert"))
    # Its images have shapes and masks of their own.
    assert computes_each_pass(made("siglip2"), pairs("siglip2"))


@pytest.mark.parametrize("family", ["clip", "siglip"])
def test_a_classifier_with_such_a_tower_reads_more_than_its_pooled_output(family: str) -> None:
    config = {**dual(family), "num_labels": 3}
    model = instantiate(config, "image-classification", seed=1)
    data = replace(pairs(family), common={})
    context = LocalTaskContext(model, "image-classification", Plan(train=NOTHING), block_table(model))
    context.images.is_settled = True
    with context.images_once(data) as found:
        assert found is data


def test_patches_that_a_method_reads_are_computed_in_each_pass() -> None:
    assert passes_of("fedotp", {}) == 3 * EXAMPLES


def test_features_are_kept_while_the_tower_s_tensors_have_the_same_digests() -> None:
    model, data, kept = made(), pairs("clip"), ImageFeatures()

    def passes(**digests: str) -> int:
        kept.begin({name.replace("_in_", "."): digest for name, digest in digests.items()})
        with counting(model) as counts, once(model, kept, data) as places:
            logits(model, batches_of(places))
        return sum(counts)

    assert passes(vision_model_in_x="a", text_model_in_x="a") == EXAMPLES
    assert passes(vision_model_in_x="a", text_model_in_x="b") == 0
    assert passes(vision_model_in_x="b", text_model_in_x="b") == EXAMPLES
    assert passes(vision_model_in_x="b", prompts_in_vision="a") == EXAMPLES


def test_images_have_features_of_their_own_within_the_limit_of_a_data_set(monkeypatch: pytest.MonkeyPatch) -> None:
    model, kept, data = made(), ImageFeatures(), [pairs("clip", count) for count in (10, 20)]

    def passes(which: int) -> int:
        with counting(model) as counts, once(model, kept, data[which]) as places:
            logits(model, batches_of(places))
        return sum(counts)

    assert [passes(which) for which in (0, 1, 0, 1)] == [10, 20, 0, 0]
    # The width is 16, so that 20 images have 1,280 bytes.
    monkeypatch.setattr(image_features, "MAX_BYTES", 1279)
    assert computes_each_pass(model, data[1], kept)
    assert not computes_each_pass(model, data[0], kept)


def test_neither_a_model_nor_data_that_the_worker_drops_stay_in_memory() -> None:
    model, kept, data = made(), ImageFeatures(), pairs("clip")
    with once(model, kept, data) as places:
        logits(model, batches_of(places))
    pixels, tower = ref(data.tensors["pixel_values"]), ref(model.get_submodule("vision_model"))
    # The garbage collector must not be needed, which may not run for long.
    gc.disable()
    try:
        del data, places
        assert pixels() is None
        with once(model, kept, pairs("clip")) as places:
            logits(model, batches_of(places))
        del model, places
        assert tower() is None
    finally:
        gc.enable()


def test_an_evaluation_has_the_same_bits_with_features_and_leaves_those_of_training_alone() -> None:
    context = LocalTaskContext(PROMPTED.model(), "contrastive", Plan(train=NOTHING), block_table(PROMPTED.model()))
    data = PROMPTED.data()

    def scores(data: Dataset) -> dict[str, float]:
        return evaluate(context.model, "contrastive", batches_of(data), lambda: None)

    expected = scores(data)
    with counting(context.model) as counts:
        for _ in range(2):
            with context.images_once(data) as places:
                assert scores(places) == expected
        assert counts == [5, 5, 5, 5, 4]
        context.model.train()
        with context.images_once(data, ()) as places:
            losses = [context.forward(batch).loss for batch in batches_of(places)]
            sum(losses, torch.zeros(())).backward()  # type: ignore[no-untyped-call]
        # Features of training have other bits, whichever came first.
        assert counts[5:] == [1] * EXAMPLES
    assert context.model.get_parameter("prompts.text").grad is not None


def test_what_a_task_writes_to_the_tower_turns_it_off_until_the_next_task() -> None:
    context = LocalTaskContext(PROMPTED.model(), "contrastive", Plan(train=NOTHING), block_table(PROMPTED.model()))
    data = PROMPTED.data()
    prompts = next(block for block in context.blocks if block.name == "prompts.vision")
    with context.images_once(data) as found:
        assert found is not data
    context.write(prompts, context.read(prompts))
    with context.images_once(data) as found:
        assert found is data


def test_images_on_disk_are_read_once() -> None:
    data, read = pairs("clip"), list[int]()

    def reader(places: Any) -> Tensor:
        read.extend(places)
        return data.tensors["pixel_values"][torch.tensor(places)]

    pixels = on_disk({"labels": data.tensors["labels"]}, reader, (3, 8, 8)).on_disk
    stored = replace(data, tensors={"labels": data.tensors["labels"]}, on_disk=pixels)
    model, kept = made(), ImageFeatures()
    for _ in range(2):
        with once(model, kept, stored) as places:
            logits(model, batches_of(places))
    assert sorted(read) == list(range(EXAMPLES))


def test_in_a_run_each_image_of_each_site_passes_through_the_tower_once(tmp_path: Path) -> None:
    spec = {
        "name": "once", "rounds": 3, "seed": 0, "method": {"name": "promptfl"},
        "training": {"epochs": 1, "batch_size": 8, "learning_rate": 0.05},
        "cohort": {"size": 2, "quorum": 2}, "evaluation": {"sites": True},
    }  # fmt: skip
    sites = {name: replace(pairs("clip", size), held_out=pairs("clip", 6)) for name, size in (("a", 9), ("b", 12))}
    values = {name: tensor.detach().numpy() for name, tensor in PROMPTED.model().named_parameters()}
    start = Weights(PROMPTED.document(), values)
    conditions = Conditions(policy=Policy(min_evaluation_examples=1))
    with counting_everywhere() as passes:
        result = simulate(spec, start, sites, conditions=conditions, out=tmp_path / "out")
    assert len(result.measurements) == 2 * 4
    # The first task, an evaluation, does not know yet that the tower stays as it is.
    assert sum(passes) == 9 + 12 + 2 * 6 + 6
