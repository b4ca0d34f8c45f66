"""Pydantic's errors in our words: no phrase of its own reaches a user, and unknown names get the nearest one."""

from __future__ import annotations

import re
from collections.abc import Iterator
from datetime import datetime
from itertools import chain
from pathlib import Path
from typing import Annotated, Any, Literal

import pytest
from pydantic import AwareDatetime, BaseModel, Field, SecretStr, TypeAdapter, ValidationError
from pydantic_core import _pydantic_core

from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.runs import RunSpec
from tessera.shared.methods.registry import methods
from tessera.shared.schema import Bytes, Digest, Identifier, Label, Value
from tessera.shared.validation_errors import (
    PATTERNS,
    in_one_line,
    message_of,
    messages_of,
)
from tessera.worker.settings import WorkerSettings
from tests.support.paths import ROOT

RAW = re.compile(
    r"\b(Input|Field|String|Extra|[Ss]hould|error|[Uu]nable|parse|permitted|dictionary|tuple|instance|boolean)\b"
)


class Iid(Value):
    scheme: Literal["iid"] = "iid"
    count: int


class Shards(Value):
    scheme: Literal["shards"] = "shards"
    each: int


class Part(Value):
    part: Annotated[Iid | Shards, Field(discriminator="scheme")]


class Table(Value):
    learning_rate: float = 1.0
    batch_size: int = 1


class Pair(Value):
    table: Table = Table()
    many: dict[str, Part] = {}
    both: Annotated[int, Field(ge=1)] | tuple[Label, ...] | dict[Label, Table] = 1


class Empty(Value):
    pass


def messages(model: Any, value: object) -> dict[str, str]:
    with pytest.raises(ValidationError) as caught:
        TypeAdapter(model).validate_python(value)
    found = messages_of(caught.value.errors(), model)
    return {".".join(map(str, steps)): message for steps, message in found}


@pytest.mark.parametrize(
    ("kind", "value", "message"),
    [
        (int, "many", "must be a whole number"),
        (int, 1.5, "must be a whole number"),
        (int, None, "must be a whole number"),
        (int, "9" * 5000, "has too many digits"),
        (float, "many", "must be a number"),
        (float, [], "must be a number"),
        (Annotated[float, Field(allow_inf_nan=False)], float("inf"), "must be a finite number"),
        (bool, "perhaps", "must be true or false"),
        (bool, [], "must be true or false"),
        (str, 5, "must be text"),
        (SecretStr, 5, "must be text"),
        (Path, 5, "must be the path of a file or folder"),
        (Annotated[str, Field(max_length=2)], "abc", "must have at most 2 characters"),
        (Annotated[str, Field(min_length=2)], "a", "must have at least 2 characters"),
        (Annotated[int, Field(gt=0)], 0, "must be greater than 0"),
        (Annotated[int, Field(ge=1)], 0, "must be at least 1"),
        (Annotated[float, Field(lt=1)], 1, "must be less than 1"),
        (Annotated[float, Field(le=1)], 2, "must be at most 1"),
        (tuple[int, ...], 3, "must be a list"),
        (list[int], 3, "must be a list"),
        (frozenset[int], 3, "must be a list"),
        (Annotated[tuple[int, ...], Field(min_length=1)], [], "must have 1 or more entries"),
        (Annotated[tuple[int, ...], Field(max_length=1)], [1, 2], "must have 1 or fewer entries"),
        (dict[str, int], 3, "must be a table of keys and values"),
        (Table, 3, "must be a table of keys and values"),
        (Literal["sgd"], "adam", "must be `sgd`"),
        (Literal["sgd", "adamw"], "adam", "must be `sgd` or `adamw`; did you mean `adamw`?"),
        (Literal["sgd", "adamw"], 3, "must be `sgd` or `adamw`"),
        (Annotated[int, Field(gt=0)] | Literal["auto"], "x", "must be a whole number or `auto`"),
        (datetime, "x", "must be a date and time, such as 2026-01-31T12:00:00Z"),
        (AwareDatetime, "2026-01-31T12:00:00", "must end with a time zone, such as Z or +01:00"),
        (Bytes, "5 potatoes", "must be a number of bytes, such as 5000000 or '5 MB'"),
        (Bytes, "many", "must be a number of bytes, such as 5000000 or '5 MB'"),
        (Label, "-", "must be up to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"),
        (Identifier, "a/b", "must be an id: up to 64 letters, digits and dashes"),
        (Digest, "abc", "must be a digest: 'sha256:' and 64 digits or letters from a to f"),
        (Annotated[str, Field(pattern="^a$")], "b", "must match the pattern ^a$"),
    ],
)
def test_a_wrong_value_is_described_in_words(kind: Any, value: object, message: str) -> None:
    assert messages(kind, value) == {"": message}


BOUNDS = ("greater_than", "greater_than_equal", "less_than", "less_than_equal")
LENGTHS = ("too_short", "too_long")
RAISED = {
    "int": ("int_type", "int_parsing", "int_parsing_size", "int_from_float", *BOUNDS),
    "float": ("float_type", "float_parsing", "finite_number", *BOUNDS),
    "str": ("string_type", "string_unicode", "string_too_short", "string_too_long", "string_pattern_mismatch"),
    "bytes": ("bytes_type",),
    "bool": ("bool_type", "bool_parsing"),
    "none": ("none_required",),
    "literal": ("literal_error",),
    "tuple": ("tuple_type", *LENGTHS),
    "list": ("list_type", *LENGTHS),
    "dict": ("dict_type", "mapping_type", *LENGTHS),
    "datetime": ("datetime_type", "datetime_parsing", "datetime_from_date_parsing", "timezone_aware"),
    "tagged-union": ("union_tag_invalid", "union_tag_not_found"),
    "model": ("model_type", "model_attributes_type", "missing", "extra_forbidden", "frozen_instance", "invalid_key"),
}
"""The errors that each type of pydantic's core schema raises."""

