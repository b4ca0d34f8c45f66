"""The third gate, egress: what a task made is judged, held for release if it must be, audited, and only then sent."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import JsonValue

from tessera.shared.api.tasks import EvaluationResult, Submission
from tessera.shared.hashing import digest_at
from tessera.shared.methods.base import LocalResult
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Problem
from tessera.shared.schema import EPSILON
from tessera.shared.tensors.lazy import Array, ArrayTensor, squares
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.safetensors_file import read_header
from tessera.shared.updates.update_file import TrainedBlock, read_update, write_update
from tessera.worker.governance.airlock import Airlock, BlockOut, Summary, UpdateWithheld, summary_of
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.governance.run_history import RunSnapshot
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import names_digest
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.task.environment import MAX_INLINE, TaskRun
from tessera.worker.task.error_feedback import Feedback
from tessera.worker.task.errors import TaskFailure
from tessera.worker.task.fetch import Loaded
from tessera.worker.task.upload_budget import write_within

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import PrivateTask

PAUSE_SECONDS = 0.5


@dataclass(frozen=True)
class Sent:
    """An update that has left, or goes along with the submission: then `data` are its bytes."""

    digest: str
    data: bytes | None = None
    audit_head: str | None = None
    """The digest of the entry of the site's audit that says so."""


@dataclass(frozen=True)
class Egress:
    """The way out of a worker for what one task made."""

    run: TaskRun
    snapshot: RunSnapshot
    private: PrivateTask | None = None

    def upload(self, result: LocalResult, loaded: Loaded, examples: int) -> Sent:
        """Write the update of what was trained, and send it unless it goes along with the submission.

        Raises TaskFailure, PolicyViolation, UpdateWithheld, OverBudget, Problem.
        """
        env, task, report = self.run.env, self.run.task, self.run.report
        feedback = loaded.feedback
        changes = feedback.add(_changes(result, loaded.bases))
        asked = task.plan.upload.resolve(loaded.built.blocks)
        with temporary_file(env.scratch) as (path, file):
            exact = self._write(file, changes)
            file.flush()
            if not exact:
                report.metrics["codec_error"] = self._settle(path, changes, feedback)
            nbytes = path.stat().st_size
            self._check_egress(path, asked, result.keep)
            self.run.check()
            digest = digest_at(path)
            summary = None
            if env.audit or env.airlock:
                summary = self._summary(digest, path, changes, examples)
            if env.airlock and summary:
                report.begin("waiting")
                self._hold(env.airlock, path, summary)
            if self.private:
                self.private.leave()
            if env.history:
                env.history.add(self.snapshot, env.policy, nbytes)
            head = self._note_leaving(summary) if summary else None
            report.begin("uploading", total_bytes=nbytes)
            sent = self._counting()
            if nbytes > min(task.inline_bytes, MAX_INLINE):
                env.coordinator.put_file(path, sent, digest)
                return Sent(digest, audit_head=head)
            data = path.read_bytes()
            sent(len(data))
            return Sent(digest, data, head)

    def submit(self, update: Sent, keep: Mapping[str, Array], examples: int) -> None:
        """Submit the update. What the site keeps waits beside the vault until a receipt says that it was merged."""
        env, task = self.run.env, self.run.task
        submission = Submission(
            token=task.token,
            version=task.version.digest,
            update=update.digest,
            data=update.data,
            examples=examples,
            metrics=self.run.report.metrics,
            download_bytes=self.run.report.download_bytes,
            audit_head=update.audit_head,
        )
        staged = env.vault.stage(task.run, task.id, task.token, keep)
        try:
            view = env.coordinator.submit(task.id, submission)
        except Problem as problem:
            # Without an answer the file stays staged, and the vault asks later what became of the task.
            if not problem.retryable:
                staged.discard()
            raise
        if view.state == "accepted":
            staged.accept()
            self.run.journal.note("update.count", update=update.digest)
        else:
            staged.discard()

    def submit_evaluation(self, examples: int) -> None:
        """Submit what was measured on so many examples."""
        env, task, metrics = self.run.env, self.run.task, self.run.report.metrics
        if env.history:
            env.history.add(self.snapshot, env.policy)
        names = list[JsonValue](sorted(metrics))
        head = self.run.journal.note(
            "figures.leave",
            dataset=task.dataset,
            examples=examples,
            names=names,
            ledger=self.run.journal.ledger_head(),
        )
        evaluated = EvaluationResult(
            token=task.token,
            version=task.version.digest,
            examples=examples,
            metrics=metrics,
            download_bytes=self.run.report.download_bytes,
            audit_head=head,
        )
        env.coordinator.submit_evaluation(task.id, evaluated)
        self.run.journal.note("figures.count")

    # ------------------------------------------------------------ before an update leaves

    def _write(self, file: BinaryIO, changes: Sequence[TrainedBlock]) -> bool:
        """Write the update. Return whether it says exactly what the changes are."""
        task, budget = self.run.task, self._budget()
        if budget is not None:
            write_within(file, task.codec, changes, budget, task.seed)
            return False
        lossless = pipeline.parse(task.codec).lossless
        # What is lossless may as well be sent as it is, where that takes less time.
        codec = pipeline.RAW if lossless and self.run.env.coordinator.fast_line else task.codec
        write_update(file, codec, changes, task.seed)
        return lossless

    def _budget(self) -> int | None:
        """Return the most bytes that the update may have, by what the run says and the site's line."""
        rate, seconds = self.run.env.resources.get("upload_bytes_per_second"), self.run.task.upload_seconds
        by_line = int(rate * seconds) if rate and seconds else None
        return min((limit for limit in (self.run.task.upload_budget, by_line) if limit is not None), default=None)

    def _settle(self, path: Path, changes: Sequence[TrainedBlock], feedback: Feedback) -> float:
        """Read the file as the coordinator will, and keep what codecs left out. Return the error that they caused."""
        asked = {change.block.name: change.block for change in changes}
        bases = {change.block.name: change.base for change in changes}
        sent = read_update(lambda: path.open("rb"), path.stat().st_size, asked, bases)
        return feedback.settle(changes, sent, self.run.task.round)

    def _check_egress(self, path: Path, asked: Sequence[Block], keep: Collection[str]) -> None:
        """Judge the very file that is about to leave, whatever was meant to be in it. Raises PolicyViolation."""
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            header = read_header(file, nbytes)
        self.run.env.policy.check_egress(header.entries, nbytes, asked, keep)

    def _summary(self, digest: str, path: Path, changes: Sequence[TrainedBlock], examples: int) -> Summary:
        """Return what the update would tell."""
        return summary_of(
            self.run.journal.task,
            orchestrator=self.run.task.orchestrator,
            dataset=self.run.task.dataset,
            examples=examples,
            held_at=datetime.now(UTC),
            update=digest,
            nbytes=path.stat().st_size,
            blocks=_blocks_out(path, changes),
            metrics=self.run.report.metrics,
            epsilon=self.run.report.metrics.get(EPSILON),
        )

    def _hold(self, airlock: Airlock, path: Path, summary: Summary) -> None:
        """Wait until a person has released the update. Raises UpdateWithheld."""
        self.run.journal.note("update.hold", id=summary.id, update=summary.update, bytes=summary.nbytes)
        try:
            decision = airlock.hold(path, summary, self.run.check)
        except UpdateWithheld as withheld:
            self.run.journal.note("update.withhold", id=summary.id, update=summary.update, reason=str(withheld))
            raise
        self.run.journal.note("update.release", id=summary.id, update=summary.update, by=decision.by)
        if digest_at(path) != decision.update:
            raise PolicyViolation("airlock", "what would leave is not what was released")

    def _note_leaving(self, summary: Summary) -> str | None:
        """Add what leaves to the audit, before it does. Return the entry's digest."""
        return self.run.journal.note(
            "update.leave",
            dataset=summary.dataset,
            examples=summary.examples,
            update=summary.update,
            bytes=summary.nbytes,
            blocks=len(summary.blocks),
            names=names_digest(summary.blocks),
            norm=summary.norm,
            epsilon=summary.epsilon,
            metrics=list[JsonValue](sorted(summary.metrics)),
            ledger=self.run.journal.ledger_head(),
        )

    def _counting(self) -> Callable[[int], None]:
        """Return what counts each piece as it is sent, and keeps to the site's rate."""
        rate = self.run.env.policy.max_upload_bytes_per_second
        throttle = Throttle(rate, self.run.check) if rate else None

        def sent(nbytes: int) -> None:
            self.run.report.upload_bytes += nbytes
            self.run.check()
            if throttle:
                throttle.sent(nbytes)

        return sent


