"""A step of training never waits for the device: it reads nothing from it."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import count, repeat
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from tessera.shared.methods.base import MethodSpec, Participant, Phase, Plan, RunInfo, State
from tessera.shared.methods.registry import coordinator_half, methods, worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.rounds.planning import initial_state
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.block_map import block_table
from tessera.worker.model.forward import objective_of
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.attention_masks import unread_masks
from tessera.worker.training.phase_training import PhaseTraining
from tessera.worker.training.setup import LocalTraining, TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.paths import ROOT
from tests.support.tasks import CPU, PLAIN, QUICK, Subject, one_task, quick, subject_of

UNREADABLE = torch.device("meta")
"""A device whose tensors have no values: whoever wants to read one is refused."""


def padded() -> Dataset:
    """Texts, of which one has padding."""
    words = torch.randint(1, 20, (6, 8), generator=torch.Generator().manual_seed(5))
    mask = torch.ones_like(words)
    mask[0, 5:] = 0
    return Dataset({"input_ids": words, "attention_mask": mask, "labels": words % 2})


TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
TEXTS: dict[str, Subject] = {
    "llama": Subject({"model_type": "llama", "vocab_size": 20, **TOWER}, "causal-lm", padded),
    "bert": Subject({"model_type": "bert", "vocab_size": 20, **TOWER}, "text-classification", padded),
}


class Reads(TorchDispatchMode):
    """Counts the values that Python reads from tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **(kwargs or {}))


WEIGHTED: dict[str, Any] = {"class_weights": (0.5, 1.0, 2.0), "label_smoothing": 0.1}


def local_training(
    method: str, subject: Subject, training: Training, data: Dataset, kept: Mapping[str, Array]
) -> tuple[LocalTraining, list[Phase]]:
    """A site's second task of a run, on the CPU, with everything that the first task left."""
    model = subject.model()
    facts = RunInfo(block_table(model), rounds=10, training=training)
    coordinator = coordinator_half(MethodSpec(name=method), facts)
    zeros = {block.name: ArrayTensor(np.zeros(block.shape, np.float32)) for block in facts.blocks}
    memory = initial_state(coordinator, State(0, zeros)).server_state
    context = LocalTaskContext(
        model,
        subject.head,
        coordinator.plan_for(State(1, {}), Participant("a/w", 24)),
        facts.blocks,
        kept,
        {name: to_array(tensor) for name, tensor in memory.items()},
    )
    half = worker_half(quick(method), facts)
    context.restore(half.private())
    half.setup(context)
    selected = half.select(context, Batches(data, 4, CPU))
    setup = TrainingSetup(UNREADABLE, micro_batch=3)
    local = LocalTraining(half, context, training, setup, lambda: None, clock=lambda: 0.0)
    return local, list(half.phases(context, selected))


def unreadable(tensor: Tensor) -> Tensor:
    return tensor.detach().to(UNREADABLE)


def move(model: nn.Module, half: object) -> None:
    """Move a model, and what a method keeps beside it, to the device that cannot be read."""
    model.to(UNREADABLE)
    for name, value in vars(half).items():
        if name not in ("settings", "run"):
            setattr(half, name, tree_map_only(Tensor, unreadable, value))


EACH = [
    pytest.param(
        name, {}, marks=() if name in {"ditto", "fedavg", "moon", "pfeddc", "scaffold"} else pytest.mark.long
    )
    for name in sorted(methods())
]
"""Short: a private phase, no hook, a loss of its own, prompts with attention between them, a change of gradients."""


@pytest.mark.parametrize(("method", "training"), [*EACH, ("fedavg", WEIGHTED)])
def test_a_step_reads_nothing_from_the_device(method: str, training: dict[str, Any]) -> None:
    subject = subject_of(method)
    data = subject.data().rows(torch.arange(5))
    wanted = Training(batch_size=4, steps=1, max_gradient_norm=1.0, **methods()[method].training, **training)
    given = wanted.model_dump(exclude_unset=True)
    _, first = one_task(method, QUICK.get(method), subject=subject, dataset=data, **given)
    for number in count():
        local, phases = local_training(method, subject, wanted, data, first.keep)
        for phase in phases[: number + 1]:
            local.half.on_phase_start(local.context, phase)
        move(local.context.model, local.half)
        if training is WEIGHTED:
            local.context.objective = objective_of(local.training, PLAIN.document(), UNREADABLE)
        current = PhaseTraining(local, phases[number], repeat(1.0), frozenset(data.common))
        batches = [
            ({name: unreadable(tensor) for name, tensor in batch.items()}, labels)
            for batch, labels in Batches(data, 4, CPU).with_labels()
        ]
        # All steps are taken, and only the reading of their losses at the end of the epoch is refused.
        with pytest.raises(NotImplementedError, match="no data"):
            current.run(batches)
        assert local.report.step == len(batches) == 2
        if number == len(phases) - 1:
            break


def trained(training: Training, *, seconds: float = 0.0, scaler: torch.amp.GradScaler | None = None) -> int:
    """The number of values that training of PLAIN reads, on a clock that goes on by so many seconds a step."""
    model = PLAIN.model()
    facts = RunInfo(block_table(model), rounds=1, training=training)
    context = LocalTaskContext(model, PLAIN.head, Plan(), facts.blocks)
    more = {} if scaler is None else {"scaler": scaler}
    half = worker_half(MethodSpec(name="fedavg"), facts)
    clock = count(step=seconds).__next__
    trainer = Trainer(half, context, training, TrainingSetup(CPU), lambda: None, clock=clock, **more)
    with Reads() as reads:
        trainer.train([Phase(EVERYTHING)], PLAIN.data(), 0)
    return reads.count


def test_float16_reads_no_more_for_more_steps() -> None:
    # Beside the labels, which are counted once a step on the CPU, where they are.
    few, many = (
        trained(Training(batch_size=size), scaler=torch.amp.GradScaler("cpu", init_scale=1024.0))
        - PLAIN.data().examples // size
        for size in (12, 2)
    )
    assert few == many


@pytest.mark.parametrize("model_type", TEXTS)
def test_no_padding_mask_is_read_for_a_gpu(model_type: str) -> None:
    subject = TEXTS[model_type]
    model, (batch,) = subject.model().eval(), subject.data().batches(None)
    if subject.head == "text-classification":
        batch["labels"] = batch["labels"][:, 0]
    reads = {}
    for device in ("cpu", "cuda"):
        with torch.no_grad(), unread_masks(torch.device(device)), Reads() as counted:
            loss = model(**batch).loss
        reads[device] = counted.count, loss
    assert reads["cuda"][0] == 0 < reads["cpu"][0]
    assert torch.allclose(reads["cuda"][1], reads["cpu"][1])


def test_no_code_of_a_worker_synchronizes_with_the_device() -> None:
    sources = [path for side in ("worker", "shared") for path in (ROOT / side).rglob("*.py")]
    assert sources
    # A rehearsal measures the time of two steps, and trains nothing.
    assert [path.name for path in sources if "synchronize(" in path.read_text()] == ["rehearse.py"]
