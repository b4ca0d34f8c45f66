"""What a connection may cost: bytes and seconds of a head, seconds of a body, an answer that nobody takes."""

from __future__ import annotations

import resource
import socket
import time
from pathlib import Path

import pytest
from structlog.testing import capture_logs

from tessera.coordinator.api import request_limits
from tessera.coordinator.server.http_limits import OTHER_FILES, raise_file_limit
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.raw import announced, answer, connected, head, rest, trickle

VERSION = head("GET", "/version", {})
SITE = b'{"name": "a"}'.ljust(30)


@pytest.mark.parametrize("headers", [{f"X-{n}": "x" * 1000 for n in range(20)}, {f"{n}": "" for n in range(200)}])
def test_a_head_that_is_too_long_is_refused(coordinator: LiveCoordinator, headers: dict[str, str]) -> None:
    with connected(coordinator) as raw:
        raw.sendall(head("GET", "/version", headers))
        assert "longer than 16384 bytes" in refused(answer(raw), 431, "headers-too-large").detail


def test_fields_after_a_body_are_no_headers(coordinator: LiveCoordinator) -> None:
    sent = {"Content-Type": "application/json", "Transfer-Encoding": "chunked", "Connection": "close"}
    fields = f"Authorization: Bearer {coordinator.token('admin')}\r\n"
    with connected(coordinator) as raw:
        raw.sendall(head("POST", "/v1/sites", sent) + b"1e\r\n" + SITE + f"\r\n0\r\n{fields}\r\n".encode())
        refused(answer(raw), 401, "unauthenticated")


def test_a_head_that_never_ends_is_refused_while_it_comes(coordinator: LiveCoordinator) -> None:
    with connected(coordinator) as raw:
        raw.sendall(head("GET", "/version", {})[:-2] + b"X-Long: " + b"x" * 2_000_000)
        raw.shutdown(1)
        refused(answer(raw), 431, "headers-too-large")


def test_what_is_not_http_is_refused_as_a_problem(coordinator: LiveCoordinator) -> None:
    with connected(coordinator) as raw:
        raw.sendall(b"\x16\x03\x01 this is TLS\r\n\r\n")
        refused(answer(raw), 400, "bad-request")


@pytest.mark.parametrize("hosts", [0, 2])
def test_a_request_that_does_not_name_its_host_once_is_refused(coordinator: LiveCoordinator, hosts: int) -> None:
    with connected(coordinator) as raw:
        raw.sendall(b"GET /version HTTP/1.1\r\n" + b"Host: test\r\n" * hosts + b"\r\n")
        assert "Host" in refused(answer(raw), 400, "bad-request").detail


def test_one_address_has_a_quarter_of_the_connections_unless_it_is_a_proxys() -> None:
    assert CoordinatorSettings(max_connections=100).most_per_address == 25
    assert CoordinatorSettings(max_connections=100, behind_proxy=True).most_per_address is None
    assert CoordinatorSettings(max_connections=100, max_connections_per_address=60).most_per_address == 60


def test_a_head_that_is_slow_in_coming_is_cut_off(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=1.0) as live, connected(live) as raw:
        trickle(raw, VERSION[:-1], 0.05)
        assert "header_timeout_seconds" in refused(answer(raw), 408, "too-slow").detail


def test_a_connection_that_asks_nothing_is_closed(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=0.3) as live, connected(live) as raw:
        assert rest(raw) == b""


def test_line_breaks_between_requests_keep_no_connection_open(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=1.0) as live, connected(live) as raw:
        raw.sendall(VERSION)
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        trickle(raw, b"\r\n" * 10, 0.1)
        assert rest(raw) == b""


def test_the_rest_of_a_request_that_was_answered_is_not_waited_for(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=1.0) as live, connected(live) as raw:
        raw.sendall(head("GET", "/version", {"Content-Length": "1000000"}))
        assert raw.recv(65536).startswith(b"HTTP/1.1 200")
        trickle(raw, b"x" * 20, 0.1)
        # The answer may come in two parts.
        assert b"HTTP/1.1" not in rest(raw)


def test_a_kept_connection_may_be_idle_between_requests(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=1.0) as live, connected(live) as raw:
        for pause_seconds in (0.0, 1.2):
            time.sleep(pause_seconds)
            raw.sendall(VERSION)
            assert raw.recv(65536).startswith(b"HTTP/1.1 200")


def site_request(live: LiveCoordinator, body: bytes) -> bytes:
    """The head of a request for a new site."""
    headers = {"Authorization": f"Bearer {live.token('admin')}", "Content-Type": "application/json"}
    return head("POST", "/v1/sites", {**headers, "Content-Length": str(len(body)), "Connection": "close"})


def test_a_body_that_stands_still_is_cut_off(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=0.3) as live, connected(live) as raw:
        raw.sendall(site_request(live, SITE) + SITE[:5])
        assert "was received for 0.3 s" in refused(answer(raw), 408, "too-slow").detail


