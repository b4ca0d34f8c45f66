"""Tokens, and what those who hold one may see. What each role may do at each route is in `test_routes.py`."""

from __future__ import annotations

from contextlib import suppress
from datetime import datetime, timedelta
from pathlib import Path

import pytest
from sqlalchemy import select

from tessera.coordinator.db.snapshots import live_workers
from tessera.coordinator.db.tables import WorkerRow
from tessera.shared.api.admin import TokenSpec
from tests.support.coordinator import Clock, LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values

DIGEST = f"sha256:{'0' * 64}"


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


def test_the_last_token_of_an_administrator_is_not_revoked(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    mine = next(token for token in admin.tokens() if token.role == "admin")
    with refusing("conflict", "last valid token of an administrator"):
        admin.revoke_token(mine.id)
    other = admin.issue_token(TokenSpec(name="second", role="admin", expires_in_days=1))
    admin.revoke_token(mine.id)
    assert coordinator.bare({"Authorization": f"Bearer {other.secret}"}).get("/v1/runs").status_code == 200


def test_a_name_is_one_valid_tokens_and_is_free_once_that_is_revoked(coordinator: LiveCoordinator) -> None:
    admin, alice = coordinator.client(), TokenSpec(name="alice", role="viewer")
    first = admin.issue_token(alice)
    with refusing("conflict", "a valid token of role viewer is named 'alice' already"):
        admin.issue_token(TokenSpec(name="alice", role="admin"))
    admin.revoke_token(first.id)
    assert admin.issue_token(alice).id != first.id


def test_a_token_is_listed_with_its_last_use(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock) as coordinator:
        admin = coordinator.client()
        issued = admin.issue_token(TokenSpec(name="reader", role="viewer"))

        def last_used() -> datetime | None:
            return next(token.last_used_at for token in admin.tokens() if token.id == issued.id)

        assert last_used() is None
        http = coordinator.bare({"Authorization": f"Bearer {issued.secret}"})
        http.get("/v1/runs")
        used_at = last_used()
        assert used_at
        clock.advance(59)
        http.get("/v1/runs")
        assert last_used() == used_at
        clock.advance(1)
        http.get("/v1/runs")
        assert last_used() == used_at + timedelta(seconds=60)
        # What is stored, without what the process still holds.
        coordinator.services.last_seen.store_uses(coordinator.services.database)
        assert last_used() == used_at + timedelta(seconds=60)


def test_a_worker_whose_token_is_revoked_is_not_live(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    for name in ("gone", "stays"):
        ScriptedWorker(coordinator.client("site", name), name=name).enrol()

    def states() -> dict[str, tuple[bool, bool]]:
        return {worker.name: (worker.live, worker.revoked) for worker in admin.workers()}

    assert states() == {"gone": (True, False), "stays": (True, False)}

    def shown() -> str | None:
        with coordinator.services.database.snapshot() as session:
            return session.scalar(select(WorkerRow.token_id).where(WorkerRow.name == "gone"))

    admin.revoke_token(until(shown))
    assert states() == {"gone": (False, True), "stays": (True, False)}
    with coordinator.services.database.snapshot() as session:
        assert [worker.name for worker in live_workers(session, 0.0)] == ["stays/stays"]


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
        # SQLite removes its own beside the database when the last connection ends.
        with suppress(FileNotFoundError):
            assert file.is_dir() or issued.secret.encode() not in file.read_bytes(), file
    assert "secret" not in next(t for t in admin.tokens() if t.id == issued.id).model_dump()


def test_a_token_for_a_site_that_is_not_there_is_refused(standing: LiveCoordinator) -> None:
    with refusing("invalid") as caught:
        standing.client().issue_token(TokenSpec(name="t", role="site", site="nowhere"))
    assert [fault.pointer for fault in caught.value.errors] == ["/site"]


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
    assert coordinator.client("orchestrator").has_blob(digest)
    with refusing("forbidden"):
        coordinator.client("viewer").read_blob(digest)


def test_what_a_site_sends_is_read_by_no_other_site(coordinator: LiveCoordinator) -> None:
    mine, other = (coordinator.client("site", name) for name in "ab")
    digest = mine.put_bytes(b"private")
    refusals = []
    for client in (other, mine, coordinator.client("orchestrator"), coordinator.client("admin")):
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
    # Even within a study only a run shares it; what a site sent is nobody's to read.
    assert not coordinator.client("orchestrator").has_blob(digest)
    sent = coordinator.client("site", "a").put_bytes(b"an update")
    assert not orchestrator.has_blob(sent)
