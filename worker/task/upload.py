"""The third gate, egress: a result is checked, held for release if required, audited, and only then sent."""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property, partial
from io import SEEK_END, BytesIO
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO, cast

from pydantic import JsonValue

from tessera.shared.api.tasks import REPORTS, EvaluationResult, ReportResult, Submission
from tessera.shared.methods.base import LocalResult, Plan
from tessera.shared.model.blocks import Block
from tessera.shared.schema import EPSILON
from tessera.shared.secure_sums.messages import Terms
from tessera.shared.tensors.hashing import digest_at, digest_in
from tessera.shared.tensors.lazy import Array, ArrayTensor, Tensor, ZeroTensor
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.safetensors_file import TensorEntry, read_header
from tessera.shared.updates.update_file import (
    TrainedBlock,
    WrittenUpdate,
    longest_update,
    read_update,
    write_update,
)
from tessera.worker.errors import TaskFailure
from tessera.worker.governance.airlock import (
    Airlock,
    BlockOut,
    HeldTask,
    Summary,
    UpdateWithheld,
    summary_of,
    work_of,
)
from tessera.worker.governance.descriptions import in_words
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.state.checkpoints import TaskCheckpoint
from tessera.worker.state.error_feedback import Feedback
from tessera.worker.state.pieces_file import PiecesFile
from tessera.worker.task.environment import MAX_INLINE, TaskEnvironment, TaskRun
from tessera.worker.task.handover import FetchedVersion
from tessera.worker.task.secure_sums import masked
from tessera.worker.task.upload_budget import write_within
from tessera.worker.training.progress import Check, Report

if TYPE_CHECKING:
    from tessera.worker.privacy.account import PrivacyAccount


APPROVAL_SECONDS = 5.0
"""Time after which an approval is read again while an update is sent, or waits for a coordinator that is away."""


STEPS = "delta+shuffle+zstd"
"""The codec of a region's steps: float32, as they were summed."""


@dataclass(frozen=True)
class UpdateFile:
    """An update file before it leaves: at `path`, or in memory."""

    written: WrittenUpdate
    nbytes: int
    open: Callable[[], BinaryIO]
    path: Path | None = None
    envelope: str | None = None
    """Of a masked update."""

    @cached_property
    def digest(self) -> str:
        if self.written.digest:
            return self.written.digest
        with self.open() as file:
            return digest_in(file)

    @cached_property
    def entries(self) -> Mapping[str, TensorEntry]:
        """The tensors in the file, by its own header."""
        with self.open() as file:
            return read_header(file, self.nbytes).entries


@dataclass(frozen=True)
class ReadyUpdate:
    """An update that passed the gate."""

    file: UpdateFile
    digest: str
    audit_head: str | None
    """Digest of the audit entry that records it."""


