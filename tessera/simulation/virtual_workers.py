"""The virtual workers, which run their tasks one after the other and share a model and its block table."""

import hashlib
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import torch

from tessera.shared.api.secure_sums import HelperReport
from tessera.shared.api.tasks import EvaluationResult, Failure, ReportResult, Submission, Task, TaskView
from tessera.shared.client.transfers import Progress
from tessera.shared.problems import NotFound, Problem
from tessera.shared.rounds.versions import States
from tessera.shared.schema import Message
from tessera.shared.tensors.hashing import Sink
from tessera.simulation.blob_folder import PIECE_BYTES, Folder
from tessera.simulation.secure_sums import party_of
from tessera.simulation.virtual_sites import SharedDiskCache, VirtualSites
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.stages.direct import Direct
from tessera.worker.executor.stages.run_cache import RunCache
from tessera.worker.faults.failures import REPORTABLE, failure_of
from tessera.worker.governance.policy import Policy
from tessera.worker.model.layouts import MappingFile
from tessera.worker.state.atomic_files import sweep, written_whole
from tessera.worker.state.site_keys import SumParty
from tessera.worker.state.vault import Vault
from tessera.worker.task.runner import TaskRunner
from tessera.worker.training.progress import Report
from tessera.worker.training.setup import TrainingSetup

HELD = "held.json"
"""The file of a worker's folder with the blobs that it holds."""

OF_THE_RUN: tuple[type[Exception], ...] = (TaskFailure, Problem, *REPORTABLE)
"""Failures that a run tolerates. Any other is a bug, and ends the simulation."""


class Work(Message):
    """A leased task, and the outcomes of its worker's earlier tasks."""

    name: str
    """The task's round, its attempt and the place of its site among the sites: the same in each simulation."""
    worker: str
    task: Task
    counted: str | None = None
    """The worker's last accepted task."""
    earlier: TaskView | None = None
    """The worker's last task, if it was another one."""

    @property
    def central(self) -> bool:
        return self.task.kind == "evaluate" and not self.task.held_out

    @property
    def home(self) -> str:
        """The name under which the worker's files are: empty for the central evaluator."""
        return "" if self.central else self.worker


class WorkResult(Message):
    """The report of a worker, which its coordinator has not received yet, or its failure."""

    submission: Submission | None = None
    evaluation: EvaluationResult | None = None
    failure: Failure | None = None
    download_bytes: int = 0
    upload_bytes: int = 0


class LocalClient:
    """Implements `worker.task.environment.Coordinator` for one task: it keeps the report for the simulation, which
    delivers it when the virtual worker has sent it."""

    def __init__(self, folder: Folder, work: Work) -> None:
        self._folder = folder
        self._work = work
        self.submission: Submission | None = None
        self.evaluation: EvaluationResult | None = None

    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None:
        for digest in digests:
            self.copy_blob(digest, file, progress)

    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None:
        with self._folder.open(digest) as blob:
            while piece := blob.read(PIECE_BYTES):
                file.write(piece)
        if progress:
            progress(file.tell())

    def copy_difference(
        self, run_id: str, number: int, since: int, file: Sink, below: int, progress: Progress | None = None
    ) -> bool:
        """Return False: a simulation counts whole blocks as fetched."""
        return False

    def submit_file(
        self, task_id: str, submission: Submission, file: BinaryIO, length: int, progress: Progress | None = None
    ) -> TaskView:
        self.put_stream(submission.update, file, length, progress)
        return self.submit(task_id, submission)

    def put_stream(self, digest: str, file: BinaryIO, length: int, progress: Progress | None = None) -> None:
        with self._folder.writer() as writer:
            while piece := file.read(PIECE_BYTES):
                writer.write(piece)
            stored = writer.finish()
        if progress:
            progress(stored.size)

    def submit(self, task_id: str, submission: Submission) -> TaskView:
        """Keep the report. Its progress has durations of this machine."""
        self.submission = submission.model_copy(update={"progress": None})
        return self._view()

    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView:
        self.evaluation = evaluated.model_copy(update={"progress": None})
        return self._view()

    def submit_helper_report(self, task_id: str, report: HelperReport) -> TaskView:
        """Raise NotImplementedError: in a simulation there are no masks, and no helpers."""
        raise NotImplementedError

    def submit_report(self, task_id: str, report: ReportResult) -> TaskView:
        """Raise NotImplementedError: a simulation has the data sets and the rounds themselves."""
        raise NotImplementedError

    def task(self, task_id: str) -> TaskView:
        """Return the outcome of an earlier task, for a vault with pending files. Raises NotFound."""
        earlier = self._work.earlier
        if earlier and earlier.id == task_id:
            return earlier
        problem = NotFound(f"no update of task {task_id} was accepted")
        # The answer is authoritative, so that the vault discards the task's staged tensors.
        problem.from_document = True
        raise problem

    def _view(self) -> TaskView:
        task, work = self._work.task, self._work
        about = {"id": task.id, "run": task.run, "round": task.round, "worker": work.worker, "kind": task.kind}
        return TaskView.model_validate({**about, "state": "accepted", "token": task.token, "attempts": 1})


