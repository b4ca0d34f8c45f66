"""An update as integers under a mask: one safetensors file with a string of integers for each block.

A step x of a site with weight w becomes an integer q, at random one of the two next to x w / (max_weight 2^exponent),
so that its mean is exact (stochastic rounding); with client-level privacy, `noisy_update` makes q. The site sends q
plus its masks, modulo 2^bits: bits that say nothing about q to all who lack a seed. The same file format carries the
sums of masks that helpers return.

The random numbers come from a seed that is a hash of the update itself. A coordinator that could predict them could
choose a scale at which those of a single site let a small step show in the sum.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import BinaryIO, Protocol

import numpy as np

from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.masks import RING_DTYPES, MaskStream
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.secure_sums.noisy_update import NoisyUpdate
from tessera.shared.tensors.hashing import Hashing, Sink
from tessera.shared.tensors.lazy import CHUNK, Array, as_bytes, chunk_counts
from tessera.shared.tensors.mmap_file import taken
from tessera.shared.updates.safetensors_file import ContainerError, read_header, write_streams

FORMAT = "tessera-ring/1"
HEADER_BYTES_PER_BLOCK = 1_024


class Change(Protocol):
    """A block's step from the version, as float32, chunk by chunk."""

    def steps(self) -> Iterator[Array]: ...


@dataclass(frozen=True)
class Rounding:
    """From float32 steps of a block to integers of at most `levels`, and back."""

    factor: np.float32
    levels: int

    @classmethod
    def of(cls, terms: Terms, block: str, weight: int) -> Rounding:
        """Return the rounding of a sender of this weight. Raises SumRefused for a weight beyond the terms."""
        if not 1 <= weight <= terms.max_weight:
            raise SumRefused("scales", f"the weight {weight} is not within 1 and {terms.max_weight}")
        factor = weight / terms.max_weight * 2.0 ** -terms.blocks[block].exponent
        return cls(np.float32(factor), terms.levels)

    def round(self, steps: Array, rng: np.random.Generator, scratch: Array) -> Array:
        """Return integers as float32 in `scratch`, float32 [2, >= len(steps)]. Raises SumRefused for NaN and
        infinity."""
        codes, dice = scratch[0, : steps.size], scratch[1, : steps.size]
        lowest, highest = steps.min(initial=0), steps.max(initial=0)
        if not (np.isfinite(lowest) and np.isfinite(highest)):
            raise SumRefused("values", "a step is infinite or not a number, and would spoil the sum of all sites")
        # Overflowing values are cut off like all others beyond the levels.
        with np.errstate(over="ignore"):
            lowest, highest = lowest * self.factor, highest * self.factor
            np.multiply(steps, self.factor, out=codes)
        rng.random(out=dice, dtype=np.float32)
        np.add(codes, dice, out=codes)
        np.floor(codes, out=codes)
        if max(highest + 1, -lowest + 1) > self.levels:
            # float32 rounds a limit of more than 24 bits: downwards, or the sum of all senders could overflow.
            most = np.float32(self.levels)
            most = most if int(most) <= self.levels else np.nextafter(most, np.float32(0))
            np.clip(codes, -most, most, out=codes)
        return codes


@dataclass(frozen=True)
class MaskedFile:
    digest: str
    rests: Mapping[str, Array]
    """The part of each block that rounding and the limit dropped, float32 and flat; empty unless requested."""


def write_masked(
    file: Sink,
    terms: Terms,
    changes: Mapping[str, Change],
    weight: int,
    seeds: Sequence[bytes],
    seed: int,
    *,
    noise_key: bytes | None = None,
    keep_rests: bool = False,
) -> MaskedFile:
    """Write an update under the masks of `seeds`. The same steps and `seed` round the same way. Terms with noise need
    a `noise_key`; the same one draws the same noise.

    Raises SumRefused for a step that is not finite, and for a block or weight beyond the terms.
    """
    if unknown := sorted(set(changes) - set(terms.blocks)):
        raise SumRefused("scales", f"the terms have no scale for {unknown[:4]}")
    if terms.noise:
        return _write_noisy(file, terms, changes, seeds, seed, noise_key)
    rng = _generator(changes, seed)
    rests: dict[str, list[Array]] = {name: [] for name in changes if keep_rests}
    scratch = np.empty((2, CHUNK), np.float32)
    signed = np.dtype(f"<i{terms.bits // 8}")

    def integers(name: str) -> Iterator[memoryview]:
        rounding = Rounding.of(terms, name, weight)
        masks = MaskStream(seeds, terms.digest, name, terms.bits)
        for steps in changes[name].steps():
            codes = rounding.round(steps, rng, scratch)
            if keep_rests:
                rests[name].append(steps - codes / rounding.factor)
            values = codes.astype(signed).view(RING_DTYPES[terms.bits])
            masks.add_to(values)
            yield as_bytes(values)

    names = sorted(changes)
    digest = write_ring(file, terms, names, integers)
    return MaskedFile(digest, {name: np.concatenate(parts) for name, parts in rests.items()})


