"""Training that resumes from a checkpoint ends with the same bits as training that was never interrupted."""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor
from transformers import PreTrainedModel

from tessera.shared.methods.base import (
    LocalResult,
    MethodSpec,
    Phase,
    Plan,
    RunInfo,
    TaskContext,
    TrainingStats,
    WorkerHalf,
)
from tessera.shared.methods.registry import methods, worker_half
from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.run_settings import Training
from tessera.shared.tensors.lazy import Array
from tessera.worker.model.block_map import block_table
from tessera.worker.state.checkpoints import CheckpointKey, Checkpoints
from tessera.worker.training.checkpoints import CheckpointFile, TrainingCheckpoints
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.optimization.moments import Moments
from tessera.worker.training.progress import Report
from tessera.worker.training.randomness import generator_states, set_generator_states
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tables import on_disk
from tests.support.tasks import PLAIN, QUICK, Subject, images, one_task, subject_of

KEY = CheckpointKey(
    run="run-1", round=1, task="task-1", model="m", base="b", plan="p", settings="s", data="d", libraries="l",
    device="cpu",
)  # fmt: skip


class Killed(BaseException):
    """Stands for the end of the process."""


class Process:
    """A process that trains with a checkpoint every few steps, and is killed before a step of its own."""

    def __init__(self, folder: Path, every: float, kill: int | None = None) -> None:
        self.steps = 0
        self._kill = kill
        # A new process has other random numbers.
        random.seed()
        torch.manual_seed(random.getrandbits(32))
        np.random.seed(None)  # noqa: NPY002
        stored = CheckpointFile.of(Checkpoints(folder).of_task(KEY))
        self.checkpoints = TrainingCheckpoints(stored, every, clock=lambda: float(self.steps))

    def check(self) -> None:
        if self.steps == self._kill:
            raise Killed
        self.steps += 1


def resumed(
    folder: Path, kills: Sequence[int], every: int, train: Callable[..., tuple[Any, LocalResult]]
) -> tuple[LocalResult, int]:
    """The result of a task that is killed before these steps of each process, and the steps of its last process."""
    for kill in kills:
        killed = Process(folder, every, kill)
        with pytest.raises(Killed):
            train(check=killed.check, checkpoints=killed.checkpoints)
    last = Process(folder, every)
    _, result = train(check=last.check, checkpoints=last.checkpoints)
    return result, last.steps


def flat(result: LocalResult) -> dict[str, object]:
    arrays = {**{f"up/{name}": v for name, v in result.upload.items()}, **result.keep}
    return {**{name: values.tobytes() for name, values in arrays.items()}, **result.metrics}


def kept_before(method: str, subject: Subject, settings: Mapping[str, Any], **training: Any) -> dict[str, Array]:
    """A site's kept tensors of an earlier round."""
    _, result = one_task(method, settings, subject=subject, **training)
    return dict(result.keep)


CASES: dict[str, tuple[str, Mapping[str, Any], dict[str, Any]]] = {
    "adamw, three epochs": ("fedavg", {}, {"epochs": 3, "optimizer": "adamw"}),
    "steps that end within an epoch": ("fedavg", {}, {"epochs": None, "steps": 7, "optimizer": "adamw"}),
    "a schedule and momentum": ("fedavg", {}, {"epochs": 2, "momentum": 0.9, "schedule": "cosine"}),
    "changed images": ("fedavg", {}, {"epochs": 2, "augmentation": {"horizontal_flip": 0.5, "crop": [0.3, 1.0]}}),
    "two phases": ("fedrep", {"head_epochs": 2}, {"optimizer": "adamw"}),
    "a model of its own": ("ditto", {}, {"epochs": 2, "momentum": 0.9}),
    "moments of two phases": ("ditto", {}, {"optimizer": "adamw", "keep_moments": True}),
    "an anchor and a past model": ("moon", {}, {"epochs": 2}),
    "corrections from the vault": ("scaffold", {}, {"epochs": 2}),
    "private modules": ("pfeddc", {}, {"epochs": 2, "optimizer": "adamw"}),
    "logits that a hook replaces": ("fedotp", QUICK["fedotp"], {"epochs": 2, "optimizer": "adamw"}),
    "chosen layers": ("safl", {"layers": 1}, {"epochs": 2}),
}
ALIKE = {"adamw, three epochs", "a model of its own", "an anchor and a past model", "logits that a hook replaces"}
"""Cases that others cover too: steps within an epoch, moments of two phases, the vault, private modules."""
LONG = [
    pytest.param(method, {}, {"epochs": 3, "optimizer": "sgd"}, id=method, marks=pytest.mark.long)
    for method in sorted(methods())
]
SHORT = [
    pytest.param(*case, id=name, marks=pytest.mark.long if name in ALIKE else ()) for name, case in CASES.items()
]


