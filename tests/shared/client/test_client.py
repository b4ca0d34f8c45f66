"""The typed client: pages, blobs that break off, and uploads that go on."""

from __future__ import annotations

import hashlib
import io
import json
from collections.abc import Callable
from gzip import compress
from pathlib import Path
from types import SimpleNamespace

import pytest

from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.framing import pack_submission
from tessera.shared.api.tasks import Submission, TaskView
from tessera.shared.client import transport
from tessera.shared.client.bulk import PIECE_BYTES
from tessera.shared.client.client import Client
from tessera.shared.client.transfers import LEAST_PIECE_BYTES, OCTETS, ONE_REQUEST_BYTES
from tessera.shared.problems import (
    MEDIA_TYPE,
    DigestMismatch,
    Forbidden,
    InvalidUpdate,
    NotFound,
    OffsetMismatch,
    Problem,
    RangeUnsatisfiable,
    Unauthenticated,
    Unavailable,
)
from tessera.shared.tensors.lazy import digest_of
from tests.support.coordinator import LiveCoordinator, refusing
from tests.support.scripted import Answer, Asked, answering, answering_by

DATA = bytes(range(256)) * 8_000
"""2,048,000 bytes: more than goes in one request."""

SUBMISSION = Submission(token=1, version=digest_of(b""), update=digest_of(DATA), examples=1)
ACCEPTED = (
    TaskView(id="t", run="r", round=1, worker="a/w", kind="train", state="accepted", token=1, attempts=1)
    .model_dump_json()
    .encode()
)


def client_of(url: str) -> Client:
    return Client(url, "t", verify=False, sleep=lambda _: None)


def test_a_download_that_breaks_off_goes_on_where_it_was() -> None:
    half = 3 * PIECE_BYTES
    partial = Answer(206, DATA[half:], {"Content-Range": f"bytes {half}-{len(DATA) - 1}/{len(DATA)}"})
    moved: list[int] = []
    file = io.BytesIO()
    with answering(Answer(body=DATA, breaks_after=half), partial) as (url, asked), client_of(url) as client:
        assert client.fetch_blob(digest_of(DATA), file, moved.append) == len(DATA)
    assert file.getvalue() == DATA
    assert sum(moved) == len(DATA)
    assert [a.headers.get("Range") for a in asked] == [None, f"bytes={half}-"]


def test_bytes_that_are_not_those_of_their_name_are_refused() -> None:
    other = answering(Answer(body=b"other bytes"))
    with other as (url, _), client_of(url) as client, pytest.raises(DigestMismatch):
        client.read_blob(digest_of(DATA))


AS_JSON = {"Content-Type": "application/json"}
ODD = [Answer(200, b'{"status": "ok"}', AS_JSON), Answer(200, b"[]", AS_JSON), Answer(204, b"")]
"""Answers of something on the way that takes every request for a success."""


@pytest.mark.parametrize("odd", ODD)
def test_a_foreign_success_amid_a_coordinators_answers_ends_nothing(odd: Answer) -> None:
    with answering(Answer(200, ACCEPTED), odd, Answer(200, ACCEPTED)) as (url, asked), client_of(url) as client:
        assert client.task("t") == client.task("t")
    assert len(asked) == 3


@pytest.mark.parametrize("odd", ODD)
def test_a_foreign_success_is_not_stored_as_a_blob(odd: Answer) -> None:
    answers = Answer(200, ACCEPTED), odd, Answer(200, DATA)
    file = io.BytesIO()
    with answering(*answers) as (url, _), client_of(url) as client:
        client.task("t")
        client.copy_blob(digest_of(DATA), file)
    with answering(*answers) as (url, _), client_of(url) as client:
        client.task("t")
        client.copy_blobs([digest_of(DATA)], file)
    assert file.getvalue() == 2 * DATA


