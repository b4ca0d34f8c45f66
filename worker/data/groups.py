"""The groups of a data set's examples, such as those of one patient, and the members that a step uses of each."""

import hashlib
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

from tessera.shared.hashing import derive_seed

UNNAMED = frozenset({b"", b"nan", b"none", b"null", b"na", b"n/a", b"<na>", b"nat", b"\\n"})
"""Names of groups that stand for a missing value, in lower case: how tables, R, pandas and dumps of databases (`\\N`)
write an empty cell."""


def is_unnamed(group: bytes) -> bool:
    """Return whether an example's group is missing."""
    return group.strip().lower() in UNNAMED


class UngroupedExamples(ValueError):
    """Examples without a group. The message does not depend on them."""


@dataclass(frozen=True, eq=False, repr=False)
class Groups:
    """Examples by group. Groups are numbered in the order of their names, so that an example more or less in one of
    them changes neither the number nor the members of any other."""

    members: Tensor
    """The places of the examples, group after group, int64 [examples]."""
    sizes: Tensor
    """The number of members of each group, int64 [groups]."""
    keys: Tensor
    """A hash of the name of each group, int64 [groups]."""

    @classmethod
    def of(cls, names: Iterable[bytes] | None) -> "Groups":
        """Return the groups of examples with these names. Raises UngroupedExamples if one has none."""
        if names is None:
            raise UngroupedExamples("no example has a group")
        each = list(names)
        distinct = sorted(set(each))
        if any(map(is_unnamed, distinct)):
            raise UngroupedExamples("not every example has a group")
        number = {name: place for place, name in enumerate(distinct)}
        numbers = torch.tensor([number[name] for name in each])
        digests = (hashlib.sha256(name).digest()[:8] for name in distinct)
        keys = torch.tensor([int.from_bytes(digest, "big", signed=True) for digest in digests])
        return cls(torch.argsort(numbers, stable=True), torch.bincount(numbers), keys)

    @property
    def count(self) -> int:
        """The number of groups."""
        return len(self.sizes)

    @cached_property
    def numbers(self) -> Tensor:
        """The number of the group of each example, int64 [examples]."""
        numbers = torch.empty_like(self.members)
        numbers[self.members] = torch.arange(self.count).repeat_interleave(self.sizes)
        return numbers

    @cached_property
    def _starts(self) -> list[int]:
        return [0, *self.sizes.cumsum(0).tolist()]

    def drawn(self, groups: Tensor, most: int, seed: int) -> list[Tensor]:
        """Return the places of at most `most` members of each of these groups, drawn by `seed`.

        Which members of a group are drawn depends on its own members alone. Privacy holds for any choice: the seed
        need not be secret.
        """
        return [self._drawn(group, most, seed) for group in groups.tolist()]

    def _drawn(self, group: int, most: int, seed: int) -> Tensor:
        members = self.members[self._starts[group] : self._starts[group + 1]]
        if len(members) <= most:
            return members
        generator = torch.Generator().manual_seed(derive_seed(seed, "members", int(self.keys[group])))
        return members[torch.randperm(len(members), generator=generator)[:most].sort().values]
