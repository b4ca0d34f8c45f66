"""Files of a tokenizer and an image processor that travel with a model: JSON of known keys, without code."""

from typing import Annotated, Literal

from pydantic import Field, ValidationError

from tessera.shared.json_limits import check_document
from tessera.shared.problems import Invalid, faults_of
from tessera.shared.schema import Digest, Frozen

MAX_FILE_BYTES = 64 << 20
"""Limit on a file. The largest tokenizers of published models take half of it."""

MAX_SETTINGS_BYTES = 1 << 16

REMEDY = "Create the model folder again with `tessera model init`, which keeps what can travel."

FileName = Literal["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]

Word = Annotated[str, Field(max_length=256)]
Side = Literal["left", "right"]
Channels = Annotated[tuple[float, ...], Field(max_length=64)]
Sides = dict[
    Literal["height", "width", "shortest_edge", "longest_edge", "max_height", "max_width"],
    Annotated[int, Field(ge=1, le=1 << 16)],
]


class FileRef(Frozen):
    """A file of the model folder as a blob."""

    digest: Digest
    nbytes: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]


class TokenizerSettings(Frozen):
    """What `tokenizer_config.json` may say. The class is always the one that reads `tokenizer.json` alone."""

    tokenizer_class: Literal["PreTrainedTokenizerFast"] = "PreTrainedTokenizerFast"
    model_max_length: Annotated[int, Field(ge=1)] | None = None
    model_input_names: Annotated[tuple[Word, ...], Field(max_length=8)] = ("input_ids", "attention_mask")
    padding_side: Side = "right"
    truncation_side: Side = "right"
    bos_token: Word | None = None
    eos_token: Word | None = None
    unk_token: Word | None = None
    sep_token: Word | None = None
    pad_token: Word | None = None
    cls_token: Word | None = None
    mask_token: Word | None = None


class ProcessorSettings(Frozen):
    """What `preprocessor_config.json` may say: plain numbers. The class follows from the model's type."""

    do_convert_rgb: bool | None = None
    do_resize: bool | None = None
    size: Sides | None = None
    resample: Annotated[int, Field(ge=0, le=5)] | None = None
    do_center_crop: bool | None = None
    crop_size: Sides | None = None
    do_rescale: bool | None = None
    rescale_factor: float | None = None
    do_normalize: bool | None = None
    image_mean: Channels | None = None
    image_std: Channels | None = None


SETTINGS: dict[str, type[TokenizerSettings | ProcessorSettings]] = {
    "tokenizer_config.json": TokenizerSettings,
    "preprocessor_config.json": ProcessorSettings,
}


def require_file(name: FileName, raw: bytes) -> None:
    """Raise Invalid unless the file is JSON within the limits and, for settings, of known keys."""
    settings = SETTINGS.get(name)
    limit = MAX_SETTINGS_BYTES if settings else MAX_FILE_BYTES
    if len(raw) > limit:
        raise Invalid(f"{name} has {len(raw)} bytes; it may have at most {limit}", remedy=REMEDY)
    try:
        check_document(raw)
        if settings:
            settings.model_validate_json(raw)
    except ValidationError as refusal:
        raise Invalid(
            f"{name} has settings that do not travel with a model", errors=faults_of(refusal), remedy=REMEDY
        ) from None
    except ValueError as fault:
        raise Invalid(f"{name} is not JSON that can be read: {fault}", remedy=REMEDY) from None
