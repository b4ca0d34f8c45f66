"""Differentially private training: what one example can change, how much noise there is, and what it costs."""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch import Tensor, nn
from torch.optim.optimizer import register_optimizer_step_pre_hook

from tessera.shared.api.runs import Training
from tessera.shared.api.tasks import Task
from tessera.shared.methods.base import MethodSpec, Participant, Phase, Plan, RunInfo, State, TrainingStats
from tessera.shared.methods.registry import coordinator_half, methods, worker_half
from tessera.shared.model.selectors import EVERYTHING, Selector, named, roles
from tessera.shared.model.spec import Head
from tessera.shared.privacy.noise import NoiseSource, secret_key
from tessera.shared.run_settings import Privacy
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import DataError
from tessera.worker.governance.policy import Allowance, PolicyViolation
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.accountant import epsilon
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients, box_muller, scaled_sum, scales
from tessera.worker.privacy.per_example_grads import norms
from tessera.worker.privacy.private_task import PrivateTask, bounded_sums, epsilon_per_pick, private_top_k
from tessera.worker.privacy.sampling import sampling
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Event, ExactUse, Ledger, NoisyChoice, NoisySteps
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.progress import Report
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.chain_rows import ChainRows
from tests.support.tables import on_disk
from tests.support.task_document import task_of
from tests.support.tasks import (
    ADAPTED,
    DEEP,
    NORMALISED,
    PLAIN,
    PROMPTED,
    VIT,
    Subject,
    quick,
    subject_of,
)
from tests.support.variants import variants

GPT2 = {
    "model_type": "gpt2", "vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0, "attn_pdrop": 0.0, "embd_pdrop": 0.0, "resid_pdrop": 0.0,
}  # fmt: skip
CPU = torch.device("cpu")
PRIVACY = Privacy(epsilon=3.0, delta=1e-5, clip_norm=0.5)
KEY = b"not secret, but always the same."


def images(count: int = 40) -> Dataset:
    generator = torch.Generator().manual_seed(5)
    pixels = torch.randn(count, 1, 8, 8, generator=generator)
    return Dataset({"pixel_values": pixels, "labels": torch.randint(0, 3, (count,), generator=generator)})


def sentences() -> Dataset:
    words = torch.randint(0, 20, (12, 8), generator=torch.Generator().manual_seed(5))
    return Dataset({"input_ids": words, "labels": words})


def work_on(config: dict[str, Any] = VIT, head: Head = "image-classification") -> LocalTaskContext:
    model = instantiate(config, head, seed=1)
    return LocalTaskContext(model, head, Plan(), block_table(model))


def trainer_of(
    context: LocalTaskContext, method: str = "fedavg", settings: dict[str, Any] | None = None, **more: Any
) -> Trainer:
    training = Training.model_validate({"batch_size": 8, "learning_rate": 0.05, **more})
    half = worker_half(
        MethodSpec(name=method, settings=settings or {}), RunInfo(tuple(context.blocks), 1, training=training)
    )
    half.setup(context)
    context.model.train()
    return Trainer(half, context, training, TrainingSetup(CPU), lambda: None)


def gradients_of(
    trainer: Trainer, train: Selector, data: Dataset, *, noise: float = 1.0, clip: float = 0.5
) -> tuple[NoisyGradients, Freeze]:
    freeze = Freeze(trainer.context.model, [*train.resolve(trainer.context.blocks), *trainer.context.private])
    how = Mechanism(sampling(data.examples, trainer.training.batch_size), clip, noise)
    return NoisyGradients(trainer, freeze, data, how, NoiseSource(KEY)), freeze


def length(tensors: Iterable[Tensor]) -> float:
    return math.sqrt(sum(float(tensor.double().square().sum()) for tensor in tensors))


def difference(some: Sequence[Tensor], others: Sequence[Tensor]) -> float:
    return length(a - b for a, b in zip(some, others, strict=True))


# ---------------------------------------------------------------- sensitivity


CASES = [
    pytest.param("fedavg", {}, VIT, EVERYTHING, id="all"),
    pytest.param("fedavg", {}, VIT, roles("value", "head"), id="some blocks"),
    pytest.param("fedavg", {}, GPT2, roles("value"), id="slices"),
    pytest.param("fedavg", {}, GPT2, EVERYTHING, id="tables"),
    pytest.param("fedprox", {"mu": 100.0}, VIT, EVERYTHING, id="a term added to the loss"),
]


@pytest.mark.parametrize(("method", "settings", "config", "train"), CASES)
def test_one_example_less_moves_the_sum_by_no_more_than_the_clip_norm(
    method: str, settings: dict[str, Any], config: dict[str, Any], train: Selector
) -> None:
    text = config is GPT2
    trainer = trainer_of(work_on(config, "causal-lm" if text else "image-classification"), method, settings)
    data = sentences() if text else images()
    # Gradients differ in length by design: at this norm some are clipped and others are not.
    noisy, freeze = gradients_of(trainer, train, data, clip=1.0)
    with torch.no_grad():
        for parameter in freeze.parameters:
            parameter.add_(0.1)  # away from the start, where a proximal term is zero
    rows = torch.arange(8)
    whole = noisy.sums(rows)
    moved = [difference(whole, noisy.sums(rows[rows != row])) for row in range(8)]
    noisy.close()
    assert max(moved) <= 1.0 + 1e-4


