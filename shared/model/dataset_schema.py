"""The declared form of a data set's tensors, and its comparison with a model."""

from __future__ import annotations

import json
import math
import operator
import re
from collections.abc import Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Literal
from unicodedata import normalize

from pydantic import Field, JsonValue, PositiveInt

from tessera.shared.model.blocks import Block, whole_shapes
from tessera.shared.model.spec import Head, Model
from tessera.shared.near_names import did_you_mean
from tessera.shared.schema import Label, Message

PIXELS, IDS, LABELS = "pixel_values", "input_ids", "labels"
ANSWERS = "answer_mask"
"""The input of pairs of answers that says which tokens belong to these."""

TEXT_HEADS: tuple[Head, ...] = ("text-classification", "token-classification", "masked-lm", "causal-lm", "seq2seq-lm")
TAKES: Mapping[Head, tuple[str, ...]] = {
    "image-classification": (PIXELS,),
    "contrastive": (PIXELS, IDS),
    **dict.fromkeys(TEXT_HEADS, (IDS,)),
}
"""The inputs that a model with this head cannot do without."""

VOCABULARY_HEADS: tuple[Head, ...] = ("masked-lm", "causal-lm", "seq2seq-lm")
"""Kinds of data with a row for each token."""

FIXED_SIZE = ("vit", "vit_msn", "ijepa", "clip", "siglip")
"""Model types that refuse images of another size than `image_size`; most others resize their positions."""

POSITIONS = ("position_embeddings", "position_embedding", "wpe", "embed_positions", "positions_embed")
"""Names of modules with a learnt vector for each position."""

FROM_PADDING = (
    "altclip_text_model",
    "camembert",
    "data2vec-text",
    "esm",
    "ibert",
    "layoutlmv3",
    "lilt",
    "longformer",
    "luke",
    "markuplm",
    "mpnet",
    "roberta",
    "roberta-prelayernorm",
    "xlm-roberta",
    "xlm-roberta-xl",
    "xmod",
)
"""Model types that number the tokens of a text from `pad_token_id` + 1 on: no token has the positions before it."""

MULTI_LABEL, REGRESSION = "multi_label_classification", "regression"
"""Values of a config's `problem_type`: an example has several labels, or none; its label is a number."""

SINGLE_LABEL = (None, "single_label_classification")
"""The values of a config's `problem_type` with which transformers takes a label for the number of a class."""

LIMITS = ("image_size", "num_channels", "max_position_embeddings", "n_positions", "vocab_size", "num_labels")


NO_NAME = re.compile(r"(label_)?[0-9]+")
"""A number, or transformers' text for a class without a name: neither identifies a class."""
MAX_NAMES = 100
"""The most classes whose names are compared."""
MAX_LISTED = 400
"""The most characters of a list of names in a message."""
Problem = Literal["multi_label", "regression"]
ShortDigest = Annotated[str, Field(pattern=r"^[0-9a-f]{8}$")]


class TensorSchema(Message):
    """One of a model's inputs: its dtype and the shape for one example, or for one class's text; None if the settings
    do not fix the shape."""

    dtype: Annotated[str, Field(pattern=r"^[a-z0-9]{1,16}$")]
    shape: Annotated[tuple[PositiveInt, ...], Field(max_length=8)] | None = None

    def __str__(self) -> str:
        return self.dtype if self.shape is None else f"{self.dtype} {list(self.shape)}"


