"""The cache: by digest, verified, bounded, and never half written."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable
from pathlib import Path
from typing import BinaryIO

import ml_dtypes
import numpy as np
import pytest

from tessera.shared.model.blocks import Block
from tessera.shared.problems import DigestMismatch
from tessera.shared.tensors.lazy import CHUNK, digest_of, to_array
from tessera.worker.state.blob_cache import BlobTensor, BlobTooLarge, Cache, Progress, Row, Sink


class Origin:
    """Where blobs come from: counts what it is asked for."""

    def __init__(self, *blobs: bytes) -> None:
        self.blobs = {digest_of(blob): blob for blob in blobs}
        self.asked: list[str] = []

    def __call__(self, digest: str, file: BinaryIO, progress: Callable[[int], None]) -> None:
        self.asked.append(digest)
        for start in range(0, len(self.blobs[digest]), 4):
            piece = self.blobs[digest][start : start + 4]
            file.write(piece)
            progress(len(piece))


ONE, TWO, THREE = b"1" * 10, b"2" * 10, b"3" * 10


def test_a_blob_is_fetched_once_even_by_a_later_process(tmp_path: Path) -> None:
    origin, moved = Origin(ONE), []
    for _ in range(2):
        cache = Cache(tmp_path, 100)
        for _ in range(2):
            path = cache.fetch(digest_of(ONE), 10, origin, moved.append)
    assert path.read_bytes() == ONE
    assert len(origin.asked) == 1
    assert sum(moved) == 10
    digest = hashlib.sha256(ONE).hexdigest()
    assert path == tmp_path / digest[:2] / f"sha256-{digest}"


def test_bytes_that_are_not_the_digests_never_become_visible(tmp_path: Path) -> None:
    origin, cache = Origin(ONE), Cache(tmp_path, 100)
    origin.blobs[digest_of(ONE)] = TWO
    with pytest.raises(DigestMismatch):
        cache.fetch(digest_of(ONE), 10, origin)
    assert digest_of(ONE) not in cache
    assert [path for path in tmp_path.rglob("*") if path.is_file()] == []


def test_a_blob_larger_than_it_may_be_is_cut_off_while_it_comes(tmp_path: Path) -> None:
    moved: list[int] = []
    with pytest.raises(BlobTooLarge, match="more than the 6 bytes"):
        Cache(tmp_path, 100).fetch(digest_of(ONE), 6, Origin(ONE), moved.append)
    assert sum(moved) == 4


def test_what_was_used_longest_ago_is_evicted_first(tmp_path: Path) -> None:
    origin, cache = Origin(ONE, TWO, THREE), Cache(tmp_path, 20)
    for blob in (ONE, TWO, ONE, THREE):
        with cache.pinning():
            cache.fetch(digest_of(blob), 10, origin)
    assert [digest_of(blob) in cache for blob in (ONE, TWO, THREE)] == [True, False, True]
    assert cache.total_bytes == sum(path.stat().st_size for path in tmp_path.rglob("sha256-*")) == 20


def test_the_order_of_use_survives_a_restart(tmp_path: Path) -> None:
    origin, cache = Origin(ONE, TWO, THREE), Cache(tmp_path, 20)
    for age, blob in ((1, ONE), (2, TWO)):
        with cache.pinning():
            os.utime(cache.fetch(digest_of(blob), 10, origin), ns=(0, 10**18 - age))
    Cache(tmp_path, 20).fetch(digest_of(THREE), 10, origin)
    assert [digest_of(blob) in Cache(tmp_path, 20) for blob in (ONE, TWO, THREE)] == [True, False, True]


def test_the_last_use_of_a_blob_is_noted_once_a_minute(tmp_path: Path) -> None:
    origin, cache = Origin(ONE), Cache(tmp_path, 20)
    for _ in range(3):
        with cache.pinning():
            path = cache.fetch(digest_of(ONE), 10, origin)
            os.utime(path, ns=(0, 5))
    assert path.stat().st_mtime_ns == 5
    Cache(tmp_path, 20).fetch(digest_of(ONE), 10, origin)
    assert path.stat().st_mtime_ns > 5


def test_a_blob_that_disappears_between_tasks_is_fetched_again(tmp_path: Path) -> None:
    origin, cache = Origin(ONE), Cache(tmp_path, 20)
    for _ in range(2):
        with cache.pinning():
            path = cache.fetch(digest_of(ONE), 10, origin)
            assert cache.fetch(digest_of(ONE), 10, origin).read_bytes() == ONE
        path.unlink()
    assert origin.asked == [digest_of(ONE)] * 2


def test_what_the_present_task_needs_is_never_evicted(tmp_path: Path) -> None:
    origin, cache = Origin(ONE, TWO, THREE), Cache(tmp_path, 20)
    with cache.pinning():
        paths = [cache.fetch(digest_of(blob), 10, origin) for blob in (ONE, TWO)]
        with pytest.raises(BlobTooLarge, match="10 bytes more than cache_bytes"):
            cache.fetch(digest_of(THREE), 10, origin)
        assert [path.read_bytes() for path in paths] == [ONE, TWO]


def test_a_lower_limit_is_kept_from_the_start(tmp_path: Path) -> None:
    origin, cache = Origin(ONE, TWO), Cache(tmp_path, 20)
    for blob in (ONE, TWO):
        cache.fetch(digest_of(blob), 10, origin)
    assert Cache(tmp_path, 10).total_bytes == 10


def test_a_blob_that_the_disk_spoilt_is_fetched_again(tmp_path: Path) -> None:
    origin = Origin(ONE)
    Cache(tmp_path, 100).fetch(digest_of(ONE), 10, origin).write_bytes(TWO)
    assert Cache(tmp_path, 100).fetch(digest_of(ONE), 10, origin).read_bytes() == ONE
    assert len(origin.asked) == 2


def test_what_a_killed_process_left_is_swept_at_the_start(tmp_path: Path) -> None:
    (tmp_path / "ab").mkdir()
    left = tmp_path / "ab" / "0123.tmp"
    left.write_bytes(b"half")
    Cache(tmp_path, 100)
    assert not left.exists()


def test_a_digest_that_is_a_path_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="not a digest"):
        Cache(tmp_path, 100).fetch("sha256:../../../etc/passwd", 10, Origin())


@pytest.mark.parametrize("dtype", ["F32", "BF16"])
def test_a_blob_tensor_gives_the_blocks_values_chunk_by_chunk(tmp_path: Path, dtype: str) -> None:
    kind = np.float32 if dtype == "F32" else ml_dtypes.bfloat16
    values = np.arange(3 * (CHUNK // 2)).reshape(3, -1).astype(kind)
    path = tmp_path / "blob"
    path.write_bytes(values.tobytes())
    tensor = BlobTensor(path, Block(tensor="w", role="other", shape=values.shape, dtype=dtype))
    assert [len(chunk) for chunk in tensor.chunks()] == [CHUNK, CHUNK // 2]
    assert to_array(tensor).tobytes() == values.tobytes()
    assert to_array(tensor).shape == values.shape


# ---------------------------------------------------------------- several in one go


def pouring(*pieces: bytes) -> Row:
    def pour(digests: tuple[str, ...], file: Sink, progress: Progress) -> None:
        for piece in pieces:
            progress(file.write(piece))

    return pour


SIZES = {digest_of(ONE): len(ONE), digest_of(TWO): len(TWO)}


@pytest.mark.parametrize("cut", [0, 1, len(ONE) - 1, len(ONE), len(ONE) + 1])
def test_several_blobs_come_one_behind_the_other_in_pieces_of_any_size(tmp_path: Path, cut: int) -> None:
    cache, whole = Cache(tmp_path, 100), ONE + TWO
    cache.fetch_all(SIZES, pouring(whole[:cut], whole[cut:]))
    for data in (ONE, TWO):
        assert digest_of(data) in cache
        assert cache.path(digest_of(data)).read_bytes() == data
    cache.fetch_all(SIZES, pouring(b"is not asked for again"))


def test_only_what_is_not_here_is_asked_for(tmp_path: Path) -> None:
    cache, asked = Cache(tmp_path, 100), []
    cache.put(digest_of(ONE), [ONE], 100)

    def source(digests: tuple[str, ...], file: Sink, progress: Progress) -> None:
        asked.append(digests)
        file.write(TWO)

    cache.fetch_all(SIZES, source)
    assert asked == [(digest_of(TWO),)]


@pytest.mark.parametrize(
    ("pieces", "says"),
    [
        ((ONE, TWO + b"x"), "more bytes came"),
        ((ONE, TWO[:-1]), "the bytes ended before"),
        ((ONE, bytes(len(TWO))), "are others"),
        ((ONE,), "the bytes ended before"),
    ],
)
def test_what_is_whole_stays_and_nothing_else_is_seen(tmp_path: Path, pieces: tuple[bytes, ...], says: str) -> None:
    cache = Cache(tmp_path, 100)
    with pytest.raises(DigestMismatch, match=says):
        cache.fetch_all(SIZES, pouring(*pieces))
    whole = [digest_of(ONE)] + ([digest_of(TWO)] if says == "more bytes came" else [])
    found = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert sorted(path.name for path in found) == sorted(digest.replace(":", "-") for digest in whole)
    assert all(digest in cache for digest in whole)


def test_a_transfer_that_breaks_leaves_nothing_half_written(tmp_path: Path) -> None:
    cache = Cache(tmp_path, 100)

    def source(digests: tuple[str, ...], file: Sink, progress: Progress) -> None:
        file.write(ONE + TWO[:1])
        raise ConnectionError

    with pytest.raises(ConnectionError):
        cache.fetch_all(SIZES, source)
    assert [path.name for path in tmp_path.rglob("*") if path.is_file()] == [digest_of(ONE).replace(":", "-")]
