"""Division of a data set among sites, and its counts of classes."""

import hashlib
import hmac
import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial

import numpy as np
import torch
from torch import Tensor

from tessera.shared.model.dataset_schema import PIXELS
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.schemes import Distortion, Scheme, Shift
from tessera.worker.errors import DataError


def divide(whole: Dataset, partition: Scheme) -> list[Dataset]:
    """Return every site's part. Raises DataError if the scheme cannot divide the data set."""
    return [make() for make in makers(whole, partition)]


def makers(whole: Dataset, partition: Scheme) -> list[Callable[[], Dataset]]:
    """Return a function for each site that returns its part. This function and those raise DataError as `divide`."""
    return [partial(_made, whole, partition, rows, index) for index, rows in enumerate(_rows(whole, partition))]


def part_of(whole: Dataset, partition: Scheme, index: int) -> Dataset:
    """Return the part of the site `index`. Raises DataError if the scheme cannot divide the data set."""
    return _made(whole, partition, _rows(whole, partition)[index], index)


def _rows(whole: Dataset, partition: Scheme) -> list[np.ndarray]:
    try:
        return partition.rows(whole)
    except ValueError as fault:
        raise DataError(f"part: {fault}") from fault


def _made(whole: Dataset, partition: Scheme, rows: np.ndarray, index: int) -> Dataset:
    part = whole.rows(torch.from_numpy(rows))
    if not isinstance(partition, Shift):
        return part
    return _distorted(part.in_memory(), whole.in_memory(), partition.distortion(index), partition.noise_seed(index))


def _distorted(part: Dataset, whole: Dataset, how: Distortion, seed: int) -> Dataset:
    """Return a part of `whole` with its `pixel_values` [n, channels, height, width] distorted.

    Inverting mirrors each channel about the middle of its range in `whole`. Raises DataError if there are no such
    images, or if images that are not square are to be turned by 90 degrees.
    """
    pixels = part.tensors.get(PIXELS)
    if pixels is None or pixels.ndim != 4 or not pixels.is_floating_point():
        raise DataError(f"part: scheme shift changes images, and there is no floating-point {PIXELS} [n, c, h, w]")
    if how.quarter_turns % 2 and pixels.shape[-1] != pixels.shape[-2]:
        size = f"{pixels.shape[-2]} x {pixels.shape[-1]}"
        raise DataError(f"part: images of {size} do not keep their shape when turned: make them square")
    pixels = torch.rot90(pixels, how.quarter_turns, (-2, -1))
    if how.invert:
        everywhere, axes = whole.tensors[PIXELS], (0, 2, 3)
        pixels = (everywhere.amin(dim=axes) + everywhere.amax(dim=axes))[:, None, None] - pixels
    if how.noise:
        drawn = torch.randn(pixels.shape, generator=torch.Generator().manual_seed(seed))
        pixels = pixels + how.noise * drawn.to(pixels.dtype)
    return replace(part, tensors={**part.tensors, PIXELS: pixels.contiguous()})


def hold_out(dataset: Dataset, share: float, key: bytes) -> Dataset:
    """Return the data set with a share of its examples moved to `held_out`.

    Each example is held out with probability `share`, by a keyed hash of its group, or else of its identity. So the
    side of an example does not depend on its label or on other examples, as differential privacy requires, which
    compares data sets that differ in one example. Raises DataError if either side is empty.
    """
    most = share * (1 << 64)
    digests = (hmac.digest(key, identity, "sha256") for identity in dataset.split_keys())
    held = torch.tensor([int.from_bytes(digest[:8], "big") < most for digest in digests])
    if held.all() or not held.any():
        empty = "trained on" if held.all() else "held out"
        groups = "" if dataset.groups is None else f" in {len(set(dataset.groups))} groups"
        raise DataError(
            f"held_out: of {dataset.examples} examples{groups} none is {empty} with a share of {share:g}: the "
            "site's secret key decides for each. Change held_out, add examples, or leave held_out out"
        )
    kept, out = (dataset.rows(chosen.nonzero().flatten()) for chosen in (~held, held))
    return replace(kept, held_out=out)


def key_of_seed(seed: int) -> bytes:
    """Return the key of a simulation: the same seed holds out the same examples. The key is not secret."""
    return hashlib.sha256(json.dumps(["tessera held out", seed]).encode()).digest()


@dataclass(frozen=True)
class SiteCounts:
    """Counts of classes or of domains at each site."""

    what: str
    names: tuple[str, ...]
    counts: tuple[tuple[int, ...], ...]  # [sites][names]


def class_counts(parts: Sequence[Dataset], names: Sequence[str] | None = None) -> list[SiteCounts]:
    """Return the counts of the parts' classes and domains, if they have any, or else of one class `none`.

    `names` are the names of the first classes, if they are known.
    """
    classes = _counts("class", [part.classes for part in parts])
    domains = _counts("domain", [part.domains for part in parts])
    if classes and names:
        known = dict(enumerate(names))
        classes = replace(classes, names=tuple(known.get(int(name), name) for name in classes.names))
    plain = SiteCounts("class", ("none",), tuple((part.examples,) for part in parts))
    return [counts for counts in (classes, domains) if counts] or [plain]


def _counts(what: str, of_sites: Sequence[Tensor | None]) -> SiteCounts | None:
    """Return the counts at each site of each value that occurs at any of them."""
    values = [of_site.numpy() for of_site in of_sites if of_site is not None]
    if not values:
        return None
    distinct = np.unique(np.concatenate(values)).tolist()
    counts = tuple(tuple(int((of_site == value).sum()) for value in distinct) for of_site in values)
    return SiteCounts(what, tuple(map(str, distinct)), counts)
