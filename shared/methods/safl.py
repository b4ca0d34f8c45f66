"""SAFL: each round trains and sends only some layers, by default those that attend most to the task's tokens.

Selective Attention Federated Learning, arXiv 2504.11793, Sections III.A to III.C. Every point that the paper leaves
open is a setting; docs/methods.md gives the reasons for the defaults. A layer's score is its attention mass,
normalized to [0, 1], or a control that shows whether attention matters. Layers of several stacks (encoder and
decoder, two towers) are ranked within their stack, and each stack contributes its share of the K layers.

    S_k = the K layers of the largest score;   w_l = w_l + sum_{k: l in S_k} n_k d_kl / sum_{k: l in S_k} n_k

A version's scalars, by layer number (with several stacks, the stack's number and the layer's): `picks`, the number of
updates with the layer; `last_pick`, the last version that it was sent for; `score` and `entropy`, as last measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import islice
from math import fsum, inf, nan
from random import Random
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
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
from tessera.shared.model.attention_stats import ByHead, LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block, Layer, Role, layers_of
from tessera.shared.model.selectors import NOTHING, Match, Selector
from tessera.shared.run_settings import Privacy, Training
from tessera.shared.tensors.lazy import Array

if TYPE_CHECKING:
    import torch

Score = Literal["attention", "sink-corrected", "gradient-norm", "fisher", "random", "first", "last", "fixed"]
OF_ATTENTION = frozenset({"attention", "sink-corrected"})
OF_DATA = OF_ATTENTION | {"gradient-norm", "fisher"}

DEFAULT_SHARE = 1 / 3
"""The paper's 8 of 24."""

SHOWN = 8

CODED = 4
"""The compression by int8, at half a percent of error: a run's byte budget is filled with layers for this codec."""

# The scalars of a plan: whether to measure scores, and the number of layers to choose.
PROFILE = "profile"
LAYERS = "layers"


class SAFLSettings(MethodSettings):
    score: Score = Field(
        default="attention", description="the ranking of layers; `random` and later ones use no data"
    )
    tokens: TaskTokens = Field(default=TaskTokens(), description="the tokens whose attention counts")
    chooser: Literal["worker", "consensus"] = Field(
        default="worker", description="each worker chooses by its own scores, or all train the same by the mean score"
    )
    layers: PositiveInt | None = Field(
        default=None, description="K, the layers that a worker trains in a round, as a number"
    )
    share: float | None = Field(
        default=None, gt=0, le=1, description="K as a share of the model's layers; 1/3 if no key gives K"
    )
    upload_bytes: PositiveInt | None = Field(
        default=None, description="K as the layers that fit into this many bytes, before any codec"
    )
    upload_seconds: PositiveFloat | None = Field(
        default=None, description="fewer layers for a worker whose upload takes longer at its declared bandwidth"
    )
    memory_share: float | None = Field(
        default=None,
        gt=0,
        le=1,
        description="fewer layers for a worker whose training would exceed this share of its declared memory",
    )
    fixed: tuple[str, ...] = Field(
        default=(), description="shell patterns for the names of layers, for the score fixed"
    )
    always: tuple[Role, ...] = Field(
        default=("head", "norm"), description="blocks outside the layers that train in every round, by role"
    )
    within: tuple[Role, ...] | None = Field(
        default=None, min_length=1, description="blocks of a chosen layer that train, by role; by default all"
    )
    profile_every: PositiveInt = Field(default=1, description="rounds for which a choice, or a mean score, is valid")
    profile_batches: PositiveInt = Field(
        default=4, description="local batches to measure scores on; a noisy private choice uses all"
    )
    prune: float = Field(default=0.0, ge=0, lt=1, description="share of each matrix's rows whose changes are dropped")
    prune_by: Literal["attention", "magnitude"] = Field(
        default="attention", description="rows of the heads with the least mass first, or of the smallest change"
    )
    starved_after: PositiveInt = Field(default=10, description="rounds without a pick before a warning")
    collapsed_below: float = Field(default=0.1, ge=0, le=1, description="attention entropy below which to warn")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(given is not None for given in (self.layers, self.share, self.upload_bytes)) > 1:
            raise ValueError("give one of layers, share and upload_bytes, not several")
        if (self.score == "fixed") != bool(self.fixed):
            raise ValueError("give fixed if, and only if, the score is fixed")
        if self.score == "sink-corrected" and self.tokens.where == "first":
            raise ValueError("the first token is the sink itself: choose other task tokens, or the score attention")
        return self

    @property
    def looks_at_data(self) -> bool:
        return self.score in OF_DATA

    @property
    def needs_heads(self) -> bool:
        return self.prune > 0 and self.prune_by == "attention"


