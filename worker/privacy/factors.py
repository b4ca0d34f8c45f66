"""Per-example gradients of a matrix as factors: a layer's inputs, and the gradients of its outputs.

The gradient of one example in a matrix is a sum of outer products over the example's tokens. Its norm, and the scaled
sum over a batch that clipping needs, follow from the factors (Goodfellow 2015, arXiv 1510.01799; Li et al. 2022,
arXiv 2110.05679; Bu et al. 2023, arXiv 2210.00038). The gradients themselves would take the memory of a model for
each example, and more time to write and read than the factors take to multiply.

Everything is computed in float64. There products of float32 values are exact, so that norms and sums belong to the
same gradients but for float64's roundings, and no example's factor depends on another example. Where an example's
tokens cancel out, the roundings of a squared norm may be larger than the square itself, so a bound on them is added:
a norm that is too small would leave a gradient unclipped.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property

import torch
from torch import Tensor

AT_ONCE = 1 << 20
"""Number of values that are converted to float64 at a time: they stay in the processor's cache."""

ROUNDING = 2.0**-52
"""Twice the most by which one operation in float64 is off, as a share of its result."""


class Factors(ABC):
    """The gradients of a batch's examples in one matrix."""

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of examples."""

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """The memory of the factors."""

    @cached_property
    def _lengths(self) -> tuple[Tensor, Tensor]:
        norms, sizes = zip(*self._lengths_of_some(), strict=True)
        return torch.cat(norms), torch.cat(sizes)

    @abstractmethod
    def _lengths_of_some(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield `_lengths` of some examples after the other."""

    def norms(self) -> Tensor:
        """Return the l2 norm of each example's gradient, float64 [examples], never less than the exact one."""
        return self._lengths[0]

    def sizes(self) -> Tensor:
        """Return the sum of the norms of each example's outer products, float64 [examples]: roundings are a share of
        this, also where the outer products cancel out."""
        return self._lengths[1]

    @abstractmethod
    def total(self, scale: Tensor) -> Tensor:
        """Return the sum of the gradients, each times its `scale`, float64 [examples], in the matrix' shape, float64.

        An example with a scale of 0 counts as 0 even if its gradient is not finite.
        """

    @abstractmethod
    def projected(self, direction: Tensor) -> Tensor:
        """Return the product of the gradients' sum, [rows, columns], with a `direction` [columns]."""

    @abstractmethod
    def rows(self) -> Tensor:
        """Return the gradients, [examples, rows, columns]."""


@dataclass(frozen=True)
class ProductFactors(Factors):
    """Sums of outer products: of each token's `left`, [examples, tokens, rows], and `right`, [examples, tokens,
    columns]."""

    left: Tensor
    right: Tensor

    def __len__(self) -> int:
        return len(self.left)

    @property
    def nbytes(self) -> int:
        return self.left.nbytes + self.right.nbytes

    def _lengths_of_some(self) -> Iterator[tuple[Tensor, Tensor]]:
        width = self.left.shape[2] + self.right.shape[2]
        for left, right in self._exact():
            yield _lengths((left @ left.mT).mul_(right @ right.mT), width)

    def total(self, scale: Tensor) -> Tensor:
        total = scale.new_zeros(self.left.shape[2], self.right.shape[2], dtype=torch.float64)
        place = 0
        for left, right in self._exact():
            factor = scale[place : place + len(left)]
            place += len(left)
            for factors in (left, right):
                factors[factor == 0] = 0.0
            narrow = left if left.shape[2] < right.shape[2] else right
            narrow.mul_(factor[:, None, None])
            total.addmm_(left.flatten(0, 1).mT, right.flatten(0, 1))
        return total

    def projected(self, direction: Tensor) -> Tensor:
        along = self.right.to(direction.dtype) @ direction  # [examples, tokens]
        return self.left.to(direction.dtype).flatten(0, 1).mT @ along.flatten()

    def rows(self) -> Tensor:
        dtype = torch.promote_types(self.left.dtype, self.right.dtype)
        return self.left.mT.to(dtype) @ self.right.to(dtype)

    def _exact(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the factors of some examples after the other, in float64, as new tensors."""
        each = max(1, AT_ONCE // max(1, self.left[0].numel() + self.right[0].numel())) if len(self) else 1
        for left, right in zip(torch.split(self.left, each), torch.split(self.right, each), strict=True):
            yield left.to(torch.float64, copy=True), right.to(torch.float64, copy=True)


@dataclass(frozen=True)
class RowFactors(Factors):
    """Rows of a table, looked up by their `index`, int64 [examples, tokens], with the gradient of each, `outputs`
    [examples, tokens, columns]."""

    index: Tensor
    outputs: Tensor
    size: int
    """The table's rows."""

    def __len__(self) -> int:
        return len(self.index)

    @property
    def nbytes(self) -> int:
        return self.index.nbytes + self.outputs.nbytes

    def _lengths_of_some(self) -> Iterator[tuple[Tensor, Tensor]]:
        width = self.outputs.shape[2]
        for index, outputs in self._exact():
            yield _lengths((outputs @ outputs.mT).mul_(index.unsqueeze(1) == index.unsqueeze(2)), width)

    def total(self, scale: Tensor) -> Tensor:
        total = scale.new_zeros(self.size, self.outputs.shape[2], dtype=torch.float64)
        place = 0
        for index, outputs in self._exact():
            factor = scale[place : place + len(index)]
            place += len(index)
            outputs[factor == 0] = 0.0
            outputs.mul_(factor[:, None, None])
            total.index_add_(0, index.flatten(), outputs.flatten(0, 1))
        return total

    def projected(self, direction: Tensor) -> Tensor:
        along = self.outputs.to(direction.dtype) @ direction  # [examples, tokens]
        return along.new_zeros(self.size).index_add_(0, self.index.flatten(), along.flatten())

    def rows(self) -> Tensor:
        found = self.outputs.new_zeros(len(self), self.size, self.outputs.shape[2])
        for row, index, outputs in zip(found, self.index, self.outputs, strict=True):
            row.index_add_(0, index, outputs)
        return found

    def _exact(self) -> Iterator[tuple[Tensor, Tensor]]:
        """Yield the factors of some examples after the other, as new tensors, the outputs in float64."""
        # A narrow table has fewer values than its tokens have products with each other.
        most = max(1, self.outputs[0].numel(), self.index[0].numel() ** 2) if len(self) else 1
        each = max(1, AT_ONCE // most)
        for index, outputs in zip(torch.split(self.index, each), torch.split(self.outputs, each), strict=True):
            yield index, outputs.to(torch.float64, copy=True)


def _lengths(products: Tensor, width: int) -> tuple[Tensor, Tensor]:
    """Return the norms of sums of tokens, never less than the exact ones, and the sums of their norms, float64
    [examples], from the tokens' products with each other, float64 [examples, tokens, tokens], which took `width`
    multiplications each.

    The product of two tokens is at most that of their lengths, and so is the sum over all pairs at most the square of
    the sum of lengths. Each operation on the way may be off by a rounding of it.
    """
    sizes = products.diagonal(dim1=1, dim2=2).sqrt().sum(dim=1)
    operations = width + 2 * products.shape[1] + 4
    most = sizes.square().mul_(operations * ROUNDING)
    # A rounding may leave a sum below zero, by no more than the bound.
    return products.sum(dim=2).sum(dim=1).add_(most).clamp_(min=0).sqrt_(), sizes
