"""The local training loop, on real models that are small enough to write the arithmetic out."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import count

import numpy as np
import pytest
import torch
from structlog.testing import capture_logs
from torch.optim.optimizer import register_optimizer_step_pre_hook
from transformers import PreTrainedModel

from tessera.shared.api.runs import Training
from tessera.shared.methods.base import MethodSpec, Phase, Plan, RunInfo, TrainingStats
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.selectors import EVERYTHING, Selector, SelectorError, all_but, named, roles
from tessera.shared.model.spec import Head, Lora
from tessera.shared.schedule import rate_factors
from tessera.shared.tensors.lazy import Array
from tessera.shared.tensors.statistics import is_statistic
from tessera.worker.data.dataset import Dataset
from tessera.worker.errors import InputMismatch, NoFiniteLoss, TrainingDiverged
from tessera.worker.faults.failures import failure_of
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.model.forward import IGNORED, CrossEntropy
from tessera.worker.task.heartbeat import Stop, Stopped
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.evaluate import evaluate
from tessera.worker.training.optimization.moments import Moments
from tessera.worker.training.optimization.precision import gradient_scaler, multiplies_bfloat16
from tessera.worker.training.phase_training import READ_SECONDS
from tessera.worker.training.progress import Report, rounded
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import CPU, NORMALISED, PLAIN, images

VIT = {**PLAIN.config, "hidden_dropout_prob": 0.1}
GPT2 = {
    "model_type": "gpt2", "vocab_size": 20, "n_positions": 8, "n_embd": 8, "n_layer": 2, "n_head": 2,
    "bos_token_id": 0, "eos_token_id": 0,
}  # fmt: skip
TOWER = {"hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 1, "num_attention_heads": 2}
CLIP = {
    "model_type": "clip", "projection_dim": 8,
    "text_config": {**TOWER, "vocab_size": 20, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0},
    "vision_config": {**TOWER, "image_size": 8, "patch_size": 4},
}  # fmt: skip


def sentences() -> Dataset:
    words = torch.randint(0, 20, (6, 8), generator=torch.Generator().manual_seed(5))
    return Dataset({"input_ids": words, "labels": words})


def work_on(config: dict[str, object] = VIT, head: Head = "image-classification", **more: object) -> LocalTaskContext:
    model = instantiate({**config, **more}, head, seed=1)
    return LocalTaskContext(model, head, Plan(), block_table(model))


def values_of(context: LocalTaskContext) -> dict[str, bytes]:
    return {block.name: context.read(block).tobytes() for block in context.blocks}


def train(
    context: LocalTaskContext,
    *phases: Phase,
    data: Dataset | None = None,
    seed: int = 0,
    check: Callable[[], None] = lambda: None,
    report: Report | None = None,
    min_loss_examples: int = 1,
    scaler: torch.amp.GradScaler | None = None,
    place: tuple[int, int] = (1, 1),
    moments: Moments | None = None,
    clock: Callable[[], float] = time.monotonic,
    **training: object,
) -> TrainingStats:
    settings = Training.model_validate({"batch_size": 8, "learning_rate": 0.05, **training})
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1, training=settings))
    seed_everything(seed)
    scaler = scaler or gradient_scaler(settings, CPU)
    trainer = Trainer(
        half,
        context,
        settings,
        TrainingSetup(CPU),
        check,
        None,
        report or Report(),
        min_loss_examples,
        scaler,
        *place,
        moments=moments,
        clock=clock,
    )
    return trainer.train(phases or [Phase(EVERYTHING)], data or images(), seed)


def test_two_runs_from_one_seed_are_bit_identical_and_another_seed_is_not() -> None:
    results = []
    for seed in (3, 3, 4):
        context = work_on()
        results.append((train(context, seed=seed, epochs=2), values_of(context)))
    assert results[0] == results[1]
    assert results[0][1] != results[2][1]
    assert results[0][0].steps == 2 * 3  # two epochs of 24 examples in batches of 8


def test_a_full_batch_sgd_step_is_theta_minus_rate_times_gradient() -> None:
    context, reference = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0)
    stats = train(context, batch_size=None, optimizer="sgd", learning_rate=0.5, weight_decay=0.0)
    reference.model.train()
    (batch,) = images().batches(None, torch.Generator().manual_seed(0))
    loss = reference.model(**batch).loss
    loss.backward()
    for (name, theta), (_, after) in zip(
        reference.model.named_parameters(), context.model.named_parameters(), strict=True
    ):
        step = torch.zeros(()) if theta.grad is None else 0.5 * theta.grad
        assert torch.equal(after, theta - step), name
    assert stats == TrainingStats(examples=24, steps=1, loss=float(loss.detach()), rate_sum=0.5)


@contextmanager
def rates_of() -> Iterator[list[list[float]]]:
    """The learning rates of the optimizer's groups at each of its steps."""
    seen: list[list[float]] = []
    hook = register_optimizer_step_pre_hook(
        lambda optimizer, *_: seen.append([group["lr"] for group in optimizer.param_groups])
    )
    yield seen
    hook.remove()