# ---------------------------------------------------------------- candidates


@dataclass(frozen=True)
class Candidates:
    """The layers of each stack that can be chosen, with the blocks that the settings train."""

    stacks: tuple[tuple[Layer, ...], ...]
    within: tuple[Role, ...] | None
    """The roles that train in a chosen layer; all if None."""
    always: tuple[Block, ...]
    """The blocks that train regardless of the choice."""

    @classmethod
    def of(cls, settings: SAFLSettings, blocks: Sequence[Block]) -> Self:
        stacks: dict[str, list[Layer]] = {}
        for layer in layers_of(blocks):
            # A layer without attention has no such score.
            if settings.score in OF_ATTENTION and not any(block.role == "query" for block in layer.blocks):
                continue
            if trained := tuple(b for b in layer.blocks if settings.within is None or b.role in settings.within):
                stacks.setdefault(layer.stack, []).append(replace(layer, blocks=trained))
        always = tuple(block for block in blocks if block.layer is None and block.role in settings.always)
        return cls(tuple(map(tuple, stacks.values())), settings.within, always)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for stack in self.stacks for layer in stack)

    @property
    def labels(self) -> dict[str, str]:
        """The suffix of each layer's scalars, by its name."""
        if len(self.stacks) == 1:
            return {layer.name: str(layer.index) for layer in self.layers}
        return {layer.name: f"{place}.{layer.index}" for place, stack in enumerate(self.stacks) for layer in stack}

    def quotas(self, count: int) -> list[int]:
        """Return each stack's share of `count` layers, in proportion: the ranks of all stacks, sorted by midpoint."""
        ranks = [((rank + 0.5) / len(stack), s) for s, stack in enumerate(self.stacks) for rank in range(len(stack))]
        chosen = [s for _, s in sorted(ranks)[:count]]
        return [chosen.count(s) for s in range(len(self.stacks))]

    def top(self, scores: Mapping[str, float], count: int) -> list[Layer]:
        """Return the layers of the largest scores by name; of equals, those nearer the input."""
        chosen: list[Layer] = []
        for stack, quota in zip(self.stacks, self.quotas(count), strict=True):
            chosen += sorted(stack, key=lambda layer: -scores[layer.name])[:quota]
        return chosen

    def trained_bytes(self, count: int) -> int:
        """Return the most bytes that any choice of `count` layers trains, and sends."""
        total = sum(block.nbytes for block in self.always)
        for stack, quota in zip(self.stacks, self.quotas(count), strict=True):
            total += sum(sorted((layer.nbytes for layer in stack), reverse=True)[:quota])
        return total

    def fitting(self, nbytes: float) -> int:
        """Return the number of layers of which any choice trains at most `nbytes`."""
        return max((k for k in range(len(self.layers) + 1) if self.trained_bytes(k) <= nbytes), default=0)

    def selector(self, chosen: Sequence[Layer]) -> Selector:
        """Select the trained blocks of the chosen layers, and the blocks that always train."""
        patterns = tuple(pattern for layer in chosen for pattern in _patterns(layer))
        always = tuple(escape(block.name) for block in self.always)
        matches = [Match(roles=self.within, names=patterns)] if patterns else []
        return Selector(include=(*matches, Match(names=always)) if always else tuple(matches))


def _patterns(layer: Layer) -> Sequence[str]:
    # A layer of a custom block map has no common prefix.
    return [f"{escape(layer.name)}.*"] if layer.stack else [escape(block.name) for block in layer.blocks]


def check_privacy(settings: SAFLSettings, privacy: Privacy | None) -> None:
    """Raise UnsupportedRun if SAFL would disclose more about a site's data than the run's privacy covers."""
    if privacy is None or not (settings.looks_at_data or settings.needs_heads):
        return
    if privacy.selection == "refused":
        raise UnsupportedRun(
            "SAFL reads the data to choose layers, which the run's epsilon does not cover: set privacy.selection to "
            "noisy, or to uncovered to accept this explicitly; or set score to random and prune_by to magnitude"
        )
    if settings.looks_at_data and settings.chooser == "consensus":
        raise UnsupportedRun("a private worker reports no scores for a consensus: set chooser to worker")
    if privacy.selection == "noisy" and settings.looks_at_data and settings.score not in OF_ATTENTION:
        raise UnsupportedRun(
            f"no noise covers the score {settings.score}, which one example can change without bound: set score to "
            "attention, sink-corrected or random"
        )
    if privacy.selection == "noisy" and settings.needs_heads:
        raise UnsupportedRun("noise covers the choice of layers, not that of heads: set prune_by to magnitude")