def plan_of(method: str, facts: RunInfo) -> Plan:
    return coordinator_half(MethodSpec(name=method), facts).plan_for(State(0, {}), Participant("a/w", 24))


UNLIKE = {"ditto", "fedavg", "fedfrozen", "fedotp", "lora", "moon", "pfeddc", "safl", "scaffold"}
"""FedAvg, those that train parts of another model as it does, and those that train in a way of their own."""
EACH_UNLIKE = pytest.mark.parametrize("method", variants(sorted(methods()), UNLIKE))


@EACH_UNLIKE
def test_so_it_is_with_every_method_in_every_phase(method: str) -> None:
    subject = subject_of(method)
    data = subject.data()
    facts = subject.facts(batch_size=8, optimizer="sgd", learning_rate=0.05)
    context = LocalTaskContext(subject.model(), subject.head, plan_of(method, facts), facts.blocks)
    half = worker_half(quick(method), facts)
    seed_everything(0)
    half.setup(context)
    phases = half.phases(context, half.select(context, Batches(data, 8, CPU)))
    assert phases
    context.model.train()
    trainer = Trainer(half, context, facts.training, TrainingSetup(CPU), lambda: None)
    for phase in phases:
        half.on_phase_start(context, phase)
        freeze = Freeze(
            context.model, [*phase.train.resolve(context.blocks), *(context.private if phase.private else ())]
        )
        mechanism = Mechanism(sampling(data.examples, 8), clip_norm=0.3, noise_multiplier=1.0)
        noisy = NoisyGradients(trainer, freeze, data, mechanism, NoiseSource(KEY))
        rows = torch.arange(4)
        whole = noisy.sums(rows)
        moved = [difference(whole, noisy.sums(rows[rows != row])) for row in range(4)]
        noisy.close()
        assert max(moved) <= 0.3 + 1e-4
        assert max(moved) > 0
    context.close()


@EACH_UNLIKE
def test_every_method_gives_a_loss_for_an_example_that_is_made_up(method: str) -> None:
    subject = subject_of(method)
    facts = subject.facts(batch_size=8, optimizer="sgd", learning_rate=0.05)
    context = LocalTaskContext(subject.model(), subject.head, plan_of(method, facts), facts.blocks)
    half = worker_half(quick(method), facts)
    half.setup(context)
    Trainer(half, context, facts.training, TrainingSetup(CPU), lambda: None)._rehearse(subject.data())
    context.close()


WAYS = [
    ("promptfl", {}, PROMPTED, "vmap"),  # text prompts: the first axis of what they meet counts classes
    ("pfeddc", {}, PROMPTED, "vmap"),  # prompts of both towers, attention between prompts
    ("fedpgp", {"rank": 1}, PROMPTED, "vmap"),  # a loss with text features of three kinds of prompts
    ("fedvpt", {"modalities": ["vision", "text"]}, DEEP, "vmap"),
    ("fedotp", {"transport": {"iterations": 5}}, PROMPTED, "vmap"),  # logits that a hook replaces
    ("lora", {}, ADAPTED, "opacus"),  # one half of each adapter has no gradient at the start
    ("fedprox", {"mu": 1.0}, PLAIN, "vmap"),  # a loss of its own
    ("fedavg", {}, PLAIN, "opacus"),
]


@pytest.mark.parametrize(("method", "settings", "subject", "way"), WAYS, ids=[case[0] for case in WAYS])
def test_what_is_clipped_are_the_gradients_of_single_examples(
    method: str, settings: dict[str, Any], subject: Subject, way: str
) -> None:
    data, facts = subject.data(), subject.facts(batch_size=8)
    data.tensors["pixel_values"] = data.tensors["pixel_values"].double()
    context = LocalTaskContext(subject.model(), subject.head, plan_of(method, facts), facts.blocks)
    half = worker_half(MethodSpec(name=method, settings=settings), facts)
    seed_everything(0)
    half.setup(context)
    context.model.train()
    (phase,) = half.phases(context, half.select(context, Batches(data, 8, CPU)))
    trainer = Trainer(half, context, facts.training, TrainingSetup(CPU), lambda: None)
    freeze = Freeze(context.model, [*phase.train.resolve(context.blocks), *context.private])
    # In float64, so that rounding is no part of what is compared.
    context.model.double()
    expected = []
    for row in range(4):
        context.model.zero_grad()
        half.loss(context, {**{n: t[row : row + 1] for n, t in data.tensors.items()}, **data.common}).backward()
        expected.append([torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in freeze.parameters])
    context.model.zero_grad()
    mechanism = Mechanism(sampling(data.examples, 8), clip_norm=1e9, noise_multiplier=1.0)
    noisy = NoisyGradients(trainer, freeze, data, mechanism, NoiseSource(KEY))
    assert noisy.method == way
    for row in range(4):
        found = noisy.sums(torch.tensor([row]))
        largest = max(float(each.abs().max()) for each in expected[row])
        assert all(
            torch.allclose(a.double(), b, rtol=0, atol=1e-6 * largest)
            for a, b in zip(found, expected[row], strict=True)
        )
    noisy.close()
    context.close()


