"""People who sign in elsewhere: the tokens of one OpenID provider, verified with its public keys.

A request goes to the provider that the settings name and to nobody else: what a token says of where keys are (`jku`,
`x5u`, another issuer) is not looked at.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, get_args
from urllib.parse import urlsplit

import httpx
import jwt
import structlog

from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.settings import CoordinatorSettings, PersonRole
from tessera.shared.problems import Forbidden, Unauthenticated, Unavailable

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""Those with a public key. Neither `none` nor one whose key a verifier could sign with."""

KEYS_SECONDS = 3_600.0
"""How long keys count as the provider's: one that it withdraws is refused after that at the latest."""

AGAIN_SECONDS = 30.0
"""How long is waited before a key that is not known is asked for again: anybody can name one."""

FETCH_SECONDS = 5.0
MAX_ANSWER_BYTES = 1 << 20
LEEWAY_SECONDS = 30.0
MAX_SUBJECT_LENGTH = 255

REQUIRED = ("iss", "sub", "aud", "exp", "iat")

log = structlog.get_logger()


class ProviderFault(Exception):
    """The provider did not answer, or not with what an OpenID provider answers."""


class OIDCVerifier:
    """Who the holders of a provider's tokens are. Safe to use from several threads."""

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._issuer = settings.oidc_issuer or ""
        self._audience = settings.oidc_audience
        self._claim = settings.oidc_role_claim
        self._roles = settings.oidc_roles
        self._keys_url = settings.oidc_keys_url
        self._clock = clock
        self._lock = threading.Lock()
        self._keys: dict[str, jwt.PyJWK] = {}
        self._fetched_at: float | None = None
        self._tried_at: float | None = None

    def principal(self, token: str) -> Principal:
        """Return who holds this token. Raises Unauthenticated, Forbidden for a person without a role here, and
        Unavailable if the provider's keys cannot be had."""
        return self.person(self.verified(token, self._audience))

    def person(self, claims: Mapping[str, Any]) -> Principal:
        """Return who verified claims are of. Raises Unauthenticated, and Forbidden for a person without a role
        here."""
        subject = str(claims["sub"])
        if not (0 < len(subject) <= MAX_SUBJECT_LENGTH and subject.isprintable()):
            raise Unauthenticated("the subject of the token is none that can be written down")
        person = f"{self._issuer}#{subject}"
        named = _texts(_claim(claims, self._claim))
        held = {self._roles[name] for name in named if name in self._roles}
        for role in get_args(PersonRole):
            if role in held:
                return Principal.person(person, role)
        raise Forbidden(
            f"nothing in the claim {self._claim!r} of {person} is a role here (setting oidc_roles)",
            remedy="Have the provider's administrators put you into one of the groups that are, and sign in again.",
        )

    def verified(self, token: str, audience: str | None) -> dict[str, Any]:
        """Return what the provider says in a token of its own for `audience`. Raises Unauthenticated and
        Unavailable."""
        try:
            kid = jwt.get_unverified_header(token).get("kid")
            claims: dict[str, Any] = jwt.decode(
                token,
                self._key(kid),
                algorithms=list(ALGORITHMS),
                audience=audience,
                issuer=self._issuer,
                leeway=LEEWAY_SECONDS,
                options={"require": list(REQUIRED)},
            )
        except (jwt.PyJWTError, RecursionError) as fault:
            told = f"the token is not one of {self._issuer} for {audience}: {str(fault)[:200]}"
            raise Unauthenticated(told, remedy="Sign in again at the provider.") from fault
        return claims

    def _key(self, kid: object) -> jwt.PyJWK:
        now = self._clock()
        if self._is_due(kid, now):
            self._refresh(now)
        with self._lock:
            keys = self._keys
        if not keys:
            raise Unavailable("the OpenID provider's keys cannot be had", retry_after_seconds=1)
        found = keys.get(kid) if isinstance(kid, str) else None
        if found is None:
            raise jwt.InvalidKeyError("it names no key of the provider's")
        return found

    def _is_due(self, kid: object, now: float) -> bool:
        """Return whether the caller is to fetch the keys: one at a time, so that a slow provider holds up one
        alone."""
        with self._lock:
            old = self._fetched_at is None or now - self._fetched_at > KEYS_SECONDS
            tried = self._tried_at is not None and now - self._tried_at < AGAIN_SECONDS
            if tried or not (old or kid not in self._keys):
                return False
            self._tried_at = now
            return True

    def _refresh(self, now: float) -> None:
        try:
            keys = self.fetched()
        except ProviderFault as fault:
            log.warning("oidc.keys_not_fetched", issuer=self._issuer, fault=str(fault))
            with self._lock:
                if self._fetched_at is not None and now - self._fetched_at > KEYS_SECONDS:
                    # Keys that may have been withdrawn meanwhile are worse than none.
                    self._keys = {}
            return
        with self._lock:
            self._keys, self._fetched_at = keys, now

    def fetched(self) -> dict[str, jwt.PyJWK]:
        """Return the provider's keys by their names. Raises ProviderFault."""
        document = asked(
            self._keys_url or own_url(discovered(self._issuer), self._issuer, "jwks_uri", "TESSERA_OIDC_KEYS_URL")
        )
        try:
            keys = jwt.PyJWKSet.from_dict(document).keys
        except (jwt.PyJWTError, AttributeError, TypeError, ValueError) as fault:
            raise ProviderFault(f"it names no keys that can be used: {fault}") from fault
        return {key.key_id: key for key in keys if key.key_id and key.public_key_use in (None, "sig")}


