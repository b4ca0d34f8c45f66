"""Forms out of pydantic models: a field each, named by its JSON pointer, which is also where the API says what is
wrong with it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel
from pydantic_core import from_json

from tessera.shared.problems import Fault

TOGETHER = {"kind", "rule"}
"""Fields that say which of several models a value is of."""


@dataclass(frozen=True)
class Field:
    """One setting as people fill it in. Left empty, it is as it is by default."""

    pointer: str
    label: str
    hint: str
    kind: str
    """text, number, choice, list (of texts, with commas between them), json"""
    choices: tuple[str, ...] = ()
    default: str = ""
    required: bool = False

    @property
    def ident(self) -> str:
        return "f" + self.pointer.replace("/", "-")


def fields_of(model: type[BaseModel], above: str = "", skip: Sequence[str] = ()) -> list[Field]:
    """Return a field for each of the model's, in their order."""
    schema = model.model_json_schema()
    shared = schema.get("$defs", {})
    required = set(schema.get("required", ()))
    return [
        _field(f"{above}/{name}", name, _plain(told, shared), name in required, shared)
        for name, told in schema["properties"].items()
        if name not in skip
    ]


def _plain(told: Mapping[str, Any], shared: Mapping[str, Any]) -> dict[str, Any]:
    """Return a property with what it refers to in its place."""
    if "$ref" in told:
        return {**shared[told["$ref"].rpartition("/")[2]], **{k: v for k, v in told.items() if k != "$ref"}}
    return dict(told)


def _field(pointer: str, name: str, told: Mapping[str, Any], required: bool, shared: Mapping[str, Any]) -> Field:
    kinds = [_plain(kind, shared) for kind in told.get("anyOf", told.get("oneOf", [told]))]
    kinds = [kind for kind in kinds if kind.get("type") != "null"]
    choices = tuple(str(each) for kind in kinds for each in _values(kind))
    types = {str(kind.get("type", "")) for kind in kinds if not _values(kind)}
    if types == {"array"} and all("string" in _inside(kind, shared) for kind in kinds):
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
    default = told.get("default")
    shown = "" if default is None else default if isinstance(default, str) else json.dumps(default)
    if shape == "list" and default is not None:
        shown = ", ".join(default)
    hint = str(told.get("description", "")).partition("\n\n")[0].replace("\n", " ")
    if shape == "text" and choices:
        hint = f"{hint}; or {', '.join(choices)}".lstrip("; ")
    label = name.replace("_", " ")
    return Field(pointer, label[:1].upper() + label[1:], hint, shape, choices, shown, required)


def _inside(kind: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    """Return what an array is of."""
    return str(_plain(kind.get("items", {}), shared).get("type", ""))


def _values(kind: Mapping[str, Any]) -> Sequence[Any]:
    return kind.get("enum") or ([kind["const"]] if "const" in kind else [])


def filled(fields: Sequence[Field], given: Mapping[str, str]) -> tuple[dict[str, Any], list[Fault]]:
    """Return what somebody filled in, as the document that it stands for; what was left empty is not in it."""
    document: dict[str, Any] = {}
    faults: list[Fault] = []
    for field in fields:
        said = given.get(field.pointer, "").strip()
        if not said:
            continue
        try:
            value = _read(field, said)
        except ValueError as fault:
            faults.append(Fault(pointer=field.pointer, detail=f"this is no JSON: {str(fault)[:200]}"))
            continue
        *path, last = field.pointer.lstrip("/").split("/")
        place = document
        for step in path:
            place = place.setdefault(step, {})
        place[last] = value
    return document, faults


def _read(field: Field, said: str) -> Any:
    if field.kind == "list":
        return [part.strip() for part in said.split(",") if part.strip()]
    if field.kind == "json":
        return from_json(said, allow_inf_nan=False)
    if field.kind == "choice" and set(field.choices) != {"true", "false"}:
        return said
    if field.kind == "text" and not _is_figure(said):
        return said
    try:
        return from_json(said, allow_inf_nan=False)
    except ValueError:
        # The model says what it wants in its place.
        return said


def _is_figure(said: str) -> bool:
    return said.lstrip("+-").replace(".", "", 1).isdigit()


def placed(faults: Sequence[Fault], fields: Sequence[Field]) -> tuple[dict[str, list[str]], list[Fault]]:
    """Faults by the field that they are about, the nearest above them, and those of no field."""
    known = {field.pointer for field in fields}
    by_field: dict[str, list[str]] = {}
    rest: list[Fault] = []
    for fault in faults:
        place = next((above for above in _upwards(fault.pointer) if above in known), None)
        if place is None:
            rest.append(fault)
        else:
            by_field.setdefault(place, []).append(fault.detail)
    return by_field, rest


def _upwards(pointer: str) -> Iterator[str]:
    while pointer:
        yield pointer
        pointer = pointer.rpartition("/")[0]
