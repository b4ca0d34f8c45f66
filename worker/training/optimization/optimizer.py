"""The optimizer of a phase: its groups of parameters, and the rates of its steps."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from tessera.shared.methods.base import Phase
from tessera.shared.model.block_rates import rate_of
from tessera.shared.model.blocks import Block
from tessera.shared.run_settings import Training

Groups = Mapping[tuple[float, float], Sequence[Tensor]]
"""Tensors by their learning rate and weight decay."""


def parameter_groups(
    parameters: Sequence[Tensor],
    trained: Sequence[tuple[Block, Tensor]],
    private: Sequence[Block],
    phase: Phase,
    training: Training,
) -> Groups:
    """Return the `parameters` by the rate and the decay that a phase sets for their blocks.

    `trained` are the blocks that train, with their tensors, and `private` those of the method's private modules.
    """
    private_rate, rates = phase.private_learning_rate, dict[int, float]()
    for block, tensor in trained:
        share = math.prod(share for chosen, share in phase.rates if chosen.holds(block))
        rates[id(tensor)] = rate_of(training, block) * share
        if block in private:
            rates[id(tensor)] = rate_of(training, block, private=True) if private_rate is None else private_rate
    undecayed = {
        id(tensor) for block, tensor in trained if not training.decay_norms_and_biases and _is_norm_or_bias(block)
    }
    # There is one group if nothing differs, and torch refuses to have none at all.
    groups: dict[tuple[float, float], list[Tensor]] = {(training.learning_rate, training.weight_decay): []}
    for each in parameters:
        decay = 0.0 if id(each) in undecayed else training.weight_decay
        groups.setdefault((rates[id(each)], decay), []).append(each)
    return groups


def _is_norm_or_bias(block: Block) -> bool:
    # A bias has the role of its weight. A table of position biases is a weight: its name goes on.
    return block.role == "norm" or block.tensor.rpartition(".")[2].endswith("bias")


def optimizer_of(groups: Groups, training: Training) -> torch.optim.Optimizer:
    """Return an optimizer of these groups at their full rates.

    It is fused where torch can: its step reads and writes each tensor once. With a loss scale it skips a step that
    overflows, without waiting for the device.
    """
    parameters = [
        {"params": tensors, "lr": rate, "initial_lr": rate, "weight_decay": decay}
        for (rate, decay), tensors in groups.items()
    ]
    adam = training.optimizer == "adamw"
    fused = all(_is_fusable(tensor, adam) for tensors in groups.values() for tensor in tensors) or None
    optimizer: torch.optim.Optimizer
    if adam:
        optimizer = torch.optim.AdamW(parameters, betas=training.betas, fused=fused)
    else:
        optimizer = torch.optim.SGD(parameters, lr=training.learning_rate, momentum=training.momentum, fused=fused)
    optimizer.register_step_pre_hook(_lay_out_gradients)
    return optimizer


def _is_fusable(tensor: Tensor, adam: bool) -> bool:
    is_plain = type(tensor) in (Tensor, nn.Parameter)
    # Torch's fused SGD knows no sharded tensors, and on a processor the kernels do not look at strides.
    return is_plain or adam if tensor.is_cuda else is_plain and tensor.is_cpu and tensor.is_contiguous()


def _lay_out_gradients(optimizer: torch.optim.Optimizer, *_: Any) -> None:
    """Give each gradient the strides of its tensor."""
    for group in optimizer.param_groups:
        for tensor in group["params"]:
            if tensor.grad is not None and tensor.grad.stride() != tensor.stride():
                tensor.grad = torch.empty_like(tensor).copy_(tensor.grad)


def make_moments(optimizer: torch.optim.Optimizer) -> None:
    """Allocate the moments that the first step would, as zeros: an optimizer's step that runs out of memory has moved
    some of the weights already."""
    for group in optimizer.param_groups:
        adam = "betas" in group
        names = ("exp_avg", "exp_avg_sq") if adam else ("momentum_buffer",) if group["momentum"] else ()
        for tensor in group["params"]:
            state = optimizer.state[tensor]
            if names and not state:
                if adam:
                    state["step"] = torch.zeros((), device=tensor.device if group["fused"] else None)
                state |= {name: torch.zeros_like(tensor, memory_format=torch.preserve_format) for name in names}


def set_rate(optimizer: torch.optim.Optimizer, share: float) -> None:
    """Set the rates of the next step to a share of the full ones."""
    for group in optimizer.param_groups:
        group["lr"] = group["initial_lr"] * share
