"""Secrets that are replaced, tokens that are revoked and sites that are suspended, while they are in use."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx

from tessera.shared.api.admin import TokenSpec
from tessera.shared.api.token_format import hash_of, new_secret
from tests.support.coordinator import WAIT_SECONDS, Clock, LiveCoordinator, refused, refusing, until
from tests.support.federation import ScriptedWorker, small_model, start_run, values
from tests.support.raw import PART, announced

CLAIM = {"worker": "w", "instance": "0" * 32, "datasets": {"data": 10}, "methods": ["fedavg"]}
HEARTBEAT = "/v1/tasks/x/heartbeat"


def holding(coordinator: LiveCoordinator, secret: str) -> httpx.Client:
    return coordinator.bare({"Authorization": f"Bearer {secret}"})


def is_admitted(http: httpx.Client) -> bool:
    return http.post(HEARTBEAT, json={"token": 0}).status_code == 404


def rotate(coordinator: LiveCoordinator, shown: str, fresh: str) -> httpx.Response:
    return holding(coordinator, shown).post("/v1/tokens/rotate", json={"secret_hash": hash_of(fresh)})


def test_the_secret_before_is_admitted_for_a_while_and_the_new_one_at_once(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, rotation_grace_seconds=60) as coordinator:
        old, new = coordinator.token("site", "a"), new_secret("site")
        assert rotate(coordinator, old, new).json() == {"grace_seconds": 60.0}
        # A lost answer is given again, whichever secret is shown.
        assert rotate(coordinator, old, new).status_code == rotate(coordinator, new, new).status_code == 200
        assert is_admitted(holding(coordinator, old))
        assert is_admitted(holding(coordinator, new))
        clock.advance(60)
        refused(holding(coordinator, old).post(HEARTBEAT, json={"token": 0}), 401, "unauthenticated")
        assert is_admitted(holding(coordinator, new))
        (token,) = (token for token in coordinator.client().tokens() if token.role == "site")
        assert [e.action for e in coordinator.client().audit() if e.subject == token.id] == [
            "token.issue",
            "token.rotate",
        ]


def test_a_secret_that_was_replaced_cannot_replace_its_successor(coordinator: LiveCoordinator) -> None:
    old, new = coordinator.token("site", "a"), new_secret("site")
    assert rotate(coordinator, old, new).status_code == 200
    refused(rotate(coordinator, old, new_secret("site")), 409, "conflict")
    # Nor is a secret taken that is another's, or was.
    other = coordinator.token("site", "b")
    for taken in (new, old):
        refused(rotate(coordinator, other, taken), 409, "conflict")


def test_an_administrator_rotates_any_valid_token_and_may_repeat_it(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    old, other, new = coordinator.token("site", "a"), coordinator.token("site", "b"), new_secret("site")
    spec = TokenSpec(name="gone", role="viewer")
    gone = admin.issue_token(spec)
    admin.revoke_token(gone.id)
    token = next(token for token in admin.tokens() if token.site == "a")
    for _ in "12":
        assert admin.rotate_token(token.id, hash_of(new)).grace_seconds == 600
    assert is_admitted(holding(coordinator, old))
    assert is_admitted(holding(coordinator, new))
    assert [entry.action for entry in admin.audit() if entry.subject == token.id] == ["token.issue", "token.rotate"]
    for named, secret, code in (
        ("nothing", new_secret("site"), "not-found"),
        (gone.id, new_secret("viewer"), "conflict"),
        (token.id, other, "conflict"),
        (token.id, old, "conflict"),
    ):
        with refusing(code):
            admin.rotate_token(named, hash_of(secret))


def test_revoking_a_token_ends_both_of_its_secrets(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    old, new = coordinator.token("site", "a"), new_secret("site")
    rotate(coordinator, old, new)
    admin.revoke_token(next(token.id for token in admin.tokens() if token.role == "site"))
    assert not is_admitted(holding(coordinator, old))
    assert not is_admitted(holding(coordinator, new))


def test_a_claim_that_waits_ends_when_its_token_is_revoked(tmp_path: Path) -> None:
    wait = {"Prefer": "wait=600"}
    with LiveCoordinator(tmp_path, max_wait_seconds=600) as coordinator, ThreadPoolExecutor(2) as pool:
        admin = coordinator.client()
        http = coordinator.http("site", "a")
        (token,) = (token for token in admin.tokens() if token.role == "site")
        colleague = coordinator.http("site", "a")
        waiting = pool.submit(http.post, "/v1/tasks/claim", json=CLAIM, headers=wait)
        other = pool.submit(colleague.post, "/v1/tasks/claim", json={**CLAIM, "worker": "v"}, headers=wait)
        until(lambda: len(coordinator.services.waiters.workers) == 2)
        admin.revoke_token(token.id)
        assert "revoked" in refused(waiting.result(WAIT_SECONDS), 401, "unauthenticated").detail
        # Who waits with another token of the same site goes on waiting, and is not refused.
        assert not other.done()
        coordinator.services.release_waiters()
        assert other.result(WAIT_SECONDS).status_code == 204


def test_an_upload_that_runs_when_its_token_is_revoked_goes_no_further(coordinator: LiveCoordinator) -> None:
    http, admin = coordinator.http("site", "a"), coordinator.client()
    data = bytes(range(256)) * 4
    location = http.post("/v1/uploads", headers=announced(data)).headers["Location"]
    part = {**PART, "Upload-Offset": "0"}
    assert http.patch(location, headers=part, content=data[:512]).status_code == 204
    admin.revoke_token(next(token.id for token in admin.tokens() if token.role == "site"))
    rest = http.patch(location, headers={**part, "Upload-Offset": "512"}, content=data[512:])
    refused(rest, 401, "unauthenticated")


def test_none_of_a_suspended_site_s_tokens_is_admitted_until_it_is_resumed(coordinator: LiveCoordinator) -> None:
    admin = coordinator.client()
    first, second, other = (coordinator.http("site", site) for site in "aab")
    (site,) = (site for site in admin.sites() if site.name == "a")
    suspended = admin.suspend_site(site.id)
    assert suspended.suspended_at is not None
    assert admin.suspend_site(site.id) == suspended
    for http in (first, second):
        answer = http.post(HEARTBEAT, json={"token": 0})
        assert refused(answer, 403, "site-suspended").detail == "site a is suspended"
    assert is_admitted(other)
    admin.resume_site(site.id)
    admin.resume_site(site.id)
    assert is_admitted(first)
    assert is_admitted(second)
    actions = [entry.action for entry in admin.audit() if entry.subject == site.id]
    assert actions == ["site.create", "site.suspend", "site.resume"]
    with refusing("not-found"):
        admin.suspend_site("none")


def test_a_suspended_site_is_chosen_for_no_round_and_waits_for_nothing(coordinator: LiveCoordinator) -> None:
    admin, model = coordinator.client(), small_model()
    here, gone = (ScriptedWorker(coordinator.client("site", site, patience_seconds=0)).enrol() for site in "ab")
    (site,) = (site for site in admin.sites() if site.name == "b")
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(gone.claim, 5)
        until(lambda: coordinator.services.waiters.workers)
        admin.suspend_site(site.id)
        with refusing("site-suspended", "suspended"):
            waiting.result(WAIT_SECONDS)
    run = start_run(admin, model, values(model), rounds=1)
    here.train(here.take())
    until(lambda: admin.run(run.id).state == "completed")
    assert {task.worker for made in admin.rounds(run.id) for task in made.tasks} == {"a/w"}
    seen = {worker.site: (worker.live, worker.suspended) for worker in admin.workers()}
    assert seen == {"a": (True, False), "b": (False, True)}
