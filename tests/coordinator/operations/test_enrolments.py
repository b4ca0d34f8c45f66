"""How a worker comes in: it asks, an administrator admits it by a code, and its secret stays where it was made."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest

from tessera.coordinator.operations.enrolments import KEPT_SECONDS, LETTERS, PENDING_SECONDS, makes_way
from tessera.shared.api.admin import Approval, Enrolment, EnrolmentSpec, TokenSpec
from tessera.shared.api.token_format import hash_of, new_secret, normal_code
from tessera.shared.client.client import Client
from tessera.shared.problems import NameInUse
from tests.support.coordinator import Clock, LiveCoordinator, refused, refusing
from tests.support.federation import ScriptedWorker

FAST = {"enrolments_per_minute": 1_000}


def spec(secret: str, site: str | None = "north", **more: str) -> EnrolmentSpec:
    return EnrolmentSpec(site=site, worker="gpu-1", secret_hash=hash_of(secret), **more)


def asking(coordinator: LiveCoordinator, token: str | None = None) -> Client:
    client = Client(coordinator.url, token, patience_seconds=0, verify=False)
    coordinator._clients.append(client)
    return client


def approve(coordinator: LiveCoordinator, asked: Enrolment, site: str = "north", *, create: bool = True) -> Enrolment:
    approval = Approval(code=asked.code, site=site, create_site=create)
    return coordinator.client().approve(asked.id, approval)


def admitted(coordinator: LiveCoordinator, secret: str) -> bool:
    answer = coordinator.bare({"Authorization": f"Bearer {secret}"}).post("/v1/tasks/x/heartbeat", json={"token": 0})
    # There is no such task, which only who is admitted is told.
    return answer.status_code == 404


def test_a_worker_is_admitted_by_its_code_and_its_secret_is_a_token_from_then_on(
    coordinator: LiveCoordinator,
) -> None:
    secret = new_secret("site")
    asked = asking(coordinator).ask_to_join(spec(secret, device="cpu", version="0.1.0"))
    assert (asked.state, asked.site, asked.worker, asked.device) == ("pending", "north", "gpu-1", "cpu")
    assert re.fullmatch(f"[{LETTERS}]{{4}}-[{LETTERS}]{{4}}", asked.code)
    assert not admitted(coordinator, secret)
    admin = coordinator.client()
    assert [waiting.code for waiting in admin.enrolments()] == [asked.code]
    # Typed by a person who was told it by telephone.
    approve(coordinator, asked.model_copy(update={"code": asked.code.lower().replace("-", " ")}))
    assert asking(coordinator, secret).enrolment(asked.id).state == "approved"
    assert admitted(coordinator, secret)
    assert list(admin.enrolments()) == []
    assert [site.name for site in admin.sites()] == ["north"]
    (token,) = (token for token in admin.tokens() if token.role == "site")
    assert (token.name, token.site) == ("north.gpu-1", "north")
    actions = [entry.action for entry in admin.audit()]
    assert actions[-3:] == ["site.create", "enrolment.approve", "token.issue"]


def test_each_valid_token_has_a_name_of_its_own_by_which_people_revoke_it(coordinator: LiveCoordinator) -> None:
    admin, long = coordinator.client(), "n" * 64
    for site in ("north", "north", "north", long, long):
        approve(coordinator, asking(coordinator).ask_to_join(spec(new_secret("site"), site)), site)
    names = ["north.gpu-1", "north.gpu-1-2", "north.gpu-1-3", long, f"{long[:56]}-2"]
    tokens = [token for token in admin.tokens() if token.role == "site"]
    assert [token.name for token in tokens] == names
    # The name of a token that is over is free again.
    admin.revoke_token(tokens[1].id)
    approve(coordinator, asking(coordinator).ask_to_join(spec(new_secret("site"))))
    assert [token.name for token in admin.tokens() if token.role == "site"][-1] == "north.gpu-1-2"


def test_the_secret_is_nowhere_at_the_coordinator(coordinator: LiveCoordinator) -> None:
    secret = new_secret("site")
    asked = asking(coordinator).ask_to_join(spec(secret))
    approve(coordinator, asked)
    asking(coordinator, secret).enrolment(asked.id)
    coordinator.services.database.engine.dispose()
    for file in Path(coordinator.settings.staging_dir).parent.rglob("*"):
        # SQLite removes its own beside the database when the last connection ends.
        with suppress(FileNotFoundError):
            assert file.is_dir() or secret.encode() not in file.read_bytes(), file


def test_who_asks_again_because_the_answer_was_lost_waits_once(coordinator: LiveCoordinator) -> None:
    secret = new_secret("site")
    first, again = (asking(coordinator).ask_to_join(spec(secret)) for _ in range(2))
    assert (first.id, first.code) == (again.id, again.code)
    approve(coordinator, first)
    assert asking(coordinator).ask_to_join(spec(secret)).state == "approved"


def test_a_secret_whose_token_was_revoked_does_not_come_in_again(coordinator: LiveCoordinator) -> None:
    admin, secret = coordinator.client(), new_secret("site")
    approve(coordinator, asking(coordinator).ask_to_join(spec(secret)))
    admin.revoke_token(next(token.id for token in admin.tokens() if token.role == "site"))
    with refusing("conflict", "issued before"):
        asking(coordinator).ask_to_join(spec(secret))


def test_only_who_shows_the_secret_is_told_what_became_of_it(coordinator: LiveCoordinator) -> None:
    asked = asking(coordinator).ask_to_join(spec(new_secret("site")))
    bare = coordinator.bare()
    refused(bare.get(f"/v1/enrolments/{asked.id}"), 401, "unauthenticated")
    details = set()
    for token, enrolment in ((new_secret("site"), asked.id), (coordinator.token("admin"), asked.id), ("x", "none")):
        answer = bare.get(f"/v1/enrolments/{enrolment}", headers={"Authorization": f"Bearer {token}"})
        details.add(refused(answer, 404, "not-found").detail.replace(enrolment, ""))
    assert len(details) == 1


def test_a_wrong_code_or_an_unknown_site_admits_nobody(coordinator: LiveCoordinator) -> None:
    secret = new_secret("site")
    asked = asking(coordinator).ask_to_join(spec(secret))
    wrong = "BBBB-BBBB" if asked.code != "BBBB-BBBB" else "CCCC-CCCC"
    with refusing("invalid") as caught:
        approve(coordinator, asked.model_copy(update={"code": wrong}))
    assert [fault.pointer for fault in caught.value.errors] == ["/code"]
    with refusing("invalid") as caught:
        approve(coordinator, asked, create=False)
    assert [fault.pointer for fault in caught.value.errors] == ["/site"]
    assert not admitted(coordinator, secret)
    assert list(coordinator.client().sites()) == []


def test_a_second_machine_does_not_join_under_the_name_of_one_at_work(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, liveness_seconds=90, **FAST) as coordinator:
        ScriptedWorker(coordinator.client("site", "north"), name="gpu-1").enrol()
        asked = asking(coordinator).ask_to_join(spec(new_secret("site")))
        with pytest.raises(NameInUse, match="called gpu-1"):
            approve(coordinator, asked, create=False)
        token = coordinator.client().issue_token(TokenSpec(name="t", role="enrolment", site="north", uses=1))
        with pytest.raises(NameInUse, match="called gpu-1"):
            asking(coordinator, token.secret).ask_to_join(spec(new_secret("site")))
        # The refusal uses nothing up.
        clock.advance(91)
        assert approve(coordinator, asked, create=False).state == "approved"
        assert asking(coordinator, token.secret).ask_to_join(spec(new_secret("site"))).state == "approved"


def test_an_administrator_may_name_another_site_than_the_worker_does(coordinator: LiveCoordinator) -> None:
    secret = new_secret("site")
    coordinator.client().create_site("south")
    asked = asking(coordinator).ask_to_join(spec(secret))
    assert approve(coordinator, asked, "south", create=False).site == "south"
    assert [site.name for site in coordinator.client().sites()] == ["south"]


def test_what_was_declined_or_waited_too_long_is_over(tmp_path: Path) -> None:
    clock = Clock()
    with LiveCoordinator(tmp_path, clock=clock, **FAST) as coordinator:
        secret = new_secret("site")
        first = asking(coordinator).ask_to_join(spec(secret))
        coordinator.client().decline(first.id)
        assert asking(coordinator, secret).enrolment(first.id).state == "declined"
        with refusing("conflict", "declined"):
            approve(coordinator, first)
        second = asking(coordinator).ask_to_join(spec(secret))
        assert second.id != first.id
        clock.advance(PENDING_SECONDS)
        assert asking(coordinator, secret).enrolment(second.id).state == "expired"
        assert list(coordinator.client().enrolments()) == []
        with refusing("conflict", "expired"):
            approve(coordinator, second)
        # Neither stands in the way of another try, and in a day nothing is left of them.
        clock.advance(KEPT_SECONDS + 1)
        assert asking(coordinator).ask_to_join(spec(secret)).state == "pending"
        with refusing("not-found"):
            asking(coordinator, secret).enrolment(first.id)


def test_only_so_many_wait_and_one_address_takes_a_tenth_of_the_places(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, pending_enrolments=20, **FAST) as coordinator:
        client = asking(coordinator)
        for _ in range(2):
            client.ask_to_join(spec(new_secret("site")))
        with refusing("busy", "pending_enrolments"):
            client.ask_to_join(spec(new_secret("site")))


def ask_from(coordinator: LiveCoordinator, address: str) -> int:
    """As through a proxy on this machine, which says whom it speaks for."""
    body = spec(new_secret("site")).model_dump(mode="json")
    return coordinator.bare({"X-Forwarded-For": address}).post("/v1/enrolments", json=body).status_code


def test_one_customer_of_ipv6_does_not_close_joining_for_others(tmp_path: Path) -> None:
    settings = {"pending_enrolments": 20, "enrolments_per_minute": 100, "behind_proxy": True}
    with LiveCoordinator(tmp_path, **settings) as coordinator:
        # A tenth of the places for all addresses of a /64;
        asked = [ask_from(coordinator, f"2001:db8:0:1::{number}") for number in range(3)]
        assert asked == [201, 201, 503]
        # for all networks of a /48 every place, as long as nobody else asks.
        assert [ask_from(coordinator, f"2001:db8:0:{number}::1") for number in range(2, 20)] == [201] * 18
        assert ask_from(coordinator, "2001:db8:0:99::1") == 503
        for honest in ("2001:db8:1::1", "192.0.2.1", "192.0.2.1"):
            assert ask_from(coordinator, honest) == 201
        assert ask_from(coordinator, "2001:db8:0:99::2") == 503
        waiting = [enrolment.address for enrolment in coordinator.client().enrolments()]
        assert len(waiting) == 20
        assert waiting[-3:] == ["2001:db8:1::1", "192.0.2.1", "192.0.2.1"]
        # Those that came last of them made way.
        assert waiting[-4] == "2001:db8:0:16::1"


def test_no_process_of_this_machine_names_another_address_unless_it_is_a_proxy(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, enrolments_per_minute=2) as coordinator:
        assert [ask_from(coordinator, f"192.0.2.{number}") for number in range(3)] == [201, 201, 429]


def test_of_networks_with_one_place_each_none_makes_way() -> None:
    waiting = [(str(number), f"192.0.2.{number}") for number in range(3)]
    assert makes_way(waiting, "198.51.100.1") is None
    assert makes_way([*waiting, ("last", "192.0.2.1")], "198.51.100.1") == "last"
    assert makes_way([*waiting, ("last", "192.0.2.1")], "192.0.2.0") is None


def test_guesses_from_many_addresses_of_one_network_are_bounded_together(tmp_path: Path) -> None:
    limits = {"auth_failures_per_minute": 2, "behind_proxy": True}
    with LiveCoordinator(tmp_path, clock=Clock(), **limits) as coordinator:

        def guess(address: str) -> int:
            wrong = {"X-Forwarded-For": address, "Authorization": "Bearer wrong"}
            return coordinator.bare(wrong).get("/v1/runs").status_code

        assert [guess(f"2001:db8:0:1::{number}") for number in range(3)] == [401, 401, 429]
        assert guess("2001:db8:1::1") == 401
        # Twenty a minute for a /48, of which three were made.
        found = [guess(f"2001:db8:0:{number}::1") for number in range(2, 22)]
        assert found == [401] * 17 + [429] * 3
        assert [guess(f"192.0.2.{number}") for number in range(3)] == [401] * 3
        assert [guess("::ffff:192.0.2.9") for _ in range(2)] == [401] * 2
        assert guess("192.0.2.9") == 429


# ---------------------------------------------------------------- enrolment tokens


def enrolment_token(coordinator: LiveCoordinator, uses: int = 1) -> str:
    admin = coordinator.client()
    if not list(admin.sites()):
        admin.create_site("north")
    wanted = TokenSpec(name="join-north", role="enrolment", site="north", expires_in_days=1, uses=uses)
    return admin.issue_token(wanted).secret


def test_an_enrolment_token_admits_at_once_and_is_used_up_by_it(coordinator: LiveCoordinator) -> None:
    admin, token, secret = coordinator.client(), enrolment_token(coordinator), new_secret("site")
    asked = asking(coordinator, token).ask_to_join(spec(secret, site=None))
    assert (asked.state, asked.site) == ("approved", "north")
    assert admitted(coordinator, secret)
    # Its answer may have been lost: the same secret is not another worker.
    assert asking(coordinator, token).ask_to_join(spec(secret)).id == asked.id
    with refusing("unauthenticated", "used up"):
        asking(coordinator, token).ask_to_join(spec(new_secret("site")))
    actions = [entry.action for entry in admin.audit()]
    assert actions[-2:] == ["enrolment.redeem", "token.issue"]


def test_an_enrolment_token_admits_a_worker_that_waits_for_an_administrator(coordinator: LiveCoordinator) -> None:
    token, secret = enrolment_token(coordinator), new_secret("site")
    # Its site was misspelt when it asked without a token.
    waiting = asking(coordinator).ask_to_join(spec(secret, site="nroth"))
    with refusing("unauthenticated"):
        asking(coordinator, new_secret("enrolment")).ask_to_join(spec(secret, site=None))
    asked = asking(coordinator, token).ask_to_join(spec(secret, site=None))
    assert (asked.id, asked.state, asked.site) == (waiting.id, "approved", "north")
    assert admitted(coordinator, secret)
    assert list(coordinator.client().enrolments()) == []
    # The first process learns of it too, and the token is used up.
    assert asking(coordinator, secret).enrolment(waiting.id).state == "approved"
    with refusing("unauthenticated", "used up"):
        asking(coordinator, token).ask_to_join(spec(new_secret("site")))


def test_of_two_that_use_one_enrolment_token_at_once_one_is_admitted(tmp_path: Path) -> None:
    with LiveCoordinator(tmp_path, **FAST) as coordinator:
        token = enrolment_token(coordinator)
        secrets = [new_secret("site") for _ in range(8)]

        def join(secret: str) -> int:
            body = spec(secret).model_dump_json()
            headers = {"Authorization": f"Bearer {token}", "Content-Type": "application/json"}
            return coordinator.bare(headers).post("/v1/enrolments", content=body).status_code

        with ThreadPoolExecutor(8) as pool:
            statuses = sorted(pool.map(join, secrets))
        assert statuses == [201] + [401] * 7
        assert sum(admitted(coordinator, secret) for secret in secrets) == 1


def test_an_enrolment_token_admits_to_its_own_site_and_to_nothing_else(coordinator: LiveCoordinator) -> None:
    token = enrolment_token(coordinator)
    with refusing("invalid") as caught:
        asking(coordinator, token).ask_to_join(spec(new_secret("site"), site="south"))
    assert [fault.pointer for fault in caught.value.errors] == ["/site"]
    with refusing("forbidden"):
        asking(coordinator, coordinator.token("site", "a")).ask_to_join(spec(new_secret("site")))
    # A refusal has not used it up.
    assert asking(coordinator, token).ask_to_join(spec(new_secret("site"))).state == "approved"


def test_a_revoked_enrolment_token_admits_nobody(coordinator: LiveCoordinator) -> None:
    token = enrolment_token(coordinator, uses=2)
    admin = coordinator.client()
    admin.revoke_token(next(found.id for found in admin.tokens() if found.role == "enrolment"))
    with refusing("unauthenticated", "revoked"):
        asking(coordinator, token).ask_to_join(spec(new_secret("site")))


def test_a_secret_that_is_a_token_s_already_cannot_join(coordinator: LiveCoordinator) -> None:
    with refusing("conflict", "issued before"):
        asking(coordinator).ask_to_join(spec(coordinator.token("site", "a")))


@pytest.mark.parametrize("typed", ["wdjb mjht", "WDJB-MJHT", "WDJBMJHT", " wdjb - mjht "])
def test_a_code_may_be_typed_as_one_likes(typed: str) -> None:
    assert normal_code(typed) == "WDJB-MJHT"
