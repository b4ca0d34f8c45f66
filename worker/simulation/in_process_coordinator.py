"""A coordinator in the worker's own process, in place of `Client`, without a network.

It exchanges the same JSON documents and update files as over HTTP, and validates them as the coordinator does.
"""

from collections.abc import Mapping, Sequence
from typing import BinaryIO, Protocol, TypeVar

from pydantic import BaseModel

from tessera.shared.api.runs import Measurement, Round, RunSpec
from tessera.shared.api.secure_sums import HelperReport, SumTask
from tessera.shared.api.tasks import EvaluationResult, Receipt, ReportResult, Submission, Task, TaskView
from tessera.shared.api.versions import VersionRef
from tessera.shared.client.transfers import Progress
from tessera.shared.methods.base import Plan
from tessera.shared.model.blocks import layers_of
from tessera.shared.model.spec import Model
from tessera.shared.problems import InvalidUpdate, NotFound, Problem
from tessera.shared.rounds.planning import check_report, dataset_of, evaluation_seed, task_of, training_seed
from tessera.shared.rounds.secure_sums import check_masked
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import Message, TaskKind, TaskState
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.hashing import Sink
from tessera.shared.tensors.lazy import as_bytes, from_bytes
from tessera.shared.updates.update_file import DecodedTensor
from tessera.worker.simulation.blob_folder import PIECE_BYTES, Folder
from tessera.worker.simulation.checkpoint import AcceptedReport, UpdateEntry
from tessera.worker.simulation.virtual_sites import SharedDiskCache
from tessera.worker.task.environment import MAX_INLINE

RUN = "simulation"
"""The id of a simulation's only run."""

TOKEN = 1
LEASE_SECONDS = 3600.0

M = TypeVar("M", bound=BaseModel)


INLINE_BYTES = 256 << 20
"""The limit of all updates of a round that are in memory."""


class AcceptedUpdates(Protocol):
    """The accepted updates of the round that is not committed yet."""

    def get(self, task: str) -> UpdateEntry | None: ...
    def add(self, held: UpdateEntry) -> None: ...


class Order(Message):
    """A task for a worker."""

    id: str
    worker: str
    kind: TaskKind
    number: int
    """The round, or the number of the version that is measured."""
    plan: Plan
    version: VersionRef
    held_out: bool = False
    sums: SumTask | None = None

    @property
    def holder(self) -> str:
        """The name under which its worker's blobs are recorded: empty for the central evaluator."""
        return self.worker if self.kind == "train" or self.held_out else ""


class HandedOver(Message):
    """An accepted update on its way from another process. Its bytes follow, and those of its decoded blocks."""

    reported: AcceptedReport
    blocks: tuple[str, ...] = ()
    """The names of the decoded blocks, if all of the update's are."""


class _LastAccepted:
    """The update that was accepted last, for a process that hands it over."""

    def __init__(self) -> None:
        self.last: UpdateEntry | None = None

    def get(self, task: str) -> UpdateEntry | None:
        return self.last if self.last and self.last.reported.view.id == task else None

    def add(self, held: UpdateEntry) -> None:
        self.last = held


