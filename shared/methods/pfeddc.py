"""pFedDC: global prompts shared by all sites, local prompts of each site, and attention that fuses both.

arXiv 2506.21144, section 3: each site trains the global prompts of both towers of a frozen dual encoder, which are
averaged, and local prompts and a cross-attention for each tower, which never leave the site. Points that the paper
leaves open are settings: the attention's queries and number of heads (`fusion`), the initial local prompts, and the
learning rate of the local part.

The attention normalizes its inputs, has no biases and adds at most the size of its queries: otherwise it learns a
constant that is many times as large as the global prompts (`fused` has the formula). Its output projection starts at
zero, so that by default every site starts from the global prompts alone, also one that joins late or has lost its
vault.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from statistics import fmean, median
from typing import TYPE_CHECKING, Any, Literal

import numpy as np
from pydantic import Field

from tessera.shared.methods.base import (
    Chart,
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
from tessera.shared.methods.promptfl import (
    LocalStart,
    PromptCoordinator,
    local_prompts,
    model_prompts,
    parameters,
    prompt_blocks,
)
from tessera.shared.model.selectors import NOTHING, Selector, named
from tessera.shared.model.spec import MODALITIES, Fusion, Modality
from tessera.shared.schema import Compatibility

if TYPE_CHECKING:
    import torch

Share = Literal["prompts", "prompts-and-fusion", "nothing"]

FUSED = "fused."
"""The prefix, before a tower, of a site's metric |A| / |G|: the length of the fusion's addition, over that of the
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

TINY = 1e-12
"""Keeps the gradient of a norm finite at zero, where the attention's output starts."""


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
    return prompt_blocks(run.blocks, modalities)


class PFedDCCoordinator(PromptCoordinator[PFedDCSettings]):
    # `merge` adds metrics of each update by itself. Of a region, charts and warnings alone lack them.
    buffered = unequal_steps = regional = Compatibility()

    def start(self, state: State) -> State:
        fusion = self.settings.fusion
        names = trained_prompts(self.settings, self.run).values()
        prompts = [block for block in self.run.blocks if block.name in names]
        if fusion.differs_by_token and (single := [block.name for block in prompts if block.shape[0] == 1]):
            raise UnsupportedRun(
                f"{single[0]} is a single token, to which {fusion.kind} adds nothing: create a model with "
                'more, or set fusion.kind to "mean" or "concat"'
            )
        if odd := sorted(block.shape[-1] for block in prompts if not fusion.divides(block.shape[-1])):
            raise UnsupportedRun(
                f"prompts of width {odd[0]} do not divide among {fusion.heads} heads: set fusion.heads to a divisor"
            )
        return super().start(state)

    def plan_for(self, state: State, worker: Participant) -> Plan:
        plan = super().plan_for(state, worker)
        return plan.model_copy(update={"upload": NOTHING}) if self.settings.share == "nothing" else plan

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

    def _prompts(self) -> Selector:
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
        settings, towers = self.settings, tuple(trained_prompts(self.settings, self.run))
        prompts = model_prompts(context, towers)
        local = local_prompts(prompts, settings.local_start)
        context.add_private("local", local)
        weights = self._fusion(context, prompts)
        self._inserted: dict[Modality, Callable[[torch.Tensor], torch.Tensor]] = {
            tower: partial(_fused_with, settings.fusion, weights[tower], local, tower) for tower in towers
        }
        context.insert_prompts(self._inserted)

    def _fusion(self, context: TaskContext, prompts: Mapping[Modality, torch.Tensor]) -> Any:
        """Return the fusion's matrices by name for each tower: the model's if the run averages them, else new ones of
        this site's own, which follow torch's seed."""
        from torch import nn

        fusion = self.settings.fusion
        if self.settings.share == "prompts-and-fusion":
            models: Any = context.model.get_submodule("prompts")
            if models.fused_by != fusion:
                raise UnsupportedRun(
                    f"the model fuses prompts by {models.fused_by}, and the run by {fusion}: set the same fusion in "
                    "both"
                )
            return models.fusion
        weights = {
            tower: {name: each.to(own) for name, each in fusion_weights(fusion, own.shape[1]).items()}
            for tower, own in prompts.items()
        }
        if not fusion.trains:
            return weights
        trained = nn.ModuleDict({tower: parameters(each.items()) for tower, each in weights.items()})
        context.add_private("fusion", trained)
        return trained

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
                inserted = self._inserted[tower](context.model.get_parameter(name)).detach().float().cpu().numpy()
                metrics[FUSED + tower] = float(np.linalg.norm(inserted - queries)) / size
        return replace(result, metrics=metrics)


