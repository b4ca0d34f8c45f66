"""Chained files: what was changed is found, a crash costs half a line, and an addition reads only the end."""

from __future__ import annotations

import multiprocessing
import resource
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path

import pytest

from tessera.worker.faults.disk import Disk
from tessera.worker.state.audit import Audit, SiteAuditEntry
from tessera.worker.state.hash_chain import TAIL_BYTES, Chain, ChainError


def filled(folder: Path, count: int, **detail: str) -> Chain[SiteAuditEntry]:
    for number in range(count):
        Audit(folder, "w").record("task.fail", None, number=number, **detail)
    return Chain(folder / "audit.jsonl", SiteAuditEntry)


def test_entries_come_back_in_their_order_each_with_the_digest_of_the_one_before(tmp_path: Path) -> None:
    entries = filled(tmp_path, 5).read()
    assert [entry.seq for entry in entries] == [0, 1, 2, 3, 4]
    assert [entry.previous for entry in entries[1:]] == [entry.digest for entry in entries[:-1]]
    assert (tmp_path / "audit.jsonl").stat().st_mode & 0o077 == 0


@pytest.mark.parametrize("line", range(4))
def test_a_line_that_was_changed_or_taken_out_is_found(tmp_path: Path, line: int) -> None:
    chain = filled(tmp_path, 5)
    path = tmp_path / "audit.jsonl"
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([*lines[:line], lines[line].replace(b"task.fail", b"task.drop"), *lines[line + 1 :]]))
    with pytest.raises(ChainError, match=f"line {line + 1}"):
        chain.read()
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(ChainError, match=f"line {line + 1}"):
        chain.read()


def test_half_a_line_is_replaced_by_the_next_entry(tmp_path: Path) -> None:
    chain = filled(tmp_path, 3)
    path = tmp_path / "audit.jsonl"
    whole = path.read_bytes()
    for cut in (1, 10, len(whole.splitlines()[-1])):
        path.write_bytes(whole[:-cut])
        Audit(tmp_path, "w").record("worker.stop")
        assert [entry.action for entry in chain.read()] == ["task.fail", "task.fail", "worker.stop"]


def test_an_entry_longer_than_what_is_read_of_the_end_is_followed_too(tmp_path: Path) -> None:
    chain = filled(tmp_path, 3, text="x" * (TAIL_BYTES + 7))
    assert len(chain.read()) == 3


def test_nothing_is_added_to_an_end_that_was_changed(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    path = tmp_path / "audit.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"number":2', b'"number":3'))
    with pytest.raises(ChainError, match="last line was changed"):
        Audit(tmp_path, "w").record("worker.stop")


@contextmanager
def files_of_at_most(nbytes: int) -> Iterator[None]:
    """A full disk: files grow to so many bytes."""
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (nbytes, before[1]))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)


@pytest.mark.parametrize("free", [0, 20])
def test_a_full_disk_of_a_ledger_is_not_taken_for_that_of_the_state_folder(tmp_path: Path, free: int) -> None:
    state, ledgers = tmp_path / "state", tmp_path / "ledgers"
    chain, path = filled(ledgers, 2), ledgers / "audit.jsonl"
    disk = Disk([state, ledgers])
    with (
        files_of_at_most(path.stat().st_size + free),
        pytest.raises(OSError, match="File too large") as full,
    ):
        Audit(ledgers, "w").record("worker.stop")
    assert (disk.note(full.value) or "").startswith(f"{ledgers}: ")
    # What was not taken as written has not been written after all.
    assert len(chain.read()) == 2
    Audit(ledgers, "w").record("worker.stop")
    assert len(chain.read()) == 3


def test_names_that_a_full_disk_did_not_take_are_not_left_out_of_the_next_entry(tmp_path: Path) -> None:
    filled(tmp_path, 1)
    audit, path = Audit(tmp_path, "w"), tmp_path / "audit.jsonl"
    with files_of_at_most(path.stat().st_size), pytest.raises(OSError, match="File too large"):
        audit.record("update.leave", None, **audit.named(["head"]))
    first = audit.record("update.leave", None, **audit.named(["head"]))
    second = audit.record("update.leave", None, **audit.named(["head"]))
    assert ("block_names" in first.detail, "block_names" in second.detail) == (True, False)


def _add(folder: Path) -> None:
    for _ in range(20):
        Audit(folder, "w").record("worker.start")


def test_workers_that_share_a_chain_do_not_break_it(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    adding = [context.Process(target=_add, args=(tmp_path,)) for _ in range(3)]
    for process in adding:
        process.start()
    for process in adding:
        process.join()
    assert len(Audit(tmp_path, "w").read()) == 60


def test_a_chain_is_what_it_was_in_whatever_zone_it_is_read(tmp_path: Path) -> None:
    (entry,) = filled(tmp_path, 1).read()
    assert entry.at.tzinfo is not None
    assert abs((datetime.now(UTC) - entry.at).total_seconds()) < 60
