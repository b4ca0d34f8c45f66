"""The environment shared by a worker's tasks, and the context of one task."""

import importlib
import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO, Protocol, TypeVar, cast

import numpy as np
import structlog
from pydantic import JsonValue

from tessera.shared.aggregation.local_work import EFFECTIVE_STEPS
from tessera.shared.api.secure_sums import HelperReport
from tessera.shared.api.tasks import EvaluationResult, ReportResult, Submission, Task, TaskView
from tessera.shared.api.versions import Manifest
from tessera.shared.client.transfers import Progress
from tessera.shared.client.transport import may_pass
from tessera.shared.methods.base import RunInfo
from tessera.shared.methods.registry import coordinator_half
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.problems import Problem
from tessera.shared.run_settings import Budget, rho_of
from tessera.shared.schema import TaskKind
from tessera.shared.tensors.hashing import Sink, derive_seed
from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.base_folder import BaseFolder
from tessera.shared.version import install_line
from tessera.worker.compute import Compute
from tessera.worker.data.dataset_info import DatasetInfo
from tessera.worker.data.overlap import ExampleDigests
from tessera.worker.errors import TaskFailure
from tessera.worker.governance.airlock import Airlock
from tessera.worker.governance.approvals import Inbox
from tessera.worker.governance.described_data import DescribedData
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.governance.run_history import RunHistory, TaskStatement
from tessera.worker.governance.site_rules import SiteRules
from tessera.worker.model.layouts import MappingFile
from tessera.worker.privacy.disclosed_counts import SubjectTables
from tessera.worker.state.audit import Action, Audit
from tessera.worker.state.base_sources import BaseSources, Take
from tessera.worker.state.blob_cache import Row, Source
from tessera.worker.state.checkpoints import Checkpoints, TaskCheckpoint
from tessera.worker.state.hash_chain import TaskRef, derived
from tessera.worker.state.privacy_ledger import Ledger, NoisyFigures, Use
from tessera.worker.state.site_keys import SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task.handover import CheckedModel, FetchedVersion, TaskOutcome
from tessera.worker.training.progress import Check, Report

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount
    from tessera.worker.privacy.budgets import SiteLimits

MAX_INLINE = 1 << 20
"""Largest total of inline blobs in a task or a submission, in bytes: these are held in memory several times."""

PAUSE_SECONDS = 0.5

REFUSED_SECONDS, MAX_REFUSED_SECONDS = 5.0, 30.0
"""Time before a refused result is sent again, if the coordinator names no time, and the upper limit of both."""

TRAINING_SEEDS = "training seeds"
"""The purpose of the key that is derived from a worker's audit key for its training seeds."""

T = TypeVar("T")


class Coordinator(Protocol):
    """The coordinator as a task sees it: a `Client` over HTTP, or a simulation in the same process."""

    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None: ...
    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None: ...
    def copy_difference(
        self, run_id: str, number: int, since: int, file: Sink, below: int, progress: Progress | None = None
    ) -> bool: ...
    def put_stream(self, digest: str, file: BinaryIO, length: int, progress: Progress | None = None) -> None: ...
    def submit(self, task_id: str, submission: Submission) -> TaskView: ...
    def submit_file(
        self, task_id: str, submission: Submission, file: BinaryIO, length: int, progress: Progress | None = None
    ) -> TaskView: ...
    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView: ...
    def submit_report(self, task_id: str, report: ReportResult) -> TaskView: ...
    def submit_helper_report(self, task_id: str, report: HelperReport) -> TaskView: ...
    def task(self, task_id: str) -> TaskView: ...


class Shelf(Protocol):
    """Storage of the blobs that a task fetches: a `Cache`."""

    def __contains__(self, digest: str) -> bool: ...
    def path(self, digest: str) -> Path: ...
    def in_memory(self, digest: str) -> bytes | None:
        """Return a fetched blob if it is in memory."""

    def put(self, digest: str, pieces: Iterable[bytes | memoryview], max_bytes: int) -> bool: ...
    def fetch_all(self, wanted: Mapping[str, int], source: Row, progress: Progress | None = None) -> None: ...
    def pinning(self) -> AbstractContextManager[None]: ...
    def fetch(self, digest: str, max_bytes: int, source: Source, progress: Progress | None = None) -> Path: ...


