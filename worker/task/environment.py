"""What the tasks of one worker share, and one task with it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import torch
from pydantic import JsonValue

from tessera.shared.api.tasks import EvaluationResult, Submission, Task, TaskView
from tessera.shared.api.versions import Difference, Manifest
from tessera.shared.client.client import Progress
from tessera.shared.hashing import Sink
from tessera.shared.schema import TaskKind
from tessera.shared.tensors.lazy import Array
from tessera.worker.data.registry import Dataset
from tessera.worker.governance.airlock import Airlock
from tessera.worker.governance.approvals import Inbox
from tessera.worker.governance.policy import Allowance, Policy
from tessera.worker.governance.run_history import RunHistory
from tessera.worker.model.layouts import MappingFile
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.state.audit import Action, Audit
from tessera.worker.state.blob_cache import Row, Source
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger, Use
from tessera.worker.state.vault import Vault
from tessera.worker.task.model_cache import ModelCache
from tessera.worker.training.progress import Check, Report

MAX_INLINE = 1 << 20
"""No more bytes go along with a submission, or are taken with a task: there they are held several times."""


class Coordinator(Protocol):
    """What a task asks of its coordinator: a `Client` does so over HTTP, a simulation in the same process."""

    @property
    def fast_line(self) -> bool: ...
    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None: ...
    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None: ...
    def difference(self, run_id: str, number: int, since: int) -> Difference | None: ...
    def put_file(self, path: Path, progress: Progress | None = None, digest: str | None = None) -> str: ...
    def submit(self, task_id: str, submission: Submission) -> TaskView: ...
    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView: ...
    def task(self, task_id: str) -> TaskView: ...


class Shelf(Protocol):
    """Where the blobs that a task fetches lie while it is done: a `Cache`."""

    def __contains__(self, digest: str) -> bool: ...
    def path(self, digest: str) -> Path: ...
    def put(self, digest: str, pieces: Iterable[bytes | memoryview], max_bytes: int) -> bool: ...
    def fetch_all(self, wanted: Mapping[str, int], source: Row, progress: Progress | None = None) -> None: ...
    def pinning(self) -> AbstractContextManager[None]: ...
    def fetch(self, digest: str, max_bytes: int, source: Source, progress: Progress | None = None) -> Path: ...


@dataclass(frozen=True)
class CachedVersion:
    """A version whose blocks were fetched, as far as they were wanted."""

    number: int
    manifest: Manifest


@dataclass(frozen=True)
class TaskEnvironment:
    """What the tasks of one worker share. `scratch` is a folder for the files of a task."""

    coordinator: Coordinator
    datasets: Mapping[str, Dataset]
    device: torch.device
    vault: Vault
    shelf: Shelf
    scratch: Path
    name: str = "worker"
    policy: Policy = field(default_factory=Policy)
    kinds: tuple[TaskKind, ...] = ("train", "evaluate")
    mappings: Mapping[str, MappingFile] = field(default_factory=dict)
    models: ModelCache = field(default_factory=ModelCache)
    versions: dict[str, CachedVersion] = field(default_factory=dict)
    """The version of the last task, by run."""
    scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)
    """The scale of float16's loss, by run: it is found by trying, and kept for the next round."""
    for_evaluation: frozenset[str] = frozenset()
    """The data sets that nothing trains on."""
    fingerprints: dict[str, Array] = field(default_factory=dict)
    """Hashes of the examples, by data set."""
    divided: frozenset[str] = frozenset()
    """The data sets that are a part of what settings divide among sites, for trials."""
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """The privacy budgets of the data sets that have one."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What a task may spend."""
    ledger: Ledger | None = None
    """The record of privacy spent; in `scratch` if None."""
    history: RunHistory | None = None
    """The record of what runs have shown; none is kept if None, as for a coordinator of one's own."""
    inbox: Inbox | None = None
    """Where runs wait for approval, if the policy says that they must have it."""
    airlock: Airlock | None = None
    """Where updates wait for release, if the policy says that they must have it."""
    audit: Audit | None = None
    """The record of what was done; none is kept if None, as for a coordinator of one's own."""
    sandbox: Sandbox | None = None
    """Where an untrusted model is laid out first; nowhere if None, as for a model of one's own."""
    noise_key: Callable[[Task], bytes | None] = lambda _: None
    """The key of a private task's noise; a secret of that task if None. Any other key protects nobody."""


@dataclass(frozen=True)
class Journal:
    """What the site writes down of one task: in its audit, and in the data set's privacy ledger."""

    task: TaskRef
    dataset: str
    audit: Audit | None
    ledger: Ledger | None

    def note(self, action: Action, **detail: JsonValue) -> str | None:
        """Add an entry to the audit. Return its digest."""
        return self.audit.record(action, self.task, **detail).digest if self.audit else None

    def note_exact(self, examples: int, use: Use) -> None:
        """Add to the ledger that the task uses the data without noise, before it does."""
        if self.ledger:
            with self.ledger.page(self.dataset) as page:
                page.exact(self.task, examples, use)

    def ledger_head(self) -> JsonValue:
        """Return how far the ledger has come, for the audit."""
        head = self.ledger.leaving(self.dataset) if self.ledger else None
        return {self.dataset: head.model_dump(mode="json")} if head else {}


@dataclass(frozen=True)
class TaskRun:
    """One task of a worker, with what all its stages need."""

    env: TaskEnvironment
    task: Task
    check: Check
    """Raises whatever ends the task early."""
    report: Report
    journal: Journal
