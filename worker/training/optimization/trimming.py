"""Removal of the padding that all texts of a batch have in common.

The texts of a data set are padded to the longest of all, and most batches have none that long. A private task's texts
keep their padding, whose length must not reveal the longest text.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from tessera.worker.data.dataset import LABELS, Dataset, Padding
from tessera.worker.data.readers.token_file import MASK
from tessera.worker.model.forward import IGNORED, evaluation_mode
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.input_mismatch import FAULTS

MULTIPLE = 8
"""Texts stay a multiple of this many tokens long, as a GPU's matrix units prefer."""
ROUNDING = 64
"""The allowed difference of logits, in roundings of the largest one."""


def trimmed(batch: Mapping[str, Tensor], padding: Padding) -> dict[str, Tensor]:
    """Return a batch, [examples, tokens], without the last tokens if these are padding in every example.

    The batch is returned whole if it has no mask, or another tensor as wide whose padding is not known.
    """
    whole, mask = dict(batch), batch[MASK]
    tokens = mask.shape[1]
    used = mask.any(dim=0).nonzero()
    longest = int(used[-1]) + 1 if len(used) else 1
    width = -(-longest // MULTIPLE) * MULTIPLE
    by_token = {name for name, tensor in batch.items() if tensor.ndim > 1 and tensor.shape[1] == tokens}
    if width >= tokens or by_token - padding.values.keys() - {LABELS}:
        return whole
    if LABELS in by_token and bool((batch[LABELS][:, width:] != IGNORED).any()):
        return whole
    return whole | {name: batch[name][:, :width].contiguous() for name in by_token}


def is_trimmable(context: LocalTaskContext, dataset: Dataset) -> bool:
    """Return whether the logits of the model for a text are the same without the padding after it.

    Not all models leave padding out by its mask: some look at neighbouring tokens, or at positions from the end.
    """
    padding, mask = dataset.padding, dataset.inputs.get(MASK)
    if padding is None or padding.on_left or mask is None or len(mask.shape) != 2 or mask.shape[1] <= MULTIPLE:
        return False
    tokens = mask.shape[1]
    # The text ends where the batch is cut off, so that no padding is left after it.
    batch, length = context.synthetic_examples(dataset, 2), max(1, tokens // 2 // MULTIPLE) * MULTIPLE
    for name in padding.values.keys() & batch.keys():
        # The end of a text, from which some models read their answer.
        end = batch[name][:, -length:]
        batch[name] = pad(end, (0, tokens - length), value=padding.values[name])
    if batch[LABELS].shape[1:] == mask.shape[1:]:
        batch[LABELS][:, length:] = IGNORED
    short = trimmed(batch, padding)
    try:
        with evaluation_mode(context.model), torch.no_grad():
            padded, alone = (_logits(context, each) for each in (batch, short))
    except FAULTS:
        # The task will say what the model does not take.
        return False
    if padded is None or alone is None:
        return False
    if padded.ndim == 3 and padded.shape[1] == tokens:
        padded = padded[:, : alone.shape[1]]
    limit = ROUNDING * torch.finfo(next(context.model.parameters()).dtype).eps * float(alone.abs().max())
    return padded.shape == alone.shape and torch.allclose(padded, alone, rtol=0, atol=limit)


def _logits(context: LocalTaskContext, batch: Mapping[str, Tensor]) -> Tensor | None:
    there = {name: tensor.to(context.model.device) for name, tensor in batch.items()}
    logits = context.forward(there).logits
    return None if logits is None else logits.float()