def _changes(result: LocalResult, bases: Mapping[str, BlobTensor]) -> list[TrainedBlock]:
    """Return what is sent, in the block table's order.

    Raises TaskFailure for what is no block, or of another shape.
    """
    if unknown := sorted(set(result.upload) - set(bases)):
        raise TaskFailure("invalid-result", f"the method sends what was not fetched: {unknown[:8]}")
    changes = []
    for name, base in bases.items():
        if name in result.upload:
            values = result.upload[name]
            if values.shape != base.shape:
                raise TaskFailure("invalid-result", f"{name} has shape {base.shape}, not {values.shape}")
            changes.append(TrainedBlock(base.block, ArrayTensor(values, base.dtype), base))
    return changes


def _blocks_out(path: Path, changes: Sequence[TrainedBlock]) -> dict[str, BlockOut]:
    """Return what is in an update file, by block."""
    with path.open("rb") as file:
        entries = read_header(file, path.stat().st_size).entries
    return {
        change.block.name: BlockOut(nbytes=entries[change.block.name].nbytes, norm=_norm(change))
        for change in changes
    }


def _norm(change: TrainedBlock) -> float:
    """Return the l2 norm of a block's difference from its version."""
    return math.sqrt(sum(map(squares, change.steps())))


class Throttle:
    """A limit of `bytes_per_second` on average: after each piece it waits for as long as that should have taken.

    `check` is called while it waits, and may raise.
    """

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
        while (left := due_at - self._clock()) > 0:
            self._sleep(min(left, PAUSE_SECONDS))
            self._check()
