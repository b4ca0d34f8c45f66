"""Does one task: fetches what it lacks, trains or evaluates, and hands in the result."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import dataclass, field
from datetime import UTC, datetime
from fnmatch import fnmatchcase
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np
import structlog
import torch
from pydantic import JsonValue, ValidationError
from transformers import PreTrainedModel

from tessera.shared.api.tasks import Evaluated, Submission, Task, TaskView
from tessera.shared.api.versions import Difference, Manifest, MemoryEntry
from tessera.shared.client.client import Progress
from tessera.shared.hashing import Sink
from tessera.shared.json_limits import check_document
from tessera.shared.methods.base import Harvest, RunFacts, Tally, WorkerHalf
from tessera.shared.methods.registry import check as check_method
from tessera.shared.methods.registry import worker_half
from tessera.shared.metrics.site_spread import PERSONAL
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import MAX_DOCUMENT_BYTES, Model
from tessera.shared.problems import InvalidUpdate, Problem, faults_of
from tessera.shared.schema import EPSILON, TaskKind
from tessera.shared.telemetry import spans
from tessera.shared.tensors.lazy import CHUNK, Array, ArrayTensor, as_bytes, digest_of, from_bytes, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.codecs.pipeline import CodecError
from tessera.shared.updates.update_file import Change, read_update
from tessera.worker.data.overlap import MOST_SHARED, fingerprints, share_of, sketch_of
from tessera.worker.data.registry import Dataset
from tessera.worker.governance.airlock import Airlock, UpdateWithheld
from tessera.worker.governance.approvals import Inbox, Request
from tessera.worker.governance.descriptions import summary
from tessera.worker.governance.policy import Allowance, Policy, PolicyViolation, check_use
from tessera.worker.governance.run_history import Contributions
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import check_model, instantiate, write_block
from tessera.worker.model.layouts import MappingFile
from tessera.worker.model.sandbox import Sandbox
from tessera.worker.privacy.cost import least_budget_of
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import Action, Audit, plan_digest
from tessera.worker.state.blob_cache import BlobTensor, BlobTooLarge, Row, Source
from tessera.worker.state.privacy_ledger import LEDGER_FOLDER, Ledger, LedgerError, Use, noisy_in
from tessera.worker.state.vault import NoReceipt, Vault
from tessera.worker.task.error_feedback import Feedback, without_feedback
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.task.upload import MOST_INLINE, Leaving
from tessera.worker.training.context import LocalWork
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.progress import Check, Report, rounded
from tessera.worker.training.trainer import Batches, Trainer, epochs_of, gradient_scaler, seed_everything, steps_in

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import PrivateTask


class Coordinator(Protocol):
    """What a task asks of its coordinator: a `Client` does so over HTTP, a simulation in the same process."""

    @property
    def fast_line(self) -> bool: ...
    def copy_blob(self, digest: str, file: Sink, progress: Progress | None = None) -> None: ...
    def copy_blobs(self, digests: Sequence[str], file: Sink, progress: Progress | None = None) -> None: ...
    def difference(self, run_id: str, number: int, since: int) -> Difference | None: ...
    def put_file(self, path: Path, progress: Progress | None = None, digest: str | None = None) -> str: ...
    def submit(self, task_id: str, submission: Submission) -> TaskView: ...
    def submit_evaluation(self, task_id: str, evaluated: Evaluated) -> TaskView: ...
    def task(self, task_id: str) -> TaskView: ...


class Shelf(Protocol):
    """Where the blobs that a task fetches lie while it is done: a `Cache`."""

    def __contains__(self, digest: str) -> bool: ...
    def path(self, digest: str) -> Path: ...
    def put(self, digest: str, pieces: Iterable[bytes | memoryview], max_bytes: int) -> bool: ...
    def fetch_all(self, wanted: Mapping[str, int], source: Row, progress: Progress | None = None) -> None: ...
    def pinning(self) -> AbstractContextManager[None]: ...
    def fetch(self, digest: str, max_bytes: int, source: Source, progress: Progress | None = None) -> Path: ...


LEAST_DIFFERENCE = 1 << 16
"""Fewer bytes of blocks are not worth asking what a difference would take."""


class TaskFailure(ValueError):
    """A task cannot be done as it was given. `code` is for programs; the text goes to the coordinator."""

    def __init__(self, code: str, detail: str) -> None:
        super().__init__(detail)
        self.code = code


Structure = tuple[tuple[str, type, int], ...]
"""A model's modules: the name, class and number of hooks of each."""