class Executor(Protocol):
    """The execution of tasks on loaded data sets: in this process (`Direct`), or in others (`ProcessExecutor`)."""

    @property
    def kind(self) -> str:
        """The kind of the devices, and their number if there are several."""

    @property
    def compute(self) -> Compute:
        """The site's settings of how the devices compute."""

    def digests(self, run: "TaskRun", dataset: str) -> ExampleDigests:
        """Return the digests of a data set. Raises TaskFailure and the exceptions of `run.check`."""

    def subjects(self, run: "TaskRun", dataset: str) -> SubjectTables:
        """Return the subjects of a data set. Raises TaskFailure and the exceptions of `run.check`."""

    def check(self, run: "TaskRun", document: Model, dataset: DatasetInfo) -> CheckedModel:
        """Return the model's block table, computed here, before anything large is fetched for the task.

        Raises ConfigError, ModelMismatch, UnknownArchitecture, UnsupportedRun, TaskFailure and the exceptions of
        `run.check`.
        """

    def convert(
        self, run: "TaskRun", document: Model, folder: BaseFolder, blocks: Iterable[Block], take: Take
    ) -> None:
        """Hand over the blocks that transformers makes of the tensors of a published model. Raises ValueError."""

    def execute(
        self,
        run: "TaskRun",
        fetched: FetchedVersion,
        account: "PrivacyAccount | None",
        checkpoint: TaskCheckpoint | None,
    ) -> TaskOutcome:
        """Return the outcome of a task on its data set. Raises as `executor.stages.execution.execute` does."""


D = TypeVar("D")

MAX_DOCUMENTS = 8
"""Number of parsed documents that are kept: the models and last versions of a few runs."""


class Documents:
    """The documents that were parsed last."""

    def __init__(self) -> None:
        self._known: dict[tuple[type, str], Any] = {}

    def read(self, kind: type[D], digest: str, parse: Callable[[], D]) -> D:
        """Return the document of a digest, as `parse` returns it if it was not parsed lately."""
        key = (kind, digest)
        if key not in self._known:
            document = parse()
            while len(self._known) >= MAX_DOCUMENTS:
                self._known.pop(next(iter(self._known)), None)
            self._known[key] = document
        return cast("D", self._known[key])


@dataclass(frozen=True)
class CachedVersion:
    """A version whose needed blocks were fetched."""

    number: int
    manifest: Manifest