def test_steps_go_on_over_a_new_permutation_where_an_epoch_ends() -> None:
    context, reference = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0)
    settings = {"optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0}
    stats = train(context, steps=5, **settings)
    # An epoch has three batches of eight.
    generator = torch.Generator().manual_seed(0)
    batches = [*images().batches(8, generator), *list(images().batches(8, generator))[:2]]
    reference.model.train()
    optimizer = torch.optim.SGD(reference.model.parameters(), lr=0.5)
    losses = []
    for batch in batches:
        optimizer.zero_grad()
        loss = reference.model(**batch).loss
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
    assert values_of(context) == values_of(reference)
    # The loss is that of the whole pass: of two batches it would be of fewer examples.
    assert stats == TrainingStats(examples=24, steps=5, loss=pytest.approx(sum(losses[:3]) / 3), rate_sum=2.5)


def test_as_many_steps_as_epochs_make_the_same_bits() -> None:
    epochs, steps = work_on(), work_on()
    assert train(epochs, epochs=2) == train(steps, steps=6)
    assert values_of(epochs) == values_of(steps)


def test_the_loss_of_few_steps_is_told_only_of_as_many_examples_as_the_site_tells_figures_of() -> None:
    assert math.isfinite(train(work_on(), steps=2, min_loss_examples=16).loss)
    assert math.isnan(train(work_on(), steps=2, min_loss_examples=17).loss)


@pytest.mark.parametrize(
    "settings",
    [{"epochs": 2, "batch_size": 7}, {"epochs": 2, "batch_size": 32}, {"steps": 1, "batch_size": None}],
    ids=lambda settings: str(settings["batch_size"]),
)
def test_so_is_the_loss_of_whole_passes(settings: dict[str, int | None]) -> None:
    assert math.isfinite(train(work_on(), min_loss_examples=24, **settings).loss)
    assert math.isnan(train(work_on(), min_loss_examples=25, **settings).loss)


def test_examples_of_a_skipped_step_do_not_count_towards_the_loss_that_is_told() -> None:
    for least, is_told in ((16, True), (17, False)):
        context, steps, report = work_on(), count(), Report()
        # The second of three batches of 8 overflows.
        head = context.model.get_parameter("classifier.bias")
        head.register_hook(lambda each, steps=steps: each * torch.inf if next(steps) == 1 else each)
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        stats = train(context, scaler=scaler, report=report, min_loss_examples=least, learning_rate=0.01)
        assert math.isfinite(stats.loss) == is_told


@pytest.mark.parametrize("schedule", ["linear", "cosine"])
def test_the_rates_of_a_round_are_its_part_of_the_schedule(schedule: str) -> None:
    phases = (Phase(roles("head")), Phase(all_but("head"), epochs=2))
    with rates_of() as seen:
        stats = train(work_on(), *phases, schedule=schedule, warmup=0.1, place=(3, 4))
    settings = Training.model_validate({"schedule": schedule, "warmup": 0.1})
    # Each phase goes through all of them: three steps, and six.
    expected = [0.05 * share for steps in (3, 6) for share in rate_factors(settings, steps, 3, 4)]
    assert [rate for (rate,) in seen] == expected
    assert expected[0] < 0.05
    assert stats.rate_sum == pytest.approx(sum(expected))


def test_a_round_that_is_trained_again_after_a_restart_has_the_same_rates_and_bits() -> None:
    settings = {"schedule": "cosine", "warmup": 0.3, "optimizer": "sgd", "momentum": 0.9}
    run = work_on()
    train(run, place=(1, 3), **settings)
    between = {block.name: run.read(block).copy() for block in run.blocks}
    train(run, place=(2, 3), **settings)
    restarted = work_on()
    for block in restarted.blocks:
        restarted.write(block, between[block.name])
    train(restarted, place=(2, 3), **settings)
    assert values_of(restarted) == values_of(run)


def test_a_schedule_scales_the_rate_of_a_site_s_own_modules_too() -> None:
    context = work_on()
    context.add_private("own", torch.nn.Linear(2, 2))
    with rates_of() as seen:
        train(context, Phase(EVERYTHING, private_learning_rate=0.4), schedule="linear", batch_size=None, place=(2, 4))
    assert seen == [[pytest.approx(0.05 * 0.75), pytest.approx(0.4 * 0.75)]]


def test_norms_and_biases_are_spared_the_decay_if_the_run_says_so() -> None:
    settings = {"batch_size": None, "optimizer": "sgd", "learning_rate": 0.5}
    for config, head, data in ((VIT, "image-classification", images()), (GPT2, "causal-lm", sentences())):
        plain, spared = (work_on(config, head, hidden_dropout_prob=0.0, resid_pdrop=0.0) for _ in range(2))
        start = {block.name: plain.read(block).copy() for block in plain.blocks}
        train(plain, data=data, weight_decay=0.0, **settings)
        train(spared, data=data, weight_decay=0.1, decay_norms_and_biases=False, **settings)
        for block in plain.blocks:
            decayed = block.role != "norm" and not block.tensor.endswith("bias")
            expected = plain.read(block) - (0.5 * 0.1 * start[block.name] if decayed else 0)
            np.testing.assert_allclose(spared.read(block), expected, rtol=1e-5, atol=1e-6, err_msg=block.name)
        assert {"norm", "query"} <= {block.role for block in plain.blocks}


def test_the_betas_are_adamw_s() -> None:
    context, reference = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0)
    train(context, epochs=3, batch_size=None, betas=(0.5, 0.7), weight_decay=0.0)
    generator = torch.Generator().manual_seed(0)
    weights = reference.model.parameters()
    optimizer = torch.optim.AdamW(weights, lr=0.05, betas=(0.5, 0.7), weight_decay=0.0, fused=True)
    reference.model.train()
    for _ in range(3):
        (batch,) = images().batches(None, generator)
        optimizer.zero_grad()
        reference.model(**batch).loss.backward()
        optimizer.step()
    assert values_of(context) == values_of(reference)


