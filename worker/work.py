"""One task, as the method's worker half sees it: a model, what the plan asks of it, and the ways to reach into it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch
from torch import Tensor, nn
from torch.func import functional_call
from transformers import PreTrainedModel

from shared.blocks import Block, Selector
from shared.methods.contract import Output, Plan
from shared.model import Head
from shared.tensors import Array
from worker.blockmap import DTYPES, named_tensors
from worker.forward import forward
from worker.models import read_block, write_block


@dataclass
class LocalWork:
    """Implements `shared.methods.contract.Work` on a transformers model. Call `close` when the task is over."""

    model: PreTrainedModel
    head: Head
    plan: Plan
    blocks: Sequence[Block]
    vault: Mapping[str, Array] = field(default_factory=dict)
    memory: Mapping[str, Array] = field(default_factory=dict)
    private: list[Block] = field(default_factory=list)
    _added: list[str] = field(default_factory=list)

    def read(self, block: Block) -> Array:
        return read_block(named_tensors(self.model), block)

    def write(self, block: Block, values: Array) -> None:
        write_block(named_tensors(self.model), block, values)

    def restore(self, private: Selector) -> None:
        """Gives the run's blocks that stay here the values that the vault holds. SelectorError as `resolve`."""
        for block in private.resolve(self.blocks):
            if block.name in self.vault:
                self.write(block, self.vault[block.name])

    def tensors(self, values: Mapping[str, Array]) -> dict[str, Tensor]:
        wanted = {block.tensor for block in self.blocks if block.name in values}
        whole = {name: torch.zeros_like(t) for name, t in named_tensors(self.model).items() if name in wanted}
        for block in self.blocks:
            if block.name in values:
                write_block(whole, block, values[block.name])
        return whole

    def forward(self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None) -> Output:
        if values is None:
            return forward(self.model, self.head, batch)
        return forward(partial(_called, self.model, dict(values)), self.head, batch)

    def features(self, batch: Mapping[str, Tensor], values: Mapping[str, Tensor] | None = None) -> Tensor:
        handed: list[Tensor] = []
        handle = self._head_module().register_forward_pre_hook(lambda _, inputs: handed.append(inputs[0]))
        try:
            self.forward(batch, values)
        finally:
            handle.remove()
        found = handed[0]  # [examples, width] or [examples, positions, width]
        return found if found.ndim == 2 else found.flatten(1, -2).mean(dim=1)

    def _head_module(self) -> nn.Module:
        paths = [block.tensor.rpartition(".")[0] for block in self.blocks if block.role == "head"]
        if not paths or not paths[0]:
            raise ValueError("the model has no head module of its own, hence no features that lead to it")
        return self.model.get_submodule(paths[0])

    def add_private(self, name: str, module: nn.Module) -> None:
        self.model.add_module(name, module.to(self.model.device))
        self._added.append(name)
        for path, parameter in module.named_parameters(prefix=name):
            block = Block(tensor=path, role="other", shape=tuple(parameter.shape), dtype=DTYPES[parameter.dtype])
            self.private.append(block)
            if path in self.vault:
                self.write(block, self.vault[path])

    def close(self) -> None:
        """Takes what was added out of the model again."""
        for name in self._added:
            delattr(self.model, name)
        self._added.clear()


def _called(model: nn.Module, values: dict[str, Tensor], **inputs: Tensor) -> object:
    return functional_call(model, values, (), inputs)