def _generator(changes: Mapping[str, Change], seed: int) -> np.random.Generator:
    """Return random numbers that follow from the task's seed and every step."""
    digest = hashlib.sha256(str(seed).encode())
    for name in sorted(changes):
        for steps in changes[name].steps():
            digest.update(as_bytes(steps))
    return np.random.Generator(np.random.SFC64(int.from_bytes(digest.digest(), "big")))


def _write_noisy(
    file: Sink,
    terms: Terms,
    changes: Mapping[str, Change],
    seeds: Sequence[bytes],
    seed: int,
    noise_key: bytes | None,
) -> MaskedFile:
    if noise_key is None:
        raise SumRefused("noise", "there is no key for the noise that the terms ask for")
    update = NoisyUpdate.of(terms, {name: change.steps for name, change in changes.items()}, seed)
    source = NoiseSource(noise_key)

    def integers(name: str) -> Iterator[memoryview]:
        masks = MaskStream(seeds, terms.digest, name, terms.bits)
        for values in update.noisy(name, source):
            masks.add_to(values)
            yield as_bytes(values)

    return MaskedFile(write_ring(file, terms, sorted(changes), integers), {})


def write_ring(
    file: Sink, terms: Terms, blocks: Sequence[str], integers: Callable[[str], Iterator[memoryview]]
) -> str:
    """Write the ring integers of these blocks; return the file's digest."""
    hashing = Hashing(file)
    sizes = _sizes(terms, blocks)
    streams = ((block, integers(block)) for block in blocks)
    write_streams(hashing, streams, {"format": FORMAT, "terms": terms.digest}, blocks, sizes)
    return hashing.digest


def _sizes(terms: Terms, blocks: Sequence[str]) -> dict[str, int]:
    return {block: terms.blocks[block].elements * terms.bits // 8 for block in blocks}


@dataclass(frozen=True)
class RingTensor:
    """A block of ring integers in a file, read chunk by chunk."""

    open: Callable[[], BinaryIO]
    start: int
    numel: int
    bits: int

    def chunks(self) -> Iterator[Array]:
        """Yield unsigned integers, flat, `CHUNK` at a time."""
        dtype = RING_DTYPES[self.bits]
        with self.open() as file:
            file.seek(self.start)
            for count in chunk_counts(self.numel):
                yield np.frombuffer(taken(file, count * dtype.itemsize), dtype)


def read_ring(
    open_file: Callable[[], BinaryIO], nbytes: int, terms: Terms, blocks: Sequence[str]
) -> dict[str, RingTensor]:
    """Return the blocks of a file, which must be these.

    Raises SumRefused for another file, or one of other terms. Any bytes are integers, so no value can be wrong.
    """
    try:
        with open_file() as file:
            header = read_header(file, nbytes, HEADER_BYTES_PER_BLOCK * (1 + len(blocks)), len(blocks))
    except ContainerError as fault:
        raise SumRefused("malformed", f"the file is not a well-formed safetensors file: {fault}") from None
    if header.metadata.get("format") != FORMAT:
        raise SumRefused("malformed", f"the file's format is not {FORMAT}")
    if header.metadata.get("terms") != terms.digest:
        raise SumRefused("terms-differ", "the file is of other terms")
    sizes = {name: entry.nbytes for name, entry in header.entries.items()}
    wanted = _sizes(terms, blocks)
    if sizes != wanted:
        wrong = sorted(name for name in sizes.keys() | wanted.keys() if sizes.get(name) != wanted.get(name))
        raise SumRefused("malformed", f"{len(wrong)} blocks are missing, unasked or of another size: {wrong[:4]}")
    return {
        name: RingTensor(
            open_file, header.data_start + header.entries[name].start, terms.blocks[name].elements, terms.bits
        )
        for name in blocks
    }
