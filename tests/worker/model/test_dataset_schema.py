"""A data set's schema names the inputs on which a model really fails, and no others."""

from __future__ import annotations

import json
from typing import Any

import pytest
import torch

from tessera.shared.model.dataset_schema import (
    MAX_NAMES,
    DatasetSchema,
    Problem,
    TensorSchema,
    name_digests,
    token_limit,
)
from tessera.shared.model.spec import Head, Model
from tessera.worker.data.dataset import schema_of
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import forward
from tessera.worker.training.input_mismatch import FAULTS
from tests.support.duals import TEXT, VISION, dual

TOWER = {"hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 16}
IMAGES = {**TOWER, "image_size": 8, "patch_size": 4, "num_channels": 1}
WORDS = {**TOWER, "vocab_size": 40, "max_position_embeddings": 12}
GPT2 = {
    "n_embd": 16,
    "n_layer": 1,
    "n_head": 2,
    "n_positions": 12,
    "vocab_size": 40,
    "bos_token_id": 1,
    "eos_token_id": 1,
}
DISTILBERT = {
    "dim": 16,
    "n_layers": 1,
    "n_heads": 2,
    "hidden_dim": 16,
    "max_position_embeddings": 12,
    "vocab_size": 40,
}


def images(*shape: int, classes: int = 2) -> DatasetSchema:
    return DatasetSchema(inputs=tensors(pixel_values=shape, labels=()), classes=classes)


def texts(length: int, labels: tuple[int, ...] = (), classes: int | None = 2) -> DatasetSchema:
    return DatasetSchema(inputs=tensors(input_ids=(length,), labels=labels), classes=classes)


def both(length: int, *shape: int) -> DatasetSchema:
    return DatasetSchema(inputs=tensors(pixel_values=shape, labels=(), input_ids=(length,)), classes=2)


def tensors(**shapes: tuple[int, ...]) -> dict[str, TensorSchema]:
    return {
        name: TensorSchema(dtype="float32" if name == "pixel_values" else "int64", shape=shape)
        for name, shape in shapes.items()
    }


IMAGE, TEXT_CLASS, TAGS, LM = "image-classification", "text-classification", "token-classification", "causal-lm"
SIZE = "images are [3, 32, 32]; the model takes [1, 8, 8]"
SMALL = "images are [3, 16, 16]; the model takes [3, 8, 8]"
LONG = "max_length 16 is more than the 12 tokens that the model takes: set it to 12 or less"
WRONG = "the model takes {}; the data set gives {}"
PER = "the labels are one for each {}; a model for {} takes one for each {}"
DUAL = {"text_config": TEXT, "vision_config": VISION}


@pytest.mark.parametrize(
    ("model_type", "config", "head", "schema", "found"),
    [
        ("vit", IMAGES, IMAGE, images(1, 8, 8), []),
        ("vit", IMAGES, IMAGE, images(3, 32, 32), [SIZE]),
        ("vit", {**IMAGES, "image_size": [8, 8]}, IMAGE, images(3, 32, 32), [SIZE]),
        ("vit_msn", IMAGES, IMAGE, images(3, 32, 32), [SIZE]),
        ("ijepa", IMAGES, IMAGE, images(3, 32, 32), [SIZE]),
        ("dinov2", IMAGES, IMAGE, images(1, 16, 16), []),
        ("dinov2", IMAGES, IMAGE, images(3, 8, 8), ["images are [3, 8, 8]; the model takes [1, 8, 8]"]),
        ("vit", IMAGES, IMAGE, images(1, 8, 8, classes=3), ["the model has 2 classes; the data set has 3 labels"]),
        ("vit", {**IMAGES, "num_labels": 4}, IMAGE, images(1, 8, 8, classes=3), []),
        ("vit", IMAGES, IMAGE, texts(8), [WRONG.format("pixel_values", "input_ids")]),
        ("bert", WORDS, TEXT_CLASS, texts(12), []),
        ("bert", WORDS, TEXT_CLASS, texts(16), [LONG]),
        ("bert", WORDS, TAGS, texts(12, (12,)), []),
        ("bert", WORDS, TAGS, texts(16), [PER.format("text", TAGS, "token"), LONG]),
        ("bert", WORDS, TEXT_CLASS, texts(12, (12,)), [PER.format("token", TEXT_CLASS, "text")]),
        ("bert", WORDS, TEXT_CLASS, images(3, 8, 8), [WRONG.format("input_ids", "pixel_values")]),
        ("distilbert", DISTILBERT, TEXT_CLASS, texts(16), [LONG]),
        ("gpt2", GPT2, LM, texts(12, (12,), None), []),
        ("gpt2", GPT2, LM, texts(16, (16,), None), [LONG]),
        # Its positions are computed, as many as there are tokens.
        ("llama", WORDS, LM, texts(16, (16,), None), []),
        ("llama", WORDS, LM, texts(16), [PER.format("text", LM, "token")]),
        ("clip", DUAL, "contrastive", both(12, 3, 8, 8), []),
        ("clip", DUAL, "contrastive", both(16, 3, 16, 16), [SMALL, LONG]),
        ("clip", DUAL, "contrastive", images(3, 8, 8), [WRONG.format("pixel_values and input_ids", "pixel_values")]),
        ("siglip", DUAL, "contrastive", both(12, 3, 16, 16), [SMALL]),
        ("siglip", DUAL, IMAGE, images(3, 8, 8), []),
    ],
)  # fmt: skip
def test_objections_are_what_the_model_fails_on(
    model_type: str, config: dict[str, Any], head: Head, schema: DatasetSchema, found: list[str]
) -> None:
    built = instantiate({**(dual(model_type) if config is DUAL else config), "model_type": model_type}, head)
    # The config as `model init` writes it, which lacks some of its defaults.
    document = Model(config=json.loads(built.config.to_json_string()), head=head, blocks=block_table(built))
    assert schema.mismatches(document, padded=True) == found
    # Texts may all be shorter than max_length, unless they are padded to it.
    assert schema.mismatches(document, padded=False) == [
        said for said in found if said != LONG or head == "contrastive"
    ]
    batch = {
        name: torch.ones((2, *(one.shape or ())), dtype=getattr(torch, one.dtype))
        for name, one in schema.inputs.items()
    }
    batch["labels"] *= (schema.classes or 2) - 1
    if found:
        with pytest.raises(FAULTS):
            forward(built, head, batch)
    else:
        assert forward(built, head, batch).loss.isfinite()


LIMITED = {
    "roberta": ({**WORDS, "pad_token_id": 1}, 10),
    "esm": ({**WORDS, "pad_token_id": 3, "position_embedding_type": "absolute"}, 8),
    "mpnet": (WORDS, 10),
    "data2vec-text": (WORDS, 10),
    "camembert": (WORDS, 10),
    "xlm-roberta": (WORDS, 10),
    "opt": ({**WORDS, "ffn_dim": 16, "word_embed_proj_dim": 16}, 12),
    "gpt2": (GPT2, 12),
    "llama": (WORDS, None),
    "bloom": ({"vocab_size": 40, "hidden_size": 16, "n_layer": 1, "n_head": 2}, None),
}  # fmt: skip


@pytest.mark.parametrize("family", LIMITED)
def test_a_text_has_as_many_tokens_as_the_model_takes_and_not_one_for_each_position(family: str) -> None:
    config, most = LIMITED[family]
    built = instantiate({**config, "model_type": family}, TEXT_CLASS).eval()
    document = Model(config=json.loads(built.config.to_json_string()), head=TEXT_CLASS, blocks=block_table(built))
    assert token_limit(document) == most

    def logits(length: int) -> torch.Tensor:
        ids = torch.full((1, length), 5)
        found: torch.Tensor = built(input_ids=ids, attention_mask=torch.ones_like(ids)).logits
        return found

    assert logits(most or 40).isfinite().all()
    if most:
        with pytest.raises(FAULTS):
            logits(most + 1)


NUMBERS = "the labels are classes, and the model's config has {}, with which it learns numbers"


@pytest.mark.parametrize(
    ("kept", "head", "said"),
    [
        ({"problem_type": "regression"}, TEXT_CLASS, "problem_type 'regression'"),
        ({"problem_type": "multi_label_classification"}, TEXT_CLASS, "problem_type 'multi_label_classification'"),
        ({"num_labels": 1}, TEXT_CLASS, "one label"),
        ({"id2label": {"0": "score"}}, TAGS, "one label"),
        ({"problem_type": "single_label_classification"}, TEXT_CLASS, None),
        # transformers does not read it for words.
        ({"problem_type": "regression"}, TAGS, None),
    ],
)
def test_classes_are_not_trained_by_the_loss_of_a_checkpoints_former_task(
    kept: dict[str, Any], head: Head, said: str | None
) -> None:
    built = instantiate({**WORDS, **kept, "model_type": "bert"}, head)
    document = Model(config=json.loads(built.config.to_json_string()), head=head, blocks=block_table(built))
    labels = (12,) if head == TAGS else ()
    for schema in (texts(12, labels), texts(12, labels, classes=None)):
        found = schema.mismatches(document, padded=True)
        assert found == (
            [f"{NUMBERS.format(said)}: make it again with `tessera model init --labels`"] if said else []
        )
    numbers = {**tensors(input_ids=(12,)), "labels": TensorSchema(dtype="float32", shape=())}
    assert DatasetSchema(inputs=numbers).mismatches(document, padded=True) == []


@pytest.mark.parametrize(
    ("problem", "classes", "kept", "head", "said"),
    [
        ("multi_label", 3, {"problem_type": "multi_label_classification", "num_labels": 3}, TEXT_CLASS, None),
        (
            "multi_label",
            3,
            {"problem_type": "multi_label_classification", "num_labels": 4},
            TEXT_CLASS,
            "has 4 labels",
        ),
        ("multi_label", 3, {"num_labels": 3}, TEXT_CLASS, "for text-classification, learns classes: make it again"),
        ("multi_label", 3, {"problem_type": "regression", "num_labels": 1}, TEXT_CLASS, "learns regression"),
        ("regression", None, {"problem_type": "regression", "num_labels": 1}, TEXT_CLASS, None),
        ("regression", None, {"num_labels": 1}, TEXT_CLASS, None),
        ("regression", None, {"num_labels": 2}, TEXT_CLASS, "a number for each example"),
        ("regression", None, {"num_labels": 2}, TAGS, "for token-classification, learns classes"),
    ],
)
def test_several_labels_and_numbers_are_compared_with_the_model_s_task(
    problem: Problem, classes: int | None, kept: dict[str, Any], head: Head, said: str | None
) -> None:
    built = instantiate({**WORDS, **kept, "model_type": "bert"}, head)
    document = Model(config=json.loads(built.config.to_json_string()), head=head, blocks=block_table(built))
    inputs = {**tensors(input_ids=(12,)), "labels": TensorSchema(dtype="float32", shape=(3,) if classes else ())}
    schema = DatasetSchema(inputs=inputs, classes=classes, problem=problem)
    found = schema.mismatches(document, padded=True)
    assert bool(found) == bool(said), found
    assert (said or "") in "; ".join(found)
    # Data sets of classes are described as before.
    assert "problem" in schema.model_dump()
    assert "problem" not in DatasetSchema(inputs=inputs).model_dump()


def test_the_order_of_several_labels_is_compared() -> None:
    names = {"problem_type": "multi_label_classification", "id2label": {"0": "mass", "1": "edema"}}
    built = instantiate({**WORDS, **names, "model_type": "bert"}, TEXT_CLASS)
    document = Model(config=json.loads(built.config.to_json_string()), head=TEXT_CLASS, blocks=block_table(built))
    own = DatasetSchema(classes=2, class_names=name_digests(["edema", "mass"]), problem="multi_label")
    (said,) = own.mismatches(document, padded=True)
    assert "'edema' is class 0 in `labels` and class 1 of the model" in said


@pytest.mark.parametrize("schema", [DatasetSchema(), DatasetSchema(inputs={"waves": TensorSchema(dtype="float32")})])
def test_nothing_is_said_of_what_is_not_known(schema: DatasetSchema) -> None:
    built = instantiate({**IMAGES, "model_type": "vit"}, IMAGE)
    blocks = block_table(built)
    assert schema.mismatches(Model(config={"model_type": "vit"}, head=IMAGE, blocks=blocks), padded=True) == []
    unknown = Model(config={"model_type": "vit"}, head="features", blocks=blocks)
    assert images(3, 32, 32).mismatches(unknown, padded=True) == []


NAMES = {"0": "benign", "1": "malignant", "2": "unclear"}


@pytest.mark.parametrize(
    ("id2label", "labels", "moved"),
    [
        (NAMES, ["benign", "malignant", "unclear"], None),
        # A site that leaves out the last classes numbers the others as the model does.
        (NAMES, ["benign", "malignant"], None),
        (NAMES, ["benign", "unclear"], "'unclear' is class 1 in `labels` and class 2 of the model"),
        (NAMES, ["malignant", "benign", "unclear"], "'malignant' is class 0 in `labels` and class 1 of the model"),
        (NAMES, ["Benign ", "UNCLEAR"], "'unclear' is class 1 in `labels` and class 2 of the model"),
        # In another language a class may even have the name of another one.
        (NAMES, ["gutartig", "bösartig", "unklar"], None),
        ({"0": "present", "1": "poison"}, ["Gift", "Poison"], None),
        ({"0": "present", "1": "gift"}, ["Geschenk", "Gift"], None),
        ({"0": "B", "1": "M"}, ["G", "B"], None),
        # Neither numbers nor what transformers writes for a class without a name tell which class is meant.
        ({"0": "2", "1": "1", "2": "0"}, ["0", "1", "2"], None),
        ({"0": "LABEL_0", "1": "LABEL_1", "2": "LABEL_2"}, ["LABEL_1", "LABEL_0"], None),
        ({"0": "label_0", "1": "label_1"}, ["label_1", "label_0"], None),
        # Names that differ only by case are one name.
        ({"0": "a", "1": "b", "2": "A"}, ["b", "a"], None),
    ],
)
def test_a_class_has_the_number_that_the_model_gives_its_name(
    id2label: dict[str, str], labels: list[str], moved: str | None
) -> None:
    document = named_classes(id2label)
    tensors = {"labels": torch.zeros(2, dtype=torch.int64)}
    found = schema_of(tensors, {"labels": ()}, names=labels).mismatches(document, padded=False)
    remedy = 'put all its classes into `labels`, in the order of ["benign", "malignant", "unclear"], and those '
    agreed = "if all sites agree, give the model theirs (`tessera model init --labels`)"
    assert found == ([f"{moved}: {remedy}without an example into `absent`; {agreed}"] if moved else [])
    # A schema that only counts classes has no names to compare.
    assert schema_of(tensors, {"labels": ()}, classes=2).mismatches(document, padded=False) == []


@pytest.mark.parametrize(("count", "compared"), [(MAX_NAMES, True), (MAX_NAMES + 1, False)])
def test_many_classes_are_not_listed_and_too_many_not_compared(count: int, compared: bool) -> None:
    names = [f"kind {number}" for number in range(count)]
    document = named_classes({str(number): name for number, name in enumerate(names)})
    found = schema_of({}, {}, names=names[::-1]).mismatches(document, padded=False)
    assert ["in the order of its id2label, and" in said for said in found] == [True] * compared


def named_classes(id2label: dict[str, str]) -> Model:
    built = instantiate({**IMAGES, "model_type": "vit", "id2label": id2label}, IMAGE)
    return Model(config=json.loads(built.config.to_json_string()), head=IMAGE, blocks=block_table(built))