@dataclass(frozen=True)
class Built:
    """A model as it was built."""

    run: str
    digest: str
    model: PreTrainedModel
    blocks: tuple[Block, ...]
    structure: Structure


class Models:
    """The model that was built last, kept for the next task of the same run."""

    def __init__(self) -> None:
        self._last: Built | None = None

    def take(self, run: str, digest: str) -> Built | None:
        """The run's model, if it is here. Whatever is here is so no more: two would not fit where one does."""
        last, self._last = self._last, None
        return last if last and (last.run, last.digest) == (run, digest) else None

    def keep(self, built: Built) -> None:
        """Keeps a model, unless a method left modules or hooks in it that must be no part of the next round's."""
        if _structure(built.model) == built.structure:
            self._last = built


@dataclass(frozen=True)
class Held:
    """A version whose blocks were fetched, as far as they were wanted."""

    number: int
    manifest: Manifest


@dataclass(frozen=True)
class _Ready:
    """A task with its version loaded."""

    built: Built
    half: WorkerHalf[Any]
    work: LocalWork
    bases: Mapping[str, BlobTensor]
    """The version's value of each fetched block."""
    feedback: Feedback
    """What lossy codecs left out before."""

    def prepare(self) -> None:
        """Makes the version this site's own: puts in what it keeps, and what the method adds."""
        self.work.restore(self.half.private())
        self.half.prepare(self.work)

    def is_changed(self) -> bool:
        """Whether a fetched block has another value than the version's."""
        return any(self.work.read(base.block).tobytes() != to_array(base).tobytes() for base in self.bases.values())


