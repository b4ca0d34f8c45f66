"""How much may be asked, announced and stored; and what happens when the disk or the memory runs out."""

from __future__ import annotations

import errno
import os
import re
import resource
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import httpx
import numpy as np
import pytest
from fastapi import FastAPI
from fastapi.testclient import TestClient
from sqlalchemy import delete
from structlog.testing import capture_logs

from tessera.coordinator.api import errors
from tessera.coordinator.blobs import quota
from tessera.coordinator.blobs.quota import Quota
from tessera.coordinator.conductor.failures import FULL_SECONDS
from tessera.coordinator.db.tables import RunRow, UploadRow
from tessera.coordinator.limits import disk
from tessera.coordinator.limits.disk import STEP_BYTES, DiskSpace, is_full
from tessera.coordinator.limits.memory import Memory, used_bytes
from tessera.coordinator.limits.rate import MAX_KEYS, Rate
from tessera.coordinator.services import _bytes_per_day
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.shared.host_memory import groups
from tessera.shared.problems import Busy, StoreFull
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import Clock, LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import PART, announced, connected, head
from tests.support.storage import add_worker, blobs_in, migrated


def send(http: httpx.Client, data: bytes) -> httpx.Response:
    return http.post("/v1/uploads", headers=announced(data, complete=True), content=data)


def append(http: httpx.Client, location: str, offset: int, data: bytes) -> httpx.Response:
    return http.patch(location, headers={**PART, "Upload-Offset": str(offset)}, content=data[offset:])


# ---------------------------------------------------------------- rates


def test_a_bucket_lets_a_burst_through_and_then_so_many_a_second() -> None:
    clock = Clock(0.0)
    rate = Rate(per_second=2.0, burst=3, clock=clock)
    assert [rate.take("a") for _ in range(3)] == [0.0, 0.0, 0.0]
    # The fourth has to wait for half a second, and to ask in vain costs nothing.
    assert [rate.take("a"), rate.take("a")] == [0.5, 0.5]
    assert rate.take("b") == 0.0
    clock.advance(0.5)
    assert [rate.take("a"), rate.take("a")] == [0.0, 0.5]
    clock.advance(100)
    assert [rate.take("a") for _ in range(4)] == [0.0, 0.0, 0.0, 0.5]


def test_buckets_do_not_fill_the_memory() -> None:
    clock = Clock(0.0)
    rate = Rate(per_second=1.0, burst=1, clock=clock)
    for key in range(MAX_KEYS + 10):
        rate.take(str(key))
    assert len(rate._full_at) == MAX_KEYS
    # The latest are remembered.
    assert rate.take(str(MAX_KEYS + 9)) > 0


def test_a_token_that_asks_too_often_is_told_when_to_come_back(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, clock=Clock(), requests_per_second=0.3) as live:
        http, other = live.http("viewer"), live.http("viewer")
        assert [http.get("/v1/runs").status_code for _ in range(3)] == [200, 200, 200]
        answer = http.get("/v1/runs")
        assert "requests_per_second" in refused(answer, 429, "too-many-requests").detail
        assert answer.headers["Retry-After"] == "4"
        assert other.get("/v1/runs").status_code == 200


# ---------------------------------------------------------------- quotas


def test_a_site_may_announce_so_many_bytes_a_day(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, site_bytes_per_day=100) as live:
        site, other, admin = live.http("site", "a"), live.http("site", "b"), live.http("admin")
        assert send(site, b"x" * 60).status_code == 201
        clock.advance(3600)
        answer = send(site, b"y" * 41)
        assert "site_bytes_per_day" in refused(answer, 429, "quota-exceeded").detail
        # The first bytes are a day old in 23 hours.
        assert answer.headers["Retry-After"] == str(23 * 3600)
        # A repeat is no new announcement, another site has a quota of its own, and others than sites have none.
        assert send(site, b"x" * 60).status_code == 201
        assert send(other, b"y" * 41).status_code == 201
        assert send(admin, b"z" * 500).status_code == 201
        assert send(site, b"y" * 40).status_code == 201
        # That an upload is removed gives nothing back.
        with live.services.database.transaction() as session:
            session.execute(delete(UploadRow))
        refused(send(site, b"w"), 429, "quota-exceeded")
        clock.advance(23 * 3600)
        assert send(site, b"y" * 41).status_code == 201


