"""What a simulation writes down: the updates of an open round, what workers hold, and blobs."""

from __future__ import annotations

from pathlib import Path

from tessera.shared.api.tasks import TaskView
from tessera.shared.methods.base import Plan
from tessera.shared.tensors.lazy import digest_of
from tessera.worker.simulation.blob_folder import SMALL_BYTES, Folder
from tessera.worker.simulation.checkpoint import AcceptedReport, RecordFolder, RoundJournal, UpdateEntry
from tests.support.coordinator import refusing

DIGEST = "sha256:" + "0" * 64


def accepted(task: str, data: bytes) -> UpdateEntry:
    view = TaskView(
        id=task, run="r", round=1, worker=f"{task}/worker", kind="train", state="accepted", token=1, attempts=1
    )
    return UpdateEntry(
        AcceptedReport(view=view, update=DIGEST, plan=Plan(), inline_bytes=len(data), held=(DIGEST,)), data
    )


def test_accepted_updates_are_read_back_until_the_round_is_over(tmp_path: Path) -> None:
    written = RoundJournal(tmp_path / "open")
    updates = [accepted("a", b"one\ntwo"), accepted("b", b"")]
    for update in updates:
        written.add(update)
    assert RoundJournal(tmp_path / "open").all() == written.all() == updates
    written.clear()
    assert RoundJournal(tmp_path / "open").all() == []


def test_an_update_that_was_cut_off_anywhere_is_dropped_and_the_ones_before_stay(tmp_path: Path) -> None:
    path = tmp_path / "open"
    RoundJournal(path).add(accepted("a", b"first"))
    first = path.stat().st_size
    RoundJournal(path).add(accepted("b", b"second"))
    whole = path.read_bytes()
    for size in range(first, len(whole)):
        path.write_bytes(whole[:size])
        assert RoundJournal(path).all() == [accepted("a", b"first")]
        # What follows stands behind what is complete.
        RoundJournal(path).add(accepted("c", b"third"))
        assert RoundJournal(path).all() == [accepted("a", b"first"), accepted("c", b"third")]
    path.write_bytes(whole[: first - 1])
    assert RoundJournal(path).all() == []


def test_what_workers_hold_follows_from_the_open_round_too(tmp_path: Path) -> None:
    records = RecordFolder(tmp_path)
    assert records.downloads() == {}
    records.keep_downloads({"a/worker": frozenset({"x"}), "b/worker": frozenset({"x"}), "": frozenset()})
    records.open.add(accepted("b", b""))
    expected = {"a/worker": frozenset({"x"}), "b/worker": frozenset({DIGEST}), "": frozenset[str]()}
    assert RecordFolder(tmp_path).downloads() == expected


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


def test_a_lent_blob_is_on_no_disk_and_gone_once_it_is_removed(tmp_path: Path) -> None:
    folder = Folder(tmp_path)
    folder.lend(DIGEST, b"lent")
    assert (folder.read(DIGEST), folder.size(DIGEST), folder.has_blob(DIGEST)) == (b"lent", 4, False)
    folder.remove([DIGEST])
    with refusing("not-found"):
        folder.read(DIGEST)
