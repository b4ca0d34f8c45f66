"""Uploads over real sockets: whole, in parts, cut off, twice at once, too long, and of other bytes."""

from __future__ import annotations

import asyncio
import fcntl
import hashlib
import socket
import threading
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from types import SimpleNamespace
from urllib.parse import urlsplit

import httpx
import pytest
from sqlalchemy import select, update

from tessera.coordinator.blobs.uploads import Upload, Uploads
from tessera.coordinator.db.tables import SiteRow, UploadRow
from tessera.shared.problems import DigestMismatch
from tessera.shared.rounds.blob_store import StoredBlob
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.raw import PART, announced, head

SMALL, LARGE = b"some bytes", bytes(range(256)) * 12_000
"""LARGE has 3,072,000 bytes: more than is ever kept in the database or sent in one request."""


@pytest.fixture
def http(coordinator: LiveCoordinator) -> httpx.Client:
    return coordinator.http("orchestrator")


def progress(response: httpx.Response) -> tuple[int, str]:
    return int(response.headers["Upload-Offset"]), response.headers["Upload-Complete"]


def append(http: httpx.Client, location: str, offset: int, data: bytes | Iterator[bytes]) -> httpx.Response:
    return http.patch(location, headers={**PART, "Upload-Offset": str(offset)}, content=data)


def read(http: httpx.Client, data: bytes) -> httpx.Response:
    return http.get(f"/v1/blobs/{digest_of(data)}")


def cut_off(http: httpx.Client, location: str, offset: int, data: bytes, length: int) -> None:
    """A PATCH that promises `length` bytes, sends `data` and goes away without a word."""
    address = urlsplit(str(http.base_url))
    headers = {**PART, "Upload-Offset": str(offset), "Content-Length": str(length)}
    headers["Authorization"] = http.headers["Authorization"]
    with socket.create_connection((address.hostname, address.port)) as raw:
        raw.sendall(head("PATCH", location, headers) + data)


def go_on(http: httpx.Client, location: str) -> None:
    """Sends the rest of LARGE, as soon as the request that was cut off has let go of the upload."""

    def sent() -> bool:
        offset, _ = progress(http.head(location))
        return append(http, location, offset, LARGE[offset:]).status_code == 204

    until(sent)


# ---------------------------------------------------------------- as it should be


@pytest.mark.parametrize("data", [b"", SMALL, LARGE], ids=["empty", "small", "large"])
def test_a_blob_comes_in_the_request_that_announces_it(http: httpx.Client, data: bytes) -> None:
    answer = http.post("/v1/uploads", headers=announced(data, complete=True), content=data)
    assert (answer.status_code, progress(answer)) == (201, (len(data), "?1"))
    assert read(http, data).content == data


def test_other_bytes_are_refused_even_if_the_blob_is_here_already(coordinator: LiveCoordinator) -> None:
    uploads = coordinator.services.uploads
    for _ in range(2):
        uploads.keep(uploads.announce("site:a", digest_of(SMALL), len(SMALL)), SMALL)
    upload = uploads.announce("site:a", digest_of(SMALL), len(SMALL))
    assert upload.complete
    with pytest.raises(DigestMismatch):
        uploads.keep(upload, SMALL[::-1])


def test_a_blob_that_came_whole_completes_the_upload_that_was_begun(coordinator: LiveCoordinator) -> None:
    services = coordinator.services
    coordinator.token("site", "a")
    with services.database.transaction() as session:
        site = session.scalars(select(SiteRow.id)).one()
    begun = services.uploads.announce(f"site:{site}", digest_of(SMALL), len(SMALL), site_id=site)
    stored = services.blobs.put([SMALL])
    for _ in range(2):
        with services.database.transaction() as session:
            services.uploads.enter(session, services.database.now(), begun.owner, stored, site_id=site)
    assert services.uploads.find(begun.id, begun.owner).complete
    assert services.blobs.read(digest_of(SMALL)) == SMALL


