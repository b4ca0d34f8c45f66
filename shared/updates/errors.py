"""What can be wrong with the bytes of an update, kind by kind. Each kind has a code that stays as it is.

The codes are in the `errors` of an `invalid-update`, for programs; the detail beside each says it in words.
"""

from __future__ import annotations

from typing import Literal, get_args

HeaderKind = Literal[
    "header-missing",
    "header-too-long",
    "header-beyond-file",
    "header-not-utf8",
    "header-not-json",
    "header-too-deep",
    "header-not-object",
    "header-constant",
    "duplicate-name",
    "too-many-tensors",
    "bad-name",
    "bad-metadata",
    "bad-entry",
    "entry-missing-field",
    "entry-unknown-field",
    "bad-shape",
    "too-many-axes",
    "bad-offsets",
    "bad-dtype",
    "unknown-dtype",
    "offsets-reversed",
    "offsets-beyond-file",
    "offsets-overlap",
    "offsets-gap",
    "shape-misfit",
    "bytes-behind-data",
    "file-changed",
]
"""Wrong with the container, before any block is looked at."""

FormKind = Literal[
    "unknown-format",
    "no-block",
    "block-not-asked",
    "slice-not-asked",
    "not-bytes",
    "codec-missing",
    "codec-unknown",
    "codec-repeated",
    "codec-order",
    "codec-parameter",
    "codec-type",
    "codec-unsuited",
    "block-too-short",
    "block-too-long",
]
"""Wrong with a block before its bytes are decoded."""

ContentKind = Literal[
    "chunk-beyond-block",
    "chunk-too-long",
    "chunk-size",
    "bytes-missing",
    "bytes-left-over",
    "zstd-invalid",
    "zstd-window",
    "zstd-too-much",
    "zstd-too-little",
    "places-invalid",
    "stage-size",
    "not-finite",
    "too-far",
    "norm-overflow",
    "norm-limit",
    "metrics-unusable",
]
"""Wrong with what the bytes say."""

Kind = HeaderKind | FormKind | ContentKind
KINDS: tuple[str, ...] = (*get_args(HeaderKind), *get_args(FormKind), *get_args(ContentKind))


class Malformed(ValueError):
    """Bytes that are not what they should be. `code` says in which way."""

    def __init__(self, code: Kind, detail: str) -> None:
        super().__init__(detail)
        self.code: Kind = code

    def __reduce__(self) -> tuple[type[Malformed], tuple[Kind, str]]:
        """So that it can be raised in another process than it arose in."""
        return type(self), (self.code, str(self))
