"""OpenID Connect: verification of one provider's tokens with its public keys, and sign-in to the dashboard.

Requests go only to the provider that the settings name: URLs of keys in a token (`jku`, `x5u`, another issuer) are
ignored.
"""

import base64
import hashlib
import hmac
import json
import math
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, get_args
from urllib.parse import quote, urlencode, urlsplit

import httpx
import jwt
import structlog

from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.settings import CoordinatorSettings, PersonRole
from tessera.shared.client.transport import tls_context
from tessera.shared.problems import Forbidden, Invalid, Unauthenticated, Unavailable
from tessera.shared.urls import is_loopback, proxy_of

ALGORITHMS = ("RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA")
"""The algorithms with a public key. Neither `none` nor an algorithm whose key a verifier could sign with."""

KEYS_SECONDS = 3_600.0
"""Maximum age of the cached keys: a key that the provider withdraws is refused after this time at the latest."""

AGAIN_SECONDS = 30.0
"""Minimum time between requests for an unknown key: any caller can name one."""

FETCH_SECONDS = 5.0
MAX_ANSWER_BYTES = 1 << 20
LEEWAY_SECONDS = 30.0
MAX_SUBJECT_LENGTH = 255

REQUIRED = ("iss", "sub", "aud", "exp", "iat")

log = structlog.get_logger()


class ProviderFault(Exception):
    """The provider did not answer, or not as an OpenID provider answers."""


@dataclass(eq=False)
class _Hourly:
    """A document of the provider, refreshed once an hour, by one caller at a time and at most every 30 seconds."""

    issuer: str
    fetch: Callable[[], dict[str, Any]]
    clock: Callable[[], float]
    event: str
    expires: bool = False
    """It is emptied when it is older than an hour and cannot be refreshed."""
    _found: dict[str, Any] = field(default_factory=dict)
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _found_at: float = -math.inf
    _tried_at: float = -math.inf

    def get(self, entry: object) -> dict[str, Any]:
        """Return the latest answer, refreshed early if it lacks this entry."""
        now = self.clock()
        with self._lock:
            old = now - self._found_at > KEYS_SECONDS
            # A slow provider holds up one caller alone, and callers do not decide how often it is asked.
            if not (old or entry not in self._found) or now - self._tried_at < AGAIN_SECONDS:
                return self._found
            self._tried_at = now
        try:
            found = self.fetch()
        except ProviderFault as fault:
            log.warning(self.event, issuer=self.issuer, fault=str(fault))
            with self._lock:
                if old and self.expires:
                    self._found = {}
                return self._found
        with self._lock:
            self._found, self._found_at = found, now
        return found