def test_the_loss_of_images_with_texts_is_the_mean_over_the_images() -> None:
    pixels = torch.randn(5, 3, 8, 8, generator=torch.Generator().manual_seed(5))
    data = Dataset(
        {"pixel_values": pixels, "labels": torch.tensor([0, 1, 2, 0, 1])},
        common={"input_ids": torch.tensor([[1, 5, 2], [1, 6, 2], [1, 7, 2]])},
    )
    context = work_on(CLIP, "contrastive")
    (batch,) = data.batches(None)
    whole = float(context.forward(batch).loss.detach())
    # Four images and one; so small a step changes nothing.
    stats = train(context, data=data, batch_size=4, optimizer="sgd", learning_rate=1e-12)
    assert (stats.examples, stats.steps) == (5, 2)
    assert stats.loss == pytest.approx(whole, rel=1e-5)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_frozen_rows_of_a_fused_matrix_keep_every_bit(optimizer: str) -> None:
    context = work_on(GPT2, "causal-lm")
    before = values_of(context)
    train(context, Phase(roles("value")), data=sentences(), batch_size=2, optimizer=optimizer, weight_decay=0.1)
    after = values_of(context)
    changed = {name for name in before if before[name] != after[name]}
    assert changed == {block.name for block in context.blocks if block.role == "value"}
    assert any(name.endswith("c_attn.weight#value") for name in changed)


def test_each_phase_trains_its_own_blocks_for_its_own_epochs() -> None:
    context, between = work_on(), []
    steps = []

    def check() -> None:
        steps.append(1)
        between.append(values_of(context))

    stats = train(context, Phase(roles("head"), epochs=2), Phase(all_but("head")), epochs=1, check=check)
    start, middle, end = between[0], between[6], values_of(context)
    heads = {block.name for block in context.blocks if block.role == "head"}
    assert {name for name in start if start[name] != middle[name]} == heads
    assert {name for name in start if middle[name] == end[name]} == heads
    assert stats.steps == len(steps) == 2 * 3 + 1 * 3


