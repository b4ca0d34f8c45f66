"""A coordinator whose blobs are in an S3-compatible store that loses, changes and refuses."""

from __future__ import annotations

import time
from collections.abc import Iterator
from pathlib import Path

import httpx
import numpy as np
import pytest
from sqlalchemy import select

from tessera.coordinator.db.tables import BlobRow
from tessera.coordinator.maintenance import backup
from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tests.coordinator.maintenance.test_backup import faults
from tests.coordinator.maintenance.test_retention import HOUR, MODEL, START, exported, play, played, retention
from tests.support.cli import tessera
from tests.support.coordinator import Clock, LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, head_of, start_run
from tests.support.raw import announced
from tests.support.stores import Bucket, serving
from tests.support.variants import variants

PATIENT = {"lease_seconds": 86_400, "liveness_seconds": 1e9, "inline_bytes": 1, "submission_bytes": 0}
HEAD = START["head.weight"]


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Bucket]:
    with serving("moto", tmp_path_factory.mktemp("store")) as bucket:
        yield bucket


@pytest.fixture
def live(tmp_path: Path, clock: Clock, bucket: Bucket) -> Iterator[LiveCoordinator]:
    with LiveCoordinator(tmp_path, clock=clock, blob_url=bucket.url, **PATIENT) as coordinator:
        yield coordinator


def half_done(live: LiveCoordinator) -> tuple[Client, Run, str, ScriptedWorker]:
    """A round of two, of whom one has handed in: its update, and the other worker."""
    client = live.client()
    workers = [ScriptedWorker(live.client("site", site)).enrol() for site in "ab"]
    run = start_run(client, MODEL, START, cohort=Cohort(size=2, quorum=2))
    first = workers[0].take()
    digest = workers[0].upload(first, {"head.weight": HEAD + np.float32(1)})
    workers[0].submit(first, digest)
    return client, run, digest, workers[1]


def held(live: LiveCoordinator) -> set[str]:
    """The digests of all rows; each has its object and no object is without a row."""
    with live.services.database.snapshot() as session:
        return set(session.scalars(select(BlobRow.digest)))


# What was truncated is refused where what was replaced is: test_object_store.py reads both in each way.
@pytest.mark.parametrize("how", variants(["replaced", "truncated", "deleted"], short=["replaced", "deleted"]))
def test_an_update_that_is_spoilt_behind_our_back_is_named_and_not_merged(
    live: LiveCoordinator, bucket: Bucket, clock: Clock, how: str
) -> None:
    client, run, digest, other = half_done(live)
    sound = live.services.blobs.read(digest)
    if how == "deleted":
        bucket.lose(digest)
    else:
        bucket.replace(digest, sound[:-1] + (bytes([sound[-1] ^ 1]) if how == "replaced" else b""))
    other.train(other.take(), step=3.0)
    until(lambda: client.run(run.id).state == "paused")
    paused = client.run(run.id)
    assert digest in str(paused.reason)
    assert ("missing" if how == "deleted" else "no longer has the bytes") in str(paused.reason)
    assert paused.version.number == 0

    bucket.replace(digest, sound)
    # What failed is tried again once the run was resumed, later than it paused.
    clock.advance(1)
    client.set_run_state(run.id, "running")
    until(lambda: client.run(run.id).state == "completed")
    # The other moved it by 3.
    np.testing.assert_allclose(head_of(client, run), HEAD + 2, rtol=1e-6)


def test_a_blob_that_is_spoilt_is_refused_by_name(live: LiveCoordinator, bucket: Bucket) -> None:
    client = live.client()
    digest = client.put_bytes(b"as it was, and as it should be")
    assert client.read_blob(digest) == b"as it was, and as it should be"
    bucket.replace(digest, b"as it was, and as it is not be")
    with refusing("store-spoilt", digest):
        client.read_blob(digest)


def test_a_store_that_is_away_is_503_until_it_is_back(live: LiveCoordinator, bucket: Bucket) -> None:
    http = live.http()
    client = live.client(patience_seconds=0.0)
    large = bytes(range(256)) * 8192
    stored = client.put_bytes(b"bytes that were hashed at their upload")
    with bucket.away():
        # Its head is not sent before the store has answered.
        assert "Retry-After" in http.get(f"/v1/blobs/{stored}").headers
        refused(http.get(f"/v1/blobs/{stored}"), 503, "store-away")
        assert "Retry-After" in _sent(http, b"some bytes").headers
        refused(_sent(http, b"some bytes"), 503, "store-away")
        with refusing("store-away"):
            client.put_bytes(large)
        live.services.blobs._objects._probed_until = 0  # type: ignore[union-attr]
        ready = live.bare().get("/healthz/ready")
        assert (ready.status_code, ready.json()["store_writable"]) == (503, False)
        assert "tessera_ready 0.0" in http.get("/metrics").text
        # What needs no store goes on.
        assert not list(client.runs())
    assert live.bare().get("/healthz/ready").is_success
    assert _sent(http, b"some bytes").status_code == 201
    # All of it had come: nothing is sent again but the wish.
    assert client.read_blob(client.put_bytes(large)) == large