@dataclass(frozen=True)
class TaskEnvironment(SiteRules):
    """Everything that the tasks of one worker share. `scratch` is a folder for temporary files."""

    coordinator: Coordinator
    datasets: Mapping[str, DatasetInfo]
    executor: Executor
    vault: Vault
    shelf: Shelf
    scratch: Path
    name: str = "worker"
    kinds: tuple[TaskKind, ...] = ("train", "evaluate", "describe", "rehearse", "attack")
    mappings: Mapping[str, MappingFile] = field(default_factory=dict)
    documents: Documents = field(default_factory=Documents)
    versions: dict[str, CachedVersion] = field(default_factory=dict)
    """The version of the run's last task, by run."""
    vocabularies: dict[str, str | None] = field(default_factory=dict)
    """The vocabularies of models' tokenizers, by the digests of their files."""
    hidden: set[str] = field(default_factory=set)
    """The runs of tasks that may reveal nothing of an example: the memory of this process may follow from these."""
    own_script: bool = False
    """True if a script of the site's own trains (`executor.command`), which counts as not private."""
    regional: bool = False
    """True of a region's process, whose training is rounds of the region's coordinator."""
    for_evaluation: frozenset[str] = frozenset()
    """Data sets used only for evaluation."""
    fingerprints: dict[str, Array] = field(default_factory=dict)
    """Hashes of the examples, by data set."""
    contents: dict[str, str] = field(default_factory=dict)
    """Digests of the data sets' contents, by data set: with another, no checkpoint is resumed."""
    divided: frozenset[str] = frozenset()
    """Data sets that are one part of a partition (`part` in the settings), for experiments."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """Resources that a task may use, by name, such as `upload_bytes_per_second`."""
    ledger: Ledger | None = None
    """The ledger of privacy spent; in `scratch` if None."""
    class_names: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """The names of classes in the settings, by data set."""
    described: DescribedData | None = None
    """The descriptions that data sets had; None keeps none, as in a simulation."""
    history: RunHistory | None = None
    """The record of each run's terms and rounds; None keeps no record, as in a simulation."""
    inbox: Inbox | None = None
    """Requests for approval, if the policy requires approval of runs."""
    airlock: Airlock | None = None
    """Updates held for release, if the policy requires it."""
    audit: Audit | None = None
    """The site's audit chain; None keeps no record, as in a simulation."""
    bases: BaseSources | None = None
    """The site's external bases; None has none, as in a simulation."""
    sums: SumParty | None = None
    """This site in secure sums; None takes part in none."""
    checkpoints: Checkpoints | None = None
    """Checkpoints of unfinished training; None writes none, as in a simulation."""
    checkpoint_seconds: float = math.inf
    """Time between two checkpoints of a task; infinite for none."""
    seed_key: bytes | None = field(default=None, repr=False)
    """The site's secret for `TaskRun.training_seed`; None trains by the coordinator's seeds, as in a simulation."""
    duration_quantum_seconds: float = 0.0
    """Unit of the durations of tasks that may reveal nothing of an example; 0 for none, as in a simulation."""
    clock: Callable[[], float] = time.monotonic
    sleep: Callable[[float], None] = time.sleep
    noise_key: Callable[[Task], bytes | None] = lambda _: None
    """Seed of a private task's noise, for simulations; None draws a secret one. Any other protects no data."""

    def limits(self, dataset: str) -> "SiteLimits":
        """Return the site's privacy budgets for uses of a data set that protect single examples. Raises TaskFailure
        without the extra `privacy`."""
        policy, ledger = self.policy, self.ledger
        return privacy_module("budgets").SiteLimits(  # type: ignore[no-any-return]
            dataset,
            "example",
            self.allowances.get(dataset),
            policy.max_weekly_privacy,
            policy.max_total_privacy,
            partial(ledger.elsewhere, dataset) if ledger else tuple,
        )


def privacy_module(name: str) -> Any:
    """Return a module of `worker.privacy` that needs the extra `privacy`. Raises TaskFailure without it."""
    try:
        return importlib.import_module(f"tessera.worker.privacy.{name}")
    except ImportError as error:
        raise TaskFailure(
            "privacy-not-installed",
            f"the task uses differential privacy, which is not installed at the worker ({error}): "
            + install_line("privacy", elsewhere=True),
        ) from error


@dataclass(frozen=True)
class Journal:
    """Records of one task in the site's audit chain and in the data set's privacy ledger."""

    task: TaskRef
    dataset: str
    audit: Audit | None
    ledger: Ledger | None
    limits: "Callable[[str], SiteLimits] | None" = None
    """A function from a data set's name to its privacy budgets for figures with noise."""

    def note(self, action: Action, **detail: JsonValue) -> str | None:
        """Append an entry to the audit chain and return its digest."""
        return self.audit.record(action, self.task, **detail).digest if self.audit else None

    def note_exact(self, examples: int, use: Use) -> None:
        """Record in the ledger that the task is about to use the data without noise."""
        if self.ledger:
            with self.ledger.page(self.dataset) as page:
                page.exact(self.task, examples, use)

    def reserve_figures(self, examples: int, epsilon: float, delta: float) -> float:
        """Reserve the privacy of one evaluation's figures in the ledger, and return it in zCDP. Called by ranks too.

        Raises PolicyViolation, LedgerError, TaskFailure.
        """
        privacy = Budget(epsilon=epsilon, delta=delta)
        rho = rho_of(privacy)
        if self.ledger:
            if self.limits is None:
                raise RuntimeError("a journal that spends needs the site's limits")
            self.limits(self.dataset).reserve(self.ledger, self.task, examples, privacy, NoisyFigures(rho=rho))
        return rho

    def ledger_head(self) -> JsonValue:
        """Return the head of the data set's ledger, for the audit entry."""
        head = self.ledger.leaving(self.dataset) if self.ledger else None
        return {self.dataset: head.model_dump(mode="json")} if head else {}


