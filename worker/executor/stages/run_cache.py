"""Caches of a process for the next task of the same run: its model, and facts that its training found."""

from dataclasses import dataclass, field

import torch
from transformers import PreTrainedModel

from tessera.shared.model.blocks import Block
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.held_values import HeldValues
from tessera.worker.task.handover import CheckedModel
from tessera.worker.training.optimization.image_features import ImageFeatures
from tessera.worker.training.optimization.micro_batch import PieceSize

Structure = tuple[tuple[str, type, int], ...]
"""Name, class and number of hooks of each of a model's modules."""


@dataclass(frozen=True)
class BuiltModel:
    """A built model and its structure at that time."""

    run: str
    digest: str
    model: PreTrainedModel
    blocks: tuple[Block, ...]
    structure: Structure
    four_bits: frozenset[str] = frozenset()
    """The matrices that are in 4 bits."""
    held: HeldValues = field(default_factory=HeldValues)
    """The digests of the values that the model has from its last task."""
    images: ImageFeatures = field(default_factory=ImageFeatures)
    """The features of images that tasks need not compute again."""

    @property
    def metrics(self) -> dict[str, float]:
        """The metrics of each result that was computed with this model."""
        return {"base_bits": 4.0} if self.four_bits else {}


class ModelCache:
    """Cache for a single model, since memory may not fit two."""

    def __init__(self) -> None:
        self._last: BuiltModel | None = None

    def holds(self, run: str, digest: str, four_bits: frozenset[str]) -> bool:
        """Return True if the cached model is this run's, with these matrices in 4 bits."""
        last = self._last
        return last is not None and (last.run, last.digest, last.four_bits) == (run, digest, four_bits)

    def take(self, run: str, digest: str, four_bits: frozenset[str]) -> BuiltModel | None:
        """Remove the cached model and return it if it is as `holds` asks."""
        is_here = self.holds(run, digest, four_bits)
        last, self._last = self._last, None
        return last if is_here else None

    def keep(self, built: BuiltModel) -> None:
        """Cache a model unless a method changed its modules or hooks."""
        if structure_of(built.model) == built.structure:
            self._last = built


def structure_of(model: torch.nn.Module) -> Structure:
    return tuple(
        (name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks))  # noqa: SLF001 (no other way)
        for name, module in model.named_modules()
    )


@dataclass(frozen=True, eq=False, repr=False)
class RunCache:
    """The caches that the tasks of a process share."""

    models: ModelCache = field(default_factory=ModelCache)
    tables: dict[tuple[str, int | None], CheckedModel] = field(default_factory=dict)
    """The block table of the last model that was checked, by its digest and the bits of its base."""
    piece_sizes: dict[str, PieceSize] = field(default_factory=dict)
    """The size of pieces that fits into memory, by run."""
    scalers: dict[str, torch.amp.GradScaler] = field(default_factory=dict)
    """Float16 loss scalers by run: the scale is found by trial, so it is kept for the next round, and in the vault
    for the next start."""
    tokenized: dict[str, tuple[str, Dataset]] = field(default_factory=dict)
    """The data sets that take the run's tokenizer, as tokens for the last run, with the digest of its model."""
