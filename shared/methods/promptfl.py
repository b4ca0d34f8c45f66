"""PromptFL: every worker trains the prompts of a frozen dual encoder, and the server averages them.

Guo et al. 2022, arXiv 2208.11625, Algorithm 1: the text prompts of CoOp under FedAvg. `modalities` selects the vision
prompts instead (VPT, arXiv 2203.12119), or both. A worker caches the frozen model's blobs, so that from the second
round on only prompts are transferred.
"""

from collections.abc import Iterable, Sequence

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
from tessera.shared.model.selectors import named
from tessera.shared.model.spec import Modality


class PromptFLSettings(MethodSettings):
    modalities: tuple[Modality, ...] = Field(
        default=("text",),
        min_length=1,
        max_length=2,
        description="towers whose prompts train; other prompts are frozen",
    )


def prompt_blocks(blocks: Iterable[Block], modalities: Sequence[Modality]) -> tuple[str, ...]:
    """Return the names of the model's prompts for these towers, at their input.

    Raises UnsupportedRun for a tower that has none, and for one with deep prompts, which would keep their random
    values.
    """
    there = {block.name for block in blocks}
    names = tuple(f"prompts.{modality}" for modality in modalities)
    if deep := [modality for modality in modalities if f"prompts.deep.{modality}" in there]:
        raise UnsupportedRun(
            f"the model has deep {' and '.join(deep)} prompts, which this method does not train: choose fedvpt, or "
            "create the model without --prompt-depth"
        )
    if absent := [modality for modality, name in zip(modalities, names, strict=True) if name not in there]:
        flags = " ".join(f"--{modality}-prompts N" for modality in absent)
        raise UnsupportedRun(
            f"the model has no {' and '.join(absent)} prompts: create it with `tessera model init {flags}`"
        )
    return names


class PromptFLCoordinator(CoordinatorHalf[PromptFLSettings]):
    def start(self, state: State) -> State:
        prompt_blocks(self.run.blocks, self.settings.modalities)
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        prompts = named(prompt_blocks(self.run.blocks, self.settings.modalities))
        return Plan(stage="prompts", train=prompts, upload=prompts)


METHOD = Method(
    name="promptfl",
    good_for="image and text pairs on very slow lines. The model needs prompts, learnt tokens before each input: "
    "`tessera model init --text-prompts 16`",
    sends="the prompts, a few kilobytes",
    settings=PromptFLSettings,
    coordinator=PromptFLCoordinator,
    source="Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts, arXiv 2208.11625",
)