def test_an_upload_goes_on_part_by_part(http: httpx.Client) -> None:
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    for start, stop in ((0, 1), (1, 1_000_000), (1_000_000, 1_000_000), (1_000_000, len(LARGE))):
        assert progress(http.head(location))[0] == start
        answer = append(http, location, start, LARGE[start:stop])
        assert (answer.status_code, progress(answer)[0]) == (204, stop)
    assert progress(http.head(location)) == (len(LARGE), "?1")
    assert read(http, LARGE).content == LARGE


def test_an_upload_that_is_cut_off_goes_on_from_what_arrived(http: httpx.Client) -> None:
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    cut_off(http, location, 0, LARGE[:2_000_000], len(LARGE))
    # What was still on its way when the connection broke may be lost, but no more than that.
    until(lambda: progress(http.head(location))[0] > 1_000_000)
    assert progress(http.head(location))[0] <= 2_000_000
    go_on(http, location)
    assert read(http, LARGE).content == LARGE


def test_an_upload_survives_a_restart_of_the_coordinator(tmp_path: Path) -> None:
    live = LiveCoordinator(tmp_path)
    with live:
        http = live.http("orchestrator")
        token = http.headers["Authorization"]
        location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
        append(http, location, 0, LARGE[:2_000_000])
    with live:
        http = live.bare({"Authorization": token})
        assert progress(http.head(location)) == (2_000_000, "?0")
        append(http, location, 2_000_000, LARGE[2_000_000:])
        assert read(http, LARGE).content == LARGE


def test_announcing_the_same_blob_again_goes_on_with_the_same_upload(http: httpx.Client) -> None:
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    append(http, location, 0, LARGE[:100])
    again = http.post("/v1/uploads", headers=announced(LARGE))
    assert (again.headers["Location"], progress(again)) == (location, (100, "?0"))


def test_a_blob_that_is_here_already_need_not_come_again(http: httpx.Client) -> None:
    http.post("/v1/uploads", headers=announced(LARGE, complete=True), content=LARGE)
    assert progress(http.post("/v1/uploads", headers=announced(LARGE))) == (len(LARGE), "?1")


def test_two_owners_may_send_the_same_bytes(coordinator: LiveCoordinator, http: httpx.Client) -> None:
    other = coordinator.http("orchestrator")
    for sender in (http, other):
        sender.post("/v1/uploads", headers=announced(LARGE, complete=True), content=LARGE)
        assert read(sender, LARGE).content == LARGE


# ---------------------------------------------------------------- as it should not be


@pytest.mark.parametrize("offset", [0, 99, 101, 10**18])
def test_a_wrong_offset_is_refused_with_the_right_one(http: httpx.Client, offset: int) -> None:
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    append(http, location, 0, LARGE[:100])
    answer = append(http, location, offset, b"x")
    refused(answer, 409, "offset-mismatch")
    assert answer.headers["Upload-Offset"] == "100"
    assert progress(http.head(location))[0] == 100


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_twice_the_declared_length_is_refused_and_nothing_is_kept(http: httpx.Client, data: bytes) -> None:
    headers = announced(data, complete=True)
    refused(http.post("/v1/uploads", headers=headers, content=data + data), 413, "too-large")
    refused(read(http, data), 404, "not-found")
    # What arrived within the length may be kept; the rest of the true bytes completes it.
    location = http.post("/v1/uploads", headers=announced(data)).headers["Location"]
    offset, _ = progress(http.head(location))
    assert append(http, location, offset, data[offset:]).status_code == 204
    assert read(http, data).content == data


def test_more_than_the_declared_length_in_parts_is_refused_too(http: httpx.Client) -> None:
    location = http.post("/v1/uploads", headers=announced(SMALL)).headers["Location"]
    append(http, location, 0, SMALL[:4])
    refused(append(http, location, 4, SMALL[4:] + b"more"), 413, "too-large")
    assert progress(http.head(location)) == (4, "?0")


