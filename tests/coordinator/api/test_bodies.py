"""Hostile and mistaken requests: each leaves as a problem that names what is wrong and repeats none of it."""

from __future__ import annotations

import html
import json
import re

import httpx
import pytest

from tessera.coordinator.dashboard.templating import first_up
from tessera.shared.cli.reference.problems import KINDS, reasons
from tests.support import cli
from tests.support.coordinator import LiveCoordinator, refused

DIGEST = f"sha256:{'0' * 64}"
JSON = {"Content-Type": "application/json"}
SPEC = {"name": "r", "method": {"name": "fedavg"}, "model": DIGEST, "version": DIGEST, "dataset": "d", "rounds": 1}
CLAIM = {"worker": "w", "instance": "0" * 32, "datasets": {"d": 1}}


@pytest.fixture
def http(standing: LiveCoordinator) -> httpx.Client:
    return standing.http("admin")


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"{'name': 'a'}",
        b'{"name": NaN}',
        b'{"name": Infinity}',
        b'{"name": "\\ud800"}',
        b'{"name": "\xff"}',
        b"\xef\xbb\xbf{}",
        b'{"a":' * 201 + b"1" + b"}" * 201,
        b"[" * 100_000,
        b'{"name": "a"} trailing',
        b'{"name": "a", "name": "b"}',
    ],
    ids=lambda body: repr(body[:24]),
)
def test_a_body_that_is_no_strict_json_is_a_bad_request(http: httpx.Client, body: bytes) -> None:
    answer = http.post("/v1/sites", content=body, headers=JSON)
    codes = {400: "bad-request", 413: "too-large", 422: "invalid"}
    refused(answer, answer.status_code, codes[answer.status_code])
    assert len(answer.content) < 1000


@pytest.mark.parametrize(
    "number", [b"NaN", b"-Infinity", b"1e999", b"1" + b"0" * 400, b"1" + b"0" * 5000, b'"NaN"', b"null"]
)
def test_a_number_that_is_none_is_refused_wherever_it_stands(standing: LiveCoordinator, number: bytes) -> None:
    site = standing.http("site", "a")
    bodies = {
        "/v1/tasks/claim": json.dumps(CLAIM).replace("1}", "@}"),
        "/v1/tasks/x/heartbeat": '{"token": @}',
        "/v1/tasks/x/update": json.dumps({"token": 1, "version": DIGEST, "update": DIGEST, "examples": "@"}),
        "/v1/tasks/x/evaluation": json.dumps({"token": 1, "version": DIGEST, "examples": 1, "metrics": {"a": "@"}}),
    }
    for path, body in bodies.items():
        answer = site.post(path, content=body.replace('"@"', "@").encode().replace(b"@", number), headers=JSON)
        # A token may be any integer, and there is no task x.
        assert answer.status_code in (400, 404, 422), (path, answer.text)
        assert number.strip(b'"') not in answer.content or len(number) < 10
        assert answer.headers["Content-Type"] == "application/problem+json"


def test_a_body_of_two_megabytes_is_too_large_and_says_which_setting_bounds_it(http: httpx.Client) -> None:
    body = json.dumps({"name": "a" * (2 << 20)}).encode()
    assert "max_body_bytes" in refused(http.post("/v1/sites", content=body, headers=JSON), 413, "too-large").detail
    pieces = iter([body[i : i + 65536] for i in range(0, len(body), 65536)])
    refused(http.post("/v1/sites", content=pieces, headers=JSON), 413, "too-large")


def test_a_body_just_under_the_limit_is_read(http: httpx.Client) -> None:
    body = json.dumps({"name": "a" * ((1 << 20) - 100)}).encode()
    answer = http.post("/v1/sites", content=body, headers=JSON)
    refused(answer, 422, "invalid")
    assert len(answer.content) < 1000


def test_unknown_fields_are_named_by_pointer_and_their_values_are_not_repeated(http: httpx.Client) -> None:
    spec = SPEC | {"cohort": {"sise": "s3cret"}, "training": {"lr": "s3cret"}, "extra": ["s3cret"]}
    answer = http.post("/v1/runs", json=spec)
    document = refused(answer, 422, "invalid")
    assert {fault.pointer for fault in document.errors} == {"/cohort/sise", "/training/lr", "/extra"}
    assert "s3cret" not in answer.text


def test_wrong_values_are_named_by_pointer_and_not_repeated(http: httpx.Client) -> None:
    answer = http.post("/v1/runs", json=SPEC | {"rounds": "s3cret", "name": "s3cret/../x", "seed": -7654321})
    document = refused(answer, 422, "invalid")
    assert {fault.pointer for fault in document.errors} == {"/rounds", "/name", "/seed"}
    assert "s3cret" not in answer.text
    assert "7654321" not in answer.text


