"""Cache of the model built last, for the next task of the same run."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

import torch
from transformers import PreTrainedModel

from tessera.shared.model.blocks import Block
from tessera.worker.model.held_values import HeldValues
from tessera.worker.training.optimization.image_features import ImageFeatures

Structure = tuple[tuple[str, type, int], ...]
"""Name, class and number of hooks of each of a model's modules."""


@dataclass(frozen=True)
class Built:
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


D = TypeVar("D")

MAX_DOCUMENTS = 8
"""Number of parsed documents that are kept: the models and last versions of a few runs."""


class ModelCache:
    """Cache for a single model, since memory may not fit two, and for the documents that were parsed last."""

    def __init__(self) -> None:
        self._last: Built | None = None
        self._documents: dict[tuple[type, str], Any] = {}

    def document(self, kind: type[D], digest: str, read: Callable[[], D]) -> D:
        """Return the document of a digest, as `read` returns it if it was not read lately."""
        key = (kind, digest)
        if key not in self._documents:
            document = read()
            while len(self._documents) >= MAX_DOCUMENTS:
                self._documents.pop(next(iter(self._documents)), None)
            self._documents[key] = document
        return cast("D", self._documents[key])

    def holds(self, run: str, digest: str, four_bits: frozenset[str]) -> bool:
        """Return whether the cached model is this run's, with these matrices in 4 bits."""
        last = self._last
        return last is not None and (last.run, last.digest, last.four_bits) == (run, digest, four_bits)

    def take(self, run: str, digest: str, four_bits: frozenset[str]) -> Built | None:
        """Remove the cached model and return it if it is as `holds` asks."""
        is_here = self.holds(run, digest, four_bits)
        last, self._last = self._last, None
        return last if is_here else None

    def keep(self, built: Built) -> None:
        """Cache a model unless a method changed its modules or hooks."""
        if structure_of(built.model) == built.structure:
            self._last = built


def structure_of(model: torch.nn.Module) -> Structure:
    return tuple(
        (name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks))  # noqa: SLF001 (no other way)
        for name, module in model.named_modules()
    )
