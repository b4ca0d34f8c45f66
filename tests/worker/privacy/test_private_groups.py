"""Differential privacy of groups of examples: what one group can change, and what it costs."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from tessera.shared.api.runs import Training
from tessera.shared.methods.base import MethodSpec, Phase, TrainingStats
from tessera.shared.methods.registry import worker_half
from tessera.shared.model.selectors import EVERYTHING, Selector, roles
from tessera.shared.privacy.noise import NoiseSource
from tessera.shared.run_settings import Privacy
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.governance.policy import Allowance, PolicyViolation
from tessera.worker.model.block_map import named_tensors
from tessera.worker.privacy.account import PrivacyAccount
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.pieces import GroupSampling
from tessera.worker.privacy.private_task import PrivateTask
from tessera.worker.privacy.sampling import sampling
from tessera.worker.privacy.selection import bounded_sums
from tessera.worker.state.hash_chain import TaskRef
from tessera.worker.state.privacy_ledger import Ledger, NoisySteps
from tessera.worker.training.batches import Batches
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize
from tessera.worker.training.randomness import seed_everything
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer
from tests.support.tasks import CPU, FEW_METHODS, VIT, subject_of
from tests.worker.privacy.test_private_task import (
    GPT2,
    KEY,
    difference,
    images,
    length,
    plan_of,
    sentences,
    task,
    trainer_of,
    work_on,
)

CLIP = 0.3
GROUPED = Privacy(epsilon=1000.0, delta=1e-2, clip_norm=CLIP, unit="group", max_per_group=3)
"""So little noise that its grid is fine."""
SIZES = (9, 5, 3, 1, 2, 4)


def names_of(examples: int) -> list[bytes]:
    """The groups of so many examples, of these sizes again and again, and in no order."""
    names = [f"patient {number}".encode() for number, size in enumerate(SIZES * 4) for _ in range(size)][:examples]
    return [names[(7 * place) % examples] for place in range(examples)] if examples % 7 else names


def without(data: Dataset, group: int) -> Dataset:
    """The data set in which a group contributes nothing: its labels are classes that no model has."""
    rows = Groups.of(data.groups).numbers == group
    labels = data.tensors["labels"].clone()
    labels[rows] = 10**6
    return replace(data, tensors={**data.tensors, "labels": labels})


def grouped_gradients(
    trainer: Trainer, freeze: Freeze, data: Dataset, *, clip: float = CLIP, most: int = 3, noise: float = 1.0
) -> NoisyGradients:
    groups = Groups.of(data.groups)
    mechanism = Mechanism(sampling(groups.count, 3), clip, noise)
    return NoisyGradients(trainer, freeze, data, mechanism, NoiseSource(KEY), GroupSampling(groups, most))


def of_plain(data: Dataset, train: Selector = EVERYTHING, config: dict[str, Any] = VIT, **how: Any) -> NoisyGradients:
    context = work_on(config, "causal-lm" if config is GPT2 else "image-classification")
    return grouped_gradients(trainer_of(context), Freeze(context.model, train.resolve(context.blocks)), data, **how)


def patients(count: int = 24) -> Dataset:
    return replace(images(count), groups=names_of(count))


def texts() -> Dataset:
    return replace(sentences(), groups=names_of(12))


# ---------------------------------------------------------------- sensitivity


@pytest.mark.parametrize(
    ("config", "train", "by_layer"),
    [(VIT, EVERYTHING, False), (VIT, roles("value", "head"), False), (GPT2, roles("value"), True)],
    ids=["all", "some blocks", "slices by layer"],
)
def test_one_group_less_moves_the_sum_by_no_more_than_the_clip_norm(
    config: dict[str, Any], train: Selector, by_layer: bool
) -> None:
    noisy = of_plain(texts() if config is GPT2 else patients(), train, config)
    noisy._mechanism = replace(noisy._mechanism, parts=noisy._freeze.parts if by_layer else ())
    count = noisy._mechanism.sampling.units
    groups = torch.arange(count)
    whole = noisy.sums(groups)
    moved = [difference(whole, noisy.sums(groups[groups != group])) for group in range(count)]
    noisy.close()
    assert 0 < max(moved) <= CLIP * noisy._mechanism.count**0.5 + 1e-4


@FEW_METHODS
def test_so_it_is_with_every_method_in_every_phase(method: str) -> None:
    for context, trainer, phase, data in each_phase(method):
        freeze = Freeze(
            context.model, [*phase.train.resolve(context.blocks), *(context.private if phase.private else ())]
        )
        noisy = grouped_gradients(trainer, freeze, data)
        groups = torch.arange(noisy._mechanism.sampling.units)
        whole = noisy.sums(groups)
        moved = [difference(whole, noisy.sums(groups[groups != group])) for group in range(3)]
        noisy.close()
        assert 0 < max(moved) <= CLIP + 1e-4


def each_phase(method: str) -> Sequence[tuple[LocalTaskContext, Trainer, Phase, Dataset]]:
    """Each phase of a method, with a model of its own and a trainer of one step of SGD at a rate of one."""
    subject = subject_of(method)
    plain = subject.data()
    data = replace(plain, groups=names_of(plain.examples))
    facts = subject.facts(batch_size=None, steps=1, optimizer="sgd", learning_rate=1.0, weight_decay=0.0)
    found: list[tuple[LocalTaskContext, Trainer, Phase, Dataset]] = []
    count = 1
    while len(found) < count:
        context = LocalTaskContext(subject.model(), subject.head, plan_of(method, facts), facts.blocks)
        half = worker_half(MethodSpec(name=method), facts)
        seed_everything(0)
        half.setup(context)
        phases = half.phases(context, half.select(context, Batches(data, 8, CPU)))
        count = len(phases)
        phase = phases[len(found)]
        half.on_phase_start(context, phase)
        found.append((context, Trainer(half, context, facts.training, TrainingSetup(CPU), lambda: None), phase, data))
    return found


def grouped_task(
    folder: Path, data: Dataset, training: Training, privacy: Privacy = GROUPED, **more: Any
) -> PrivateTask:
    asked = task(training=training, privacy=privacy)
    groups = Groups.of(data.groups)
    return PrivateTask(PrivacyAccount(asked, privacy, groups.count, Ledger(folder), **more), asked, groups, KEY)


def weights_after_a_step(folder: Path, method: str, number: int, zeroed: int | None) -> tuple[list[Tensor], int]:
    """The weights after one private step of a phase, perhaps without a group, and the number of groups."""
    context, trainer, phase, data = each_phase(method)[number]
    used = data if zeroed is None else without(data, zeroed)
    private = grouped_task(folder, used, trainer.training, budget=None)
    # A phase that sets its own epochs makes as many steps of all groups.
    stats = replace(trainer, private=private).train([replace(phase, epochs=None)], used, seed=0)
    assert (stats.examples, stats.steps) == (Groups.of(data.groups).count, 1)
    return [tensor.detach().clone() for tensor in named_tensors(context.model).values()], stats.examples


@FEW_METHODS
def test_what_a_step_trains_moves_by_no_more_than_a_clipped_group(tmp_path: Path, method: str) -> None:
    # The same dice for all data sets: the same noise, and the same members. A step at a rate of 1 moves the weights
    # by the noisy sum over the number of groups. Each value's rounding to the grid may differ by one unit.
    for number in range(len(each_phase(method))):
        whole, count = weights_after_a_step(tmp_path / f"{number}", method, number, None)
        grid = Mechanism(sampling(count, None), CLIP, spent_noise(tmp_path / f"{number}")).grid
        for group in (0, 1):
            other, _ = weights_after_a_step(tmp_path / f"{number} {group}", method, number, group)
            moved = count * difference(whole, other)
            assert 0 < moved <= CLIP + grid * math.sqrt(sum(tensor.numel() for tensor in other))


def spent_noise(folder: Path) -> float:
    (entry,) = Ledger(folder).read("wards")
    (steps,) = entry.events
    assert isinstance(steps, NoisySteps)
    assert entry.unit == "group"
    return steps.noise_multiplier


def test_a_group_with_large_gradients_moves_the_sum_by_exactly_the_clip_norm() -> None:
    noisy = of_plain(patients(), clip=1e-3)
    assert length(noisy.sums(torch.tensor([0]))) == pytest.approx(1e-3, rel=1e-4)
    assert length(noisy.sums(torch.tensor([3]))) == pytest.approx(1e-3, rel=1e-4)
    noisy.close()


def test_a_groups_gradient_is_the_mean_of_its_drawn_examples() -> None:
    data = patients()
    noisy, single = of_plain(data, clip=1e9), of_plain(replace(data, groups=[b"%d" % n for n in range(24)]), clip=1e9)
    groups, places = Groups.of(data.groups), Groups.of([b"%d" % n for n in range(24)]).numbers
    for group in range(groups.count):
        (rows,) = groups.drawn(torch.tensor([group]), 3, seed=0)
        assert len(rows) == min(3, int(groups.sizes[group]))
        expected = [each / len(rows) for each in single.sums(places[rows])]
        assert difference(noisy.sums(torch.tensor([group])), expected) <= 1e-5 * length(expected)
    noisy.close()
    single.close()


def by_pieces(noisy: NoisyGradients, held: int) -> list[Tensor]:
    noisy._at_once = held
    return noisy.sums(torch.arange(noisy._mechanism.sampling.units))


def test_groups_that_do_not_fit_into_a_piece_are_computed_in_parts() -> None:
    noisy = of_plain(patients(), most=9)
    whole = by_pieces(noisy, 100)
    for held in (4, 1):
        assert difference(by_pieces(noisy, held), whole) <= 1e-5 * length(whole)
    noisy.close()
    noisy._method = noisy._alone
    assert difference(by_pieces(noisy, 1), whole) <= 1e-4 * length(whole)


def test_pieces_of_groups_fit_into_memory_before_privacy_is_spent(tmp_path: Path) -> None:
    context, size = work_on(), PieceSize.of("auto")
    data = patients()
    trainer = trainer_of(context, batch_size=2, steps=1)
    private = grouped_task(tmp_path, data, trainer.training, budget=None)
    replace(trainer, private=private, piece_size=size).train([Phase(EVERYTHING)], data, seed=0)
    # Twice the two groups that are expected, of three examples each.
    assert size.examples == 12


# ---------------------------------------------------------------- what a group cannot change


@pytest.mark.parametrize(
    ("fault", "held"),
    [(math.nan, 100), (math.inf, 100), (math.inf, 1), pytest.param(math.nan, 1, marks=pytest.mark.long)],
)
def test_a_group_whose_gradient_is_not_finite_counts_as_zero(fault: float, held: int) -> None:
    data = patients()
    groups = Groups.of(data.groups)
    pixels = data.tensors["pixel_values"].clone()
    pixels[groups.members[groups.numbers[groups.members] == 2][0]] = fault
    broken = of_plain(replace(data, tensors={**data.tensors, "pixel_values": pixels}), most=9)
    whole, others = torch.arange(groups.count), torch.tensor([n for n in range(groups.count) if n != 2])
    broken._at_once = held
    found = broken.sums(whole)
    assert difference(found, broken.sums(others)) == pytest.approx(0, abs=1e-6)
    assert length(found) > 0.1
    broken.close()


def test_an_example_that_the_model_does_not_know_counts_as_zero_within_its_group() -> None:
    data = patients()
    row = int(Groups.of(data.groups).members[0])
    labels = data.tensors["labels"].clone()
    labels[row] = 99
    sound, broken = (
        of_plain(data, most=9, clip=1e9),
        of_plain(replace(data, tensors={**data.tensors, "labels": labels}), most=9, clip=1e9),
    )
    rest = torch.arange(1, Groups.of(data.groups).count)
    assert difference(sound.sums(rest), broken.sums(rest)) == 0
    assert length(broken.sums(torch.tensor([0]))) > 0
    assert difference(sound.sums(torch.tensor([0])), broken.sums(torch.tensor([0]))) > 0
    sound.close()
    broken.close()


def added(data: Dataset, row: int, name: bytes) -> Dataset:
    """The data set with a copy of an example more, at the start, in another group."""
    rows = data.rows(torch.tensor([row, *range(data.examples)]))
    return replace(rows, groups=[name, *(data.groups or ())])


def dropped(data: Dataset, row: int, _: bytes) -> Dataset:
    return data.rows(torch.tensor([place for place in range(data.examples) if place != row]))


def relabelled(data: Dataset, row: int, _: bytes) -> Dataset:
    labels = data.tensors["labels"].clone()
    labels[row] = (labels[row] + 1) % 3
    return replace(data, tensors={**data.tensors, "labels": labels})


@pytest.mark.parametrize("change", [added, pytest.param(dropped, marks=pytest.mark.long), relabelled])
def test_an_example_changes_the_gradient_of_no_other_group(change: Callable[[Dataset, int, bytes], Dataset]) -> None:
    data = patients()
    groups = Groups.of(data.groups)
    row = int(groups.members[0])
    changed = change(data, row, (data.groups or ())[row])
    assert Groups.of(changed.groups).count == groups.count
    one, two = of_plain(data), of_plain(changed)
    for group in range(1, groups.count):
        # Alone, so that no rounding of a batch is in it.
        assert difference(one.sums(torch.tensor([group])), two.sums(torch.tensor([group]))) == 0
    one.close()
    two.close()


# ---------------------------------------------------------------- the cost


def trained(folder: Path, data: Dataset, privacy: Privacy = GROUPED, **settings: Any) -> TrainingStats:
    trainer = trainer_of(work_on(), **settings)
    private = grouped_task(folder, data, trainer.training, privacy, budget=None)
    return replace(trainer, private=private).train([Phase(roles("head"))], data, seed=0)


def test_batches_epochs_and_the_cost_count_groups(tmp_path: Path) -> None:
    # 24 examples of 6 groups: two groups a step make an epoch of three steps.
    stats = trained(tmp_path, patients(), batch_size=2, epochs=2)
    assert (stats.examples, stats.steps) == (6, 6)
    (entry,) = Ledger(tmp_path).read("wards")
    assert (entry.unit, entry.examples) == ("group", 6)
    (steps,) = entry.events
    assert isinstance(steps, NoisySteps)
    assert (steps.sampling_rate, steps.steps) == (pytest.approx(1 / 3), 6)


def test_groups_of_one_example_train_as_examples_do() -> None:
    data = patients()
    single = replace(data, groups=[f"{row:03}".encode() for row in range(24)])
    context = work_on()
    freeze = Freeze(context.model, EVERYTHING.resolve(context.blocks))
    by_example = NoisyGradients(
        trainer_of(context), freeze, data, Mechanism(sampling(24, 3), CLIP, 1.0), NoiseSource(KEY)
    )
    expected = by_example.sums(torch.arange(24))
    by_example.close()
    by_group = of_plain(single)
    assert difference(by_group.sums(torch.arange(24)), expected) <= 1e-6 * length(expected)
    by_group.close()


def test_a_delta_is_judged_by_the_number_of_groups(tmp_path: Path) -> None:
    privacy = GROUPED.model_copy(update={"delta": 0.099})
    data = replace(images(40), groups=[b"%d" % (row % 20) for row in range(40)])
    with pytest.raises(
        PolicyViolation, match=r"gives no guarantee for 20 groups: set privacy\.delta to 0\.037 or less"
    ):
        grouped_task(tmp_path, data, Training(batch_size=2), privacy, budget=None)


def test_a_run_cannot_turn_to_groups_after_it_has_trained_on_examples(tmp_path: Path) -> None:
    with Ledger(tmp_path).page("wards") as page:
        steps = NoisySteps(noise_multiplier=9.0, sampling_rate=0.2, steps=1)
        page.spend(TaskRef.of(task()), 24, GROUPED, [steps])
    with pytest.raises(PolicyViolation, match="has trained on single examples, and now protects groups"):
        grouped_task(tmp_path, patients(), Training(batch_size=2), budget=None)


def test_a_group_level_task_counts_for_a_budget_of_examples_as_more(tmp_path: Path) -> None:
    privacy = Privacy(epsilon=3.0, delta=1e-3, clip_norm=CLIP, unit="group")
    data = replace(images(40), groups=[b"%d" % (row % 20) for row in range(40)])
    training = Training(batch_size=4, steps=20)
    grouped_task(tmp_path, data, training, privacy, budget=Allowance(epsilon=3.5, delta=1e-3, unit="group"))
    with pytest.raises(PolicyViolation, match=r"an epsilon of \d+\.?\d* at delta 0.001, and the site allows 3.5"):
        grouped_task(tmp_path, data, training, privacy, budget=Allowance(epsilon=3.5, delta=1e-3))


# ---------------------------------------------------------------- choosing blocks


def test_a_group_counts_in_a_noisy_choice_by_the_mean_of_its_scores() -> None:
    groups = Groups.of([b"a", b"b", b"a", b"a"])
    scores = np.array([[1.0, 0.0], [0.5, 1.0], [0.0, 0.25], [1e9, math.nan]])
    # Three scores of a, of which each mean is over 3, and one of b. Scores above 1 count as 1, and nan as 0.
    assert bounded_sums(scores, groups).tolist() == pytest.approx([2 / 3 + 0.5, 0.25 / 3 + 1.0], abs=1e-9)


def test_a_group_counts_at_most_one_in_a_noisy_choice_whatever_its_scores_are() -> None:
    dice = np.random.default_rng(0)
    data = patients()
    groups = Groups.of(data.groups)
    scores = dice.normal(0.5, 3, (24, 5))
    before = bounded_sums(scores, groups)
    for group in range(groups.count):
        zeroed = np.where((groups.numbers == group).numpy()[:, None], 0.0, scores)
        moved = before - bounded_sums(zeroed, groups)
        assert (moved >= 0).all()
        assert (moved <= 1).all()


def test_scores_that_are_not_one_for_each_example_are_refused() -> None:
    with pytest.raises(ValueError, match="1 scores for 4 examples"):
        bounded_sums(np.ones((1, 2)), Groups.of([b"a"] * 4))