class DatasetSchema(Message):
    """Names, dtypes and shapes of a data set's inputs, and the number of classes that the site's settings list.

    `class_names` has digests of these classes' names in their order: a reader can confirm a name that it guesses.
    `vocabulary` is that of the tokenizer in the settings (`preprocessing.vocabulary_in`), and `tokens` its highest
    token plus 1, with added ones. All of it follows from the settings alone, and does not depend on the examples.
    """

    inputs: dict[Label, TensorSchema] = Field(default={}, max_length=32)
    classes: PositiveInt | None = None
    class_names: tuple[ShortDigest, ...] = Field(default=(), max_length=MAX_NAMES)
    vocabulary: ShortDigest | None = None
    tokens: PositiveInt | None = None
    problem: Problem | None = Field(default=None, exclude_if=operator.not_)
    """The task of labels that are several for an example, or numbers; None for classes and for words."""

    def __str__(self) -> str:
        return ", ".join(f"{name} {one}" for name, one in sorted(self.inputs.items())) or "no inputs declared"

    def mismatches(
        self, model: Model, *, padded: bool, vocabulary: str | None = None, prefers: bool = False
    ) -> list[str]:
        """Return the reasons why the model would fail on such data, or learn nothing. Uncertain reasons are left out.

        `padded`: whether every text is padded to `max_length`, as under differential privacy. `vocabulary` is that of
        the model's tokenizer, if it is known. `prefers`: whether the run learns preferences.
        """
        takes = TAKES.get(model.head, ())
        given = [name for name in (PIXELS, IDS) if name in self.inputs]
        if given and "inputs_embeds" not in self.inputs and set(takes) - set(given):
            return [f"the model takes {' and '.join(takes)}; the data set gives {' and '.join(given)}"]
        found = [self._image_mismatch(model)] if PIXELS in takes else []
        found += [self._class_mismatch(model), self._loss_mismatch(model)]
        found.append(self._pair_mismatch(prefers=prefers) or self._label_mismatch(model.head))
        found.append(self._problem_mismatch(model))
        if IDS in takes and (padded or model.head == "contrastive"):
            found.append(self._length_mismatch(model))
        if IDS in takes:
            found.append(self._token_mismatch(model))
        if IDS in takes and self.vocabulary and vocabulary not in (None, self.vocabulary):
            found.append(
                'its tokenizer numbers words differently from the model\'s: set tokenizer = "run", or name a copy of '
                "the model's folder"
            )
        return [said for said in found if said]

    def _shape(self, name: str) -> tuple[int, ...] | None:
        return self.inputs[name].shape if name in self.inputs else None

    def _image_mismatch(self, model: Model) -> str | None:
        shape = self._shape(PIXELS)
        if shape is None or len(shape) != 3:
            return None
        config = _part(model.config, "vision_config") or model.config
        channels, size = config.get("num_channels"), config.get("image_size")
        sides = [size, size] if isinstance(size, int) else size
        fixed = isinstance(sides, list) and len(sides) == 2 and model.config["model_type"] in FIXED_SIZE
        takes = [channels if isinstance(channels, int) else shape[0], *(sides if fixed else shape[1:])]  # type: ignore[misc]
        return None if takes == list(shape) else f"images are {list(shape)}; the model takes {takes}"

    def _class_mismatch(self, model: Model) -> str | None:
        classes = class_count(model) if self.problem is None else None
        if self.problem == problem_of(model) == "multi_label":
            classes = output_count(model)
            if self.classes not in (None, classes):
                return f"the model has {classes} labels; the data set has {self.classes}"
        if not (self.classes and classes):
            return None
        if classes < self.classes:
            return f"the model has {classes} classes; the data set has {self.classes} labels"
        return self._order_mismatch(class_names(model)) if self.class_names else None

    def _loss_mismatch(self, model: Model) -> str | None:
        """Return the reason why transformers would learn classes as numbers: a key of the model's config that is
        left of another task."""
        labels = self.inputs.get(LABELS)
        if self.problem or not (self.classes or (labels and labels.dtype.startswith("int"))) or class_count(model):
            return None
        if not model.head.endswith("-classification"):
            return None
        kept = model.config.get("problem_type")
        said = "one label" if kept in SINGLE_LABEL else f"problem_type {kept!r}"
        return (
            f"the labels are classes, and the model's config has {said}, with which it learns numbers: make it "
            "again with `tessera model init --labels`"
        )

    def _problem_mismatch(self, model: Model) -> str | None:
        """Return the reason why a model of classes, or of another task, would not learn several labels or numbers."""
        if self.problem is None or self.problem == (found := problem_of(model)):
            return None
        kind = "several labels for each example" if self.problem == "multi_label" else "a number for each example"
        return (
            f"the labels are {kind} (problem_type {self.problem!r}), and the model, for {model.head}, learns "
            f"{'classes' if found is None else found}: make it again with `tessera model init --problem-type "
            f"{self.problem}`"
        )

    def _order_mismatch(self, names: Sequence[str]) -> str | None:
        places = {name: place for place, name in enumerate(name_digests(names))}
        if not set(self.class_names) <= places.keys():
            # In another language one class may have the other's name.
            return None
        for own, name in enumerate(self.class_names):
            if (place := places[name]) != own:
                listed = json.dumps(names, ensure_ascii=False)
                order = listed if len(listed) <= MAX_LISTED else "its id2label"
                return (
                    f"{names[place][:64]!r} is class {own} in `labels` and class {place} of the model: put all its "
                    f"classes into `labels`, in the order of {order}, and those without an example into `absent`; if "
                    "all sites agree, give the model theirs (`tessera model init --labels`)"
                )
        return None

    def _pair_mismatch(self, *, prefers: bool) -> str | None:
        if not self.inputs or prefers == (ANSWERS in self.inputs):
            return None
        if prefers:
            return (
                'the run learns preferences (training.loss = "dpo"), and the data set has no pairs of answers: use '
                "the kind chat with columns chosen and rejected"
            )
        return 'its examples are pairs of answers, which only a run with training.loss = "dpo" learns'

    def _label_mismatch(self, head: Head) -> str | None:
        shape = self._shape(LABELS)
        if shape is None or head not in TEXT_HEADS or ANSWERS in self.inputs:
            return None
        per_token = head != "text-classification"
        if bool(shape) == per_token or not self.inputs[LABELS].dtype.startswith("int"):
            return None
        kinds = ("one for each text", "one for each token")
        return f"the labels are {kinds[not per_token]}; a model for {head} takes {kinds[per_token]}"

    def _token_mismatch(self, model: Model) -> str | None:
        rows = (_part(model.config, "text_config") or model.config).get("vocab_size")
        if self.tokens is None or not isinstance(rows, int) or self.tokens <= rows:
            return None
        return (
            f"its tokenizer has token {self.tokens - 1}, and the model takes 0 to {rows - 1}: set tokenizer = "
            '"run", or name the tokenizer of the model, without tokens that were added since'
        )

    def _length_mismatch(self, model: Model) -> str | None:
        shape, most = self._shape(IDS), token_limit(model)
        if not shape or most is None or shape[-1] <= most:
            return None
        return f"max_length {shape[-1]} is more than the {most} tokens that the model takes: set it to {most} or less"