def test_the_gradient_is_clipped_to_the_length_asked_for() -> None:
    context = work_on(hidden_dropout_prob=0.0)
    before = np.concatenate([context.read(block).ravel() for block in context.blocks])
    train(context, batch_size=None, optimizer="sgd", learning_rate=1.0, weight_decay=0.0, max_gradient_norm=0.01)
    after = np.concatenate([context.read(block).ravel() for block in context.blocks])
    assert np.linalg.norm(after - before) == pytest.approx(1.0 * 0.01, rel=1e-3)


def test_a_rate_that_is_too_high_is_reported_with_step_and_rate() -> None:
    with pytest.raises(TrainingDiverged, match=r"at step [1-9]\d* with a learning rate of 100") as diverged:
        train(work_on(), learning_rate=100, optimizer="sgd", epochs=30, batch_size=4)
    assert failure_of(diverged.value)[0] == "diverged"


@pytest.mark.parametrize(("batch_size", "step"), [(None, 0), (1, r"\d+")])
def test_the_learning_rate_is_not_blamed_for_an_infinite_input(batch_size: int | None, step: object) -> None:
    data = images()
    data.tensors["pixel_values"][7] = torch.inf
    with pytest.raises(NoFiniteLoss, match=rf"nan at step {step}: its batch has an input or a label") as found:
        train(work_on(), data=data, batch_size=batch_size)
    assert failure_of(found.value)[0] == "no-finite-loss"


def test_the_learning_rate_is_not_blamed_for_a_version_without_a_finite_loss() -> None:
    context = work_on()
    head = next(block for block in context.blocks if block.name == "classifier.weight")
    context.write(head, np.full(head.shape, 3e38, np.float32))
    with pytest.raises(NoFiniteLoss, match="at step 0, before any training: the version has weights that are too"):
        train(context)


@pytest.mark.parametrize("objective", [None, CrossEntropy(0.1), CrossEntropy(class_weights=torch.arange(1.0, 21.0))])
def test_a_batch_without_labels_changes_no_weight_and_no_loss(objective: CrossEntropy | None) -> None:
    words = sentences().tensors["input_ids"][:2]
    labels = words.clone()
    labels[1] = IGNORED
    results = []
    for rows in (2, 1):
        context = work_on(GPT2, "causal-lm", resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
        context.objective = objective
        data = Dataset({"input_ids": words[:rows], "labels": labels[:rows]})
        stats = train(context, data=data, optimizer="sgd", weight_decay=0.0, batch_size=1)
        assert stats.steps == rows
        results.append((values_of(context), stats.loss))
    assert results[0] == results[1]


def test_a_data_set_none_of_whose_labels_counts_is_refused_before_training() -> None:
    words = sentences().tensors["input_ids"]
    data = Dataset({"input_ids": words, "labels": torch.full_like(words, IGNORED)})
    checked: list[int] = []
    with pytest.raises(InputMismatch, match="no example of the data set has a label that counts"):
        train(work_on(GPT2, "causal-lm"), data=data, check=lambda: checked.append(1))
    assert not checked


def test_examples_without_labels_are_counted_before_training() -> None:
    words = sentences().tensors["input_ids"]
    labels = words.clone()
    labels[[1, 4]] = IGNORED
    labels[2, 1:] = IGNORED  # the first token is predicted by none
    with capture_logs() as logs:
        train(work_on(GPT2, "causal-lm"), data=Dataset({"input_ids": words, "labels": labels}))
    assert [(log["examples"], log["of"]) for log in logs if log["event"] == "examples-without-labels"] == [(3, 6)]


@pytest.mark.parametrize(("seconds", "steps"), [(0.0, 6), (READ_SECONDS, 1)])
def test_divergence_ends_training_when_the_loss_is_next_read(seconds: float, steps: int) -> None:
    data, made = images(), []
    data.tensors["pixel_values"][:] = torch.inf
    settings = {"batch_size": 4, "check": lambda: made.append(1), "clock": count(step=seconds).__next__}
    with pytest.raises(NoFiniteLoss, match="nan at step 0"):
        train(work_on(), data=data, **settings)
    assert len(made) == steps


def test_the_check_ends_training_between_two_batches() -> None:
    context, stop, seen = work_on(), Stop(), []

    def check() -> None:
        seen.append(values_of(context))
        if len(seen) == 3:
            stop.request()
        stop.check()

    with pytest.raises(Stopped):
        train(context, epochs=9, check=check)
    assert len(seen) == 3
    assert values_of(context) == seen[2] != seen[1]


@pytest.mark.parametrize("precision", ["bfloat16", "float16"])
def test_sixteen_bit_training_on_the_cpu_keeps_float32_weights(precision: str) -> None:
    exact, rough = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0)
    tallies = [train(exact), train(rough, precision=precision)]
    assert tallies[0].loss == pytest.approx(tallies[1].loss, rel=0.05)
    assert {parameter.dtype for parameter in rough.model.parameters()} == {torch.float32}
    # A CPU without instructions for bfloat16 computes in float32.
    assert (values_of(exact) != values_of(rough)) == multiplies_bfloat16()


