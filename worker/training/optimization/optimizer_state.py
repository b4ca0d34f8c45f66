"""An optimizer's state as named tensors, for a checkpoint or for the next round."""

from collections.abc import Mapping

import torch
from torch import Tensor


def optimizer_tensors(optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the optimizer's state, by the name of a parameter and torch's key: `head.weight/exp_avg`.

    The tensors share the optimizer's memory. A parameter without a step so far has none.
    """
    return {
        f"{name}/{key}": value
        for name, parameter in parameters.items()
        for key, value in optimizer.state.get(parameter, {}).items()
        if isinstance(value, Tensor)
    }


def set_optimizer_tensors(
    optimizer: torch.optim.Optimizer, parameters: Mapping[str, Tensor], tensors: Mapping[str, Tensor]
) -> None:
    """Set the state that `optimizer_tensors` returned, in place of the present one.

    Tensors are copied one after the other, so `tensors` may read each from a file. Raises KeyError for a tensor whose
    parameter is not among `parameters`.
    """
    groups = {id(parameter): group for group in optimizer.param_groups for parameter in group["params"]}
    optimizer.state.clear()
    for full_name, value in tensors.items():
        name, _, key = full_name.rpartition("/")
        parameter = parameters[name]
        group = groups[id(parameter)]
        # As torch does it: a step is counted on the CPU unless the optimizer reads it on the device.
        on_device = key != "step" or group.get("fused") or group.get("capturable")
        device = parameter.device if on_device else torch.device("cpu")
        optimizer.state[parameter][key] = torch.empty_like(value, device=device).copy_(value)
