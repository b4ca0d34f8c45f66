"""The pieces of a step's sample: examples, or whole groups of them, whose gradients are computed together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from tessera.worker.data.groups import Groups
from tessera.worker.privacy.per_example_grads import Gradients


@dataclass(frozen=True)
class GroupSampling:
    """The groups that a step samples, and the most examples that it uses of each."""

    groups: Groups
    most: int


@dataclass(frozen=True)
class GradientPiece:
    """Examples whose gradients are computed together: each a unit by itself, or whole groups of them."""

    rows: Tensor
    """The places of the examples, int64 [examples]."""
    owners: Tensor
    """The number of each example's group in this piece, int64 [examples]; anything if each is a unit by itself."""
    sizes: Tensor | None
    """The number of drawn examples of each group, int64 [groups]; None if each example is a unit by itself."""


def single_pieces(rows: Tensor, at_once: int) -> list[GradientPiece]:
    """Return the pieces of examples that are units by themselves."""
    return [GradientPiece(part, part, None) for part in torch.split(rows, at_once)] if len(rows) else []


def group_pieces(members: Sequence[Tensor], at_once: int) -> list[GradientPiece]:
    """Return the pieces of groups with these members. No group is in two of them; one that is larger than `at_once`
    is in a piece of its own."""
    bundles: list[list[Tensor]] = []
    room = 0
    for drawn in members:
        if len(drawn) > room:
            bundles.append([])
            room = at_once
        bundles[-1].append(drawn)
        room -= len(drawn)
    return [_piece(bundle) for bundle in bundles]


def _piece(rows: Sequence[Tensor]) -> GradientPiece:
    sizes = torch.tensor(list(map(len, rows)))
    return GradientPiece(torch.cat([*rows]), torch.arange(len(rows)).repeat_interleave(sizes), sizes)


def zero_means(parameters: Sequence[Tensor], groups: int) -> Gradients:
    """Return a gradient of zeros for each group, [groups, *shape], to which `add_by_group` adds; float32 or finer."""
    return [
        torch.zeros((groups, *each.shape), dtype=torch.promote_types(each.dtype, torch.float32), device=each.device)
        for each in parameters
    ]


def add_by_group(totals: Gradients, gradients: Gradients, owners: Tensor, sizes: Tensor) -> None:
    """Add to each group's mean gradient, [groups, *shape] in `totals`, the contributions of some of its examples.

    `gradients` are [examples, *shape], of groups `owners` with `sizes` examples. A value that is not finite
    stays in its group.
    """
    for total, gradient in zip(totals, gradients, strict=True):
        owner = owners.to(gradient.device)
        size = sizes.to(gradient.device)[owner].view(-1, *[1] * (gradient.ndim - 1))
        total.index_add_(0, owner, gradient.to(total.dtype) / size)
