"""The site's audit log: a hash chain (`worker.state.hash_chain`) of its worker's actions and uploads.

The coordinator keeps a chain of its own, which the site can compare with this one.
"""

import hashlib
from collections.abc import Iterable
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from pydantic import JsonValue

from tessera.worker.state.database import StateDatabase
from tessera.worker.state.hash_chain import Chain, Head, Link, TaskRef

Action = Literal[
    "worker.start", "worker.stop", "policy.change", "task.start", "task.refuse", "task.give-back", "task.fail",
    "task.drop", "train.fail", "run.ask", "run.approve", "run.decline", "update.hold", "update.release",
    "update.withhold", "update.leave", "update.count", "figures.leave", "figures.count", "sums.agree", "sums.open",
    "sums.abandon", "chain.adopt", "vault.remove",
]  # fmt: skip
"""`leave` is recorded before the first byte is sent, `count` when the coordinator has confirmed that it counts."""

LEAVING = ("update.leave", "figures.leave", "sums.agree", "sums.open", "sums.abandon")
"""The actions whose entries the coordinator learns the digests of."""

LEDGER_HEAD = "ledger"
"""The key, in the detail of `leave`, of the head of the data set's ledger."""


BLOCK_NAMES = "block_names"
"""The key, in the detail of the first `leave` of a set of blocks, of their names."""

ROLLED_BACK = "rolled-back"
"""The note of the digest that the worker's audit lacks, until a person adopts the state."""

NO_HEAD = "-"
"""The value of that note if the audit is whole, and the tensors that a run keeps are older."""


class StateRolledBack(Exception):
    """The worker's files are an older copy: they lack updates that left, and their costs. `head` is the missing
    digest."""

    code = "state-rolled-back"
    remedy = "Put back the newest copy of the state folder, or stop the worker and run `tessera worker adopt`."

    def __init__(self, detail: str, head: str) -> None:
        super().__init__(detail)
        self.head = head


class SiteAuditEntry(Link):
    """One action, and the task that it was about if there was one."""

    worker: str
    action: Action
    run: str | None = None
    run_name: str | None = None
    round: int | None = None
    task: str | None = None
    token: int | None = None
    detail: dict[str, JsonValue] = {}


class Audit:
    """The chain in the database of a `folder`, which the workers of a site may share."""

    def __init__(self, folder: Path, worker: str, key: bytes = b"", *, shared: bool = True) -> None:
        self.chain: Chain[SiteAuditEntry] = Chain(StateDatabase.of(folder), "audit", SiteAuditEntry, key=key)
        self._worker = worker
        self._shared = shared
        self._found: set[str] = set()
        self._named: set[str] = set()
        """Digests of the sets of names that this process has recorded in full."""

    def record(self, action: Action, task: TaskRef | None = None, /, **detail: JsonValue) -> SiteAuditEntry:
        """Append an entry, which is on disk when this returns. Raises ChainError if the last one was changed."""
        return self._record(action, task._asdict() if task else {}, detail)

    def record_of_run(self, action: Action, run: str, run_name: str, /, **detail: JsonValue) -> SiteAuditEntry:
        """Append an entry about a run and no task, as `record` does."""
        return self._record(action, {"run": run, "run_name": run_name}, detail)

    def _record(self, action: Action, about: dict[str, str | int], detail: dict[str, JsonValue]) -> SiteAuditEntry:
        at = datetime.now(UTC)
        given = {"at": at, "worker": self._worker, "action": action, "detail": detail, **about}
        entry = self.chain.append(
            lambda seq, previous: SiteAuditEntry.model_validate({"seq": seq, "previous": previous, **given})
        )
        if action in LEAVING:
            # The next task names it, and the file is not read for that.
            self._found.add(entry.digest)
        if BLOCK_NAMES in detail:
            self._named.add(str(detail["names"]))
        return entry

    def named(self, names: Iterable[str]) -> dict[str, JsonValue]:
        """Return a digest of a set of names for an entry, and the names themselves the first time: rounds repeat
        them."""
        found = sorted(names)
        digest = names_digest(found)
        if digest in self._named:
            return {"names": digest}
        return {"names": digest, BLOCK_NAMES: list[JsonValue](found)}

    def read(self) -> tuple[SiteAuditEntry, ...]:
        """Return all entries, oldest first. Raises ChainError."""
        return self.chain.read()

    def has(self, digest: str) -> bool:
        """Return True if an entry has this digest, or adopted a state without it."""
        if digest not in self._found:
            if not self.chain.has(digest):
                return False
            self._found = {digest}
        return True

    def adopt(self) -> SiteAuditEntry | None:
        """Accept entries under a lost key. Return None if all are under the key.

        Raises ChainError for entries that do not follow each other.
        """
        at = datetime.now(UTC)
        return self.chain.adopt(
            lambda seq, previous, adopts: SiteAuditEntry(
                seq=seq, at=at, previous=previous, adopts=adopts, worker=self._worker, action="chain.adopt"
            )
        )

    def ledger_heads(self, entries: Iterable[SiteAuditEntry]) -> dict[str, Head]:
        """Return the head of each data set's ledger at the last upload of this worker that used it.

        Other names in an audit that is not shared are earlier names of this worker.
        """
        own: dict[str, Head] = {}
        earlier: dict[str, Head] = {}
        for entry in entries:
            (own if entry.worker == self._worker else earlier).update(heads_of(entry))
        return own if self._shared else earlier | own


def signed_sets(entries: Iterable[SiteAuditEntry], key: str) -> dict[str, tuple[str, int]]:
    """Return the sets of senders that were signed or opened, and the terms that were abandoned, under a key with this
    fingerprint: the run and the round by digest."""
    return {
        str(entry.detail.get("senders") or entry.detail.get("terms")): (entry.run or "", entry.round or 0)
        for entry in entries
        if entry.action in ("sums.agree", "sums.open", "sums.abandon") and entry.detail.get("key") == key
    }


def heads_of(entry: SiteAuditEntry) -> dict[str, Head]:
    """Return the ledger heads in an entry, by data set."""
    heads = entry.detail.get(LEDGER_HEAD)
    return {name: Head.model_validate(head) for name, head in heads.items()} if isinstance(heads, dict) else {}


def names_digest(names: Iterable[str]) -> str:
    """Return a digest of a set of names, to compare two long lists at a glance."""
    return f"sha256:{hashlib.sha256(chr(10).join(sorted(names)).encode()).hexdigest()}"
