"""A private step takes the same passes, and reads from the device as rarely, whatever its examples are."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Self

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.model.selectors import EVERYTHING
from tessera.shared.privacy.noise import NoiseSource
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.groups import Groups
from tessera.worker.errors import DataError
from tessera.worker.privacy import dp_sgd, per_example_grads
from tessera.worker.privacy.dp_sgd import Mechanism, NoisyGradients
from tessera.worker.privacy.per_example_grads import BatchedGradients, HookedGradients, OneByOne, PerExample
from tessera.worker.privacy.pieces import GroupSampling
from tessera.worker.privacy.sampling import sampling
from tessera.worker.training.freeze import Freeze
from tessera.worker.training.optimization.micro_batch import PieceSize
from tests.support.tables import on_disk
from tests.worker.privacy.test_private_task import (
    GPT2,
    KEY,
    gradients_of,
    images,
    sentences,
    trainer_of,
    work_on,
)
from tests.worker.training.test_waits import Reads

EXAMPLES = 40


@pytest.fixture(autouse=True)
def _as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (per_example_grads, dp_sgd):
        monkeypatch.setattr(module, "is_here", lambda _: False)


def filled(size: int, data: Dataset) -> tuple[int, list[Tensor]]:
    """The number of values that one step reads whose sample is everything, in pieces of a size, and its gradients."""
    trainer = replace(trainer_of(work_on(), batch_size=EXAMPLES), piece_size=PieceSize(size, automatic=True))
    noisy, freeze = gradients_of(trainer, EVERYTHING, data)
    assert noisy.method == "opacus"
    with Reads() as reads:
        noisy.fill()
    noisy.close()
    return reads.count, [parameter.grad for parameter in freeze.parameters if parameter.grad is not None]


def test_a_private_step_reads_no_more_for_more_pieces() -> None:
    few, many = filled(EXAMPLES, images()), filled(3, images())
    assert few[0] == many[0]
    # A sum about halfway between two points of the grid, 1.2e-5 apart, may be rounded to either.
    assert all(torch.allclose(a, b, atol=1.3e-5) for a, b in zip(few[1], many[1], strict=True))


def odd_images(row: int, kind: str) -> Dataset:
    """Images of which one is odd."""
    data = images()
    pixels, labels = data.tensors["pixel_values"], data.tensors["labels"]
    if kind in ODD_PIXELS:
        pixels[row] = ODD_PIXELS[kind]
    if kind == "of an unknown class":
        labels[row] = 99
    if kind != "unreadable":
        return data

    def read(places: Sequence[int]) -> Tensor:
        if row in places:
            raise DataError("gone")
        return pixels[list(places)]

    return on_disk({"labels": labels}, read, pixels.shape[1:])


ODD_PIXELS = {"not a number": torch.nan, "infinite": torch.inf, "overflowing": 3e38}
ODD_KINDS = [*ODD_PIXELS, "of an unknown class", "unreadable"]
METHODS: dict[str, type[PerExample]] = {"opacus": HookedGradients, "vmap": BatchedGradients, "one by one": OneByOne}


def summed(data: Dataset, method: str, *, grouped: bool, units: Tensor) -> tuple[int, list[Tensor]]:
    """The passes through the model, forward and backward, that the sum over some units takes, and the sum."""
    trainer = replace(trainer_of(work_on()), piece_size=PieceSize(13, automatic=True))
    freeze = Freeze(trainer.context.model, EVERYTHING.resolve(trainer.context.blocks))
    groups = Groups.of([b"%02d" % (row // 4) for row in range(EXAMPLES)])
    unit = GroupSampling(groups, most=4) if grouped else None
    how = Mechanism(sampling(groups.count if grouped else EXAMPLES, None), 0.5, 1.0)
    noisy = NoisyGradients(trainer, freeze, data, how, NoiseSource(KEY), unit)
    if method == "one by one":
        noisy._method.close()
        noisy._method, noisy._at_once = noisy._alone, 1
    elif method == "vmap":
        noisy._method.close()
        noisy._method = BatchedGradients(trainer.context.model, trainer.loss, freeze.parameters, {})
    assert isinstance(noisy._method, METHODS[method])
    with Passes(trainer.context.model) as passes:
        found = noisy.sums(units)
    noisy.close()
    return passes.count, found


class Passes:
    """Counts the calls of a model, and of the backward pass of the gradients' methods that have one."""

    def __init__(self, model: nn.Module) -> None:
        self.count = 0
        self._model = model

    def __enter__(self) -> Self:
        def counted(*_: object) -> None:
            self.count += 1

        head = next(module for module in reversed(list(self._model.modules())) if isinstance(module, nn.Linear))

        def after(_: nn.Module, __: object, output: Tensor) -> None:
            counted()
            if output.requires_grad:
                # It is run once for each backward pass. Within vmap no hook can be.
                output.register_hook(counted) if not torch._C._functorch.is_batchedtensor(output) else None

        self._handles = [self._model.register_forward_pre_hook(counted), head.register_forward_hook(after)]
        return self

    def __exit__(self, *_: object) -> None:
        for handle in self._handles:
            handle.remove()


@pytest.mark.parametrize("grouped", [False, True], ids=["examples", "groups"])
@pytest.mark.parametrize("method", METHODS)
def test_no_odd_example_costs_a_further_pass(method: str, *, grouped: bool) -> None:
    # Without the odd one, these 14 examples, or four groups of four, would be one piece of 13 rows in place of two.
    units = torch.arange(4 if grouped else 14)
    passes, _ = summed(images(), method, grouped=grouped, units=units)
    assert passes >= (14 if method == "one by one" else 2)
    others = units[units != (1 if grouped else 4)]
    # A group counts as zero with an example whose gradient is not finite, and goes on without one that has none.
    _, without = summed(images(), method, grouped=grouped, units=others)
    for kind in ODD_KINDS:
        count, found = summed(odd_images(4, kind), method, grouped=grouped, units=units)
        assert count == passes, kind
        if not grouped or kind in ODD_PIXELS:
            assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, without, strict=True)), kind


def test_no_version_makes_an_example_cost_a_further_pass() -> None:
    """A row of a table overflows for one word, or gives gradients of which no squares or sums are finite."""
    for value in (3e38, 1e30, 1e12):
        counts = []
        for word in (19, 5):
            context = work_on(GPT2, "causal-lm")
            with torch.no_grad():
                context.model.get_input_embeddings().weight[19] = value
            data = sentences()
            data.tensors["input_ids"][data.tensors["input_ids"] == 19] = 5
            data.tensors["input_ids"][3, 2] = word
            noisy, _ = gradients_of(trainer_of(context), EVERYTHING, data)
            with Passes(context.model) as passes:
                noisy.sums(torch.arange(12))
            noisy.close()
            counts.append(passes.count)
        assert counts[0] == counts[1] > 0, value


def test_the_fast_gradients_read_nothing_from_the_device() -> None:
    layer = nn.Linear(4, 3, device="meta")
    hooked = HookedGradients(layer, lambda batch: layer(batch["x"]).sum(dim=1), list(layer.parameters()))
    gradients, fits = hooked.unchecked({"x": torch.zeros(5, 4, device="meta")})
    assert [tuple(each.shape) for each in gradients] == [(5, 3, 4), (5, 3)]
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        bool(fits)
    hooked.close()
