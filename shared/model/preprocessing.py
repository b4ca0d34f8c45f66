"""Files of a tokenizer and an image processor that travel with a model: JSON of known keys, without code."""

import hashlib
import json
from contextlib import suppress
from pathlib import Path
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, ValidationError

from tessera.shared.json_limits import check_document
from tessera.shared.problems import Invalid, faults_of
from tessera.shared.schema import Digest, Value

MAX_FILE_BYTES = 64 << 20
"""Limit on a file. The largest tokenizers of published models take half of it."""

MAX_SETTINGS_BYTES = 1 << 16

MAX_ADDED_TOKENS = 1 << 14
"""Tokens beside a tokenizer's vocabulary: loading many of them takes minutes. Published ones have up to 7,000."""

MAX_SPECIAL_TOKENS = 64
"""Special tokens that a tokenizer may add to a text or a pair. Published ones add up to four."""

MAX_TEMPLATE = 1 << 15
"""Characters of a chat template. Published ones have up to 20,000."""

CHAT_TEMPLATE = "chat_template.jinja"
"""The file in which transformers saves a chat template. Here the template is a key of `tokenizer_config.json`."""

UNLIMITED = 1 << 40
"""Transformers writes lengths above this for a tokenizer without a limit."""

REMEDY = "Create the model folder again with `tessera model init`, which keeps what can travel."

FileName = Literal["tokenizer.json", "tokenizer_config.json", "preprocessor_config.json"]

Word = Annotated[str, Field(max_length=256)]
Side = Literal["left", "right"]
Channels = Annotated[tuple[float, ...], Field(max_length=64)]
Sides = dict[
    Literal["height", "width", "shortest_edge", "longest_edge", "max_height", "max_width"],
    Annotated[int, Field(ge=1, le=1 << 16)],
]


TOKENIZER: FileName = "tokenizer.json"


class FileRef(Value):
    """A file of the model folder as a blob."""

    digest: Digest
    nbytes: Annotated[int, Field(ge=1, le=MAX_FILE_BYTES)]


class TokenizerSettings(Value):
    """Known keys of `tokenizer_config.json`. The class always reads `tokenizer.json` alone."""

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
    chat_template: Annotated[str, Field(max_length=MAX_TEMPLATE)] | None = None
    """A program of Jinja, which only a site renders, in a sandbox (`worker.model.chat_template`)."""


class ProcessorSettings(Value):
    """Known keys of `preprocessor_config.json`: plain numbers. The class follows from the model's type."""

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


def read_files(folder: Path) -> dict[FileName, bytes]:
    """Return the files of a model folder that travel, settings with their known keys alone.

    A tokenizer without `tokenizer.json` does not travel. Raises Invalid for a file that cannot be read.
    """
    files: dict[FileName, bytes] = {}
    for name in get_args(FileName):
        file = folder / name
        if not file.is_file() or (name == "tokenizer_config.json" and "tokenizer.json" not in files):
            continue
        raw = file.read_bytes()
        if kind := SETTINGS.get(name):
            raw = _reduced(kind, file, raw)
        require_file(name, raw)
        files[name] = raw
    return files


def _reduced(kind: type[TokenizerSettings | ProcessorSettings], file: Path, raw: bytes) -> bytes:
    try:
        given = json.loads(raw)
        if kind is TokenizerSettings:
            given = {**given, "chat_template": _chat_template(file.parent, given.get("chat_template"))}
        known = {name: value for name, value in given.items() if name in kind.model_fields and value is not None}
        # Special tokens with settings of their own, of which `tokenizer.json` has a copy.
        plain = {
            name: value.get("content", value) if isinstance(value, dict) and name.endswith("_token") else value
            for name, value in known.items()
            if name != "tokenizer_class"
        }
        if plain.get("model_max_length", 0) > UNLIMITED:
            del plain["model_max_length"]
        settings = kind.model_validate(plain)
    except (ValueError, AttributeError, TypeError, RecursionError) as fault:
        raise Invalid(f"{file} cannot travel with the model: {str(fault)[:200]}", remedy=REMEDY) from None
    return (settings.model_dump_json(indent=1, exclude_none=True) + "\n").encode()


def _chat_template(folder: Path, setting: Any) -> Any:
    """Return a folder's chat template: that of its own file, or else of the settings, which may name several."""
    if (own := folder / CHAT_TEMPLATE).is_file():
        return own.read_text()
    named = {each["name"]: each["template"] for each in setting} if isinstance(setting, list) else setting
    return named.get("default") if isinstance(named, dict) else named


def require_file(name: FileName, raw: bytes) -> None:
    """Raise Invalid unless the file is JSON within the limits and, for settings, of known keys."""
    settings = SETTINGS.get(name)
    limit = MAX_SETTINGS_BYTES if settings else MAX_FILE_BYTES
    if len(raw) > limit:
        raise Invalid(f"{name} has {len(raw)} bytes; it may have at most {limit}", remedy=REMEDY)
    try:
        document = check_document(raw)
        if settings:
            settings.model_validate_json(raw)
    except ValidationError as refusal:
        raise Invalid(
            f"{name} has settings that do not travel with a model", errors=faults_of(refusal), remedy=REMEDY
        ) from None
    except ValueError as fault:
        raise Invalid(f"{name} is not JSON that can be read: {fault}", remedy=REMEDY) from None
    if settings is None and isinstance(document, dict) and len(document.get("added_tokens") or ()) > MAX_ADDED_TOKENS:
        raise Invalid(f"{name} has more than {MAX_ADDED_TOKENS} added_tokens", remedy=REMEDY)
    if settings is None and (added := _special_tokens(document)) > MAX_SPECIAL_TOKENS:
        raise Invalid(
            f"{name} adds {added} special tokens to a text; at most {MAX_SPECIAL_TOKENS} are taken",
            remedy="Shorten the template of its post_processor.",
        )


def _special_tokens(document: Any) -> int:
    """Return the most special tokens that a tokenizer adds to a text or a pair; 0 for one that its parser refuses."""

    def added(step: Any) -> int:
        if step["type"] == "Sequence":
            return sum(map(added, step["processors"]))
        ids = {name: len(token["ids"]) for name, token in step.get("special_tokens", {}).items()}
        parts = ([part.get("SpecialToken") for part in step.get(name, ())] for name in ("single", "pair"))
        return max(sum(ids[part["id"]] for part in some if part) for some in parts)

    with suppress(LookupError, TypeError, AttributeError):
        return added(document["post_processor"])
    return 0


def vocabulary_in(raw: bytes) -> str | None:
    """Return 8 hexadecimal digits for the words in a `tokenizer.json` and their numbers; None if it lists none.

    Tokens that were added to a vocabulary do not count: a site's tokenizer may have more of them, such as one for
    padding.
    """
    try:
        document = check_document(raw)
        listed = document["model"]["vocab"]
        # In a unigram model, the place of a piece is its number.
        numbers = listed if isinstance(listed, dict) else {piece: place for place, (piece, _) in enumerate(listed)}
        added = {token["content"] for token in document.get("added_tokens") or ()}
        words = sorted((number, word) for word, number in numbers.items() if word not in added)
    except (ValueError, LookupError, TypeError, AttributeError):
        return None
    return hashlib.sha256(json.dumps(words).encode()).hexdigest()[:8] if words else None
