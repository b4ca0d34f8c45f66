"""Light workers send one file with another last byte."""

from __future__ import annotations

from pathlib import Path

import pytest

from benchmarks.light import LastByteReplaced
from tests.benchmarks.test_costs import quickly


@pytest.mark.parametrize("size", [1, 3, 10, -1])
def test_the_last_byte_alone_is_replaced_however_it_is_read(tmp_path: Path, size: int) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"0123456789")
    with LastByteReplaced(file, b"x") as replaced:
        pieces = list(iter(lambda: replaced.read(size), b""))
        assert b"".join(pieces) == b"012345678x"
        replaced.seek(8)
        assert replaced.read() == b"8x"


@pytest.mark.long
def test_light_workers_send_different_updates_by_each_codec(tmp_path: Path) -> None:
    rows = quickly("memory", tmp_path)["rows"]
    assert [(row["workers"], row["codec"]) for row in rows] == [(3, "raw"), (3, "lossless")]
    # Three updates of a megabyte, and a model of one; coding saves a part of the updates.
    assert rows[0]["received_MB"] == pytest.approx(4, rel=0.01)
    assert 2 < rows[1]["received_MB"] < 3.5
