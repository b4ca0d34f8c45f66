"""Pydantic's errors in Tessera's words: what is wrong, where, and the nearest name that exists.

No message contains the value that was given: it may be a secret, or larger than any answer should be.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from types import UnionType
from typing import Annotated, Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel, TypeAdapter, ValidationError

from tessera.shared.near_names import MISSPELT, did_you_mean, nearest

_NUMBER = "must be a number"
_WHOLE = "must be a whole number"
_TABLE = "must be a table of keys and values"
_LIST = "must be a list"
_TEXT = "must be text"
_BYTES = "must be a number of bytes, such as 5000000 or '5 MB'"

WORDS: Mapping[str, str] = {
    "missing": "required, but missing",
    "union_tag_not_found": "required, but missing",
    "json_type": "must be JSON",
    "frozen_field": "cannot be changed",
    "frozen_instance": "cannot be changed",
    "recursion_loop": "must not contain itself",
    "recursion_depth_exceeded": "is nested too deeply",
    "invalid_key": "has a key that is not text",
    "model_type": _TABLE,
    "model_attributes_type": _TABLE,
    "dataclass_type": _TABLE,
    "dict_type": _TABLE,
    "mapping_type": _TABLE,
    "none_required": "must be left out",
    "greater_than": "must be greater than {gt}",
    "greater_than_equal": "must be at least {ge}",
    "less_than": "must be less than {lt}",
    "less_than_equal": "must be at most {le}",
    "multiple_of": "must be a multiple of {multiple_of}",
    "finite_number": "must be a finite number",
    "too_short": "must have {min_length} or more entries",
    "too_long": "must have {max_length} or fewer entries",
    "iterable_type": _LIST,
    "list_type": _LIST,
    "tuple_type": _LIST,
    "set_type": _LIST,
    "frozen_set_type": _LIST,
    "set_item_not_hashable": "must be text or a number",
    "string_type": _TEXT,
    "string_unicode": "must be text in UTF-8",
    "string_too_short": "must have at least {min_length} characters",
    "string_too_long": "must have at most {max_length} characters",
    "string_not_ascii": "must be ASCII text",
    "bytes_type": _TEXT,
    "bool_type": "must be true or false",
    "bool_parsing": "must be true or false",
    "int_type": _WHOLE,
    "int_parsing": _WHOLE,
    "int_parsing_size": "has too many digits",
    "int_from_float": _WHOLE,
    "float_type": _NUMBER,
    "float_parsing": _NUMBER,
    "byte_size": _BYTES,
    "byte_size_unit": _BYTES,
    "datetime_type": "must be a date and time, such as 2026-01-31T12:00:00Z",
    "datetime_parsing": "must be a date and time, such as 2026-01-31T12:00:00Z",
    "datetime_from_date_parsing": "must be a date and time, such as 2026-01-31T12:00:00Z",
    "datetime_object_invalid": "must be a date and time, such as 2026-01-31T12:00:00Z",
    "timezone_aware": "must end with a time zone, such as Z or +01:00",
    "path_type": "must be the path of a file or folder",
}
"""The message of each type of error whose words do not depend on names or patterns."""

_LABEL = "must be up to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
_DIGEST = "must be a digest: 'sha256:' and 64 digits or letters from a to f"
_HEXADECIMAL = "must be 64 digits or letters from a to f"
_PRINTABLE = "must be up to 64 printable ASCII characters"

PATTERNS: Mapping[str, str] = {
    r"^[A-Za-z0-9][A-Za-z0-9._-]{0,63}$": _LABEL,
    r"^[A-Za-z0-9-]{1,64}$": "must be an id: up to 64 letters, digits and dashes",
    r"^sha256:[0-9a-f]{64}$": _DIGEST,
    r"^[0-9a-f]{64}$": _HEXADECIMAL,
    r"^[0-9a-f]{16,64}$": "must be 16 to 64 digits or letters from a to f",
    r"^[ -~]{1,64}$": _PRINTABLE,
    r"^[ -~]*$": _PRINTABLE,
    r"^[ -~]{0,64}$": _PRINTABLE,
    r"^[a-z0-9]{1,16}$": "must be up to 16 small letters and digits",
    r"^[a-z0-9_.-]{1,64}$": "must be up to 64 small letters, digits, dots, dashes and underscores",
    r"^[a-z_]{1,32}$": "must be up to 32 small letters and underscores",
    r"^[A-Z]{4}-[A-Z]{4}$": "must be a code of twice four capital letters, such as WDJB-MJHT",
    r"^(auto|cpu|cuda(:[0-9]{1,2})?)$": "must be auto, cpu, cuda or cuda:N, such as cuda:0",
    r"^https?://": "must be a URL that begins with https:// or http://",
    r"^(latest|[0-9]{1,9})$": "must be a version's number, or latest",
    r"^\?[01]$": "must be ?0 or ?1",
    r"^[0-9a-f]{8}$": "must be 8 digits or letters from a to f",
    r"^[0-9a-f]{128}$": "must be a signature: 128 digits or letters from a to f",
    r"^[0-9a-f]*$": "must be digits and letters from a to f",
    r"^[0-9a-f]{4}(-[0-9a-f]{4}){7}$": "must be a fingerprint: eight groups of four digits or letters from a to f, "
    "as `tessera worker roster` prints them",
    r"^https?://[!-~]+$": "must be a URL that begins with https:// or http://, without white space",
    r"^[^\x00-\x1f\x7f-\x9f\u2028-\u202e]*$": "must be without control characters and line breaks",
    r"^--[ -~]+$": "must be a long option, such as --mem=64G",
    r"^[0-9]{1,20}$": "must be a whole number in decimal digits",
}
"""Each pattern of a model's field, in words."""

