"""What is removed when it is no longer needed, and above all what is not."""

from __future__ import annotations

import io
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import cast

import numpy as np
import pytest
from sqlalchemy import select, update

from tessera.coordinator.db import audit
from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.snapshots import MAX_UNEVALUATED
from tessera.coordinator.db.tables import BlobRow, SiteRow, TaskRow, UploadRow
from tessera.coordinator.maintenance.garbage_collection import RemovalCounts, Retention
from tessera.coordinator.services import Services, assemble
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.rounds.versions import States
from tests.support import databases
from tests.support.coordinator import Clock, LiveCoordinator, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import PART, announced

MODEL = small_model()
START = values(MODEL)
HOUR = 3600.0


@pytest.fixture
def live(tmp_path: Path, clock: Clock) -> Iterator[LiveCoordinator]:
    # Every blob is a file, so that files are seen to go.
    patient = {"lease_seconds": 86_400, "liveness_seconds": 1e9}
    with LiveCoordinator(tmp_path, clock=clock, inline_bytes=1, submission_bytes=0, **patient) as coordinator:
        yield coordinator


def retention(live: LiveCoordinator, versions: int | None = None) -> Retention:
    return replace(live.services.retention, versions=versions)


@contextmanager
def at_rest(live: LiveCoordinator) -> Iterator[Services]:
    """The parts of a coordinator that was stopped."""
    services = assemble(live.settings)
    yield services
    services.database.close()


def play(client: Client, worker: ScriptedWorker, run: Run, number: int) -> str:
    """One round of one worker; the digest of its update."""
    task = worker.take()
    worker.train(task, step=float(number))
    until(lambda: client.run(run.id).version.number == number)
    return task.id


def played(live: LiveCoordinator, rounds: int, **spec: object) -> tuple[Client, Run, ScriptedWorker, list[str]]:
    client = live.client()
    worker = ScriptedWorker(live.client("site", "a")).enrol()
    # The clock is put on by days: the round that is open must not end by it.
    patient = Cohort(size=1, deadline_seconds=30 * 86400)
    run = start_run(client, MODEL, START, rounds=rounds + 1, cohort=patient, **spec)
    tasks = [play(client, worker, run, number) for number in range(1, rounds + 1)]
    with live.services.database.snapshot() as session:
        updates = [session.get_one(TaskRow, task).update_digest or "" for task in tasks]
    return client, run, worker, updates


def stored(live: LiveCoordinator) -> set[str]:
    """The digests that have both a row and a file."""
    with live.services.database.snapshot() as session:
        rows = set(session.scalars(select(BlobRow.digest)))
    files = {f"sha256:{path.name}" for path in Path(live.settings.blob_url).glob("*/*")}
    assert rows == files
    return rows


def exported(client: Client, run: Run, number: int) -> bytes:
    file = io.BytesIO()
    client.export(run.id, file, number)
    return file.getvalue()


def test_updates_go_when_their_round_has_ended_long_enough_and_nothing_else_does(
    live: LiveCoordinator, clock: Clock
) -> None:
    client, run, worker, updates = played(live, 2)
    before = stored(live)
    clock.advance(HOUR - 1)
    assert not retention(live).collect()
    clock.advance(2)
    assert retention(live).collect().updates == 2
    assert stored(live) == before - set(updates)
    # The versions are all there, and the run goes on.
    for number in range(3):
        assert exported(client, run, number)
    play(client, worker, run, 3)


