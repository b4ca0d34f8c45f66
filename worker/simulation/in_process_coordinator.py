"""A coordinator in the worker's own process, in place of `Client`, without a network.

It exchanges the same JSON documents and update files as over HTTP, and validates them as the coordinator does.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel

from tessera.shared.api.runs import Measurement, Round, RunSpec
from tessera.shared.api.tasks import EvaluationResult, Receipt, Submission, Task, TaskView
from tessera.shared.api.versions import Difference, VersionRef
from tessera.shared.client.client import Progress
from tessera.shared.hashing import Sink
from tessera.shared.methods.base import Plan
from tessera.shared.model.spec import Model
from tessera.shared.problems import NotFound, Problem
from tessera.shared.rounds.planning import check_report, dataset_of, evaluation_seed, task_of, training_seed
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import TaskKind, TaskState
from tessera.worker.simulation.blob_folder import PIECE_BYTES, Folder
from tessera.worker.simulation.checkpoint import Records, Reported

RUN = "simulation"
"""The id of a simulation's only run."""

TOKEN = 1
LEASE_SECONDS = 3600.0

M = TypeVar("M", bound=BaseModel)


@dataclass(frozen=True)
class Order:
    """A task for a worker."""

    id: str
    worker: str
    kind: TaskKind
    number: int
    """The round, or the number of the version that is measured."""
    plan: Plan
    version: VersionRef
    held_out: bool = False


class InProcessCoordinator:
    """Implements `worker.task.environment.Coordinator` for its own orders."""

    def __init__(self, spec: RunSpec, model: Model, folder: Folder, states: States, records: Records) -> None:
        self._spec = spec
        self._model = model
        self._folder = folder
        self._states = states
        self._inspector = Inspector(folder, states)
        self._records = records
        self._orders: dict[str, Order] = {}
        self._measured: dict[str, Measurement] = {}
        self._over: dict[str, TaskView] = {}
        """The accepted tasks of finished rounds."""
        self._receipts: dict[str, Receipt] = {}
        """The latest receipt, by worker."""

    def end(self, made: Round) -> None:
        """Record the outcome of the accepted updates of a finished attempt."""
        for view in made.tasks:
            if view.is_accepted:
                self._over[view.id] = view
                about = view.model_dump(include={"token", "state", "unmerged"})
                self._receipts[view.worker] = Receipt.model_validate({"task": view.id, **about})

    def give(self, order: Order) -> Task:
        """Return the order as the task that its worker receives."""
        self._orders[order.id] = order
        if order.kind == "train":
            seed = training_seed(self._spec, order.number, order.worker)
        else:
            seed = evaluation_seed(self._spec, order.number)
        return _sent(
            task_of(
                self._spec,
                order.plan,
                order.version,
                task_id=order.id,
                token=TOKEN,
                kind=order.kind,
                held_out=order.held_out,
                run=RUN,
                number=order.number,
                seed=seed,
                lease_seconds=LEASE_SECONDS,
                receipt=self._receipts.get(order.worker),
            )
        )

    def view(self, order: Order, state: TaskState, problem: Problem | None = None) -> TaskView:
        """Return an order's task in a given state."""
        return TaskView(
            id=order.id,
            run=RUN,
            round=order.number,
            worker=order.worker,
            kind=order.kind,
            state=state,
            token=TOKEN,
            attempts=1,
            problem=problem.document() if problem else None,
        )

    def answered(self, order: Order) -> TaskView | None:
        """Return the order's accepted update, if there is one."""
        found = self._records.accepted(order.id)
        return found.view if found else None

    def measurement(self, order: Order) -> Measurement:
        """Remove and return the measurement of an evaluation order."""
        return self._measured.pop(order.id)

    # ------------------------------------------------------------ as `Client`

    @property
    def fast_line(self) -> bool:
        """False: the simulation counts the bytes that a run would send over a slow connection."""
        return False

    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None:
        for digest in digests:
            self.copy_blob(digest, file, progress)

    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None:
        with self._folder.open(digest) as blob:
            while piece := blob.read(PIECE_BYTES):
                file.write(piece)
        if progress:
            progress(file.tell())

    def difference(self, run_id: str, number: int, since: int) -> Difference | None:
        """Return None: a simulation counts whole blocks as fetched."""
        return None

    def put_file(self, path: Path, progress: Progress | None = None, digest: str | None = None) -> str:
        with path.open("rb") as file, self._folder.writer() as writer:
            while piece := file.read(PIECE_BYTES):
                writer.write(piece)
            stored = writer.finish()
        if progress:
            progress(stored.size)
        return stored.digest

    def submit(self, task_id: str, submission: Submission) -> TaskView:
        """Validate and record an update. Raises InvalidUpdate."""
        order, report = self._orders[task_id], _sent(submission)
        check_report(self._spec, self._model, order.plan, report.examples, report.metrics)
        manifest = self._states.manifest(order.version.digest)
        measured = self._inspector.check(report.update, self._model, manifest, order.plan, self._spec.max_update_norm)
        result = {
            "examples": report.examples,
            "metrics": {**report.metrics, **measured},
            "upload_bytes": self._folder.size(report.update),
            "download_bytes": report.download_bytes,
        }
        view = self.view(order, "accepted").model_copy(update=result)
        self._records.accept(Reported(view=view, update=report.update, plan=order.plan))
        return view

    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView:
        order, report = self._orders[task_id], _sent(evaluated)
        self._measured[task_id] = Measurement(
            version=order.version.number,
            dataset=dataset_of(self._spec, order.kind, held_out=order.held_out),
            worker=order.worker,
            held_out=order.held_out,
            examples=report.examples,
            metrics=report.metrics,
            download_bytes=report.download_bytes,
        )
        return self.view(order, "accepted")

    def task(self, task_id: str) -> TaskView:
        """Return the outcome of a task, for vaults with pending files. Raises NotFound."""
        if over := self._over.get(task_id):
            return over
        if found := self._records.accepted(task_id):
            return found.view
        problem = NotFound(f"no update of task {task_id} was accepted")
        # The answer is authoritative, so that the vault discards the task's staged tensors.
        problem.from_document = True
        raise problem


def _sent(message: M) -> M:
    """Return the message as the other side receives it."""
    return type(message).model_validate_json(message.model_dump_json(exclude_defaults=True))
