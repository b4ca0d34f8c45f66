"""Signing in to the page at the OpenID provider, by the authorization code flow with PKCE (OpenID Connect Core 3.1,
RFC 7636).

Between the two requests nothing is kept here. What ties them together is one secret in the browser: what the provider
is shown of it are HMACs, each for one purpose.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any
from urllib.parse import quote, urlencode, urlsplit

import structlog

from tessera.coordinator.auth.oidc import (
    AGAIN_SECONDS,
    KEYS_SECONDS,
    OIDCVerifier,
    ProviderFault,
    asked,
    discovered,
    own_url,
)
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.problems import Unauthenticated, Unavailable
from tessera.shared.urls import is_loopback

BACK = "/page/sign-in/provider/back"
"""Where the provider sends people, below the public URL: it has to be registered there."""

SECRET_BYTES = 32

log = structlog.get_logger()


class OIDCLogin:
    """The page as a client of the provider. Safe to use from several threads."""

    def __init__(
        self, settings: CoordinatorSettings, people: OIDCVerifier, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._issuer = settings.oidc_issuer or ""
        self._client_id = settings.oidc_client_id or ""
        self._secret_file = settings.oidc_client_secret_file
        self._scope = settings.oidc_scope
        self._token_url = settings.oidc_token_url
        self._back = (settings.public_url or "").rstrip("/") + BACK
        self._people = people
        self._clock = clock
        self._lock = threading.Lock()
        self._about: dict[str, Any] = {}
        self._found_at: float | None = None
        self._tried_at: float | None = None

    @property
    def host(self) -> str:
        """The provider as people know it."""
        return urlsplit(self._issuer).netloc

    def begin(self) -> tuple[str, str]:
        """Return where the browser is to go, and a secret that it alone is to keep meanwhile. Raises Unavailable."""
        secret = secrets.token_urlsafe(SECRET_BYTES)
        challenge = hashlib.sha256(_derived(secret, "verifier").encode()).digest()
        asks = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": self._back,
            "scope": self._scope,
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
        """Return who came back from the provider, with what it said in the query.

        Raises Unauthenticated, Forbidden for a person without a role here, and Unavailable.
        """
        if not secret or not _same(answer.get("state", ""), _derived(secret, "state")):
            raise Unauthenticated("signing in was begun in another browser, or took too long; begin anew")
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
            place = self._token_url or own_url(
                self._provider(), self._issuer, "token_endpoint", "TESSERA_OIDC_TOKEN_URL"
            )
            return str(asked(place, form, self._credentials()).get("id_token"))
        except (ProviderFault, OSError, UnicodeDecodeError) as fault:
            log.warning("oidc.no_token", issuer=self._issuer, fault=str(fault))
            raise Unauthenticated("the provider gave no token for what it sent you back with; begin anew") from fault

    def _credentials(self) -> tuple[str, str] | None:
        """Return encoded as OAuth has it (RFC 6749, 2.3.1). Read each time, so that another secret needs no
        restart."""
        if self._secret_file is None:
            return None
        return quote(self._client_id, safe=""), quote(self._secret_file.read_text().strip(), safe="")

    def _provider(self) -> dict[str, Any]:
        """Return what the provider says of itself, asked anew once an hour. Raises Unavailable."""
        now = self._clock()
        with self._lock:
            old = self._found_at is None or now - self._found_at > KEYS_SECONDS
            # One at a time, and not at every wish of whoever is not signed in.
            asks = old and (self._tried_at is None or now - self._tried_at >= AGAIN_SECONDS)
            if asks:
                self._tried_at = now
        if asks:
            try:
                about = discovered(self._issuer)
            except ProviderFault as fault:
                log.warning("oidc.provider_away", issuer=self._issuer, fault=str(fault))
            else:
                with self._lock:
                    self._about, self._found_at = about, now
        if not self._about:
            raise Unavailable("the OpenID provider does not answer", retry_after_seconds=AGAIN_SECONDS)
        return self._about


def _derived(secret: str, purpose: str) -> str:
    return hmac.new(secret.encode(), purpose.encode(), hashlib.sha256).hexdigest()


def _same(shown: str, known: str) -> bool:
    return hmac.compare_digest(shown.encode(), known.encode())