def test_an_example_with_a_large_gradient_moves_the_sum_by_exactly_the_clip_norm() -> None:
    data = images()
    data.tensors["pixel_values"][0] *= 50
    noisy, _ = gradients_of(trainer_of(work_on()), EVERYTHING, data, clip=1e-3)
    assert difference(noisy.sums(torch.arange(10)), noisy.sums(torch.arange(1, 10))) == pytest.approx(1e-3, rel=1e-4)
    noisy.close()


def test_one_example_moves_each_layer_by_the_clip_norm_and_noise_follows_the_root_of_their_number() -> None:
    data, clip = images(), 1e-3
    data.tensors["pixel_values"][0] *= 50
    trainer = trainer_of(work_on())
    freeze = Freeze(trainer.context.model, trainer.context.blocks)
    # The layers, and what is outside of them.
    assert {name.split(".")[2] if ".layers." in name else "" for name in freeze.tensors} == {"", "0", "1"}
    how = replace(Mechanism(sampling(data.examples, 8), clip, noise_multiplier=2.0), parts=freeze.parts)
    assert how.deviation == pytest.approx(2.0 * clip * math.sqrt(3))
    noisy, rows = NoisyGradients(trainer, freeze, data, how, NoiseSource(KEY)), torch.arange(10)
    whole = noisy.sums(rows)
    for row in (0, 1, 2):
        moved: dict[str, list[Tensor]] = {}
        for name, some, other in zip(freeze.tensors, whole, noisy.sums(rows[rows != row]), strict=True):
            moved.setdefault(name.split(".")[2] if ".layers." in name else "", []).append(some - other)
        lengths = [length(each) for each in moved.values()]
        assert max(lengths) <= clip * (1 + 1e-4)
        # The large gradient moves each part by the norm, and their sum by the root of their number.
        assert row or lengths == pytest.approx([clip] * 3, rel=1e-3)
    noisy.close()


def test_an_example_that_cannot_be_read_any_more_adds_nothing() -> None:
    data = images()
    pixels = data.tensors["pixel_values"]

    def read(places: Sequence[int]) -> Tensor:
        if 3 in places:
            raise DataError("gone")
        return pixels[list(places)]

    stored = on_disk({"labels": data.tensors["labels"]}, read, pixels.shape[1:])
    noisy, _ = gradients_of(trainer_of(work_on()), EVERYTHING, stored)
    others = torch.tensor([row for row in range(10) if row != 3])
    assert difference(noisy.sums(torch.arange(10)), noisy.sums(others)) == pytest.approx(0, abs=1e-6)
    assert length(noisy.sums(others)) > 0.1
    noisy.close()


def clipped_sum(gradients: list[torch.Tensor], clip_norm: float) -> list[torch.Tensor]:
    return scaled_sum(gradients, scales(gradients, clip_norm))


def test_one_norm_is_taken_over_all_tensors_together_and_short_gradients_stay_as_they_are() -> None:
    # Two tensors of lengths 3 and 4 are one gradient of length 5; clipped to 1 they become 0.6 and 0.8.
    first, second = torch.tensor([[3.0, 0.0], [0.3, 0.0]]), torch.tensor([[0.0, 4.0], [0.0, 0.4]])
    a, b = clipped_sum([first, second], 1.0)
    assert a.tolist() == pytest.approx([0.6 + 0.3, 0.0])
    assert b.tolist() == pytest.approx([0.0, 0.8 + 0.4])


def test_a_gradient_that_is_no_number_counts_as_none() -> None:
    (total,) = clipped_sum([torch.tensor([[1.0], [math.nan], [math.inf]])], 2.0)
    assert total.tolist() == [1.0]


@pytest.mark.parametrize(("size", "clip"), [(1e30, 2.0), (1e-25, 1e-30)])
def test_gradients_whose_squares_float32_cannot_hold_are_clipped_too(size: float, clip: float) -> None:
    (total,) = clipped_sum([torch.tensor([[size, 0.0], [0.0, size]])], clip)
    assert total.tolist() == pytest.approx([clip, clip])


def test_frozen_rows_count_neither_towards_the_norm_nor_in_the_sum() -> None:
    noisy, freeze = gradients_of(
        trainer_of(work_on(GPT2, "causal-lm")), named(["*c_attn.weight#value"]), sentences(), clip=1e-6
    )
    sums = noisy.sums(torch.tensor([3]))
    noisy.close()
    # All of the one clipped gradient is in the value's columns, the last third.
    assert length(total[:, 16:] for total in sums) == pytest.approx(1e-6, rel=1e-4)
    assert length(total[:, :16] for total in sums) == 0.0
    assert [tuple(parameter.shape) for parameter in freeze.parameters] == [(8, 24), (8, 24)]