OF_OTHERS = {
    "model-field",
    "model-fields",
    "default",
    "nullable",
    "no-info",
    "with-info",
    "definition-ref",
    "definitions",
}
OF_OTHERS |= {"function-after", "function-before", "function-wrap", "json-or-python", "lax-or-strict", "is-instance"}
OF_OTHERS |= {"union", "any"}
"""Core schemas that raise the errors of what they contain, or ours."""


def descendants(kind: type[BaseModel]) -> Iterator[type[BaseModel]]:
    yield kind
    for below in kind.__subclasses__():
        yield from descendants(below)


def core_types(schema: object) -> Iterator[str]:
    if isinstance(schema, dict):
        if isinstance(schema.get("type"), str):
            yield schema["type"]
        for key, value in schema.items():
            if key not in ("metadata", "serialization", "ref"):
                yield from core_types(value)
    elif isinstance(schema, list | tuple):
        for value in schema:
            yield from core_types(value)


def test_every_error_that_a_model_can_raise_is_in_our_words() -> None:
    settings = {method.settings for method in methods().values()}
    # Nobody but a worker writes the files of its executor.
    own = ("tessera.worker.executor",)
    ours = {
        kind
        for kind in descendants(BaseModel)
        if kind.__module__.startswith("tessera.") and not kind.__module__.startswith(own)
    }
    assert {RunSpec, CoordinatorSettings, WorkerSettings, *settings} <= ours
    used = {name for kind in ours for name in core_types(kind.__pydantic_core_schema__)}
    assert used - OF_OTHERS <= RAISED.keys()
    templates = {error["type"]: error for error in _pydantic_core.list_all_errors()}
    for name in sorted(chain.from_iterable(RAISED.values())):
        error = {**templates[name], "ctx": templates[name].get("example_context") or {}}
        shown = message_of({**error, "msg": error["example_message_python"]})
        assert not RAW.search(shown), f"{name}: {shown}"
        assert shown != error["example_message_python"]


def test_each_pattern_of_a_field_has_words() -> None:
    declared = {
        pattern
        for side in ("shared", "coordinator", "worker")
        for file in (ROOT / side).rglob("*.py")
        for pattern in re.findall(r'[(,] ?pattern=r"([^"]*)"', file.read_text())
    }
    assert len(declared) > 8
    assert declared <= PATTERNS.keys()


@pytest.mark.parametrize(
    ("model", "value", "expected"),
    [
        (Pair, {"table": {"lerning_rate": 1}}, {"table.lerning_rate": "unknown key; did you mean `learning_rate`?"}),
        (
            Pair,
            {"table": {"Learning_Rate": 1}},
            {"table.Learning_Rate": "unknown key; did you mean `learning_rate`?"},
        ),
        (Pair, {"batch_size": 1}, {"batch_size": "unknown key; did you mean `table.batch_size`?"}),
        (Pair, {"zzz": 1}, {"zzz": "unknown key; it can be both, many, table"}),
        (Pair, {"x" * 100_000: 1}, {"x" * 100_000: "unknown key; it can be both, many, table"}),
        (Empty, {"mu": 1}, {"mu": "unknown key; this table has no keys"}),
        (
            Part,
            {"part": {"scheme": "iid", "count": 1, "cuont": 1}},
            {"part.cuont": "unknown key; did you mean `count`?"},
        ),
        (
            Part,
            {"part": {"scheme": "iid", "count": 1, "each": 1}},
            {"part.each": "unknown key; it can be count, scheme"},
        ),
        (Part, {"part": {"scheme": "shard"}}, {"part.scheme": "must be `iid` or `shards`; did you mean `shards`?"}),
        (Part, {"part": {}}, {"part.scheme": "required, but missing"}),
        (Pair, {"many": {"a": {"part": {"scheme": "iid"}}}}, {"many.a.part.count": "required, but missing"}),
        (Pair, {"both": {"a": {"batch_siz": 1}}}, {"both.a.batch_siz": "unknown key; did you mean `batch_size`?"}),
        (Pair, {"both": 0}, {"both": "must be at least 1 or a list or a table of keys and values"}),
        (Pair, {"both": {"-": {}}}, {"both.-": PATTERNS[r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"]}),
    ],
)
def test_an_unknown_name_gets_the_nearest_one_at_its_true_place(
    model: Any, value: object, expected: dict[str, str]
) -> None:
    assert messages(model, value) == expected


def test_errors_in_one_line_have_dotted_keys_and_no_values() -> None:
    with pytest.raises(ValidationError) as caught:
        RunSpec.model_validate({"name": "tsr_secret!", "training": {"epochs": "tsr_secret"}, "cohort": 1})
    line = in_one_line(caught.value, "run", RunSpec)
    assert "training.epochs: must be a whole number" in line
    assert "tsr_secret" not in line