def class_count(model: Model) -> int | None:
    """Return the number of classes of a model whose labels are classes; None for a model of another kind."""
    config = model.config
    if not model.head.endswith("-classification"):
        return None
    if model.head != "token-classification" and config.get("problem_type") not in SINGLE_LABEL:
        return None
    # With one, the model learns a number rather than classes.
    return classes if (classes := output_count(model)) > 1 else None


def output_count(model: Model) -> int:
    """Return the number of a classifier's outputs: its classes or labels, or 1 for a number."""
    said = [len(_part(model.config, "id2label")), model.config.get("num_labels")]
    # Without either, transformers makes two.
    return max((count for count in said if isinstance(count, int) and count), default=2)


def problem_of(model: Model) -> Problem | None:
    """Return the task of a model that learns several labels of an example, or numbers; None for any other model."""
    if model.head not in ("text-classification", "image-classification"):
        return None
    said = model.config.get("problem_type")
    if said == MULTI_LABEL:
        return "multi_label"
    return "regression" if said == REGRESSION or (said is None and output_count(model) == 1) else None


def target_scale(config: Mapping[str, Any]) -> tuple[float, float]:
    """Return the mean and the deviation by which a run standardises a regression's targets: `target_mean` and
    `target_deviation` of the model's config, by default 0 and 1."""
    return float(config.get("target_mean", 0.0)), float(config.get("target_deviation", 1.0))


