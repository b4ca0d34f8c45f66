"""The one-run canary audit: a lower bound of epsilon from a single update.

Steinke, Nasr and Jagielski 2023, arXiv 2305.08846, algorithm 1 and theorem 5.2. Each of m canaries is in the data by
a fair coin. The auditor sees the version, the settings, all canaries and the update, and guesses for some of them
whether they are in. Under (epsilon, delta) few guesses can be right; the bound is the largest epsilon that the number
of right guesses excludes at the stated confidence.

The number of guesses is fixed before any data are seen, from the noise alone, so that one test is made, not several.
An example that is out has a label that the loss ignores, so that its gradient is zero and n stays: the neighbours
that the guarantee is about.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from statistics import NormalDist
from typing import Any

import numpy as np
import torch
from scipy.stats import binom

from attacks.site import ONE_STEP, Release, Scope, Version, release
from common.arrays import Array
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Budget, Privacy
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import read_block
from tessera.worker.model.forward import IGNORED, forward, losses
from tessera.worker.privacy.accountant import noise_multiplier

DELTA = 1e-6
LARGEST = 50.0
"""The largest epsilon that is considered."""
RIDGE = 1e-9
"""Ridge of the least squares for an update without noise, as a share of the mean squared gradient: above rounding."""


# ---------------------------------------------------------------- statistics


def lower_bound(canaries: int, guesses: int, right: int, delta: float, confidence: float) -> float:
    """Return the epsilon that `right` of `guesses` exclude: every (epsilon, delta) below it has a chance of at most
    1 - confidence of as many right guesses. Zero if none is excluded."""
    low, high = 0.0, LARGEST
    if chance(canaries, guesses, right, low, delta) > 1 - confidence:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        excluded = chance(canaries, guesses, right, middle, delta) <= 1 - confidence
        low, high = (middle, high) if excluded else (low, middle)
    return low


def chance(canaries: int, guesses: int, right: int, epsilon: float, delta: float) -> float:
    """Return an upper bound of the probability of `right` or more right guesses under (epsilon, delta)."""
    best = 1 / (1 + math.exp(-epsilon))
    tails = binom.sf(np.arange(right, -1, -1) - 1, guesses, best)  # of right, right - 1, ..., 0 or more
    # By delta, some guesses may be right with certainty: i of them with a probability of 2 m delta / i at most.
    extra = np.max((tails[1:] - tails[0]) / np.arange(1, right + 1), initial=0.0)
    return float(min(1.0, tails[0] + 2 * canaries * delta * extra))


def planned_guesses(canaries: int, noise: float, delta: float, confidence: float) -> int:
    """Return the number of guesses that promises the largest bound where a canary moves its score by one over this
    noise, from the noise alone. All canaries without noise."""
    if not noise:
        return canaries
    counts = range(10, canaries + 1, max(1, canaries // 50))
    return max(counts, key=lambda count: promised_bound(canaries, count, noise, delta, confidence))


def promised_bound(canaries: int, guesses: int, noise: float, delta: float, confidence: float) -> float:
    """Return the bound if each score is a canary's coin, from 0 to 1, with normal noise, and the most certain are
    guessed."""
    half, normal = 1 / (2 * noise), NormalDist()

    def beyond(distance: float) -> tuple[float, float]:
        """The shares of canaries that are guessed right and wrong beyond a distance from the middle."""
        return 1 - normal.cdf(distance - half), 1 - normal.cdf(distance + half)

    low, high = 0.0, 20.0
    for _ in range(50):
        middle = (low + high) / 2
        low, high = (middle, high) if sum(beyond(middle)) > guesses / canaries else (low, middle)
    right, wrong = beyond(low)
    return lower_bound(canaries, guesses, round(guesses * right / (right + wrong)), delta, confidence)


# ---------------------------------------------------------------- the audit


@dataclass(frozen=True)
class Audit:
    """What one run of the audit found."""

    canaries: int
    guesses: int
    right: int
    delta: float

    def bound(self, confidence: float) -> float:
        """Return the lower bound of epsilon at this confidence."""
        return lower_bound(self.canaries, self.guesses, self.right, self.delta, confidence)


Evidence = Callable[[Release, Dataset, Privacy | None], Array]
"""A function from an update to how much it speaks for each canary, [canaries]: positive for one that is rather in."""


def audit(
    version: Version,
    canaries: Dataset,
    scope: Scope,
    privacy: Privacy | None,
    guesses: int,
    seed: int,
    evidence: Evidence,
    training: Mapping[str, Any] = ONE_STEP,
) -> Audit:
    """Run the audit on one release. `seed` determines the coins and the noise."""
    coins = np.random.default_rng(seed).random(canaries.examples) < 0.5
    labels = torch.where(torch.from_numpy(coins), canaries.tensors["labels"], IGNORED)
    data = replace(canaries, tensors={**canaries.tensors, "labels": labels})
    released = release(version, data, scope, privacy=privacy, training=training, seed=seed)
    scores = evidence(released, canaries, privacy)
    guessed = np.argsort(-np.abs(scores), kind="stable")[:guesses]
    delta = privacy.delta if privacy else DELTA
    return Audit(canaries.examples, guesses, int(((scores > 0) == coins)[guessed].sum()), delta)


def noise_of(privacy: Privacy | None) -> float:
    """Return the noise multiplier of one step over all examples, in which the run ends; 0 without privacy."""
    if privacy is None:
        return 0.0
    return noise_multiplier(Budget(epsilon=privacy.epsilon, delta=privacy.delta), [], 1.0, 1)


def by_gradients(gradients: Array, released: Release, canaries: Dataset, privacy: Privacy | None) -> Array:
    """Return the evidence for any canaries and blocks, after one step over all examples, by the gradient of each
    over the blocks that were sent, [canaries, values], in the order of their names.

    The best linear estimate of the coins, which are 0 or 1 with a variance of 1/4, from their gradients' noisy sum.
    """
    total = np.concatenate([released.gradients[name].ravel() for name in sorted(released.steps)]) * released.examples
    if privacy is None:
        # The mean is over the canaries that are in, of an unknown number: the scale of the coins is unknown.
        products = gradients @ gradients.T
        products[np.diag_indices_from(products)] += RIDGE * np.trace(products) / len(products)
        scaled = np.linalg.solve(products, gradients @ total)
        centred: Array = scaled - scaled.mean()
        return centred
    clipped = gradients * np.minimum(1, privacy.clip_norm / np.linalg.norm(gradients, axis=1, keepdims=True))
    products = clipped @ clipped.T
    products[np.diag_indices_from(products)] += 4 * (noise_of(privacy) * privacy.clip_norm) ** 2
    found: Array = np.linalg.solve(products, clipped @ (total - clipped.sum(axis=0) / 2))
    return found


def by_rows(released: Release, canaries: Dataset, privacy: Privacy | None) -> Array:
    """Return the evidence for canaries of one word each, if the word embeddings alone were trained.

    All gradient of a canary is in its word's row, so that one backward pass gives the gradients of all.
    """
    (name,) = released.steps
    model = released.version.build()
    batch = {**canaries.tensors}
    head = released.version.model.head
    losses(forward(model, head, batch), head, batch["labels"]).sum().backward()  # type: ignore[no-untyped-call]
    gradient = dict(model.named_parameters())[name].grad
    assert gradient is not None  # noqa: S101 (for the types)
    words = canaries.tensors["input_ids"][:, 0]
    rows = gradient[words].double().numpy()  # [canaries, width]
    lengths = np.linalg.norm(rows, axis=1)
    moved = (released.gradients[name][words.numpy()] * rows).sum(axis=1) / lengths * released.examples
    if privacy is None:
        return np.asarray(moved / lengths - np.mean(moved / lengths))
    return np.asarray(moved - np.minimum(lengths, privacy.clip_norm) / 2)


def gradients_of(version: Version, data: Dataset, blocks: Sequence[Block]) -> Array:
    """Return each example's gradient over these blocks, in the order of their names, float64 [examples, values]."""
    model, head = version.build(), version.model.head
    ordered, rows = sorted(blocks, key=attrgetter("name")), []
    for place in range(data.examples):
        index = torch.tensor([place])
        batch = {name: tensor[index] for name, tensor in data.tensors.items()} | dict(data.common)
        model.zero_grad()
        losses(forward(model, head, batch), head, batch["labels"]).sum().backward()  # type: ignore[no-untyped-call]
        parts = {name: tensor.grad for name, tensor in model.named_parameters() if tensor.grad is not None}
        rows.append(np.concatenate([read_block(parts, block).ravel() for block in ordered]).astype(np.float64))
    return np.stack(rows)


# ---------------------------------------------------------------- canaries of one word


def one_word_canaries(count: int, seed: int) -> tuple[Version, Dataset]:
    """Return the strongest canaries, each a text of a word of its own, of whose embedding alone it moves the row,
    with a version to train the word embeddings of."""
    config = {
        "model_type": "bert", "vocab_size": count + 1, "hidden_size": 4, "num_hidden_layers": 1,
        "num_attention_heads": 1, "intermediate_size": 4, "max_position_embeddings": 2, "num_labels": 2,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    words = torch.arange(1, count + 1).unsqueeze(1).expand(-1, 2).contiguous()
    canaries = Dataset({"input_ids": words, "labels": torch.arange(count) % 2})
    return Version.of(config, "text-classification", seed), canaries
