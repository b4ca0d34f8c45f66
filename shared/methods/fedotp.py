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

from collections.abc import Sequence

from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Phase,
    Plan,
    State,
    TaskContext,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.methods.promptfl import prompt_blocks
from tessera.shared.model.selectors import Selector, named
from tessera.shared.model.spec import LocalStart, Transport


class FedOTPSettings(MethodSettings):
    transport: Transport = Field(default=Transport(), description="transport between patches and prompts")
    local_start: LocalStart = Field(default="random", description="initial values of local prompts")
    private_learning_rate: float | None = Field(
        default=None, gt=0, le=100, description="for local prompts; training's by default"
    )


class FedOTPCoordinator(CoordinatorHalf[FedOTPSettings]):
    def start(self, state: State) -> State:
        prompt_blocks(self.run.blocks, ("text",))
        names = {block.name for block in self.run.blocks}
        if "visual_projection.weight" not in names or any(name.startswith("vision_model.head.") for name in names):
            raise UnsupportedRun(
                "the model has no features of patches, which its pooling puts together, as SigLIP's and AIMv2's do: "
                "choose a CLIP or a vision-text-dual-encoder, or the method promptfl or fedpgp"
            )
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        prompts = named(prompt_blocks(self.run.blocks, ("text",)))
        return Plan(stage="prompts", train=prompts, upload=prompts)


class FedOTPWorker(WorkerHalf[FedOTPSettings]):
    def setup(self, context: TaskContext) -> None:
        context.match_patches(self.settings.transport, self.settings.local_start)

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected, private_learning_rate=self.settings.private_learning_rate)]


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
