"""Large bodies: in order with other requests, cut off, silent, slow, too long and under TLS."""

from __future__ import annotations

import json
import logging
import os
import re
import select
import socket
import struct
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import httpx
import pytest

from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator, until
from tests.support.federation import small_model, start_run, values
from tests.support.raw import PART, announced, connected, head, parsed, rest, trickle

DATA = bytes(range(256)) * 12_000
"""3,072,000 bytes."""

MIB = 1 << 20

VERSION = head("GET", "/version", {"Connection": "close"})


@pytest.fixture
def http(coordinator: LiveCoordinator) -> httpx.Client:
    return coordinator.http("orchestrator")


def announce(http: httpx.Client, data: bytes = DATA) -> str:
    return str(http.post("/v1/uploads", headers=announced(data)).headers["Location"])


def patch(http: httpx.Client, location: str, length: int, offset: int = 0) -> bytes:
    """The head of a request that appends so many bytes."""
    headers = {**PART, "Upload-Offset": str(offset), "Content-Length": str(length)}
    return head("PATCH", location, {**headers, "Authorization": http.headers["Authorization"]})


def offset(http: httpx.Client, location: str) -> int:
    return int(http.head(location).headers["Upload-Offset"])


def answers(raw: socket.socket) -> list[int]:
    """The status of each answer that comes until the connection is closed."""
    return list(map(int, re.findall(rb"HTTP/1\.1 (\d{3})", rest(raw))))


# ---------------------------------------------------------------- up


def test_the_request_behind_a_large_body_is_answered_after_it(
    coordinator: LiveCoordinator, http: httpx.Client
) -> None:
    location = announce(http)
    with connected(coordinator) as raw:
        raw.sendall(patch(http, location, len(DATA)) + DATA + VERSION)
        assert answers(raw) == [204, 200]
    assert http.get(f"/v1/blobs/{digest_of(DATA)}").content == DATA


def test_a_body_longer_than_announced_is_refused_and_the_next_request_answered(
    coordinator: LiveCoordinator, http: httpx.Client
) -> None:
    location = announce(http)
    with connected(coordinator) as raw:
        raw.sendall(patch(http, location, 2 * len(DATA)) + 2 * DATA + VERSION)
        assert answers(raw) == [413, 200]
    assert offset(http, location) <= len(DATA)


def test_the_rest_of_a_body_that_cannot_be_written_is_dropped(
    coordinator: LiveCoordinator, http: httpx.Client
) -> None:
    location = announce(http)
    staged = coordinator.services.blobs.staging_dir / f"upload-{location.rpartition('/')[2]}"
    # flock works on it, and every write finds the disk full.
    staged.symlink_to("/dev/full")
    with connected(coordinator) as raw:
        raw.sendall(patch(http, location, len(DATA)) + DATA + VERSION)
        assert answers(raw) == [503, 200]


def test_a_slow_sender_of_a_large_body_goes_on_and_a_silent_one_is_cut_off(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, idle_timeout_seconds=1.0) as live, connected(live) as raw:
        http = live.http("orchestrator")
        location = announce(http)
        # Fewer bytes than are written at a time.
        half = MIB // 2
        raw.sendall(patch(http, location, len(DATA)) + DATA[:half])
        # Each pause is shorter than the limit, all together are longer.
        trickle(raw, DATA[half : half + 12], 0.1)
        assert "no byte was received for 1 s" in parsed(raw.recv(65536)).text
        assert half <= offset(http, location) <= half + 12


