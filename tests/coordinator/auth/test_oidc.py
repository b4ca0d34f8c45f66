"""People who show the tokens of an OpenID provider, and such tokens as nobody should be admitted by."""

from __future__ import annotations

import base64
import hmac
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import jwt
import pytest
from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import rsa
from pydantic import ValidationError

from tessera.coordinator.auth.oidc import AGAIN_SECONDS, KEYS_SECONDS, MAX_ANSWER_BYTES, OIDCVerifier
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.admin import StudyMember
from tessera.shared.problems import Unauthenticated, Unavailable
from tests.support.cli import tessera
from tests.support.coordinator import Clock, LiveCoordinator, refused
from tests.support.federation import small_model, start_run, values
from tests.support.provider import KEYS, ROLES, Provider, providing, published, settings

OTHER = rsa.generate_private_key(public_exponent=65537, key_size=2048)


@pytest.fixture(scope="module")
def provider() -> Iterator[Provider]:
    with providing() as made:
        yield made


@pytest.fixture(scope="module")
def live(tmp_path_factory: pytest.TempPathFactory, provider: Provider) -> Iterator[LiveCoordinator]:
    folder = tmp_path_factory.mktemp("oidc")
    with LiveCoordinator(folder, auth_failures_per_minute=10_000, **settings(provider)) as coordinator:
        yield coordinator


def asking(live: LiveCoordinator, token: str, path: str = "/v1/runs") -> Any:
    return live.bare({"Authorization": f"Bearer {token}"}).get(path)


@pytest.mark.parametrize("algorithm", list(KEYS))
def test_a_person_whom_the_provider_vouches_for_is_admitted(
    live: LiveCoordinator, provider: Provider, algorithm: str
) -> None:
    assert asking(live, provider.token(algorithm)).status_code == 200


@pytest.mark.parametrize(
    ("held", "path", "status"),
    [
        (["auditors"], "/v1/runs", 200),
        (["auditors"], "/v1/admin/tokens", 403),
        ("tessera-admins", "/v1/admin/tokens", 200),
        # The strongest of several.
        (["auditors", "tessera-admins"], "/v1/admin/tokens", 200),
        (["staff"], "/v1/runs", 403),
        # Names of our own roles are no roles unless the settings say so.
        (["admin"], "/v1/runs", 403),
        ({"admin": True}, "/v1/runs", 403),
        (None, "/v1/runs", 403),
    ],
)
def test_what_a_person_may_do_follows_from_the_claim(
    live: LiveCoordinator, provider: Provider, held: Any, path: str, status: int
) -> None:
    assert asking(live, provider.token(roles=held), path).status_code == status


def test_a_claim_may_lie_within_another(provider: Provider) -> None:
    people = OIDCVerifier(CoordinatorSettings(**settings(provider, oidc_role_claim="realm_access.roles")))
    token = provider.token(roles=None, realm_access={"roles": ["auditors"]})
    assert people.principal(token).role == "viewer"


def test_the_audit_names_the_provider_and_the_person_and_runs_are_theirs(
    live: LiveCoordinator, provider: Provider
) -> None:
    alice, bob = (live.bare({"Authorization": f"Bearer {provider.token(sub=name)}"}) for name in ("alice", "bob"))
    admin, model = live.client(), small_model()
    run = start_run(admin, model, values(model))
    spec = run.spec.model_dump(mode="json")
    made = alice.post("/v1/runs", json=spec)
    assert made.status_code == 201, made.text
    entry = [entry for entry in admin.audit() if entry.action == "run.create"][-1]
    assert entry.actor == f"orchestrator:{provider.url}#alice"
    wish = {"json": {"state": "cancelled"}, "headers": {"If-Match": made.headers["ETag"]}}
    path = made.headers["Location"]
    assert [http.patch(path, **wish).status_code for http in (bob, alice)] == [403, 200]


def test_a_person_is_in_the_default_study_until_an_administrator_decides(
    live: LiveCoordinator, provider: Provider
) -> None:
    http = live.bare({"Authorization": f"Bearer {provider.token(sub='carol')}"})
    admin, carol = live.client(), StudyMember(kind="person", member="carol")

    def studies() -> list[str]:
        return [one["name"] for one in http.get("/v1/studies").json()["items"]]

    admin.create_study("stroke")
    assert studies() == ["default"]
    # Nobody leaves a study by joining another, nor joins one by leaving.
    admin.add_to_study("stroke", carol)
    assert studies() == ["default", "stroke"]
    admin.remove_from_study("default", carol)
    assert studies() == ["stroke"]
    admin.remove_from_study("stroke", carol)
    assert studies() == []
    dora = {"Authorization": f"Bearer {provider.token(sub='dora')}"}
    admin.remove_from_study("default", StudyMember(kind="person", member=f"{provider.url}#dora"))
    assert live.bare(dora).get("/v1/studies").json()["items"] == []