def class_names(model: Model) -> list[str]:
    """Return the names that the model's config gives its classes, in their order; empty without names."""
    names = _part(model.config, "id2label")
    if not all(number.isdecimal() for number in names):
        return []
    return [str(names[number]) for number in sorted(names, key=int)]


def ignore_fault(names: Sequence[str], model: Model) -> str | None:
    """Return the reason why macro F1 cannot leave these classes out; None if it can."""
    known = class_names(model) if class_count(model) or problem_of(model) == "multi_label" else []
    if names and not known:
        return "names classes, and the model's config names none: add `id2label` to it, or leave this out"
    if unknown := [name for name in names if name not in known]:
        return f"names {unknown[0][:64]!r}, which is no class of the model{did_you_mean(unknown[0], known)}"
    if known and not set(known) - set(names):
        return "leaves no class for macro F1: name fewer"
    return None


def generation_fault(max_new_tokens: int, model: Model, *, prefers: bool = False) -> str | None:
    """Return the reason why a model cannot generate this number of tokens, or why a run that `prefers` one of two
    answers cannot score them; None if they can."""
    if max_new_tokens and prefers:
        return 'scores generated answers, and a run with training.loss = "dpo" measures pairs: leave it out'
    if max_new_tokens and model.head != "causal-lm":
        return f"is for language models, and the head is {model.head}: leave it out"
    if max_new_tokens and max_new_tokens >= (token_limit(model) or math.inf):
        return f"leaves no room for a question: the model takes {token_limit(model)} tokens"
    return None


def name_digests(names: Sequence[str]) -> tuple[ShortDigest, ...]:
    """Return 8 hexadecimal digits for each class's name, regardless of case, spaces and Unicode forms.

    Empty if there are too many, if two are alike, or if one is a number, which does not name a class.
    """
    if len(names) > MAX_NAMES:
        return ()
    plain = [normalize("NFC", " ".join(normalize("NFC", name).casefold().split())) for name in names]
    if len(set(plain)) < len(plain) or any(map(NO_NAME.fullmatch, plain)):
        return ()
    return tuple(sha256(name.encode()).hexdigest()[:8] for name in plain)


def limits(model: Model) -> str:
    """Return the type of a model, and the keys of its config about its inputs."""
    parts = [model.config, *(_part(model.config, name) for name in ("vision_config", "text_config"))]
    said = [f"{key} {part[key]}" for part in parts for key in LIMITS if isinstance(part.get(key), int | list)]
    return ", ".join([f"{model.config['model_type']} for {model.head}", *said])


def _part(config: Mapping[str, JsonValue], name: str) -> Mapping[str, JsonValue]:
    part = config.get(name)
    return part if isinstance(part, dict) else {}


def token_rows(head: Head, blocks: Iterable[Block]) -> list[Block]:
    """Return the blocks with a row for each token or position of a text: only texts that have it move the row."""
    if IDS not in TAKES.get(head, ()):
        return []
    roles = {"embedding", *(["head"] if head in VOCABULARY_HEADS else [])}
    found = (block for block in blocks if roles.intersection((block.role, *block.adapts)))
    return [block for block in found if not block.tensor.startswith("vis")]


def token_limit(model: Model) -> int | None:
    """Return the most tokens that the model takes of a text, or None if it computes positions for any number."""
    shapes = [(name.split("."), shape) for name, shape in whole_shapes(model.blocks).items() if len(shape) == 2]
    rows = [shape[0] for path, shape in shapes if path[-2:-1] and path[-2] in POSITIONS and path[0][:3] != "vis"]
    return int(min((*rows, positions_in(_part(model.config, "text_config") or model.config)))) if rows else None


def positions_in(config: Mapping[str, Any]) -> float:
    """Return the most tokens for which a text model's config has positions; infinity if it does not say.

    The table may have rows that no token uses: before the first, as in RoBERTa, or for an offset, as in OPT.
    """
    said = [config[name] for name in ("max_position_embeddings", "n_positions") if isinstance(config.get(name), int)]
    before = padding + 1 if isinstance(padding := config.get("pad_token_id"), int) else 2
    return min(said, default=math.inf) - (before if config.get("model_type") in FROM_PADDING else 0)