@pytest.mark.parametrize("data", [SMALL, LARGE], ids=["small", "large"])
def test_bytes_that_are_not_those_announced_are_thrown_away(http: httpx.Client, data: bytes) -> None:
    other = bytes(reversed(data))
    refused(http.post("/v1/uploads", headers=announced(data, complete=True), content=other), 422, "digest-mismatch")
    refused(read(http, data), 404, "not-found")
    refused(read(http, other), 404, "not-found")
    location = http.post("/v1/uploads", headers=announced(data)).headers["Location"]
    assert progress(http.head(location)) == (0, "?0")
    append(http, location, 0, data)
    assert read(http, data).content == data


def test_a_body_that_is_shorter_than_announced_leaves_a_small_upload_where_it_was(http: httpx.Client) -> None:
    answer = http.post("/v1/uploads", headers=announced(SMALL, complete=True), content=SMALL[:3])
    assert "3 of 10 bytes were received" in refused(answer, 400, "bad-request").detail
    assert progress(http.post("/v1/uploads", headers=announced(SMALL))) == (0, "?0")


def test_a_mistaken_length_does_not_block_a_digest(http: httpx.Client) -> None:
    http.post("/v1/uploads", headers=announced(SMALL, length=11))
    again = http.post("/v1/uploads", headers=announced(SMALL, complete=True), content=SMALL)
    assert again.headers["Upload-Complete"] == "?1"
    refused(http.post("/v1/uploads", headers=announced(SMALL, length=11)), 400, "bad-request")


def test_two_writers_at_once_do_not_mix(coordinator: LiveCoordinator, http: httpx.Client) -> None:
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    other = coordinator.bare(dict(http.headers))

    def held_open() -> Iterator[bytes]:
        yield LARGE[:2_000_000]
        until(lambda: progress(other.head(location))[0] > 0)
        busy = append(other, location, progress(other.head(location))[0], b"x")
        assert refused(busy, 409, "upload-busy").retryable
        assert busy.headers["Retry-After"] == "1"
        yield LARGE[2_000_000:]

    assert append(http, location, 0, held_open()).status_code == 204
    assert read(http, LARGE).content == LARGE


def test_another_length_is_not_announced_in_the_midst_of_an_upload(
    coordinator: LiveCoordinator, http: httpx.Client
) -> None:
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    other = coordinator.bare(dict(http.headers))

    def held_open() -> Iterator[bytes]:
        yield LARGE[:2_000_000]
        until(lambda: progress(other.head(location))[0] > 0)
        mistaken = announced(LARGE, length=len(LARGE) + 1)
        assert refused(other.post("/v1/uploads", headers=mistaken), 409, "upload-busy").retryable
        yield LARGE[2_000_000:]

    assert append(http, location, 0, held_open()).status_code == 204
    assert read(http, LARGE).content == LARGE


