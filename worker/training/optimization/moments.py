"""The optimizer's moments, which a site may keep between the rounds of a run, block by block."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import Array
from tessera.worker.model.build import read_block, write_block
from tessera.worker.training.optimization.optimizer_state import optimizer_tensors, set_optimizer_tensors

PREFIX = "moments/"
"""Prefix of the vault's keys for moments, hidden from methods."""
STEP = "step"
"""Number of steps behind the moments, by which AdamW corrects them: of a whole tensor, and kept for each block."""
KEYS = (STEP, "exp_avg", "exp_avg_sq", "momentum_buffer")
"""Torch's names of the moments of AdamW and SGD."""

Trained = Sequence[tuple[Block, Tensor]]
"""The blocks that a phase trains, with their tensors."""


@dataclass
class Moments:
    """The moments of a run's blocks at a site, by phase. A phase without a block leaves its moments as they are."""

    values: dict[str, Array]
    """By key: `moments/`, the phase's name, the moment's name in torch's optimizer, and the block's name."""

    @classmethod
    def of(cls, vault: Mapping[str, Array]) -> "Moments":
        """Return the moments in a vault."""
        return cls({name: values for name, values in vault.items() if name.startswith(PREFIX)})

    def restore(self, phase: str, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Give an optimizer that has taken no step the moments of these blocks.

        A tensor's moments start from zero unless all of its trained blocks have moments of equally many steps: it has
        one number of steps. Frozen rows have moments of zero.
        """
        by_tensor: dict[str, list[Block]] = {}
        for block, _ in trained:
            by_tensor.setdefault(block.tensor, []).append(block)
        parameters, state = {block.tensor: tensor for block, tensor in trained}, dict[str, Tensor]()
        for name, blocks in by_tensor.items():
            kept = [self._of_block(phase, block) for block in blocks]
            if not all(kept) or len({float(each.get(STEP, 0)) for each in kept}) > 1:
                continue
            for key, values in kept[0].items():
                whole = torch.tensor(float(values)) if key == STEP else torch.zeros_like(parameters[name])
                for block, each in zip(blocks, kept, strict=True) if key != STEP else ():
                    write_block({name: whole}, block, each[key])
                state[f"{name}/{key}"] = whole
        set_optimizer_tensors(optimizer, parameters, state)

    def update(self, phase: str, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Take the moments of these blocks from the optimizer."""
        state = optimizer_tensors(optimizer, {block.tensor: tensor for block, tensor in trained})
        for block, _ in trained:
            for key in KEYS:
                moment = state.get(f"{block.tensor}/{key}")
                if moment is not None:
                    values = np.float32(moment.item()) if key == STEP else read_block({block.tensor: moment}, block)
                    self.values[f"{PREFIX}{phase}/{key}/{block.name}"] = np.asarray(values)

    def _of_block(self, phase: str, block: Block) -> dict[str, Array]:
        names = {key: f"{PREFIX}{phase}/{key}/{block.name}" for key in KEYS}
        return {key: self.values[name] for key, name in names.items() if name in self.values}


def without_moments(vault: Mapping[str, Array]) -> dict[str, Array]:
    """Return the vault's entries without moments."""
    return {name: values for name, values in vault.items() if not name.startswith(PREFIX)}
