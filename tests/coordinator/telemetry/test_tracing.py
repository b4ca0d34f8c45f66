"""One id for a request: in its problem, and in what is logged of it."""

from __future__ import annotations

import re

import httpx
import structlog
from structlog.testing import capture_logs

from tessera.shared.telemetry.trace_ids import trace_of, traceparent_of
from tests.support.coordinator import LiveCoordinator
from tests.support.raw import PART, announced

NOWHERE = "/v1/uploads/nothing"


def refusal(http: httpx.Client, **headers: str) -> str:
    trace = http.patch(NOWHERE, headers={**PART, "Upload-Offset": "0", **headers}).json()["trace"]
    assert isinstance(trace, str)
    return trace


def test_a_request_belongs_to_the_trace_of_its_caller_or_to_one_of_its_own(standing: LiveCoordinator) -> None:
    http, header = standing.http(), traceparent_of("run", 1)
    assert refusal(http, traceparent=header) == trace_of("run", 1)
    own = {refusal(http), refusal(http), refusal(http, traceparent="nonsense")}
    assert len(own) == 3
    assert all(re.fullmatch("[0-9a-f]{32}", trace) for trace in own)


def test_what_is_logged_of_a_request_names_its_trace(standing: LiveCoordinator) -> None:
    with capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        trace = refusal(standing.http())
    (line,) = [line for line in lines if line["event"] == "request.refused"]
    assert (line["trace"], line["path"], line["code"]) == (trace, NOWHERE, "not-found")


def test_a_fault_is_logged_under_the_trace_that_its_answer_names(coordinator: LiveCoordinator) -> None:
    http = coordinator.http()
    location = http.post("/v1/uploads", headers=announced(b"abc")).headers["Location"]
    # Where its bytes are to go is something else already.
    (coordinator.services.blobs.staging_dir / f"upload-{location.rpartition('/')[2]}").mkdir()
    with capture_logs([structlog.contextvars.merge_contextvars]) as lines:
        answer = http.patch(location, headers={**PART, "Upload-Offset": "0"}, content=b"abc")
    assert answer.status_code == 500
    (line,) = [line for line in lines if line["event"] == "request.failed"]
    assert line["trace"] == answer.json()["trace"]
    assert line["trace"] in answer.json()["detail"]


def test_what_anybody_may_bring_about_fills_no_log(standing: LiveCoordinator) -> None:
    with capture_logs() as lines:
        standing.bare().get("/v1/runs")
    assert [line for line in lines if line["event"] == "request.refused"] == []
