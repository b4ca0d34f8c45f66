"""The pieces of a step's sample: examples, or whole groups of them, whose gradients are computed together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.worker.data.groups import Groups
from tessera.worker.privacy.per_example_grads import Gradients


@dataclass(frozen=True)
class GroupSampling:
    """The groups that a step samples, of each of which it uses `most` examples at most."""

    groups: Groups
    most: int


@dataclass(frozen=True)
class Piece:
    """Examples whose gradients are computed together: each a unit by itself, or whole groups of them."""

    rows: Tensor
    """The places of the examples, int64 [examples]."""
    owners: Tensor
    """The number of each example's group in this piece, int64 [examples]; anything if each is a unit by itself."""
    sizes: Tensor | None
    """The number of drawn examples of each group, also of those without a gradient, int64 [groups]; None if each
    example is a unit by itself."""

    def by_unit(self, gradients: Gradients) -> Gradients:
        """Return the gradients of the examples, [examples, *shape], as those of their units, [units, *shape]."""
        if self.sizes is None:
            return gradients
        means = zero_means([each[0] for each in gradients], len(self.sizes))
        add_by_group(means, gradients, self.owners, self.sizes)
        return means


def single_pieces(rows: Tensor, known: Tensor, at_once: int) -> list[Piece]:
    """Return the pieces of examples that are units by themselves, without those that are not `known`."""
    rows = rows[known[rows]]
    return [Piece(part, part, None) for part in torch.split(rows, at_once)] if len(rows) else []


def group_pieces(members: Sequence[Tensor], known: Tensor, at_once: int) -> list[Piece]:
    """Return the pieces of groups with these members. No group is in two of them; one that is larger than `at_once`
    is in a piece of its own. Members that are not `known` count in the size of their group, and nowhere else."""
    bundles: list[list[tuple[Tensor, int]]] = []
    room = 0
    for drawn in members:
        rows = drawn[known[drawn]]
        if not len(rows):
            continue
        if len(rows) > room:
            bundles.append([])
            room = at_once
        bundles[-1].append((rows, len(drawn)))
        room -= len(rows)
    return [_piece(bundle) for bundle in bundles]


def _piece(bundle: Sequence[tuple[Tensor, int]]) -> Piece:
    rows = [each for each, _ in bundle]
    owners = torch.arange(len(rows)).repeat_interleave(torch.tensor(list(map(len, rows))))
    return Piece(torch.cat(rows), owners, torch.tensor([size for _, size in bundle]))


def zero_means(parameters: Sequence[Tensor], groups: int) -> Gradients:
    """Return a gradient of zeros for each group, [groups, *shape], to which `add_by_group` adds; float32 or finer."""
    return [
        torch.zeros((groups, *each.shape), dtype=torch.promote_types(each.dtype, torch.float32), device=each.device)
        for each in parameters
    ]


def add_by_group(totals: Gradients, gradients: Gradients, owners: Tensor, sizes: Tensor) -> None:
    """Add to each group's mean gradient, [groups, *shape] in `totals`, what some of its examples contribute.

    `gradients` are [examples, *shape], of groups `owners` with `sizes` examples. What is not finite stays in its
    group.
    """
    for total, gradient in zip(totals, gradients, strict=True):
        owner = owners.to(gradient.device)
        size = sizes.to(gradient.device)[owner].view(-1, *[1] * (gradient.ndim - 1))
        total.index_add_(0, owner, gradient.to(total.dtype) / size)
