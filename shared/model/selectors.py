"""Selectors: which blocks of a model a method trains, sends, keeps or freezes."""

import re
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from fnmatch import fnmatchcase, translate
from functools import cached_property, lru_cache
from typing import Self, get_args

from pydantic import Field, model_validator

from tessera.shared.model.blocks import Block, Role
from tessera.shared.near_names import did_you_mean, nearest
from tessera.shared.schema import Value

MAX_PATTERNS = 16_384
"""The most names in a selector: each is compared with each block, which for more would take minutes."""

MAX_WILD = 256
"""The most shell patterns with wildcards among them: exact names are looked up, patterns are compared one by one."""

MAX_RESOLVED = 256
"""Number of selectors whose blocks of a table are remembered: enough for the last rounds of a few runs."""

FURTHER_NAMES = ("decoder", "embed_out", "embed_tokens", "lm_head", "shared", "vocab_projector")
"""Parts of further names that transformers gives to tied tensors. A table of blocks has a tensor's first name."""

MAX_SHOWN = 5

_WILDCARD = re.compile(r"[*?\[]")

_resolved: "dict[tuple[int, Selector], tuple[tuple[Block, ...], tuple[Block, ...]]]" = {}
"""By the table's identity and the selector: the table, which must not be freed before, and the selected blocks."""


class Match(Value):
    """Blocks that meet every condition given; a condition left out holds for all. Names are shell patterns."""

    roles: tuple[Role, ...] | None = Field(default=None, description="blocks of any of these roles")
    adapts: tuple[Role, ...] | None = Field(default=None, description="adapters of matrices of any of these roles")
    layers: tuple[int, ...] | None = Field(default=None, description="blocks of any of these layers, from 0")
    names: tuple[str, ...] | None = Field(default=None, description="shell patterns for the blocks' names")

    def holds(self, block: Block) -> bool:
        return (
            (self.roles is None or block.role in self.roles)
            and (self.adapts is None or any(role in self.adapts for role in block.adapts))
            and (self.layers is None or block.layer in self.layers)
            and (self.names is None or block.name in self.exact or any(fnmatchcase(block.name, p) for p in self.wild))
        )

    @cached_property
    def exact(self) -> frozenset[str]:
        return frozenset(self.names or ())

    @cached_property
    def wild(self) -> tuple[str, ...]:
        """The names with wildcards."""
        return tuple(name for name in self.names or () if _WILDCARD.search(name))


_ANY = Match()


class Selector(Value):
    """Blocks that match any of `include` and none of `exclude`."""

    include: tuple[Match, ...] = Field(default=(Match(),), description="conditions, of which a block meets one")
    exclude: tuple[Match, ...] = Field(default=(), description="conditions, of which it meets none")

    @model_validator(mode="after")
    def _soon_resolved(self) -> Self:
        conditions = (*self.include, *self.exclude)
        if len(conditions) + sum(len(match.names or ()) for match in conditions) > MAX_PATTERNS:
            raise ValueError(f"a selector has at most {MAX_PATTERNS} conditions and names")
        if sum(len(match.wild) for match in conditions) > MAX_WILD:
            raise ValueError(f"a selector has at most {MAX_WILD} names with wildcards")
        return self

    def holds(self, block: Block) -> bool:
        return self.is_unconditional or (
            any(match.holds(block) for match in self.include)
            and not any(match.holds(block) for match in self.exclude)
        )

    @property
    def is_unconditional(self) -> bool:
        """True if it selects every block of any model."""
        return not self.exclude and _ANY in self.include

    def resolve(self, blocks: Iterable[Block]) -> tuple[Block, ...]:
        """Return the selected blocks, in the table's order.

        Raises SelectorError for a match, included or excluded, that no block meets: a condition that selects
        nothing is nearly always a misspelling, and training the wrong blocks is not noticed by any loss.
        """
        table = tuple(blocks)
        key = (id(table), self)
        known, chosen = _resolved.get(key, (None, ()))
        if known is table:
            return chosen
        for match in (*self.include, *self.exclude):
            if not any(match.holds(block) for block in table):
                raise SelectorError(match, table)
        chosen = tuple(block for block in table if self.holds(block))
        if len(_resolved) >= MAX_RESOLVED:
            _resolved.clear()
        _resolved[key] = (table, chosen)
        return chosen

    def __bool__(self) -> bool:
        return bool(self.include)


EVERYTHING = Selector()
NOTHING = Selector(include=())


def roles(*names: Role) -> Selector:
    """Select the blocks with any of these roles. Raises UnknownRole."""
    return Selector(include=(_of_roles(names),))


def all_but(*names: Role) -> Selector:
    """Select the blocks with none of these roles. Raises UnknownRole."""
    return Selector(exclude=(_of_roles(names),))


def _of_roles(names: tuple[Role, ...]) -> Match:
    if unknown := next((name for name in names if name not in get_args(Role)), None):
        raise UnknownRole(unknown)
    return Match(roles=names)


def named(names: Iterable[str]) -> Selector:
    """Select blocks by name or shell pattern."""
    return Selector(include=(Match(names=tuple(names)),))


INSERTED: frozenset[Role] = frozenset({"adapter", "prompt"})
"""The roles of blocks that are added to a model so that its base need not train."""