@pytest.mark.parametrize("size", [0, 1, ONE_REQUEST_BYTES, ONE_REQUEST_BYTES + 1, len(DATA)])
def test_what_is_put_is_what_is_read(standing_coordinator: LiveCoordinator, size: int, tmp_path: Path) -> None:
    client = standing_coordinator.client("orchestrator")
    moved: list[int] = []
    path = tmp_path / "data"
    path.write_bytes(DATA[:size])
    digest = client.put_file(path, moved.append)
    assert digest == f"sha256:{hashlib.sha256(DATA[:size]).hexdigest()}"
    assert sum(moved) == size
    assert client.has_blob(digest)
    assert client.read_blob(digest) == DATA[:size]
    assert client.put_bytes(DATA[:size]) == digest


def test_an_upload_that_breaks_off_goes_on_from_the_offset_that_the_server_tells() -> None:
    at = {"Location": "/v1/uploads/u", "Upload-Complete": "?0", "Upload-Offset": "0"}
    answers = [
        Answer(201, b"", at),
        Answer(204, b"", {"Upload-Offset": "0"}),
        Answer(503, b""),
        Answer(204, b"", {"Upload-Offset": "1500000"}),
        Answer(204, b"", {"Upload-Offset": str(len(DATA))}),
    ]
    with answering(*answers) as (url, asked), client_of(url) as client:
        assert client.put_bytes(DATA) == digest_of(DATA)
    assert [(a.method, a.headers.get("Upload-Offset"), len(a.body)) for a in asked] == [
        ("POST", None, 0),
        ("HEAD", None, 0),
        ("PATCH", "0", len(DATA)),
        ("HEAD", None, 0),
        ("PATCH", "1500000", len(DATA) - 1_500_000),
    ]


BEGUN = Answer(201, b"", {"Location": "/v1/uploads/u", "Upload-Complete": "?0"})


def refusal(problem: Problem) -> Answer:
    return Answer(problem.status, json.dumps(problem.json()).encode(), {"Content-Type": MEDIA_TYPE})


@pytest.mark.parametrize("status", [403, 404, 409, 410])
def test_a_gateways_answer_without_a_body_does_not_end_an_upload(status: int) -> None:
    gateway, offset = Answer(status, b"", {"Content-Type": MEDIA_TYPE}), {"Upload-Offset": "1500000"}
    answers = BEGUN, gateway, refusal(OffsetMismatch("")), Answer(204, b"", offset), Answer(204, b"")
    with answering(*answers) as (url, asked), client_of(url) as client:
        client.put_bytes(DATA)
    assert [a.method for a in asked] == ["POST", "HEAD", "PATCH", "HEAD", "PATCH"]


@pytest.mark.parametrize("place", ["/tessera", "https://elsewhere.example", "https://elsewhere.example/tessera"])
def test_token_and_bytes_go_to_the_clients_own_url_whatever_a_proxy_puts_before_an_upload_s_path(place: str) -> None:
    begun = Answer(201, b"", {"Location": f"{place}/v1/uploads/u", "Upload-Complete": "?0"})
    answers = begun, Answer(204, b"", {"Upload-Offset": "0"}), Answer(204, b"")
    with answering(*answers) as (url, asked), client_of(f"{url}/tessera") as client:
        client.put_bytes(DATA)
    assert [a.path for a in asked] == ["/tessera/v1/uploads", *2 * ["/tessera/v1/uploads/u"]]


@pytest.mark.parametrize("problem", [NotFound("no upload"), Unauthenticated("revoked"), Forbidden("paused")])
def test_an_upload_is_not_tried_for_minutes_after_a_coordinators_refusal(problem: Problem) -> None:
    answers = BEGUN, Answer(problem.status, b"", {"Content-Type": MEDIA_TYPE}), refusal(problem)
    with answering(*answers) as (url, asked), client_of(url) as client, pytest.raises(type(problem)):
        client.put_bytes(DATA)
    assert [a.method for a in asked] == ["POST", "HEAD", "PATCH"]


