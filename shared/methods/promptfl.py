"""PromptFL: every worker trains the prompts of a frozen dual encoder, and the server averages them.

Guo et al. 2022, arXiv 2208.11625, Algorithm 1: the text prompts of CoOp under FedAvg. `modalities` selects the vision
prompts instead (VPT, arXiv 2203.12119), or both. A worker caches the frozen model's blobs, so that from the second
round on only prompts are transferred.

Other methods of prompts share the coordinator's half of this one, and the functions that make a site's own prompts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Literal, TypeVar

from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    TaskContext,
    UnsupportedRun,
)
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import Selector, named
from tessera.shared.model.spec import PROMPT_STD, Modality

if TYPE_CHECKING:
    import torch
    from torch import nn

LocalStart = Literal["global", "random"]
"""Initial values of a site's own prompts: the federation's present prompts, or noise."""


class PromptFLSettings(MethodSettings):
    modalities: tuple[Modality, ...] = Field(
        default=("text",),
        min_length=1,
        max_length=2,
        description="towers whose prompts train; other prompts are frozen",
    )


def prompt_blocks(blocks: Iterable[Block], modalities: Sequence[Modality]) -> dict[Modality, str]:
    """Return the names of the model's prompts for these towers, at their input, by tower.

    Raises UnsupportedRun for a tower that has none, and for one with deep prompts, which would keep their random
    values.
    """
    there = {block.name for block in blocks}
    names = {modality: f"prompts.{modality}" for modality in modalities}
    if deep := [modality for modality in modalities if f"prompts.deep.{modality}" in there]:
        raise UnsupportedRun(
            f"the model has deep {' and '.join(deep)} prompts, which this method does not train: choose fedvpt, or "
            "create the model without --prompt-depth"
        )
    if absent := [modality for modality, name in names.items() if name not in there]:
        flags = " ".join(f"--{modality}-prompts N" for modality in absent)
        raise UnsupportedRun(
            f"the model has no {' and '.join(absent)} prompts: create it with `tessera model init {flags}`"
        )
    return names


S = TypeVar("S", bound=MethodSettings)


class PromptCoordinator(CoordinatorHalf[S]):
    """The average of a model's text prompts, or of others that a method's half names."""

    def start(self, state: State) -> State:
        self._prompts()
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        prompts = self._prompts()
        return Plan(stage="prompts", train=prompts, upload=prompts)

    def _prompts(self) -> Selector:
        """Return the prompts that train. Raises UnsupportedRun if the model lacks them."""
        return named(prompt_blocks(self.run.blocks, ("text",)).values())


class PromptFLCoordinator(PromptCoordinator[PromptFLSettings]):
    def _prompts(self) -> Selector:
        return named(prompt_blocks(self.run.blocks, self.settings.modalities).values())


def model_prompts(context: TaskContext, modalities: Sequence[Modality]) -> dict[Modality, torch.Tensor]:
    """Return the model's own prompts for these towers, [tokens, width] each. Raises as `prompt_blocks` does."""
    names = prompt_blocks(context.blocks, modalities)
    return {modality: context.model.get_parameter(name).detach() for modality, name in names.items()}


def local_prompts(prompts: Mapping[Modality, torch.Tensor], start: LocalStart) -> nn.ParameterDict:
    """Return a site's own prompts for each tower, of the size of the model's."""
    # Noise is drawn in either case, so that the random numbers after it are the same.
    drawn = {modality: noise(own, *own.shape) for modality, own in prompts.items()}
    return parameters((prompts if start == "global" else drawn).items())


def noise(like: torch.Tensor, *shape: int) -> torch.Tensor:
    """Return a tensor of random prompts by torch's seed, of the dtype and on the device of another."""
    # Drawn on the CPU, so that a GPU starts from the same values.
    return like.new_empty(shape, device="cpu").normal_(std=PROMPT_STD).to(like.device)


def parameters(tensors: Iterable[tuple[str, torch.Tensor]]) -> nn.ParameterDict:
    """Return parameters that start as copies of named tensors.

    A method's functions take them from here in each pass: while the gradients of single examples are computed, other
    tensors stand in their place.
    """
    from torch import nn

    # As pairs: a dictionary would be sorted, and the order of parameters decides which noise each gets.
    return nn.ParameterDict((name, tensor.clone()) for name, tensor in tensors)


METHOD = Method(
    name="promptfl",
    good_for="image and text pairs on very slow lines. The model needs prompts, learnt tokens before each input: "
    "`tessera model init --text-prompts 16`",
    sends="the prompts, a few kilobytes",
    settings=PromptFLSettings,
    coordinator=PromptFLCoordinator,
    source="Guo et al., PromptFL: Let Federated Participants Cooperatively Learn Prompts, arXiv 2208.11625",
)