def _fused_with(fusion: Fusion, weights: Any, local: Any, tower: Modality, shared: torch.Tensor) -> torch.Tensor:
    return fused(fusion, weights, shared, local[tower])


def fusion_weights(fusion: Fusion, width: int) -> dict[str, torch.Tensor]:
    """Return the matrices with which a fusion of prompts starts, by name; none for a mean and a concatenation.

    They follow torch's seed, except in `random-attention`, where they are the same at all sites and never train.
    """
    import torch

    dice = torch.Generator().manual_seed(0) if fusion.kind == "random-attention" else None
    return {
        name: torch.nn.init.xavier_uniform_(torch.empty(shape), generator=dice) if is_random else torch.zeros(shape)
        for name, (shape, is_random) in fusion.matrices(width).items()
    }


def fused(
    fusion: Fusion, weights: Mapping[str, torch.Tensor], shared: torch.Tensor, local: torch.Tensor
) -> torch.Tensor:
    """Return the fusion of the federation's and a site's own prompts, [tokens, width] each, for insertion.

    Let a be the asking prompts and b the answering ones. `attention`, `random-attention` and `mlp` return a + A with

        X = f(N(a), N(b))
        Y = (X - m) + m |X - m| / sqrt(|X - m|^2 + |m|^2)
        A = Y |a| / sqrt(|a|^2 + |Y|^2)

    N is layer normalisation without gain or bias, m the mean of X over the asking tokens, repeated for each, and |.|
    the l2 norm over all tokens. So f does not depend on the prompts' size, A is smaller than a, and the part of A
    common to all tokens is smaller than the part that differs by token. `plain` is the paper's A = f(a, b).

    Attention has heads of width d, and f(a, b) = softmax(a Q (b K)^T / sqrt(d)) b V O. Its control `mlp` joins each
    asking token with the answering one at its place, f(a, b) = gelu([a b] H) O, with as many values in H and O as in
    the four matrices. O starts at zero, except in `plain` and `random-attention`.
    """
    import torch
    from torch.nn.functional import gelu

    if fusion.kind == "mean":
        return (shared + local) / 2
    if fusion.kind == "concat":
        return torch.cat([shared, local])
    asking, answers = (local, shared) if fusion.asks == "local" else (shared, local)
    if fusion.kind == "plain":
        return asking + _attention(fusion.heads, weights, asking, answers).to(asking.dtype)
    inputs = _normalised(asking), _normalised(answers)
    if fusion.attends:
        found = _attention(fusion.heads, weights, *inputs).float()
    else:
        both = torch.cat(inputs, dim=1).to(weights["hidden"].dtype)  # [tokens, 2 width]
        found = (gelu(both @ weights["hidden"].T) @ weights["output"].T).float()
    common = found.mean(dim=0, keepdim=True).expand_as(found)
    by_token = found - common
    added = _shortened(by_token + _shortened(common, by_token), asking.float())
    return asking + added.to(asking.dtype)


def _attention(
    heads: int, weights: Mapping[str, torch.Tensor], asking: torch.Tensor, answers: torch.Tensor
) -> torch.Tensor:
    # [heads, tokens, width of a head] each
    queries, keys, values = (
        (inputs.to(weight.dtype) @ weight.T).view(len(inputs), heads, -1).transpose(0, 1)
        for inputs, weight in ((asking, weights["query"]), (answers, weights["key"]), (answers, weights["value"]))
    )
    shares = (queries @ keys.transpose(1, 2) / math.sqrt(queries.shape[-1])).softmax(dim=-1)
    return (shares.to(values.dtype) @ values).transpose(0, 1).flatten(1) @ weights["output"].T


def _normalised(tokens: torch.Tensor) -> torch.Tensor:
    from torch.nn.functional import layer_norm

    # Prompts are small: their variance is about 0.0004, so torch's default epsilon would not be negligible.
    return layer_norm(tokens.float(), tokens.shape[-1:], eps=TINY)


def _shortened(values: torch.Tensor, reference: torch.Tensor) -> torch.Tensor:
    """Return the values scaled to a norm below that of `reference`; hardly changed where theirs is much smaller."""
    most = reference.square().sum() + TINY
    return values * (most / (most + values.square().sum())).sqrt()


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
            title="The fusion's addition, and the distance of local prompts",
            description="As shares of the global prompts' length: the sites' medians.",
        ),
    ),
)
