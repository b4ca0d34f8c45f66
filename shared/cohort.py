"""Who takes part, and with which dice. Everything follows from the run's seed, the round, and names."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from random import Random


def dice(seed: int, *names: object) -> int:
    """A seed of 53 bits (exact in JSON) that depends on all of its arguments, and on nothing else."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11


def choose(eligible: Sequence[str], size: int | None, rng: Random) -> list[str]:
    """`size` sites, or all of them, in the order of their names, whatever the order they are given in."""
    names = sorted(eligible)
    return names if size is None or size >= len(names) else sorted(rng.sample(names, size))