class InProcessCoordinator:
    """Implements `worker.task.environment.Coordinator` for its own orders."""

    def __init__(
        self,
        spec: RunSpec,
        model: Model,
        folder: Folder,
        states: States,
        inspector: Inspector,
        open_: AcceptedUpdates,
    ) -> None:
        self.open = open_
        self.held: dict[str, frozenset[str]] = {}
        """The blobs that each worker holds after its last task, by the worker's name."""
        self._last_held = frozenset[str]()
        self.cohort = 1
        """The number of workers of the present round."""
        self._spec = spec
        self._model = model
        self._folder = folder
        self._states = states
        self._inspector = inspector
        self._given: dict[str, tuple[Order, SharedDiskCache]] = {}
        """The tasks of the present round that this process has given out, each with its worker's shelf."""
        self._measured: dict[str, Measurement] = {}
        self._over: dict[str, TaskView] = {}
        """The accepted tasks of finished rounds."""
        self._receipts: dict[str, Receipt] = {}
        """The latest receipt, by worker."""

    def end(self, made: Round) -> None:
        """Record the outcome of the accepted updates of a finished attempt."""
        self._given.clear()
        for view in made.tasks:
            if view.is_accepted:
                self._over[view.id] = view
                about = view.model_dump(include={"token", "state", "unmerged"})
                self._receipts[view.worker] = Receipt.model_validate({"task": view.id, **about})

    @property
    def helpers(self) -> tuple[str, ...]:
        """The sites that open the run's secure sums, if it has any."""
        return self._spec.secure_sums.helpers if self._spec.secure_sums else ()

    @property
    def blocks(self) -> int:
        """The number of the model's blocks."""
        return len(self._model.blocks)

    def shelf(self, order: Order) -> SharedDiskCache:
        """Return the shelf of an order's worker."""
        return SharedDiskCache(self._folder, self.held.get(order.holder, frozenset()))

    def give(self, order: Order, shelf: SharedDiskCache) -> Task:
        """Return the order as the task that its worker receives."""
        self._given[order.id] = order, shelf
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
                inline_bytes=min(MAX_INLINE, INLINE_BYTES // self.cohort),
                lease_seconds=LEASE_SECONDS,
                receipt=self._receipts.get(order.worker),
                sums=order.sums,
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
        found = self.open.get(order.id)
        return found.reported.view if found else None

    def measurement(self, order: Order) -> Measurement:
        """Remove and return the measurement of an evaluation order."""
        return self._measured.pop(order.id)

    # ------------------------------------------------------------ between processes

    def serve_alone(self) -> None:
        """Accept updates from now on for another process, to which they are handed over."""
        self.open = _LastAccepted()

    def hand_over(self, order: Order) -> tuple[HandedOver, bytes, bytes] | None:
        """Remove and return the order's accepted update, its bytes if they are in memory, and its decoded blocks."""
        held = self.open.get(order.id)
        if held is None:
            return None
        update = held.reported.update
        manifest = self._states.manifest(order.version.digest)
        blocks = {} if order.sums else self._inspector.reopen(update, self._model, manifest, order.plan)
        decoded = {name: one.values for name, one in blocks.items() if isinstance(one, DecodedTensor)}
        self._inspector.release()
        if held.data:
            self._folder.remove([update])
        if len(decoded) < len(blocks):
            decoded = {}
        accepted = HandedOver(reported=held.reported, blocks=tuple(decoded))
        return accepted, held.data, b"".join(map(as_bytes, decoded.values()))

    def take_over(self, order: Order, accepted: HandedOver, data: bytes, blocks: bytes) -> None:
        """Record an update that another process accepted."""
        reported = accepted.reported
        if data:
            self._folder.lend(reported.update, data)
        self.open.add(UpdateEntry(reported, data))
        if accepted.blocks:
            manifest, table = self._states.manifest(order.version.digest), self._model.by_name
            decoded, at = dict[str, DecodedTensor](), 0
            for name in accepted.blocks:
                block = table[name]
                values = from_bytes(memoryview(blocks)[at : at + block.nbytes], block.dtype)
                base = self._states.tensor(block, manifest)
                decoded[name] = DecodedTensor(block, base, values, self._inspector.start_of(base))
                at += block.nbytes
            self._inspector.hold(reported.update, decoded)

    # ------------------------------------------------------------ as `Client`

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
        """Validate and record an update. Raises InvalidUpdate."""
        (order, shelf), data = self._given[task_id], submission.data
        report = _sent(submission.model_copy(update={"data": None}))
        if data is not None:
            self._folder.lend(report.update, data)
        try:
            measured, blocks = self._checked(order, report)
        except InvalidUpdate:
            self._folder.remove([report.update])
            raise
        result = {
            "examples": report.examples,
            "metrics": {**report.metrics, **measured},
            "layers": tuple(layer.name for layer in layers_of(self._model.by_name[name] for name in blocks)),
            "upload_bytes": self._folder.size(report.update),
            "download_bytes": report.download_bytes,
        }
        view = self.view(order, "accepted").model_copy(update=result)
        held = self._holds(order, shelf)
        reported = AcceptedReport(
            view=view,
            update=report.update,
            plan=order.plan,
            inline_bytes=len(data or b""),
            held=tuple(held),
            envelope=report.envelope,
        )
        self.open.add(UpdateEntry(reported, data or b""))
        return view

    def _holds(self, order: Order, shelf: SharedDiskCache) -> frozenset[str]:
        """Record and return the blobs that an order's worker holds at its end."""
        held = shelf.kept(self._states.manifest(order.version.digest).digests)
        # Most workers hold the same, which is then in memory once.
        held = self._last_held = self._last_held if held == self._last_held else held
        self.held[order.holder] = held
        return held

    def _checked(self, order: Order, report: Submission) -> tuple[Mapping[str, float], Sequence[str]]:
        """Return the measurements of a valid update, and the names of its blocks. Raises InvalidUpdate."""
        check_report(self._spec, self._model, order.plan, report.examples, report.metrics)
        if order.sums:
            terms, site = self._terms(order.sums), order.worker.partition("/")[0]
            asked = [block.name for block in order.plan.upload.resolve(self._model.blocks)]
            _, blocks = check_masked(report.envelope, terms, site, None, report.update, asked, self._folder, None)
            return {}, blocks
        manifest = self._states.manifest(order.version.digest)
        return self._inspector.checked(report.update, self._model, manifest, order.plan, self._spec.max_update_norm)

    def _terms(self, sums: SumTask) -> Terms:
        return Terms.model_validate_json(self._folder.read(sums.terms))

    def submit_helper_report(self, task_id: str, report: HelperReport) -> TaskView:
        """Raise NotImplementedError: in a simulation there are no masks, and no helpers."""
        raise NotImplementedError

    def submit_report(self, task_id: str, report: ReportResult) -> TaskView:
        """Raise NotImplementedError: a simulation has the data sets and the rounds themselves."""
        raise NotImplementedError

    def submit_evaluation(self, task_id: str, evaluated: EvaluationResult) -> TaskView:
        (order, shelf), report = self._given[task_id], _sent(evaluated)
        self._holds(order, shelf)
        self._measured[task_id] = Measurement(
            version=order.version.number,
            dataset=dataset_of(self._spec, order.kind, held_out=order.held_out),
            worker=order.worker,
            held_out=order.held_out,
            examples=report.examples,
            metrics=report.metrics,
            class_counts=report.class_counts,
            subgroup_counts=report.subgroup_counts,
            download_bytes=report.download_bytes,
        )
        return self.view(order, "accepted")

    def task(self, task_id: str) -> TaskView:
        """Return the outcome of a task, for vaults with pending files. Raises NotFound."""
        if over := self._over.get(task_id):
            return over
        if found := self.open.get(task_id):
            return found.reported.view
        problem = NotFound(f"no update of task {task_id} was accepted")
        # The answer is authoritative, so that the vault discards the task's staged tensors.
        problem.from_document = True
        raise problem


def _sent(message: M) -> M:
    """Return the message as the other side receives it."""
    return type(message).model_validate_json(message.model_dump_json(exclude_defaults=True))
