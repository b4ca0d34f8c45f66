"""No byte of a body is read before its caller is known and allowed; what is read is bounded before it is parsed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest

from tessera.coordinator.api.dependencies import FEW, STRANGERS_BYTES
from tessera.coordinator.limits.memory import WATERMARK, Memory, own_bytes
from tessera.coordinator.limits.request_memory import BODY_BYTES, BodyMemory
from tessera.coordinator.server.connections import HEAD_READ_BYTES
from tessera.shared.host_memory import return_freed_memory
from tessera.shared.problems import Busy
from tests.coordinator.api.test_routes import ROUTES
from tests.coordinator.dashboard.conftest import SAME_ORIGIN, signed_in
from tests.coordinator.dashboard.test_login import paths
from tests.support.coordinator import LiveCoordinator, refused, until
from tests.support.raw import answer, connected, head, parsed

OPEN = {("POST", "/v1/enrolments"), ("POST", "/page/sign-in"), ("POST", "/page/theme")}
"""The routes that read a body of callers without a token."""

JSON = {"Content-Type": "application/json"}
WORKER = {"site": "a", "worker": "w", "secret_hash": "0" * 64}


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCoordinator]:
    """One that soon gives up a body that does not come, and where the address of the tests may fail often."""
    folder, often = tmp_path_factory.mktemp("live"), 100_000
    with LiveCoordinator(
        folder, header_timeout_seconds=0.5, auth_failures_per_minute=often, enrolments_per_minute=often
    ) as live:
        yield live


def status_without_body(live: LiveCoordinator, method: str, path: str, headers: dict[str, str]) -> int:
    """The status that is answered to a request that announces a body and sends none of it."""
    with connected(live) as raw:
        raw.sendall(head(method, path, {**headers, **JSON, "Content-Length": "1000"}))
        return parsed(raw.recv(65_536)).status_code


def with_body(*roots: str) -> list[tuple[str, str]]:
    """The routes whose method changes something."""
    return sorted(
        (method, path) for method, path in ROUTES if method not in ("GET", "HEAD") and path.startswith(roots)
    )


def test_a_stranger_s_body_is_not_waited_for_on_any_route(live: LiveCoordinator) -> None:
    for method, path in sorted({*ROUTES, *paths(live.app().routes)} - OPEN):
        status = status_without_body(live, method, path.replace("{number}", "1"), SAME_ORIGIN)
        assert status != 408, (method, path)
        assert method == "GET" or status in (303, 401, 404, 405), (method, path, status)


def test_the_body_of_a_caller_who_may_not_is_not_waited_for(live: LiveCoordinator) -> None:
    viewer = {"Authorization": f"Bearer {live.token('viewer')}"}
    for method, path in set(with_body("/v1/")) - OPEN:
        assert status_without_body(live, method, path, viewer) == 403, (method, path)


def test_the_form_of_a_visitor_who_may_not_is_not_waited_for(live: LiveCoordinator) -> None:
    cookie = {
        "Cookie": "; ".join(f"{name}={value}" for name, value in signed_in(live, "viewer").http.cookies.items())
    }
    steering = {path for method, path in paths(live.app().routes) if method == "POST" and path.startswith("/page/")}
    for path in steering - {path for _, path in OPEN} - {"/page/sign-out"}:
        assert status_without_body(live, "POST", path, {**SAME_ORIGIN, **cookie}) == 403, path


@pytest.mark.parametrize(("_", "path"), sorted(OPEN))
def test_a_stranger_s_body_is_refused_by_its_length_before_it_comes(live: LiveCoordinator, _: str, path: str) -> None:
    with connected(live) as raw:
        raw.sendall(head("POST", path, {**JSON, **SAME_ORIGIN, "Content-Length": str(STRANGERS_BYTES + 1)}))
        assert parsed(raw.recv(65_536)).status_code == 413


def test_a_stranger_s_body_without_a_length_is_read_no_further_than_64_kib(live: LiveCoordinator) -> None:
    pieces = iter([b" " * 16_384] * 64)
    refused(live.bare().post("/v1/enrolments", content=pieces, headers=JSON), 413, "too-large")


def test_a_claim_is_refused_by_its_length_before_it_comes(live: LiveCoordinator) -> None:
    token = {"Authorization": f"Bearer {live.token('site', 'a')}"}
    with connected(live) as raw:
        raw.sendall(head("POST", "/v1/tasks/claim", {**JSON, **token, "Content-Length": str((1 << 16) + 1)}))
        assert parsed(raw.recv(65_536)).status_code == 413


@pytest.mark.parametrize(
    ("role", "path", "most"),
    [
        (None, "/v1/enrolments", FEW),
        ("site", "/v1/tasks/claim", 8_192),
        ("site", "/v1/tasks/x/heartbeat", 8_192),
        ("admin", "/v1/sites", 8_192),
        ("orchestrator", "/v1/runs", 1 << 17),
    ],
)
def test_a_body_of_many_small_values_is_refused_before_it_is_parsed(
    live: LiveCoordinator, role: str | None, path: str, most: int
) -> None:
    http = live.http(role, "a" if role == "site" else None) if role else live.bare()  # type: ignore[arg-type]
    # It is no JSON, which nobody finds out.
    problem = refused(http.post(path, content=b"[]," * most, headers=JSON), 413, "too-large")
    assert f"at most {most} are read" in problem.detail


def test_refused_requests_without_a_token_count_as_failures_of_the_address(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, auth_failures_per_minute=2) as live:
        answers = [live.bare().post("/v1/enrolments", content=b"{", headers=JSON).status_code for _ in range(3)]
        assert answers == [400, 400, 429]
        assert live.http("admin").get("/v1/runs").status_code == 200


def test_an_enrolment_beyond_the_rate_is_refused_before_it_is_read(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, enrolments_per_minute=1, header_timeout_seconds=0.5) as live:
        assert live.bare().post("/v1/enrolments", json=WORKER).status_code == 201
        assert status_without_body(live, "POST", "/v1/enrolments", {}) == 429


def test_a_kept_connection_goes_on_after_a_refused_body_that_still_came(live: LiveCoordinator) -> None:
    with connected(live) as raw:
        request = head("POST", "/v1/sites", {**JSON, "Content-Length": "20000"})
        raw.sendall(request + b" " * 20_000 + head("GET", "/version", {"Connection": "close"}))
        received = answer(raw)
        assert received.status_code == 401
        assert b"HTTP/1.1 200 OK" in received.content


# ---------------------------------------------------------------- memory of bodies


def test_bodies_of_strangers_have_a_small_share_of_the_memory(tmp_path: Path) -> None:
    with (
        LiveCoordinator(tmp_path, body_memory_bytes=16 << 20, enrolments_per_minute=1_000) as live,
        ExitStack() as stack,
    ):
        # A sixteenth for all of them, an eighth of that for an address, at least 4 KiB for each.
        for _ in range((16 << 20) // 16 // 8 // BODY_BYTES):
            raw = stack.enter_context(connected(live))
            raw.sendall(head("POST", "/v1/enrolments", {**JSON, "Content-Length": "1000"}) + b"{")
        held = live.services.bodies
        until(lambda: held._held["strangers"] == (16 << 20) // 16 // 8)
        problem = live.bare().post("/v1/enrolments", json=WORKER)
        assert "body_memory_bytes" in refused(problem, 503, "busy").detail
        assert live.http("admin").post("/v1/sites", json={"name": "b"}).status_code == 201
        stack.close()
        until(lambda: not held._held)
        assert live.bare().post("/v1/enrolments", json=WORKER).status_code == 201


def test_a_site_s_bodies_leave_half_of_the_memory_to_others() -> None:
    memory = BodyMemory(100 * BODY_BYTES)
    with memory.receive("site:a", "1.2.3.4") as count, memory.receive("site:b", "1.2.3.4") as others:
        count(50 * BODY_BYTES)
        with pytest.raises(Busy):
            count(1)
        others(50 * BODY_BYTES)
        with memory.receive(None, "1.2.3.4") as strangers, pytest.raises(Busy):
            strangers(1)
    assert not memory._held


def test_what_comes_with_a_head_is_left_in_the_kernel_until_the_request_is_admitted(live: LiveCoordinator) -> None:
    connections: set[Any] = live._server.server_state.connections
    others = set(connections)
    with connected(live) as raw:
        headers = {"Authorization": "Bearer nobody's", "Content-Length": "500000"}
        raw.setblocking(False)
        raw.send(head("PATCH", "/v1/uploads/x", headers) + b" " * 500_000)
        until(lambda: [one for one in connections - others if one.cycle and one.cycle.response_complete])
        assert [len(one.cycle.body) <= HEAD_READ_BYTES for one in connections - others] == [True]


# ---------------------------------------------------------------- probes, and memory in use


def test_probes_are_answered_while_every_thread_of_the_handlers_waits(coordinator: LiveCoordinator) -> None:
    http, probe = coordinator.http("admin"), coordinator.bare()
    with ThreadPoolExecutor(45) as pool:
        with coordinator.services.database.transaction():
            sent = [pool.submit(http.post, "/v1/sites", json={"name": f"s{number}"}) for number in range(45)]
            until(lambda: sum(thread.name == "AnyIO worker thread" for thread in threading.enumerate()) >= 40)
            found = [probe.get(path).status_code for path in ("/healthz/live", "/healthz/ready", "/version")]
        assert {each.result().status_code for each in sent} == {201}
    assert found == [204, 200, 200]


def test_memory_that_was_freed_refuses_nothing() -> None:
    held = [bytearray(b"x" * 60_000) for _ in range(3_000)]
    # The allocator keeps what lies before it.
    last = bytearray(b"x" * 60_000)
    # What earlier tests have freed is not to be given back in between.
    gc.collect()
    return_freed_memory()
    limit = int(own_bytes() / (WATERMARK + 0.01))
    with pytest.raises(Busy):
        Memory(limit).require()
    del held
    gc.collect()
    Memory(limit).require()
    assert last
