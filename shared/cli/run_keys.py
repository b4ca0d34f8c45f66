"""The keys of a run's file, read from the models that check it: `tessera run init`, `tessera docs run-keys`."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from pydantic import BaseModel

from tessera.shared.diagnostics import toml
from tessera.shared.validation_errors import PATTERNS

LARGEST = 10**15
"""Bounds above are for machines, and not shown."""

LABEL = PATTERNS[r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$"]


@dataclass(frozen=True)
class Key:
    """One key of a table; a nested table's keys are dotted."""

    name: str
    kind: str
    """Its type and bounds, in words."""
    default: str | None
    """As TOML; None if there is none."""
    required: bool
    meaning: str


def keys_of(model: type[BaseModel], above: str = "") -> Iterator[Key]:
    """Yield the keys of a model in their order, with the keys of tables within it."""
    schema = model.model_json_schema()
    shared, required = schema.get("$defs", {}), set(schema.get("required", ()))
    for name, each in schema.get("properties", {}).items():
        annotation = model.model_fields[name].annotation
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            yield from keys_of(annotation, f"{above}{name}.")
        else:
            default = each.get("default")
            yield Key(
                above + name,
                kind_of(each, shared),
                None if default is None else toml(default),
                name in required,
                " ".join(str(each.get("description", "")).split()),
            )


def kind_of(schema: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    """Return the type and bounds of a JSON schema, in words."""
    if "$ref" in schema:
        schema = {**shared[schema["$ref"].rpartition("/")[2]], **schema}
    members = [each for each in schema.get("anyOf", schema.get("oneOf", ())) if each.get("type") != "null"]
    if members:
        kinds = list(dict.fromkeys(kind_of(each, shared) for each in members))
        return ("; or " if any("," in kind for kind in kinds) else " or ").join(kinds)
    if values := schema.get("enum") or ([schema["const"]] if "const" in schema else []):
        shown = [f"`{toml(value)}`" for value in values]
        return " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    match schema.get("type"):
        case "integer":
            return _bounded("whole number", schema, step=1)
        case "number":
            return _bounded("number", schema)
        case "boolean":
            return "`true` or `false`"
        case "string":
            words = PATTERNS.get(schema.get("pattern", ""), "must be text")
            return "name" if words == LABEL else words.removeprefix("must be ")
        case "array":
            return _list(schema, shared)
        case _:
            return "table"


def _list(schema: Mapping[str, Any], shared: Mapping[str, Any]) -> str:
    # Each item of a pair is of the same kind.
    item = schema["items"] if "items" in schema else schema["prefixItems"][0]
    kind = kind_of(item, shared)
    if "," in kind and "pattern" in item:
        return f"list, each {kind}"
    noun, *bounds = kind.partition(",")
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])} {noun}s{''.join(bounds)}"
    return f"list of {noun}{'' if '`' in noun else 's'}{''.join(bounds)}"


def _bounded(noun: str, schema: Mapping[str, Any], step: int = 0) -> str:
    low, above = schema.get("minimum"), schema.get("exclusiveMinimum")
    high, below = schema.get("maximum"), schema.get("exclusiveMaximum")
    if step:
        low = above + step if above is not None else low
        high = below - step if below is not None else high
        above = below = None
    if low is not None and high is not None and high < LARGEST:
        return f"{noun} from {_written(low)} to {_written(high)}"
    bounds = [
        f"{words} {_written(bound)}"
        for words, bound in (("at least", low), ("above", above), ("below", below), ("at most", high))
        if bound is not None and abs(bound) < LARGEST
    ]
    return ", ".join((noun, *bounds))


def _written(bound: float) -> str:
    return f"{bound:g}" if bound < 1e6 else f"{bound:.0f}"