# ---------------------------------------------------------------- the coordinator


class SAFLCoordinator(CoordinatorHalf[SAFLSettings]):
    def __init__(self, settings: SAFLSettings, run: RunInfo) -> None:
        super().__init__(settings, run)
        self._candidates = Candidates.of(settings, run.blocks)
        layers = self._candidates.layers
        self._fixed = [layer for layer in layers if any(fnmatchcase(layer.name, name) for name in settings.fixed)]

    def start(self, state: State) -> State:
        layers, settings = self._candidates.layers, self.settings
        check_privacy(settings, self.run.privacy)
        if not layers:
            raise UnsupportedRun("the model has no layers that SAFL can choose with these settings")
        if settings.layers and settings.layers > len(layers):
            raise UnsupportedRun(f"of {len(layers)} layers, {settings.layers} are to be chosen: lower layers")
        if settings.upload_bytes and self._k == 0:
            raise UnsupportedRun(
                f"upload_bytes is {settings.upload_bytes}, and one layer with the blocks that always train has "
                f"{self._candidates.trained_bytes(1)}: raise upload_bytes"
            )
        if unknown := [name for name in settings.fixed if not any(fnmatchcase(layer.name, name) for layer in layers)]:
            raise UnsupportedRun(
                f"no layer is called {unknown[0]}; there are {', '.join(layer.name for layer in layers[:SHOWN])}"
            )
        return state

    @property
    def _k(self) -> int:
        """The number of layers of a worker that declares no resources."""
        settings, candidates, budget = self.settings, self._candidates, self.run.upload_budget
        if settings.score == "fixed":
            count = len(self._fixed)
        elif settings.upload_bytes is not None:
            count = candidates.fitting(settings.upload_bytes)
        else:
            count = settings.layers or max(1, round((settings.share or DEFAULT_SHARE) * len(candidates.layers)))
        return count if budget is None else min(count, candidates.fitting(CODED * budget))

    def _k_of(self, worker: Participant) -> int:
        settings, fitting = self.settings, [self._k]
        rate, memory = (worker.resources.get(name) for name in ("upload_bytes_per_second", "memory_bytes"))
        if settings.upload_seconds is not None and rate is not None:
            fitting.append(self._candidates.fitting(rate * settings.upload_seconds))
        if self.run.upload_seconds is not None and rate is not None:
            fitting.append(self._candidates.fitting(CODED * rate * self.run.upload_seconds))
        if settings.memory_share is not None and memory is not None:
            free = memory * settings.memory_share - sum(block.nbytes for block in self.run.blocks)
            fitting.append(self._candidates.fitting(free / copies_in_training(self.run.training)))
        # At least one layer, unless other blocks train: a worker must train something.
        return max(min(fitting), 0 if self._candidates.always else 1)

    # ------------------------------------------------------------ plans

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        common = self._drawn(rng)
        each = self.settings.chooser == "worker"
        return {worker.name: self._plan(state, worker, self._drawn(rng) if each else common) for worker in cohort}

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return self._plan(state, worker, self._drawn(Random(state.round)))  # noqa: S311 (no secret)

    def _drawn(self, rng: Random) -> dict[str, float]:
        return {layer.name: rng.random() for layer in self._candidates.layers}

    def _plan(self, state: State, worker: Participant, drawn: Mapping[str, float]) -> Plan:
        settings, candidates, count = self.settings, self._candidates, self._k_of(worker)
        scalars = {PROFILE: float(state.round % settings.profile_every == 0)}
        layers: Sequence[Layer] = candidates.layers
        if settings.score == "fixed":
            layers = self._fixed[:count]
        elif not settings.looks_at_data:
            sign = {"first": -1, "last": 1}.get(settings.score)
            layers = candidates.top({e.name: sign * e.index if sign else drawn[e.name] for e in layers}, count)
        elif settings.chooser == "worker":
            scalars[LAYERS] = float(count)
        else:
            scores = {name: state.scalars.get(f"score.{label}") for name, label in candidates.labels.items()}
            known = {name: score for name, score in scores.items() if score is not None}
            if len(known) < len(scores):
                return Plan(stage="profile", train=NOTHING, upload=NOTHING, scalars={PROFILE: 1.0})
            layers = candidates.top(known, count)
        selector = candidates.selector(layers)
        return Plan(train=selector, upload=selector, scalars=scalars)

    # ------------------------------------------------------------ merging

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        if self.settings.chooser == "worker" or not self.settings.looks_at_data or not plan.scalars.get(PROFILE):
            return
        largest = 1.0 if self.settings.score in OF_ATTENTION else inf
        for name, label in self._candidates.labels.items():
            if not 0 <= (score := metrics.get(f"score.{label}", nan)) <= largest:
                raise ValueError(f"the score of {name} is {score}, and must be a number from 0 to {largest:g}")

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged = super().merge(state, updates)
        scalars = dict(merged.scalars)
        for layer in self._candidates.layers:
            label = self._candidates.labels[layer.name]
            names = {block.name for block in layer.blocks}
            picks = sum(not names.isdisjoint(update.blocks) for update in updates)
            scalars[f"picks.{label}"] = scalars.get(f"picks.{label}", 0.0) + picks
            if picks:
                scalars[f"last_pick.{label}"] = float(merged.round)
            for measured in (f"score.{label}", f"entropy.{label}"):
                reported = [(u.examples, u.metrics[measured]) for u in updates if measured in u.metrics]
                if reported:
                    scalars[measured] = fsum(n * value for n, value in reported) / sum(n for n, _ in reported)
        return replace(merged, scalars=scalars)

    def check_robust(self) -> None:
        """Accept every rule: all steps pass it. A malicious worker can affect the layers that a consensus chooses."""

    def check_client_privacy(self) -> None:
        if self.settings.looks_at_data:
            raise UnsupportedRun("client_privacy covers no choice by data: set score to random, first, last or fixed")

    def check_secure_sums(self) -> None:
        """Raise UnsupportedRun unless all sites send the same layers, chosen without their data."""
        if self.settings.looks_at_data or self.settings.chooser == "worker":
            raise UnsupportedRun(
                "under secure_sums a layer that few sites send is lost, and no site sends its scores: set score to "
                "one that reads no data, such as random, and chooser to consensus"
            )
        if self.settings.memory_share is not None or self.settings.upload_seconds is not None:
            raise UnsupportedRun(
                "under secure_sums all sites train the same layers: leave out memory_share and upload_seconds, by "
                "which sites train different numbers of layers"
            )

    def largest_update(self, plan: Plan) -> int:
        layers = plan.scalars.get(LAYERS)
        return super().largest_update(plan) if layers is None else self._candidates.trained_bytes(int(layers))

    def inclusion_probability(self, block: Block) -> float:
        settings = self.settings
        if settings.looks_at_data:
            raise UnsupportedRun(
                f"with the score {settings.score} the probability that a layer is sent is unknown: set score to "
                "random, or choose another normalization than inverse-probability"
            )
        limits = (settings.memory_share, settings.upload_seconds, self.run.upload_seconds)
        if settings.prune or any(limit is not None for limit in limits):
            raise UnsupportedRun(
                "inverse-probability requires that all workers send whole layers, with the same probability: leave "
                "out prune, upload_seconds and memory_share, or choose another normalization"
            )
        if settings.score == "random":
            quotas = self._candidates.quotas(self._k)
            for stack, quota in zip(self._candidates.stacks, quotas, strict=True):
                if any(block in layer.blocks for layer in stack):
                    return quota / len(stack)
        return 1.0

    def warnings(self, state: State) -> Sequence[str]:
        settings, labels, warnings = self.settings, self._candidates.labels, []
        if "head" in settings.always and not any(block.role == "head" for block in self.run.blocks):
            warnings.append(
                "always names the head, and this model has none of its own: its output matrix is tied to the token "
                "embeddings, which stay as they are. Add embedding to always to train it"
            )
        last = {name: int(state.scalars.get(f"last_pick.{label}", 0)) for name, label in labels.items()}
        starved = [name for name, version in last.items() if state.round - version >= settings.starved_after]
        # With explicitly chosen layers the others are left out on purpose.
        if starved and settings.score not in {"first", "last", "fixed"}:
            warnings.append(
                f"layer starvation: {_listed(starved)} in no update of the last {settings.starved_after} rounds, and "
                "not trained by any worker"
            )
        entropies = {name: state.scalars.get(f"entropy.{label}", inf) for name, label in labels.items()}
        if low := [name for name, entropy in entropies.items() if entropy < settings.collapsed_below]:
            worst = min(low, key=entropies.__getitem__)
            warnings.append(
                f"attention collapse: {_listed(low)} below an entropy of {settings.collapsed_below:g} ({worst} at "
                f"{entropies[worst]:.3f}); their queries attend to hardly more than one token each"
            )
        return warnings


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more are" if len(names) > SHOWN else (" are" if len(names) > 1 else " is")
    return ", ".join(names[:SHOWN]) + more


