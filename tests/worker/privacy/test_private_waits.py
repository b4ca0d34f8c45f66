"""A private step reads from the device once, however many pieces its sample has."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from tessera.shared.model.selectors import EVERYTHING
from tessera.worker.data.dataset import Dataset
from tessera.worker.privacy import dp_sgd, per_example_grads
from tessera.worker.privacy.per_example_grads import Hooked
from tessera.worker.training.optimization.micro_batch import PieceSize
from tests.worker.privacy.test_private_task import gradients_of, images, trainer_of, work_on
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


def test_pieces_that_are_read_too_late_are_computed_again() -> None:
    data = images()
    data.tensors["pixel_values"][[4, 17]] = torch.inf
    known = data.rows(torch.tensor([row for row in range(EXAMPLES) if row not in (4, 17)]))
    trainer = replace(trainer_of(work_on()), piece_size=PieceSize(8, automatic=True))
    noisy, _ = gradients_of(trainer, EVERYTHING, data)
    found = noisy.sums(torch.arange(EXAMPLES))
    unchecked, unread = noisy.unchecked_sums(torch.arange(EXAMPLES))
    noisy.close()
    # Of five pieces of eight, the first and the third are left out at first.
    assert [bool(piece.right) for piece in unread] == [False, True, False, True, True]
    wanted, _ = gradients_of(trainer_of(work_on()), EVERYTHING, known)
    alone = wanted.sums(torch.arange(len(known.tensors["labels"])))
    assert all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(found, alone, strict=True))
    assert not all(torch.allclose(a, b, rtol=1e-4, atol=1e-6) for a, b in zip(unchecked, alone, strict=True))
    wanted.close()


def test_the_fast_gradients_read_nothing_from_the_device() -> None:
    layer = nn.Linear(4, 3, device="meta")
    hooked = Hooked(layer, lambda batch: layer(batch["x"]).sum(dim=1), list(layer.parameters()))
    gradients, right = hooked.unchecked({"x": torch.zeros(5, 4, device="meta")})
    assert [tuple(each.shape) for each in gradients] == [(5, 3, 4), (5, 3)]
    assert right is not None
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"):
        bool(right)
    hooked.close()
