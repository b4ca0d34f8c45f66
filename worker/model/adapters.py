"""Prompts and low-rank adapters, added to a transformers model as ordinary blocks."""

from __future__ import annotations

import importlib
from types import ModuleType

from transformers import PreTrainedModel

from tessera.shared.model.spec import Lora, Prompts
from tessera.worker.model.block_map import block_table
from tessera.worker.model.config import ConfigError
from tessera.worker.model.layouts import MappingFile
from tessera.worker.model.prompts import add_prompts


def insert(
    model: PreTrainedModel, prompts: Prompts | None, lora: Lora | None, mapping: MappingFile | None = None
) -> None:
    """Add the prompts and adapters of a model document in place. Their random values follow torch's seed.

    Raises ConfigError if the model does not support them or PEFT is not installed, and as `block_table` does.
    """
    if lora:
        _lora().add_lora(model, lora, block_table(model, mapping))
    if prompts:
        add_prompts(model, prompts)


def merge(model: PreTrainedModel) -> None:
    """Add the adapters to their matrices in place, so that transformers alone can run the model."""
    _lora().merge_lora(model)


def _lora() -> ModuleType:
    try:
        return importlib.import_module("tessera.worker.model.lora")
    except ImportError as error:
        raise ConfigError(
            f"the model has adapters, which need a package that is missing ({error}): install tessera[lora]"
        ) from error