def test_what_stays_at_the_site_is_clipped_together_with_what_is_sent() -> None:
    context = work_on()
    torch.manual_seed(0)
    context.add_private("extra", nn.Linear(3, 3))
    trainer = trainer_of(context)
    plain = context.forward
    context.forward = lambda batch, values=None: _through(context.model.extra, plain(batch, values))  # type: ignore[method-assign]
    noisy, freeze = gradients_of(trainer, roles("head"), images(), clip=1e-4)
    sums = noisy.sums(torch.tensor([0]))
    noisy.close()
    assert [parameter.numel() for parameter in freeze.parameters] == [3 * 16, 3, 3 * 3, 3]
    assert length(sums) == pytest.approx(1e-4, rel=1e-4)
    assert length(sums[2:]) > 0


def _through(layer: nn.Module, output: Any) -> Any:
    logits = layer(output.logits)
    return type(output)(output.loss + logits.square().sum(), logits)


@pytest.mark.parametrize("config", [VIT, GPT2], ids=["images", "texts"])
def test_without_noise_or_clipping_the_gradient_is_the_mean_over_examples(config: dict[str, Any]) -> None:
    text = config is GPT2
    context, data = (
        work_on(config, "causal-lm" if text else "image-classification"),
        sentences() if text else images(),
    )
    trainer = trainer_of(context, batch_size=None)
    noisy, freeze = gradients_of(trainer, EVERYTHING, data, noise=1e-20, clip=1e9)
    noisy.fill()
    noisy.close()
    found = [parameter.grad.clone() for parameter in freeze.parameters if parameter.grad is not None]
    context.model.zero_grad()
    # All texts are of the same length here, so that the model's own loss is the mean over examples.
    trainer.half.loss(context, next(data.batches(None))).backward()
    expected = [torch.zeros_like(p) if p.grad is None else p.grad for p in freeze.parameters]
    assert difference(found, expected) <= 1e-5 * length(expected)


def test_gradients_are_held_a_few_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    sums = []
    for held in (1 << 30, 1):
        monkeypatch.setattr("tessera.worker.privacy.per_example_grads.CHUNK_BYTES", held)
        noisy, _ = gradients_of(trainer_of(work_on()), EVERYTHING, images())
        sums.append(noisy.sums(torch.arange(10)))
        noisy.close()
    assert difference(*sums) <= 1e-5 * length(sums[0])


def test_examples_are_clipped_in_sixteen_bits_too() -> None:
    trainer = trainer_of(work_on(), precision="bfloat16")
    noisy, freeze = gradients_of(trainer, EVERYTHING, images(), clip=1e-3)
    assert noisy.method == "opacus"
    sums = noisy.sums(torch.tensor([0]))
    noisy.close()
    # A sixty-fourth less, for what others in the batch change of its gradient by rounding.
    assert length(sums) == pytest.approx(1e-3 * (1 - 2**-6), rel=1e-4)
    assert {parameter.dtype for parameter in freeze.parameters} == {torch.float32}


def test_statistics_of_a_normalisation_are_data_and_stay_as_they_are() -> None:
    moved = []
    for keep_buffers in (False, True):
        model = NORMALISED.model().train()
        freeze = Freeze(model, NORMALISED.blocks, keep_buffers=keep_buffers)
        mean = model.get_buffer("mobilevit.conv_stem.normalization.running_mean")
        before = mean.clone()
        model(NORMALISED.data().inputs["pixel_values"])
        freeze.restore()
        moved.append(not torch.equal(mean, before))
    assert moved == [True, False]


# ---------------------------------------------------------------- noise


@pytest.mark.parametrize("layers", [1, 2])
def test_without_gradients_weights_move_as_far_as_the_noise_in_the_trained_blocks_takes_them(layers: int) -> None:
    # |w_T - w_0|^2 = steps * d_K * (rate * z * C / B)^2: it grows with the coordinates that train, epsilon does not.
    steps, rate, z, clip, batch = 5, 0.05, 2.0, 0.5, 8
    context = work_on()
    trainer = trainer_of(context, optimizer="sgd", learning_rate=rate, weight_decay=0.0)
    trained = [block for block in context.blocks if block.layer is not None and block.layer < layers]
    start = {block.name: context.read(block) for block in context.blocks}
    noisy, freeze = gradients_of(trainer, named([block.name for block in trained]), images(), noise=z, clip=clip)
    noisy.sums = lambda _: [torch.zeros_like(p) for p in freeze.parameters]  # type: ignore[method-assign]
    optimizer = torch.optim.SGD(freeze.parameters, lr=rate)
    for _ in range(steps):
        noisy.fill()
        optimizer.step()
        freeze.restore()
    noisy.close()
    moved = {
        name: float(np.square(context.read(block) - start[name]).sum()) for name, block in by_name(context).items()
    }
    size = sum(block.numel for block in trained)
    assert sum(moved.values()) == pytest.approx(steps * size * (rate * z * clip / batch) ** 2, rel=0.15)
    assert {name for name, square in moved.items() if square} == {block.name for block in trained}


