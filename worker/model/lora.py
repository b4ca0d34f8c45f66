"""Low-rank adapters by PEFT: W x + alpha / rank * B A x (Hu et al. 2021, arXiv 2106.09685, equation 3), and DoRA.

Import this module only for a model with adapters, because PEFT is an optional dependency.
"""

import re
from collections.abc import Collection, Iterable

import torch
from peft import LoraConfig, inject_adapter_in_model
from peft.tuners.lora.layer import LoraLayer
from torch import nn
from transformers import PreTrainedModel
from transformers.pytorch_utils import Conv1D

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Lora
from tessera.worker.errors import ConfigError


def add_lora(model: PreTrainedModel, lora: Lora, blocks: Iterable[Block]) -> None:
    """Add an adapter to each linear layer whose weight has, in whole or in part, one of the roles.

    `blocks` are those of the unchanged model. A starts random under torch's seed and B at zero, so that the model's
    outputs stay bit-identical. A fused matrix is adapted whole, since all of its parts read the input of A. Raises
    ConfigError if no linear layer has one of the roles.
    """
    wanted = {block.tensor.rpartition(".")[0] for block in blocks if block.role in lora.roles}
    paths = [path for path in sorted(wanted) if _adaptable(model, path)]
    if not paths:
        raise ConfigError(
            f"the model has no linear layer with a role among {', '.join(lora.roles)} to adapt: choose other roles"
        )
    is_conv1d = any(isinstance(model.get_submodule(path), Conv1D) for path in paths)
    for name, rank in lora.parts.items():
        options = LoraConfig(
            r=rank,
            lora_alpha=lora.alpha,  # type: ignore[arg-type]  # PEFT accepts any number
            lora_dropout=0.0,
            use_dora=lora.dora,
            target_modules="|".join(map(re.escape, paths)),
            fan_in_fan_out=is_conv1d,
        )
        # PEFT warns of an adapter beside another, which is meant here.
        vars(model).pop("peft_config", None)
        inject_adapter_in_model(options, model, adapter_name=name)
    # PEFT freezes all other parameters; the round decides what trains.
    activate_parts(model, lora.parts)
    model.requires_grad_(requires_grad=True)
    for path in paths:
        layer = model.get_submodule(path)
        if isinstance(layer, LoraLayer):
            layer.scaling = dict.fromkeys(lora.parts, lora.scale)
            # PEFT does so itself, but not on the meta device.
            dtype = next(layer.get_base_layer().parameters()).dtype
            layer.lora_A.to(dtype)
            layer.lora_B.to(dtype)
            layer.lora_magnitude_vector.to(dtype)


def activate_parts(model: nn.Module, parts: Collection[str]) -> None:
    """Let the model compute with these parts of its adapters alone."""
    for layer in model.modules():
        if isinstance(layer, LoraLayer):
            layer.set_adapter(list(parts))


def merge_lora(model: nn.Module) -> None:
    """Add each adapter to its matrix in place, and remove the adapter."""
    wrapped = [(path, layer) for path, layer in model.named_modules() if isinstance(layer, LoraLayer)]
    with torch.no_grad():
        for path, layer in wrapped:
            layer.merge(safe_merge=True)
            model.set_submodule(path, layer.get_base_layer())


def _adaptable(model: nn.Module, path: str) -> bool:
    # torch's own attention reads its output projection's weight without calling it: an adapter would have no effect.
    owner = model.get_submodule(path.rpartition(".")[0])
    return isinstance(model.get_submodule(path), nn.Linear | Conv1D) and not isinstance(owner, nn.MultiheadAttention)
