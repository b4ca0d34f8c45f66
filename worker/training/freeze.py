"""Training of some blocks of a model, or some rows of a tensor, that leaves every other bit unchanged."""

from collections.abc import Sequence

import numpy as np
from torch import Tensor, nn

from tessera.shared.model.blocks import Block, layer_key
from tessera.shared.tensors.statistics import is_statistic, module_of
from tessera.worker.model.block_map import named_tensors
from tessera.worker.model.build import rows_of, tensor_of


class Freeze:
    """The trained blocks of a model. Every other bit of the model stays unchanged.

    Create it after moving the model to its device. In each step call `mask_gradients` after the backward pass and
    before clipping, so that frozen rows do not count towards the norm, and `restore` after the optimizer's step,
    since weight decay and old moments change rows whose gradient is zero. With `keep_buffers`, all buffers stay
    unchanged too, even those of trained blocks. Raises ModelMismatch for a block that the model lacks.

    A batch normalisation whose running statistics do not train is put into evaluation mode: it normalises by them, as
    it will when the model is evaluated, and not by the batch. Any other one is put into training mode.
    """

    def __init__(self, model: nn.Module, train: Sequence[Block], *, keep_buffers: bool = False) -> None:
        self.tensors = tensors = named_tensors(model)
        """The model's tensors by name."""
        trained: dict[str, list[Block]] = {}
        for block in train:
            tensor_of(tensors, block)
            trained.setdefault(block.tensor, []).append(block)
        self.parameters: list[nn.Parameter] = []
        """The parameters with a trained block, for the optimizer."""
        layers: list[tuple[str, int] | None] = []
        self._rows: list[tuple[Tensor, int, Tensor, Tensor]] = []  # tensor, axis, its frozen rows, their values
        self._buffers: list[tuple[Tensor, Tensor]] = []  # buffers move in the forward pass, not by gradients
        # A parameter without elements is in no block, such as the registers of a vision transformer that has none.
        for parameter in model.parameters():
            if not parameter.numel():
                parameter.requires_grad = False
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter):
                if tensor.requires_grad != (name in trained):
                    tensor.requires_grad_(name in trained)
                if name in trained:
                    self.parameters.append(tensor)
                    layers.append(layer_key(trained[name][0]))
                    self._keep(tensor, trained[name])
            elif keep_buffers or name not in trained:
                self._buffers.append((tensor, tensor.detach().clone()))
        places = {layer: place for place, layer in enumerate(dict.fromkeys(layers))}
        self.parts = tuple(places[layer] for layer in layers)
        """By parameter, the number of its layer among those that train. All that is in no layer counts as one."""
        statistics = [name for name in tensors if is_statistic(name)]
        fixed = {module_of(name) for name in statistics if keep_buffers or name not in trained}
        for path in {module_of(name) for name in statistics}:
            model.get_submodule(path).training = path not in fixed

    def _keep(self, tensor: Tensor, blocks: Sequence[Block]) -> None:
        parts = [block.part for block in blocks if block.part]
        if len(parts) < len(blocks):
            return
        axis = parts[0].axis
        covered = np.concatenate([part.index() for part in parts])
        frozen = rows_of(np.setdiff1d(np.arange(tensor.shape[axis]), covered), tensor)
        if len(frozen):
            self._rows.append((tensor, axis, frozen, tensor.detach().index_select(axis, frozen)))

    def mask_gradients(self) -> None:
        """Zero the gradients of frozen rows."""
        for tensor, axis, frozen, _ in self._rows:
            if tensor.grad is not None:
                tensor.grad.index_fill_(axis - tensor.ndim, frozen, 0)

    def in_part(self, parameter: nn.Parameter) -> bool:
        """Return True if some rows of a trained parameter are frozen."""
        return any(tensor is parameter for tensor, *_ in self._rows)

    def mask(self, parameter: nn.Parameter, gradient: Tensor) -> None:
        """Zero a parameter's frozen rows in a gradient of its shape, which may have additional leading axes."""
        for tensor, axis, frozen, _ in self._rows:
            if tensor is parameter:
                gradient.index_fill_(axis - tensor.ndim, frozen, 0)

    def restore(self) -> None:
        """Restore frozen rows and buffers, bit for bit."""
        for tensor, axis, frozen, values in self._rows:
            tensor.detach().index_copy_(axis, frozen, values)
        for buffer, values in self._buffers:
            buffer.copy_(values)