@dataclass(frozen=True)
class Workbench:
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
    models: Models = field(default_factory=Models)
    held: dict[str, Held] = field(default_factory=dict)
    """By run, the version of the last task."""
    scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)
    """By run, the scale of float16's loss, which is found by trying and kept for the next round."""
    for_evaluation: frozenset[str] = frozenset()
    """The data sets that nothing trains on."""
    fingerprints: dict[str, Array] = field(default_factory=dict)
    """By data set, hashes of its examples."""
    divided: frozenset[str] = frozenset()
    """The data sets that are a part of what settings divide among sites, for trials."""
    allowances: Mapping[str, Allowance] = field(default_factory=dict)
    """The privacy budgets of the data sets that have one."""
    resources: Mapping[str, float] = field(default_factory=dict)
    """What a task may spend."""
    ledger: Ledger | None = None
    """Where privacy is written down; in `scratch` if None."""
    contributions: Contributions | None = None
    """Where it is written down what runs have shown; nowhere if None, as for a coordinator of one's own."""
    inbox: Inbox | None = None
    """Where runs wait for approval, if the policy says that they must have it."""
    airlock: Airlock | None = None
    """Where updates wait for release, if the policy says that they must have it."""
    audit: Audit | None = None
    """Where it is written down what was done; nowhere if None, as for a coordinator of one's own."""
    sandbox: Sandbox | None = None
    """Where an untrusted model is laid out first; nowhere if None, as for a model of one's own."""
    noise_key: Callable[[Task], bytes | None] = lambda _: None
    """What the noise of a private task follows from; a secret of that task if None. Anything else protects nobody."""

    def spent(self) -> dict[str, float]:
        """Return what runs have spent of each data set that has a privacy budget: the least budget that admits it."""
        found = {}
        for name, most in self.allowances.items():
            # What cannot be read or added up here refuses the tasks themselves, and says why.
            with suppress(LedgerError, OSError, ImportError):
                entries = self.ledger.latest(name) if self.ledger else ()
                found[name] = math.inf if most.uncovered(entries) else least_budget_of(noisy_in(entries), most.delta)
        return found

    def may_measure(self, dataset: str, examples: int) -> bool:
        """Whether the site lets versions be measured on so many examples of a data set that nothing trains on."""
        rules = (self.policy.require_privacy, self.allowances.get(dataset))
        return examples >= self.policy.min_measured and all(rule.evaluations for rule in rules if rule)

    def do(self, task: Task, check: Check, report: Report) -> None:
        """Does a task to its end: when this returns, the coordinator has accepted the result.

        Raises PolicyViolation before anything that the site forbids is done, Unapproved before anything is done for a
        run that nobody has approved, Problem for what the coordinator
        refuses, whatever `check` raises to end the task early, and other exceptions for a task that cannot be done.
        """
        self.note(
            "task.start",
            task,
            kind=task.kind,
            method=task.method.name,
            orchestrator=task.orchestrator,
            dataset=task.dataset,
            plan=plan_digest(task),
            version=task.version.digest,
        )
        self.policy.check_task(task, self.kinds)
        if self.contributions:
            self.contributions.check(task, self.policy)
        _check_method(task)
        pipeline.parse(task.codec)
        dataset = self.datasets.get(task.dataset)
        if dataset is None:
            raise TaskFailure("unknown-dataset", f"there is no data set {task.dataset!r} here")
        check_use(task, for_evaluation=task.dataset in self.for_evaluation)
        self.policy.check_batch(task.training.batch_size, dataset.examples)
        if self.inbox:
            self._require_approval(self.inbox, task, dataset, check, report)
        if allowance := self.allowances.get(task.dataset):
            allowance.check(task)
        self._check_overlap(task, dataset, check)
        private = self._private(task, dataset) if task.kind == "train" else None
        report.begin("fetching")
        with self.shelf.pinning(), _settling(private):
            with spans.span("fetch"):
                self._unpack(task, report)
                ready = self._loaded(task, check, report)
            if task.kind == "train":
                self._train(task, ready, dataset, private, check, report)
            else:
                with spans.span("evaluate"):
                    self._evaluate(task, ready, dataset, check, report)
        ready.work.close()
        self.models.keep(ready.built)

    def note(self, action: Action, task: Task | None = None, **detail: JsonValue) -> str | None:
        """Writes down a deed. Returns the entry's digest."""
        return self.audit.record(action, task, **detail).digest if self.audit else None

    def note_exact(self, task: Task, examples: int, use: Use) -> None:
        """Writes down that the task uses the data without noise, before it does."""
        if self.ledger:
            with self.ledger.page(task.dataset) as page:
                page.exact(task, examples, use)

    # ------------------------------------------------------------ before training

    def _check_overlap(self, task: Task, dataset: Dataset, check: Check) -> None:
        """Raises PolicyViolation if one of two data sets that have the same examples has a budget, and each a ledger
        of its own: what is spent under one name would not count under the other."""
        if self.ledger is None:
            return
        prints = self._fingerprints(task.dataset, self.ledger, check)
        with self.ledger.page(task.dataset) as page:
            sketch = sketch_of(prints, page.sketch)
            page.know(task, dataset.examples, sketch)
        limited = {self.ledger.name(name) for name in self.allowances}
        others = self.ledger.besides([task.dataset])
        if self.ledger.name(task.dataset) not in limited:
            others = [name for name in others if name in limited]
        for other, theirs in self.ledger.sketches(others).items():
            loaded = [name for name in self.datasets if self.ledger.name(name) == other]
            shares = [share_of(theirs, prints)]
            shares += [share_of(sketch, self._fingerprints(name, self.ledger, check)) for name in loaded]
            if max(shares) > MOST_SHARED:
                raise PolicyViolation(
                    "overlap",
                    f"about {max(shares):.0%} of the examples of {task.dataset!r} and {other!r} are the same, and a "
                    "budget of one does not see what is spent of the other",
                )

    def _fingerprints(self, dataset: str, ledger: Ledger, check: Check) -> Array:
        if dataset not in self.fingerprints:
            self.fingerprints[dataset] = fingerprints(self.datasets[dataset], ledger.hash_key, check)
        return self.fingerprints[dataset]

    def _require_approval(self, inbox: Inbox, task: Task, dataset: Dataset, check: Check, report: Report) -> None:
        """Raises Unapproved. The first task of a run is what a person is shown of it."""
        measured = dataset.held_out if task.kind == "evaluate" and task.held_out else dataset
        examples = measured.examples if measured else 0

        def request(terms: str) -> Request:
            made = Request(
                run=task.run,
                run_name=task.run_name,
                terms=terms,
                orchestrator=task.orchestrator,
                dataset=task.dataset,
                examples=examples,
                worker=self.name,
                asked_at=datetime.now(UTC),
                summary=summary(task, self._document(task, check, report), examples),
            )
            self.note("run.ask", task, terms=terms, summary=made.summary)
            return made

        inbox.require(task, request)

    def _private(self, task: Task, dataset: Dataset) -> PrivateTask | None:
        """What the task may spend, if it is a private one. Raises PolicyViolation if that is not enough."""
        if task.privacy is None:
            return None
        if task.dataset in self.divided:
            raise PolicyViolation(
                "part",
                f"{task.dataset!r} is a part of a partition, in which one example more moves others between sites: "
                "no epsilon holds for that",
            )
        try:
            privacy = importlib.import_module("tessera.worker.privacy.private_task")
        except ImportError as error:
            raise TaskFailure(
                "privacy-not-installed",
                f"the run asks for privacy, which needs another package ({error}): install tessera[privacy]",
            ) from error
        ledger = self.ledger or Ledger(self.scratch / LEDGER_FOLDER)
        allowance = self.allowances.get(task.dataset)
        floor = self.policy.require_privacy
        weekly = self.policy.max_weekly_privacy
        made: PrivateTask = privacy.PrivateTask(
            task,
            task.privacy,
            dataset.examples,
            ledger,
            allowance,
            floor,
            weekly,
            self.noise_key(task),
        )
        return made

    def _unpack(self, task: Task, report: Report) -> None:
        """Puts what came along with the task where it would be fetched to, unless it is more than ever does."""
        if sum(map(len, task.along)) <= MOST_INLINE:
            for data in task.along:
                report.download_bytes += len(data)
                self.shelf.put(digest_of(data), [data], len(data))

    def _loaded(self, task: Task, check: Check, report: Report) -> _Ready:
        """The version as it is, in a model; what the site keeps is at hand, and not yet in it."""

        def document_of(digest: str) -> bytes:
            return self._document_bytes(digest, check, report)

        document = self._document(task, check, report)
        self.policy.check_model_type(str(document.config["model_type"]))
        self.policy.check_model(document.nbytes)
        fetched = {block.name for block in task.plan.fetch.resolve(document.blocks)}
        # The last round's model, if all of it is about to be overwritten: what a round leaves in blocks that the next
        # one does not fetch must not become where the next one starts.
        last = self.models.take(task.run, task.model)
        if last and len(fetched) < len(document.blocks):
            last = None
        mapping = self.mappings.get(str(document.config["model_type"]))
        blocks = last.blocks if last else self._checked(document, mapping, check)
        with _failing_as("invalid-version"):
            manifest = Manifest.read(document_of(task.version.digest), document_of)
        wanted = [block for block in blocks if block.name in fetched]
        bases = self._fetch(task, manifest, wanted, blocks, check, report)
        # After the version is here, so that nobody allocates what a coordinator only claims to have.
        built = last or self._built(task, document, blocks, mapping)
        tensors = named_tensors(built.model)
        for base in bases.values():
            check()
            values = to_array(base)
            _require_finite(base.block.name, values)
            write_block(tensors, base.block, values)
        seed_everything(task.seed)
        facts = RunFacts(
            built.blocks,
            task.rounds,
            task.divide,
            task.training,
            task.privacy,
            upload_budget=task.upload_budget,
            upload_seconds=task.upload_seconds,
        )
        half = worker_half(task.method, facts)
        memory = self._memory(task, manifest, check, report)
        try:
            self.vault.settle_run(task.run, task.receipt, self.coordinator.task)
        except NoReceipt as fault:
            raise TaskFailure("no-receipt", str(fault)) from None
        vault = self.vault.load(task.run)
        feedback = Feedback.of(vault, task.plan.stage, task.round)
        own = without_feedback(vault)
        work = LocalWork(built.model, document.head, task.plan, built.blocks, own, memory)
        return _Ready(built, half, work, bases, feedback)

    def _document(self, task: Task, check: Check, report: Report) -> Model:
        with _failing_as("invalid-model"):
            return Model.model_validate_json(self._document_bytes(task.model, check, report))

    def _document_bytes(self, digest: str, check: Check, report: Report) -> bytes:
        raw = self._blob(digest, MAX_DOCUMENT_BYTES, check, report).read_bytes()
        check_document(raw)
        return raw

    def _blob(self, digest: str, max_bytes: int, check: Check, report: Report) -> Path:
        received = self._receiving(check, report)
        return self.shelf.fetch(digest, max_bytes, self.coordinator.copy_blob, received)

    @staticmethod
    def _receiving(check: Check, report: Report) -> Progress:
        def received(nbytes: int) -> None:
            report.download_bytes += nbytes
            check()

        return received

    def _checked(self, document: Model, mapping: MappingFile | None, check: Check) -> tuple[Block, ...]:
        """Return our own table of the model's blocks, which is the document's. Raises as `models.build`."""
        if self.sandbox:
            self.sandbox.require(document, mapping, check)
        return check_model(document, mapping)

    def _built(self, task: Task, document: Model, blocks: tuple[Block, ...], mapping: MappingFile | None) -> Built:
        """Build the run's model, which was checked before."""
        model = instantiate(
            document.config,
            document.head,
            seed=task.seed,
            prompts=document.prompts,
            lora=document.lora,
            mapping=mapping,
        ).to(self.device)  # type: ignore[arg-type]
        return Built(task.run, task.model, model, blocks, _structure(model))

    def _check_plan(self, task: Task, ready: _Ready) -> None:
        """Judges the plan on our own block table, before any data is read."""
        half, work = ready.half, ready.work
        private = [*half.private().resolve(work.blocks), *work.private]
        self.policy.check_private(block for block in private if task.plan.upload.holds(block))
        asked = task.plan.upload.resolve(work.blocks)
        self.policy.check_upload(asked)
        if baseless := sorted(block.name for block in asked if block.name not in ready.bases):
            raise TaskFailure(
                "invalid-plan", f"an update is a difference, and the plan fetches no base for {baseless[:8]}"
            )

    def _memory(self, task: Task, manifest: Manifest, check: Check, report: Report) -> dict[str, Array]:
        """The server memory that the plan asks for. Raises TaskFailure for a pattern that names none of it."""
        entries: dict[str, MemoryEntry] = {}
        for pattern in task.plan.memory:
            named = {name: entry for name, entry in sorted(manifest.memory.items()) if fnmatchcase(name, pattern)}
            if not named:
                raise TaskFailure("invalid-plan", f"the version holds no memory called {pattern}")
            entries |= named
        self.policy.check_memory(sum(entry.nbytes for entry in entries.values()))
        found: dict[str, Array] = {}
        for name, entry in entries.items():
            raw = self._blob(entry.digest, entry.nbytes, check, report).read_bytes()
            if len(raw) != entry.nbytes:
                raise TaskFailure("invalid-version", f"the blob of the memory {name} has not {entry.nbytes} bytes")
            found[name] = from_bytes(raw, entry.dtype).reshape(entry.shape)
            _require_finite(name, found[name])
        return found

    def _fetch(
        self,
        task: Task,
        manifest: Manifest,
        wanted: Sequence[Block],
        blocks: Sequence[Block],
        check: Check,
        report: Report,
    ) -> dict[str, BlobTensor]:
        if odd := sorted(set(manifest.blocks) ^ {block.name for block in blocks}):
            raise TaskFailure("invalid-version", f"the version and the model differ in the blocks {odd[:8]}")
        sizes = {manifest.blocks[block.name]: block.nbytes for block in wanted}
        lacking_bytes = sum(nbytes for digest, nbytes in sizes.items() if digest not in self.shelf)
        report.begin("fetching", of_bytes=report.download_bytes + lacking_bytes)
        self._catch_up(task, manifest, wanted, blocks, check, report)
        self.shelf.fetch_all(sizes, self.coordinator.copy_blobs, self._receiving(check, report))
        bases: dict[str, BlobTensor] = {}
        for block in wanted:
            path = self._blob(manifest.blocks[block.name], block.nbytes, check, report)
            if path.stat().st_size != block.nbytes:
                raise TaskFailure("invalid-version", f"the blob of {block.name} has not {block.nbytes} bytes")
            bases[block.name] = BlobTensor(path, block)
        return bases

    def _catch_up(
        self,
        task: Task,
        manifest: Manifest,
        wanted: Sequence[Block],
        blocks: Sequence[Block],
        check: Check,
        report: Report,
    ) -> None:
        """Makes what is wanted out of the version of the task before, if their difference is the less to fetch. What
        cannot be made so is fetched as it is."""
        held, self.held[task.run] = self.held.get(task.run), Held(task.version.number, manifest)
        if held is None:
            return
        before = held.manifest.blocks
        lacking = [b for b in wanted if manifest.blocks[b.name] not in self.shelf and before[b.name] in self.shelf]
        lacking_bytes = sum(block.nbytes for block in lacking)
        if lacking_bytes < LEAST_DIFFERENCE:
            return
        difference = self.coordinator.difference(task.run, task.version.number, held.number)
        if difference is None or difference.nbytes >= lacking_bytes:
            return

        def received(nbytes: int) -> None:
            report.download_bytes += nbytes
            check()
            if file.tell() > lacking_bytes:
                raise BlobTooLarge(f"{difference.digest} has more than the {difference.nbytes} bytes of a difference")

        with temporary_file(self.scratch) as (path, file):
            self.coordinator.copy_blob(difference.digest, file, received)
            file.flush()
            asked = {block.name: block for block in blocks}
            bases = {name: BlobTensor(self.shelf.path(before[name]), block) for name, block in asked.items()}
            try:
                tensors = read_update(lambda: path.open("rb"), path.stat().st_size, asked, bases)
                made = True
                for block in lacking:
                    check()
                    pieces = map(as_bytes, tensors[block.name].chunks())
                    made = self.shelf.put(manifest.blocks[block.name], pieces, block.nbytes) and made
            except (InvalidUpdate, CodecError, KeyError):
                made = False
        if not made:
            structlog.get_logger("worker").warning("difference-unusable", run=task.run_name, round=task.round)

    # ------------------------------------------------------------ train and hand in

    def _train(
        self,
        task: Task,
        ready: _Ready,
        dataset: Dataset,
        private: PrivateTask | None,
        check: Check,
        report: Report,
    ) -> None:
        with spans.span("train"):
            harvest, tally = self._trained(task, ready, dataset, private, check, report)
        feedback, leaving = ready.feedback, Leaving(self, task, check, report, private)
        with spans.span("upload"):
            changes = feedback.add(_changes(harvest, ready.bases))
            asked = task.plan.upload.resolve(ready.built.blocks)
            sent = leaving.upload(changes, feedback, asked, harvest.keep, tally.examples)
        with spans.span("submit"):
            leaving.submit(sent, {**harvest.keep, **feedback.kept()}, tally.examples)

    def _trained(
        self,
        task: Task,
        ready: _Ready,
        dataset: Dataset,
        private: PrivateTask | None,
        check: Check,
        report: Report,
    ) -> tuple[Harvest, Tally]:
        half, work = ready.half, ready.work
        ready.prepare()
        self._check_plan(task, ready)
        report.examples = dataset.examples
        # Choosing what trains may look at the data too, for which nobody counts steps.
        report.begin("training")
        if private:
            dataset = dataset.padded()
            work.choosing = private.choose
            made_up = {**work.made_up(dataset, 1), **dataset.common}
            work.placeholder = {name: tensor.to(self.device) for name, tensor in made_up.items()}
        else:
            # Not when the update leaves: a heartbeat may tell the loss of the first batches, and a failure of the
            # choice is told too.
            self.note_exact(task, dataset.examples, "training")
        batches = Batches(dataset, task.training.batch_size, self.device)
        selected = half.select(work, private.watched(batches) if private else batches)
        if private:
            private.check_choice()
        phases = half.phases(work, selected)
        self.policy.check_epochs(sum(epochs_of(phase, task.training) for phase in phases))
        least = self.policy.min_measured
        scaler = self._scaler(task)
        trainer = Trainer(half, work, task.training, self.device, check, private, report, least, scaler)
        tally = trainer.train(phases, dataset, task.seed)
        self.scalers[task.run] = scaler
        harvest = half.harvest(work, selected, tally)
        measured = {"loss": rounded(tally.loss)} if math.isfinite(tally.loss) else {}
        report.numbers = {**measured, **harvest.numbers}
        if private:
            report.numbers = {**private.disclosed(report.numbers), EPSILON: private.spent()}
        return harvest, tally

    def _scaler(self, task: Task) -> torch.amp.GradScaler:
        """Take the run's scaler, or a new one. Training that fails puts none back: its scale is good for nothing."""
        return self.scalers.pop(task.run, None) or gradient_scaler(task.training, self.device)

    # ------------------------------------------------------------ evaluate

    def _evaluate(self, task: Task, ready: _Ready, dataset: Dataset, check: Check, report: Report) -> None:
        """Measures the version as it is and, of what is held out here, this site's own model too."""
        measured = dataset.held_out if task.held_out else dataset
        if measured is None:
            raise TaskFailure("nothing-held-out", f"nothing of the data set {task.dataset!r} is held out here")
        self.policy.check_measured(measured.examples)
        if self.contributions:
            self.contributions.measure(task.dataset, self.policy)
        report.examples = measured.examples
        report.begin("evaluating", steps=steps_in(measured.examples, task.training.batch_size))

        def counted() -> None:
            report.advance()
            check()

        self.note_exact(task, measured.examples, "evaluation")
        batches = Batches(measured, task.training.batch_size, self.device)
        found = evaluate(ready.work.model, ready.work.head, batches, counted)
        if task.held_out and self._personalise(task, ready, dataset, check):
            own = evaluate(ready.work.model, ready.work.head, batches, check)
            found |= {PERSONAL + name: value for name, value in own.items()}
        report.numbers = {name: rounded(value) for name, value in found.items()}
        check()
        Leaving(self, task, check, report).figures(measured.examples)

    def _personalise(self, task: Task, ready: _Ready, dataset: Dataset, check: Check) -> bool:
        """Turns the version into this site's own model; whether there is one, by this method and so far."""
        half, work = ready.half, ready.work
        if task.privacy is None and (self.policy.require_privacy or task.dataset in self.allowances):
            # What the site keeps may have been trained before it required privacy.
            return False
        ready.prepare()
        phases = half.personal(work)
        self.policy.check_epochs(sum(epochs_of(phase, task.training) for phase in phases))
        if phases and task.privacy:
            # It would train on the examples themselves, and its figures would tell of them.
            return False
        if phases:
            self.note_exact(task, dataset.examples, "training")
            scaler = self._scaler(task)
            Trainer(half, work, task.training, self.device, check, scaler=scaler).train(phases, dataset, task.seed)
            self.scalers[task.run] = scaler
            return True
        # A vault may also hold what only steers training; and what is added to the model of a site that has never
        # trained is no model of its own.
        return bool(work.vault) and (bool(work.private) or ready.is_changed())


