"""The way out of a site: what a task made is judged here, held if it must be, and written down before it leaves."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, BinaryIO

from pydantic import JsonValue

from tessera.shared.api.tasks import Evaluated, Submission, Task
from tessera.shared.hashing import digest_at
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Problem
from tessera.shared.schema import EPSILON
from tessera.shared.tensors.lazy import Array, squares
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.safetensors_file import read_header
from tessera.shared.updates.update_file import Change, read_update, write_update
from tessera.worker.governance.airlock import Airlock, BlockOut, Summary, UpdateWithheld, summary_of
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.state.atomic_files import temporary_file
from tessera.worker.state.audit import names_digest
from tessera.worker.task.error_feedback import Feedback
from tessera.worker.task.throttle import Throttle
from tessera.worker.task.upload_budget import write_within
from tessera.worker.training.progress import Check, Report

if TYPE_CHECKING:
    from tessera.worker.privacy.private_task import PrivateTask
    from tessera.worker.task.runner import Workbench

MOST_INLINE = 1 << 20
"""No more bytes go along with a submission, or are taken with a task: there they are held several times."""


@dataclass(frozen=True)
class Sent:
    """An update that has left, or goes along with the submission: then `data` are its bytes."""

    digest: str
    data: bytes | None = None
    audit_head: str | None = None
    """The digest of the entry of the site's audit that says so."""


