"""The way between a server on this machine and its clients: direct or over shaped lines, in plain TCP or in TLS."""

from __future__ import annotations

import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol, Self

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


class Lines(Protocol):
    """Lines between clients and servers, each client on its own."""

    def open(self, target: int) -> int:
        """Return the port of a new line that leads to the port `target`."""
        ...

    def moved(self) -> Moved:
        """Return the bytes that all lines have carried so far, headers and handshakes included."""
        ...


@dataclass(frozen=True)
class Network:
    """The way from each client to its server."""

    lines: Lines | None = None
    certificates: Certificates | None = None

    @property
    def scheme(self) -> str:
        return "https" if self.certificates else "http"

    def port(self, target: int) -> int:
        """Return the port at which one more client reaches the server's port `target`."""
        return self.lines.open(target) if self.lines else target

    def moved(self) -> Moved | None:
        """Return what the lines have carried; None without lines, where no one counts all bytes."""
        return self.lines.moved() if self.lines else None

    def moved_since(self, before: Moved | None) -> Moved | None:
        now = self.moved()
        return now.since(before) if now and before else None

    def __str__(self) -> str:
        return "TLS" if self.certificates else "plain"


DIRECT = Network()