def by_name(context: LocalTaskContext) -> dict[str, Any]:
    return {block.name: block for block in context.blocks}


def test_trained_blocks_get_noise_of_variance_z_c_squared_and_frozen_ones_none() -> None:
    context = work_on(GPT2, "causal-lm")
    trainer = trainer_of(context)
    noisy, freeze = gradients_of(trainer, roles("value"), sentences(), noise=3.0, clip=0.5)
    expected_examples = 8.0
    drawn = []
    for _ in range(30):
        noisy._noise_source.sample = lambda *_: np.arange(0)  # type: ignore[method-assign]
        noisy.fill()
        for parameter in freeze.parameters:
            assert parameter.grad is not None
            assert float(parameter.grad[..., :16].abs().max()) == 0.0  # the columns of queries and keys
            drawn.append(parameter.grad[..., 16:].flatten() * expected_examples)
    noisy.close()
    values = torch.cat(drawn)
    assert float(values.std()) == pytest.approx(3.0 * 0.5, rel=0.05)
    assert abs(float(values.mean())) < 4 * 1.5 / math.sqrt(len(values))
    assert {name for name, p in context.model.named_parameters() if p.grad is not None} == {
        name for name, p in context.model.named_parameters() if any(p is trained for trained in freeze.parameters)
    }


def test_an_empty_batch_is_a_step_of_noise_alone() -> None:
    noisy, freeze = gradients_of(trainer_of(work_on()), roles("head"), images())
    assert [float(total.abs().max()) for total in noisy.sums(torch.arange(0))] == [0.0, 0.0]
    noisy._noise_source.sample = lambda *_: np.arange(0)  # type: ignore[method-assign]
    noisy.fill()
    noisy.close()
    assert all(p.grad is not None and float(p.grad.abs().max()) > 0 for p in freeze.parameters)


def test_each_example_is_in_a_batch_with_the_same_chance_whatever_the_others_are() -> None:
    dice = NoiseSource(KEY)
    taken = np.zeros((2000, 40))
    for row in taken:
        row[dice.sample(40, 0.2)] = 1
    assert taken.mean() == pytest.approx(0.2, abs=0.005)
    # Sizes are binomial: a fixed size would have no variance, and would not be what the accountant composes.
    assert taken.sum(axis=1).var() == pytest.approx(40 * 0.2 * 0.8, rel=0.15)
    assert np.abs(np.corrcoef(taken.T) - np.eye(40)).max() < 0.12


@pytest.mark.parametrize(
    ("examples", "batch_size", "rate", "steps"),
    [(40, 8, 0.2, 5), (41, 8, 8 / 41, 6), (40, None, 1.0, 1), (5, 8, 1.0, 1)],
)
def test_an_epoch_has_as_many_steps_as_there_are_batches(
    examples: int, batch_size: int | None, rate: float, steps: int
) -> None:
    how = sampling(examples, batch_size)
    assert (how.rate, how.steps, how.expected) == (pytest.approx(rate), steps, pytest.approx(rate * examples))


def test_a_secret_key_is_another_every_time() -> None:
    first, second = NoiseSource(secret_key()), NoiseSource(secret_key())
    assert not np.array_equal(first.normal(8), second.normal(8))
    assert first.seed() != second.seed()
    assert np.array_equal(NoiseSource(KEY).normal(8), NoiseSource(KEY).normal(8))


# ---------------------------------------------------------------- a whole task


def task(**more: object) -> Task:
    training = Training(batch_size=8, learning_rate=0.05)
    return task_of(**{"rounds": 4, "training": training, "privacy": PRIVACY, **more})


def account(folder: Path, budget: Allowance | None = None, examples: int = 40, **more: object) -> PrivacyAccount:
    asked = task(**more)
    assert asked.privacy
    return PrivacyAccount(asked, asked.privacy, examples, Ledger(folder), budget)


def private_task(folder: Path, **more: object) -> PrivateTask:
    return PrivateTask(account(folder, **more), task(**more))


def spent(folder: Path) -> list[Event]:
    return [event for entry in Ledger(folder).read("wards") for event in entry.events]


def train(
    folder: Path, context: LocalTaskContext, *phases: Phase, method: str = "fedavg", **more: Any
) -> TrainingStats:
    trainer = trainer_of(context, method, **more)
    private = private_task(folder, training=trainer.training)
    data = images()
    report = Report()
    stats = Trainer(trainer.half, context, trainer.training, TrainingSetup(CPU), lambda: None, private, report).train(
        phases or [Phase(EVERYTHING)], data, seed=0
    )
    # No loss is told on the way there.
    assert (report.progress().loss, report.step) == (None, stats.steps)
    return stats