@dataclass(frozen=True)
class Egress:
    """Egress of one task's result from the worker."""

    run: TaskRun
    account: PrivacyAccount | None = None
    checkpoint: TaskCheckpoint | None = None
    terms: Terms | None = None
    """The terms of the secure sum that the update goes into."""
    weights: Mapping[str, int] | None = None
    """Of a region, whose results are steps: the examples behind single blocks."""

    @contextmanager
    def checked(self, result: LocalResult, fetched: FetchedVersion) -> Iterator[UpdateFile]:
        """Yield the update, written and checked. Raises TaskFailure, PolicyViolation, OverBudget."""
        task, report = self.run.task, self.run.report
        feedback = fetched.feedback
        if self.weights is None:
            changes = feedback.add(_changes(result, fetched.bases, task.plan))
        else:
            changes = _moved(result, fetched, self.weights)
        asked = task.plan.sent(fetched.blocks)
        written = self._masked(changes, feedback) if self.terms else self._written(changes)
        with written as (update, exact):
            if not exact:
                report.metrics["codec_error"] = self._settle(update, changes, feedback)
            elif not self.terms:
                feedback.clear(changes)
            self.check_egress(update, asked, result.keep)
            self.run.check()
            # Now, as it takes time for each byte.
            _ = update.digest
            # Before a person sees it: the coordinator sees how long it waits for them.
            self.run.wait_for_quantum(self.run.check)
            yield update

    def leave(
        self,
        update: UpdateFile,
        examples: int,
        blocks: Sequence[Block],
        summary: Summary | None = None,
        *,
        keeps: bool,
    ) -> ReadyUpdate:
        """Record the update, of the model's `blocks`, as leaving. `keeps`: whether the task has tensors to keep.

        Raises PolicyViolation, LedgerError.
        """
        env = self.run.env
        if summary is None and env.audit:
            summary = self.summary(update, examples)
        if self.account:
            if self.checkpoint:
                # Another update with the same noise would reveal the sums that differ.
                self.checkpoint.remove()
            self.account.leave()
        elif not self.run.task.describes:
            self.run.journal.note_exact(examples, "training")
        if env.history:
            rho = self.terms.rho if self.terms and self.terms.noise else 0.0
            kept = self.run.task.id if keeps else ""
            env.history.add(self.run.snapshot, env.policy, update.nbytes, rho, kept)
            if self.terms and self.terms.is_exact:
                env.history.add_sum(self.terms)
        head = self._note_leaving(summary, blocks) if summary else None
        self.run.report.begin("uploading", total_bytes=update.nbytes)
        return ReadyUpdate(update, update.digest, head)

    def submit(self, ready: ReadyUpdate, keep: Mapping[str, Array], examples: int) -> None:
        """Submit the update: in the submission if it is small, behind it, or after an upload. `keep` stays staged
        beside the vault until a receipt confirms the merge. Raises Problem."""
        env, task, update, sent = self.run.env, self.run.task, ready.file, self.run.sent
        is_inline = update.nbytes <= min(task.inline_bytes, MAX_INLINE)
        follows = not is_inline and update.nbytes <= task.stream_bytes
        with update.open() as file:
            if is_inline:
                sent(update.nbytes)
            elif not follows:
                self.run.deliver(lambda: env.coordinator.put_stream(ready.digest, file, update.nbytes, sent))
            submission = Submission(
                token=task.token,
                version=task.version.digest,
                update=ready.digest,
                data=file.read() if is_inline else None,
                envelope=update.envelope,
                examples=examples,
                metrics=self.run.report.metrics,
                download_bytes=self.run.report.download_bytes,
                audit_head=ready.audit_head,
                progress=self.run.report.progress(),
            )
            staged = env.vault.stage(task.run, task.id, task.token, keep)
            # If this raises, the values stay staged: an earlier request may have been accepted and its answer lost,
            # which the refusal of a repetition does not say. The vault asks for the outcome before the next claim.
            if follows:
                about = (task.id, submission, file, update.nbytes, sent)
                view = self.run.deliver(lambda: env.coordinator.submit_file(*about))
            else:
                view = self.run.deliver(lambda: env.coordinator.submit(task.id, submission))
        if view.state == "accepted":
            staged.accept()
            self.run.journal.note("update.count", update=ready.digest)
        else:
            staged.discard()

    def submit_evaluation(self, examples: int) -> None:
        """Submit the metrics measured on `examples`."""
        env, task, metrics = self.run.env, self.run.task, self.run.report.metrics
        if env.history:
            env.history.add(self.run.snapshot, env.policy)
        self.run.wait_for_quantum(self.run.check)
        counts, by_subgroup = self.run.report.class_counts, self.run.report.subgroup_counts
        counted: dict[str, JsonValue] = {"class_counts": counts.model_dump(mode="json")} if counts else {}
        if by_subgroup:
            counted["subgroup_counts"] = {name: each.model_dump(mode="json") for name, each in by_subgroup.items()}
        if (privacy := env.privacy_of_figures(task)) is None:
            self.run.journal.note_exact(examples, "evaluation")
        head = self.run.journal.note(
            "figures.leave",
            dataset=task.dataset,
            examples=examples,
            figures=_finite(metrics),
            **counted,
            **({"epsilon": privacy.epsilon} if privacy else {}),
            ledger=self.run.journal.ledger_head(),
        )
        evaluated = EvaluationResult(
            token=task.token,
            version=task.version.digest,
            examples=examples,
            metrics=metrics,
            class_counts=counts,
            subgroup_counts=by_subgroup,
            download_bytes=self.run.report.download_bytes,
            audit_head=head,
            progress=self.run.report.progress(),
        )
        self.run.deliver(lambda: env.coordinator.submit_evaluation(task.id, evaluated))
        self.run.journal.note("figures.count")

    def submit_report(self, report: JsonValue) -> None:
        """Submit the report of a task in a run without rounds."""
        env, task = self.run.env, self.run.task
        if env.history:
            env.history.add(self.run.snapshot, env.policy)
        about = {REPORTS[task.kind]: report}
        ledger = self.run.journal.ledger_head()
        head = self.run.journal.note("figures.leave", dataset=task.dataset, **about, ledger=ledger)
        sent = {"token": task.token, **about, "audit_head": head, "progress": self.run.report.progress()}
        result = ReportResult.model_validate(sent)
        self.run.deliver(lambda: env.coordinator.submit_report(task.id, result))
        self.run.journal.note("figures.count")

    # ------------------------------------------------------------ before an update leaves

    @property
    def _summarized(self) -> bool:
        return bool(self.run.env.audit or self.run.env.airlock)

    @contextmanager
    def _written(self, changes: Sequence[TrainedBlock]) -> Iterator[tuple[UpdateFile, bool]]:
        """Yield the update, and whether it is lossless. It is in memory if it will be sent inline, or consists of the
        blocks' own bytes, which are there already."""
        task, norms, budget = self.run.task, self._summarized, self._budget()
        codec = task.codec
        if self.weights is not None and not pipeline.parse(codec).of_differences:
            # The bits of new values would round each step to the model's type.
            codec = STEPS
        exact = budget is None and pipeline.parse(codec).lossless
        inline = longest_update(change.block for change in changes) <= min(task.inline_bytes, MAX_INLINE)
        with self._file(inline=inline, raw=exact and codec == pipeline.RAW) as (path, file):
            if budget is None:
                written = write_update(file, codec, changes, self.run.training_seed, norms=norms)
            else:
                written = write_within(file, codec, changes, budget, self.run.training_seed, norms=norms)
            nbytes = file.seek(0, SEEK_END)
            if path:
                opened = cast("Callable[[], BinaryIO]", partial(path.open, "rb"))
            elif isinstance(file, BytesIO):
                opened = partial(BytesIO, file.getvalue())
            else:
                opened = cast("PiecesFile", file).opened
            yield UpdateFile(written, nbytes, opened, path), exact

    @contextmanager
    def _masked(self, changes: Sequence[TrainedBlock], feedback: Feedback) -> Iterator[tuple[UpdateFile, bool]]:
        """Yield the update under masks for a secure sum. `feedback` gets what is rounded away."""
        assert self.terms  # noqa: S101 (for the types)
        with temporary_file(self.run.env.scratch) as (path, file):
            about = (self.run, self.terms, changes, file)
            written, envelope, rests = masked(*about, norms=self._summarized)
            feedback.keep(rests)
            file.flush()
            nbytes = file.seek(0, SEEK_END)
            opened = cast("Callable[[], BinaryIO]", partial(path.open, "rb"))
            yield UpdateFile(written, nbytes, opened, path, envelope), True

    def _file(self, *, inline: bool, raw: bool) -> AbstractContextManager[tuple[Path | None, BinaryIO]]:
        if self.run.env.airlock or not (inline or raw):
            return temporary_file(self.run.env.scratch)
        return nullcontext((None, BytesIO() if inline else cast("BinaryIO", PiecesFile())))

    def _budget(self) -> int | None:
        """Return the update's size limit in bytes, by the run's budget and the site's bandwidth."""
        rate, seconds = self.run.env.resources.get("upload_bytes_per_second"), self.run.task.upload_seconds
        by_line = int(rate * seconds) if rate and seconds else None
        return min((limit for limit in (self.run.task.upload_budget, by_line) if limit is not None), default=None)

    def _settle(self, update: UpdateFile, changes: Sequence[TrainedBlock], feedback: Feedback) -> float:
        """Decode the file as the coordinator will and store the residuals. Return the codecs' relative error."""
        asked = {change.block.name: change.block for change in changes}
        bases = {change.block.name: change.base for change in changes}
        sent = read_update(update.open, update.nbytes, asked, bases)
        rounded = (change for change in changes if change.block.role != "extra")
        return feedback.settle(rounded, sent)

    def check_egress(self, update: UpdateFile, asked: Sequence[Block], keep: Collection[str]) -> None:
        """Check the file itself that is about to leave. Raises PolicyViolation."""
        self.run.env.policy.check_egress(update.entries, update.nbytes, asked, keep)

    def summary(self, update: UpdateFile, examples: int) -> Summary:
        """Return the content of an update, for people."""
        written = update.written
        return summary_of(
            self.run.journal.task,
            orchestrator=self.run.task.orchestrator,
            dataset=self.run.task.dataset,
            examples=examples,
            held_at=datetime.now(UTC),
            update=update.digest,
            nbytes=update.nbytes,
            blocks={name: BlockOut(nbytes=written.nbytes[name], norm=norm) for name, norm in written.norms.items()},
            metrics=self.run.report.metrics,
            withheld=self.run.report.withheld,
            epsilon=self.run.report.metrics.get(EPSILON),
            privacy=self.run.task.privacy,
        )

    def _note_leaving(self, summary: Summary, blocks: Sequence[Block]) -> str | None:
        """Record the update in the audit before it leaves. Return the entry's digest."""
        if self.run.env.audit is None:
            return None
        table = [*blocks, *(each.block for each in self.run.task.plan.extra)]
        withheld: dict[str, JsonValue] = {"withheld": {**summary.withheld}} if summary.withheld else {}
        return self.run.journal.note(
            "update.leave",
            dataset=summary.dataset,
            examples=summary.examples,
            update=summary.update,
            bytes=summary.nbytes,
            blocks=len(summary.blocks),
            sent=in_words([block for block in table if block.name in summary.blocks], table),
            **self.run.env.audit.named(summary.blocks),
            norm=summary.norm,
            **withheld,
            epsilon=summary.epsilon,
            figures=_finite(summary.metrics),
            ledger=self.run.journal.ledger_head(),
        )


