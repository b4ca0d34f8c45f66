"""Hash chains: a changed entry is found, and a full disk costs no entry that was committed."""

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
from tessera.worker.state.database import DATABASE_FILE, StateDatabase
from tessera.worker.state.hash_chain import Chain, ChainError
from tests.support.chain_rows import ChainRows


def filled(folder: Path, count: int, **detail: str) -> Chain[SiteAuditEntry]:
    for number in range(count):
        Audit(folder, "w").record("task.fail", None, number=number, **detail)
    return Chain(StateDatabase.of(folder), "audit", SiteAuditEntry)


def test_entries_come_back_in_their_order_each_with_the_digest_of_the_one_before(tmp_path: Path) -> None:
    entries = filled(tmp_path, 5).read()
    assert [entry.seq for entry in entries] == [0, 1, 2, 3, 4]
    assert [entry.previous for entry in entries[1:]] == [entry.digest for entry in entries[:-1]]


@pytest.mark.parametrize("line", range(4))
def test_a_line_that_was_changed_or_taken_out_is_found(tmp_path: Path, line: int) -> None:
    chain = filled(tmp_path, 5)
    path = ChainRows(tmp_path, "audit")
    lines = path.lines()
    path.write_bytes(b"".join([*lines[:line], lines[line].replace(b"task.fail", b"task.drop"), *lines[line + 1 :]]))
    with pytest.raises(ChainError, match=f"entry {line + 1}"):
        chain.read()
    path.write_bytes(b"".join(lines[:line] + lines[line + 1 :]))
    with pytest.raises(ChainError, match=f"entry {line + 1}"):
        chain.read()


def test_nothing_is_added_to_an_end_that_was_changed(tmp_path: Path) -> None:
    filled(tmp_path, 3)
    path = ChainRows(tmp_path, "audit")
    path.write_bytes(path.read_bytes().replace(b'"number":2', b'"number":3'))
    with pytest.raises(ChainError, match="last entry was changed"):
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
    audit, chain, journal = Audit(ledgers, "w"), filled(ledgers, 2), ledgers / f"{DATABASE_FILE}-wal"
    disk = Disk([state, ledgers])
    with (
        files_of_at_most(journal.stat().st_size + free),
        pytest.raises(OSError, match=r"Input/output error|No space left") as full,
    ):
        audit.record("worker.stop")
    assert (disk.note(full.value) or "").startswith(f"{ledgers}: ")
    # What was not taken as written has not been written after all.
    assert len(chain.read()) == 2
    Audit(ledgers, "w").record("worker.stop")
    assert len(chain.read()) == 3


def test_names_that_a_full_disk_did_not_take_are_not_left_out_of_the_next_entry(tmp_path: Path) -> None:
    audit, path = Audit(tmp_path, "w"), tmp_path / f"{DATABASE_FILE}-wal"
    filled(tmp_path, 1)
    with files_of_at_most(path.stat().st_size), pytest.raises(OSError, match=r"Input/output error|No space left"):
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
