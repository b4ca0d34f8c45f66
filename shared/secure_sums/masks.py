"""Masks: integers that look random to all who lack their seed, from AES-256 in counter mode."""

from __future__ import annotations

import secrets
from collections.abc import Sequence

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, CipherContext
from cryptography.hazmat.primitives.ciphers.algorithms import AES256
from cryptography.hazmat.primitives.ciphers.modes import CTR
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from tessera.shared.secure_sums.messages import SEED_BYTES
from tessera.shared.tensors.lazy import CHUNK, Array

RING_DTYPES: dict[int, np.dtype] = {16: np.dtype("<u2"), 32: np.dtype("<u4")}
"""The integers modulo 2^16 and 2^32, little-endian."""

_ZEROS = memoryview(bytes(4 * CHUNK))
_BLOCK_BYTES = 16


def new_seed() -> bytes:
    """Return a seed from the operating system."""
    return secrets.token_bytes(SEED_BYTES)


class MaskStream:
    """The sum of a block's masks from several seeds, chunk by chunk from its start."""

    def __init__(self, seeds: Sequence[bytes], terms_digest: str, block: str, bits: int) -> None:
        # A key serves one block of one round, so the counter may always begin at zero.
        info = f"{terms_digest}/{block}".encode()
        self._streams = [_key_stream(seed, info) for seed in seeds]
        self._dtype = RING_DTYPES[bits]
        self._scratch = np.empty(0, np.uint8)

    def add_to(self, total: Array) -> None:
        """Add the masks of the next `len(total)` elements, at most `CHUNK`, to `total`, modulo its ring."""
        nbytes = total.size * self._dtype.itemsize
        if self._scratch.size < nbytes:
            self._scratch = np.empty(nbytes + _BLOCK_BYTES, np.uint8)
        masks = self._scratch[:nbytes].view(self._dtype)
        for stream in self._streams:
            stream.update_into(_ZEROS[:nbytes], self._scratch.data)
            np.add(total, masks, out=total)


def _key_stream(seed: bytes, info: bytes) -> CipherContext:
    key = HKDFExpand(SHA256(), 32, info).derive(seed)
    return Cipher(AES256(key), CTR(bytes(_BLOCK_BYTES))).encryptor()