class Throttle:
    """Limit of `bytes_per_second` on average: waits after each piece. `check` runs while waiting and may raise."""

    def __init__(
        self,
        bytes_per_second: float,
        check: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self._rate = bytes_per_second
        self._check = check
        self._clock = clock
        self._sleep = sleep
        self._began_at = clock()
        self._sent_bytes = 0

    def sent(self, nbytes: int) -> None:
        self._sent_bytes += nbytes
        due_at = self._began_at + self._sent_bytes / self._rate
        wait_until(due_at, self._check, self._clock, self._sleep)


def wait_until(
    due_at: float, check: Callable[[], None], clock: Callable[[], float], sleep: Callable[[float], None]
) -> None:
    """Wait until an instant of the clock. Raises the exceptions of `check`."""
    while (left := due_at - clock()) > 0:
        sleep(min(left, PAUSE_SECONDS))
        check()


@dataclass(frozen=True)
class TaskRun:
    """One task of a worker and the context that its stages share."""

    env: TaskEnvironment
    task: Task
    check: Check
    """Raises an exception to end the task early."""
    report: Report
    journal: Journal
    began_at: float = 0.0
    """By the environment's clock."""

    def wait_for_quantum(self, check: Check) -> None:
        """Wait until the task has lasted a multiple of the site's quantum, if its duration could reveal an example.

        Raises the exceptions of `check`.
        """
        env = self.env
        if self.report.hides and (quantum := env.duration_quantum_seconds):
            lasted = max(1, math.ceil((env.clock() - self.began_at) / quantum)) * quantum
            wait_until(self.began_at + lasted, check, env.clock, env.sleep)

    def count(self, nbytes: int) -> None:
        """Count bytes that were fetched."""
        self.report.download_bytes += nbytes
        self.check()

    def sent(self, nbytes: int) -> None:
        """Count bytes that were sent, and wait as long as the site's upload rate requires."""
        self.report.upload_bytes += nbytes
        self.check()
        if self._throttle:
            self._throttle.sent(nbytes)

    @cached_property
    def _throttle(self) -> Throttle | None:
        rate = self.env.policy.max_upload_bytes_per_second
        return Throttle(rate, self.check) if rate else None

    def deliver(self, send: Callable[[], T]) -> T:
        """Return the result of `send`. Repeat it after refusals that may pass, until the task's lease or round ends.

        Giving up would spend privacy, and one of the round's attempts, on the same result again. Raises Problem and
        the exceptions of `check`.
        """
        said = None
        while True:
            try:
                return send()
            except Problem as problem:
                if not may_pass(problem):
                    raise
                if problem.code != said:
                    said = problem.code
                    about = {"reason": said, "detail": problem.detail, "remedy": problem.advice}
                    structlog.get_logger("worker").warning("result-refused", run=self.task.run_name, **about)
                asked = problem.retry_after_seconds or REFUSED_SECONDS
            self.check()
            wait_until(time.monotonic() + min(asked, MAX_REFUSED_SECONDS), self.check, time.monotonic, time.sleep)

    def fetch(self, digest: str, max_bytes: int) -> Path:
        """Return the path of a blob, fetched if it is not here. Raises DigestMismatch, BlobTooLarge."""
        return self.env.shelf.fetch(digest, max_bytes, self.env.coordinator.copy_blob, self.count)

    def read(self, digest: str, max_bytes: int) -> bytes:
        """Return a blob's bytes, fetched if it is not here. Raises DigestMismatch, BlobTooLarge."""
        path = self.fetch(digest, max_bytes)
        data = self.env.shelf.in_memory(digest)
        return path.read_bytes() if data is None else data

    def document(self, digest: str) -> bytes:
        """Return a document's bytes as `read` does."""
        return self.read(digest, MAX_DOCUMENT_BYTES)

    def mapping(self, model: Model) -> MappingFile | None:
        """Return the site's own mapping of a model's attention, if there is one."""
        return self.env.mappings.get(str(model.config["model_type"]))

    @cached_property
    def snapshot(self) -> TaskStatement:
        """The run's terms and progress, as the task states them."""
        return TaskStatement.of(self.task)

    @cached_property
    def training_seed(self) -> int:
        """The seed of everything random that the task draws: initial values, batches, dropout, rounding.

        It follows from the task's seed and a secret of the site. A coordinator that chose it could choose which
        examples train, and could have one update computed twice: two sums with it under different weights, or beside
        others' updates, would show it. A repetition of the task trains the same.
        """
        key, task = self.env.seed_key, self.task
        return task.seed if key is None else mixed_seed(key, task)

    def groups(self, dataset: DatasetInfo) -> int | None:
        """Return the number of groups if the task protects them. Raises PolicyViolation for examples without one."""
        task = self.task
        if task.privacy is None or task.privacy.unit != "group":
            return None
        if dataset.ungrouped:
            # Without figures: how many examples have none is exact information about the data.
            raise PolicyViolation(
                "group",
                f"the run protects groups of examples (privacy.unit), and in {task.dataset!r} {dataset.ungrouped}",
            )
        return dataset.groups


class SiteRecords:
    """The records of a task that its execution asks of the agent."""

    def __init__(self, run: TaskRun) -> None:
        self.note_exact = run.journal.note_exact
        self.reserve_figures = run.journal.reserve_figures
        self._run = run

    def measure(self) -> None:
        """Count an evaluation on the data set. Raises PolicyViolation."""
        env, task = self._run.env, self._run.task
        if env.history:
            env.history.measure(task.run, task.dataset, env.policy)

    def keep_scale(self, scale: Mapping[str, float]) -> None:
        """Keep the loss scale for the run's next round, whether or not the update is merged."""
        if self._run.task.kind == "rehearse":
            return
        kept = {name: np.array(value, np.float64) for name, value in scale.items()}
        self._run.env.vault.keep_scale(self._run.task.run, kept)

    def loss_scale(self) -> dict[str, float]:
        """Return the loss scale that an earlier round kept."""
        return {name: float(value) for name, value in self._run.env.vault.load_scale(self._run.task.run).items()}


def facts_of(task: Task, model: Model) -> RunInfo:
    """Return the facts of a task's run, with its model, for both halves of its method."""
    return RunInfo(
        model.blocks,
        task.rounds,
        task.normalization,
        task.training,
        task.privacy,
        upload_budget=task.upload_budget,
        upload_seconds=task.upload_seconds,
        client_privacy=task.client_privacy,
        fitted=task.cohort.work == "fitted",
        secure_sums=task.secure_sums is not None,
        external=frozenset(model.external),
        head=model.head,
        lora=model.lora,
        lora_rank=task.plan.lora_rank,
    )


def local_work(task: Task, model: Model, units: int) -> dict[str, float]:
    """Return the metric by which the coordinator divides the step of a task on that many examples or groups, if the
    run divides steps by local work."""
    half = coordinator_half(task.method, facts_of(task, model))
    return {EFFECTIVE_STEPS: half.expected_steps(task.plan, units)} if half.normalizes else {}


def mixed_seed(key: bytes, task: Task) -> int:
    """Return a task's seed mixed with a site's secret: 53 bits, as `derive_seed` returns."""
    about = f"{task.alike_digest} {task.version.digest} {task.round} {task.seed}"
    return derive_seed(0, derived(key, about).hex())
