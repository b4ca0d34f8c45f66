"""Mapped files: read like any other, and without a copy."""

from __future__ import annotations

import io
import re
from functools import partial
from pathlib import Path

import pytest

from tessera.shared.tensors.mmap_file import AROUND_BYTES, RESIDENT_BYTES, MappedFile, mapped, taken

DATA = bytes(range(251)) * 20_000


@pytest.fixture
def path(tmp_path: Path) -> Path:
    (tmp_path / "file").write_bytes(DATA)
    return tmp_path / "file"


def test_it_reads_and_seeks_like_a_file(path: Path) -> None:
    with MappedFile(partial(mapped, path)) as file:
        assert (file.read(5), file.tell()) == (DATA[:5], 5)
        assert file.seek(-3, io.SEEK_END) == len(DATA) - 3
        assert (file.read(10), file.read(10)) == (DATA[-3:], b"")
        file.seek(7)
        buffer = bytearray(4)
        assert (file.readinto(memoryview(buffer)), bytes(buffer)) == (4, DATA[7:11])
        assert file.read() == DATA[11:]


def test_what_was_taken_outlives_the_file_even_its_removal(path: Path) -> None:
    with MappedFile(partial(mapped, path)) as file:
        first = file.take(3_000_000)
        path.unlink()
        file.release()
    assert first == DATA[:3_000_000]


def test_two_readers_of_one_map_do_not_disturb_each_other(path: Path) -> None:
    found = mapped(path)
    with MappedFile(lambda: found) as one:
        one.read(4_000_000)
        with MappedFile(lambda: found) as other:
            assert other.read() == DATA
        assert one.read() == DATA[4_000_000:]


def test_an_empty_file_can_be_read(tmp_path: Path) -> None:
    (tmp_path / "empty").touch()
    with MappedFile(partial(mapped, tmp_path / "empty")) as file:
        assert file.read() == b""


def test_any_file_is_taken_from(path: Path) -> None:
    with path.open("rb") as file:
        assert taken(io.BytesIO(DATA), 4) == taken(file, 4) == DATA[:4]


def test_of_many_files_read_side_by_side_few_are_mapped_and_few_pages_stay_in_memory(tmp_path: Path) -> None:
    paths = [tmp_path / str(number) for number in range(300)]
    for path in paths:
        path.write_bytes(bytes(1 << 20))
    files = [MappedFile(partial(mapped, path)) for path in paths]
    for start in range(0, 1 << 20, 1 << 18):
        for file in files:
            assert file.tell() == start
            assert not any(file.take(1 << 18))
    pages = re.findall(rf" {tmp_path}/\d+\n.*?\nRss: +(\d+) kB", Path("/proc/self/smaps").read_text(), re.DOTALL)
    assert sum(map(int, pages)) << 10 <= RESIDENT_BYTES + AROUND_BYTES
    # Each counts as half a mebibyte at least.
    assert len(pages) <= RESIDENT_BYTES // AROUND_BYTES + 1
    open_ = [link.readlink() for link in Path("/proc/self/fd").iterdir() if link.is_symlink()]
    assert sum(name.is_relative_to(tmp_path) for name in open_) == len(pages)
    for file in files:
        file.close()
