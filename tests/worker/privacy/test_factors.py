"""Gradients as factors: their norms, scaled sums and projections are those of the gradients multiplied out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from tessera.worker.privacy import factors
from tessera.worker.privacy.factors import Factors, ProductFactors, RowFactors

DICE = torch.Generator().manual_seed(7)
EXAMPLES = 6


def outer(tokens: int = 5, *, size: float = 1.0) -> ProductFactors:
    left, right = (torch.randn(EXAMPLES, tokens, width, generator=DICE) * size for width in (4, 9))
    return ProductFactors(left, right)


def lookup(tokens: int = 5, *, size: float = 1.0) -> RowFactors:
    """With words that occur several times in a text."""
    index = torch.randint(0, 3, (EXAMPLES, tokens), generator=DICE)
    return RowFactors(index, torch.randn(EXAMPLES, tokens, 4, generator=DICE) * size, 7)


def exact(found: Factors) -> Tensor:
    """The gradients multiplied out in float64, [examples, rows, columns]."""
    if isinstance(found, ProductFactors):
        return ProductFactors(found.left.double(), found.right.double()).rows()
    assert isinstance(found, RowFactors)
    return RowFactors(found.index, found.outputs.double(), found.size).rows()


Make = Callable[..., Factors]
both = pytest.mark.parametrize("make", [outer, lookup])


@both
@pytest.mark.parametrize("tokens", [1, 5, 40])
@pytest.mark.parametrize("size", [1.0, 1e-18, 1e15])
@pytest.mark.parametrize("at_once", [1, 100, 1 << 20])
def test_norms_sums_and_projections_are_those_of_the_gradients(
    make: Make, tokens: int, size: float, at_once: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(factors, "AT_ONCE", at_once)
    found = make(tokens, size=size)
    rows = exact(found)
    scale = torch.rand(EXAMPLES, dtype=torch.float64, generator=DICE)
    direction = torch.randn(rows.shape[2], dtype=torch.float64, generator=DICE)
    assert len(found) == EXAMPLES
    assert torch.allclose(found.norms(), rows.flatten(1).norm(dim=1), rtol=1e-11, atol=0)
    wanted = torch.tensordot(scale, rows, dims=([0], [0]))
    assert float((found.total(scale) - wanted).norm() / wanted.norm()) < 1e-14
    assert torch.allclose(found.projected(direction), rows.sum(dim=0) @ direction, rtol=1e-9)


@both
def test_gradients_that_nearly_cancel_out_keep_their_norm(make: Make) -> None:
    """In float32 the products' difference would be nothing but rounding, and the gradient would not be clipped."""
    found = make(2)
    outputs = found.left if isinstance(found, ProductFactors) else found.outputs  # type: ignore[attr-defined]
    outputs[:, 1] = -outputs[:, 0] * (1 + 2.0**-18)
    if isinstance(found, ProductFactors):
        found.right[:, 1] = found.right[:, 0]
    else:
        found.index[:] = 1  # type: ignore[attr-defined]
    lengths = exact(found).flatten(1).norm(dim=1)
    assert float(lengths.max()) < 1e-3
    assert torch.allclose(found.norms(), lengths, rtol=2e-3, atol=0)


@both
def test_no_norm_is_too_small_where_roundings_are_as_large_as_the_square(make: Make) -> None:
    """Tokens cancel out in pairs, so that the gradient is some 2^-26 of theirs. It must be clipped all the same."""
    found, half = make(64), 32
    if isinstance(found, ProductFactors):
        # Of so few bits, factors and gradients are exact.
        for each in (found.left, found.right):
            each.mul_(100).round_()
        found.left[:, half:] = -found.left[:, :half] * (1 - 2.0**-13)
        found.right[:, half:] = found.right[:, :half] * (1 + 2.0**-13)
    elif isinstance(found, RowFactors):
        found.index[:] = 1
        found.outputs[:, half:] = -found.outputs[:, :half]
        found.outputs[:, 0] *= 2.0**-25
        found.outputs[:, half] = 0
    lengths = exact(found).flatten(1).norm(dim=1)
    assert bool((lengths > 0).all())
    assert bool((found.norms() >= lengths).all())


@both
def test_an_example_with_a_scale_of_zero_counts_as_zero_even_if_it_is_not_finite(make: Make) -> None:
    found = make()
    outputs = found.left if isinstance(found, ProductFactors) else found.outputs  # type: ignore[attr-defined]
    outputs[2], outputs[4, 1] = torch.inf, torch.nan
    lengths = found.norms()
    assert lengths.isfinite().tolist() == [True, True, False, True, False, True]
    scale = torch.where(lengths.isfinite(), 0.5, 0.0)
    total = found.total(scale)
    assert bool(total.isfinite().all())
    kept = exact(found)[lengths.isfinite()]
    assert torch.allclose(total, kept.sum(dim=0) / 2, rtol=1e-12)
    assert torch.equal(found.total(torch.zeros(EXAMPLES)), torch.zeros_like(total))


@both
def test_no_example_s_norm_depends_on_the_others(make: Make) -> None:
    found = make(24)
    alone = []
    for row in range(EXAMPLES):
        one = slice(row, row + 1)
        if isinstance(found, ProductFactors):
            alone.append(ProductFactors(found.left[one], found.right[one]).norms())
        elif isinstance(found, RowFactors):
            alone.append(RowFactors(found.index[one], found.outputs[one], found.size).norms())
    assert torch.allclose(found.norms(), torch.cat(alone), rtol=1e-14, atol=0)