def trainable_blocks(
    blocks: Sequence[Block], external: Collection[str] = (), *, trains_head: bool = True
) -> Selector:
    """Select the blocks that a model's parts let train: adapters and the head, or prompts; without either, all.

    A head among the `external` blocks stays frozen with the base, as does any head unless the run `trains_head`.
    """
    present = {block.role for block in blocks}
    trained = present & INSERTED
    if not trained:
        return EVERYTHING
    if (
        "adapter" in trained
        and trains_head
        and not any(block.role == "head" and block.name in external for block in blocks)
    ):
        trained |= {"head"}
    base = tuple(role for role in get_args(Role) if role in present - trained)
    return Selector(exclude=(Match(roles=base),)) if base else EVERYTHING


class SelectorError(ValueError):
    """A selector has a condition that no block of the model meets."""

    def __init__(self, match: Match, blocks: Sequence[Block]) -> None:
        wanted = match.model_dump(exclude_none=True, mode="json")
        seen = sorted({block.role for block in blocks})
        layers = sorted({block.layer for block in blocks if block.layer is not None})
        super().__init__(
            f"no block matches {wanted}; the model has the roles {', '.join(seen)}"
            + (f" and the layers {layers[0]} to {layers[-1]}" if layers else " and no layers")
        )


class UnknownRole(SelectorError):
    """A method selects by a role that no model has."""

    def __init__(self, name: str) -> None:
        ValueError.__init__(self, f"there is no role {name!r}{did_you_mean(name, get_args(Role))}")


@lru_cache(maxsize=4096)
def matcher(pattern: str) -> Callable[[str], object]:
    """Return a function that matches names with a policy's shell pattern, compiled once. The cache of `fnmatch` would
    hold patterns of sites without a bound on their bytes."""
    return re.compile(translate(pattern)).match


def named_by(pattern: str, names: Iterable[str]) -> list[str]:
    """Return the names that a shell pattern matches, sorted."""
    return sorted(name for name in names if fnmatchcase(name, pattern))


def ineffective(
    never_send: Iterable[str], may_send: Selector, blocks: Sequence[Block], tied: Iterable[str] | None = None
) -> Iterator[tuple[str, str]]:
    """Yield the rule and the fault of each part of a site's policy that is to keep blocks back and that no block of a
    model meets: a pattern of `never_send`, or a name, a layer or a whole condition of `may_send.exclude`.

    Without a word, a misspelt rule would protect nothing. `tied` has the further names of the model's tensors. None:
    they are unknown, and a pattern that may mean one is passed over.
    """
    names = {block.name for block in blocks} | set(tied or ())
    for pattern in never_send:
        may_be_tied = tied is None and any(part in pattern for part in FURTHER_NAMES)
        if not may_be_tied and not any(map(matcher(pattern), names)):
            fault = f"the model has no block called {pattern!r}, so that this rule protects nothing"
            remedy = "Correct it, or move it to never_send_if_present if only some models have such blocks"
            yield "never_send", f"{fault}; {_near(pattern, names)} {remedy}"
    for match in may_send.exclude:
        for part in _parts(match):
            if not any(part.holds(block) for block in blocks):
                yield "may_send", f"{SelectorError(part, blocks)}: this part of may_send.exclude protects nothing"


def kept_back(patterns: Iterable[str], blocks: Sequence[Block]) -> list[str]:
    """Return for each shell pattern, in words, which of a model's blocks it keeps at a site."""
    names = [block.name for block in blocks]
    return [f"{pattern!r} keeps {_some(named_by(pattern, names), len(names))}" for pattern in patterns]


def _some(names: Sequence[str], total: int) -> str:
    more = ", ..." if len(names) > MAX_SHOWN else ""
    shown = f" ({', '.join(names[:MAX_SHOWN])}{more})" if names else ""
    return f"{len(names)} of {total} blocks{shown}"


def _parts(match: Match) -> list[Match]:
    """Return a match for each of its names and each of its layers, under its other conditions."""
    names = [match.model_copy(update={"names": (name,)}) for name in match.names or ()]
    layers = [match.model_copy(update={"layers": (layer,)}) for layer in match.layers or ()]
    return [*names, *layers] or [match]


def _near(pattern: str, names: Iterable[str]) -> str:
    """Return the end of a sentence: a pattern that matches and may be meant, else some of the names."""
    ordered = sorted(names)
    # The texts between the wildcards, the longest first.
    pieces = sorted(filter(None, re.split(r"[*?\[\] ]+[.]?|[.](?=[*?\[]|$)", pattern)), key=len, reverse=True)
    for piece in pieces[:1]:
        for name in ordered:
            if (at := name.lower().find(piece.lower())) >= 0:
                return f"did you mean `*{name[at : at + len(piece)]}*`?"
        steps = ordered if "." in piece else {step for name in ordered for step in name.split(".")}
        if close := nearest(piece, steps):
            return f"did you mean `*{close}*`?"
    more = f" and {len(ordered) - MAX_SHOWN} more" if len(ordered) > MAX_SHOWN else ""
    return f"it has {', '.join(ordered[:MAX_SHOWN])}{more}."