def overflowing() -> torch.amp.GradScaler:
    """A scaler as a GPU has one for float16, at a scale that overflows even float32."""
    return torch.amp.GradScaler("cpu", init_scale=2.0**127)


def test_a_step_that_overflows_is_made_again_so_that_every_counted_step_was_made() -> None:
    exact, scaled, tries = work_on(hidden_dropout_prob=0.0), work_on(hidden_dropout_prob=0.0), []
    settings = {"optimizer": "sgd", "learning_rate": 0.5, "weight_decay": 0.0}
    expected = train(exact, **settings)
    stats = train(scaled, scaler=overflowing(), check=lambda: tries.append(1), **settings)
    assert len(tries) > stats.steps == expected.steps == 3
    # The scale is a power of two: it changes no bit of a value that stays within float32's range.
    for block in exact.blocks:
        np.testing.assert_allclose(scaled.read(block), exact.read(block), rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("optimizer", ["adamw", "sgd"])
def test_a_later_step_that_overflows_is_skipped_and_made_up_for_at_the_end(optimizer: str) -> None:
    context, steps, values = work_on(), count(), []
    # The second of three batches overflows.
    (head,) = (block.tensor for block in context.blocks if block.name == "classifier.bias")
    context.model.get_parameter(head).register_hook(lambda each: each * torch.inf if next(steps) == 1 else each)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    settings = {"optimizer": optimizer, "schedule": "linear", "learning_rate": 0.01}
    with rates_of() as rates:
        stats = train(context, scaler=scaler, check=lambda: values.append(values_of(context)), **settings)
    assert (stats.examples, stats.steps, scaler.get_scale()) == (24, 3, 512.0)
    assert len(values) == 4
    assert values[0] != values[1] == values[2] != values[3] != values_of(context)
    # The rates of three steps that decay to zero, though the second is the last.
    assert stats.rate_sum == pytest.approx(0.01 * (1 + 2 / 3 + 1 / 3))
    assert [rate for (rate,) in rates] == pytest.approx([0.01, 0.02 / 3, 0.01 / 3, 0.02 / 3])


def test_the_scale_that_one_round_found_is_where_the_next_begins() -> None:
    scaler, tries = overflowing(), []
    for _ in range(2):
        tries.append(0)
        stats = train(work_on(), scaler=scaler, check=lambda: tries.append(tries.pop() + 1), learning_rate=1e-6)
    assert tries[0] > stats.steps == tries[1] == 3


def test_gradients_that_no_scale_makes_finite_end_training() -> None:
    context = work_on()
    for block in context.blocks:
        if block.role == "head":
            context.model.get_parameter(block.tensor).register_hook(lambda gradient: gradient * torch.inf)
    with pytest.raises(TrainingDiverged, match="gradients are not finite at step 0, before any training"):
        train(context, scaler=overflowing())


@pytest.mark.parametrize("model_type", ["vit", "beit"])
def test_weights_of_sixteen_bits_get_pixels_of_as_many(model_type: str) -> None:
    # A ViT turns pixels into its own type, a BEiT fails at others.
    context = work_on(model_type=model_type, dtype="bfloat16")
    assert train(context).loss > 0
    assert {parameter.dtype for parameter in context.model.parameters()} == {torch.bfloat16}
    assert evaluate(context.model, context.head, Batches(images(), 8, CPU), lambda: None)["loss"] > 0


def test_training_lowers_the_loss() -> None:
    context = work_on(hidden_dropout_prob=0.0)
    first = train(context, learning_rate=0.005).loss
    assert train(context, learning_rate=0.005, epochs=20).loss < 0.7 * first


def test_a_phase_that_names_no_block_of_the_model_is_refused() -> None:
    with pytest.raises(SelectorError, match=r"no\.such\.block"):
        train(work_on(), Phase(named(["no.such.block"])))


def test_what_is_read_is_what_the_default_harvest_sends() -> None:
    context = work_on()
    context.plan = Plan(upload=roles("head"))
    half = worker_half(MethodSpec(name="fedavg"), RunInfo(tuple(context.blocks), rounds=1))
    result = half.collect(context, roles("head"), TrainingStats(examples=24, steps=1, loss=1.0, rate_sum=0.05))
    model: PreTrainedModel = context.model
    sent: Sequence[str] = sorted(result.upload)
    assert sent == ["classifier.bias", "classifier.weight"]
    assert np.array_equal(result.upload["classifier.weight"], model.classifier.weight.detach().numpy())
    assert result.keep == {}


@pytest.mark.parametrize(
    "trained",
    [
        pytest.param(roles("head"), marks=pytest.mark.long),
        roles("adapter", "head"),
        named(["*.normalization.weight", "classifier.*"]),
    ],
)
def test_a_batch_norm_whose_statistics_do_not_train_computes_as_in_an_evaluation(trained: Selector) -> None:
    subject = replace(NORMALISED, lora=Lora(rank=2, alpha=4))
    context = LocalTaskContext(subject.model(), subject.head, Plan(), subject.blocks)
    for block in context.blocks:
        if block.tensor.endswith(".running_var"):
            context.write(block, np.full(block.shape, 0.5, np.float32))
    data = subject.data()
    before = evaluate(context.model, subject.head, Batches(data, None, CPU), lambda: None)["loss"]
    statistics = {block.name: context.read(block) for block in context.blocks if is_statistic(block.name)}
    stats = train(context, Phase(trained), data=data, batch_size=None, epochs=1)
    assert stats.loss == pytest.approx(before, rel=1e-6)
    assert moved(context, statistics) == set()
    # A later phase, in which they train, moves them.
    whole = {"full_fine_tuning": True}
    train(context, Phase(trained), Phase(EVERYTHING), data=data, batch_size=None, epochs=1, **whole)
    assert moved(context, statistics) == statistics.keys()


def moved(context: LocalTaskContext, before: Mapping[str, Array]) -> set[str]:
    return {block.name for block in context.blocks if (context.read(block) != before.get(block.name)).any()} & {
        *before
    }


def test_the_statistics_of_a_module_that_stays_move_and_are_kept_with_it() -> None:
    context = work_on()
    context.add_private("own", torch.nn.BatchNorm2d(1, momentum=1.0))
    context.model.register_forward_pre_hook(
        lambda model, _, inputs: ((), {**inputs, "pixel_values": model.own(inputs["pixel_values"])}), with_kwargs=True
    )
    train(context, batch_size=None)
    kept = {block.name: context.read(block) for block in context.private}
    assert sorted(kept) == ["own.bias", "own.running_mean", "own.running_var", "own.weight"]
    # With a momentum of 1, the mean of the last batch, which is all images.
    mean = float(images().tensors["pixel_values"].mean())
    assert kept["own.running_mean"] == pytest.approx(mean, rel=1e-4)
    later = work_on()
    later.vault = kept
    later.add_private("own", torch.nn.BatchNorm2d(1))
    assert {block.name: later.read(block).tobytes() for block in later.private} == {
        name: values.tobytes() for name, values in kept.items()
    }


def test_each_step_is_told_with_the_mean_loss_of_the_epoch_so_far() -> None:
    report, seen = Report(), []
    context = work_on()
    stats = train(context, check=lambda: seen.append(report.progress()), report=report, epochs=2)
    assert [(told.step, told.steps) for told in seen] == [(step, 6) for step in range(6)]
    last = report.progress()
    assert (last.phase, last.step, last.steps, last.loss) == ("training", 6, 6, rounded(stats.loss))


def test_a_mean_of_fewer_examples_than_the_site_tells_figures_of_is_not_told() -> None:
    report, seen = Report(), []
    watch = {"check": lambda: seen.append(report.loss is None), "clock": count(step=READ_SECONDS).__next__}
    train(work_on(), **watch, report=report, min_loss_examples=16, epochs=2)
    # Before each of three batches of 8, twice: none, 8 and 16 examples; an epoch begins anew.
    assert seen == [True, True, False, False, True, False]
