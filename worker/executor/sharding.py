"""Parameters divided among the ranks of a group by torch's `fully_shard` (FSDP2), for models larger than a device."""

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor
from transformers.modeling_layers import GradientCheckpointingLayer


def shard(model: nn.Module, device: torch.device, ranks: int) -> None:
    """Divide a model's parameters, which have no storage yet, along their first axis.

    A forward or backward pass gathers one layer after the other, and what lies outside the layers once. Gradients are
    summed over the ranks in float32.
    """
    mesh = init_device_mesh(device.type, (ranks,))
    policy = MixedPrecisionPolicy(reduce_dtype=torch.float32)
    layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
    # Layers within layers first, since a unit takes the parameters below it that no other has.
    for module in (*reversed(layers), model):
        # Otherwise the root keeps its parameters whole after an evaluation.
        fully_shard(module, mesh=mesh, mp_policy=policy, reshard_after_forward=True)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            # Losses are divided by the count of the whole batch already, and gloo has no mean.
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)


def keep_shard(tensor: Tensor, values: Tensor, rank: int, ranks: int) -> None:
    """Set a tensor of a sharded model to this rank's rows of `values`; a buffer, which is not divided, to all."""
    if not isinstance(tensor, DTensor):
        tensor.detach().copy_(values)
        return
    rows = torch.chunk(values, ranks)
    if rank < len(rows):
        own: Tensor = tensor.to_local()
        own.detach().copy_(rows[rank])


def gathered(tensor: Tensor) -> Tensor:
    """Return a whole tensor of a sharded model. All ranks call it together."""
    if not isinstance(tensor, DTensor):
        return tensor
    whole: Tensor = tensor.full_tensor()
    return whole.detach()


def bytes_here(model: nn.Module) -> int:
    """Return the bytes of a model's parameters that this process holds."""
    own = (each.to_local() if isinstance(each, DTensor) else each for each in model.parameters())
    return sum(each.untyped_storage().nbytes() for each in own)