@pytest.mark.parametrize(("method", "settings", "training"), [*SHORT, *LONG])
def test_a_task_that_is_killed_ends_with_the_same_bits(
    tmp_path: Path, method: str, settings: Mapping[str, Any], training: dict[str, Any]
) -> None:
    subject = subject_of(method)
    if subject is PLAIN:
        subject = replace(subject, config={**subject.config, "hidden_dropout_prob": 0.1})
    training = {"optimizer": "sgd", **training}
    vault = kept_before(method, subject, settings, **{**training, "epochs": 1, "steps": None})
    whole_steps = 0

    def train(**more: Any) -> tuple[Any, LocalResult]:
        return one_task(method, settings, subject=subject, vault=vault, **training, **more)

    def count() -> None:
        nonlocal whole_steps
        whole_steps += 1

    _, undisturbed = train(check=count)
    # With a checkpoint every second step, some kills lose a step. The first kill is in the last phase.
    for number, kills in enumerate([(whole_steps - 1,), (3, whole_steps // 2)]):
        result, steps = resumed(tmp_path / str(number), kills, 2, train)
        assert flat(result) == flat(undisturbed)
        assert steps < whole_steps  # the last process did not begin anew


def trained(
    process: Process,
    *phases: Phase,
    moments: Moments | None = None,
    size: PieceSize | None = None,
    model: PreTrainedModel | None = None,
    scaler: torch.amp.GradScaler | None = None,
    **more: Any,
) -> TrainingStats:
    """The figures of FedAvg on three batches."""
    training = Training.model_validate({"batch_size": 8, "learning_rate": 0.05, **more})
    model = model or PLAIN.model()
    facts = RunInfo(block_table(model), rounds=1, training=training)
    context = LocalTaskContext(model, PLAIN.head, Plan(), facts.blocks)
    half, setup = worker_half(MethodSpec(name="fedavg"), facts), TrainingSetup(torch.device("cpu"))
    trainer = Trainer(
        half,
        context,
        training,
        setup,
        process.check,
        scaler=scaler or torch.amp.GradScaler("cpu", enabled=False),
        moments=moments,
        checkpoints=process.checkpoints,
        piece_size=size,
    )
    return trainer.train(phases, images(), 0)


@pytest.mark.parametrize("kill", [2, 4, 5])
def test_the_figures_of_a_resumed_task_are_those_of_the_whole(tmp_path: Path, kill: int) -> None:
    # Two passes of three steps: the loss is that of the second, in part from before the kill.
    def stats(process: Process) -> TrainingStats:
        return trained(process, Phase(EVERYTHING), epochs=2, schedule="linear")

    undisturbed = stats(Process(tmp_path / "one", math.inf))
    with pytest.raises(Killed):
        stats(Process(tmp_path / "two", 1, kill))
    assert stats(Process(tmp_path / "two", 1)) == undisturbed


def test_the_moments_that_a_phase_kept_before_the_kill_are_kept_for_the_next_round(tmp_path: Path) -> None:
    def moments(process: Process) -> dict[str, bytes]:
        kept = Moments({})
        trained(process, Phase(EVERYTHING), Phase(EVERYTHING, name="own"), moments=kept, optimizer="adamw")
        return {name: values.tobytes() for name, values in kept.values.items()}

    undisturbed = moments(Process(tmp_path / "one", math.inf))
    with pytest.raises(Killed):
        moments(Process(tmp_path / "two", 1, 5))  # in the second phase
    assert moments(Process(tmp_path / "two", 1)) == undisturbed
    assert {name.split("/")[1] for name in undisturbed} == {"train", "own"}


def test_a_size_of_pieces_that_was_found_by_trial_is_that_of_the_resumed_task(tmp_path: Path) -> None:
    def stats(process: Process, size: PieceSize) -> TrainingStats:
        return trained(process, Phase(EVERYTHING), size=size)

    undisturbed = stats(Process(tmp_path / "one", math.inf), PieceSize(3))
    with pytest.raises(Killed):
        stats(Process(tmp_path / "two", 1, 2), PieceSize(3, automatic=True))
    fresh = PieceSize(None, automatic=True)
    assert stats(Process(tmp_path / "two", 1), fresh) == undisturbed
    assert fresh.examples == 3


def test_a_step_that_was_made_up_for_does_not_change_the_order_of_the_next_phase(tmp_path: Path) -> None:
    def weights(process: Process, overflows: int | None = None) -> list[bytes]:
        """The weights after two phases of three steps. A step that overflows is made up for at its phase's end."""
        model, steps = PLAIN.model(), count()
        head = model.get_parameter("classifier.bias")
        head.register_hook(lambda each: each * torch.inf if next(steps) == overflows else each)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        trained(process, Phase(EVERYTHING), Phase(EVERYTHING), model=model, scaler=scaler)
        return [each.detach().numpy().tobytes() for each in model.parameters()]

    undisturbed = weights(Process(tmp_path / "one", math.inf), 1)
    with pytest.raises(Killed):
        weights(Process(tmp_path / "two", 1, 5), 1)  # after the first step of the second phase
    assert weights(Process(tmp_path / "two", 1)) == undisturbed


# ---------------------------------------------------------------- what is not resumed


def test_rows_on_disk_that_trained_before_are_not_read_again(tmp_path: Path) -> None:
    data, read = images(), list[int]()

    def rows(places: Sequence[int]) -> Tensor:
        read.extend(places)
        return data.tensors["pixel_values"][list(places)]

    stored = on_disk({"labels": data.tensors["labels"]}, rows, (1, 8, 8))

    def train(**more: Any) -> tuple[Any, LocalResult]:
        return one_task("fedavg", dataset=stored, epochs=2, **more)

    _, undisturbed = train()
    read.clear()
    # Six steps of 8 rows; five are made, the last of them after the checkpoint.
    killed = Process(tmp_path, 2, 5)
    with pytest.raises(Killed):
        train(check=killed.check, checkpoints=killed.checkpoints)
    read.clear()
    last = Process(tmp_path, 2)
    _, result = train(check=last.check, checkpoints=last.checkpoints)
    assert flat(result) == flat(undisturbed)
    assert (last.steps, len(read)) == (2, 2 * 8)


class Anchored(WorkerHalf[Any]):
    """A half that takes something at the start of a phase, and does not say how it is restored."""

    def on_phase_start(self, context: TaskContext, phase: Phase) -> None:
        self.anchor = context.read(context.blocks[0])


def test_a_half_that_cannot_say_what_it_took_has_no_checkpoints() -> None:
    facts = RunInfo(block_table(PLAIN.model()), rounds=1)
    assert not Anchored(None, facts).resumable
    assert all(worker_half(MethodSpec(name=name), facts).resumable for name in methods())


def test_progress_continues_from_the_checkpoint() -> None:
    report = Report()
    report.begin("training", steps=10)
    report.resume(4, 7200.0)
    report.advance()
    progress = report.progress()
    assert (progress.step, progress.steps) == (5, 10)
    # Five steps took two hours and the moment that this test takes, so the other five take as long.
    assert progress.seconds_left == pytest.approx(7200, rel=0.05)


def test_training_that_the_same_process_resumes_counts_its_time_once() -> None:
    # Ranks that ended after 90 seconds go on from a checkpoint after 100 seconds.
    report = Report(began=[(time.time() - 90, "training")])
    report.begin("training")
    report.resume(4, 100.0)
    assert report.phase_seconds()["training"] == pytest.approx(100, rel=0.05)


def test_states_of_gpus_that_are_no_longer_visible_are_left_out() -> None:
    document, tensors = generator_states()
    first, queued = torch.rand(1), len(torch.cuda._queued_calls)
    # Where there is no GPU, torch would keep the state until there is one.
    set_generator_states(document, {**tensors, f"cuda:{torch.cuda.device_count()}": tensors["cpu"]})
    assert torch.equal(torch.rand(1), first)
    assert len(torch.cuda._queued_calls) == queued


def test_a_full_disk_does_not_end_training(tmp_path: Path) -> None:
    _, undisturbed = one_task("fedavg", epochs=2)
    process = Process(tmp_path, 1)
    full = tmp_path / "run-1"
    full.write_bytes(b"")  # no folder can be made there
    with capture_logs() as logs:
        _, result = one_task("fedavg", epochs=2, check=process.check, checkpoints=process.checkpoints)
    assert flat(result) == flat(undisturbed)
    assert {line["event"] for line in logs} == {"checkpoint-not-written"}
