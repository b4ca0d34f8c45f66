"""The error codes of malformed updates, which are stable.

Programs find them in the `errors` of an `invalid-update`; the detail of each describes it in words.
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
"""Errors of the container, before any block is read."""

FormKind = Literal[
    "unknown-format",
    "no-block",
    "extra-missing",
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
    "weight-invalid",
    "block-too-short",
    "block-too-long",
]
"""Errors of a block before its bytes are decoded."""

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
    "weight-unusable",
    "envelope-unusable",
]
"""Errors of the content."""

Kind = HeaderKind | FormKind | ContentKind
KINDS: tuple[str, ...] = (*get_args(HeaderKind), *get_args(FormKind), *get_args(ContentKind))


class Malformed(ValueError):
    """Bytes that are malformed, with the error's `code`."""

    def __init__(self, code: Kind, detail: str) -> None:
        super().__init__(detail)
        self.code: Kind = code

    def __reduce__(self) -> tuple[type[Malformed], tuple[Kind, str]]:
        """Support the transfer to another process."""
        return type(self), (self.code, str(self))
