"""Setting some of a site's examples aside, to measure a model on what it was not trained on.

Which side an example is on follows from the example and the site's secret key, and from nothing else: one example
more or less, or another label, moves no other example. Differential privacy needs that, since it compares two data
sets that differ in one example.
"""

from __future__ import annotations

import hashlib
import hmac
import json

import torch

from tessera.worker.data.dataset import DataError, Dataset


def hold_out(dataset: Dataset, share: float, key: bytes) -> Dataset:
    """Return the data set without a share of its examples, which are its `held_out`.

    Each example is held out with probability `share`, by a keyed hash of its group, or else its identity: examples of
    the same are on the same side. Raises DataError if either side is empty.
    """
    most = share * (1 << 64)
    digests = (hmac.digest(key, identity, "sha256") for identity in dataset.sides())
    held = torch.tensor([int.from_bytes(digest[:8], "big") < most for digest in digests])
    if bool(held.all()) or not bool(held.any()):
        empty = "trained on" if bool(held.all()) else "held out"
        raise DataError(
            f"held_out: of {dataset.examples} examples none is {empty} with a share of {share:g}, which the site's "
            "secret key decides for each. Change held_out, bring more examples, or leave held_out out"
        )
    kept, out = (dataset.rows(chosen.nonzero().flatten()) for chosen in (~held, held))
    return Dataset(kept.tensors, kept.common, out, kept.domains, kept.sources, kept.padding, kept.groups)


def key_of_seed(seed: int) -> bytes:
    """Return the key of a simulation, in which the same seed holds out the same examples. It is no secret."""
    return hashlib.sha256(json.dumps(["tessera held out", seed]).encode()).digest()
