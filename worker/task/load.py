"""The stage that puts a version into a model, with what the method and the site have for it at hand."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from tessera.shared.methods.base import RunFacts, WorkerHalf
from tessera.shared.methods.registry import worker_half
from tessera.shared.tensors.lazy import to_array
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import instantiate, write_block
from tessera.worker.state.blob_cache import BlobTensor
from tessera.worker.state.vault import NoReceipt
from tessera.worker.task.environment import TaskRun
from tessera.worker.task.error_feedback import Feedback, without_feedback
from tessera.worker.task.errors import TaskFailure
from tessera.worker.task.fetch import Fetched, fetch_memory, require_finite
from tessera.worker.task.model_cache import Built, structure_of
from tessera.worker.training.context import LocalWork
from tessera.worker.training.trainer import seed_everything


@dataclass(frozen=True)
class Loaded:
    """A task with its version loaded."""

    built: Built
    half: WorkerHalf[Any]
    work: LocalWork
    bases: Mapping[str, BlobTensor]
    """The version's value of each fetched block."""
    feedback: Feedback
    """What lossy codecs left out before."""

    def personalise(self) -> None:
        """Make the version this site's own: put in what it keeps, and what the method adds."""
        self.work.restore(self.half.private())
        self.half.prepare(self.work)

    def is_changed(self) -> bool:
        """Return whether a fetched block has another value than the version's."""
        return any(self.work.read(base.block).tobytes() != to_array(base).tobytes() for base in self.bases.values())


def load(run: TaskRun, fetched: Fetched) -> Loaded:
    """Return the version in a model; what the site keeps is at hand, and not yet in it.

    Raises TaskFailure, PolicyViolation, Problem, and what the method's worker half raises.
    """
    env, task = run.env, run.task
    # After the version is here, so that nobody allocates what a coordinator only claims to have.
    built = fetched.last or _built(run, fetched)
    tensors = named_tensors(built.model)
    for base in fetched.bases.values():
        run.check()
        values = to_array(base)
        require_finite(base.block.name, values)
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
    memory = fetch_memory(run, fetched.manifest)
    try:
        env.vault.settle_run(task.run, task.receipt, env.coordinator.task)
    except NoReceipt as fault:
        raise TaskFailure("no-receipt", str(fault)) from None
    vault = env.vault.load(task.run)
    feedback = Feedback.of(vault, task.plan.stage, task.round)
    head = fetched.document.head
    work = LocalWork(built.model, head, task.plan, built.blocks, without_feedback(vault), memory)
    return Loaded(built, half, work, fetched.bases, feedback)


def _built(run: TaskRun, fetched: Fetched) -> Built:
    """Build the run's model, which was checked before."""
    document, task = fetched.document, run.task
    model = instantiate(
        document.config,
        document.head,
        seed=task.seed,
        prompts=document.prompts,
        lora=document.lora,
        mapping=fetched.mapping,
    ).to(run.env.device)  # type: ignore[arg-type]
    return Built(task.run, task.model, model, fetched.blocks, structure_of(model))