# Steps of pydantic's path that name a member of a union, rather than a place.
_MEMBER = re.compile(
    r"(literal|tuple|list|dict|set|frozenset|function-\w+|lax-or-strict|nullable|is-instance)?\[|constrained-(int|float|str)$"
)

Steps = tuple[str | int, ...]


def messages_of(errors: Iterable[Mapping[str, Any]], model: object = None) -> list[tuple[Steps, str]]:
    """Return pydantic's errors as places with messages, one for each place.

    `model` is the model or annotation that was validated; with it, places omit the members of tagged unions, and
    unknown keys get a hint.
    """
    found: dict[Steps, list[str]] = {}
    alternatives: set[Steps] = set()
    for error in errors:
        # A default factory is not called because of another error, which is listed itself.
        if error["type"] == "default_factory_not_called":
            continue
        steps, kinds = _located(error, model)
        if len(steps) < len(error["loc"]):
            alternatives.add(steps)
        unknown = error["type"] == "extra_forbidden"
        message = _unknown_key(steps, kinds, model) if unknown else message_of(error)
        found.setdefault(steps, []).append(message)
    # Of a union whose one member was entered, the other members' refusals tell nothing.
    entered = {steps[:length] for steps in found for length in range(len(steps))} & alternatives
    return [(steps, _joined(each)) for steps, each in found.items() if steps not in entered]


def in_one_line(refusal: ValidationError, root: str, model: object = None) -> str:
    """Return each error as `dotted.key: message`; an error of the whole value has `root` for its key."""
    found = messages_of(refusal.errors(include_url=False), model)
    return "; ".join(f"{'.'.join(map(str, steps)) or root}: {message}" for steps, message in found)


def message_of(error: Mapping[str, Any]) -> str:
    """Return the message of one of pydantic's errors."""
    kind, context = error["type"], error.get("ctx", {})
    if kind == "extra_forbidden":
        return "unknown key"
    if kind == "string_pattern_mismatch":
        pattern = context.get("pattern", "")
        return PATTERNS.get(pattern, f"must match the pattern {pattern}")
    if kind in ("literal_error", "enum"):
        return _one_of(_quoted(context.get("expected", "")), error.get("input"))
    if kind == "union_tag_invalid":
        return _one_of(_quoted(context["expected_tags"]), context["tag"])
    if kind not in WORDS:
        return _reworded(str(error["msg"]))
    return WORDS[kind].format_map({key: _shown(value) for key, value in context.items()})


def _shown(value: object) -> object:
    return int(value) if isinstance(value, float) and value.is_integer() and value < 1e15 else value


def _quoted(names: str) -> list[str]:
    return re.findall(r"'([^']*)'", names) or [names]


