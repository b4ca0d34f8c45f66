"""Estimation of the share of examples that two data sets have in common, by keyed hashes of the examples.

The ledger keeps the smallest hashes of each data set, which are a uniform sample of its examples (a bottom-k sketch:
Cohen and Kaplan 2007, "Summarizing data using bottom-k sketches"). The estimate is the share of this sample that the
other data set contains.
"""

import hashlib
import hmac
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from tessera.shared.tensors.lazy import Array
from tessera.worker.state.privacy_ledger import SKETCHED

MAX_SHARED = 0.01
"""Limit on the share of either data set that is in the other."""

DIGEST_BYTES = hashlib.sha256().digest_size
HASH_BYTES = 6


@dataclass(frozen=True, eq=False, repr=False)
class ExampleDigests:
    """SHA-256 digests of a data set's examples. They have no key, so they stay within this worker's own processes."""

    readable: Array
    """The sorted digests of distinct examples that can be read, held-out ones too: uint8 [examples, 32]. Others are
    like no other: a private task counts each as zero."""
    content: str
    """The digest of everything in the data set that training depends on."""

    def keyed(self, key: bytes) -> Array:
        """Return the sorted hashes of the examples under a site's key: uint64 [examples]."""
        hashes = (hmac.digest(key, digest.tobytes(), "sha256")[:HASH_BYTES] for digest in self.readable)
        return np.unique(np.fromiter((int.from_bytes(each, "big") for each in hashes), np.uint64))

    def content_under(self, key: bytes) -> str:
        """Return the content's digest under a site's key, which checkpoints name."""
        return f"hmac-sha256:{hmac.digest(key, self.content.encode(), 'sha256').hex()}"


def sketch_of(prints: Array, known: Sequence[int] = ()) -> tuple[int, ...]:
    """Return the sketch of the union of these examples and of those with the sketch `known`."""
    together = np.union1d(prints[:SKETCHED], np.array(known, np.uint64))
    return tuple(int(value) for value in together[:SKETCHED])


def share_of(sketch: Sequence[int], prints: Array) -> float:
    """Return the estimated share of the sketch's data set that is among `prints`."""
    return float(np.isin(np.array(sketch, np.uint64), prints).mean()) if sketch else 0.0