def limited(coordinator: LiveCoordinator, most_bytes: int) -> Callable[[Asked], Answer]:
    """Answers of a proxy before a coordinator that limits the bodies of requests, as nginx does."""

    def choose(ask: Asked) -> Answer:
        if len(ask.body) > most_bytes:
            return Answer(413, b"<html>too large</html>", {"Content-Type": "text/html", "Server": "nginx"})
        headers = {name: value for name, value in ask.headers.items() if name not in ("Host", "Content-Length")}
        passed = coordinator.bare(headers).request(ask.method, ask.path, content=ask.body)
        kept = {
            name: value for name, value in passed.headers.items() if name.lower() not in ("content-length", "date")
        }
        return Answer(passed.status_code, passed.content, kept)

    return choose


@pytest.mark.parametrize("size", [ONE_REQUEST_BYTES, len(DATA)])
def test_an_upload_passes_a_proxy_that_limits_bodies_in_pieces_that_fit(
    standing_coordinator: LiveCoordinator, size: int
) -> None:
    asked: list[Asked] = []
    token = standing_coordinator.token("orchestrator")
    data = DATA[:size][::-1]
    with (
        answering_by(limited(standing_coordinator, 600_000), asked) as url,
        Client(url, token, patience_seconds=0, verify=False) as client,
    ):
        assert client.read_blob(client.put_bytes(data)) == data
        refused = sum(len(ask.body) > 600_000 for ask in asked)
        # The limit is met once.
        assert client.read_blob(client.put_bytes(data[1:])) == data[1:]
        assert sum(len(ask.body) > 600_000 for ask in asked) == refused


def test_a_body_that_no_piece_is_small_enough_for_names_the_proxy_and_its_size() -> None:
    asked: list[Asked] = []
    at = {"Location": "/v1/uploads/u", "Upload-Complete": "?0", "Upload-Offset": "0"}

    def choose(ask: Asked) -> Answer:
        page = Answer(413, b"", {"Content-Type": "text/html", "Server": "nginx"})
        return page if ask.body else Answer(201, b"", at)

    with answering_by(choose, asked) as url, client_of(url) as client, refusing("intermediary-answer", "nginx"):
        client.put_bytes(DATA)
    assert min(len(ask.body) for ask in asked if ask.body) <= LEAST_PIECE_BYTES


def submitted(*answers: Answer) -> tuple[list[tuple[str, str, int]], list[int]]:
    """The requests by which an update that follows its submission is submitted, and its bytes that were sent."""
    sent: list[int] = []
    with answering(*answers) as (url, asked), client_of(url) as client:
        assert client.submit_file("t", SUBMISSION, io.BytesIO(DATA), len(DATA), sent.append).state == "accepted"
    return [(a.method, a.path, len(a.body)) for a in asked], sent


def test_an_update_follows_its_submission_in_one_request() -> None:
    requests, sent = submitted(Answer(body=ACCEPTED))
    head = pack_submission(SUBMISSION, len(DATA))
    assert requests == [("POST", "/v1/tasks/t/update", len(head) + len(DATA))]
    assert sum(sent) == len(DATA)


def test_an_update_that_a_proxy_finds_too_large_is_uploaded_and_submitted() -> None:
    page = Answer(413, b"<html></html>", {"Content-Type": "text/html"})
    requests, _ = submitted(page, Answer(201, b"", {"Upload-Complete": "?1"}), Answer(body=ACCEPTED))
    assert [path for _, path, _ in requests] == ["/v1/tasks/t/update", "/v1/uploads", "/v1/tasks/t/update"]


@pytest.mark.parametrize("status", [401, 409, 503])
def test_an_update_whose_submission_breaks_off_is_uploaded_from_the_offset_and_submitted(status: int) -> None:
    problem = {401: Unauthenticated, 409: OffsetMismatch, 503: Unavailable}[status]("no")
    broken = Answer(status, json.dumps(problem.json()).encode(), {"Content-Type": MEDIA_TYPE})
    at = {"Location": "/v1/uploads/u", "Upload-Complete": "?0"}
    answers = Answer(201, b"", at), Answer(204, b"", {"Upload-Offset": "1500000"}), Answer(204, b"")
    requests, _ = submitted(broken, *answers, Answer(body=ACCEPTED))
    assert requests[1:] == [
        ("POST", "/v1/uploads", 0),
        ("HEAD", "/v1/uploads/u", 0),
        ("PATCH", "/v1/uploads/u", len(DATA) - 1_500_000),
        ("POST", "/v1/tasks/t/update", len(pack_submission(SUBMISSION))),
    ]