def test_private_steps_follow_the_schedule_and_are_paid_for_one_by_one(tmp_path: Path) -> None:
    seen: list[float] = []
    hook = register_optimizer_step_pre_hook(lambda optimizer, *_: seen.append(optimizer.param_groups[0]["lr"]))
    try:
        # 40 examples in batches of 8 are 5 steps.
        stats = train(tmp_path, work_on(), steps=7, schedule="linear")
    finally:
        hook.remove()
    assert seen == [pytest.approx(0.05 * (1 - step / 7)) for step in range(7)]
    assert stats.rate_sum == pytest.approx(sum(seen))
    (paid,) = spent(tmp_path)
    assert isinstance(paid, NoisySteps)
    assert (paid.sampling_rate, paid.steps) == (0.2, 7)


def test_a_private_task_trains_pays_first_and_tells_no_loss(tmp_path: Path) -> None:
    context = work_on()
    before = {name: context.read(block).tobytes() for name, block in by_name(context).items()}
    stats = train(tmp_path, context, Phase(roles("head"), epochs=2), Phase(roles("value")), weight_decay=0.1)
    after = {name: context.read(block).tobytes() for name, block in by_name(context).items()}
    assert math.isnan(stats.loss)
    assert (stats.examples, stats.steps) == (40, 3 * 5)
    assert {name for name in before if before[name] != after[name]} == {
        block.name for block in context.blocks if block.role in ("head", "value")
    }
    (paid,) = spent(tmp_path)
    assert isinstance(paid, NoisySteps)
    assert (paid.sampling_rate, paid.steps) == (0.2, 3 * 5)


def test_the_same_seed_gives_other_noise_each_time(tmp_path: Path) -> None:
    works = [work_on(), work_on()]
    for number, context in enumerate(works):
        train(tmp_path / str(number), context)
    assert works[0].read(works[0].blocks[-1]).tobytes() != works[1].read(works[1].blocks[-1]).tobytes()


@pytest.mark.parametrize(
    ("training", "steps", "share"), [({"learning_rate": 0.05}, 5, 0.99), ({"steps": 7}, 7, 0.97)]
)
def test_noise_is_the_same_in_every_round_and_the_run_keeps_its_target(
    tmp_path: Path, training: dict[str, Any], steps: int, share: float
) -> None:
    for number in range(1, 5):
        account(tmp_path, round=number, token=number, training=Training(batch_size=8, **training)).begin(steps=steps)
    events = spent(tmp_path)
    assert len({event.noise_multiplier for event in events if isinstance(event, NoisySteps)}) == 1
    assert share * 3.0 < epsilon(events, 1e-5) <= 3.0


def test_rounds_of_fewer_steps_have_less_noise_and_the_run_uses_its_target_up(tmp_path: Path) -> None:
    for number, steps in enumerate((10, 5, 5, 5), 1):
        account(tmp_path, round=number, token=number, training=Training(batch_size=8, steps=steps)).begin(steps=steps)
    first, *later = (event.noise_multiplier for event in spent(tmp_path) if isinstance(event, NoisySteps))
    assert later == [later[0]] * 3
    assert later[0] < first
    assert 0.99 * 3.0 < epsilon(spent(tmp_path), 1e-5) <= 3.0


def test_which_blocks_train_has_no_part_in_what_it_costs(tmp_path: Path) -> None:
    costs = []
    for layers in (1, 2):
        folder = tmp_path / str(layers)
        train(folder, work_on(), Phase(Selector(include=({"layers": tuple(range(layers))},))))  # type: ignore[arg-type]
        costs.append(epsilon(spent(folder), 1e-5))
    assert costs[0] == costs[1]


def test_a_task_that_is_tried_again_costs_again_and_later_rounds_make_up_for_it(tmp_path: Path) -> None:
    tries = [(1, 1), (1, 2), (2, 3), (3, 4)]
    for number, token in tries:
        account(tmp_path, round=number, token=token).begin(steps=5)
    noises = [event.noise_multiplier for event in spent(tmp_path) if isinstance(event, NoisySteps)]
    assert noises[0] < noises[1] == noises[2] == noises[3]
    assert epsilon(spent(tmp_path), 1e-5) <= 3.0


def test_a_run_that_has_spent_its_target_is_refused(tmp_path: Path) -> None:
    with Ledger(tmp_path).page("wards") as page:
        page.spend(TaskRef.of(task()), 40, PRIVACY, [NoisySteps(noise_multiplier=0.5, sampling_rate=0.2, steps=50)])
    with pytest.raises(PolicyViolation, match="the run has spent its target on 'wards'"):
        account(tmp_path)


def test_a_task_beyond_the_sites_budget_is_refused_before_it_spends_anything(tmp_path: Path) -> None:
    budget = Allowance(epsilon=3.5, delta=1e-5)
    for number in range(1, 5):
        account(tmp_path, budget, round=number).begin(steps=5)
    # The first run took 3 of 3.5; half a run more, with as much noise, would come to more than that.
    with Ledger(tmp_path).page("wards") as page:
        page.spend(TaskRef.of(task()), 40, PRIVACY, spent(tmp_path)[:2])
    before = spent(tmp_path)
    with pytest.raises(
        PolicyViolation, match=r"epsilon of \d\.\d+ at delta 1e-05, and the site allows 3.5"
    ) as refusal:
        account(tmp_path, budget, run="another")
    assert refusal.value.rule == "privacy"
    assert spent(tmp_path) == before


