"""pFedDC: global prompts shared by all sites, local prompts of each site, and attention that fuses both.

arXiv 2506.21144, section 3: each site trains the global prompts of both towers of a frozen dual encoder, which are
averaged, and local prompts and a cross-attention for each tower, which never leave the site. Points that the paper
leaves open are settings: the attention's queries and number of heads (`fusion`), the initial local prompts, and the
learning rate of the local part.

The attention normalizes its inputs, has no biases and adds at most the size of its queries: otherwise it learns a
constant that is many times as large as the global prompts (`worker/model/prompt_fusion.py` has the formula). Its
output projection starts at zero, so that by default every site starts from the global prompts alone, also one that
joins late or has lost its vault.
"""

from collections.abc import Sequence
from typing import Literal

from pydantic import Field

from tessera.shared.methods.base import (
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Phase,
    Plan,
    RunInfo,
    State,
    TaskContext,
    UnsupportedRun,
    WorkerHalf,
)
from tessera.shared.methods.promptfl import prompt_blocks
from tessera.shared.model.selectors import NOTHING, Selector, named
from tessera.shared.model.spec import MODALITIES, Fusion, LocalStart, Modality

Share = Literal["prompts", "prompts-and-fusion", "nothing"]


class PFedDCSettings(MethodSettings):
    modalities: tuple[Modality, ...] | None = Field(
        default=None,
        min_length=1,
        max_length=2,
        description="towers whose prompts train; all prompts of the model by default",
    )
    fusion: Fusion = Field(default=Fusion(), description="fusion of global and local prompts")
    local_start: LocalStart = Field(default="global", description="initial values of local prompts")
    private_learning_rate: float | None = Field(
        default=None, gt=0, le=100, description="for local prompts and their fusion; training's by default"
    )
    share: Share = Field(default="prompts", description="the part that is averaged; nothing: without federation")


def trained_prompts(settings: PFedDCSettings, run: RunInfo) -> dict[Modality, str]:
    """Return the names of the prompts that train, by tower. Raises UnsupportedRun if the model lacks one of them, or
    has no prompts."""
    names = {block.name for block in run.blocks}
    modalities = settings.modalities or tuple(each for each in MODALITIES if f"prompts.{each}" in names) or MODALITIES
    return dict(zip(modalities, prompt_blocks(run.blocks, modalities), strict=True))


class PFedDCCoordinator(CoordinatorHalf[PFedDCSettings]):
    def start(self, state: State) -> State:
        self._shared()
        fusion = self.settings.fusion
        names = trained_prompts(self.settings, self.run).values()
        prompts = [block for block in self.run.blocks if block.name in names]
        if fusion.differs_by_token and (single := [block.name for block in prompts if block.shape[0] == 1]):
            raise UnsupportedRun(
                f"{single[0]} is a single token, to which {fusion.kind} adds nothing: create a model with "
                'more, or set fusion.kind to "mean" or "concat"'
            )
        widths = {block.shape[-1] for block in prompts}
        if fusion.attends and (odd := sorted(width for width in widths if width % fusion.heads)):
            raise UnsupportedRun(
                f"prompts of width {odd[0]} do not divide among {fusion.heads} heads: set fusion.heads to a divisor"
            )
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        shared = self._shared()
        return Plan(stage="prompts", train=shared, upload=NOTHING if self.settings.share == "nothing" else shared)

    def _shared(self) -> Selector:
        prompts = trained_prompts(self.settings, self.run)
        names = list(prompts.values())
        if self.settings.share == "prompts-and-fusion":
            prefixes = tuple(f"prompts.fusion.{modality}." for modality in prompts)
            fusion = [block.name for block in self.run.blocks if block.name.startswith(prefixes)]
            if not fusion:
                raise UnsupportedRun(
                    "the model has no fusion to share: make it with "
                    f"`tessera model init --prompt-fusion {self.settings.fusion.asks}`"
                )
            names += fusion
        return named(names)


class PFedDCWorker(WorkerHalf[PFedDCSettings]):
    def private(self) -> Selector:
        alone = self.settings.share == "nothing"
        return named(trained_prompts(self.settings, self.run).values()) if alone else NOTHING

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected, private_learning_rate=self.settings.private_learning_rate)]

    def setup(self, context: TaskContext) -> None:
        context.fuse_prompts(
            tuple(trained_prompts(self.settings, self.run)),
            self.settings.fusion,
            self.settings.local_start,
            shared_fusion=self.settings.share == "prompts-and-fusion",
        )


METHOD = Method(
    name="pfeddc",
    good_for="image and text pairs. The model needs prompts (learnt tokens before each input) of sites and run: "
    "`tessera model init --prompt-fusion local`",
    sends="the global prompts and what fuses them",
    settings=PFedDCSettings,
    coordinator=PFedDCCoordinator,
    worker=PFedDCWorker,
    source="pFedDC, arXiv 2506.21144, section 3",
)
