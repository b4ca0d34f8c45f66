"""Bytes under their digest: whole or not there, even if the writer is killed."""

from __future__ import annotations

import asyncio
import os
import shutil
import signal
import subprocess
import sys
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import pytest

from tessera.coordinator.blobs.staging import OWN, sweep
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
from tessera.coordinator.limits.cache import LruCache
from tessera.shared.problems import NotFound, StoreSpoilt
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import Clock, until
from tests.support.storage import NOW, blobs_in, unfinished

pytestmark = pytest.mark.both_databases(long="postgresql")

INLINE = 100
SIZES = pytest.mark.parametrize("size", [0, 1, INLINE, INLINE + 1, 3_000_000])


@pytest.fixture
def blobs(tmp_path: Path, database: Database) -> Blobs:
    return blobs_in(tmp_path, database, INLINE)


def data_of(size: int) -> bytes:
    return (bytes(range(251)) * (size // 251 + 1))[:size]


def files(blobs: Blobs) -> list[Path]:
    stored = [path for path in (blobs.staging_dir.parent / "blobs").rglob("*") if path.is_file()]
    return [*stored, *unfinished(blobs)]


async def streamed(blobs: Blobs, stored: StoredBlob, start: int, stop: int) -> bytes:
    return b"".join([piece async for piece in blobs.stream(stored, start, stop)])


@pytest.mark.both_databases
@SIZES
def test_what_was_saved_is_read_opened_and_streamed(blobs: Blobs, size: int) -> None:
    data = data_of(size)
    stored = blobs.save([data[: size // 2], data[size // 2 :]])
    assert (stored.digest, stored.size, blobs.size(stored.digest)) == (digest_of(data), size, size)
    assert blobs.read(stored.digest) == data
    start, stop = size // 3, size // 2
    with blobs.open(stored.digest) as file:
        file.seek(start)
        assert file.read(stop - start) == data[start:stop]
        assert file.seek(0, 2) == size
    assert asyncio.run(streamed(blobs, stored, start, stop)) == data[start:stop]


@SIZES
def test_small_blobs_live_in_the_row_and_large_ones_in_the_store(blobs: Blobs, size: int) -> None:
    stored = blobs.save([data_of(size)])
    assert (stored.inline is not None) == (size <= INLINE)
    assert len(files(blobs)) == (size > INLINE)


def test_a_file_that_was_written_long_ago_is_young_when_it_is_stored(blobs: Blobs) -> None:
    """Garbage collection would remove an old file that has no row yet."""
    data, path = data_of(INLINE + 1), blobs.staging_dir / "upload-of-yesterday"
    path.write_bytes(data)
    os.utime(path, (1, 1))
    stored = blobs.adopt(path, digest_of(data), len(data))
    assert not blobs.discard(stored.digest, before=1000.0)


@pytest.mark.both_databases
def test_the_same_bytes_twice_are_one_blob(blobs: Blobs, database: Database) -> None:
    for size in (5, 5000):
        first, again = blobs.save([data_of(size)]), blobs.save([data_of(size)])
        assert first == again
    with database.snapshot() as session:
        assert session.connection().exec_driver_sql("SELECT count(*) FROM blobs").scalar() == 2
    assert len(files(blobs)) == 1


@pytest.mark.both_databases
def test_a_blob_exists_only_once_it_is_recorded(blobs: Blobs, database: Database) -> None:
    stored = blobs.put([data_of(5000)])
    for call in (blobs.read, blobs.size, blobs.open):
        with pytest.raises(NotFound):
            call(stored.digest)
    with database.transaction() as session:
        blobs.record(session, NOW, [stored, stored])
    assert blobs.read(stored.digest) == data_of(5000)


def test_a_source_that_breaks_off_leaves_nothing(blobs: Blobs) -> None:
    def breaking() -> object:
        yield data_of(5000)
        raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        blobs.put(breaking())  # type: ignore[arg-type]
    assert files(blobs) == []


KILLED = """
import sys, time
from pathlib import Path
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database
folder = Path(sys.argv[1])
blobs = Blobs(Database(sys.argv[2]), str(folder / "blobs"), folder / "staging", 100, 1 << 16)
def endless():
    while True:
        yield bytes(1 << 20)
        time.sleep(0.01)
blobs.save(endless())
"""


def test_a_writer_that_is_killed_midway_leaves_no_blob_and_the_sweep_clears_up(
    blobs: Blobs, database: Database, tmp_path: Path
) -> None:
    url = database.url.render_as_string(hide_password=False)
    with subprocess.Popen([sys.executable, "-c", KILLED, str(tmp_path), url]) as writer:
        try:
            until(lambda: any(path.stat().st_size > 1 << 20 for path in blobs.staging_dir.glob("put-*/*")))
            # Whoever lives keeps what it writes.
            assert blobs.sweep() == 0
            assert len(files(blobs)) == 1
        finally:
            writer.send_signal(signal.SIGKILL)
    assert [path.parent.parent.name for path in files(blobs)] == ["staging"]
    upload = blobs.staging_dir / "upload-unfinished"
    upload.write_bytes(b"half")
    assert blobs.sweep() == 1
    assert files(blobs) == [upload]


def test_a_store_that_takes_nothing_says_so(blobs: Blobs) -> None:
    assert blobs.writable()
    blobs.staging_dir.rmdir()
    assert not blobs.writable()


def test_reading_a_large_blob_in_small_pieces_copies_no_more_than_these(blobs: Blobs) -> None:
    stored, copied = blobs.save([data_of(3_000_000)]), 0
    with blobs.open(stored.digest) as file:
        tracemalloc.start()
        try:
            while piece := file.read(4096):
                copied += len(piece)
            peak = tracemalloc.get_traced_memory()[1]
        finally:
            tracemalloc.stop()
    assert copied == stored.size
    assert peak < 100_000


@pytest.mark.both_databases
def test_a_batch_is_safe_at_its_end_and_takes_writers_in_several_threads(blobs: Blobs, database: Database) -> None:
    def write(size: int) -> StoredBlob:
        with batch.writer() as writer:
            writer.write(data_of(size))
            return writer.finish()

    sizes = [5, 5000, 300_000, 3_000_000, 5000]
    with blobs.batch() as batch, ThreadPoolExecutor(3) as pool:
        stored = list(pool.map(write, sizes))
    with database.transaction() as session:
        blobs.record(session, NOW, stored)
    assert [blobs.read(blob.digest) for blob in stored] == [data_of(size) for size in sizes]
    assert {path.parent.parent.name for path in files(blobs)} == {"blobs"}


def test_a_batch_that_breaks_off_leaves_no_unfinished_file(blobs: Blobs) -> None:
    def broken() -> None:
        with blobs.batch() as batch:
            with batch.writer() as writer:
                writer.write(data_of(5000))
                writer.finish()
            with batch.writer() as writer:
                writer.write(data_of(6000))
                raise RuntimeError("the source is gone")

    with pytest.raises(RuntimeError, match="the source is gone"):
        broken()
    assert unfinished(blobs) == []


def test_what_came_before_a_process_is_hashed_once_more_and_what_came_since_is_not(
    tmp_path: Path, database: Database
) -> None:
    early = blobs_in(tmp_path, database, INLINE)
    old = early.save([data_of(5000)])
    url, clock = database.url.render_as_string(hide_password=False), Clock(NOW + 1)
    with closing(Database(url, clock)) as at_one, closing(Database(url, lambda: NOW + 2)) as at_two:
        late, beside = blobs_in(tmp_path, at_one, INLINE), blobs_in(tmp_path, at_two, INLINE)
        new = beside.save([data_of(6000)])
        for path in files(early):
            path.write_bytes(b"spoilt" + path.read_bytes()[6:])
        with pytest.raises(StoreSpoilt):
            late.open(old.digest)
        # After the clock was set back, what has a later instant came before the process.
        with pytest.raises(StoreSpoilt):
            blobs_in(tmp_path, at_one, INLINE).open(new.digest)
        clock.advance(1)
        with late.open(new.digest) as file:
            assert file.read(6) == b"spoilt"


def test_a_folder_that_nobody_has_locked_yet_is_made_anew(tmp_path: Path) -> None:
    (tmp_path / f"{OWN}begun").mkdir()
    assert sweep(tmp_path) == 0
    assert list(tmp_path.iterdir()) == []


def test_a_writer_whose_folder_was_cleaned_away_makes_another(blobs: Blobs) -> None:
    blobs.save([data_of(5000)])
    for folder in blobs.staging_dir.iterdir():
        shutil.rmtree(folder)
    assert blobs.read(blobs.save([data_of(6000)]).digest) == data_of(6000)


def test_of_names_the_latest_are_remembered() -> None:
    recent: LruCache[None] = LruCache(2)
    for name in ("a", "b", "a", "c"):
        recent.keep(name, None)
    assert [name in recent for name in "abc"] == [True, False, True]
    recent.drop("a")
    recent.drop("never there")
    recent.keep("d", None)
    assert [name in recent for name in "acd"] == [False, True, True]
