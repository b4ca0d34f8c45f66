"""Signatures of folders in the OpenSSF Model Signing format, by the library `model-signing` of the extra `signing`.

The library is imported on first use, because it takes a second and 30 MB. With a key of one's own it uses no network.
"""

import base64
import hashlib
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path, PurePosixPath
from typing import Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import EllipticCurvePublicKey
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat, load_pem_public_key

from tessera.shared.json_limits import check_document
from tessera.shared.lazy_import import load
from tessera.shared.problems import DigestMismatch, Invalid
from tessera.shared.schema import Digest
from tessera.shared.version import install_line

SIGNATURE_FILE = "model.sig"
KEY_FILE = "signing-key.pub"
MAX_SIGNATURE_BYTES = 16 << 20
MAX_KEY_BYTES = 1 << 16

LIBRARY = "model_signing"
FORGED = "Do not use the folder: ask the person who gave it to you for another copy."


def is_installed() -> bool:
    """Return True if this installation can sign and verify."""
    return find_spec(LIBRARY) is not None


def require_library() -> None:
    """Raise Invalid, with the command that installs the library, if this installation lacks it."""
    _library("verifying")


def fingerprint(public_key: bytes) -> Digest:
    """Return the SHA-256 of a public key in PEM, of its DER form. Raises ValueError for any other content."""
    try:
        key = load_pem_public_key(public_key)
    except UnsupportedAlgorithm as fault:
        raise ValueError(str(fault)) from fault
    if not isinstance(key, EllipticCurvePublicKey):
        raise ValueError("the key is of another kind than elliptic-curve")
    return f"sha256:{hashlib.sha256(key.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)).hexdigest()}"


def sign(name: str, digests: Mapping[str, Digest], private_key: Path, signature: Path) -> None:
    """Sign a folder's files by their digests, and write the signature; `name` is for people alone."""
    config = _library("signing").Config().use_elliptic_key_signer(private_key=private_key)
    config.set_hashing_config(_KnownDigests(name, digests)).sign(name, signature)


def signed_digests(signature: Path, public_key: Path) -> dict[str, Digest]:
    """Return the digest of each file that a signature covers. Raises Invalid for an unreadable file, and
    DigestMismatch for a signature that this key did not make."""
    verifying = _library("verifying")
    try:
        if signature.stat().st_size > MAX_SIGNATURE_BYTES:
            raise Invalid(f"{signature.name} has more than {MAX_SIGNATURE_BYTES} bytes", remedy=FORGED)
        bundle = check_document(signature.read_bytes())
        payload = check_document(base64.b64decode(bundle["dsseEnvelope"]["payload"], validate=True))
        resources = payload["predicate"]["resources"]
        others = sorted({one["algorithm"] for one in resources} - {"sha256"})
        digests = {str(one["name"]): f"sha256:{one['digest']}" for one in resources}
        if others:
            raise Invalid(
                f"{signature.name} covers files by {', '.join(others)}",
                remedy="Sign the folder's whole files by sha256.",
            )
        # The library verifies the signature, and that it covers exactly these names and digests.
        config = verifying.Config().use_elliptic_key_verifier(public_key=public_key)
        config.set_hashing_config(_KnownDigests("", digests)).verify(signature.parent, signature)
    except OSError as fault:
        raise Invalid(f"{fault.filename} cannot be read: {fault.strerror}", remedy="Name another file.") from fault
    except (ValueError, LookupError, TypeError, AttributeError, InvalidSignature) as fault:
        reason = str(fault).strip() or "it was made by another key, or changed"
        raise DigestMismatch(
            f"{signature.name} is no signature by {public_key.name}: {reason}", remedy=FORGED
        ) from fault
    return digests


class _KnownDigests:
    """A hashing configuration for the library, of files whose digests are known without reading them."""

    def __init__(self, name: str, digests: Mapping[str, Digest]) -> None:
        self._name, self._digests = name, digests

    def hash(self, _: object, **__: object) -> Any:
        """Return the library's manifest of the files."""
        manifest, digest = _library("manifest"), _library("hashing").hashing.Digest
        items = [
            manifest.FileManifestItem(
                path=PurePosixPath(name), digest=digest("sha256", bytes.fromhex(one.removeprefix("sha256:")))
            )
            for name, one in self._digests.items()
        ]
        kind = {"method": "files", "hash_type": "sha256", "allow_symlinks": False, "ignore_paths": [SIGNATURE_FILE]}
        return manifest.Manifest(self._name, items, manifest.SerializationType.from_args(kind))

    def add_ignored_paths(self, **_: object) -> None:
        """Ignore nothing: whether a file may be unsigned is not for the signature to say."""


def _library(module: str) -> Any:
    """Return a module of the library. Raises Invalid."""
    try:
        return load(f"{LIBRARY}.{module}")
    except ModuleNotFoundError as fault:
        raise Invalid(
            f"signatures need {fault.name}, which is not installed", remedy=f"Run: {install_line('signing')}"
        ) from fault
