"""Images with a text for each class, for zero-shot classification by models such as CLIP and SigLIP.

[datasets.pets]
kind = "imagetext"
folder = "/data/pets"
labels = ["cat", "dog"]
processor = "/models/clip"
"""

from dataclasses import replace
from typing import Self

from pydantic import Field, PositiveInt, model_validator

from tessera.worker.data.dataset import Adapter, DataError, Dataset, schema_of
from tessera.worker.data.kinds.images import ImagesOptions, images
from tessera.worker.data.readers.class_labels import Names
from tessera.worker.data.readers.tokenizer import MAX_TOKENS, Encoded, encode, tokenizer_of

HOLE = "{}"


class ImageTextOptions(ImagesOptions):
    processor: str | None = Field(
        default=None,
        description="a folder or a name on the hub, which contains a tokenizer too unless `tokenizer` is set",
    )
    labels: Names = Field(description="the classes' names in order, as they appear in the texts")
    template: str = Field(default="a photo of a {}.", max_length=1000, description="`{}` stands for a class's name")
    tokenizer: str | None = Field(default=None, description="a folder or a name on the hub; the processor's if unset")
    max_length: PositiveInt | None = Field(
        default=None, le=MAX_TOKENS, description="tokens to which every text is padded; the longest text's if unset"
    )

    @model_validator(mode="after")
    def _has_tokenizer(self) -> Self:
        if self.tokenizer is None and self.processor is None:
            raise ValueError("give tokenizer, or a processor that contains one")
        if HOLE not in self.template:
            raise ValueError("template: has no {} for a class's name; without it all classes have the same text")
        return self


def imagetext(options: ImageTextOptions) -> Dataset:
    """Return `pixel_values` float32 [n, channels, height, width] and `labels` int64 [n].

    Common to all are the texts of the classes, int64 [classes, tokens]: `input_ids` and, if the tokenizer's model
    takes it, `attention_mask`.
    """
    texts = _texts(options)
    dataset = images(options, texts.inputs)
    shape = (texts.padding.width,) if options.max_length else None
    inputs = {**dataset.schema.inputs, **schema_of(texts.inputs, dict.fromkeys(texts.inputs, shape)).inputs}
    schema = dataset.schema.model_copy(update={"inputs": inputs})
    return replace(dataset, report=replace(dataset.report, unknown_tokens=texts.unknown), schema=schema)


def _texts(options: ImageTextOptions) -> Encoded:
    """Return the encoded text of each class. Raises DataError if two have the same tokens."""
    option, source = ("tokenizer", options.tokenizer) if options.tokenizer else ("processor", options.processor)
    tokenizer = tokenizer_of(option, source or "")
    texts = [options.template.replace(HOLE, name) for name in options.labels]
    encoded = encode(tokenizer, texts, max_length=options.max_length, fill=options.max_length is not None)
    first: dict[tuple[int, ...], str] = {}
    for name, ids in zip(options.labels, encoded.ids.tolist(), strict=True):
        if (other := first.setdefault(tuple(ids), name)) != name:
            raise DataError(
                f"labels: {other!r} and {name!r} have the same tokens in {source}: it does not know a word, or "
                "max_length cuts it off"
            )
    return encoded


ADAPTER = Adapter("imagetext", ImageTextOptions, imagetext)
