"""Images with a text for each class, for zero-shot classification by models such as CLIP and SigLIP.

[datasets.pets]
kind = "imagetext"
folder = "/data/pets"
labels = ["cat", "dog"]
processor = "/models/clip"
"""

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from typing import Self

from pydantic import Field, PositiveInt, model_validator
from transformers import PreTrainedTokenizerBase

from tessera.shared.model.dataset_schema import IDS, TensorSchema
from tessera.worker.data.dataset import Adapter, Dataset, RawTexts, schema_of
from tessera.worker.data.kinds.images import ImagesOptions, images
from tessera.worker.data.prepared import NOT_KEPT, PreparedFolder
from tessera.worker.data.readers.class_labels import Names
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, RUN, encode, tokenized_here, tokenizer_of
from tessera.worker.errors import DataError

HOLE = "{}"


class ImageTextOptions(ImagesOptions):
    processor: str | None = Field(
        default=None,
        description="a folder or a name on the hub, which contains a tokenizer too unless `tokenizer` is set",
    )
    labels: Names = Field(description="the classes' names in order, as they appear in the texts")
    template: str = Field(default="a photo of a {}.", max_length=1000, description="`{}` stands for a class's name")
    tokenizer: str | None = Field(
        default=None, description='a folder, a name on the hub, or "run": that of each run; the processor\'s if unset'
    )
    max_length: PositiveInt | None = Field(
        default=None, le=MAX_TOKENS, description="tokens to which every text is padded; the longest text's if unset"
    )

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Self:
        if self.problem_type != "single_label":
            raise ValueError("problem_type: an image has one of the texts: leave it out")
        if self.tokenizer is None and self.processor is None:
            raise ValueError("give tokenizer, or a processor that contains one")
        if HOLE not in self.template:
            raise ValueError("template: has no {} for a class's name; without it all classes have the same text")
        return self


def imagetext(options: ImageTextOptions, prepared: PreparedFolder = NOT_KEPT) -> Dataset:
    """Return `pixel_values` float32 [n, channels, height, width] and `labels` int64 [n].

    Common to all are the texts of the classes, int64 [classes, tokens]: `input_ids` and, if the tokenizer's model
    takes it, `attention_mask`.
    """
    option, source = ("tokenizer", options.tokenizer) if options.tokenizer else ("processor", options.processor)
    tokenizer = None if options.tokenizer == RUN else tokenizer_of(option, source or "")
    texts = [options.template.replace(HOLE, name) for name in options.labels]
    raw = RawTexts(texts, partial(_converted, options.labels), options.max_length, of_classes=True)
    dataset = images(options, prepared)
    shape = (options.max_length,) if options.max_length else None
    inputs = {**dataset.schema.inputs, IDS: TensorSchema(dtype="int64", shape=shape)}
    dataset = replace(dataset, texts=raw, schema=dataset.schema.model_copy(update={"inputs": inputs}))
    return tokenized_here(dataset, tokenizer) if tokenizer else dataset


def _converted(
    names: Sequence[str], dataset: Dataset, texts: RawTexts, tokenizer: PreTrainedTokenizerBase
) -> Dataset:
    """Return the data set with the encoded text of each class. Raises DataError if two have the same tokens."""
    encoded = encode(tokenizer, texts, fill=texts.max_length is not None)
    first: dict[tuple[int, ...], str] = {}
    for name, ids in zip(names, encoded.ids.tolist(), strict=True):
        if (other := first.setdefault(tuple(ids), name)) != name:
            raise DataError(
                f"labels: {other!r} and {name!r} have the same tokens in {tokenizer.name_or_path}: it does not know "
                "a word, or max_length cuts it off"
            )
    shape = (encoded.padding.width,) if texts.max_length else None
    inputs = {**dataset.schema.inputs, **schema_of(encoded.inputs, dict.fromkeys(encoded.inputs, shape)).inputs}
    report = replace(dataset.report, unknown_tokens=encoded.unknown, truncation=encoded.truncation)
    schema = dataset.schema.model_copy(update={"inputs": inputs})
    return replace(dataset, common=encoded.inputs, report=report, schema=schema)


ADAPTER = Adapter("imagetext", ImageTextOptions, imagetext, imagetext)
