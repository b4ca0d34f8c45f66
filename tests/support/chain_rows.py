"""A hash chain in a worker's database, as somebody with access to the file can read and change it."""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path

from tessera.worker.state.audit import Audit
from tessera.worker.state.database import DATABASE_FILE, StateDatabase
from tessera.worker.state.hash_chain import line_of
from tessera.worker.state.privacy_ledger import Ledger


def ledger_in(state: Path) -> Ledger:
    """The ledgers of a worker with this state folder, under its key."""
    return Ledger(state, _key(state))


def audit_in(state: Path) -> Audit:
    """The same of its audit."""
    return Audit(state, "w", _key(state))


def _key(state: Path) -> bytes:
    file = state.with_name(f"{state.name}.key")
    return bytes.fromhex(file.read_text()) if file.exists() else b""


@dataclass(frozen=True)
class ChainRows:
    """The rows of a chain as the lines of a file."""

    folder: Path
    chain: str

    def read_bytes(self) -> bytes:
        with self._changing() as connection:
            found = connection.execute(
                "SELECT entry, digest FROM entries WHERE chain = ? ORDER BY seq", (self.chain,)
            )
            return b"".join(line_of(*row) for row in found)

    def write_bytes(self, content: bytes) -> None:
        rows = [
            (
                self.chain,
                seq,
                document["digest"],
                json.dumps(document["entry"], sort_keys=True, separators=(",", ":")),
            )
            for seq, document in enumerate(map(json.loads, content.splitlines()))
        ]
        with self._changing() as connection:
            connection.execute("DELETE FROM entries WHERE chain = ?", (self.chain,))
            connection.executemany("INSERT INTO entries (chain, seq, digest, entry) VALUES (?, ?, ?, ?)", rows)

    def lines(self) -> list[bytes]:
        return self.read_bytes().splitlines(keepends=True)

    def unlink(self) -> None:
        self.write_bytes(b"")

    def rename(self, other: ChainRows) -> None:
        other.write_bytes(self.read_bytes())
        self.unlink()

    @contextmanager
    def _changing(self) -> Iterator[sqlite3.Connection]:
        StateDatabase.of(self.folder).write("SELECT 1")
        with closing(sqlite3.connect(self.folder / DATABASE_FILE)) as connection, connection:
            yield connection
