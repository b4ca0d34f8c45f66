"""Format of tokens and codes, for the code that creates them and the code that checks them."""

import hashlib
import re
import secrets

TOKEN_BYTES = 32

TOKEN_TEXT = re.compile(r"[A-Za-z0-9._~+/-]+=*")
"""The text of a bearer token (RFC 6750, section 2.1), also of an identity provider."""


def new_secret(role: str) -> str:
    """Return the text of a new token: 256 random bits after a prefix that identifies a leaked token."""
    return f"tessera_{role}_{secrets.token_urlsafe(TOKEN_BYTES)}"


def hash_of(secret: str) -> str:
    """Return the hash that a coordinator keeps of a token. A plain hash is enough for 256 random bits: there is
    nothing to guess."""
    return hashlib.sha256(secret.encode()).hexdigest()


def normal_code(code: str) -> str:
    """Return a code as it is kept, however it was typed: `wdjb mjht` is WDJB-MJHT."""
    letters = "".join(letter for letter in code.upper() if letter.isalpha())
    return f"{letters[:4]}-{letters[4:]}"
