"""The examples of a data set that a model can take: those whose tokens, positions and classes it has."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from tessera.worker.data.dataset import LABELS, Dataset, RowsOnDisk
from tessera.worker.errors import DataError
from tessera.worker.model.forward import IGNORED, evaluation_mode
from tessera.worker.training.context import LocalTaskContext

KNOWN_AT_ONCE = 1024
"""Number of examples whose tokens and classes are compared with the model's at a time."""

OF_WORDS = frozenset({"input_ids", "decoder_input_ids", "token_type_ids"})
BOXES = "bbox"
"""The boxes of a document's words, [examples, tokens, 4]: left, top, right and bottom."""


def known_examples(context: LocalTaskContext, dataset: Dataset, sample: Mapping[str, Tensor]) -> Tensor:
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
    """Return a mask of the rows whose values are all below the bound, bool [rows]; False for unreadable rows."""
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
