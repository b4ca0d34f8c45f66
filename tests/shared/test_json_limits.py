"""What a peer's JSON may not be: too much, ambiguous, or what JSON cannot carry on. Counted before it is parsed."""

from __future__ import annotations

import json
from typing import Any

import pytest
from pydantic import ValidationError

from tessera.shared.api.framing import unpack, unpack_task
from tessera.shared.api.versions import Manifest
from tessera.shared.json_limits import DOCUMENT_VALUES, MAX_ERRORS, bounded, check_document, read_document
from tessera.shared.model.blocks import MAX_BLOCKS
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model

BLOCK = {"tensor": "w", "role": "other", "shape": [1], "dtype": "F32"}
MODEL: dict[str, Any] = {"config": {"model_type": "vit"}, "head": "features", "blocks": [BLOCK]}
DIGEST = f"sha256:{'0' * 64}"


def table(count: int) -> bytes:
    """A model's document of so many tiny blocks, all of one name."""
    tiny = json.dumps(BLOCK, separators=(",", ":")).encode() + b","
    return json.dumps(MODEL).encode().replace(json.dumps(BLOCK).encode(), (tiny * count)[:-1])


@pytest.mark.parametrize(
    "raw",
    [
        b"[NaN]",
        b"[-Infinity]",
        b"[1e999]",
        b'{"a":1,"a":2}',
        b'["\\ud800"]',
        b'["\xff"]',
        b"\xef\xbb\xbf[]",
        "[]".encode("utf-16"),
        b"[" * 5_000 + b"]" * 5_000,
    ],
    ids=repr,
)
def test_what_is_no_strict_json_is_refused(raw: bytes) -> None:
    with pytest.raises(ValueError):  # noqa: PT011 (each has words of its own)
        check_document(raw)


def test_a_pair_of_surrogates_is_a_character() -> None:
    assert check_document(b'["\\ud83d\\ude00", 1.5, -2, true, null]') == ["\U0001f600", 1.5, -2, True, None]


def test_too_many_values_are_refused_unparsed() -> None:
    # It is no JSON, which nobody finds out.
    for raw in (b"[]," * 100, b'{"a":' * 101, b"," * 100):
        with pytest.raises(ValueError, match="more than 100 values"):
            check_document(raw, 100)
    assert bounded(b"[" + b"1," * 98 + b"1]", 100)


def test_a_model_of_too_many_blocks_is_refused_before_one_is_made() -> None:
    hostile = table(600_000)
    assert len(hostile) > MAX_DOCUMENT_BYTES
    with pytest.raises(ValueError, match=f"more than {DOCUMENT_VALUES} values"):
        Model.read(hostile)
    # Few enough values, and too many blocks all the same.
    with pytest.raises(ValueError, match=f"at most {MAX_BLOCKS} are read") as refused:
        Model.read(b'{"blocks":[' + b"0," * MAX_BLOCKS + b"0]}")
    assert not isinstance(refused.value, ValidationError)


def test_a_manifest_of_too_many_blocks_is_refused_before_one_is_read() -> None:
    blocks = json.dumps({f"w{number}": DIGEST for number in range(MAX_BLOCKS + 1)})
    for raw in (f'{{"format":2,"blocks":{blocks}}}', f'{{"\\u0062locks":{blocks}}}'):
        with pytest.raises(ValueError, match=f"at most {MAX_BLOCKS} are read") as refused:
            Manifest.read(raw.encode(), lambda _: b"")
        assert not isinstance(refused.value, ValidationError)


def test_a_document_with_thousands_of_errors_is_not_told_each_of_them() -> None:
    odd = {f"key{number}": 0 for number in range(MAX_ERRORS + 1)}
    with pytest.raises(ValueError, match=f"{MAX_ERRORS + 1} errors") as refused:
        read_document(Model, json.dumps({**MODEL, **odd}).encode())
    assert not isinstance(refused.value, ValidationError)
    with pytest.raises(ValidationError):
        Model.read(json.dumps({**MODEL, "key": 0}).encode())


def test_a_table_of_the_most_blocks_is_within_the_limits() -> None:
    raw = table(MAX_BLOCKS)
    assert len(bounded(raw)) < MAX_DOCUMENT_BYTES
    # With two moments for each block, of two axes: twelve more marks.
    assert MAX_BLOCKS * (1 + 2 * 6) < DOCUMENT_VALUES


def test_a_task_of_a_hostile_coordinator_is_counted_before_it_is_parsed() -> None:
    with pytest.raises(ValueError, match="values"):
        unpack_task(b"[]," * DOCUMENT_VALUES + b"\n[]\n")
    with pytest.raises(ValueError, match="values"):
        unpack(b"{}\n" + b"[]," * 2_000)