def test_what_a_site_announced_by_a_clock_that_was_ahead_does_not_count(tmp_path: Path) -> None:
    hour, quota = 3600.0, Quota(bytes_per_day=100)
    database = migrated(tmp_path)
    with database.transaction() as session:
        add_worker(session)
        quota.spend(session, 12 * hour, "site", 0, 60)
        quota.spend(session, 10 * hour, "site", 0, 60)
        # Only the second upload counts, also when the clock is there again.
        quota.spend(session, 12 * hour, "site", 0, 40)
        with refusing("quota-exceeded"):
            quota.spend(session, 12 * hour, "site", 0, 1)
    database.close()


def test_another_length_of_the_same_announcement_is_judged_anew(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, site_bytes_per_day=100) as live:
        site = live.http("site", "a")
        data = b"x" * 60
        assert site.post("/v1/uploads", headers=announced(data)).status_code == 201
        assert site.post("/v1/uploads", headers=announced(data, 100)).status_code == 201
        refused(site.post("/v1/uploads", headers=announced(data, 101)), 429, "quota-exceeded")


def test_a_site_may_have_so_many_unfinished_uploads(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(quota, "UNFINISHED_UPLOADS", 2)
    with LiveCoordinator(tmp_path) as live:
        site = live.http("site", "a")
        first, _ = (site.post("/v1/uploads", headers=announced(bytes([n]))) for n in range(2))
        answer = site.post("/v1/uploads", headers=announced(b"third"))
        assert "2 uploads of this site are unfinished" in refused(answer, 429, "quota-exceeded").detail
        assert "Retry-After" in answer.headers
        assert append(site, first.headers["Location"], 0, bytes([0])).status_code == 204
        assert site.post("/v1/uploads", headers=announced(b"third")).status_code == 201


def test_a_site_may_announce_half_of_the_disk_a_day_if_no_setting_says_otherwise(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path) as live:
        disk = os.statvfs(tmp_path)
        assert live.services.uploads.quota.bytes_per_day == disk.f_blocks * disk.f_frsize // 2
    settings = live.settings.model_copy(update={"site_bytes_per_day": 7})
    assert _bytes_per_day(settings, live.services.blobs) == 7
    # How large a store on other machines is nobody tells.
    elsewhere = live.settings.model_copy(update={"blob_url": "s3://bucket"})
    assert _bytes_per_day(elsewhere, live.services.blobs) is None


# ---------------------------------------------------------------- the disk


def reserve_all_but(live: LiveCoordinator, count: int) -> None:
    """Sets the reserve so that there is room for some `count` bytes, by what is free of the disk now."""
    live.services.disk._reserve_bytes = live.services.disk.free_bytes() - count


LARGE = bytes(range(256)) * 16_384  # 4 MiB


def test_what_there_is_no_room_for_is_refused_before_it_is_sent(coordinator: LiveCoordinator) -> None:
    http = coordinator.http("orchestrator")
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    reserve_all_but(coordinator, -(1 << 40))
    for answer in (
        send(http, b"anything"),
        http.post("/v1/uploads", headers=announced(b"anything")),
        append(http, location, 0, LARGE),
    ):
        assert "disk_reserve_bytes" in refused(answer, 503, "store-full").detail
        assert answer.headers["Retry-After"] == "30"
    ready = http.get("/healthz/ready")
    assert (ready.status_code, ready.json()["store_has_space"]) == (200, False)
    reserve_all_but(coordinator, 1 << 30)
    assert append(http, location, 0, LARGE).status_code == 204
    assert http.get("/healthz/ready").json()["store_has_space"]
    assert re.search(r"^tessera_disk_free_bytes [1-9]", http.get("/metrics").text, re.MULTILINE)


def test_what_was_announced_and_not_sent_needs_room_too(coordinator: LiveCoordinator) -> None:
    site, other = coordinator.http("site", "a"), coordinator.http("site", "b")
    share = coordinator.services.disk.free_bytes() // 10

    def announce(http: httpx.Client, name: bytes) -> httpx.Response:
        return http.post("/v1/uploads", headers=announced(name, share))

    # A site may use half of it.
    reserve_all_but(coordinator, 4 * share + share // 2)
    assert [announce(site, name).status_code for name in (b"1", b"2")] == [201, 201]
    assert "disk_reserve_bytes" in refused(announce(site, b"3"), 503, "store-full").detail
    # A repeat needs no more room, and no other site has to wait for what may never be sent.
    assert announce(site, b"2").status_code == 201
    assert announce(other, b"3").status_code == 201


def test_what_has_come_of_an_upload_needs_no_room_a_second_time(coordinator: LiveCoordinator) -> None:
    site = coordinator.http("site", "a")
    answer = site.post("/v1/uploads", headers=announced(b"1", 1 << 30))
    name = Path(answer.headers["Location"]).name
    # As if nearly all of it had come: a hole takes nothing of the disk.
    with (coordinator.settings.staging_dir / f"upload-{name}").open("wb") as file:
        file.truncate((1 << 30) - 1)
    reserve_all_but(coordinator, 1 << 29)
    assert site.post("/v1/uploads", headers=announced(b"another")).status_code == 201


def test_an_upload_that_stops_keeps_one_step_of_the_disk_from_others(coordinator: LiveCoordinator) -> None:
    site, other, disk = coordinator.http("site", "a"), coordinator.http("site", "b"), coordinator.services.disk
    # The size of this file system is what it is.
    large = disk.free_bytes() // 10
    reserve_all_but(coordinator, 2 * large + large // 2)
    # Half of the free space beyond the reserve is announced in seven uploads, each of which sends a byte and stops.
    lengths = [large >> (1 + halved) for halved in range(7)]
    with ExitStack() as senders:
        for length in lengths:
            upload = site.post("/v1/uploads", headers=announced(b"%d" % length, length))
            raw = senders.enter_context(connected(coordinator))
            sends = {**PART, "Upload-Offset": "0", "Content-Length": str(length)}
            sends["Authorization"] = site.headers["Authorization"]
            raw.sendall(head("PATCH", upload.headers["Location"], sends) + b"x")
        until(lambda: disk._expected_bytes == len(lengths) * STEP_BYTES)
        assert send(other, LARGE).status_code == 201
    until(lambda: disk._expected_bytes == 0)


def test_an_upload_stops_where_the_disk_is_full_and_ends_where_it_was_reserved(tmp_path: Path) -> None:
    disk = DiskSpace([tmp_path], 0)
    with disk.expecting(2 * STEP_BYTES) as written:
        disk._reserve_bytes = disk.free_bytes() + (1 << 40)
        written(STEP_BYTES - 1)
        with refusing("store-full"):
            written(1)
    disk._reserve_bytes = 0
    with disk.expecting(STEP_BYTES) as written:
        disk._reserve_bytes = disk.free_bytes() + (1 << 40)
        written(STEP_BYTES)
    assert disk._expected_bytes == 0


def begun_on_a_full_disk(coordinator: LiveCoordinator) -> tuple[Client, Run]:
    """A run whose only round cannot be merged for want of room."""
    client, model = coordinator.client("admin"), small_model()
    start = values(model)
    run = start_run(client, model, start, cohort=Cohort(size=1))
    worker = ScriptedWorker(coordinator.client("site", "a")).enrol()
    task = worker.take()
    update = worker.upload(task, {"head.weight": start["head.weight"] + np.float32(1)})
    reserve_all_but(coordinator, -(1 << 40))
    worker.submit(task, update)
    until(lambda: coordinator.services.conductor.failures._failed)
    return client, run


@pytest.mark.parametrize("seconds", [FULL_SECONDS, -3600], ids=["the wait ends", "the clock steps back"])
def test_a_full_disk_pauses_no_run_and_the_merge_is_tried_again(tmp_path: Path, seconds: float) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock) as coordinator:
        client, run = begun_on_a_full_disk(coordinator)
        assert (client.run(run.id).state, client.round(run.id, 1).state) == ("running", "merging")
        reserve_all_but(coordinator, 1 << 30)
        clock.advance(seconds)

        def merged() -> bool:
            # Not by HTTP, as here the clock also limits the rate of requests.
            with coordinator.services.database.snapshot() as session:
                return session.get_one(RunRow, run.id).state == "completed"

        until(merged)


@contextmanager
def files_of_at_most(count: int) -> Iterator[None]:
    """As on a full disk, whoever runs it: no file grows beyond so many bytes."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (count, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def test_an_upload_that_filled_the_disk_goes_on_when_there_is_room(coordinator: LiveCoordinator) -> None:
    http = coordinator.http("orchestrator")
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    # Not a multiple of what is written at a time: the last write is taken in part.
    room = 2_500_001
    with files_of_at_most(room):
        refused(append(http, location, 0, LARGE), 503, "store-full")
    assert http.head(location).headers["Upload-Offset"] == str(room)
    assert append(http, location, room, LARGE).status_code == 204
    assert http.head(location).headers["Upload-Complete"] == "?1"
    assert http.get(f"/v1/blobs/{digest_of(LARGE)}").content == LARGE


def test_a_blob_that_filled_the_disk_leaves_nothing_behind(coordinator: LiveCoordinator) -> None:
    blobs = coordinator.services.blobs
    blobs.put([LARGE])
    before = set(blobs.staging_dir.iterdir())
    with files_of_at_most(1_000_001), pytest.raises(OSError, match="large") as fault:
        blobs.put([LARGE[:600_000], LARGE[:600_000]])
    assert is_full(fault.value)
    assert set(blobs.staging_dir.iterdir()) == before


def test_a_full_disk_counts_as_writable_and_its_probes_leave_no_files(tmp_path: Path) -> None:
    database = migrated(tmp_path)
    blobs = blobs_in(tmp_path, database)
    with files_of_at_most(0):
        assert blobs.writable()
    assert list(blobs.staging_dir.iterdir()) == []
    database.close()


def test_what_is_no_full_disk_is_not_taken_for_one() -> None:
    assert is_full(OSError(errno.ENOSPC, "no space"))
    assert not is_full(OSError(errno.EIO, "the disk is broken"))
    assert not is_full(ValueError("disk is full"))


# ---------------------------------------------------------------- memory


def test_no_upload_is_begun_when_memory_runs_out(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, memory_limit_bytes=1 << 20) as live:
        http = live.http("orchestrator")
        answer = send(http, b"anything")
        assert "memory" in refused(answer, 503, "busy").detail
        assert answer.headers["Retry-After"] == "10"
        # All else goes on.
        assert http.get("/v1/runs").status_code == 200


@pytest.mark.parametrize("version", [1, 2])
def test_the_limit_of_a_control_group_is_found_wherever_it_is_set(tmp_path: Path, version: int) -> None:
    top = tmp_path / ("memory" if version == 1 else "")
    inner = top / "outer" / "inner"
    inner.mkdir(parents=True)
    limit, current = (
        ("memory.limit_in_bytes", "memory.usage_in_bytes") if version == 1 else ("memory.max", "memory.current")
    )
    (inner / limit).write_text("9223372036854771712\n" if version == 1 else "max\n")
    (top / "outer" / limit).write_text("1000\n")
    (top / "outer" / current).write_text("960\n")
    caches = "active_file 40\ninactive_file 60\n"
    totals = "total_active_file 50\ntotal_inactive_file 70\n" if version == 1 else ""
    (top / "outer" / "memory.stat").write_text(f"anon 3\n{caches}{totals}shmem 5\n")
    membership = tmp_path / "membership"
    membership.write_text("3:cpu:/elsewhere\n" + ("4:memory:" if version == 1 else "0::") + "/outer/inner\n")
    assert groups(tmp_path, membership) == [(top / "outer", 1000)]
    # What the group would give back is not in use: 960 - 50 - 70, or 960 - 40 - 60.
    assert used_bytes(top / "outer") == (840 if version == 1 else 860)
    memory = Memory(None, tmp_path, membership)
    if version == 1:
        memory.require()
    else:
        with pytest.raises(Busy, match="86%"):
            memory.require()


def test_without_a_limit_memory_is_never_short(tmp_path: Path) -> None:
    assert Memory(None, tmp_path, tmp_path / "nothing").share() == 0.0


def test_a_file_system_without_inodes_is_not_called_roomy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    room = DiskSpace([tmp_path], 0)
    assert room.has()
    monkeypatch.setattr(disk, "MIN_FILES", 1 << 60)
    assert not room.has()
    with pytest.raises(StoreFull, match=rf"{tmp_path} has room for \d+ more files \(inodes\)"):
        room.require(1)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EPERM, errno.EROFS])
def test_a_file_that_the_machine_refuses_is_to_be_tried_again_and_no_fault_of_the_server(number: int) -> None:
    app = FastAPI()
    errors.install(app)

    @app.get("/")
    def read() -> None:
        raise OSError(number, os.strerror(number), "/blobs/ab")

    with capture_logs() as logs:
        answer = TestClient(app, raise_server_exceptions=False).get("/")
    assert (answer.status_code, answer.headers["Retry-After"]) == (503, "30")
    assert "/blobs/ab" in next(line["fault"] for line in logs if line["event"] == "files.unusable")
    assert [line for line in logs if "exc_info" in line] == []
