"""FedOTP: global and local text prompts that cooperate by optimal transport to the patches of each image.

Li et al. 2024, Global and Local Prompts Cooperation via Optimal Transport for Federated Learning, arXiv 2403.00041.
Site k has the global prompts `P`, which are averaged, and prompts `L_k` of its own, which never leave it. For class c
let `H_c` [2, width] be the text features with `P` and with `L_k`, and `G` [V, width] the features of an image's V
patches in the same space, all of length one. With the costs `C = 1 - G H_c^T`, the class's logit is the similarity
that an unbalanced transport plan carries, times the model's scale:

    T = argmin over T >= 0 of <C, T> + lambda * sum T (log T - 1)    with T 1 <= 1/V and T^T 1 = mass/2
    logit_c = scale * <1 - C, T>

So both prompts are matched with a share `mass` of the patches, each with those that it fits. The gradient takes `T`
as a constant; the loss is the cross-entropy over the classes.

As in the authors' code the features of patches are those of the class token's path: the tower's last norm and the
projection. The authors' solver stops when it converges; here it makes a fixed number of iterations, since each
example's plan must not depend on the others of its batch. `L_k` starts as noise, as the paper's: started from `P` it
would have the gradient of `P` until the first average. A version by itself, as a central evaluation sees it, is the
model with `P` and its own image feature, without transport.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from typing import TYPE_CHECKING, Annotated, Any

from pydantic import Field

from tessera.shared.methods.base import (
    Method,
    MethodSettings,
    Phase,
    State,
    TaskContext,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.methods.promptfl import LocalStart, PromptCoordinator, local_prompts, model_prompts
from tessera.shared.model.selectors import Selector
from tessera.shared.schema import Value

if TYPE_CHECKING:
    import torch
    from torch import nn


class Transport(Value):
    """Unbalanced optimal transport, with entropy, from an image's patches to the text features of a class.

    Each feature receives the same share of `mass`, and no patch gives more than its share of an image's mass of one.
    """

    mass: Annotated[float, Field(gt=0, le=1)] = Field(
        default=0.8, description="share of an image's patches that the prompts are matched with"
    )
    regularization: Annotated[float, Field(ge=0.001, le=10)] = Field(
        default=0.1, description="weight of the entropy: the smaller, the fewer patches a prompt is matched with"
    )
    iterations: Annotated[int, Field(ge=1, le=10_000)] = Field(default=100, description="steps of the solver")


class FedOTPSettings(MethodSettings):
    transport: Transport = Field(default=Transport(), description="transport between patches and prompts")
    local_start: LocalStart = Field(default="random", description="initial values of local prompts")
    private_learning_rate: float | None = Field(
        default=None, gt=0, le=100, description="for local prompts; training's by default"
    )


class FedOTPCoordinator(PromptCoordinator[FedOTPSettings]):
    def start(self, state: State) -> State:
        names = {block.name for block in self.run.blocks}
        if "visual_projection.weight" not in names or any(name.startswith("vision_model.head.") for name in names):
            raise UnsupportedRun(
                "the model has no features of patches, which its pooling puts together, as SigLIP's and AIMv2's do: "
                "choose a CLIP or a vision-text-dual-encoder, or the method promptfl or fedpgp"
            )
        return super().start(state)


class FedOTPWorker(WorkerHalf[FedOTPSettings]):
    def setup(self, context: TaskContext) -> None:
        local = local_prompts(model_prompts(context, ("text",)), self.settings.local_start)
        context.add_private("local", local)
        context.replace_output(partial(_transported, self.settings.transport, local))

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected, private_learning_rate=self.settings.private_learning_rate)]


def _transported(
    transport: Transport,
    local: nn.ParameterDict,
    context: TaskContext,
    inputs: Mapping[str, torch.Tensor],
    output: Any,
) -> Any:
    """Return the output with logits by transport between an image's patches and the two text features of a class."""
    import torch

    shared = output.text_embeds.float()
    texts = torch.stack(  # [prompts, classes, width]
        [shared / shared.norm(dim=-1, keepdim=True), context.text_features(inputs, lambda _: local["text"])]
    )
    patches = context.patch_features(output)
    # Not in 16 bits: the costs are divided by a small regularization.
    kind = patches.device.type
    with torch.autocast(kind, enabled=False) if torch.amp.is_autocast_available(kind) else nullcontext():
        similarities = torch.einsum("ivd,pcd->icvp", patches, texts)  # [images, classes, patches, prompts]
    plan = transport_plan(1 - similarities.detach(), transport)
    scale: Any = context.model.logit_scale
    output.logits_per_image = scale.exp() * (plan * similarities).sum(dim=(-2, -1))
    output.logits_per_text = output.logits_per_image.T
    return output


def transport_plan(costs: torch.Tensor, transport: Transport) -> torch.Tensor:
    """Return the plan of the least cost and entropy, [..., patches, prompts], as the costs.

    With V patches and N prompts each column adds up to mass / N, and no row to more than 1 / V, up to the solver's
    error (by Dykstra's projections). K = exp(-costs / regularization), and

        u = min(1, 1 / (V K v)),    v = mass / (N K^T u),    plan = diag(u) K diag(v)

    in logarithms, in which no small regularization underflows.
    """
    patches, prompts = costs.shape[-2:]
    # [..., prompts, patches], so that the long sums run over neighbours in memory, which is faster.
    kernel = (-costs.transpose(-1, -2) / transport.regularization).contiguous()
    row, column = -math.log(patches), math.log(transport.mass / prompts)
    v = kernel.new_zeros(kernel.shape[:-1])
    u = kernel.new_zeros(kernel[..., 0, :].shape)
    for _ in range(transport.iterations):
        u = (row - (kernel + v.unsqueeze(-1)).logsumexp(dim=-2)).clamp(max=0)
        v = column - (kernel + u.unsqueeze(-2)).logsumexp(dim=-1)
    return (u.unsqueeze(-2) + kernel + v.unsqueeze(-1)).exp().transpose(-1, -2)


METHOD = Method(
    name="fedotp",
    good_for="image and text pairs whose classes show in parts of an image. The model needs text prompts, and "
    "features of patches, as CLIP has: `tessera model init --text-prompts 16`",
    sends="the global text prompts, a few kilobytes",
    settings=FedOTPSettings,
    coordinator=FedOTPCoordinator,
    worker=FedOTPWorker,
    source="Li et al., Global and Local Prompts Cooperation via Optimal Transport, arXiv 2403.00041",
)