CLOCK_RULES = ("max_task_seconds", "max_minutes_per_day")


@contextmanager
def _settling(private: PrivateTask | None) -> Iterator[None]:
    """Within it, what a private task has reserved is taken back if it ends before anything leaves.

    That is so of ends which follow from nothing that was computed: the coordinator's doing, the line's, a person's,
    the clock's. Any other failure is told, and may depend on what came of the data: it counts as something that left.
    """
    try:
        yield
    except (Problem, Stopped, UpdateWithheld, PolicyViolation) as end:
        if private and (not isinstance(end, PolicyViolation) or end.rule in CLOCK_RULES):
            private.void()
        raise


def _check_method(task: Task) -> None:
    """Raises UnknownMethod, or TaskFailure for settings that the method does not take."""
    try:
        check_method(task.method)
    except ValidationError as refusal:
        raise TaskFailure("invalid-method", f"the settings of {task.method.name!r}: {_faults(refusal)}") from None


@contextmanager
def _failing_as(code: str) -> Iterator[None]:
    """Within it, a document that is none of what it should be is the task's failure."""
    try:
        yield
    except ValidationError as refusal:
        raise TaskFailure(code, _faults(refusal)) from None
    except (PolicyViolation, TaskFailure, BlobTooLarge):
        raise
    except ValueError as fault:
        raise TaskFailure(code, str(fault)[:300]) from None


