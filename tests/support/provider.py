"""An OpenID provider: a real server on loopback, whose keys a test makes."""

from __future__ import annotations

import base64
import hashlib
import json
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from html import escape
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

import jwt
from cryptography.hazmat.primitives.asymmetric import ec, ed25519, rsa

from tests.support.scripted import Answer, Asked, answering_by

ROLES = {"tessera-admins": "admin", "researchers": "orchestrator", "auditors": "viewer"}

KEYS: dict[str, Any] = {
    "RS256": rsa.generate_private_key(public_exponent=65537, key_size=2048),
    "ES256": ec.generate_private_key(ec.SECP256R1()),
    "EdDSA": ed25519.Ed25519PrivateKey.generate(),
}


def published(**keys: Any) -> dict[str, Any]:
    """A provider's set of keys, under these names."""
    return {"keys": [{**public(key), "kid": name, "use": "sig"} for name, key in keys.items()]}


def public(key: Any) -> dict[str, Any]:
    for algorithm in (jwt.algorithms.RSAAlgorithm, jwt.algorithms.ECAlgorithm, jwt.algorithms.OKPAlgorithm):
        try:
            made: dict[str, Any] = algorithm.to_jwk(key.public_key(), as_dict=True)
        except (jwt.InvalidKeyError, AttributeError, TypeError):
            continue
        return made
    raise AssertionError(key)


@dataclass
class Provider:
    """A provider that publishes `keys`, lets everybody in as `person`, and can be told to answer otherwise."""

    url: str = ""
    keys: dict[str, Any] = field(default_factory=lambda: published(**KEYS))
    asked: list[Asked] = field(default_factory=list)
    about: dict[str, Any] = field(default_factory=dict)
    person: dict[str, Any] = field(default_factory=dict)
    """What it says of them, beside what every token has."""
    wanted: dict[str, dict[str, str]] = field(default_factory=dict)
    """What each code that it gave was asked for with."""

    def token(self, algorithm: str = "RS256", **claims: Any) -> str:
        """Signed by this provider, good for a minute, unless the claims say otherwise."""
        now = time.time()
        given = {"iss": self.url, "sub": "alice", "aud": "tessera", "iat": now, "exp": now + 60}
        given |= {"roles": ["staff", "researchers"], **claims}
        kept = {name: value for name, value in given.items() if value is not None}
        return jwt.encode(kept, KEYS[algorithm], algorithm, headers={"kid": algorithm})

    def answer(self, asked: Asked) -> Answer:
        parts = urlsplit(asked.path)
        query = dict(parse_qsl(parts.query))
        match parts.path:
            case "/.well-known/openid-configuration":
                places = {"jwks_uri": "keys", "authorization_endpoint": "authorize", "token_endpoint": "token"}
                told = {name: f"{self.url}/{place}" for name, place in places.items()}
                return _json({"issuer": self.url, **told, **self.about})
            case "/authorize":
                code = f"code-{len(self.wanted)}"
                self.wanted[code] = query
                on = f"{query['redirect_uri']}?{urlencode({'code': code, 'state': query['state']})}"
                return Answer(
                    body=f'<a href="{escape(on)}">Log in</a>'.encode(), headers={"Content-Type": "text/html"}
                )
            case "/token":
                return self._redeemed(dict(parse_qsl(asked.body.decode())))
        return _json(self.keys)

    def _redeemed(self, form: dict[str, str]) -> Answer:
        """What a code is worth, once, to whom it was given."""
        wanted = self.wanted.pop(form.get("code", ""), {})
        challenge = base64.urlsafe_b64encode(hashlib.sha256(form["code_verifier"].encode()).digest()).rstrip(b"=")
        same = all(wanted.get(name) == form[name] for name in ("client_id", "redirect_uri"))
        if not same or wanted.get("code_challenge") != challenge.decode():
            return _json({"error": "invalid_grant"}, 400)
        claims = {"aud": wanted["client_id"], "nonce": wanted["nonce"], **self.person}
        return _json({"token_type": "Bearer", "id_token": self.token(**claims)})


def _json(document: dict[str, Any], status: int = 200) -> Answer:
    return Answer(status, json.dumps(document).encode())


@contextmanager
def providing(host: str = "127.0.0.1", **about: Any) -> Iterator[Provider]:
    provider = Provider(about=about)
    with answering_by(provider.answer, provider.asked) as url:
        provider.url = url.replace("127.0.0.1", host)
        yield provider


def settings(provider: Provider, **more: Any) -> dict[str, Any]:
    return {"oidc_issuer": provider.url, "oidc_audience": "tessera", "oidc_roles": ROLES, **more}
