"""How many examples two data sets share, by keyed hashes of them.

Of each data set the ledger keeps the smallest hashes, which are a uniform sample of its examples (a bottom-k sketch:
Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches"). The share of them that another data set has is the
estimate.
"""

from __future__ import annotations

import hmac
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tessera.shared.tensors.lazy import Array
from tessera.worker.data.registry import Dataset

KEPT = 1024
"""Hashes of a sketch. Of a data set with no more examples they are all there is."""

MAX_SHARED = 0.01
"""The share of either data set that may be in the other."""

HASH_BYTES = 6

CHECKED = 1000
"""Examples between two checks of whether to go on."""


def fingerprints(dataset: Dataset, key: bytes, check: Callable[[], None] = lambda: None) -> Array:
    """Return a hash of each different example, what is held out included: uint64 [examples], sorted.

    Neither its group nor the type of its numbers tells an example from another. Raises what `check` does.
    """

    def hashes() -> Iterator[int]:
        for part in filter(None, (dataset, dataset.held_out)):
            for place, identity in enumerate(part.identities(torch.float64)):
                if place % CHECKED == 0:
                    check()
                yield int.from_bytes(hmac.digest(key, identity, "sha256")[:HASH_BYTES], "big")

    return np.unique(np.fromiter(hashes(), np.uint64))


def sketch_of(prints: Array, known: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the sketch of these examples and of those that a sketch is `known` of."""
    together = np.union1d(prints[:KEPT], np.array(known, np.uint64))
    return tuple(int(value) for value in together[:KEPT])


def share_of(sketch: Sequence[int], prints: Array) -> float:
    """Return the estimated share of the examples behind the sketch that is among `prints`."""
    return float(np.isin(np.array(sketch, np.uint64), prints).mean()) if sketch else 0.0