def test_a_token_of_the_provider_is_no_site_s(live: LiveCoordinator, provider: Provider) -> None:
    answer = live.bare({"Authorization": f"Bearer {provider.token(roles='tessera-admins')}"}).post("/v1/tasks/claim")
    refused(answer, 403, "forbidden")


def test_the_command_line_takes_such_a_token(live: LiveCoordinator, provider: Provider) -> None:
    shown = tessera("run", "list", TESSERA_URL=live.url, TESSERA_TOKEN=provider.token())
    assert shown.returncode == 0, shown.stderr


# ---------------------------------------------------------------- what is not believed


def unsigned(provider: Provider) -> str:
    return jwt.encode(jwt.decode(provider.token(), options={"verify_signature": False}), None, "none")


def signed_with_the_public_key(provider: Provider) -> str:
    """As if the provider's public key were a shared secret."""
    pem = (
        KEYS["RS256"]
        .public_key()
        .public_bytes(serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo)
    )
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    parts = [{"alg": "HS256", "typ": "JWT", "kid": "RS256"}, claims]
    message = b".".join(encoded(json.dumps(part).encode()) for part in parts)
    return b".".join((message, encoded(hmac.digest(pem, message, "sha256")))).decode()


def encoded(data: bytes) -> bytes:
    return base64.urlsafe_b64encode(data).rstrip(b"=")


def signed_by_another(provider: Provider, **headers: str) -> str:
    claims = jwt.decode(provider.token(), options={"verify_signature": False})
    return jwt.encode(claims, OTHER, "RS256", headers={"kid": "RS256", **headers})


def test_what_the_provider_did_not_sign_is_refused(live: LiveCoordinator, provider: Provider) -> None:
    whole = provider.token()
    header, payload, signature = whole.split(".")
    changed = json.loads(base64.urlsafe_b64decode(payload + "==")) | {"roles": ["tessera-admins"]}
    forged = [
        unsigned(provider),
        signed_with_the_public_key(provider),
        signed_by_another(provider),
        ".".join((header, encoded(json.dumps(changed).encode()).decode(), signature)),
        f"{header}.{payload}.",
        "a.b.c",
        "..",
        # Deeper than any parser goes.
        f"{encoded(b'[' * 6_000).decode()}.{payload}.{signature}",
        f"{encoded(json.dumps({'alg': 'RS256', 'kid': ['RS256']}).encode()).decode()}.{payload}.{signature}",
    ]
    for token in forged:
        answer = asking(live, token)
        refused(answer, 401, "unauthenticated")
        assert payload not in answer.text
    assert asking(live, whole).status_code == 200


@pytest.mark.parametrize(
    "claims",
    [
        {"aud": "elsewhere"},
        {"aud": None},
        {"iss": "https://elsewhere.example"},
        {"iss": None},
        {"exp": 1},
        {"exp": None},
        {"iat": None},
        {"nbf": 1 << 40},
        {"sub": None},
        {"sub": ""},
        {"sub": "a\nb"},
        {"sub": "x" * 256},
    ],
)
def test_a_token_for_others_or_another_time_is_refused(
    live: LiveCoordinator, provider: Provider, claims: dict[str, Any]
) -> None:
    refused(asking(live, provider.token(**claims)), 401, "unauthenticated")


def test_nothing_is_fetched_from_where_a_token_says(live: LiveCoordinator, provider: Provider) -> None:
    with providing() as elsewhere:
        elsewhere.keys = published(RS256=OTHER)
        for header in ("jku", "x5u", "iss"):
            token = signed_by_another(provider, **{header: f"{elsewhere.url}/keys"})
            refused(asking(live, token), 401, "unauthenticated")
        refused(asking(live, provider.token(iss=elsewhere.url)), 401, "unauthenticated")
        assert elsewhere.asked == []


# ---------------------------------------------------------------- keys


def test_a_new_key_is_fetched_when_it_is_first_named_and_a_withdrawn_one_is_refused_after_it() -> None:
    clock = Clock(0.0)
    with providing() as provider:
        provider.keys = published(RS256=KEYS["RS256"])
        people = OIDCVerifier(CoordinatorSettings(**settings(provider)), clock)
        for _ in range(3):
            people.principal(provider.token("RS256"))
        # Where the keys are, and the keys, once.
        assert len(provider.asked) == 2
        provider.keys = published(ES256=KEYS["ES256"])
        clock.advance(AGAIN_SECONDS)
        assert people.principal(provider.token("ES256")).role == "orchestrator"
        with pytest.raises(Unauthenticated):
            people.principal(provider.token("RS256"))
        assert len(provider.asked) == 4


