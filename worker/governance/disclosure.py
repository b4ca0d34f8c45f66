"""A site's limits on the counts that leave it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.shared.api.descriptions import LEAST_STEP, LEAST_SUBJECTS
from tessera.shared.tensors.lazy import Array


@dataclass(frozen=True)
class DisclosureRule:
    """A site's limits on counts that leave."""

    least: int = LEAST_SUBJECTS
    """The fewest subjects of a count that is not zero."""
    step: int = LEAST_STEP
    """Counts are rounded to multiples of it."""

    @property
    def minimum(self) -> int:
        """The limit as it applies: a multiple of the step, or the lowest count would be shown of one number alone."""
        return -(-self.least // self.step) * self.step

    def shown(self, counts: Array) -> Array:
        """Return the counts as they leave: rounded, and zero below the minimum."""
        rounded = (counts + self.step // 2) // self.step * self.step
        return np.where(counts < self.minimum, 0, rounded)
