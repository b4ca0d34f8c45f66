"""Rounded sums, of which figures follow, and the sums of labels that are numbers rather than classes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from statistics import fmean

import torch
from torch import Tensor
from torch.nn.functional import binary_cross_entropy_with_logits

from tessera.shared.privacy.discrete_gaussian import discrete_gaussian
from tessera.shared.privacy.noise import NoiseSource
from tessera.worker.training.ranks import Ranks
from tessera.worker.training.tallies import ExampleFigures

STEP = 5
"""The step of a rounded sum, in units of the most that replacing one example changes."""

GRID = 1024
"""Parts of the most that one example changes, to which a sum is rounded before it gets noise of whole parts."""

LEAST_OF_CLASS = 50
"""Fewest examples for each class, on average, whose macro F1 leaves: ten steps."""

LEAST_FOR_R2 = 1_000
"""Fewest examples whose coefficient of determination leaves. With fewer a step is a twentieth of the variance."""

FARTHEST = 3.0
"""The bound on an error and on a target, in deviations of the targets."""


@dataclass(frozen=True)
class FigureNoise:
    """Noise for the figures of one evaluation, which costs `rho` in zCDP."""

    rho: float
    source: NoiseSource


@dataclass(frozen=True)
class Leaving:
    """A sum that leaves. Replacing one example moves each value by at most `most`, and all of them together by a
    distance whose square is `squares`, in units of `most`."""

    sums: Tensor
    most: float
    squares: int = 1


def rounded_sums(leaving: Mapping[str, Leaving], noise: FigureNoise | None) -> dict[str, Tensor]:
    """Return sums rounded to steps, with noise for all of them together."""
    found = {name: each.sums for name, each in leaving.items()}
    if noise:
        # Rounding to the grid may move a value by one more part.
        distance = (GRID + 1) * math.sqrt(sum(each.squares for each in leaving.values()))
        deviation = math.ceil(distance / math.sqrt(2 * noise.rho))
        found = {name: _noisy(each, deviation, noise.source) for name, each in leaving.items()}
    steps = {name: STEP * each.most for name, each in leaving.items()}
    return {name: (sums / steps[name]).round() * steps[name] for name, sums in found.items()}


def _noisy(leaving: Leaving, deviation: int, source: NoiseSource) -> Tensor:
    """Return sums with noise of this standard deviation, in parts of the grid."""
    sums, most = leaving.sums, leaving.most
    noise = torch.from_numpy(discrete_gaussian(source, deviation, sums.numel())).view(sums.shape)
    return ((sums / most * GRID).round() + noise) * (most / GRID)


class RoundedSums:
    """Sums over examples, and beside them the sums of further figures, for which each example has a value."""

    own = ExampleFigures({})

    def rounded_with(self, leaving: Mapping[str, Leaving], noise: FigureNoise | None) -> dict[str, Tensor]:
        """Return all sums rounded, with noise for all of them together."""
        ranges = self.own.ranges
        # Replacing one example moves a sum by the range of its value.
        own = {name: Leaving(each, ranges[name][1] - ranges[name][0]) for name, each in self.own.sums().items()}
        return rounded_sums({**leaving, **own}, noise)


class LabelSums(RoundedSums):
    """Sums over examples that have several labels each. An example adds at most one to each count of a label."""

    def __init__(self, labels: int) -> None:
        self.clip = 2 * math.log(2)
        """The largest loss of a label, and the loss of an example that cannot be scored: twice that of a guess."""
        self.misses = 0
        self.loss = torch.zeros((), dtype=torch.float64)
        self.by_label = torch.zeros(3, labels, dtype=torch.float64)
        """Of each label, [3, labels]: its hits, its predictions and its examples."""

    def add(self, logits: Tensor, true: Tensor) -> None:
        """Add examples by their logits and labels, [examples, labels]."""
        logits, labels = logits.detach().cpu().double(), true.cpu() > 0.5
        losses = binary_cross_entropy_with_logits(logits, labels.double(), reduction="none")
        self.loss += torch.where(losses.isfinite(), losses, self.clip).clamp(0, self.clip).mean(dim=1).sum()
        made = logits > 0
        self.by_label += torch.stack([labels & made, made, labels]).sum(dim=1)

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        self.misses = ranks.examples(self.misses)
        self.loss, self.by_label = ranks.total(self.loss), ranks.total(self.by_label)

    def leaving(self, examples: int) -> dict[str, Leaving]:
        """Return the sums over these examples that may leave, by name."""
        labels = self.by_label.shape[1]
        found = {
            # The mean over labels: an example adds at most one to each of three sums.
            "together": Leaving(self.by_label.sum(dim=1) / labels, 1.0, 3),
            "loss": Leaving(self.loss + self.misses * self.clip, self.clip),
        }
        if examples >= LEAST_OF_CLASS * labels:
            found["by_label"] = Leaving(self.by_label, 1.0, 3 * labels)
        return found

    def figures(
        self, examples: int, noise: FigureNoise | None = None, ignored: tuple[int, ...] = ()
    ) -> dict[str, float]:
        """Return the clipped `loss`, the `micro_f1` and, of enough examples, the `macro_f1`, without labels at the
        places `ignored`."""
        rounded = self.rounded_with(self.leaving(examples), noise)
        sums = {name: each.clamp(min=0) for name, each in rounded.items()}
        found = {"loss": min(self.clip, float(sums["loss"]) / examples)}
        hits, made, true = sums["together"].tolist()
        if made + true:
            found["micro_f1"] = min(1.0, 2 * hits / (made + true))
        by_label = sums["by_label"].T.tolist() if "by_label" in sums else []
        occurring = [each for n, each in enumerate(by_label) if each[1] + each[2] and n not in ignored]
        if occurring:
            found["macro_f1"] = fmean(min(1.0, 2 * hits / (made + true)) for hits, made, true in occurring)
        return found | self.own.means(examples, rounded)


class TargetSums(RoundedSums):
    """Sums over the examples of a regression, whose errors and targets are clipped to `FARTHEST` deviations."""

    def __init__(self, deviation: float) -> None:
        self.misses = 0
        self._deviation = deviation
        self.sums = torch.zeros(4, dtype=torch.float64)
        """Of absolute errors, squared errors, targets and squared targets, all standardised."""

    def add(self, outputs: Tensor, true: Tensor) -> None:
        """Add examples by their outputs [examples, 1] and targets [examples]."""
        made, targets = (each.detach().cpu().double().reshape(-1) for each in (outputs, true))
        targets = targets.nan_to_num(nan=0.0).clamp(-FARTHEST, FARTHEST)
        errors = (made - targets).abs().nan_to_num(nan=FARTHEST).clamp(max=FARTHEST)
        self.sums += torch.stack([errors, errors.square(), targets, targets.square()]).sum(dim=1)

    def sum_over(self, ranks: Ranks) -> None:
        """Add the sums of all ranks."""
        self.misses, self.sums = ranks.examples(self.misses), ranks.total(self.sums)

    def leaving(self, examples: int) -> dict[str, Leaving]:
        """Return the sums over these examples that may leave, by name."""
        absolute, squared, targets, spread = self.sums
        found = {
            "absolute": Leaving(absolute + self.misses * FARTHEST, FARTHEST),
            "squared": Leaving(squared + self.misses * FARTHEST**2, FARTHEST**2),
        }
        if examples >= LEAST_FOR_R2:
            found |= {"targets": Leaving(targets, 2 * FARTHEST), "spread": Leaving(spread, FARTHEST**2)}
        return found

    def figures(
        self, examples: int, noise: FigureNoise | None = None, ignored: tuple[int, ...] = ()
    ) -> dict[str, float]:
        """Return the clipped `loss` and `mae` and, of enough examples whose targets differ, the `r2`. No class is
        `ignored`."""
        rounded = self.rounded_with(self.leaving(examples), noise)
        sums = {name: float(each) for name, each in rounded.items()}
        absolute, squared = max(0.0, sums["absolute"]), max(0.0, sums["squared"])
        found = {
            "loss": min(FARTHEST**2, squared / examples),
            "mae": min(FARTHEST, absolute / examples) * self._deviation,
        }
        if "spread" in sums and (spread := sums["spread"] - sums["targets"] ** 2 / examples) > 0:
            found["r2"] = 1 - squared / spread
        return found | self.own.means(examples, rounded)