def copies_in_training(training: Training) -> int:
    """Return the number of copies of trained blocks besides their value: the gradient and the optimizer's state."""
    if training.optimizer == "adamw":
        return 3
    return 2 if training.momentum else 1


# ---------------------------------------------------------------- the worker


class SAFLWorker(WorkerHalf[SAFLSettings]):
    one_example_per_row = True

    def __init__(self, settings: SAFLSettings, run: RunInfo) -> None:
        super().__init__(settings, run)
        self._candidates = Candidates.of(settings, run.blocks)
        self._noisy = run.privacy is not None and run.privacy.selection == "noisy"
        self._chosen: list[int] = []  # indices of candidates
        self._rows: dict[str, ByHead] = {}
        self._metrics: dict[str, float] = {}
        self._before: dict[str, Array] = {}

    def select(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> Selector:
        # Here too: a site does not rely on the coordinator for its privacy.
        check_privacy(self.settings, self.run.privacy)
        vault = context.vault
        self._chosen = [int(place) for place in vault.get("safl/chosen", ())]
        names = [name.removeprefix("safl/mass/") for name in vault if name.startswith("safl/mass/")]
        self._rows = {name: ByHead(int(vault[f"safl/axis/{name}"][0]), vault[f"safl/mass/{name}"]) for name in names}
        if self._must_profile(context.plan):
            self._profile(context, batches)
        selected = context.plan.train
        if LAYERS in context.plan.scalars:
            # A choice that there is no room for now stays in the vault for later.
            chosen = self._chosen if context.plan.scalars[LAYERS] else ()
            selected = self._candidates.selector([self._candidates.layers[place] for place in chosen])
        if self.settings.prune:
            matrices = (block for layer in self._candidates.layers for block in layer.blocks if len(block.shape) > 1)
            self._before = context.read_all(block for block in matrices if selected.holds(block))
        return selected

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected)] if selected else []

    def _must_profile(self, plan: Plan) -> bool:
        own, sends = plan.scalars.get(LAYERS), bool(plan.upload)
        if own == 0:
            return False
        measures = self.settings.looks_at_data or (self.settings.needs_heads and sends)
        lacks_choice = own is not None and len(self._chosen) != own
        lacks_heads = self.settings.needs_heads and sends and not self._rows
        return (measures and bool(plan.scalars.get(PROFILE))) or lacks_choice or lacks_heads

    def _profile(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
        settings = self.settings
        # All of them for noise: if one more example shifted the first batches, sums could change by more than 1.
        count = None if self._noisy else settings.profile_batches
        attention: Mapping[str, LayerAttention] = {}
        if settings.score in OF_ATTENTION or settings.needs_heads:
            attention = context.attention(islice(batches, count), settings.tokens)
            self._rows = {name: rows for layer in attention.values() for name, rows in layer.rows.items()}
            self._report("entropy", {name: layer.entropy for name, layer in attention.items()})
        blocks = [block for layer in self._candidates.layers for block in layer.blocks]
        scores: dict[str, Array] = {}  # by layer: [examples] for attention, otherwise [1]
        match settings.score:
            case "attention":
                scores = {name: layer.mass for name, layer in attention.items()}
            case "sink-corrected":
                scores = {name: beyond_the_sink(layer) for name, layer in attention.items()}
            case "gradient-norm":
                norms = context.gradient_norms(islice(batches, count), blocks)
                scores = {name: np.array([norm]) for name, norm in norms.items()}
            case "fisher":
                traces = context.fisher(islice(batches, count), blocks)
                scores = {name: np.array([trace]) for name, trace in traces.items()}
        if LAYERS in context.plan.scalars:
            self._chosen = self._choice(context, scores, attention, int(context.plan.scalars[LAYERS]))
        else:
            self._report("score", {name: float(score.mean()) for name, score in scores.items()})

    def _choice(
        self, context: TaskContext, scores: Mapping[str, Array], attention: Mapping[str, LayerAttention], count: int
    ) -> list[int]:
        candidates = self._candidates
        chosen = {layer.name for layer in candidates.top({n: float(s.mean()) for n, s in scores.items()}, count)}
        if self.settings.score in OF_ATTENTION:
            # Only sums over examples can be made noisy; a stack that reads no examples needs no noise.
            noisy: list[tuple[list[str], int]] = []
            for stack, quota in zip(candidates.stacks, candidates.quotas(count), strict=True):
                names = [layer.name for layer in stack]
                per_example = {attention[name].per_example for name in names}
                if per_example == {True}:
                    noisy.append((names, quota))
                elif True in per_example and self._noisy:
                    raise UnsupportedRun(
                        f"{', '.join(names[:SHOWN])}: some of these layers read examples and others only inputs "
                        "common to all, which no noise covers: set score to fixed, first, last or random"
                    )
            for names, quota in noisy:
                table = np.stack([scores[name] for name in names], axis=1)  # [examples, layers]
                best = context.top_k(table, quota, picks=sum(quota for _, quota in noisy))
                chosen = (chosen - {*names}) | {names[place] for place in best}
        return [place for place, layer in enumerate(candidates.layers) if layer.name in chosen]

    def _report(self, kind: str, by_name: Mapping[str, float]) -> None:
        labels = self._candidates.labels
        self._metrics |= {f"{kind}.{labels[name]}": value for name, value in by_name.items() if name in labels}

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        whole = super().collect(context, selected, stats)
        upload, keep = dict(whole.upload), dict(whole.keep)
        for name in upload.keys() & self._before.keys():
            by_head = self._rows.get(name) if self.settings.needs_heads else None
            upload[name] = pruned(self._before[name], upload[name], self.settings.prune, by_head)
        if self.settings.profile_every > 1:
            # Until the next profile a site keeps its choice, and the masses by head.
            if self._chosen:
                keep["safl/chosen"] = np.array(self._chosen, dtype=np.int64)
            for name, rows in self._rows.items():
                keep[f"safl/axis/{name}"] = np.array([rows.axis], dtype=np.int64)
                keep[f"safl/mass/{name}"] = rows.mass
        return LocalResult(upload, keep, {**whole.metrics, **self._metrics})


def beyond_the_sink(layer: LayerAttention) -> Array:
    """Return the mass on the task's tokens as a share of the mass beyond the first token, [examples] in [0, 1].

    In causal models the first token attracts attention without meaning. (Subtraction of the mean over other tokens,
    which is also proposed, changes no ranking: rows sum to 1, so that mean falls as the mass rises.)
    """
    left = np.maximum(1 - layer.sink, np.finfo(np.float64).tiny)
    share: Array = np.minimum(layer.mass / left, 1.0)
    return share


def pruned(before: Array, after: Array, share: float, by_head: ByHead | None) -> Array:
    """Return `after` with this share of its rows, rounded down, reset to their value `before`.

    The rows of the heads with the least mass come first, among equals those that changed least; without heads, the
    rows along the first axis that changed least. In an update of differences such rows are zeros.
    """
    axis = by_head.axis if by_head else 0
    old, new = np.moveaxis(before, axis, 0), np.moveaxis(after.copy(), axis, 0)  # [rows, ...]
    changes = np.square(new.astype(np.float64) - old).reshape(len(new), -1).sum(1)
    mass = by_head.mass if by_head else np.zeros(len(new))
    least = np.lexsort((changes, mass))[: int(share * len(new))]
    new[least] = old[least]
    result: Array = np.moveaxis(new, 0, axis)
    return result


METHOD = Method(
    name="safl",
    good_for="fewer bytes: each site trains only the layers that attend most to the task's tokens",
    sends="the chosen layers, and the head",
    settings=SAFLSettings,
    coordinator=SAFLCoordinator,
    worker=SAFLWorker,
    source="Selective Attention Federated Learning, arXiv 2504.11793, Sections III.A to III.C",
    charts=(
        Chart("attention entropy", ("entropy.",), "no worker has measured it", title="Attention entropy by layer"),
    ),
)
