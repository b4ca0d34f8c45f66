"""Who takes part, and with which dice. Everything follows from the run's seed, the round, and names."""

from __future__ import annotations

from collections.abc import Sequence
from random import Random


def choose(eligible: Sequence[str], size: int | None, rng: Random) -> list[str]:
    """`size` sites, or all of them, in the order of their names, whatever the order they are given in."""
    names = sorted(eligible)
    return names if size is None or size >= len(names) else sorted(rng.sample(names, size))