class OIDCVerifier:
    """Verifier of one provider's tokens. Safe to use from several threads."""

    def __init__(self, settings: CoordinatorSettings, clock: Callable[[], float] = time.monotonic) -> None:
        self._settings = settings
        self._issuer = settings.oidc_issuer or ""
        # Keys that may have been withdrawn meanwhile are worse than none.
        self._keys = _Hourly(self._issuer, self.fetched, clock, "oidc.keys_not_fetched", expires=True)

    def principal(self, token: str) -> Principal:
        """Return the holder of a token. Raise Unauthenticated, Forbidden for a person without a role, Unavailable."""
        return self.person(self.verified(token, self._settings.oidc_audience))

    def person(self, claims: Mapping[str, Any]) -> Principal:
        """Return the person of verified claims. Raise Unauthenticated, and Forbidden for a person without a role."""
        subject = str(claims["sub"])
        if not (0 < len(subject) <= MAX_SUBJECT_LENGTH and subject.isprintable()):
            raise Unauthenticated("the subject of the token cannot be written down")
        person = f"{self._issuer}#{subject}"
        roles, place = self._settings.oidc_roles, self._settings.oidc_role_claim
        named = _claim(claims, place)
        names = named if isinstance(named, list) else [named]
        held = {roles[name] for name in names if isinstance(name, str) and name in roles}
        for role in get_args(PersonRole):
            if role in held:
                return Principal.person(person, role)
        raise Forbidden(
            f"nothing in the claim {place!r} of {person} is a role here (setting oidc_roles)",
            remedy="Have the provider's administrators put you into one of the groups that are, and sign in again.",
        )

    def verified(self, token: str, audience: str | None) -> dict[str, Any]:
        """Return the claims of one of the provider's tokens for `audience`. Raise Unauthenticated and Unavailable."""
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
            detail = f"the token is not one of {self._issuer} for {audience}: {str(fault)[:200]}"
            raise Unauthenticated(detail, remedy="Sign in again at the provider.") from fault
        return claims

    def _key(self, kid: object) -> jwt.PyJWK:
        keys = self._keys.get(kid)
        if not keys:
            raise Unavailable("the OpenID provider's keys cannot be fetched", retry_after_seconds=1)
        if kid not in keys:
            raise jwt.InvalidKeyError("it names no key of the provider's")
        key: jwt.PyJWK = keys[str(kid)]
        return key

    def fetched(self) -> dict[str, jwt.PyJWK]:
        """Return the provider's keys by their names. Raise ProviderFault."""
        document = asked(
            self._settings.oidc_keys_url
            or own_url(discovered(self._issuer), self._issuer, "jwks_uri", "TESSERA_OIDC_KEYS_URL")
        )
        try:
            keys = jwt.PyJWKSet.from_dict(document).keys
        except (jwt.PyJWTError, AttributeError, TypeError, ValueError) as fault:
            raise ProviderFault(f"it names no keys that can be used: {fault}") from fault
        return {key.key_id: key for key in keys if key.key_id and key.public_key_use in (None, "sig")}


def discovered(issuer: str) -> dict[str, Any]:
    """Return the provider's description of itself. Raise ProviderFault."""
    about = asked(f"{issuer.rstrip('/')}/.well-known/openid-configuration")
    if about.get("issuer") != issuer:
        raise ProviderFault(f"it calls itself {str(about.get('issuer'))[:200]!r}")
    return about


def own_url(about: Mapping[str, Any], issuer: str, name: str, setting: str) -> str:
    """Return a URL from the provider's description, which must be on the provider's host. Raise ProviderFault."""
    url = str(about.get(name))
    if _origin(url) != _origin(issuer):
        raise ProviderFault(f"its {name} is {url[:200]!r}, another place: name it as {setting}")
    return url