@dataclass(frozen=True)
class Leaving:
    """The way out of a bench for what one task made."""

    bench: Workbench
    task: Task
    check: Check
    report: Report
    private: PrivateTask | None = None

    def upload(
        self,
        changes: Sequence[Change],
        feedback: Feedback,
        asked: Sequence[Block],
        keep: Collection[str],
        examples: int,
    ) -> Sent:
        """Writes the update of `changes`, and sends it unless it goes along with the submission.

        `asked` are the blocks that may be in it, `keep` names what may not. Raises PolicyViolation, UpdateWithheld,
        OverBudget, Problem.
        """
        bench, task = self.bench, self.task
        with temporary_file(bench.scratch) as (path, file):
            exact = self._write(file, changes)
            file.flush()
            if not exact:
                self.report.numbers["codec_error"] = self._settle(path, changes, feedback)
            nbytes = path.stat().st_size
            self._check_egress(path, asked, keep)
            self.check()
            digest = digest_at(path)
            told = None
            if bench.audit or bench.airlock:
                told = self._told(digest, path, changes, examples)
            if bench.airlock and told:
                self.report.begin("waiting")
                self._hold(bench.airlock, path, told)
            if self.private:
                self.private.leave()
            self._remember(nbytes)
            head = self._note_leaving(told) if told else None
            self.report.begin("uploading", of_bytes=nbytes)
            sent = self._counting()
            if nbytes > min(task.inline_bytes, MOST_INLINE):
                bench.coordinator.put_file(path, sent, digest)
                return Sent(digest, audit_head=head)
            data = path.read_bytes()
            sent(len(data))
            return Sent(digest, data, head)

    def submit(self, update: Sent, keep: Mapping[str, Array], examples: int) -> None:
        """Hands the update in. What the site keeps waits beside the vault until a receipt says that it was merged."""
        bench, task = self.bench, self.task
        submission = Submission(
            token=task.token,
            version=task.version.digest,
            update=update.digest,
            data=update.data,
            examples=examples,
            numbers=self.report.numbers,
            download_bytes=self.report.download_bytes,
            audit_head=update.audit_head,
        )
        staged = bench.vault.stage(task.run, task.id, task.token, keep)
        try:
            view = bench.coordinator.submit(task.id, submission)
        except Problem as problem:
            # Without an answer the file stays staged, and the vault asks later what became of the task.
            if not problem.retryable:
                staged.discard()
            raise
        if view.state == "accepted":
            staged.accept()
            bench.note("update.count", task, update=update.digest)
        else:
            staged.discard()

    def figures(self, examples: int) -> None:
        """Hands in what was measured on so many examples."""
        bench, task, numbers = self.bench, self.task, self.report.numbers
        self._remember()
        names = list[JsonValue](sorted(numbers))
        head = bench.note(
            "figures.leave", task, dataset=task.dataset, examples=examples, names=names, ledger=self._ledger_head()
        )
        evaluated = Evaluated(
            token=task.token,
            version=task.version.digest,
            examples=examples,
            numbers=numbers,
            download_bytes=self.report.download_bytes,
            audit_head=head,
        )
        bench.coordinator.submit_evaluation(task.id, evaluated)
        bench.note("figures.count", task)

    # ------------------------------------------------------------ before an update leaves

    def _write(self, file: BinaryIO, changes: Sequence[Change]) -> bool:
        """Whether the file says exactly what the changes are."""
        task, budget = self.task, self._budget()
        if budget is not None:
            write_within(file, task.codec, changes, budget, task.seed)
            return False
        lossless = pipeline.parse(task.codec).lossless
        # What is lossless may as well be sent as it is, where that takes less time.
        codec = pipeline.RAW if lossless and self.bench.coordinator.fast_line else task.codec
        write_update(file, codec, changes, task.seed)
        return lossless

    def _budget(self) -> int | None:
        """The most bytes that the update may have, by what the run says and the site's line."""
        rate, seconds = self.bench.resources.get("upload_bytes_per_second"), self.task.upload_seconds
        by_line = int(rate * seconds) if rate and seconds else None
        return min((limit for limit in (self.task.upload_budget, by_line) if limit is not None), default=None)

    def _settle(self, path: Path, changes: Sequence[Change], feedback: Feedback) -> float:
        """Reads what is about to leave as the coordinator will. What of it is missing stays here."""
        asked = {change.block.name: change.block for change in changes}
        bases = {change.block.name: change.base for change in changes}
        sent = read_update(lambda: path.open("rb"), path.stat().st_size, asked, bases)
        return feedback.settle(changes, sent, self.task.round)

    def _check_egress(self, path: Path, asked: Sequence[Block], keep: Collection[str]) -> None:
        """Reads the very file that is about to leave, whatever was meant to be in it."""
        nbytes = path.stat().st_size
        with path.open("rb") as file:
            header = read_header(file, nbytes)
        self.bench.policy.check_egress(header.entries, nbytes, asked, keep)

    def _told(self, digest: str, path: Path, changes: Sequence[Change], examples: int) -> Summary:
        """What an update that is about to leave would tell."""
        return summary_of(
            self.task,
            examples=examples,
            held_at=datetime.now(UTC),
            update=digest,
            nbytes=path.stat().st_size,
            blocks=_blocks_out(path, changes),
            numbers=self.report.numbers,
            epsilon=self.report.numbers.get(EPSILON),
        )

    def _hold(self, airlock: Airlock, path: Path, told: Summary) -> None:
        """Waits until a person has released the update. Raises UpdateWithheld."""
        bench, task = self.bench, self.task
        bench.note("update.hold", task, id=told.id, update=told.update, bytes=told.nbytes)
        try:
            decision = airlock.hold(path, told, self.check)
        except UpdateWithheld as withheld:
            bench.note("update.withhold", task, id=told.id, update=told.update, reason=str(withheld))
            raise
        bench.note("update.release", task, id=told.id, update=told.update, by=decision.by)
        if digest_at(path) != decision.update:
            raise PolicyViolation("airlock", "what would leave is not what was released")

    def _note_leaving(self, told: Summary) -> str | None:
        """Writes down what leaves, before it does. Returns the entry's digest."""
        return self.bench.note(
            "update.leave",
            self.task,
            dataset=told.dataset,
            examples=told.examples,
            update=told.update,
            bytes=told.nbytes,
            blocks=len(told.blocks),
            names=names_digest(told.blocks),
            norm=told.norm,
            epsilon=told.epsilon,
            numbers=list[JsonValue](sorted(told.numbers)),
            ledger=self._ledger_head(),
        )

    def _ledger_head(self) -> JsonValue:
        """How far the data set's ledger has come, which the audit then knows."""
        head = self.bench.ledger.leaving(self.task.dataset) if self.bench.ledger else None
        return {self.task.dataset: head.model_dump(mode="json")} if head else {}

    def _remember(self, upload_bytes: int = 0) -> None:
        """Writes down what the task shows of its run, right before its result leaves. Raises PolicyViolation."""
        if self.bench.contributions:
            self.bench.contributions.add(self.task, self.bench.policy, upload_bytes)

    def _counting(self) -> Callable[[int], None]:
        """What is told of each piece as it is sent: counts it, and keeps to the site's rate."""
        rate = self.bench.policy.max_upload_bytes_per_second
        throttle = Throttle(rate, self.check) if rate else None

        def sent(nbytes: int) -> None:
            self.report.upload_bytes += nbytes
            self.check()
            if throttle:
                throttle.sent(nbytes)

        return sent


def _blocks_out(path: Path, changes: Sequence[Change]) -> dict[str, BlockOut]:
    """What is in an update file, by block."""
    with path.open("rb") as file:
        entries = read_header(file, path.stat().st_size).entries
    return {
        change.block.name: BlockOut(nbytes=entries[change.block.name].nbytes, norm=_norm(change))
        for change in changes
    }


def _norm(change: Change) -> float:
    """The l2 norm of a block's difference from its version."""
    return math.sqrt(sum(map(squares, change.steps())))
