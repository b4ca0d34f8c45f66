"""The groups of a data set's examples, such as those of one patient, the members that a step uses of each, and the
subgroups by which figures are counted."""

import hashlib
import re
import unicodedata
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Annotated, NamedTuple

import numpy as np
import torch
from numpy.typing import NDArray
from pydantic import AfterValidator, Field
from torch import Tensor

from tessera.shared.api.class_counts import ALL, MAX_SUBGROUPS, OTHER
from tessera.shared.near_names import composed
from tessera.shared.schema import Label
from tessera.shared.tensors.hashing import derive_seed

UNNAMED = frozenset({b"", b"nan", b"none", b"null", b"na", b"n/a", b"<na>", b"nat", b"\\n"})
"""Names of groups that stand for a missing value, in lower case: how tables, R, pandas and dumps of databases (`\\N`)
write an empty cell."""

_NUMBER = "(id|uid|no|nr|num|number|nummer|identifier|pseudonym|name)"
_PERSON = "(patient|subject|participant|proband)(en|s)?"
PERSON = re.compile(f"{_PERSON}|(.*{_PERSON}|pat|pt|subj|sub){_NUMBER}|mrn")
"""Names of columns of persons, as `plain` returns them: Patient ID, anon_patient_id, PatNr."""
_RECORD = re.compile(f"(person|donor|case|accession|specimen|slide|lesion|study|family){_NUMBER}?")
_IDENTIFIER = re.compile(r"(^|[^a-z0-9])(id|uid|uuid|identifier)$")
NO_PERSON = frozenset(
    f"{what}{number}" for what in ("site", "hospital", "center", "centre", "device", "class", "label", "category")
    for number in ("id", "nr", "no", "number")
)  # fmt: skip
"""Plain names of columns whose values repeat, and identify no person."""
PERSON_IN_PATH = (
    "(?i)(?<![a-z])((?:patient|participant|subject)[ _-]?(?:id)?[ _-]?[a-z]{0,4}[0-9]+"
    "|(?:pat|subj|sub|case)[ _-]?(?:id[ _-]?)?[0-9]+)"
)
"""A pattern for the person in the paths of images, such as `patient12` in `patient12_scan3.png`."""
PATIENT = "PatientID"
"""The keyword of the patient in DICOM headers."""


class RepeatedName(NamedTuple):
    """A probable name of a person that is in several examples, each of which is held out by itself."""

    what: str
    """The place of the name: a column, a header or a path."""
    distinct: int
    examples: int
    remedy: str


def is_unnamed(group: bytes) -> bool:
    """Return True if an example's group is missing."""
    return group.strip().lower() in UNNAMED


def group_name(value: str) -> bytes:
    """Return the bytes of a group's name, which spaces around it and its Unicode form do not change."""
    return composed(value).strip().encode()


def plain(column: str) -> str:
    """Return a column's name without case, spaces, dashes, underscores and differences of Unicode forms."""
    return re.sub(r"[\s_-]+", "", unicodedata.normalize("NFKC", column).casefold())


def is_person(column: str) -> bool:
    """Return True if a column is named like the identity of a patient or a subject."""
    return bool(PERSON.fullmatch(plain(column)))


def is_identifier(column: str) -> bool:
    """Return True if a column is named like the identity of a person, or of a thing that belongs to one person."""
    words, name = re.sub(r"(?<=[a-z])(?=[A-Z])", " ", column.strip()).lower(), plain(column)
    return is_person(column) or (name not in NO_PERSON and bool(_RECORD.fullmatch(name) or _IDENTIFIER.search(words)))


def repeated(what: str, values: Iterable[object], remedy: str) -> RepeatedName | None:
    """Return the repetitions of values except missing ones; None if none repeats, or if all are the same."""
    given = (value if isinstance(value, bytes) else str(value).encode(errors="replace") for value in values)
    hashes = np.fromiter((hash(value) for value in given if not is_unnamed(value)), np.int64)
    distinct = len(np.unique(hashes))
    return RepeatedName(what, distinct, len(hashes), remedy) if 1 < distinct < len(hashes) else None


def in_paths(persons: Iterable[bytes], remedy: str = "") -> RepeatedName | None:
    """Return the repetitions of persons that `PERSON_IN_PATH` finds in images' paths; None if none repeats."""
    return repeated("the number after `patient`, `subject` or `case` in the images' paths", persons, remedy)


def person_of(pattern: str, path: str) -> bytes:
    """Return the match of a pattern's group in an image's path; empty if the pattern does not match."""
    found = re.search(pattern, composed(path))
    return group_name(found[1] or "") if found else b""


def _distinct(values: tuple[str, ...]) -> tuple[str, ...]:
    if len({*values, ALL, OTHER}) < len(values) + 2:
        raise ValueError(f"name each value once, and none {ALL!r} or {OTHER!r}")
    return values


SubgroupValues = Annotated[
    tuple[Label, ...], Field(min_length=1, max_length=MAX_SUBGROUPS), AfterValidator(_distinct)
]
SUBGROUPS = (
    "columns by whose values figures may be counted, each with its values, as in {sex = ['F', 'M']}; every other "
    "value counts as 'other'"
)


@dataclass(frozen=True, eq=False, repr=False)
class Subgroups:
    """The values of one column, by which figures may be counted."""

    names: tuple[str, ...]
    """The values that the site's settings name, and `OTHER`."""
    places: Tensor
    """The place of each example's value among the names, int64 [examples]."""

    @classmethod
    def of(cls, values: tuple[str, ...], cells: Iterable[object]) -> "Subgroups":
        number = {value: place for place, value in enumerate(values)}
        places = [number.get(str(cell).strip(), len(values)) for cell in cells]
        return cls((*values, OTHER), torch.tensor(places))

    def rows(self, index: Tensor) -> "Subgroups":
        """Return the values of the examples at these places."""
        return replace(self, places=self.places[index])


def numbered_subjects(groups: Iterable[bytes]) -> tuple[NDArray[np.int64], list[bytes | int]]:
    """Return the number of each example's subject, int64 [examples], and each subject's name: the examples' group, or
    the place of an example whose group is missing, which is a subject of its own."""
    numbers: dict[bytes | int, int] = {}
    found = [
        numbers.setdefault(place if is_unnamed(name) else name, len(numbers)) for place, name in enumerate(groups)
    ]
    return np.array(found, np.int64), list(numbers)


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

        The drawn members of a group depend on its own members alone. Privacy holds for any choice: the seed
        need not be secret.
        """
        return [self._drawn(group, most, seed) for group in groups.tolist()]

    def _drawn(self, group: int, most: int, seed: int) -> Tensor:
        members = self.members[self._starts[group] : self._starts[group + 1]]
        if len(members) <= most:
            return members
        generator = torch.Generator().manual_seed(derive_seed(seed, "members", int(self.keys[group])))
        return members[torch.randperm(len(members), generator=generator)[:most].sort().values]
