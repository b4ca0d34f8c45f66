"""Estimation of the share of examples that two data sets have in common, by keyed hashes of the examples.

The ledger keeps the smallest hashes of each data set, which are a uniform sample of its examples (a bottom-k sketch:
Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches"). The estimate is the share of this sample that the
other data set contains.
"""

import hmac
from collections.abc import Callable, Iterator, Sequence

import numpy as np
import torch

from tessera.shared.tensors.lazy import Array
from tessera.worker.data.dataset import Dataset
from tessera.worker.state.privacy_ledger import SKETCHED

MAX_SHARED = 0.01
"""Limit on the share of either data set that is in the other."""

HASH_BYTES = 6

UNREADABLE = 0
"""The hash of an example that cannot be read. No fingerprint has it: such examples are like no other, and a private
task counts each as zero."""

CHECKED = 1000
"""Number of examples between two calls of `check`."""


def distinct(hashes: Array) -> Array:
    """Return the sorted hashes of distinct examples that can be read: uint64 [examples]."""
    return np.setdiff1d(hashes, UNREADABLE)


def hashes_in_order(dataset: Dataset, key: bytes, check: Callable[[], None] = lambda: None) -> Array:
    """Return the hash of each example, then of each held-out one: uint64 [examples].

    The hash ignores an example's group and the dtype of its tensors. It is `UNREADABLE` if the example cannot be
    read. Exceptions of `check` propagate.
    """

    def hashes() -> Iterator[int]:
        for part in filter(None, (dataset, dataset.held_out)):
            for place, identity in enumerate(part.identities(torch.float64, unreadable=b"")):
                if place % CHECKED == 0:
                    check()
                is_readable = part.sources is not None or identity != b""
                digest = hmac.digest(key, identity, "sha256")[:HASH_BYTES]
                yield int.from_bytes(digest, "big") if is_readable else UNREADABLE

    return np.fromiter(hashes(), np.uint64)


def sketch_of(prints: Array, known: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the sketch of the union of these examples and of those with the sketch `known`."""
    together = np.union1d(prints[:SKETCHED], np.array(known, np.uint64))
    return tuple(int(value) for value in together[:SKETCHED])


def share_of(sketch: Sequence[int], prints: Array) -> float:
    """Return the estimated share of the sketch's data set that is among `prints`."""
    return float(np.isin(np.array(sketch, np.uint64), prints).mean()) if sketch else 0.0