@dataclass(frozen=True)
class Workers:
    population: VirtualSites
    test: Dataset | None
    helpers: tuple[str, ...]
    """The sites that open the run's secure sums, if it has any."""
    blobs: Folder
    states: States
    folder: Path
    device: torch.device
    policy: Policy
    mappings: Mapping[str, MappingFile]
    shared: RunCache = field(default_factory=RunCache)
    """The caches of all sites: of these, the model and its block table are the same at each."""
    _vaults: dict[Path, Vault] = field(default_factory=dict)

    def settle(self, ask: Callable[[str], TaskView]) -> None:
        """Commit or discard the vaults' pending files, by the outcomes of their tasks."""
        for site in self.population.holdings:
            if (home := self._home(site)).exists():
                sweep(home)
                self._vault(home).settle(ask)

    def do(self, work: Work) -> WorkResult:
        """Run a task, as its worker would. Raises the exceptions of a method's code."""
        client, report = LocalClient(self.blobs, work), Report()
        try:
            self._do(work, client, report)
        except OF_THE_RUN as fault:
            code, detail = failure_of(fault)
            return WorkResult(failure=Failure(token=work.task.token, code=code, detail=detail))
        moved = {"download_bytes": report.download_bytes, "upload_bytes": report.upload_bytes}
        return WorkResult(submission=client.submission, evaluation=client.evaluation, **moved)

    def _do(self, work: Work, client: LocalClient, report: Report) -> None:
        task, site = work.task, None if work.central else self.population.site_of(work.worker)
        home = self._home(site) if site else self.folder / "evaluator"
        dataset = self.population.dataset(site, task.round) if site else self.test
        assert dataset  # noqa: S101 (for the types)
        before = self._held(home, work)
        shelf = SharedDiskCache(self.blobs, before)
        runner = TaskRunner(
            coordinator=client,
            datasets={task.dataset: dataset.info},
            executor=Direct(
                {task.dataset: dataset}, TrainingSetup(self.device), RunCache(self.shared.models, self.shared.tables)
            ),
            for_evaluation=frozenset({task.dataset} if work.central else ()),
            vault=self._vault(home),
            shelf=shelf,
            scratch=home,
            # The sites' examples are all here.
            policy=self.policy.model_copy(update={"send_class_counts": True}),
            mappings=self.mappings,
            resources=self.population.participant(site, task.round).resources if site else {},
            seed_key=self.population.seed_key(site, in_sum=task.sums is not None) if site else None,
            full_precision=True,
            noise_key=lambda task: noise_key_of(task.seed, work.name),
            sums=self._party(site) if site and task.sums else None,
        )
        runner.run(task, lambda: None, report)
        after = shelf.kept(self.states.manifest(task.version.digest).digests)
        if after != before:
            held = {"task": task.id, "before": sorted(before), "after": sorted(after)}
            with written_whole(home / HELD, durable=False) as file:
                file.write(json.dumps(held).encode())

    def _held(self, home: Path, work: Work) -> frozenset[str]:
        """Return the blobs that a worker held after its last accepted task: a task that is repeated, or follows a
        cancelled one, fetches the same."""
        if not (file := home / HELD).exists():
            return frozenset()
        held = json.loads(file.read_bytes())
        return frozenset(held["after" if held["task"] == work.counted else "before"])

    def _party(self, site: str) -> SumParty:
        return party_of(site, self.helpers, self.population.weight(site))

    def _vault(self, home: Path) -> Vault:
        if home not in self._vaults:
            self._vaults[home] = Vault(home / "vault", durable=False)
        return self._vaults[home]

    def _home(self, site: str) -> Path:
        return self.folder / "sites" / site


def noise_key_of(seed: int, name: str) -> bytes:
    """Derive a private task's noise key from the run's seed, so that a simulation is reproducible.

    The seed is in the run's settings, so this noise protects no data.
    """
    return hashlib.sha256(f"{seed}/{name}".encode()).digest()
