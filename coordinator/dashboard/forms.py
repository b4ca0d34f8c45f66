"""Forms generated from pydantic models: each field is named by its JSON pointer, which the API's errors use too."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tessera.shared.json_limits import check_document
from tessera.shared.problems import Fault

MAX_VALUES = 4_096
"""Of a field's JSON."""


@dataclass(frozen=True)
class Field:
    """One setting in a form; if left empty, its default applies."""

    pointer: str
    label: str
    hint: str
    kind: str
    """text, number, choice, list (of texts, separated by commas) or json"""
    choices: tuple[str, ...] = ()
    default: str = ""
    required: bool = False

    @property
    def ident(self) -> str:
        return "f" + self.pointer.replace("/", "-")

    def written(self, value: Any) -> str:
        """Return a value as a person would type it into the field."""
        if self.kind == "list" and isinstance(value, list):
            return ", ".join(value)
        return value if isinstance(value, str) else json.dumps(value)


def fields_of(model: type[BaseModel], above: str = "", skip: Sequence[str] = ()) -> list[Field]:
    """Return a field for each field of the model, in order."""
    schema = model.model_json_schema()
    shared = schema.get("$defs", {})
    required = set(schema.get("required", ()))
    return [
        _field(f"{above}/{name}", name, _resolved(each, shared), name in required, shared)
        for name, each in schema["properties"].items()
        if name not in skip
    ]


def _resolved(schema: Mapping[str, Any], shared: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return a schema with its reference resolved."""
    return {**shared[schema["$ref"].rpartition("/")[2]], **schema} if "$ref" in schema else schema


def _field(pointer: str, name: str, schema: Mapping[str, Any], required: bool, shared: Mapping[str, Any]) -> Field:
    kinds = [_resolved(kind, shared) for kind in schema.get("anyOf", schema.get("oneOf", [schema]))]
    kinds = [kind for kind in kinds if kind.get("type") != "null"]
    choices = tuple(str(each) for kind in kinds for each in _values(kind))
    types = {str(kind.get("type", "")) for kind in kinds if not _values(kind)}
    items = [_resolved(kind.get("items", {}), shared).get("type", "") for kind in kinds]
    if types == {"array"} and all("string" in item for item in items):
        shape, choices = "list", ()
    elif types & {"object", "array", ""}:
        shape = "json"
    elif types <= {"integer", "number"} and types:
        shape = "number" if not choices else "text"
    elif not types and choices:
        shape = "choice"
    elif types == {"boolean"}:
        shape, choices = "choice", ("true", "false")
    else:
        shape = "text"
    default = schema.get("default")
    shown = "" if default is None else default if isinstance(default, str) else json.dumps(default)
    if shape == "list" and default is not None:
        shown = ", ".join(default)
    hint = str(schema.get("description", "")).partition("\n\n")[0].replace("\n", " ")
    if shape == "text" and choices:
        hint = f"{hint}; or {', '.join(choices)}".lstrip("; ")
    label = name.replace("_", " ")
    return Field(pointer, label[:1].upper() + label[1:], hint, shape, choices, shown, required)


def _values(kind: Mapping[str, Any]) -> Sequence[Any]:
    return kind.get("enum") or ([kind["const"]] if "const" in kind else [])


def filled(fields: Sequence[Field], given: Mapping[str, str]) -> tuple[dict[str, Any], list[Fault]]:
    """Return the JSON document that a form describes, without empty fields, and the faults of its values."""
    document: dict[str, Any] = {}
    faults: list[Fault] = []
    for field in fields:
        text = given.get(field.pointer, "").strip()
        if not text:
            continue
        try:
            value = _read(field, text)
        except ValueError as fault:
            faults.append(Fault(pointer=field.pointer, detail=f"this is not JSON: {str(fault)[:200]}"))
            continue
        *path, last = field.pointer.lstrip("/").split("/")
        place = document
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return document, faults


def _read(field: Field, text: str) -> Any:
    if field.kind == "list":
        return [part.strip() for part in text.split(",") if part.strip()]
    if field.kind == "json":
        return check_document(text.encode(), MAX_VALUES)
    if field.kind == "choice" and set(field.choices) != {"true", "false"}:
        return text
    # With choices the text may be a number as well.
    if field.kind == "text" and not field.choices:
        return text
    try:
        return check_document(text.encode(), MAX_VALUES)
    except ValueError:
        # The model's own validation reports the fault.
        return text


def placed(faults: Sequence[Fault], pointers: Sequence[str]) -> tuple[dict[str, list[str]], list[Fault]]:
    """Return the details of faults by the nearest field above each, and the faults without a field."""
    by_field: dict[str, list[str]] = {}
    rest: list[Fault] = []
    for fault in faults:
        place = fault.pointer
        while place and place not in pointers:
            place = place.rpartition("/")[0]
        if place:
            by_field.setdefault(place, []).append(fault.detail)
        else:
            rest.append(fault)
    return by_field, rest
