"""The description of a site's data set: the counts that the site's rules let leave."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Annotated, Literal, Self

from pydantic import Field, PositiveFloat, model_validator

from tessera.shared.api.class_counts import MAX_CLASSES, Count
from tessera.shared.run_settings import Unit
from tessera.shared.schema import Message

LEAST_SUBJECTS = 10
"""The lowest minimum that a site can set."""
LEAST_STEP = 5
"""The finest rounding that a site can set."""

BINS = 21
"""Bins of lengths and sizes: the first is of 0 and 1, and each further one ends before the next power of two. The
last has no end."""
UNKNOWN_SHARES = (0.0, 0.01, 0.05, 0.2)
"""Shares of tokens that a tokenizer does not know. With more than the last it probably does not fit the texts."""

TableName = Literal["classes", "words", "tokens", "pixels"]
"""The tables that a site may count: subjects by class, by the length of texts in words or in tokens, and by the
longer side of images in pixels."""
Name = Annotated[str, Field(min_length=1, max_length=256)]


class DisclosedCounts(Message):
    """Counts of subjects, each zero or rounded. Zero says that a site has fewer than the minimum, perhaps none."""

    unit: Unit
    """The subject: an example, or a group of examples such as a patient's."""
    minimum: int = Field(ge=LEAST_SUBJECTS, lt=1 << 40)
    """The fewest subjects of a count that is not zero."""
    step: int = Field(ge=LEAST_STEP, lt=1 << 40)
    """Counts are multiples of it."""

    def require_suppressed(self, name: str, counts: Iterable[int]) -> None:
        """Raise ValueError for a count that is too small or not rounded."""
        if odd := [count for count in counts if count % self.step or 0 < count < self.minimum]:
            raise ValueError(
                f"{name} has a count of {odd[0]}: it is below {self.minimum} or no multiple of {self.step}"
            )


class Description(DisclosedCounts):
    """The description of a data set."""

    counts: dict[TableName, Annotated[tuple[Count, ...], Field(max_length=MAX_CLASSES)]]
    """The subjects in each class, and in each bin. A subject with examples in several counts in each."""
    class_names: tuple[Name, ...] = Field(default=(), max_length=MAX_CLASSES)
    """The names in the site's settings, beginning with class 0."""
    unknown_tokens: float | None = None
    """The largest of `UNKNOWN_SHARES` that the share of unknown tokens reaches; None without such a tokenizer."""
    epsilon: PositiveFloat | None = None
    """The privacy of the counts, if they have noise."""

    @model_validator(mode="after")
    def _is_suppressed(self) -> Self:
        if self.unknown_tokens not in (None, *UNKNOWN_SHARES):
            raise ValueError(f"unknown_tokens: {self.unknown_tokens} is none of {UNKNOWN_SHARES}")
        for name, counts in self.counts.items():
            if name != "classes" and len(counts) > BINS:
                raise ValueError(f"{name} has {len(counts)} bins, of {BINS}")
            self.require_suppressed(name, counts)
        return self

    @property
    def subjects(self) -> tuple[int, ...]:
        """The counts of one table: that of the classes, or else another, since each counts the same subjects."""
        return next((counts for _, counts in sorted(self.counts.items())), ())

    @property
    def figures(self) -> dict[str, float]:
        """The counts that are not zero, by name, for people at the site."""
        found = {}
        for table, counts in sorted(self.counts.items()):
            for place, count in enumerate(counts):
                if count:
                    found[f"{table} {self.cell_name(table, place)}"] = float(count)
        return found

    def cell_name(self, table: TableName, place: int) -> str:
        """Return the name of a class, or the numbers of a bin."""
        if table != "classes":
            return bin_name(place)
        return self.class_names[place] if place < len(self.class_names) else str(place)


def bin_name(place: int) -> str:
    """Return the numbers of a bin, in words."""
    if place in (0, BINS - 1):
        return "0 or 1" if place == 0 else f"{1 << place} or more"
    return f"{1 << place} to {(2 << place) - 1}"


def subjects(descriptions: list[Description], table: TableName) -> list[int]:
    """Return the sums over sites of the counts that they show."""
    longest = max((len(each.counts.get(table, ())) for each in descriptions), default=0)
    return [
        sum(counts[place] for each in descriptions if place < len(counts := each.counts.get(table, ())))
        for place in range(longest)
    ]