def _faults(refusal: ValidationError) -> str:
    return "; ".join(f"{fault.pointer}: {fault.detail}" for fault in faults_of(refusal)[:8])


def _require_finite(name: str, values: Array) -> None:
    """Refuses what would make every loss NaN before it is paid for with anybody's privacy. Raises TaskFailure."""
    flat = values.reshape(-1)
    if not all(np.isfinite(flat[start : start + CHUNK]).all() for start in range(0, flat.size, CHUNK)):
        raise TaskFailure("invalid-version", f"{name} holds values that are NaN or infinite")


def _changes(harvest: Harvest, bases: Mapping[str, BlobTensor]) -> list[Change]:
    """What is sent, in the block table's order. Raises TaskFailure for what is no block, or of another shape."""
    if unknown := sorted(set(harvest.upload) - set(bases)):
        raise TaskFailure("invalid-harvest", f"the method sends what was not fetched: {unknown[:8]}")
    changes = []
    for name, base in bases.items():
        if name in harvest.upload:
            values = harvest.upload[name]
            if values.shape != base.shape:
                raise TaskFailure("invalid-harvest", f"{name} has shape {base.shape}, not {values.shape}")
            changes.append(Change(base.block, ArrayTensor(values, base.dtype), base))
    return changes


def _structure(model: torch.nn.Module) -> Structure:
    return tuple(
        (name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks))  # noqa: SLF001 (no other way)
        for name, module in model.named_modules()
    )