def asked(url: str, form: Mapping[str, str] | None = None, basic: tuple[str, str] | None = None) -> dict[str, Any]:
    """Return the JSON object at a URL, to which `form` is posted if given. Raise ProviderFault if slow or large."""
    content = bytearray()
    give_up_at = time.monotonic() + FETCH_SECONDS
    try:
        with (
            httpx.Client(
                timeout=FETCH_SECONDS, auth=basic, verify=tls_context(), proxy=proxy_of(url), trust_env=False
            ) as client,
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
    except Invalid as fault:
        raise ProviderFault(f"{url} cannot be asked: {fault.detail}. {fault.advice}") from fault
    try:
        document = json.loads(content)
    except (ValueError, RecursionError):
        document = None
    if response.status_code != httpx.codes.OK:
        # As OAuth has it (RFC 6749, 5.2).
        said = f": {str(document.get('error'))[:200]}" if isinstance(document, dict) and "error" in document else ""
        raise ProviderFault(f"{url} answers {response.status_code}{said}")
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


BACK = "/page/sign-in/provider/back"
"""Redirect URI, relative to the public URL; it must be registered at the provider."""


class OIDCLogin:
    """The page as a client of the provider, by the authorization code flow with PKCE (OpenID Connect Core 3.1, RFC
    7636). Safe to use from several threads.

    Between the two requests nothing is kept here. One secret in the browser ties them together: the
    provider sees HMACs of it alone, each for one purpose.
    """

    def __init__(self, settings: CoordinatorSettings, people: OIDCVerifier) -> None:
        self._settings = settings
        self._issuer = settings.oidc_issuer or ""
        self._client_id = settings.oidc_client_id or ""
        self._back = (settings.public_url or "").rstrip("/") + BACK
        self._people = people
        self._about = _Hourly(self._issuer, lambda: discovered(self._issuer), time.monotonic, "oidc.provider_away")

    @property
    def host(self) -> str:
        """The provider as people know it."""
        return urlsplit(self._issuer).netloc

    def begin(self) -> tuple[str, str]:
        """Return the URL that the browser goes to, and a secret for it alone to keep meanwhile. Raise Unavailable."""
        secret = secrets.token_urlsafe(32)
        challenge = hashlib.sha256(_derived(secret, "verifier").encode()).digest()
        asks = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._back,
            "scope": self._settings.oidc_scope,
            "state": _derived(secret, "state"),
            "nonce": _derived(secret, "nonce"),
            "code_challenge": base64.urlsafe_b64encode(challenge).rstrip(b"=").decode(),
            "code_challenge_method": "S256",
        }
        place = str(self._provider().get("authorization_endpoint"))
        parts = urlsplit(place)
        if parts.scheme != "https" and not (parts.scheme == "http" and is_loopback(parts.hostname or "")):
            raise Unavailable(
                f"the OpenID provider says that people sign in at {place[:200]!r}, which is no https:// URL"
            )
        return f"{place}{'&' if parts.query else '?'}{urlencode(asks)}", secret

    def finish(self, secret: str, answer: Mapping[str, str]) -> Principal:
        """Return the person whom the provider sent back. Raise Unauthenticated, Forbidden and Unavailable."""
        if not secret or not _same(answer.get("state", ""), _derived(secret, "state")):
            raise Unauthenticated("the sign-in was started in another browser, or took too long; start again")
        if answer.get("iss", self._issuer) != self._issuer:
            raise Unauthenticated("this is the answer of another provider (RFC 9207)")
        if "code" not in answer:
            said = answer.get("error_description") or answer.get("error") or "nothing"
            raise Unauthenticated(f"the provider did not let you in: it says {said[:200]!r}")
        claims = self._people.verified(self._id_token(answer["code"], secret), self._client_id)
        if not _same(str(claims.get("nonce")), _derived(secret, "nonce")):
            raise Unauthenticated("the provider's token is of another signing in")
        if claims.get("azp", self._client_id) != self._client_id:
            raise Unauthenticated("the provider's token was made for another client")
        return self._people.person(claims)

    def _id_token(self, code: str, secret: str) -> str:
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": self._back,
            "client_id": self._client_id,
            "code_verifier": _derived(secret, "verifier"),
        }
        try:
            place = self._settings.oidc_token_url or own_url(
                self._provider(), self._issuer, "token_endpoint", "TESSERA_OIDC_TOKEN_URL"
            )
            return str(asked(place, form, self._credentials()).get("id_token"))
        except (ProviderFault, OSError, UnicodeDecodeError) as fault:
            log.warning("oidc.no_token", issuer=self._issuer, fault=str(fault))
            raise Unauthenticated("the provider did not exchange its code for a token; start again") from fault

    def _credentials(self) -> tuple[str, str] | None:
        """Return the client id and secret, encoded as in RFC 6749, 2.3.1. Read each time, so that they can change."""
        file = self._settings.oidc_client_secret_file
        return (
            (quote(self._client_id, safe=""), quote(file.read_text(encoding="utf-8-sig").strip(), safe=""))
            if file
            else None
        )

    def _provider(self) -> dict[str, Any]:
        """Return the provider's description of itself. Raise Unavailable."""
        if not (about := self._about.get("issuer")):
            raise Unavailable("the OpenID provider does not answer", retry_after_seconds=AGAIN_SECONDS)
        return about


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _same(shown: str, known: str) -> bool:
    return hmac.compare_digest(shown.encode(), known.encode())