def test_a_body_that_comes_slowly_is_not_cut_off(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, header_timeout_seconds=2.0) as live, connected(live) as raw:
        raw.sendall(site_request(live, SITE))
        # Each pause is much shorter than the limit, all together are longer.
        trickle(raw, SITE, 0.08)
        assert answer(raw).status_code == 201


def test_a_body_that_takes_too_long_in_all_is_cut_off(
    coordinator: LiveCoordinator, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(request_limits, "BODY_SECONDS", 0.5)
    with connected(coordinator) as raw:
        raw.sendall(site_request(coordinator, b" " * 1000))
        trickle(raw, b" " * 20, 0.05)
        assert "not all within 0.5 s" in refused(answer(raw), 408, "too-slow").detail


# ---------------------------------------------------------------- how many


def test_connections_beyond_the_limit_are_told_to_come_later(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, max_connections=2, max_connections_per_address=2) as live:
        with connected(live) as first, connected(live) as second, connected(live) as third:
            for raw in (first, second, third):
                raw.sendall(VERSION)
            problem = answer(third)
            assert "max_connections" in refused(problem, 503, "busy").detail
            assert problem.headers["Retry-After"] == "5"
            assert first.recv(65536).startswith(b"HTTP/1.1 200")
            assert second.recv(65536).startswith(b"HTTP/1.1 200")
        # Whoever goes makes room.
        until(lambda: live.bare().get("/version").status_code == 200)


def test_connections_far_beyond_the_limit_are_closed_without_a_word(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("tessera.coordinator.server.connections.TURNED_AWAY", 1)
    with (
        LiveCoordinator(tmp_path, max_connections=1) as live,
        connected(live) as first,
        connected(live) as second,
        connected(live) as third,
    ):
        assert rest(third) == b""
        second.sendall(VERSION)
        refused(answer(second), 503, "busy")
        first.sendall(VERSION)
        assert first.recv(65536).startswith(b"HTTP/1.1 200")


def test_one_address_may_have_so_many_connections(tmp_path: Path) -> None:
    with (
        LiveCoordinator(tmp_path, max_connections_per_address=1) as live,
        connected(live),
        connected(live) as second,
    ):
        second.sendall(VERSION)
        assert "max_connections_per_address" in refused(answer(second), 503, "busy").detail


def test_files_may_be_opened_for_all_connections_as_far_as_the_system_allows() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    try:
        resource.setrlimit(resource.RLIMIT_NOFILE, (64, hard))
        raise_file_limit(100)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == min(100 + OTHER_FILES, hard)
        with capture_logs() as lines:
            raise_file_limit(hard)
        assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] == hard
        assert [line["event"] for line in lines] == ["coordinator.few_files"]
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


# ---------------------------------------------------------------- answers that nobody takes


@pytest.fixture(scope="module")
def large() -> bytes:
    return bytes(range(256)) * 65_536  # 16 MiB: more than the system takes in for a receiver


def stored(live: LiveCoordinator, data: bytes) -> bytes:
    """The head of a request for a blob of these bytes."""
    http = live.http("orchestrator")
    assert http.post("/v1/uploads", headers=announced(data, complete=True), content=data).status_code == 201
    http.close()
    return head(
        "GET", f"/v1/blobs/{digest_of(data)}", {"Authorization": http.headers["Authorization"], "Connection": "close"}
    )


def test_an_answer_that_nobody_takes_is_cut_off(tmp_path: Path, large: bytes) -> None:
    with LiveCoordinator(tmp_path, idle_timeout_seconds=0.4) as live, connected(live, receive_bytes=8_192) as raw:
        raw.sendall(stored(live, large))
        raw.recv(1)
        server = live._server.server_state
        until(lambda: not server.connections)
        until(lambda: not server.tasks)
        assert len(rest(raw)) < len(large)


def test_an_answer_that_is_taken_slowly_is_not_cut_off(tmp_path: Path, large: bytes) -> None:
    with LiveCoordinator(tmp_path, idle_timeout_seconds=2.0) as live, connected(live, receive_bytes=8_192) as raw:
        raw.sendall(stored(live, large))
        began, received = time.monotonic(), bytearray()
        while time.monotonic() - began < 2.5:
            received += raw.recv(4_096)
            time.sleep(0.05)
        received += rest(raw)
        assert received.endswith(large)


def test_the_end_of_an_answer_that_nobody_takes_is_cut_off(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, idle_timeout_seconds=0.4) as live:
        # So little that the last piece stays with the server, though less than makes it wait with more.
        live._socket.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, 4_096)
        with connected(live, receive_bytes=2_048) as raw:
            raw.sendall(stored(live, bytes(40_000)))
            server = live._server.server_state
            until(lambda: server.total_requests == 2 and not server.tasks)
            until(lambda: not server.connections)


def test_requests_far_ahead_of_their_answers_are_cut_off(coordinator: LiveCoordinator) -> None:
    with connected(coordinator) as raw:
        raw.sendall(VERSION * 20)
        until(lambda: coordinator._server.server_state.total_requests == 20)
        raw.sendall(VERSION * 5_000)
        until(lambda: not coordinator._server.server_state.connections)
        assert coordinator._server.server_state.total_requests < 200
