"""DP-SGD on whatever a phase trains (Abadi et al. 2016, arXiv 1607.00133, algorithm 1).

Each example is in a step's batch by a throw of the dice of its own, its gradient over all that trains is clipped to
one norm, Gaussian noise goes on the sum, and the sum is divided by the number of examples that a batch is expected to
have, since the number that it has is private. Needs the extra `privacy`.
"""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from shared.methods.contract import WorkerHalf
from worker.data import Dataset
from worker.forward import losses
from worker.freezing import Freeze
from worker.perexample import EXACT, ROUGH, Batch, Gradients, at_once, fastest, norms
from worker.trainer import Trainer, autocast


class Dice:
    """Randomness that nobody outside this process can know or find out by trying.

    The run's seed will not do: the coordinator knows it, and would take the noise off again. Nor will torch's
    generator on the CPU, which keeps 32 bits of any seed.
    """

    def __init__(self, device: torch.device, entropy: bytes) -> None:
        own, seeds = np.random.SeedSequence(int.from_bytes(entropy)).spawn(2)
        self._numpy = np.random.default_rng(own)
        self._device = device
        noise, other = (int(seed >> 1) for seed in seeds.generate_state(2, np.uint64))
        # On a GPU torch keeps 64 bits, and the noise need not be carried there.
        self._torch = torch.Generator(device).manual_seed(noise) if device.type == "cuda" else None
        self.seed = other
        """For what is not noise, such as dropout."""

    def sample(self, examples: int, rate: float) -> Tensor:
        """The examples of one Poisson sample, int64 [sampled]."""
        if rate >= 1:
            return torch.arange(examples)
        return torch.from_numpy(np.flatnonzero(self._numpy.random(examples) < rate))

    def normal(self, shape: Sequence[int]) -> Tensor:
        """Standard normal, float32, on the device."""
        if self._torch is not None:
            return torch.randn(tuple(shape), generator=self._torch, device=self._device)
        return torch.from_numpy(self._numpy.standard_normal(tuple(shape), dtype=np.float32)).to(self._device)

    def gumbel(self, count: int) -> np.ndarray:
        """Standard Gumbel, float64 [count]."""
        return self._numpy.gumbel(size=count)


def secret_dice(device: torch.device) -> Dice:
    return Dice(device, os.urandom(32))


@dataclass(frozen=True)
class Sampling:
    """How batches are drawn: each of `examples` with probability `rate`, `steps` times an epoch."""

    examples: int
    rate: float
    steps: int

    @property
    def expected(self) -> float:
        return self.rate * self.examples


def sampling(examples: int, batch_size: int | None) -> Sampling:
    """As many steps as there are batches of this size, and as many examples in each, on average."""
    size = min(batch_size or examples, examples)
    return Sampling(examples, size / examples, math.ceil(examples / size))


@dataclass(frozen=True)
class Mechanism:
    """The Gaussian mechanism on sums of clipped gradients."""

    sampling: Sampling
    clip_norm: float
    noise_multiplier: float


def clipped_sum(gradients: Gradients, clip_norm: float) -> list[Tensor]:
    """For each parameter the sum over the examples of their gradients, each scaled down to `clip_norm` where it is
    longer: over all parameters together, so that one example more or less moves the sums by no more than `clip_norm`
    in l2. A gradient that is no number counts as zero."""
    lengths = norms(gradients)  # [examples]
    scale = torch.where(lengths.isfinite(), clip_norm / lengths.clamp(min=clip_norm), 0.0)
    return [
        torch.tensordot(scale, gradient.float().nan_to_num(0.0, 0.0, 0.0), dims=([0], [0])) for gradient in gradients
    ]


class NoisyGradients:
    """Gives the parameters of a phase noisy gradients, a Poisson sample for each `fill`. `close` it when done."""

    def __init__(self, trainer: Trainer, freeze: Freeze, dataset: Dataset, mechanism: Mechanism, dice: Dice) -> None:
        self.steps = mechanism.sampling.steps
        """Steps of one epoch."""
        self._freeze = freeze
        self._dataset = dataset
        self._mechanism = mechanism
        self._dice = dice
        self._device = trainer.device
        self._common = {name: tensor.to(trainer.device) for name, tensor in dataset.common.items()}
        model = trainer.work.model
        for module in model.modules():
            # It would mix examples with each other, and its statistics are raw data.
            if isinstance(module, _BatchNorm):
                module.eval()
        half, work = trainer.half, trainer.work

        def loss(batch: Batch) -> Tensor:
            with autocast(trainer.training, trainer.device):
                return half.loss(work, batch)

        def each(batch: Batch) -> Tensor:
            with autocast(trainer.training, trainer.device):
                return losses(work.forward(batch), work.head, batch["labels"])

        plain = type(half).loss is WorkerHalf.loss
        sample = self._rows(torch.tensor(sorted({0, dataset.examples - 1})))
        exact = trainer.training.precision == "float32" and all(p.dtype.itemsize >= 4 for p in freeze.parameters)
        tolerance = EXACT if exact else ROUGH
        self._way = fastest(model, loss, each if plain else None, freeze.parameters, self._common, sample, tolerance)
        self._at_once = at_once(self._way, freeze.parameters)

    @property
    def way(self) -> str:
        """How the gradients of single examples are found."""
        return self._way.name

    def _rows(self, rows: Tensor) -> dict[str, Tensor]:
        return {name: tensor[rows].to(self._device) for name, tensor in self._dataset.tensors.items()}

    def fill(self) -> None:
        """Sets each parameter's gradient to the noisy mean of clipped ones; frozen rows get neither."""
        mechanism = self._mechanism
        rows = self._dice.sample(self._dataset.examples, mechanism.sampling.rate)
        deviation = mechanism.noise_multiplier * mechanism.clip_norm
        for parameter, clean in zip(self._freeze.parameters, self.sums(rows), strict=True):
            noisy = clean + deviation * self._dice.normal(clean.shape)
            parameter.grad = (noisy / mechanism.sampling.expected).to(parameter.dtype)
        self._freeze.mask_gradients()

    def sums(self, rows: Tensor) -> list[Tensor]:
        """For each parameter the sum of these examples' clipped gradients, without any noise. `rows`, int64
        [sampled], may be none at all."""
        sums = [torch.zeros_like(parameter, dtype=torch.float32) for parameter in self._freeze.parameters]
        for some in torch.split(rows, self._at_once) if len(rows) else ():
            gradients = self._way(self._rows(some))
            for parameter, gradient in zip(self._freeze.parameters, gradients, strict=True):
                self._freeze.mask(parameter, gradient)
            for total, part in zip(sums, clipped_sum(gradients, self._mechanism.clip_norm), strict=True):
                total.add_(part)
        return sums

    def close(self) -> None:
        self._way.close()
