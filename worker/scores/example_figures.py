"""Figures that are means over examples, each of which has one value in a declared range."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from tessera.worker.privacy.bounded_numbers import Leaving
from tessera.worker.training.ranks import Ranks

Range = tuple[float, float]
"""The least and the largest value of an example."""


class ExampleFigures:
    """Sums of the examples' values, which add up over batches and over ranks. A value outside of its range counts as
    the nearest in it, and one that is not a number as the least, as does an example without a value."""

    def __init__(self, ranges: Mapping[str, Range]) -> None:
        """`ranges` are those of a value of each figure, by its name."""
        self.ranges = dict(ranges)
        self._sums = torch.zeros(len(self.ranges), dtype=torch.float64)
        """Of the values, less the least one for each example."""

    def add(self, name: str, values: Tensor) -> None:
        """Add the values of some examples, [examples], to a figure."""
        low, high = self.ranges[name]
        found = values.detach().cpu().double().nan_to_num(nan=low, posinf=high, neginf=low).clamp(low, high) - low
        self._sums[list(self.ranges).index(name)] += found.sum()

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        if self.ranges:
            self._sums = ranks.total(self._sums)

    def sums(self) -> dict[str, Tensor]:
        """Return the sums by name."""
        return dict(zip(self.ranges, self._sums, strict=True))

    def leaving(self) -> dict[str, Leaving]:
        """Return the sums as those that leave rounded: replacing one example moves each by its range at most."""
        return {name: Leaving(self.sums()[name], high - low) for name, (low, high) in self.ranges.items()}

    def means(self, examples: int, sums: Mapping[str, Tensor]) -> dict[str, float]:
        """Return the mean over these examples of each figure, by its sum."""
        return {
            name: low + min(high - low, max(0.0, float(sums[name]) / examples))
            for name, (low, high) in self.ranges.items()
        }
