"""Seeds derived from a run's seed, so that a run can be repeated exactly."""

from __future__ import annotations

import hashlib


def dice(seed: int, *names: object) -> int:
    """Return a seed of 53 bits (exact in JSON) that depends on all of its arguments, and on nothing else."""
    text = "/".join(map(str, (seed, *names)))
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 11