@dataclass(frozen=True)
class HeldUpdate:
    """An update in the airlock, with the means to send it once it is released."""

    egress: Egress
    airlock: Airlock
    summary: Summary
    stored: HeldTask

    @property
    def report(self) -> Report:
        return self.egress.run.report

    @classmethod
    def of(
        cls,
        egress: Egress,
        airlock: Airlock,
        update: UpdateFile,
        keep: dict[str, Array],
        examples: int,
        blocks: tuple[Block, ...],
    ) -> HeldUpdate:
        """Move a checked update into the airlock. `keep` waits in the vault."""
        run, account = egress.run, egress.account
        summary = egress.summary(update, examples)
        stored = HeldTask(
            work=work_of(run.task),
            blocks=blocks,
            envelope=update.envelope,
            download_bytes=run.report.download_bytes,
            checkpoint=account.checkpoint if account else "",
            private=account.charges() if account else None,
        )
        run.journal.note("update.hold", id=summary.id, update=summary.update, bytes=summary.nbytes)
        run.env.vault.set_aside(run.task.run, run.task.id, keep)
        try:
            airlock.hold(cast("Path", update.path), summary, stored)
        except BaseException:
            run.env.vault.forget(run.task.run, run.task.id)
            raise
        return cls(egress, airlock, summary, stored)

    @classmethod
    def again(cls, egress: Egress, airlock: Airlock, summary: Summary, stored: HeldTask) -> HeldUpdate:
        """Hold an update under another lease of its task, also in another process. Raises PolicyViolation unless the
        site's audit records that this update was held."""
        run = egress.run
        if run.env.audit and not any(
            (entry.action, entry.task, entry.detail.get("update")) == ("update.hold", summary.task, summary.update)
            for entry in run.env.audit.read()
        ):
            airlock.remove(summary)
            raise PolicyViolation("airlock", "the site's audit does not record the update in the airlock")
        run.report.metrics, run.report.examples = dict(summary.metrics), summary.examples
        run.report.download_bytes = stored.download_bytes
        if egress.account:
            egress.account.resume_leaving()
        return cls(egress, airlock, summary, stored)

    def __post_init__(self) -> None:
        self.report.begin("held")
        self.report.held_since = self.summary.held_at.replace(microsecond=0)

    def wait(self, check: Check) -> None:
        """Wait for the release. Raises UpdateWithheld, Unapproved and the exceptions of `check`."""
        journal, about = self.egress.run.journal, {"id": self.summary.id, "update": self.summary.update}
        try:
            decision = self.airlock.wait(self.summary, check)
        except UpdateWithheld as withheld:
            journal.note("update.withhold", **about, reason=str(withheld), by=withheld.by)
            # A run that was declined gets no other task.
            self._require_approval(self.egress.run.env)
            raise
        journal.note("update.release", **about, by=decision.by)

    def send(self, env: TaskEnvironment, check: Check) -> None:
        """Send the released update under the site's present rules in `env`. Raises PolicyViolation, Unapproved,
        LedgerError, Problem and the exceptions of `check`."""
        summary, path = self.summary, self.airlock.path(self.summary)
        approved_at = time.monotonic()

        def check_approved() -> None:
            nonlocal approved_at
            check()
            if time.monotonic() > approved_at + APPROVAL_SECONDS:
                self._require_approval(env)
                approved_at = time.monotonic()

        run = replace(self.egress.run, env=env, check=check_approved)
        egress, task = replace(self.egress, run=run), run.task
        env.policy.check_task(task, env.kinds)
        if allowance := env.allowances.get(task.dataset):
            allowance.check(task, env.policy.figures_privacy)
        if egress.account:
            egress.account.limit_weekly(env.policy.max_weekly_privacy)
        self._require_approval(env)
        written = WrittenUpdate({}, {}, summary.update)
        opened = cast("Callable[[], BinaryIO]", partial(path.open, "rb"))
        update = UpdateFile(written, summary.nbytes, opened, path, self.stored.envelope)
        if digest_at(path) != summary.update:
            raise PolicyViolation("airlock", "the file changed after its release")
        if task.kind in REPORTS:
            egress.submit_report(json.loads(path.read_bytes()))
            return
        egress.check_egress(update, task.plan.sent(self.stored.blocks), ())
        keep = env.vault.read_aside(task.run, task.id)
        ready = egress.leave(update, summary.examples, self.stored.blocks, summary, keeps=bool(keep))
        if egress.account:
            # Sent again under another lease, it is not charged again.
            charges = egress.account.charges()
            self.airlock.note(summary, self.stored.model_copy(update={"private": charges}))
        egress.submit(ready, keep, summary.examples)

    def _require_approval(self, env: TaskEnvironment) -> None:
        if env.inbox:
            env.inbox.require_still(self.egress.run.snapshot)

    def remove(self) -> None:
        """Remove the update, which was sent or is no longer wanted."""
        self.airlock.remove(self.summary)
        self.egress.run.env.vault.forget(self.summary.run, self.summary.task)


