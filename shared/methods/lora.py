"""LoRA: training of low-rank adapters, B A beside a matrix, and of the head; the rest of the model is frozen.

The default is FedIT (Zhang et al. 2023, arXiv 2305.05644): A and B are averaged separately, and the product of the
means is not the mean of the products. With `freeze_a` it is FFA-LoRA (Sun et al. 2024, arXiv 2403.12313, section 4):
A keeps its first value, so that the average is exact, mean(B_k A) = mean(B_k) A, and half as many bytes are sent.
"""

from pydantic import Field

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

ADAPTERS = Match(roles=("adapter",))
A_FACTORS = Match(roles=("adapter",), names=("*.lora_A.*",))
HEAD = Match(roles=("head",))


class LoraSettings(MethodSettings):
    freeze_a: bool = Field(default=False, description="freeze A and train only B, as FFA-LoRA does")
    train_head: bool = Field(default=True, description="train and send the head too, if there is one")


class LoraCoordinator(CoordinatorHalf[LoraSettings]):
    def start(self, state: State) -> State:
        if not any(ADAPTERS.holds(block) for block in self.run.blocks):
            raise UnsupportedRun("the model has no adapters: create it with `tessera model init --lora-rank N`")
        if "train_head" in self.settings.model_fields_set and self.settings.train_head and not self._heads:
            raise UnsupportedRun(
                "train_head is true, and the model has no head that can train: it is tied to the embeddings, or part "
                "of the external base. Leave train_head out, or set it to false"
            )
        return state

    @property
    def _heads(self) -> list[Block]:
        """The blocks of the head that can train."""
        return [block for block in self.run.blocks if HEAD.holds(block) and self.run.trainable.holds(block)]

    def plan_for(self, state: State, worker: Participant) -> Plan:
        headed = self.settings.train_head and bool(self._heads)
        adapters = Selector(
            include=(ADAPTERS, HEAD) if headed else (ADAPTERS,),
            exclude=(A_FACTORS,) if self.settings.freeze_a else (),
        )
        return Plan(stage="adapters", train=adapters, upload=adapters)


METHOD = Method(
    name="lora",
    good_for="large models on slow lines. The model needs LoRA adapters, small matrices beside frozen weights: "
    "`tessera model init --lora-rank 8`",
    sends="the adapters and the head, a few percent of the model",
    settings=LoraSettings,
    coordinator=LoraCoordinator,
    source="Zhang et al., FedIT, arXiv 2305.05644; freeze_a: Sun et al., FFA-LoRA, arXiv 2403.12313",
)
