"""The optimizer's moments, which a site may keep between the rounds of a run, block by block."""

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import Array
from tessera.worker.model.build import read_block, write_block

PREFIX = "moments/"
"""Prefix of the vault's keys for moments, hidden from methods."""
STEP = "step"
"""Number of steps behind the moments, by which AdamW corrects them: of a whole tensor, and kept for each block."""

Trained = Iterable[tuple[Block, Tensor]]
"""The blocks that a phase trains, with their tensors."""


@dataclass
class Moments:
    """The moments of a run's blocks at a site, by phase. Those of a phase without the block stay as they are."""

    values: dict[str, Array]
    """By key: `moments/`, the phase's name, the moment's name in torch's optimizer, and the block's name."""

    @classmethod
    def of(cls, vault: Mapping[str, Array]) -> "Moments":
        """Return the moments in a vault."""
        return cls({name: values for name, values in vault.items() if name.startswith(PREFIX)})

    def restore(self, phase: str, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Give an optimizer that has taken no step the moments of these blocks.

        Those of a tensor start from zero unless all of its trained blocks have moments of equally many steps, of
        which a tensor has one number. Frozen rows have moments of zero.
        """
        blocks = _by_tensor(trained)
        state = optimizer.state_dict()
        indices = {id(each): i for i, each in enumerate(each for g in optimizer.param_groups for each in g["params"])}
        for tensor, held in blocks:
            kept = [self._of_block(phase, block) for block in held]
            if id(tensor) in indices and all(kept) and len({float(each.get(STEP, 0)) for each in kept}) == 1:
                moments = {name: torch.zeros_like(tensor) for name in kept[0] if name != STEP}
                for block, each in zip(held, kept, strict=True):
                    for name, whole in moments.items():
                        write_block({block.tensor: whole}, block, each[name])
                steps = {STEP: torch.tensor(float(kept[0][STEP]))} if STEP in kept[0] else {}
                state["state"][indices[id(tensor)]] = {**moments, **steps}
        # Torch moves them to their devices, where a fused optimizer has the number of steps too.
        optimizer.load_state_dict(state)

    def update(self, phase: str, optimizer: torch.optim.Optimizer, trained: Trained) -> None:
        """Take the moments of these blocks from the optimizer."""
        for tensor, held in _by_tensor(trained):
            for name, moment in optimizer.state.get(tensor, {}).items():
                for block in held if moment is not None else ():
                    whole = np.float32(moment.item()) if name == STEP else read_block({block.tensor: moment}, block)
                    self.values[f"{PREFIX}{phase}/{name}/{block.name}"] = np.asarray(whole)

    def _of_block(self, phase: str, block: Block) -> dict[str, Array]:
        names = (STEP, "exp_avg", "exp_avg_sq", "momentum_buffer")
        keys = {name: f"{PREFIX}{phase}/{name}/{block.name}" for name in names}
        return {name: self.values[key] for name, key in keys.items() if key in self.values}


def _by_tensor(trained: Trained) -> list[tuple[Tensor, list[Block]]]:
    found: dict[int, tuple[Tensor, list[Block]]] = {}
    for block, tensor in trained:
        found.setdefault(id(tensor), (tensor, []))[1].append(block)
    return list(found.values())


def without_moments(vault: Mapping[str, Array]) -> dict[str, Array]:
    """Return the vault's entries without moments."""
    return {name: values for name, values in vault.items() if not name.startswith(PREFIX)}
