"""The blobs of a simulation."""

from __future__ import annotations

from pathlib import Path

from tessera.shared.tensors.lazy import digest_of
from tessera.simulation.blob_folder import SMALL_BYTES, Folder


def test_small_blobs_stay_in_memory_and_large_ones_on_disk(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    small, large = b"s" * SMALL_BYTES, b"l" * (SMALL_BYTES + 1)
    for data in (small, large):
        digest = folder.put([data]).digest
        with folder.open(digest) as file:
            assert (folder.read(digest), folder.size(digest), file.read()) == (data, len(data), data)
        folder.path(digest).write_bytes(b"changed")
        assert folder.read(digest) == (data if data is small else b"changed")
    assert folder.small(digest_of(large)) == b"changed"
