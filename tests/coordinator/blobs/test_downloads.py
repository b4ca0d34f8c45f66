"""Downloads: immutable, in ranges, and not again when nothing changed."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest
from sqlalchemy import update

from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.tables import BlobRow
from tessera.coordinator.limits import request_memory
from tessera.coordinator.limits.cache import LruCache
from tessera.coordinator.limits.request_memory import HELD_BYTES
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.raw import announced

SMALL, LARGE = bytes(range(100)), bytes(range(256)) * 5000
"""LARGE has 1,280,000 bytes, more than the database holds itself and than is sent at a time."""

OTHER = SMALL[::-1]

BOTH = pytest.mark.parametrize("data", [SMALL, LARGE], ids=["inline", "stored"])


@pytest.fixture(scope="module")
def http(standing: LiveCoordinator) -> Iterator[httpx.Client]:
    client = standing.client("orchestrator")
    token = f"Bearer {client._transport._credential.secret}"
    for data in (SMALL, LARGE, b"", OTHER):
        client.put_bytes(data)
    return standing.bare({"Authorization": token})


def get(http: httpx.Client, data: bytes, **headers: str) -> httpx.Response:
    return http.get(f"/v1/blobs/{digest_of(data)}", headers={k.replace("_", "-"): v for k, v in headers.items()})


def etag(data: bytes) -> str:
    return f'"{digest_of(data)}"'


@BOTH
def test_a_blob_is_served_whole_with_its_digest_as_a_strong_etag(http: httpx.Client, data: bytes) -> None:
    answer = get(http, data)
    assert (answer.status_code, answer.content) == (200, data)
    assert answer.headers["ETag"] == etag(data)
    assert answer.headers["Content-Length"] == str(len(data))
    assert answer.headers["Accept-Ranges"] == "bytes"
    assert "immutable" in answer.headers["Cache-Control"]


@BOTH
@pytest.mark.parametrize(
    ("asked", "start", "stop"),
    [("0-0", 0, 1), ("10-19", 10, 20), ("90-", 90, None), ("-7", -7, None), ("5-999999999", 5, None)],
)
def test_a_range_is_served_alone(http: httpx.Client, data: bytes, asked: str, start: int, stop: int | None) -> None:
    answer = get(http, data, Range=f"bytes={asked}")
    expected = data[start:stop]
    first = start % len(data)
    assert (answer.status_code, answer.content) == (206, expected)
    assert answer.headers["Content-Range"] == f"bytes {first}-{first + len(expected) - 1}/{len(data)}"
    assert answer.headers["Content-Length"] == str(len(expected))


@BOTH
@pytest.mark.parametrize("asked", ["{}-", "{}-{}", "-0"])
def test_a_range_outside_the_blob_is_unsatisfiable(http: httpx.Client, data: bytes, asked: str) -> None:
    answer = get(http, data, Range=f"bytes={asked.format(len(data), len(data) + 5)}")
    refused(answer, 416, "range-unsatisfiable")
    assert answer.headers["Content-Range"] == f"bytes */{len(data)}"


@pytest.mark.parametrize("asked", ["lines=1-2", "bytes=-", "bytes=1-2,5-6", "bytes=a-b", "bytes=20-10"])
def test_a_range_that_means_nothing_gets_the_whole_blob(http: httpx.Client, asked: str) -> None:
    answer = get(http, SMALL, Range=asked)
    assert (answer.status_code, answer.content) == (200, SMALL)


def test_a_range_counts_only_if_the_blob_is_the_one_meant(http: httpx.Client) -> None:
    assert get(http, SMALL, Range="bytes=0-4", If_Range=etag(SMALL)).status_code == 206
    other = get(http, SMALL, Range="bytes=0-4", If_Range=etag(LARGE))
    assert (other.status_code, other.content) == (200, SMALL)


@pytest.mark.parametrize("form", ["{}", '"other", {}', "W/{}", "*"])
def test_what_the_caller_has_is_not_sent_again(http: httpx.Client, form: str) -> None:
    answer = get(http, SMALL, If_None_Match=form.format(etag(SMALL)))
    assert (answer.status_code, answer.content, answer.headers["ETag"]) == (304, b"", etag(SMALL))
    assert get(http, SMALL, If_None_Match=etag(LARGE)).status_code == 200


@BOTH
def test_head_tells_the_size_and_sends_nothing(http: httpx.Client, data: bytes) -> None:
    answer = http.head(f"/v1/blobs/{digest_of(data)}")
    assert (answer.status_code, answer.content) == (200, b"")
    assert (answer.headers["Content-Length"], answer.headers["ETag"]) == (str(len(data)), etag(data))


def test_an_empty_blob_is_a_blob(http: httpx.Client) -> None:
    answer = get(http, b"")
    assert (answer.status_code, answer.content, answer.headers["Content-Length"]) == (200, b"", "0")
    refused(get(http, b"", Range="bytes=0-"), 416, "range-unsatisfiable")


# ---------------------------------------------------------------- several in one go


ALL = [digest_of(SMALL), digest_of(LARGE), digest_of(b""), digest_of(OTHER)]
TOGETHER = SMALL + LARGE + OTHER


@pytest.mark.parametrize("start", [0, 1, 99, 100, 101, 1_048_676, 1_280_099, 1_280_100, 1_280_199, 1_280_200])
def test_several_blobs_are_read_one_behind_the_other_from_anywhere(http: httpx.Client, start: int) -> None:
    answer = http.post("/v1/blobs/read", json={"digests": ALL, "start": start})
    assert (answer.status_code, answer.content) == (200, TOGETHER[start:])
    assert answer.headers["Content-Length"] == str(len(TOGETHER) - start)


def test_from_beyond_the_end_there_is_nothing_to_be_read(http: httpx.Client) -> None:
    answer = http.post("/v1/blobs/read", json={"digests": ALL, "start": len(TOGETHER) + 1})
    assert f"have {len(TOGETHER)} bytes in total" in refused(answer, 416, "range-unsatisfiable").detail


def test_one_blob_out_of_reach_and_none_is_read(http: httpx.Client, standing: LiveCoordinator) -> None:
    answer = http.post("/v1/blobs/read", json={"digests": [digest_of(SMALL), digest_of(b"elsewhere")]})
    assert digest_of(b"elsewhere") in refused(answer, 404, "not-found").detail
    site = standing.http("site", "a").post("/v1/blobs/read", json={"digests": [digest_of(SMALL)]})
    refused(site, 404, "not-found")


@pytest.mark.parametrize("digests", [[], ["sha256:x"], ["../../etc/passwd"], [digest_of(SMALL)] * 4097])
def test_what_is_no_list_of_digests_is_refused(http: httpx.Client, digests: list[str]) -> None:
    refused(http.post("/v1/blobs/read", json={"digests": digests}), 422, "invalid")


def test_one_blob_named_many_times_makes_no_answer_of_many_times_its_size(http: httpx.Client) -> None:
    answer = http.post("/v1/blobs/read", json={"digests": [digest_of(LARGE)] * 4096})
    (fault,) = refused(answer, 422, "invalid").errors
    assert "named more than once" in fault.detail


def test_small_blobs_that_are_spoilt_are_named_before_anything_is_sent(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path) as live:
        http, blobs = live.http("orchestrator"), [bytes([n]) * 10 for n in range(3)]
        for data in blobs:
            assert http.post("/v1/uploads", headers=announced(data, complete=True), content=data).status_code == 201
        with live.services.database.transaction() as session:
            session.get_one(BlobRow, digest_of(blobs[1])).inline = b"other byte"
            # As one of an earlier process, which this one looks at once more.
            session.execute(update(BlobRow).values(created_at=0.0))
        live.services.blobs._sound = LruCache(8)
        answer = http.post("/v1/blobs/read", json={"digests": [digest_of(data) for data in blobs]})
        assert digest_of(blobs[1]) in refused(answer, 500, "store-spoilt").detail


@pytest.fixture
def hashed(monkeypatch: pytest.MonkeyPatch) -> Counter[str]:
    """How often each blob was hashed."""
    counted, real = Counter[str](), Blobs.rehash

    def counting(self: Blobs, blob: StoredBlob) -> str | None:
        counted[blob.digest] += 1
        return real(self, blob)

    monkeypatch.setattr(Blobs, "rehash", counting)
    return counted


def received_before_stamps(live: LiveCoordinator, data: bytes) -> None:
    """Received before this process, by one that could not keep its verdict."""
    live.client("orchestrator").put_bytes(data)
    with live.services.database.transaction() as session:
        session.execute(update(BlobRow).values(created_at=0.0, stamp=None))


def test_a_byte_of_a_blob_asked_for_sixty_times_after_a_restart_hashes_it_once(
    tmp_path: Path, hashed: Counter[str]
) -> None:
    live, digest = LiveCoordinator(tmp_path), digest_of(LARGE)
    with live:
        received_before_stamps(live, LARGE)
    for _ in range(2):
        with live, ThreadPoolExecutor(30) as pool:
            http = live.http("admin")
            ranged = [pool.submit(http.get, f"/v1/blobs/{digest}", headers={"Range": "bytes=0-0"}) for _ in range(30)]
            read = [pool.submit(http.post, "/v1/blobs/read", json={"digests": [digest]}) for _ in range(30)]
            assert {answer.result().content for answer in ranged} == {LARGE[:1]}
            assert {answer.result().content for answer in read} == {LARGE}
    # The second process knows what the first one found.
    assert hashed == {digest: 1}


def test_a_blob_whose_file_has_changed_is_hashed_again(tmp_path: Path, hashed: Counter[str]) -> None:
    live, digest = LiveCoordinator(tmp_path), digest_of(LARGE)
    with live:
        live.client("orchestrator").put_bytes(LARGE)
        with live.services.database.transaction() as session:
            session.execute(update(BlobRow).values(created_at=0.0))
    with live:
        assert live.http("admin").get(f"/v1/blobs/{digest}").content == LARGE
        assert not hashed
    path = live.services.blobs._path(digest)
    path.write_bytes(LARGE[::-1])
    with live:
        assert digest in refused(live.http("admin").get(f"/v1/blobs/{digest}"), 500, "store-spoilt").detail


def test_one_token_has_only_so_many_answers_under_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    data = bytes(8 << 20)
    monkeypatch.setattr(request_memory, "RESPONSE_BYTES", 2 * HELD_BYTES)
    with LiveCoordinator(tmp_path) as live:
        http, other = live.http("admin"), live.http("admin")
        live.client("orchestrator").put_bytes(data)
        wanted = {"digests": [digest_of(data)]}
        with (
            http.stream("POST", "/v1/blobs/read", json=wanted) as first,
            http.stream("GET", f"/v1/blobs/{digest_of(data)}") as second,
        ):
            assert (first.status_code, second.status_code) == (200, 200)
            third = http.post("/v1/blobs/read", json=wanted)
            assert "responses with blobs are in progress" in refused(third, 429, "too-many-requests").detail
            assert third.headers["Retry-After"] == "1"
            assert other.post("/v1/blobs/read", json=wanted).content == data
        # Both were hung up on.
        until(lambda: http.post("/v1/blobs/read", json=wanted).status_code == 200)
        # An answer is given back after its last byte is sent.
        until(lambda: live.services.answers._held == {})


def test_a_list_longer_than_any_is_not_read(http: httpx.Client) -> None:
    refused(http.post("/v1/blobs/read", content=b"[" + b" " * (2 << 20)), 413, "too-large")