def test_who_comes_as_another_finishes_does_not_finish_it_once_more(
    coordinator: LiveCoordinator, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its file was opened before it had its last byte, and locked when it was a blob already."""
    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    assert append(http, location, 0, LARGE[:-1]).status_code == 204
    uploading, lock = coordinator.services.uploads, fcntl.flock
    with coordinator.services.database.snapshot() as session:
        owner = session.get_one(UploadRow, location.rpartition("/")[2]).owner
    others: list[threading.Thread] = []

    async def last() -> AsyncIterator[bytes]:
        yield LARGE[-1:]

    def finish() -> None:
        asyncio.run(uploading.append(uploading.find(location.rpartition("/")[2], owner), len(LARGE) - 1, last()))

    def late(file: int, operation: int) -> None:
        if not others:
            others.append(threading.Thread(target=finish))
            others[0].start()
            others[0].join()
        lock(file, operation)

    monkeypatch.setattr(fcntl, "flock", late)
    busy = append(http, location, len(LARGE) - 1, LARGE[-1:])
    assert refused(busy, 409, "upload-busy").retryable
    monkeypatch.undo()
    assert others
    assert progress(http.head(location)) == (len(LARGE), "?1")
    assert read(http, LARGE).content == LARGE


@pytest.mark.parametrize(
    ("header", "value", "status"),
    [
        ("Upload-Length", "-1", 422),
        ("Upload-Length", "1_0", 422),
        ("Upload-Length", "+5", 422),
        ("Upload-Length", "many", 422),
        ("Upload-Length", str(1 << 62), 413),
        ("Upload-Complete", "yes", 422),
        ("Repr-Digest", "sha-256=:short:", 400),
        ("Repr-Digest", f"md5=:{'A' * 43}=:", 400),
        ("Repr-Digest", f"sha-256=:{'=' * 44}:", 400),
        ("Repr-Digest", f"sha-256=:{'A' * 44}:", 400),
    ],
)
def test_an_announcement_that_cannot_be_read_names_its_header(
    standing: LiveCoordinator, header: str, value: str, status: int
) -> None:
    http = standing.http("orchestrator")
    answer = http.post("/v1/uploads", headers={**announced(SMALL), header: value})
    document = refused(answer, status, {400: "bad-request", 413: "too-large", 422: "invalid"}[status])
    assert header in document.detail + "".join(f.pointer for f in document.errors) or status == 413


@pytest.mark.parametrize("header", ["Upload-Length", "Upload-Complete", "Repr-Digest"])
def test_an_announcement_without_a_header_names_it(standing: LiveCoordinator, header: str) -> None:
    headers = announced(SMALL)
    del headers[header]
    answer = standing.http("orchestrator").post("/v1/uploads", headers=headers)
    assert [fault.pointer for fault in refused(answer, 422, "invalid").errors] == [f"/{header}"]


def test_a_part_of_another_content_type_is_refused(http: httpx.Client) -> None:
    location = http.post("/v1/uploads", headers=announced(SMALL)).headers["Location"]
    refused(http.patch(location, headers={"Upload-Offset": "0"}, content=SMALL), 400, "bad-request")


def test_an_upload_that_is_not_there_is_to_be_announced_anew(standing: LiveCoordinator) -> None:
    answer = append(standing.http("orchestrator"), "/v1/uploads/nothing", 0, b"x")
    assert "Announce" in refused(answer, 404, "not-found").remedy


def test_an_empty_part_has_nothing_hashed_again(http: httpx.Client, monkeypatch: pytest.MonkeyPatch) -> None:
    hashed = 0

    class Counting:
        def __init__(self) -> None:
            self.real = hashlib.sha256()

        def update(self, piece: bytes) -> None:
            nonlocal hashed
            hashed += len(piece)
            self.real.update(piece)

        def hexdigest(self) -> str:
            return self.real.hexdigest()

    location = http.post("/v1/uploads", headers=announced(LARGE)).headers["Location"]
    assert append(http, location, 0, LARGE[:-1]).status_code == 204
    monkeypatch.setattr("tessera.coordinator.blobs.uploads.hashlib", SimpleNamespace(sha256=Counting))
    for _ in range(3):
        assert append(http, location, len(LARGE) - 1, b"").status_code == 204
    assert hashed == 0
    assert append(http, location, len(LARGE) - 1, LARGE[-1:]).status_code == 204
    assert hashed == len(LARGE)
    assert read(http, LARGE).content == LARGE


def test_an_upload_has_the_length_of_its_bytes_whatever_is_announced_meanwhile(
    coordinator: LiveCoordinator, http: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Another length is announced just before the last byte is here: the digest says which of the two is true."""
    location = http.post("/v1/uploads", headers=announced(SMALL)).headers["Location"]
    real = Uploads._complete

    def late(self: Uploads, upload: Upload, stored: StoredBlob) -> None:
        with coordinator.services.database.transaction() as session:
            session.execute(update(UploadRow).values(length=len(SMALL) + 1))
        real(self, upload, stored)

    monkeypatch.setattr(Uploads, "_complete", late)
    assert append(http, location, 0, SMALL).status_code == 204
    monkeypatch.undo()
    assert progress(http.head(location)) == (len(SMALL), "?1")
    assert http.post("/v1/uploads", headers=announced(SMALL)).status_code == 201
