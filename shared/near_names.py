"""Suggestions for misspelt names."""

from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from types import UnionType
from typing import Annotated, Any, Union, get_args, get_origin

from pydantic import BaseModel

SUGGESTED, MISSPELT = 0.6, 0.8
"""Similarity of a name worth suggesting, and of one that can hardly mean anything else."""
MAX_LISTED = 16


def nearest(name: str, known: Iterable[str], similarity: float = SUGGESTED) -> str | None:
    """Return the known name that `name` resembles most, or None. Ignores case."""
    by_lower = {one.lower(): one for one in known}
    swapped = (one for one in by_lower if sorted(one) == sorted(name.lower()))
    close = next(swapped, None) or next(iter(get_close_matches(name.lower(), by_lower, 1, similarity)), None)
    return by_lower[close] if close is not None else None


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """Return a clause to append to a message: the nearest known name, else all of them if they are few."""
    names = sorted(known)
    if close := nearest(name, names):
        return f"; did you mean `{close}`?"
    return f"; it can be {', '.join(names)}" if 0 < len(names) <= MAX_LISTED else ""


def keys_at(model: type[BaseModel], place: Sequence[str | int]) -> set[str]:
    """Return the keys that a model allows beside the one at `place`, the `loc` of one of pydantic's errors."""
    kinds: list[Any] = [model]
    for step in place[:-1]:
        # A step that is no key is the tag of a union's member.
        kinds = [below for kind in kinds for below in _below(kind, step)] or [
            kind for kind in kinds if any(step in get_args(field.annotation) for field in _fields(kind).values())
        ]
    return {key for kind in kinds for key in _fields(kind)}


def _fields(kind: Any) -> dict[str, Any]:
    return kind.model_fields if isinstance(kind, type) and issubclass(kind, BaseModel) else {}


def _below(kind: Any, step: str | int) -> Iterator[Any]:
    """Yield the types of what a value of this type holds under a key or index."""
    if field := _fields(kind).get(str(step)):
        yield from _members(field.annotation)
    elif get_origin(kind) in (dict, list, tuple):
        yield from _members(get_args(kind)[get_origin(kind) is dict])


def _members(annotation: Any) -> Iterator[Any]:
    """Yield the types that an annotation allows."""
    if get_origin(annotation) in (Union, UnionType):
        for member in get_args(annotation):
            yield from _members(member)
    elif get_origin(annotation) is Annotated:
        yield from _members(get_args(annotation)[0])
    else:
        yield annotation
