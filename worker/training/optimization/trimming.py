"""Removal of the padding that all texts of a batch have in common.

The texts of a data set are padded to the longest of all, and most batches have none that long. In private
training texts keep their padding, whose length must not reveal the longest one.
"""

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn.functional import pad

from tessera.shared.model.dataset_schema import IDS
from tessera.worker.data.dataset import LABELS, Dataset, Padding
from tessera.worker.data.readers.tokens import MASK
from tessera.worker.model.forward import IGNORED, evaluation_mode
from tessera.worker.model.prompts import token_embedding
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.input_mismatch import FAULTS
from tessera.worker.training.packing_probe import same_logits

MULTIPLE = 8
"""Texts stay a multiple of this many tokens long, as a GPU's matrix units prefer."""


def trimmed(batch: Mapping[str, Tensor], padding: Padding) -> dict[str, Tensor]:
    """Return a batch with a mask, [examples, tokens], without the last tokens if these are padding in every example.

    The batch is returned whole if another tensor is as wide, and its padding is not known.
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
    """Return True if the model's logits for a text are the same without the padding after it.

    Not all models leave padding out by its mask: some look at neighbouring tokens, or compute short texts in another
    way. A text of MULTIPLE tokens shows both. Weights of 16 bits round too much to compare.
    """
    padding, mask, model = dataset.padding, dataset.inputs.get(MASK), context.model
    if padding is None or mask is None or len(mask.shape) != 2 or mask.shape[1] <= MULTIPLE:
        return False
    # A GPU does not recover from a token that the model lacks. A short text changes block-sparse attention for good.
    lacks = padding.values.get(IDS, 0) >= token_embedding(model).num_embeddings
    if lacks or model.dtype != torch.float32 or getattr(model.config, "attention_type", "") == "block_sparse":
        return False
    tokens, batch = mask.shape[1], context.synthetic_examples(dataset, 1)
    for name in padding.values.keys() & batch.keys():
        # The end of a text, from which some models read their answer.
        end = batch[name][:, -MULTIPLE:]
        batch[name] = pad(end, (0, tokens - MULTIPLE), value=padding.values[name])
    if batch[LABELS].shape[1:] == mask.shape[1:]:
        batch[LABELS][:, MULTIPLE:] = IGNORED
    short = trimmed(batch, padding)
    if short[MASK].shape[1] == tokens:
        return False
    try:
        with evaluation_mode(model), torch.no_grad():
            padded = _logits(context, batch, tokens)
            alone = _logits(context, short, tokens)
    except torch.OutOfMemoryError:
        raise
    except FAULTS:
        # The task itself reports the mismatch.
        return False
    # Logits of a head of zeros are the same for any text.
    return padded.shape == alone.shape and bool(alone.any()) and same_logits(padded, alone, model)


def _logits(context: LocalTaskContext, batch: Mapping[str, Tensor], tokens: int) -> Tensor:
    """Return a batch's logits, of texts of `tokens` tokens the first ones. Raises ValueError for a model without."""
    there = {name: tensor.to(context.model.device) for name, tensor in batch.items()}
    logits = context.forward(there).logits
    if logits is None:
        raise ValueError("it has no logits")
    return logits[:, :MULTIPLE].clone() if logits.ndim == 3 and logits.shape[1] == tokens else logits
