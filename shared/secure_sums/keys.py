"""Signatures and sealed messages of sites, all by the `cryptography` library.

Each message is signed for one purpose and sealed in one context, so that none can serve as another.
"""

from __future__ import annotations

import base64
from dataclasses import dataclass

from cryptography.exceptions import InvalidSignature, InvalidTag
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.hpke import AEAD, KDF, KEM, Suite

from tessera.shared.secure_sums.errors import SumRefused
from tessera.shared.secure_sums.messages import Hex32, Hex64

_SUITE = Suite(KEM.X25519, KDF.HKDF_SHA256, AEAD.AES_256_GCM)


@dataclass(frozen=True)
class SigningKey:
    """A site's long-term Ed25519 key. Sites compare its fingerprint with each other, without the coordinator."""

    secret: bytes

    @classmethod
    def new(cls) -> SigningKey:
        return cls(Ed25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> Hex32:
        return self._key.public_key().public_bytes_raw().hex()

    def sign(self, purpose: str, message: bytes) -> Hex64:
        return self._key.sign(_bound(purpose, message)).hex()

    @property
    def _key(self) -> Ed25519PrivateKey:
        return Ed25519PrivateKey.from_private_bytes(self.secret)


def require_signature(public: Hex32, purpose: str, message: bytes, signature: Hex64, signer: str) -> None:
    """Raise SumRefused unless `signature` is that of the owner of `public`, for this purpose."""
    try:
        key = Ed25519PublicKey.from_public_bytes(bytes.fromhex(public))
        key.verify(bytes.fromhex(signature), _bound(purpose, message))
    except (InvalidSignature, ValueError):
        raise SumRefused("signature", f"the signature of {signer} ({purpose}) is not of its key") from None


@dataclass(frozen=True)
class SealingKey:
    """A helper's X25519 key. Replaced often and then erased, so that no one can open old messages later."""

    secret: bytes

    @classmethod
    def new(cls) -> SealingKey:
        return cls(X25519PrivateKey.generate().private_bytes_raw())

    @property
    def public(self) -> Hex32:
        return self._key.public_key().public_bytes_raw().hex()

    def open(self, sealed: bytes, context: bytes, sender: str) -> bytes:
        """Return the text of a sealed message. Raises SumRefused if it was sealed to another, or elsewhere."""
        try:
            return _SUITE.decrypt(sealed, self._key, info=context)
        except (InvalidTag, ValueError):
            raise SumRefused("seeds", f"a message of {sender} was not sealed to this key in this context") from None

    @property
    def _key(self) -> X25519PrivateKey:
        return X25519PrivateKey.from_private_bytes(self.secret)


def seal(public: Hex32, text: bytes, context: bytes, owner: str) -> bytes:
    """Return a message that the owner of the X25519 key `public` alone can open, in this context (HPKE, RFC 9180).

    Raises SumRefused for a key to which nothing can be sealed, such as one of zeros.
    """
    try:
        return _SUITE.encrypt(text, X25519PublicKey.from_public_bytes(bytes.fromhex(public)), info=context)
    except ValueError:
        raise SumRefused("committee", f"nothing can be sealed to the key of {owner}") from None


def _bound(purpose: str, message: bytes) -> bytes:
    return b"tessera " + purpose.encode() + b"\0" + message


def to_text(data: bytes) -> str:
    """Return bytes as base64."""
    return base64.b64encode(data).decode()


def from_text(text: str) -> bytes:
    """Return the bytes of base64. Raises SumRefused."""
    try:
        return base64.b64decode(text, validate=True)
    except ValueError:
        raise SumRefused("malformed", "a text is not base64") from None
