"""Who may call what, and what each may see."""

from __future__ import annotations

from pathlib import Path

import pytest

from shared.wire import TokenSpec
from tests.support.coordinator import Clock, LiveCoordinator, refused, refusing
from tests.support.federation import ScriptedWorker, small_model, start_run, values

DIGEST = f"sha256:{'0' * 64}"
EVERYBODY = ("admin", "orchestrator", "viewer", "site")
ALLOWED = {
    ("GET", "/v1/runs"): {"admin", "orchestrator", "viewer"},
    ("POST", "/v1/runs"): {"admin", "orchestrator"},
    ("GET", "/v1/runs/x"): {"admin", "orchestrator", "viewer"},
    ("PATCH", "/v1/runs/x"): {"admin", "orchestrator"},
    ("GET", "/v1/runs/x/rounds"): {"admin", "orchestrator", "viewer"},
    ("GET", "/v1/runs/x/rounds/1"): {"admin", "orchestrator", "viewer"},
    ("GET", "/v1/runs/x/versions"): {"admin", "orchestrator", "viewer"},
    ("GET", "/v1/runs/x/versions/latest/export"): {"admin", "orchestrator", "viewer"},
    ("GET", "/v1/runs/x/versions/1/difference"): set(EVERYBODY),
    ("GET", "/v1/runs/x/metrics"): {"admin", "orchestrator", "viewer"},
    ("POST", "/v1/tasks/claim"): {"site"},
    ("GET", "/v1/tasks/x"): set(EVERYBODY),
    ("POST", "/v1/tasks/x/heartbeat"): {"site"},
    ("POST", "/v1/tasks/x/update"): {"site"},
    ("POST", "/v1/tasks/x/evaluation"): {"site"},
    ("POST", "/v1/tasks/x/failure"): {"site"},
    ("POST", "/v1/tasks/x/release"): {"site"},
    ("GET", f"/v1/blobs/{DIGEST}"): set(EVERYBODY),
    ("HEAD", f"/v1/blobs/{DIGEST}"): set(EVERYBODY),
    ("POST", "/v1/blobs/read"): set(EVERYBODY),
    ("POST", "/v1/uploads"): {"admin", "orchestrator", "site"},
    ("HEAD", "/v1/uploads/x"): {"admin", "orchestrator", "site"},
    ("PATCH", "/v1/uploads/x"): {"admin", "orchestrator", "site"},
    ("GET", "/v1/sites"): {"admin", "orchestrator", "viewer"},
    ("POST", "/v1/sites"): {"admin"},
    ("GET", "/v1/workers"): {"admin", "orchestrator", "viewer"},
    ("POST", "/v1/admin/tokens"): {"admin"},
    ("GET", "/v1/admin/tokens"): {"admin"},
    ("DELETE", "/v1/admin/tokens/x"): {"admin"},
    ("GET", "/v1/enrolments"): {"admin"},
    ("POST", "/v1/enrolments/x/approve"): {"admin"},
    ("POST", "/v1/enrolments/x/decline"): {"admin"},
    ("POST", "/v1/sites/x/suspend"): {"admin"},
    ("POST", "/v1/sites/x/resume"): {"admin"},
    ("POST", "/v1/tokens/rotate"): {"site"},
    ("GET", "/v1/admin/audit"): {"admin"},
    ("GET", "/v1/admin/status"): {"admin", "orchestrator", "viewer"},
    ("GET", "/metrics"): {"admin", "orchestrator", "viewer"},
}
OPEN = {("GET", "/healthz/live"), ("GET", "/healthz/ready"), ("GET", "/version")}


def test_the_table_above_has_every_operation_there_is(standing: LiveCoordinator) -> None:
    paths = standing.bare().get("/openapi.json").json()["paths"]
    parameters = {"run_id": "x", "task_id": "x", "upload_id": "x", "token_id": "x", "digest": DIGEST}
    served = set()
    for path, methods in paths.items():
        number = "latest" if "export" in path else "1"
        at = path.format(**parameters, number=number)
        served |= {(method.upper(), at) for method in methods}
    assert served == set(ALLOWED) | OPEN


@pytest.mark.parametrize("role", EVERYBODY)
def test_each_role_is_admitted_to_its_own_and_nothing_else(standing: LiveCoordinator, role: str) -> None:
    http = standing.http(role, "a" if role == "site" else None)
    for (method, path), roles in ALLOWED.items():
        answer = http.request(method, path)
        assert (answer.status_code == 403) == (role not in roles), (method, path, answer.text)
        if role not in roles and method != "HEAD":
            assert f"yours has role {role}" in refused(answer, 403, "forbidden").detail


def test_without_a_token_only_health_and_version_answer(standing: LiveCoordinator) -> None:
    http = standing.bare()
    for method, path in ALLOWED:
        answer = http.request(method, path)
        assert (answer.status_code, answer.headers["WWW-Authenticate"]) == (401, "Bearer"), (method, path)
    for method, path in OPEN:
        assert http.request(method, path).status_code in (200, 204)


@pytest.mark.parametrize("header", ["Bearer nonsense", "Bearer", "Basic YTpi", "tessera_admin_x", "Bearer a b"])
def test_an_unknown_token_is_refused_and_not_repeated_back(standing: LiveCoordinator, header: str) -> None:
    answer = standing.bare({"Authorization": header}).get("/v1/runs")
    refused(answer, 401, "unauthenticated")
    assert "nonsense" not in answer.text