def _finite(figures: Mapping[str, float]) -> dict[str, JsonValue]:
    """Return the figures that JSON can carry."""
    return {name: value for name, value in sorted(figures.items()) if math.isfinite(value)}


def _changes(result: LocalResult, bases: Mapping[str, BlobTensor], plan: Plan) -> list[TrainedBlock]:
    """Return the blocks to send, in the block table's order, and the plan's extra arrays.

    Raises TaskFailure for an unknown block or a wrong shape.
    """
    extra = (each.block for each in plan.extra)
    starts: list[tuple[Block, Tensor]] = [
        *((base.block, base) for base in bases.values()),
        *((block, ZeroTensor(block.shape, block.dtype)) for block in extra),
    ]
    if unknown := sorted(set(result.upload) - {block.name for block, _ in starts}):
        raise TaskFailure("invalid-result", f"the method sends blocks that were not fetched: {unknown[:8]}")
    changes = []
    for block, base in starts:
        if block.name in result.upload:
            values = result.upload[block.name]
            if values.shape != base.shape:
                raise TaskFailure(
                    "invalid-result", f"{block.name}: the method returned shape {values.shape}, expected {base.shape}"
                )
            changes.append(TrainedBlock(block, ArrayTensor(values, base.dtype), base))
    return changes


def _moved(result: LocalResult, fetched: FetchedVersion, weights: Mapping[str, int]) -> list[TrainedBlock]:
    """Return the blocks of a region's steps, in the block table's order, plus the residuals of earlier updates."""
    changes = []
    for name, base in fetched.bases.items():
        if name in result.upload:
            step, rest = result.upload[name].reshape(-1), fetched.feedback.rests.get(name)
            step = step if rest is None else step + rest.values
            changes.append(TrainedBlock(base.block, base, base, step, weights.get(name)))
    return changes