def test_a_sender_below_the_minimum_rate_is_cut_off_though_it_never_falls_silent(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.coordinator.blobs.uploads.RATE_SECONDS", 0.2)
    with LiveCoordinator(tmp_path, idle_timeout_seconds=2.0) as live, connected(live) as raw:
        http = live.http("orchestrator")
        raw.sendall(patch(http, announce(http), len(DATA)))
        while not select.select([raw], [], [], 0.05)[0]:
            raw.sendall(b"x")
        assert "fewer than 1024 a second" in parsed(raw.recv(65536)).text


# To PostgreSQL, a further connection of the pool is a socket too.
@pytest.mark.sqlite
def test_a_transfer_leaves_no_descriptor_behind(coordinator: LiveCoordinator, http: httpx.Client) -> None:
    def descriptors() -> list[str]:
        return sorted(filter(None, map(_opened, Path("/proc/self/fd").iterdir())))

    assert http.get("/version").status_code == 200
    before = descriptors()
    for size in (2_000_000, 2_500_000):
        location = announce(http, DATA[:size])
        with connected(coordinator) as raw:
            raw.sendall(patch(http, location, size) + DATA[: size // 2])
    assert http.post("/v1/uploads", headers=announced(DATA, complete=True), content=DATA).status_code == 201
    assert http.get(f"/v1/blobs/{digest_of(DATA)}").content == DATA
    until(lambda: set(descriptors()) <= set(before))


def _opened(descriptor: Path) -> str:
    """The socket or the blob that a descriptor of this process stands for, if it is one."""
    with suppress(FileNotFoundError):
        name = str(descriptor.readlink())
        return name if "socket" in name or "/blobs/" in name or "upload-" in name else ""
    return ""


# ---------------------------------------------------------------- down


def test_requests_ahead_of_a_large_answer_are_answered_after_it(
    coordinator: LiveCoordinator, http: httpx.Client
) -> None:
    assert http.post("/v1/uploads", headers=announced(DATA, complete=True), content=DATA).status_code == 201
    get = head("GET", f"/v1/blobs/{digest_of(DATA)}", {"Authorization": http.headers["Authorization"]})
    with connected(coordinator, receive_bytes=8_192) as raw:
        raw.sendall(get + get + VERSION)
        received = rest(raw)
    first, second = received.find(DATA), received.rfind(DATA)
    assert 0 < first < second < received.rfind(b"HTTP/1.1 200")


def test_a_file_that_is_shorter_than_its_blob_ends_the_connection(
    coordinator: LiveCoordinator, http: httpx.Client
) -> None:
    assert http.post("/v1/uploads", headers=announced(DATA, complete=True), content=DATA).status_code == 201
    os.truncate(coordinator.services.blobs._path(digest_of(DATA)), len(DATA) - 1)
    with connected(coordinator) as raw:
        raw.sendall(
            head("GET", f"/v1/blobs/{digest_of(DATA)}", {"Authorization": http.headers["Authorization"]}) + VERSION
        )
        received = rest(raw)
    assert received.endswith(DATA[:-1])


def test_a_blob_whose_file_is_gone_is_said_to_be_missing(coordinator: LiveCoordinator, http: httpx.Client) -> None:
    assert http.post("/v1/uploads", headers=announced(DATA, complete=True), content=DATA).status_code == 201
    coordinator.services.blobs._path(digest_of(DATA)).unlink()
    assert http.get(f"/v1/blobs/{digest_of(DATA)}").json()["code"] == "store-spoilt"


def test_a_receiver_that_goes_ends_its_transfer(coordinator: LiveCoordinator, http: httpx.Client) -> None:
    large = DATA * 6
    assert http.post("/v1/uploads", headers=announced(large, complete=True), content=large).status_code == 201
    with connected(coordinator, receive_bytes=8_192) as raw:
        raw.sendall(head("GET", f"/v1/blobs/{digest_of(large)}", {"Authorization": http.headers["Authorization"]}))
        raw.recv(1)
    until(lambda: not coordinator.services.answers._held)


def reset(raw: socket.socket) -> None:
    raw.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    raw.close()


def half_closed(raw: socket.socket) -> None:
    raw.shutdown(socket.SHUT_WR)
    rest(raw)


@pytest.mark.parametrize("hang_up", [reset, socket.socket.close, half_closed])
def test_a_client_that_hangs_up_is_no_fault_of_the_server(
    coordinator: LiveCoordinator,
    http: httpx.Client,
    caplog: pytest.LogCaptureFixture,
    hang_up: Callable[[socket.socket], object],
) -> None:
    model, stored = small_model(600), announced(DATA, complete=True)
    run = start_run(coordinator.client(), model, values(model))
    assert http.post("/v1/uploads", headers=stored, content=DATA).status_code == 201
    many = json.dumps({"digests": [digest_of(DATA)]}).encode()
    bearer = {"Authorization": http.headers["Authorization"]}
    listed = {**bearer, "Content-Type": "application/json", "Content-Length": str(len(many))}
    for sent in (
        head("GET", f"/v1/blobs/{digest_of(DATA)}", bearer),
        head("POST", "/v1/blobs/read", listed) + many,
        head("GET", f"/v1/runs/{run.id}/versions/0/export", bearer),
        patch(http, announce(http, DATA[1:]), len(DATA) - 1) + DATA[1:MIB],
        head("POST", "/v1/enrolments", {"Content-Type": "application/json", "Content-Length": "1000"}) + b"{",
        head("POST", "/page/sign-in", {"Content-Length": "1000"}) + b"token=",
        head("GET", "/v1/events", bearer),
        # Sent ahead: the first one is being answered.
        head("GET", "/v1/events", bearer) * 2,
    ):
        for _ in range(10):
            with connected(coordinator) as raw:
                raw.sendall(sent)
                hang_up(raw)
    until(lambda: not coordinator._server.server_state.tasks)
    assert [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR] == []
