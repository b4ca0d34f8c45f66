"""Membership inference: whether an example was trained on, by the loss of the model that the update leads to.

Loss threshold: Yeom et al. 2018, arXiv 1709.01604. Shadow models: the likelihood ratio of Carlini et al. 2022, arXiv
2112.03570, with few shadows, and one variance for all examples, as its authors do with few.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from sklearn.metrics import roc_auc_score

from attacks.site import Scope, Version, release
from common.arrays import Array
from tessera.shared.run_settings import Privacy
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.forward import forward, losses

TRAINING = {"batch_size": 25, "epochs": 30, "optimizer": "adamw", "learning_rate": 3e-3, "weight_decay": 0.0}
"""Long local training, which memorizes random labels."""
PRIVATE_EPOCHS = 8
"""Under privacy, more epochs add noise rather than memory."""


@dataclass(frozen=True)
class Membership:
    """The area under the ROC curve of both attacks. 0.5 is a guess."""

    threshold: float
    shadows: float


def membership(
    version: Version, pool: Dataset, scope: Scope, privacy: Privacy | None, models: int, seed: int
) -> Membership:
    """Attack each of `models` sites, which train on random halves of the pool, with the others as its shadows.

    An attacker who has other examples of the same kind trains such shadows by itself, with the settings of the run.
    """
    members = halves(pool.examples, models, seed)
    training = TRAINING if privacy is None else {**TRAINING, "epochs": PRIVATE_EPOCHS}
    measured = np.stack(
        [
            _confidences(version, pool, there, scope, privacy, training, seed + number)
            for number, there in enumerate(members)
        ]
    )  # [models, examples]
    scores = np.stack([likelihood_ratios(measured, members, number) for number in range(models)])
    return Membership(
        float(np.mean([roc_auc_score(there, row) for there, row in zip(members, measured, strict=True)])),
        float(np.mean([roc_auc_score(there, row) for there, row in zip(members, scores, strict=True)])),
    )


def halves(examples: int, models: int, seed: int) -> Array:
    """Draw the members of each model, a random half of the examples, bool [models, examples]."""
    rng = np.random.default_rng(seed)
    return np.stack([rng.permutation(examples) < examples // 2 for _ in range(models)])


def likelihood_ratios(measured: Array, members: Array, target: int) -> Array:
    """Return each example's log likelihood ratio of having been in the target model, [examples], by the confidences
    of all other models, [models, examples]. Zero for an example that all of them had, or none."""
    others = np.arange(len(measured)) != target
    there, values = members[others], measured[others]
    inside, outside = (_means(values, mask) for mask in (there, ~there))
    variance = np.nanmean((values - np.where(there, inside, outside)) ** 2)
    ratios = ((measured[target] - outside) ** 2 - (measured[target] - inside) ** 2) / (2 * variance)
    found: Array = np.nan_to_num(ratios)
    return found


def _means(values: Array, mask: Array) -> Array:
    """Return the means over the models of the mask, [examples]; not a number where it has none."""
    counts = mask.sum(axis=0)
    found: Array = np.where(counts, np.where(mask, values, 0).sum(axis=0) / np.maximum(counts, 1), np.nan)
    return found


def _confidences(
    version: Version,
    pool: Dataset,
    there: Array,
    scope: Scope,
    privacy: Privacy | None,
    training: Mapping[str, Any],
    seed: int,
) -> Array:
    """Return the logit of each example's probability of its label after training on some of them, [examples]."""
    data = pool.rows(torch.from_numpy(np.flatnonzero(there)))
    updated = release(version, data, scope, privacy=privacy, training=training, seed=seed).updated()
    head, batch = updated.model.head, {**pool.tensors, **pool.common}
    with torch.no_grad():
        loss = losses(forward(updated.build(), head, batch), head, batch["labels"]).double()
    right = torch.exp(-loss).clamp(1e-12, 1 - 1e-12)
    return torch.log(right / (1 - right)).numpy()
