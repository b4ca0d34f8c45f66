"""Digests of a data set's examples, and of everything in it that training depends on."""

import hashlib
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.worker.data.dataset import Dataset, RowsOnDisk
from tessera.worker.data.overlap import DIGEST_BYTES, ExampleDigests
from tessera.worker.errors import DataError

CHECKED = 1000
"""Number of examples between two calls of `check`."""


def digests_of(dataset: Dataset, check: Callable[[], None] = lambda: None) -> ExampleDigests:
    """Return the digests of a data set. Exceptions of `check` propagate.

    An example's digest ignores its group and the dtype of its tensors.
    """
    parts = [part for part in (dataset, dataset.held_out) if part]
    digests = np.zeros((sum(part.examples for part in parts), DIGEST_BYTES), np.uint8)
    # Of an example that cannot be read, the row stays zero.
    readable = np.zeros(len(digests), bool)
    place = 0
    for part in parts:
        for identity in part.identities(torch.float64, unreadable=b""):
            if place % CHECKED == 0:
                check()
            if part.sources is not None or identity:
                digests[place] = np.frombuffer(hashlib.sha256(identity).digest(), np.uint8)
                readable[place] = True
            place += 1
    whole = np.unique(digests[readable].view(f"V{DIGEST_BYTES}")).view(np.uint8).reshape(-1, DIGEST_BYTES)
    return ExampleDigests(whole, content_digest(dataset, digests, row_settings(dataset)))


def fingerprint_of(dataset: Dataset) -> str:
    """Return a digest that is another one if the data set is loaded again from changed files. Of rows on disk, which
    have sources, it reads the first alone."""
    found = []
    for part in filter(None, (dataset, dataset.held_out)):
        sources = hashlib.sha256()
        for source in () if part.sources is None else part.sources:
            sources.update(source)
        found.append(content_digest(part, np.frombuffer(sources.digest(), np.uint8), row_settings(part)))
    return " ".join(found)


def row_settings(dataset: Dataset) -> bytes:
    """Return the settings by which texts that are still to be converted become rows, such as their length."""
    more = dataset.texts.settings if dataset.texts else ""
    return f"{dataset.pack} {dataset.schema.model_dump_json()}{more}".encode()


def content_digest(dataset: Dataset, hashes: Array, settings: bytes = b"") -> str:
    """Return a digest of the examples, their order, labels and groups, and of the `settings` that make rows of them.
    `hashes` are of the examples in that order.

    Of an input on disk it covers the places and the first row, in which another way of reading shows; the other rows
    are in `hashes`. If the first row cannot be read, its place in the digest says so: a task under privacy must not
    fail by one example.
    """
    digest = hashlib.sha256(as_bytes(hashes))
    first = {name: _first(stored) for name, stored in dataset.inputs.items() if isinstance(stored, RowsOnDisk)}
    places = {f"{name} places": dataset.on_disk.places for name in first if dataset.on_disk}
    tensors = {**dataset.tensors, **dataset.common, **first, **places}
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tensor.dtype} {list(tensor.shape)};".encode())
        digest.update(as_bytes(tensor.contiguous().flatten().view(torch.uint8).numpy()))
    for group in dataset.groups or ():
        digest.update(hashlib.sha256(group).digest())
    for classes in dataset.texts.tags if dataset.texts else ():
        # The classes of words become labels with the tokens.
        digest.update(f"{list(classes)};".encode())
    if dataset.texts and dataset.texts.of_classes:
        # They are no examples, so `hashes` has none of them.
        digest.update(f"{list(dataset.texts.first)};".encode())
    digest.update(settings)
    return f"sha256:{digest.hexdigest()}"


def _first(stored: RowsOnDisk) -> Tensor:
    """Return the first row, uint8 [0] if it cannot be read."""
    try:
        return stored[torch.tensor([0])]
    except DataError:
        return torch.empty(0, dtype=torch.uint8)
