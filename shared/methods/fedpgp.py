"""FedPGP: global text prompts, a low-rank term of each site's own, and a contrastive loss that holds the former near
the frozen model's own text features.

Cui et al. 2024, Harmonizing Generalization and Personalization in Federated Prompt Learning, arXiv 2405.09771. With
`P` the global prompts [tokens, width], the prompts of site k are

    P_k = P + U_k V_k,    U_k [tokens, rank], V_k [rank, width]

`P` is averaged; `U_k` and `V_k` stay at the site. For each class let z_g, z_k and z_c be the text features with `P`,
with `P_k` and without prompts, s their cosines, and T the temperature. The loss is

    f_k + mu * mean over classes of -log( exp(s(z_g, z_c)/T) / (exp(s(z_g, z_c)/T) + exp(s(z_g, z_k)/T)) )

where f_k is the cross-entropy with `P_k`. So `P` is drawn towards what the frozen model knows of the classes, and
away from the site's prompts. The paper's z_c is of a caption written by hand; here it is of the site's texts as they
are, so the data set's template is the caption. The paper draws `U` and `V` alike; here `V` starts at zero, so that a
new site, or one that lost its vault, starts from the global prompts, to the bit. With mu = 0 there is no contrast.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from pydantic import Field

from tessera.shared.methods.base import Method, MethodSettings, Phase, State, TaskContext, WorkerHalf
from tessera.shared.methods.promptfl import PromptCoordinator, model_prompts, noise, parameters
from tessera.shared.model.selectors import Selector
from tessera.shared.schema import Condition

if TYPE_CHECKING:
    import torch


class FedPGPSettings(MethodSettings):
    conditions = (Condition(("temperature",), lambda settings: settings.mu > 0, "mu above 0"),)

    rank: int = Field(default=4, ge=1, le=1024, description="rank of a site's own term")
    mu: float = Field(default=1.0, ge=0, le=1000, description="weight of the contrastive term")
    temperature: float = Field(default=0.5, gt=0, le=100, description="T: divides the similarities")
    private_learning_rate: float | None = Field(
        default=None, gt=0, le=100, description="for the site's own term; training's by default"
    )


class FedPGPCoordinator(PromptCoordinator[FedPGPSettings]):
    def warnings(self, state: State) -> Sequence[str]:
        text = next(block for block in self.run.blocks if block.name == "prompts.text")
        if self.settings.rank < (most := min(text.shape)):
            return ()
        full = (
            f"rank is {self.settings.rank} and prompts.text {text.shape[0]} x {text.shape[1]}, so that a site's own "
            f"term is any matrix and not of low rank: set rank below {most}, or create the model with more prompts"
        )
        return (full,)


class FedPGPWorker(WorkerHalf[FedPGPSettings]):
    def setup(self, context: TaskContext) -> None:
        prompts, rank = model_prompts(context, ("text",))["text"], self.settings.rank
        tokens, width = prompts.shape
        own = parameters([("u", noise(prompts, tokens, rank)), ("v", prompts.new_zeros(rank, width))])
        context.add_private("local", own)
        context.insert_prompts({"text": lambda shared: shared + own["u"] @ own["v"]})

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected, private_learning_rate=self.settings.private_learning_rate)]

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        loss = super().loss(context, batch)
        if not self.settings.mu:
            return loss
        # [classes, width] each, of length one.
        shared = context.text_features(batch, lambda prompts: prompts)
        own = context.text_features(batch)
        plain = context.text_features(batch, lambda prompts: prompts[:0])
        near, far = ((shared * other).sum(dim=-1) / self.settings.temperature for other in (plain, own))
        return loss + self.settings.mu * (near.logaddexp(far) - near).mean()


METHOD = Method(
    name="fedpgp",
    good_for="image and text pairs: prompts that fit each site and still know classes that no site has. The model "
    "needs text prompts: `tessera model init --text-prompts 16`",
    sends="the global text prompts, a few kilobytes",
    settings=FedPGPSettings,
    coordinator=FedPGPCoordinator,
    worker=FedPGPWorker,
    source="Cui et al., Harmonizing Generalization and Personalization in FPL, arXiv 2405.09771",
)
