"""The coordinator's key for dossiers: an elliptic-curve key on P-256, created once and never replaced."""

import os
from contextlib import suppress
from dataclasses import dataclass
from glob import escape
from pathlib import Path
from tempfile import NamedTemporaryFile

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric.ec import SECP256R1, EllipticCurvePrivateKey, generate_private_key
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)

from tessera.shared.updates.signatures import fingerprint

TEMPORARY = ".tmp"


@dataclass(frozen=True)
class SigningKey:
    """A private key in a file, and its public key in PEM."""

    path: Path
    public: bytes

    @property
    def public_path(self) -> Path:
        """Of this key alone: `key.pem` and `key.new` have different ones."""
        return self.path.with_name(f"{self.path.name}.pub")

    @property
    def fingerprint(self) -> str:
        return fingerprint(self.public)


def read(path: Path) -> SigningKey:
    """Return the key in a file. Raises OSError, and ValueError for another kind of key."""
    try:
        key = load_pem_private_key(path.read_bytes(), None)
    except (TypeError, UnsupportedAlgorithm) as fault:
        raise ValueError("it is encrypted, or of an unknown kind") from fault
    if not isinstance(key, EllipticCurvePrivateKey) or not isinstance(key.curve, SECP256R1):
        raise ValueError("it is no elliptic-curve key on P-256")
    return SigningKey(path, key.public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo))


def create(path: Path) -> SigningKey:
    """Return the key in a file, created if the file is missing, and write its public key beside it. Raises as `read`.

    A process that is killed leaves the whole key or none, and the next call removes its temporary file.
    """
    if not path.exists():
        key = generate_private_key(SECP256R1())
        with (
            # Another process that has created the key meanwhile removes the temporary file.
            suppress(FileExistsError, FileNotFoundError),
            NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}.", suffix=TEMPORARY) as file,
        ):
            file.write(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
            file.flush()
            os.fsync(file.fileno())
            # Unlike a rename, a link does not replace a key.
            os.link(file.name, path)
        folder = os.open(path.parent, os.O_RDONLY)
        os.fsync(folder)
        os.close(folder)
    found = read(path)
    for left in path.parent.glob(f".{escape(path.name)}.*{TEMPORARY}"):
        left.unlink(missing_ok=True)
    found.public_path.write_bytes(found.public)
    return found