def test_a_run_that_was_chosen_by_the_answers_of_another_needs_the_budget_of_the_filter(tmp_path: Path) -> None:
    # Lines of a worker from before budgets were filters count like any other, and stay as they are.
    with Ledger(tmp_path).page("wards") as page:
        steps = NoisySteps(noise_multiplier=2.0, sampling_rate=0.4, steps=20)
        page.spend(TaskRef.of(task(run="old")), 40, PRIVACY, [steps])
    lines = ChainRows(tmp_path, "ledger wards").read_bytes()
    account(tmp_path / "alone").begin(steps=5)
    together = [*spent(tmp_path), *spent(tmp_path / "alone")]
    # Had both settings been fixed beforehand, the budget would hold a twentieth more than this.
    budget = Allowance(epsilon=1.05 * epsilon(together, 1e-5), delta=1e-5)
    with pytest.raises(
        PolicyViolation, match=r"to an epsilon of \d\.\d+ at delta 1e-05, and the site allows 5"
    ) as refused:
        account(tmp_path, budget)
    assert ChainRows(tmp_path, "ledger wards").read_bytes() == lines
    least, to_the_end = map(float, re.findall(r"(?:epsilon|budget) of (\d+\.?\d*)", refused.value.detail))
    assert budget.epsilon < least < to_the_end
    account(tmp_path, Allowance(epsilon=least, delta=1e-5))
    for number in range(1, 5):
        account(tmp_path, Allowance(epsilon=to_the_end, delta=1e-5), round=number).begin(steps=5)


def test_a_budget_that_equals_the_runs_target_is_warned_of_at_the_runs_first_task(tmp_path: Path) -> None:
    with capture_logs() as told:
        for number in range(1, 4):
            account(tmp_path, Allowance(epsilon=3.0, delta=1e-5), round=number).begin(steps=5)
    (warning,) = [line for line in told if line["event"] == "budget-below-run"]
    with pytest.raises(PolicyViolation, match="all rounds of the run need a budget of") as refused:
        account(tmp_path, Allowance(epsilon=3.0, delta=1e-5), round=4)
    # The first task knows what the last one does.
    enough = warning["detail"].split()[-1]
    assert refused.value.detail.split()[-1] == enough
    with capture_logs() as told:
        for number in range(1, 5):
            account(tmp_path / "more", Allowance(epsilon=float(enough), delta=1e-5), round=number).begin(steps=5)
    assert "budget-below-run" not in [line["event"] for line in told]


# 200^-1.1 is 0.00294, and 1 in 200 is 0.005.
@pytest.mark.parametrize("delta", [0.01, 0.0049, 0.003])
def test_a_delta_that_promises_nothing_is_refused(tmp_path: Path, delta: float) -> None:
    with pytest.raises(
        PolicyViolation, match=r"gives no guarantee for 200 examples: set privacy.delta to 0.0029 or less"
    ):
        account(tmp_path, examples=200, privacy=Privacy(epsilon=3.0, delta=delta, clip_norm=1.0))


@pytest.mark.parametrize(("delta", "warns"), [(0.0029, True), (0.0005, False)])
def test_a_delta_above_a_tenth_of_one_over_the_examples_is_warned_of(
    tmp_path: Path, delta: float, warns: bool
) -> None:
    with capture_logs() as told:
        account(tmp_path, examples=200, privacy=Privacy(epsilon=3.0, delta=delta, clip_norm=1.0))
    assert ("privacy-delta-large" in [line["event"] for line in told]) == warns


# ---------------------------------------------------------------- choosing blocks


NOISY = PRIVACY.model_copy(update={"selection": "noisy", "selection_share": 0.2})


def batches() -> Batches:
    return Batches(images(), 8, CPU)


def test_a_method_may_not_look_at_the_data_to_choose_blocks_unless_the_run_says_so(tmp_path: Path) -> None:
    refused = private_task(tmp_path).watched(batches())
    with pytest.raises(PolicyViolation, match=r"set privacy\.selection to 'noisy', or to 'uncovered'"):
        next(iter(refused))
    uncovered = private_task(tmp_path, privacy=PRIVACY.model_copy(update={"selection": "uncovered"}))
    watched = uncovered.watched(batches())
    assert spent(tmp_path) == []
    assert len(list(watched)) == 5
    assert spent(tmp_path) == [ExactUse(use="choice")]


def test_a_noisy_choice_is_paid_for_before_the_data_are_looked_at(tmp_path: Path) -> None:
    private = private_task(tmp_path, privacy=NOISY)
    watched = private.watched(batches())
    assert spent(tmp_path) == []
    iterator = iter(watched)
    (paid,) = spent(tmp_path)
    assert isinstance(paid, NoisyChoice)
    assert len([*iterator, *watched]) == 2 * 5  # looking twice costs once: only the choice is told
    assert len(spent(tmp_path)) == 1
    scores = np.random.default_rng(0).random((40, 6))
    assert len(private.top_k(scores, 2)) == 2
    private.check_choice()
    assert len(spent(tmp_path)) == 1
    private.top_k(scores[:, :3], 1)
    assert len(spent(tmp_path)) == 2