def _reworded(message: str) -> str:
    """Return another message as one of ours: our own validators', and rare ones of pydantic."""
    message = message.removeprefix("Value error, ").removeprefix("Assertion failed, ")
    return re.sub(r"^(?:\w+ )?(?:[Ii]nput|String|Data|URL|Value)(?: \w+)? should (not )?", r"must \1", message)


def _one_of(names: Sequence[str], given: object) -> str:
    shown = [f"`{name}`" for name in names]
    listed = " or ".join(filter(None, (", ".join(shown[:-1]), shown[-1])))
    near = nearest(given, names) if isinstance(given, str) and len(names) > 1 else None
    return f"must be {listed}" + (f"; did you mean `{near}`?" if near else "")


def _joined(messages: Sequence[str]) -> str:
    """Return the messages of one place as one: the members of a union refuse each for its own reason."""
    distinct = list(dict.fromkeys(messages))
    if len(distinct) > 1 and all(message.startswith("must be ") for message in distinct):
        distinct = [distinct[0], *(message.removeprefix("must be ") for message in distinct[1:])]
        return " or ".join(distinct)
    return "; or: ".join(distinct)


def _unknown_key(steps: Steps, kinds: Sequence[Any], model: object) -> str:
    tables = [kind for kind in kinds if _is_model(kind)]
    if not tables:
        return "unknown key"
    key, here = str(steps[-1]), ".".join(map(str, steps))
    known = {name for table in tables for name in table.model_fields}
    elsewhere = [path for path in _paths(model) if path.endswith(f".{key}") and path != here]
    if elsewhere and not nearest(key, known, MISSPELT):
        return f"unknown key; did you mean `{elsewhere[0]}`?"
    return f"unknown key{did_you_mean(key, known) if known else '; this table has no keys'}"


# ---------------------------------------------------------------- places


def _located(error: Mapping[str, Any], model: object) -> tuple[Steps, list[Any]]:
    """Return an error's path and the candidate types of its parent."""
    kinds, above, steps = list(_members(model)), [], []
    for step in error["loc"]:
        if isinstance(step, str) and _MEMBER.match(step):
            continue
        if named := [kind for kind in kinds if step in _tags(kind)] if len(kinds) > 1 else []:
            kinds = named
            continue
        steps.append(step)
        above, kinds = kinds, [inner for kind in kinds for inner in _inside(kind, step)]
    if error["type"] in ("union_tag_invalid", "union_tag_not_found"):
        steps.append(error["ctx"]["discriminator"].strip("'"))
    return tuple(steps), above


def _members(kind: Any) -> Iterator[Any]:
    """Yield the types that a value of an annotation may have."""
    if isinstance(kind, TypeAdapter):
        kind = kind._type  # noqa: SLF001
    origin = get_origin(kind)
    if origin is Annotated:
        yield from _members(get_args(kind)[0])
    elif origin in (Union, UnionType):
        for member in get_args(kind):
            yield from _members(member)
    elif kind is not None and kind is not type(None):
        yield kind


def _is_model(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, BaseModel)


def _tags(kind: Any) -> set[str]:
    """Return the names that pydantic's path may give a member of a union."""
    if not _is_model(kind):
        return {getattr(kind, "__name__", "")}
    literals = (field.annotation for field in kind.model_fields.values() if get_origin(field.annotation) is Literal)
    return {kind.__name__, *(tag for literal in literals for tag in get_args(literal))}


def _inside(kind: Any, step: str | int) -> Iterator[Any]:
    """Yield the types of the value at a step into a value of a type."""
    if _is_model(kind):
        if isinstance(step, str) and (field := kind.model_fields.get(step)):
            yield from _members(field.annotation)
        return
    origin, inner = get_origin(kind), get_args(kind)
    if isinstance(origin, type) and issubclass(origin, Mapping):
        yield from _members(inner[1])
    elif isinstance(step, int) and isinstance(origin, type) and issubclass(origin, Iterable):
        for item in inner:
            if item is not ...:
                yield from _members(item)


def _paths(kind: Any, above: str = "") -> Iterator[str]:
    """Yield the dotted keys of a model's tables."""
    for member in _members(kind):
        if _is_model(member) and above.count(".") < 4:
            for name, field in member.model_fields.items():
                yield above + name
                yield from _paths(field.annotation, f"{above}{name}.")
