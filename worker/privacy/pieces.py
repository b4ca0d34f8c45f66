"""The pieces of a step's sample: examples, or whole groups of them, whose gradients are computed together."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tessera.worker.data.dataset import LABELS, DataError, Dataset, RowsOnDisk
from tessera.worker.data.groups import Groups
from tessera.worker.model.forward import IGNORED, evaluation_mode
from tessera.worker.privacy.per_example_grads import Batch, Gradients
from tessera.worker.training.context import LocalTaskContext

KNOWN_AT_ONCE = 1024
"""Number of examples whose tokens and classes are compared with the model's at a time."""

OF_WORDS = frozenset({"input_ids", "decoder_input_ids", "token_type_ids"})
BOXES = "bbox"
"""The boxes of a document's words, [examples, tokens, 4]: left, top, right and bottom."""


def known_examples(context: LocalTaskContext, dataset: Dataset, sample: Batch) -> Tensor:
    """Return the mask of examples whose token ids and classes the model has, bool [examples].

    On a GPU any other example would end the process, and on a CPU fail its batch. The same holds for positions and
    boxes, which a data set of kind `arrays` may have. An example that cannot be read is none of them. `sample` is a
    valid batch.
    """
    with evaluation_mode(context.model), torch.no_grad():
        output = context.forward(sample)
    config, classes = context.model.config, None if output.logits is None else output.logits.shape[-1]
    # A single output is a number, unless it is the only class, whose loss is 0.
    is_number = classes == 1 and bool(output.loss != 0)
    words = _words(context.model) if dataset.inputs.keys() & OF_WORDS else None
    positions = getattr(config, "max_position_embeddings", None)
    bounds = {
        "input_ids": words,
        "decoder_input_ids": words,
        # Without types of their own, some models look them up as words.
        "token_type_ids": getattr(config, "type_vocab_size", None) or words,
        "position_ids": positions,
        "decoder_position_ids": positions,
        BOXES: getattr(config, "max_2d_position_embeddings", None),
        LABELS: None if is_number else classes,
    }
    known = torch.ones(dataset.examples, dtype=torch.bool)
    for name, bound in bounds.items():
        stored = dataset.inputs.get(name)
        if bound and stored is not None and not stored.dtype.is_floating_point:
            for rows in torch.split(torch.arange(dataset.examples), KNOWN_AT_ONCE):
                known[rows] &= _within(name, stored, rows, bound)
    return known


def _words(model: PreTrainedModel) -> int | None:
    """Return the number of tokens that the model has, if it is known."""
    try:
        table = model.get_input_embeddings()
    except NotImplementedError:
        table = None
    words: int | None = len(table.weight) if isinstance(table, nn.Embedding) else None
    return getattr(model.config, "vocab_size", None) if words is None else words


def _within(name: str, stored: Tensor | RowsOnDisk, rows: Tensor, bound: int) -> Tensor:
    """Return whether all values of each row are below the bound, bool [rows]; False for a row that cannot be read."""
    try:
        values = stored[rows]
    except DataError:
        if len(rows) == 1:
            return torch.zeros(1, dtype=torch.bool)
        return torch.cat([_within(name, stored, row, bound) for row in torch.split(rows, 1)])
    fits = ((values >= 0) & (values < bound)) | ((values == IGNORED) & (name == LABELS))
    if name == BOXES:
        # Some models look up the width and the height.
        fits[..., 2:] &= values[..., 2:] >= values[..., :2]
    return fits.flatten(1).all(dim=1) if fits.ndim > 1 else fits


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