def test_a_body_with_thousands_of_faults_is_not_told_each_of_them(http: httpx.Client) -> None:
    answer = http.post("/v1/runs", json=SPEC | {f"field{i}": i for i in range(10_000)})
    problem = refused(answer, 422, "invalid")
    assert (problem.errors, "10000 errors" in problem.detail) == ((), True)


def test_a_body_with_hundreds_of_faults_gets_an_answer_of_bounded_size(http: httpx.Client) -> None:
    answer = http.post("/v1/runs", json=SPEC | {f"field{i}": i for i in range(1_000)})
    assert len(refused(answer, 422, "invalid").errors) == 50
    assert len(answer.content) < 20_000


@pytest.mark.parametrize("content_type", ["text/plain", "application/x-www-form-urlencoded", "application/xml", None])
def test_a_body_of_another_type_is_not_taken_for_json(
    standing: LiveCoordinator, http: httpx.Client, content_type: str | None
) -> None:
    headers = {"Content-Type": content_type} if content_type else {}
    answer = http.post("/v1/sites", content=b'{"name": "by-mistake"}', headers=headers)
    refused(answer, 422, "invalid")
    assert "by-mistake" not in http.get("/v1/sites").text
    site = standing.http("site", "a")
    for body in (b"\xff\xfe", json.dumps(CLAIM).encode()):
        refused(site.post("/v1/tasks/claim", content=body, headers=headers), 422, "invalid")


@pytest.mark.parametrize(
    ("method", "path", "status"),
    [
        ("GET", "/nothing", 404),
        ("GET", "/v1/nothing", 404),
        ("GET", "/v1/runs/nothing", 404),
        ("GET", "/v1/runs/%00", 404),
        ("GET", "/v1/runs/%ff%fe", 404),
        ("GET", "/v1/runs/..%2f..%2fetc", 404),
        ("PUT", "/v1/runs", 405),
        ("DELETE", "/v1/sites", 405),
        ("GET", "/v1/runs/x/rounds/one", 422),
        ("GET", "/v1/runs/x/rounds/-1", 422),
        ("GET", f"/v1/runs/x/rounds/{10**30}", 422),
        ("GET", "/v1/runs/x/versions/first/export", 422),
        ("GET", f"/v1/runs/x/versions/{10**30}/export", 422),
        ("GET", "/v1/blobs/sha256:xyz", 422),
        ("GET", "/v1/runs?limit=0", 422),
        ("GET", "/v1/runs?limit=501", 422),
        ("GET", "/v1/runs?limit=ten", 422),
        ("GET", f"/v1/runs?cursor={'x' * 513}", 422),
    ],
)
def test_a_path_that_leads_nowhere_is_a_problem_too(http: httpx.Client, method: str, path: str, status: int) -> None:
    answer = http.request(method, path)
    code = {404: "not-found", 405: "bad-request", 422: "invalid"}[status]
    refused(answer, status, code)


@pytest.mark.parametrize(
    ("path", "methods"),
    [
        ("/v1/admin/status", "GET"),
        ("/v1/runs", "GET, POST"),
        ("/v1/runs/x", "GET, PATCH"),
        ("/v1/runs/preview", "POST"),
        ("/v1/blobs/read", "POST"),
        ("/v1/blobs/x", "GET, HEAD"),
    ],
)
def test_a_wrong_method_names_all_the_right_ones(http: httpx.Client, path: str, methods: str) -> None:
    answer = http.put(path)
    assert (answer.status_code, answer.headers.get("Allow")) == (405, methods), answer.text


def test_every_problem_has_the_page_that_its_type_points_to(standing: LiveCoordinator) -> None:
    with standing.bare() as stranger:
        index = stranger.get("/problems").text
        assert set(re.findall('href="/problems/([^"]+)"', index)) == set(KINDS)
        for code, kind in KINDS.items():
            answer = stranger.get(f"/problems/{code}")
            assert (answer.status_code, answer.headers["Content-Type"]) == (200, "text/html; charset=utf-8")
            assert "<script" not in answer.text
            assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
            # Code in a remedy is marked as code.
            shown = " ".join(html.unescape(re.sub("<[^>]+>", "", answer.text)).split())
            for said in (kind.title, kind.meaning, *map(first_up, kind.causes), kind.remedy, *reasons(kind)):
                assert said.replace("`", "") in shown, (kind, said)


def test_a_problem_that_there_is_not_has_no_page(standing: LiveCoordinator) -> None:
    for path in ("nonsense", "<script>", "x" * 5_000, "a/b"):
        refused(standing.bare().get(f"/problems/{path}"), 404, "not-found")


def test_a_command_that_is_refused_names_the_page_of_the_problem(standing: LiveCoordinator) -> None:
    told = cli.tessera("admin", "audit", TESSERA_URL=standing.url, TESSERA_TOKEN=standing.token("viewer"))
    (page,) = re.findall(r"http\S+", told.stderr)
    assert page == f"{standing.url}/problems/forbidden"
    assert standing.bare().get(page).status_code == 200
