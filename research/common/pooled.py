"""The data of several sites in one place."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from tessera.worker.data.dataset import Dataset


def pooled(parts: Sequence[Dataset]) -> Dataset:
    """Return all examples of the parts, in their order, and all that they hold out."""
    held_out = [part.held_out for part in parts if part.held_out]
    tensors = {name: torch.cat([part.tensors[name] for part in parts]) for name in parts[0].tensors}
    return Dataset(tensors, parts[0].common, pooled(held_out) if held_out else None)