def discovered(issuer: str) -> dict[str, Any]:
    """Return what a provider says of itself. Raises ProviderFault."""
    about = asked(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if about.get("issuer") != issuer:
        raise ProviderFault(f"it calls itself {str(about.get('issuer'))[:200]!r}")
    return about


def own_url(about: Mapping[str, Any], issuer: str, name: str, setting: str) -> str:
    """Return a URL that a provider says of itself, which is where the provider itself is. Raises ProviderFault."""
    url = str(about.get(name))
    if _origin(url) != _origin(issuer):
        raise ProviderFault(f"its {name} is {url[:200]!r}, another place: name it as {setting}")
    return url


def asked(url: str, form: Mapping[str, str] | None = None, basic: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return a JSON object, bounded in bytes and time, from this very place, to which a form is sent if there is one.

    Raises ProviderFault.
    """
    content = bytearray()
    give_up_at = time.monotonic() + FETCH_SECONDS
    try:
        with (
            httpx.Client(timeout=FETCH_SECONDS, follow_redirects=False, auth=basic) as client,
            client.stream(
                "GET" if form is None else "POST", url, data=form, headers={"Accept-Encoding": "identity"}
            ) as response,
        ):
            for piece in response.iter_raw():
                content += piece
                if len(content) > MAX_ANSWER_BYTES or time.monotonic() > give_up_at:
                    raise ProviderFault(f"{url} sends too much, or too slowly")
    except (httpx.HTTPError, httpx.InvalidURL) as fault:
        raise ProviderFault(f"{url} does not answer: {type(fault).__name__}: {fault}") from fault
    try:
        document = json.loads(content)
    except (ValueError, RecursionError) as fault:
        document = fault
    if response.status_code != httpx.codes.OK:
        # As OAuth has it (RFC 6749, 5.2).
        said = f": {str(document.get('error'))[:200]}" if isinstance(document, dict) and "error" in document else ""
        raise ProviderFault(f"{url} answers {response.status_code}{said}")
    if isinstance(document, Exception):
        raise ProviderFault(f"{url} sends no JSON") from document
    if not isinstance(document, dict):
        raise ProviderFault(f"{url} sends no JSON object")
    return document


def _origin(url: str) -> tuple[str, str | None, int | None]:
    try:
        parts = urlsplit(url)
        return parts.scheme, parts.hostname, parts.port
    except ValueError as fault:
        raise ProviderFault(f"{url[:200]!r} is no URL") from fault


def _claim(claims: Mapping[str, Any], name: str) -> object:
    """Return a claim by its name, or by a path of names as in `realm_access.roles`."""
    if name in claims:
        return claims[name]
    found: object = claims
    for step in name.split("."):
        found = found.get(step) if isinstance(found, dict) else None
    return found


def _texts(value: object) -> list[str]:
    values = value if isinstance(value, list) else [value]
    return [text for text in values if isinstance(text, str)]
