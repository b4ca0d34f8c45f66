"""The model that was built last, kept for the next task of the same run."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from transformers import PreTrainedModel

from tessera.shared.model.blocks import Block

Structure = tuple[tuple[str, type, int], ...]
"""A model's modules: the name, class and number of hooks of each."""


@dataclass(frozen=True)
class Built:
    """A model as it was built."""

    run: str
    digest: str
    model: PreTrainedModel
    blocks: tuple[Block, ...]
    structure: Structure


class ModelCache:
    """Room for one model: two would not fit where one does."""

    def __init__(self) -> None:
        self._last: Built | None = None

    def take(self, run: str, digest: str) -> Built | None:
        """Return the run's model, if it is here, and leave nothing behind."""
        last, self._last = self._last, None
        return last if last and (last.run, last.digest) == (run, digest) else None

    def keep(self, built: Built) -> None:
        """Keep a model, unless a method left modules or hooks in it that must be no part of the next round's."""
        if structure_of(built.model) == built.structure:
            self._last = built


def structure_of(model: torch.nn.Module) -> Structure:
    return tuple(
        (name, type(module), len(module._forward_hooks) + len(module._forward_pre_hooks))  # noqa: SLF001 (no other way)
        for name, module in model.named_modules()
    )