def test_a_revoked_token_ends_at_once(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    issued = admin.issue_token(TokenSpec(name="short-lived", role="viewer"))
    http = coordinator.bare({"Authorization": f"Bearer {issued.secret}"})
    assert http.get("/v1/runs").status_code == 200
    admin.revoke_token(issued.id)
    assert "revoked" in refused(http.get("/v1/runs"), 401, "unauthenticated").detail
    admin.revoke_token(issued.id)
    with refusing("not-found"):
        admin.revoke_token("no-such-token")


def test_a_token_expires_to_the_day(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock) as coordinator:
        issued = coordinator.client().issue_token(TokenSpec(name="t", role="viewer", expires_in_days=2))
        http = coordinator.bare({"Authorization": f"Bearer {issued.secret}"})
        clock.advance(2 * 86400 - 1)
        assert http.get("/v1/runs").status_code == 200
        clock.advance(1)
        assert "expired" in refused(http.get("/v1/runs"), 401, "unauthenticated").detail


def test_a_token_s_secret_has_256_bits_and_is_kept_nowhere(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    issued = admin.issue_token(TokenSpec(name="t", role="viewer"))
    assert issued.secret.startswith("tessera_viewer_")
    # 32 bytes in base64 without padding are 43 characters.
    assert len(issued.secret.removeprefix("tessera_viewer_")) == 43
    coordinator.services.database.engine.dispose()
    for file in Path(coordinator.settings.staging_dir).parent.rglob("*"):
        assert file.is_dir() or issued.secret.encode() not in file.read_bytes(), file
    assert "secret" not in next(t for t in admin.tokens() if t.id == issued.id).model_dump()


def test_a_token_for_a_site_that_is_not_there_is_refused(standing: LiveCoordinator) -> None:
    with refusing("invalid") as caught:
        standing.client().issue_token(TokenSpec(name="t", role="site", site="nowhere"))
    assert [fault.pointer for fault in caught.value.errors] == ["/site"]


def test_a_site_sees_its_own_tasks_only(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    start_run(client, model, values(model))
    mine, other = (coordinator.client("site", name) for name in "ab")
    task = ScriptedWorker(mine).take()
    assert mine.task(task.id).worker == "a/w"
    assert client.task(task.id).worker == "a/w"
    for call in (other.task, lambda t: other.heartbeat(t, task.token), lambda t: other.release(t, task.token)):
        with refusing("not-found", "there is no task"):
            call(task.id)
    assert mine.task(task.id).state == "leased"


def test_a_site_reads_the_blobs_of_runs_that_it_has_a_task_in_and_no_others(coordinator: LiveCoordinator) -> None:
    client, model = coordinator.client(), small_model()
    mine, other = (coordinator.client("site", name) for name in "ab")
    run = start_run(client, model, values(model), dataset="mine")
    worker = ScriptedWorker(mine, datasets={"mine": 1})
    digest = run.version.digest
    assert not mine.has_blob(digest)
    worker.take()
    assert mine.has_blob(digest)
    assert not other.has_blob(digest)
    assert coordinator.client("viewer").has_blob(digest)


def test_what_a_site_sends_is_read_by_no_other_site(coordinator: LiveCoordinator) -> None:
    mine, other = (coordinator.client("site", name) for name in "ab")
    digest = mine.put_bytes(b"private")
    refusals = []
    for client in (other, mine, coordinator.client("viewer"), coordinator.client("admin")):
        with refusing("not-found") as caught:
            client.read_blob(digest)
        refusals.append(caught.value.detail)
    # The same words as for bytes that nobody ever sent: a digest tells nothing about what others hold.
    with refusing("not-found") as caught:
        other.read_blob(DIGEST)
    assert {text.replace(digest, "") for text in refusals} == {caught.value.detail.replace(DIGEST, "")}


def test_an_orchestrator_reads_what_it_sent_before_any_run_uses_it(coordinator: LiveCoordinator) -> None:
    orchestrator = coordinator.client("orchestrator")
    digest = orchestrator.put_bytes(b"a model to be")
    assert orchestrator.read_blob(digest) == b"a model to be"
    # Orchestrators read all runs, and so what runs are to be made of; what a site sent is nobody's to read.
    assert coordinator.client("orchestrator").has_blob(digest)
    sent = coordinator.client("site", "a").put_bytes(b"an update")
    assert not orchestrator.has_blob(sent)


def test_an_upload_belongs_to_its_owner(coordinator: LiveCoordinator) -> None:
    mine, other = (coordinator.http("site", name) for name in "ab")
    headers = {"Upload-Length": "3", "Upload-Complete": "?0", "Repr-Digest": f"sha-256=:{'A' * 43}=:"}
    location = mine.post("/v1/uploads", headers=headers).headers["Location"]
    assert mine.head(location).status_code == 204
    assert other.head(location).status_code == 404
    part = {"Upload-Offset": "0", "Content-Type": "application/partial-upload"}
    refused(other.patch(location, headers=part, content=b"x"), 404, "not-found")
    assert mine.head(location).headers["Upload-Offset"] == "0"