def test_the_updates_of_a_round_that_is_not_over_stay(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    workers = [ScriptedWorker(live.client("site", site)).enrol() for site in "ab"]
    run = start_run(client, MODEL, START, cohort=Cohort(size=2, quorum=2, deadline_seconds=30 * 86400))
    first, second = (worker.take() for worker in workers)
    workers[0].train(first)
    before = stored(live)
    clock.advance(86400 - 1)
    retention(live).collect()
    # What was announced for a run that is live is of that run; all else is the update.
    assert stored(live) == before
    workers[1].client.heartbeat(second.id, second.token)
    workers[1].train(second)
    until(lambda: client.run(run.id).state == "completed")


def test_what_nobody_refers_to_goes_after_a_day_and_may_come_again(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    digest = client.put_bytes(b"of no use to anybody")
    clock.advance(86400 - 1)
    assert not retention(live).collect()
    clock.advance(2)
    assert retention(live).collect().blobs == 1
    assert not stored(live)
    with refusing("not-found"):
        client.read_blob(digest)
    assert client.put_bytes(b"of no use to anybody") == digest
    assert client.read_blob(digest) == b"of no use to anybody"


def test_what_is_announced_again_stays_for_another_day(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    digest = client.put_bytes(b"wanted after all")
    clock.advance(86400 - 1)
    client.put_bytes(b"wanted after all")
    clock.advance(86400 - 1)
    assert not retention(live).collect()
    assert client.read_blob(digest) == b"wanted after all"


def test_an_upload_that_nobody_goes_on_with_goes_with_its_bytes(live: LiveCoordinator, clock: Clock) -> None:
    http = live.http()
    headers = {**announced(b"abandoned"), "Idempotency-Key": "k"}
    place = http.post("/v1/uploads", headers=headers).headers["Location"]
    assert http.patch(place, headers={**PART, "Upload-Offset": "0"}, content=b"12345").status_code == 204
    assert list(live.settings.staging_dir.glob("upload-*"))
    clock.advance(86400 + 1)
    assert retention(live).collect().uploads == 1
    assert not list(live.settings.staging_dir.glob("upload-*"))
    assert http.head(place).status_code == 404


def test_the_bytes_of_an_upload_that_was_completed_without_them_go_too(live: LiveCoordinator, clock: Clock) -> None:
    http, services = live.http("site", "a"), live.services
    stored = services.blobs.put([b"an update"])
    # More than it has, as by a site that means to fill the disk.
    place = http.post("/v1/uploads", headers=announced(b"an update", 1_000_000)).headers["Location"]
    assert http.patch(place, headers={**PART, "Upload-Offset": "0"}, content=b"rubbish").status_code == 204
    with services.database.transaction() as session:
        site = session.scalars(select(SiteRow.id)).one()
        owner = session.scalars(select(UploadRow.owner)).one()
        services.uploads.enter(session, clock(), owner, stored, site_id=site)
    assert list(live.settings.staging_dir.glob("upload-*"))
    clock.advance(86400 + 1)
    assert retention(live).collect().strays == 1
    assert not list(live.settings.staging_dir.glob("upload-*"))


def test_a_file_that_no_row_knows_of_goes_and_one_that_is_new_stays(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    digest = client.put_bytes(b"known")
    folder = Path(live.settings.blob_url) / "ab"
    folder.mkdir()
    old, new = folder / f"ab{'0' * 62}", folder / f"ab{'1' * 62}"
    for path in (old, new):
        path.write_bytes(b"a merge was killed before it was entered")
    os.utime(new, (clock() - 60, clock() - 60))
    assert retention(live).collect() == RemovalCounts(strays=1)
    assert (old.exists(), new.exists()) == (False, True)
    assert client.read_blob(digest) == b"known"


def test_bytes_that_came_again_while_their_row_went_keep_their_file(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    digest = client.put_bytes(b"the same bytes")
    path = Path(live.settings.blob_url) / digest[7:9] / digest[7:]
    clock.advance(86400 + 1)
    # As if another process had put them there a moment ago, and were about to enter them.
    os.utime(path, (clock(), clock()))
    assert retention(live).collect().blobs == 1
    assert path.read_bytes() == b"the same bytes"


def test_a_removal_that_was_cut_off_is_put_right_at_the_next_start(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, inline_bytes=1) as live:
        digest = live.client().put_bytes(b"nearly lost")
        path = Path(live.settings.blob_url) / digest[7:9] / digest[7:]
        path.rename(live.settings.staging_dir / f"gone-{digest[7:]}")
    with LiveCoordinator(tmp_path, inline_bytes=1) as live:
        assert live.client().read_blob(digest) == b"nearly lost"


def test_an_update_that_was_removed_before_it_was_handed_in_is_asked_for_again(
    live: LiveCoordinator, clock: Clock
) -> None:
    client = live.client()
    worker = ScriptedWorker(live.client("site", "a")).enrol()
    start_run(client, MODEL, START, cohort=Cohort(size=1, deadline_seconds=30 * 86400))
    task = worker.take()
    name = next(iter(START))
    digest = worker.upload(task, {name: START[name] + 1})
    clock.advance(HOUR + 1)
    assert replace(retention(live), unused_seconds=HOUR).collect().blobs == 1
    with refusing("invalid", "was not uploaded"):
        worker.submit(task, digest)
    assert worker.submit(task, worker.upload(task, {name: START[name] + 1})).state == "accepted"


def test_an_update_that_is_handed_in_late_is_kept_as_long_as_any(live: LiveCoordinator, clock: Clock) -> None:
    client, _, worker, _ = played(live, 1)
    task = worker.take()
    digest = worker.upload(task, {"head.weight": START["head.weight"] + 5})
    clock.advance(40)
    worker.submit(task, digest)
    until(lambda: client.task(task.id).is_accepted)
    clock.advance(HOUR - 20)
    retention(live).collect()
    with live.services.database.snapshot() as session:
        assert session.get(BlobRow, digest) is not None
        assert session.scalars(select(UploadRow).where(UploadRow.digest == digest)).one().complete


# ---------------------------------------------------------------- versions


def test_older_versions_are_retired_and_the_first_and_latest_stay(live: LiveCoordinator, clock: Clock) -> None:
    client, run, worker, _ = played(live, 4)
    whole = {number: exported(client, run, number) for number in (0, 3, 4)}
    freed = retention(live, versions=2).collect()
    assert freed.versions == 2
    clock.advance(86400 + 1)
    assert retention(live, versions=2).collect().bytes > 0
    versions = {version.number: version for version in client.versions(run.id)}
    assert [n for n, version in versions.items() if version.retired_at] == [1, 2]
    for number in (1, 2):
        with refusing("version-retired", "keep_versions"):
            exported(client, run, number)
    assert {number: exported(client, run, number) for number in whole} == whole
    # Its manifest is still there, for whoever would know what it was.
    assert client.manifest(versions[2].digest).blocks
    stored(live)
    play(client, worker, run, 5)
    with live.services.database.snapshot() as session:
        assert audit.broken_at(session) is None


def test_nothing_is_retired_twice_or_while_all_are_wanted(live: LiveCoordinator) -> None:
    played(live, 2)
    assert not retention(live, versions=2).collect().versions
    assert retention(live, versions=1).collect().versions == 1
    assert not retention(live, versions=1).collect().versions


def test_a_version_that_is_yet_to_be_measured_stays(live: LiveCoordinator, clock: Clock) -> None:
    # More than one look considers.
    last = MAX_UNEVALUATED + 2
    client, run, _, _ = played(live, last, evaluation=Evaluation(dataset="central", every=1))
    assert not retention(live, versions=1).collect().versions
    judge = ScriptedWorker(live.client("site", "judge"), kinds=("evaluate",), datasets={"central": 5}).enrol()
    clock.advance(1)
    measured: set[int] = set()
    while len(measured) <= last:
        task = judge.take()
        judge.evaluate(task, accuracy=0.5)
        measured.add(task.version.number)
    assert measured == set(range(last + 1))
    assert retention(live, versions=1).collect().versions == last - 1
    assert exported(client, run, last)


def test_versions_of_an_ended_run_wait_for_no_evaluation(live: LiveCoordinator) -> None:
    client, run, _, _ = played(live, 2, evaluation=Evaluation(dataset="central", every=1))
    until(lambda: list(client.rounds(run.id))[-1].state == "open")
    client.set_run_state(run.id, "paused")
    assert not retention(live, versions=1).collect().versions
    client.set_run_state(run.id, "cancelled")
    # The round that was open waits no longer for version 2.
    until(lambda: list(client.rounds(run.id))[-1].state == "abandoned")
    assert retention(live, versions=1).collect().versions == 1


def test_an_update_that_is_not_merged_yet_stays_with_the_version_that_it_started_from(
    live: LiveCoordinator, clock: Clock
) -> None:
    client, run, _, updates = played(live, 3)
    whole = exported(client, run, 1)
    # As if the second round's update waited for a later version.
    waiting = update(TaskRow).where(TaskRow.update_digest == updates[1])
    with live.services.database.transaction() as session:
        session.execute(waiting.values(state="accepted", merged_in=None))
    clock.advance(86400 + 1)
    freed = retention(live, versions=1).collect()
    assert (freed.versions, freed.updates) == (1, 2)
    assert updates[1] in stored(live)
    assert exported(client, run, 1) == whole
    with live.services.database.transaction() as session:
        session.execute(waiting.values(state="merged", merged_in=3))
    freed = retention(live, versions=1).collect()
    assert (freed.versions, freed.updates) == (1, 1)


def test_a_version_that_sites_measure_stays_for_those_that_come_later(live: LiveCoordinator, clock: Clock) -> None:
    played(live, 3, evaluation=Evaluation(sites=True, every=2))
    assert retention(live, versions=1).collect().versions
    clock.advance(86400 + 1)
    retention(live, versions=1).collect()
    datasets = {"datasets": {"data": 10}, "held_out": {"data": 4}}
    late = ScriptedWorker(live.client("site", "late"), kinds=("train", "evaluate"), forgets=True, **datasets)
    task = late.take()
    assert (task.kind, task.version.number) == ("evaluate", 2)
    assert late.fetch(task)
    late.evaluate(task, accuracy=0.5)


@dataclass
class WatchedStates:
    """Versions; before a manifest is read, something else happens."""

    states: States
    before: Callable[[], object]

    def manifest(self, digest: str) -> Manifest:
        self.before()
        return self.states.manifest(digest)


@pytest.mark.both_databases
def test_no_transaction_is_open_while_manifests_are_read(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, inline_bytes=1) as live:
        played(live, 2)
    with at_rest(live) as services, closing(Database(databases.url_in(tmp_path))) as other:
        watched = cast("States", WatchedStates(services.states, partial(databases.end_idle_transactions, other)))
        assert replace(services.retention, states=watched, versions=1).collect().versions == 1


def test_blocks_of_a_version_that_is_committed_while_manifests_are_read_stay(
    live: LiveCoordinator, clock: Clock
) -> None:
    client = live.client()
    worker = ScriptedWorker(live.client("site", "a")).enrol()
    # Small integers, so that a head that comes again is the same to the bit.
    start = {**START, "head.weight": np.zeros_like(START["head.weight"])}
    run = start_run(client, MODEL, start, rounds=9, cohort=Cohort(size=1, deadline_seconds=30 * 86400))
    heads = iter((1, 2, 3, 1))

    def go_on(number: int) -> None:
        task = worker.take()
        worker.submit(task, worker.upload(task, {"head.weight": np.full_like(start["head.weight"], next(heads))}))
        until(lambda: client.run(run.id).version.number == number)

    for number in (1, 2, 3):
        go_on(number)
    ahead = [4]

    def meanwhile() -> None:
        if ahead:
            go_on(ahead.pop())

    watched = cast("States", WatchedStates(live.services.states, meanwhile))
    assert replace(retention(live, versions=1), states=watched).collect().versions == 2
    first, *_, last = (client.manifest(version.digest).blocks["head.weight"] for version in client.versions(run.id))
    assert first != last
    clock.advance(86400 + 1)
    retention(live, versions=1).collect()
    assert exported(client, run, 4)


def test_blocks_that_a_later_version_shares_stay(live: LiveCoordinator, clock: Clock) -> None:
    client = live.client()
    worker = ScriptedWorker(live.client("site", "a")).enrol()
    run = start_run(client, MODEL, START, rounds=4, cohort=Cohort(size=1))
    head = START["head.weight"]
    for number in range(1, 4):
        task = worker.take()
        worker.submit(task, worker.upload(task, {"head.weight": head + np.float32(number)}))
        until(lambda n=number: client.run(run.id).version.number == n)
    whole = exported(client, run, 3)
    retention(live, versions=1).collect()
    clock.advance(86400 + 1)
    retention(live, versions=1).collect()
    assert exported(client, run, 3) == whole
    assert exported(client, run, 0)


def test_a_conductor_keeps_house_of_its_own_accord(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, gc_interval_seconds=0.05, inline_bytes=1) as live:
        house = live.services.retention
        path = Path(live.settings.blob_url) / "cd" / f"cd{'0' * 62}"
        path.parent.mkdir()
        path.write_bytes(b"stray")
        os.utime(path, (1, 1))
        house.start()
        until(lambda: not path.exists())
        house.end()