def _sent(http: httpx.Client, data: bytes) -> httpx.Response:
    return http.post("/v1/uploads", headers=announced(data, complete=True), content=data)


def test_a_round_waits_for_a_store_that_is_away_and_is_not_paused(
    live: LiveCoordinator, bucket: Bucket, caplog: pytest.LogCaptureFixture
) -> None:
    client, run, _, other = half_done(live)
    merging = live.services.conductor._merging
    with merging:
        other.train(other.take(), step=3.0)
        bucket.line.dead = True
        bucket.line.cut()
    with bucket.away():
        until(lambda: "store.away" in caplog.text)
        time.sleep(0.3)
        assert client.run(run.id).state == "running"
        assert client.round(run.id, 1).state == "merging"
    until(lambda: client.run(run.id).state == "completed")
    np.testing.assert_allclose(head_of(client, run), HEAD + 2, rtol=1e-6)


def test_updates_and_versions_that_are_not_kept_go_from_the_store(
    live: LiveCoordinator, bucket: Bucket, clock: Clock
) -> None:
    client, run, worker, updates = played(live, 2)
    whole = {number: exported(client, run, number) for number in (0, 2)}
    before = held(live)
    assert all(bucket.holds(digest) for digest in before)
    clock.advance(HOUR + 1)
    assert retention(live).collect().updates == 2
    assert held(live) == before - set(updates)
    assert retention(live, versions=1).collect().versions == 1
    clock.advance(86400 + 1)
    assert retention(live, versions=1).collect().bytes > 0
    kept = held(live)
    assert {f"sha256:{key.rpartition('/')[2]}" for key in bucket.names() if key != "probe"} == kept
    assert {number: exported(client, run, number) for number in whole} == whole
    play(client, worker, run, 3)


def test_an_object_that_no_row_knows_of_goes(live: LiveCoordinator, bucket: Bucket, clock: Clock) -> None:
    digest = live.client().put_bytes(b"known")
    stray = f"sha256:ab{'0' * 62}"
    bucket.replace(stray, b"a merge was killed before it was entered")
    # The store's own clock is far behind this one: all that it has is old.
    assert retention(live).collect().strays == 1
    assert (bucket.holds(stray), bucket.holds(digest)) == (False, True)


def test_a_store_that_is_away_is_no_fault_that_verify_found(tmp_path: Path, bucket: Bucket) -> None:
    with LiveCoordinator(tmp_path, blob_url=bucket.url, inline_bytes=1) as live:
        live.client().put_bytes(b"some bytes")
        settings = live.settings
    with bucket.away():
        ended = tessera(
            *("coordinator", "verify"),
            TESSERA_DATABASE_URL=settings.database_url,
            TESSERA_BLOB_URL=bucket.url,
            TESSERA_STAGING_DIR=str(settings.staging_dir),
        )
    assert ended.returncode == 2
    assert "not all was verified: the coordinator's blob store did not answer" in ended.stderr
    assert "Traceback" not in ended.stderr


def test_a_bucket_is_backed_up_verified_and_restored(tmp_path: Path, bucket: Bucket) -> None:
    with LiveCoordinator(tmp_path / "one", blob_url=bucket.url, inline_bytes=1) as live:
        client, run, _, _ = played(live, 1)
        whole = [exported(client, run, number) for number in range(2)]
        assert faults(live) == []
        copied = backup.back_up(live.services.database, live.services.blobs, tmp_path / "backup")
        assert copied.blobs == len(held(live))
        blob = live.services.states.manifest(run.version.digest).blocks["head.weight"]
        bucket.replace(blob, b"rot")
        assert any(f"blob {blob} no longer has the bytes of its name" in fault for fault in faults(live))
        bucket.lose(blob)
        assert f"blob {blob} is missing from the store" in faults(live)
    bucket.empty()
    with LiveCoordinator(tmp_path / "two", blob_url=bucket.url, inline_bytes=1) as other:
        restored = backup.restore(tmp_path / "backup", other.services.database, other.services.blobs)
        assert restored.blobs == copied.blobs
        assert faults(other) == []
        assert [exported(other.client(), run, number) for number in range(2)] == whole
