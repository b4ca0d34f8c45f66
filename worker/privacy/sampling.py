"""Poisson sampling of the units that a private task protects."""

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Sampling:
    """Poisson sampling of batches: each of `units` (examples, or groups) with probability `rate`, `steps` times per
    epoch."""

    units: int
    rate: float
    steps: int

    @property
    def expected(self) -> float:
        return self.rate * self.units


def sampling(units: int, batch_size: int | None) -> Sampling:
    """Return the sampling whose samples have this mean size, with as many steps as there are batches."""
    size = min(batch_size or units, units)
    return Sampling(units, size / units, math.ceil(units / size))
