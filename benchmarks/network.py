"""The way between a server on this machine and its clients: plain TCP or TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import trustme

HOST = "127.0.0.1"


@dataclass(frozen=True)
class Moved:
    """Bytes that a server received and sent."""

    received: int
    sent: int

    def since(self, before: Moved) -> Moved:
        return Moved(self.received - before.received, self.sent - before.sent)


@dataclass(frozen=True)
class Certificates:
    """A CA and the certificate that it issued to the servers of this machine, as PEM files."""

    ca: Path
    server: Path
    key: Path

    @classmethod
    def made(cls, folder: Path) -> Self:
        """Issue new certificates into a folder, which is created."""
        folder.mkdir(parents=True)
        made = cls(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        authority = trustme.CA()
        server = authority.issue_cert(HOST, "localhost")
        authority.cert_pem.write_to_path(made.ca)
        server.cert_chain_pems[0].write_to_path(made.server)
        server.private_key_pem.write_to_path(made.key)
        return made

    def client_context(self) -> ssl.SSLContext:
        return ssl.create_default_context(cafile=self.ca)
