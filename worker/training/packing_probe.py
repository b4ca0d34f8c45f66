"""A test of whether a model keeps the documents of a packed row apart."""

import torch
from torch import Tensor, nn

from tessera.worker.data.packing import POSITIONS
from tessera.worker.model.forward import evaluation_mode
from tessera.worker.model.prompts import token_embedding
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.input_mismatch import FAULTS

DOCUMENTS = ([3, 5, 2], [4, 4, 2])
"""The tokens of the documents of each synthetic row."""
ROUNDING = 64
"""The allowed difference of logits, in roundings of the largest one: of other documents they differ far more."""


def packing_fault(context: LocalTaskContext) -> str | None:
    """Return the reason for which the model does not take packed documents, or None if each document's logits are as
    without the others."""
    words = token_embedding(context.model).num_embeddings
    ids = torch.randint(0, words, (len(DOCUMENTS), sum(DOCUMENTS[0])), generator=torch.Generator().manual_seed(0))
    positions = torch.stack([torch.cat([torch.arange(length) for length in row]) for row in DOCUMENTS])

    def logits(ids: Tensor, positions: Tensor) -> Tensor:
        batch = {"input_ids": ids, POSITIONS: positions, "labels": ids}
        output = context.forward({name: tensor.to(context.model.device) for name, tensor in batch.items()})
        if output.logits is None or output.logits.shape[:2] != ids.shape:
            raise ValueError("it has no logits for each token")
        return output.logits.float()

    try:
        with evaluation_mode(context.model), torch.no_grad():
            together = logits(ids, positions)
            alone = torch.stack(
                [
                    torch.cat(
                        [logits(part[None], torch.arange(len(part))[None])[0] for part in torch.split(row, sizes)]
                    )
                    for row, sizes in zip(ids, DOCUMENTS, strict=True)
                ]
            )
    except torch.OutOfMemoryError:
        raise
    except FAULTS as fault:
        return f"does not take a packed row ({type(fault).__name__})"
    return None if same_logits(together, alone, context.model) else "lets a document see the others of its row"


def same_logits(one: Tensor, other: Tensor, model: nn.Module) -> bool:
    """Return True if logits of the same shape differ by no more than the roundings of a model's weights."""
    limit = ROUNDING * torch.finfo(next(model.parameters()).dtype).eps * float(other.abs().max())
    return torch.allclose(one, other, rtol=0, atol=limit)