def test_a_key_that_is_withdrawn_is_refused_within_an_hour() -> None:
    clock = Clock(0.0)
    with providing() as provider:
        people = OIDCVerifier(CoordinatorSettings(**settings(provider)), clock)
        people.principal(provider.token("RS256"))
        provider.keys = published(ES256=KEYS["ES256"])
        clock.advance(KEYS_SECONDS + 1)
        with pytest.raises(Unauthenticated):
            people.principal(provider.token("RS256"))


def test_keys_that_nobody_has_are_not_asked_for_at_every_request() -> None:
    clock = Clock(0.0)
    with providing() as provider:
        people = OIDCVerifier(CoordinatorSettings(**settings(provider)), clock)
        for number in range(20):
            token = jwt.encode({"sub": "x"}, OTHER, "RS256", headers={"kid": str(number)})
            with pytest.raises(Unauthenticated):
                people.principal(token)
        assert len(provider.asked) == 2


def test_while_the_provider_is_away_its_keys_hold_for_an_hour_and_then_nobody_is_admitted() -> None:
    clock = Clock(0.0)
    with providing() as provider:
        people, token = OIDCVerifier(CoordinatorSettings(**settings(provider)), clock), provider.token(exp=1 << 40)
        people.principal(token)
    clock.advance(KEYS_SECONDS - 1)
    people.principal(token)
    clock.advance(AGAIN_SECONDS)
    with pytest.raises(Unavailable, match="keys cannot be fetched"):
        people.principal(token)


@pytest.mark.parametrize(
    "about",
    [
        {"issuer": "https://elsewhere.example"},
        {"jwks_uri": "http://127.0.0.1:9/keys"},
        {"jwks_uri": "file:///etc/passwd"},
        {"jwks_uri": "http://[bad"},
        {"jwks_uri": None},
        {"padding": "x" * MAX_ANSWER_BYTES},
    ],
)
def test_a_provider_that_is_not_what_it_was_said_to_be_is_not_followed(about: dict[str, Any]) -> None:
    with providing(**about) as provider:
        people = OIDCVerifier(CoordinatorSettings(**settings(provider)), Clock(0.0))
        with pytest.raises(Unavailable):
            people.principal(provider.token())
        assert len(provider.asked) == 1


@pytest.mark.parametrize(
    "keys", [{}, {"keys": []}, {"keys": 3}, {"keys": [{"kty": "oct", "k": "AA", "kid": "RS256"}]}]
)
def test_a_provider_without_keys_admits_nobody(keys: dict[str, Any]) -> None:
    with providing() as provider:
        provider.keys = keys
        with pytest.raises((Unavailable, Unauthenticated)):
            OIDCVerifier(CoordinatorSettings(**settings(provider)), Clock(0.0)).principal(provider.token())


def test_keys_on_another_host_are_used_if_the_settings_name_them() -> None:
    with providing() as host, providing(jwks_uri=f"{host.url}/keys") as provider:
        people = OIDCVerifier(CoordinatorSettings(**settings(provider, oidc_keys_url=f"{host.url}/keys")), Clock(0.0))
        assert people.principal(provider.token()).name == f"{provider.url}#alice"
        assert provider.asked == []


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({"oidc_issuer": "http://login.example", "oidc_audience": "t", "oidc_roles": ROLES}, "not an https:// URL"),
        ({"oidc_issuer": "https://login.example", "oidc_roles": ROLES}, "requires oidc_audience"),
        ({"oidc_issuer": "https://login.example", "oidc_audience": "t"}, "oidc_roles"),
        ({"oidc_roles": {"x": "site"}}, "viewer"),
        (
            {
                "oidc_issuer": "https://login.example",
                "oidc_audience": "t",
                "oidc_client_id": "t",
                "oidc_roles": ROLES,
                "public_url": "https://tessera.example",
            },
            "oidc_audience and oidc_client_id are the same",
        ),
    ],
)
def test_settings_that_would_admit_anybody_are_refused(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        CoordinatorSettings(**given)


def test_without_a_provider_such_tokens_are_unknown(standing: LiveCoordinator, tmp_path: Path) -> None:
    assert "not known" in refused(asking(standing, "a.b.c"), 401, "unauthenticated").detail