def test_a_refused_update_is_not_sent_again() -> None:
    refusal = Answer(422, json.dumps(InvalidUpdate("not finite").json()).encode(), {"Content-Type": MEDIA_TYPE})
    with answering(refusal) as (url, asked), client_of(url) as client, pytest.raises(InvalidUpdate):
        client.submit_file("t", SUBMISSION, io.BytesIO(DATA), len(DATA))
    assert len(asked) == 1


@pytest.mark.parametrize(("body", "comes"), [(b"123", True), (b"1234", False)])
def test_a_difference_that_is_no_smaller_than_its_blocks_is_not_read(body: bytes, *, comes: bool) -> None:
    # The server closes the connection, on which the client leaves bytes unread.
    answer, file = Answer(body=body, breaks_after=len(body)), io.BytesIO()
    with answering(answer) as (url, _), client_of(url) as client:
        assert client.copy_difference("r", 2, 1, file, below=4) is comes
    assert file.getvalue() == (body if comes else b"")


def test_a_collection_is_followed_over_its_pages() -> None:
    pages = [
        Answer(body=b'{"items": [{"id": "1", "name": "a", "created_at": 0}], "next_cursor": "c"}'),
        Answer(body=b'{"items": [{"id": "2", "name": "b", "created_at": 0}], "next_cursor": null}'),
    ]
    with answering(*pages) as (url, asked), client_of(url) as client:
        assert [site.name for site in client.sites()] == ["a", "b"]
    assert [a.path for a in asked] == ["/v1/sites", "/v1/sites?cursor=c"]


def test_each_creation_carries_a_key_that_its_repeats_share() -> None:
    site = b'{"id": "1", "name": "a", "created_at": 0}'
    with answering(Answer(503, b""), Answer(201, site)) as (url, asked), client_of(url) as client:
        client.create_site("a")
        client.create_site("a")
    keys = [a.headers["Idempotency-Key"] for a in asked]
    assert keys[0] == keys[1]
    assert keys[1] != keys[2]


def test_fields_of_a_newer_coordinator_are_passed_over() -> None:
    newer = b'{"version": "9", "protocol_min": 1, "protocol_max": 7, "colour": "blue"}'
    with answering(Answer(body=newer)) as (url, _), client_of(url) as client:
        assert client.about().protocol_max == 7


def test_the_client_speaks_to_a_real_coordinator(standing_coordinator: LiveCoordinator) -> None:
    client = standing_coordinator.client()
    site = client.create_site("somewhere")
    token = client.issue_token(TokenSpec(name="w", role="site", site="somewhere"))
    assert site in list(client.sites())
    assert token.id in {known.id for known in client.tokens()}
    assert client.about().protocol_min <= client.status().protocol <= client.about().protocol_max
    client.revoke_token(token.id)
    with refusing("not-found"):
        client.run("nothing")


def test_a_range_beyond_the_end_is_a_problem_with_the_size(standing_coordinator: LiveCoordinator) -> None:
    client = standing_coordinator.client("orchestrator")
    digest = client.put_bytes(b"short")
    with pytest.raises(RangeUnsatisfiable) as caught:
        client._transport.request("GET", f"/v1/blobs/{digest}", headers={"Range": "bytes=5-"})
    assert caught.value.headers["content-range"] == "bytes */5"


@pytest.fixture(scope="module")
def standing_coordinator(tmp_path_factory: pytest.TempPathFactory) -> object:
    with LiveCoordinator(tmp_path_factory.mktemp("client")) as live:
        yield live


