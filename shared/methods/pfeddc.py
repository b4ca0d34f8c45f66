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
from dataclasses import replace
from statistics import fmean, median
from typing import Literal

import numpy as np
from pydantic import Field

from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
    Guard,
    LocalResult,
    Method,
    MethodSettings,
    Participant,
    Phase,
    Plan,
    RunInfo,
    State,
    TaskContext,
    TrainingStats,
    UnsupportedRun,
    Update,
    WorkerHalf,
)
from tessera.shared.methods.promptfl import prompt_blocks
from tessera.shared.model.selectors import NOTHING, Selector, named
from tessera.shared.model.spec import MODALITIES, Fusion, LocalStart, Modality

Share = Literal["prompts", "prompts-and-fusion", "nothing"]

FUSED = "fused."
"""The prefix, before a tower, of a site's metric |A| / |G|: the length of what the fusion adds, over that of the
global prompts. In a version, the sites' median."""
DISTANCE = "local_distance."
"""Likewise |L - G| / |G|: how far a site's local prompts are from the global ones."""
SILENT = "silent."
"""The prefix of a version's share of sites whose fusion adds less than `ADDS_NOTHING`."""
FAR = "far."
"""Likewise of sites with a distance above `TOO_FAR`."""

ADDS_NOTHING = 1e-3
"""A first step at a rate of 1e-4 adds more: about .003."""
TOO_FAR = 5.0
"""Random local prompts are 1.4 away from random global ones, and training leaves them within 2."""


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

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged = super().merge(state, updates)
        measured = (FUSED, DISTANCE, SILENT, FAR)
        scalars = {name: value for name, value in merged.scalars.items() if not name.startswith(measured)}
        for tower in MODALITIES:
            for kind, share, is_signature in (
                (FUSED, SILENT, lambda size: size < ADDS_NOTHING),
                (DISTANCE, FAR, lambda size: size > TOO_FAR),
            ):
                if found := [value for each in updates if (value := each.metrics.get(kind + tower)) is not None]:
                    scalars[kind + tower] = median(found)
                    scalars[share + tower] = fmean(map(is_signature, found))
        return replace(merged, scalars=scalars)

    def check_merge(self, guard: Guard) -> None:
        """Accept all: a malicious worker can affect only the metrics, which private sites do not send."""

    def warnings(self, state: State) -> Sequence[str]:
        warnings = []
        for tower in MODALITIES:
            if share := state.scalars.get(SILENT + tower):
                warnings.append(
                    f"attention collapse: at {share:.0%} of the sites the fusion of {tower} prompts adds nothing to "
                    "the global ones. Change private_learning_rate, or set fusion.kind to mean"
                )
            if share := state.scalars.get(FAR + tower):
                warnings.append(
                    f"domain overfitting: at {share:.0%} of the sites the local {tower} prompts are over {TOO_FAR:g} "
                    "times the length of the global ones away from them, where the frozen encoder may not know its "
                    "inputs. Lower private_learning_rate, or train for fewer epochs"
                )
        return warnings

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
    signals = (FUSED, DISTANCE)

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

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        result, fusion = super().collect(context, selected, stats), self.settings.fusion
        blocks = {block.name: block for block in (*context.blocks, *context.private)}
        metrics = dict(result.metrics)
        for tower, name in trained_prompts(self.settings, self.run).items():
            shared, local = context.read(blocks[name]), context.read(blocks[f"local.{tower}"])
            size = float(np.linalg.norm(shared)) or 1.0
            metrics[DISTANCE + tower] = float(np.linalg.norm(local - shared)) / size
            if fusion.adds:
                queries = local if fusion.asks == "local" else shared
                metrics[FUSED + tower] = float(np.linalg.norm(context.inserted_prompts(tower) - queries)) / size
        return replace(result, metrics=metrics)


METHOD = Method(
    name="pfeddc",
    good_for="image and text pairs. The model needs prompts (learnt tokens before each input) of sites and run: "
    "`tessera model init --prompt-fusion local`",
    sends="the global prompts and what fuses them",
    settings=PFedDCSettings,
    coordinator=PFedDCCoordinator,
    worker=PFedDCWorker,
    source="pFedDC, arXiv 2506.21144, section 3",
    paper={
        "method.settings.fusion.kind": ("plain", "section 3.2: a cross-attention, without normalisation or bounds"),
        "method.settings.local_start": ("random", "critical path: local prompts and attention start at random"),
        "training.optimizer": ("sgd", "method summary: SGD over prompts and attention"),
        "max_examples": ("unlimited", "method summary: weighted FedAvg"),
    },
    unstated="the queries, heads and residual of the attention, the numbers of tokens, rounds, epochs, batch size, "
    "learning rate; its studies of robustness have 10 sites and 20 rounds",
    charts=(
        Chart(
            "fusion and local prompts",
            (FUSED, DISTANCE),
            "no site has measured them",
            title="What the fusion adds, and the distance of local prompts",
            description="As shares of the global prompts' length: the sites' medians.",
        ),
    ),
)
