"""FedFrozen whose frozen blocks are drawn at random, as many elements as queries and keys have: its control.

If freezing these gains as much, what helps is the number of frozen elements, not that they are queries and keys.
"""

from __future__ import annotations

from glob import escape
from random import Random

from pydantic import Field, NonNegativeInt

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    UnsupportedRun,
)
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import Match, Selector

MODEL_OF = ("query", "key")
"""The roles whose size is frozen."""
DRAWN = ("query", "key", "value", "output", "mlp")
"""The roles of the blocks that are drawn from, all of them inside layers."""


class RandomFrozenSettings(MethodSettings):
    warmup_rounds: NonNegativeInt = Field(default=5, description="rounds in which everything trains")
    draw: NonNegativeInt = Field(default=0, description="decides which blocks are drawn")


class RandomFrozenCoordinator(CoordinatorHalf[RandomFrozenSettings]):
    def start(self, state: State) -> State:
        if not self._frozen:
            raise UnsupportedRun("the model has no queries and keys whose size could be frozen: use a transformer")
        return state

    @property
    def _frozen(self) -> list[Block]:
        """The drawn blocks: in random order, each that fits into what is left of the size."""
        left = sum(block.nbytes for block in self.run.blocks if block.role in MODEL_OF)
        blocks = [block for block in self.run.blocks if block.role in DRAWN and block.layer is not None]
        chosen = []
        # Dice without a secret: reproducible.
        for block in Random(self.settings.draw).sample(blocks, len(blocks)):  # noqa: S311
            if block.nbytes <= left:
                chosen.append(block)
                left -= block.nbytes
        return chosen

    def plan_for(self, state: State, worker: Participant) -> Plan:
        if state.round < self.settings.warmup_rounds:
            return Plan(stage="warm-up")
        names = tuple(escape(block.name) for block in self._frozen)
        trained = Selector(include=(Match(),), exclude=(Match(names=names),))
        return Plan(stage="frozen", train=trained, upload=trained)


METHOD = Method(
    name="random-frozen",
    settings=RandomFrozenSettings,
    coordinator=RandomFrozenCoordinator,
    source="none: for benchmarks",
)
