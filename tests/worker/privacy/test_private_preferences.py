"""Preferences under differential privacy: the unit is a pair, or a patient's pairs."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch
from transformers import PreTrainedModel

from tessera.shared.methods.base import Plan
from tessera.shared.privacy.noise import NoiseSource
from tessera.simulation import Weights
from tessera.worker.data.groups import Groups
from tessera.worker.model.block_map import block_table
from tessera.worker.model.forward import Preference
from tessera.worker.privacy.bounded_figures import bounded_sums
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.pieces import GroupSampling
from tessera.worker.privacy.sampling import sampling
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.ranks import OneRank
from tests.worker.executor.test_equal_results import model_of
from tests.worker.executor.test_preferences_in_ranks import (
    BETA,
    LLAMA,
    LORA,
    PAIRS,
    built,
    logsigmoid,
    margins,
    moved,
    pairs,
)
from tests.worker.privacy.test_private_task import KEY, trainer_of

PATIENTS = [b"a", b"b", b"a", b"c", b"a"]


def compared(weights: Weights, reference: PreTrainedModel) -> LocalTaskContext:
    """A context in which a model with these weights is compared with a reference."""
    model = built(weights)
    adapters = {name: each.detach() for name, each in reference.named_parameters() if "lora_" in name}
    preference = Preference(beta=BETA, reference=adapters)
    return LocalTaskContext(model, "text-classification", Plan(), block_table(model), objective=preference)


@pytest.mark.parametrize("grouped", [False, True], ids=["pairs", "patients"])
def test_clipped_gradients_of_pairs_are_those_of_a_plain_loop(tmp_path: Path, *, grouped: bool) -> None:
    data, start = pairs(tmp_path), model_of(LLAMA, "causal-lm", LORA)
    reference = built(start)
    context = compared(moved(start), reference)
    model = context.model
    freeze = Freeze(model, [block for block in context.blocks if block.role == "adapter"])
    losses = -logsigmoid(BETA * margins(model, reference, data))
    each = [torch.autograd.grad(loss, freeze.parameters, retain_graph=True) for loss in losses]
    groups = Groups.of(PATIENTS) if grouped else None
    if groups:
        members = [[row for row in range(len(PAIRS)) if groups.numbers[row] == number] for number in range(3)]
        each = [tuple(torch.stack([each[row][at] for row in rows]).mean(0) for at in range(len(each[0])))
                for rows in members]  # fmt: skip
    norms = [float(torch.cat([part.flatten() for part in one]).norm()) for one in each]
    # Some are clipped, and some are not.
    clip = (min(norms) + max(norms)) / 2
    mechanism, most = Mechanism(sampling(len(each), None), clip, 1.0), groups and GroupSampling(groups, len(PAIRS))
    noisy = NoisyGradients(trainer_of(context), freeze, data.padded(), mechanism, NoiseSource(KEY), most)
    found = noisy.sums(torch.arange(len(each)))
    noisy.close()
    for place, total in enumerate(found):
        expected = sum(min(1.0, clip / norm) * one[place] for norm, one in zip(norms, each, strict=True))
        torch.testing.assert_close(total, torch.as_tensor(expected).double(), rtol=2e-3, atol=1e-5 * clip)


def test_rounded_figures_have_the_share_of_pairs_whose_chosen_answer_is_preferred(tmp_path: Path) -> None:
    data, start = pairs(tmp_path), model_of(LLAMA, "causal-lm", LORA)
    reference = built(start)
    context = compared(moved(start), reference)
    many = data.rows(torch.arange(len(PAIRS)).repeat(60))
    found = bounded_sums(context, many, torch.device("cpu"), lambda: None, OneRank()).figures(len(PAIRS) * 60)
    margin = margins(context.model, reference, data)
    assert found["accuracy"] == pytest.approx((margin > 0).double().mean().item(), abs=5 / 300)
    assert found["loss"] == pytest.approx(-logsigmoid(BETA * margin).mean().item(), abs=5 * 2 * np.log(2) / 300)