def test_picks_that_are_made_in_several_calls_cost_what_one_choice_does(tmp_path: Path) -> None:
    private = private_task(tmp_path, privacy=NOISY)
    list(private.watched(batches()))
    scores = np.random.default_rng(0).random((40, 6))
    assert [len(private.top_k(scores, count, picks=3)) for count in (2, 0, 1)] == [2, 0, 1]
    private.check_choice()
    assert len(spent(tmp_path)) == 1
    private.top_k(scores, 1, picks=3)  # a fourth
    assert len(spent(tmp_path)) == 2


def test_picks_in_several_calls_have_the_noise_of_one_call_for_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    epsilons: list[float] = []

    def noted(sums: Any, count: int, epsilon: float, dice: Any) -> list[int]:
        epsilons.append(epsilon)
        return private_top_k(sums, count, epsilon, dice)

    monkeypatch.setattr("tessera.worker.privacy.private_task.private_top_k", noted)
    for number, counts in enumerate([(3,), (2, 1)]):
        private = private_task(tmp_path / str(number), privacy=NOISY)
        list(private.watched(batches()))
        for count in counts:
            private.top_k(np.ones((40, 6)), count, picks=3)
    assert len(epsilons) == 3
    assert len(set(epsilons)) == 1


def test_a_choice_that_goes_past_the_noise_is_refused(tmp_path: Path) -> None:
    private = private_task(tmp_path, privacy=NOISY)
    list(private.watched(batches()))
    with pytest.raises(PolicyViolation, match="without any noise"):
        private.check_choice()


def test_choices_and_steps_together_keep_the_runs_target(tmp_path: Path) -> None:
    for number in range(1, 5):
        private = private_task(tmp_path, round=number, privacy=NOISY)
        list(private.watched(batches()))
        private.top_k(np.ones((40, 6)), 2)
        private.begin(steps=5)
    events = spent(tmp_path)
    assert sum(isinstance(event, NoisyChoice) for event in events) == 4
    assert 0.97 * 3.0 < epsilon(events, 1e-5) <= 3.0
    quiet = private_task(tmp_path / "without", round=1)
    quiet.begin(steps=5)
    assert [e.noise_multiplier for e in spent(tmp_path / "without") if isinstance(e, NoisySteps)] < [
        e.noise_multiplier for e in events if isinstance(e, NoisySteps)
    ]


def test_a_score_counts_as_at_most_one_whatever_a_method_makes_of_an_example() -> None:
    scores = np.array([[1e9, 0.0, 0.4], [-5.0, 0.9, 0.9], [math.nan, 0.9, 0.3]])
    assert bounded_sums(scores).tolist() == pytest.approx([1.0, 1.8, 1.6])


def test_noisy_top_k_follows_the_exponential_mechanism() -> None:
    # One pick of three: probabilities proportional to exp(epsilon * sum).
    sums, eps, dice = np.array([0.0, 1.0, 2.0]), 0.7, NoiseSource(KEY)
    picks = [private_top_k(sums, 1, eps, dice)[0] for _ in range(10_000)]
    weights = np.exp(eps * sums)
    assert np.bincount(picks) / len(picks) == pytest.approx(weights / weights.sum(), abs=0.012)


def test_noisy_top_k_keeps_what_it_promises() -> None:
    # All sums one larger, or only one of them: no set of picks becomes likelier by more than e^(k epsilon).
    eps, dice = 0.5, NoiseSource(KEY)
    counts = []
    for sums in (np.array([0.0, 0.5, 1.0]), np.array([1.0, 0.5, 1.0])):
        picks = [tuple(sorted(private_top_k(sums, 2, eps, dice))) for _ in range(10_000)]
        counts.append({pair: picks.count(pair) / len(picks) for pair in ((0, 1), (0, 2), (1, 2))})
    assert all(abs(math.log(counts[0][pair] / counts[1][pair])) <= 2 * eps for pair in counts[0])


def test_picks_share_what_a_choice_costs() -> None:
    # 8 picks of epsilon' = 0.1 are 8 * 0.1^2 / 8 = 0.01-zCDP.
    assert epsilon_per_pick(0.01, 8) == pytest.approx(0.1)


def test_norms_are_over_all_tensors() -> None:
    assert norms([torch.tensor([[3.0]]), torch.tensor([[[4.0]]])]).tolist() == [5.0]


def test_a_gpu_computes_the_noise_of_the_same_words() -> None:
    words = NoiseSource(KEY)
    drawn = box_muller(*(torch.from_numpy(words.words(500).view(np.int64).copy()) for _ in range(2)))
    source = NoiseSource(KEY)
    assert torch.allclose(drawn, torch.from_numpy(source.normal(1000)), rtol=1e-12, atol=1e-12)
    assert words.state == source.state