def test_a_redirect_is_a_refusal_and_is_not_followed() -> None:
    with answering(Answer(204)) as (elsewhere, lured):
        away = Answer(301, b"", {"Location": elsewhere})
        with answering(away) as (url, _), client_of(url) as client, refusing("intermediary-answer", elsewhere):
            client.has_blob(digest_of(DATA))
    assert lured == []


def test_a_transfer_that_gets_on_outlasts_any_patience() -> None:
    # Each answer breaks after one more piece; no pause between two failures may use up a patience of nothing.
    steps = [
        Answer(206 if start else 200, DATA[start:], breaks_after=PIECE_BYTES)
        for start in range(0, len(DATA), PIECE_BYTES)
    ]
    file = io.BytesIO()
    with answering(*steps) as (url, _), Client(url, "t", verify=False, patience_seconds=0.2) as client:
        assert client.fetch_blob(digest_of(DATA), file) == len(DATA)


def test_an_export_that_gets_further_each_time_outlasts_any_patience(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 0.0

    def sleep(_: float) -> None:
        nonlocal now
        now += 11  # more than the patience of 10 s

    monkeypatch.setattr(transport, "time", SimpleNamespace(monotonic=lambda: now))
    steps = [Answer(body=DATA, breaks_after=count * PIECE_BYTES) for count in (1, 2, 3)]
    options = {"verify": False, "sleep": sleep, "patience_seconds": 10}
    file, moved = io.BytesIO(), list[int]()
    with answering(*steps, Answer(body=DATA)) as (url, _), Client(url, "t", **options) as client:
        client.export("r", file, progress=moved.append)
    assert (file.getvalue(), sum(moved)) == (DATA, len(DATA))
    # The second answer breaks off earlier than the first.
    less = answering(steps[1], steps[0])
    with less as (url, _), Client(url, "t", **options) as client, refusing("unavailable"):
        client.export("r", io.BytesIO())


@pytest.mark.parametrize("empty", [True, False])
def test_pages_without_an_end_are_given_up(monkeypatch: pytest.MonkeyPatch, empty: bool) -> None:
    monkeypatch.setattr("tessera.shared.client.client.MAX_PAGES", 5)
    site = {"id": "s", "name": "north", "created_at": "2026-01-01T00:00:00Z"}
    body = json.dumps({"items": [] if empty else [site], "next_cursor": "again"}).encode()
    refused = refusing("answer-not-understood", "do not end")
    with answering(Answer(body=body)) as (url, asked), client_of(url) as client, refused:
        list(client.sites())
    assert len(asked) == (1 if empty else 5)


@pytest.mark.parametrize("method", ["export", "fetch_blob", "copy_blobs", "about"])
def test_no_body_is_taken_in_an_encoding(method: str) -> None:
    # 64 MiB of zeros.
    packed = Answer(200, compress(bytes(64 << 20)), {"Content-Encoding": "gzip", "Content-Type": OCTETS})
    file, digest = io.BytesIO(), digest_of(DATA)
    with answering(packed) as (url, asked), client_of(url) as client, refusing("answer-not-understood", "gzip"):
        {
            "export": lambda: client.export("r", file),
            "fetch_blob": lambda: client.fetch_blob(digest, file),
            "copy_blobs": lambda: client.copy_blobs([digest], file),
            "about": client.about,
        }[method]()
    assert not file.getvalue()
    assert asked[0].headers["Accept-Encoding"] == "identity"


def test_changes_of_a_run_are_reported_with_and_without_a_stream_of_events() -> None:
    """A run is read again after each piece of the stream, when the stream has ended, and when it is refused."""
    events = Answer(body=b"event: progress\ndata: {}\n\n", headers={"Content-Type": "text/event-stream"})
    refused = Answer(503, b"busy")
    with answering(events, refused) as (url, asked), client_of(url) as client:
        changes = client.changes("r")
        requests = []
        for _ in range(4):
            next(changes)
            requests.append(len(asked))
        changes.close()  # type: ignore[attr-defined]
    # One stream with one piece and its end; then two refusals.
    assert requests == [1, 1, 2, 3]
    assert {one.path for one in asked} == {"/v1/runs/r/events"}
