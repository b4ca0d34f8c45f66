"""SAFL: each round only some layers are trained and sent, by default those that attend most to the task's tokens.

Selective Attention Federated Learning, arXiv 2504.11793, Sections III.A to III.C, with every point that the paper
leaves open as a setting; docs/methods.md says what is chosen where and why. A layer's score is its attention mass,
normalised to [0, 1], or one of the controls that show whether attention matters. Layers of several stacks (encoder
and decoder, two towers) are ranked within their stack, and each stack gives its share of the K.

    S_k = the K layers of the largest score;   w_l = w_l + sum_{k: l in S_k} n_k d_kl / sum_{k: l in S_k} n_k

`numbers` of a version, by layer (its number; of several stacks, the stack's and its own): `picks` is how often it was
sent, `last_pick` the version that it was last sent for, and `score` and `entropy` are what workers last measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from glob import escape
from itertools import compress, islice
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
"""Within the run's budget of bytes so many layers are chosen that int8 brings them into it, for half a percent of
error; fewer with less error, or more with more, would both be somebody's choice."""

# What a plan tells a worker in numbers: whether to measure, and how many layers to choose.
PROFILE = "profile"
LAYERS = "layers"


class SAFLSettings(MethodSettings):
    score: Score = Field(default="attention", description="what layers are chosen by; from `random` on, no data")
    tokens: TaskTokens = Field(default=TaskTokens(), description="the tokens that attention should go to")
    chooser: Literal["worker", "consensus"] = Field(
        default="worker", description="each worker chooses by its own scores, or all train the same by the mean score"
    )
    layers: PositiveInt | None = Field(default=None, description="K, as a number")
    share: float | None = Field(
        default=None, gt=0, le=1, description="K, as a share of the layers; 1/3 if no K is given"
    )
    upload_bytes: PositiveInt | None = Field(default=None, description="K, as what fits into so many bytes, uncoded")
    upload_seconds: PositiveFloat | None = Field(
        default=None, description="fewer layers for a worker that needs longer, by the bandwidth that it declares"
    )
    memory_share: float | None = Field(
        default=None, gt=0, le=1, description="fewer layers for a worker whose declared memory they would exceed"
    )
    fixed: tuple[str, ...] = Field(default=(), description="names of layers, as shell patterns, for the score fixed")
    always: tuple[Role, ...] = Field(
        default=("head", "norm"), description="blocks outside the layers that train in every round, by role"
    )
    within: tuple[Role, ...] | None = Field(
        default=None, min_length=1, description="what trains of a chosen layer, by role; all of it if left out"
    )
    profile_every: PositiveInt = Field(default=1, description="rounds for which a choice, or a mean score, stands")
    profile_batches: PositiveInt = Field(
        default=4, description="local batches that scores are measured on; all of them for a noisy private choice"
    )
    prune: float = Field(default=0.0, ge=0, lt=1, description="share of each matrix's rows whose change is not sent")
    prune_by: Literal["attention", "magnitude"] = Field(
        default="attention", description="rows of the heads with the least mass first, or of the smallest change"
    )
    starved_after: PositiveInt = Field(default=10, description="rounds without a pick that are worth a warning")
    collapsed_below: float = Field(default=0.1, ge=0, le=1, description="entropy that is worth a warning")

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(given is not None for given in (self.layers, self.share, self.upload_bytes)) > 1:
            raise ValueError("give one of layers, share and upload_bytes")
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


# ---------------------------------------------------------------- which layers there are, and how many are taken


@dataclass(frozen=True)
class Candidates:
    """What can be chosen among: the layers of each stack, as far as the settings would train them."""

    stacks: tuple[tuple[Layer, ...], ...]
    within: tuple[Role, ...] | None
    """What trains of a chosen layer; all of it if None."""
    always: tuple[Block, ...]
    """What trains whatever is chosen."""

    @classmethod
    def of(cls, settings: SAFLSettings, blocks: Sequence[Block]) -> Self:
        stacks: dict[str, list[Layer]] = {}
        for layer in layers_of(blocks):
            # What does not attend cannot be chosen by its attention.
            if settings.score in OF_ATTENTION and not any(block.role == "query" for block in layer.blocks):
                continue
            if held := tuple(b for b in layer.blocks if settings.within is None or b.role in settings.within):
                stacks.setdefault(layer.stack, []).append(replace(layer, blocks=held))
        always = tuple(block for block in blocks if block.layer is None and block.role in settings.always)
        return cls(tuple(map(tuple, stacks.values())), settings.within, always)

    @property
    def layers(self) -> tuple[Layer, ...]:
        return tuple(layer for stack in self.stacks for layer in stack)

    @property
    def labels(self) -> dict[str, str]:
        """What the numbers call each layer, by its name."""
        if len(self.stacks) == 1:
            return {layer.name: str(layer.index) for layer in self.layers}
        return {layer.name: f"{place}.{layer.index}" for place, stack in enumerate(self.stacks) for layer in stack}

    def quotas(self, count: int) -> list[int]:
        """Return how many of each stack are among `count`: in proportion, ranks of all stacks ordered by their
        middles."""
        ranks = [((rank + 0.5) / len(stack), s) for s, stack in enumerate(self.stacks) for rank in range(len(stack))]
        taken = [s for _, s in sorted(ranks)[:count]]
        return [taken.count(s) for s in range(len(self.stacks))]

    def top(self, scores: Mapping[str, float], count: int) -> list[Layer]:
        """Return the layers of the largest scores, given by name; of equals, the one nearer the input."""
        chosen: list[Layer] = []
        for stack, quota in zip(self.stacks, self.quotas(count), strict=True):
            chosen += sorted(stack, key=lambda layer: -scores[layer.name])[:quota]
        return chosen

    def trained_bytes(self, count: int) -> int:
        """Return the most bytes that train, and that are sent, with so many layers, whichever they are."""
        most = sum(block.nbytes for block in self.always)
        for stack, quota in zip(self.stacks, self.quotas(count), strict=True):
            most += sum(sorted((layer.nbytes for layer in stack), reverse=True)[:quota])
        return most

    def fitting(self, nbytes: float) -> int:
        """Return the most layers that train within so many bytes, whichever they are."""
        return max((k for k in range(len(self.layers) + 1) if self.trained_bytes(k) <= nbytes), default=0)

    def selector(self, chosen: Sequence[Layer]) -> Selector:
        """Return the chosen layers' blocks, as far as they train, and what always trains."""
        patterns = tuple(pattern for layer in chosen for pattern in _patterns(layer))
        always = tuple(escape(block.name) for block in self.always)
        matches = [Match(roles=self.within, names=patterns)] if patterns else []
        return Selector(include=(*matches, Match(names=always)) if always else tuple(matches))


def _patterns(layer: Layer) -> Sequence[str]:
    """Shell patterns for the names of the layer's blocks: one for all, unless a mapping numbered them freely."""
    return [f"{escape(layer.name)}.*"] if layer.stack else [escape(block.name) for block in layer.blocks]


def check_privacy(settings: SAFLSettings, privacy: Privacy | None) -> None:
    """Raise UnsupportedRun where what SAFL tells of a site's data is not what the run's privacy covers."""
    if privacy is None or not (settings.looks_at_data or settings.needs_heads):
        return
    if privacy.selection == "refused":
        raise UnsupportedRun(
            "SAFL looks at the data to choose, which the run's epsilon does not cover: set privacy.selection to "
            "noisy, or to uncovered to say so in plain sight; or take the score random, and prune by magnitude"
        )
    if settings.looks_at_data and settings.chooser == "consensus":
        raise UnsupportedRun("a private worker tells no scores to find a consensus by: set chooser to worker")
    if privacy.selection == "noisy" and settings.looks_at_data and settings.score not in OF_ATTENTION:
        raise UnsupportedRun(f"no noise covers the score {settings.score}, which one example may move without bound")
    if privacy.selection == "noisy" and settings.needs_heads:
        raise UnsupportedRun("noise covers the choice of layers, and not that of heads: set prune_by to magnitude")


@dataclass(frozen=True)
class First:
    """The first of some batches, or all of them, each time it is gone through."""

    batches: Iterable[Mapping[str, torch.Tensor]]
    count: int | None

    def __iter__(self) -> Iterator[Mapping[str, torch.Tensor]]:
        return islice(self.batches, self.count)


# ---------------------------------------------------------------- the coordinator


class SAFLCoordinator(CoordinatorHalf[SAFLSettings]):
    def __init__(self, settings: SAFLSettings, run: RunInfo) -> None:
        super().__init__(settings, run)
        self._candidates = Candidates.of(settings, run.blocks)

    def start(self, state: State) -> State:
        layers, settings = self._candidates.layers, self.settings
        check_privacy(settings, self.run.privacy)
        if not layers:
            raise UnsupportedRun("the model has no layers that SAFL could choose among with these settings")
        if settings.layers and settings.layers > len(layers):
            raise UnsupportedRun(
                f"of {len(layers)} layers, {settings.layers} are to be chosen: lower the setting layers"
            )
        if settings.upload_bytes and self._k == 0:
            raise UnsupportedRun(
                f"upload_bytes is {settings.upload_bytes}, and one layer with what always trains has "
                f"{self._candidates.trained_bytes(1)}"
            )
        if odd := [name for name in settings.fixed if not any(fnmatchcase(layer.name, name) for layer in layers)]:
            raise UnsupportedRun(
                f"no layer is called {odd[0]}; there are {', '.join(layer.name for layer in layers[:8])}"
            )
        return state

    @property
    def _k(self) -> int:
        """How many layers a worker trains that declares nothing of itself."""
        if self.run.upload_budget is None:
            return self._wanted
        return min(self._wanted, self._candidates.fitting(CODED * self.run.upload_budget))

    @property
    def _wanted(self) -> int:
        settings, count = self.settings, len(self._candidates.layers)
        if settings.score == "fixed":
            return len(self._fixed())
        if settings.upload_bytes is not None:
            return self._candidates.fitting(settings.upload_bytes)
        return settings.layers or max(1, round((settings.share or DEFAULT_SHARE) * count))

    def _fixed(self) -> list[Layer]:
        fixed = self.settings.fixed
        return [layer for layer in self._candidates.layers if any(fnmatchcase(layer.name, name) for name in fixed)]

    def _k_of(self, worker: Participant) -> int:
        """At least one layer, unless something trains anyway: a worker that trains nothing is of no use."""
        settings, fitting = self.settings, [self._k]
        rate, memory = (worker.resources.get(name) for name in ("upload_bytes_per_second", "memory_bytes"))
        if settings.upload_seconds is not None and rate is not None:
            fitting.append(self._candidates.fitting(rate * settings.upload_seconds))
        if self.run.upload_seconds is not None and rate is not None:
            fitting.append(self._candidates.fitting(CODED * rate * self.run.upload_seconds))
        if settings.memory_share is not None and memory is not None:
            free = memory * settings.memory_share - sum(block.nbytes for block in self.run.blocks)
            fitting.append(self._candidates.fitting(free / copies_in_training(self.run.training)))
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
        settings, count = self.settings, self._k_of(worker)
        profile = {PROFILE: float(state.round % settings.profile_every == 0)}
        if not settings.looks_at_data:
            return self._asking(self._public(drawn, count), profile)
        if settings.chooser == "worker":
            return self._asking(self._candidates.layers, {**profile, LAYERS: float(count)})
        scores = {name: state.scalars.get(f"score.{label}") for name, label in self._candidates.labels.items()}
        known = {name: score for name, score in scores.items() if score is not None}
        if len(known) < len(scores):
            return Plan(stage="profile", train=NOTHING, upload=NOTHING, scalars={PROFILE: 1.0})
        return self._asking(self._candidates.top(known, count), profile)

    def _public(self, drawn: Mapping[str, float], count: int) -> Sequence[Layer]:
        match self.settings.score:
            case "fixed":
                return self._fixed()[:count]
            case "first":
                return self._candidates.top({layer.name: -layer.index for layer in self._candidates.layers}, count)
            case "last":
                return self._candidates.top({layer.name: layer.index for layer in self._candidates.layers}, count)
            case _:
                return self._candidates.top(drawn, count)

    def _asking(self, layers: Sequence[Layer], scalars: dict[str, float]) -> Plan:
        wanted = self._candidates.selector(layers)
        return Plan(train=wanted, upload=wanted, scalars=scalars)

    # ------------------------------------------------------------ merging

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        if self.settings.chooser == "worker" or not self.settings.looks_at_data or not plan.scalars.get(PROFILE):
            return
        most = 1.0 if self.settings.score in OF_ATTENTION else inf
        for name, label in self._candidates.labels.items():
            if not 0 <= (score := metrics.get(f"score.{label}", nan)) <= most:
                raise ValueError(f"the score of {name} is {score}, and must be a number from 0 to {most:g}")

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
                told = [(u.examples, u.metrics[measured]) for u in updates if measured in u.metrics]
                if told:
                    scalars[measured] = fsum(n * value for n, value in told) / sum(n for n, _ in told)
        return replace(merged, scalars=scalars)

    def check_robust(self) -> None:
        """None that moves a block; which layers a consensus chooses, a hostile worker has a say in."""

    def inclusion_probability(self, block: Block) -> float:
        settings = self.settings
        if settings.looks_at_data:
            raise UnsupportedRun(
                f"with the score {settings.score} nobody can know how likely a layer is to be sent: choose the score "
                "random, or another normalization than inverse-probability"
            )
        by_line = (settings.upload_seconds, self.run.upload_seconds)
        if settings.prune or settings.memory_share is not None or by_line != (None, None):
            raise UnsupportedRun(
                "inverse-probability needs every worker to send each layer whole, with the same probability: leave "
                "out prune, upload_seconds and memory_share, or choose another normalization"
            )
        quotas = self._candidates.quotas(self._k)
        for stack, quota in zip(self._candidates.stacks, quotas, strict=True):
            if settings.score == "random" and any(block in layer.blocks for layer in stack):
                return quota / len(stack)
        return 1.0

    # ------------------------------------------------------------ warnings

    def warnings(self, state: State) -> Sequence[str]:
        return [*self._headless(), *self._starved(state), *self._collapsed(state)]

    def _headless(self) -> Iterator[str]:
        if "head" in self.settings.always and not any(block.role == "head" for block in self.run.blocks):
            yield (
                "always names the head, and this model has none of its own: its output matrix is tied to the token "
                "embeddings, which stay as they are. Add embedding to always to train it"
            )

    def _starved(self, state: State) -> Iterator[str]:
        # Where somebody named the layers, the others are left out on purpose.
        if self.settings.score in {"first", "last", "fixed"}:
            return
        since = {
            name: state.round - int(state.scalars.get(f"last_pick.{label}", 0))
            for name, label in self._candidates.labels.items()
        }
        if starved := [name for name, rounds in since.items() if rounds >= self.settings.starved_after]:
            yield (
                f"layer starvation: {_listed(starved)} in no update of the last {self.settings.starved_after} "
                "rounds, and not trained by anybody"
            )

    def _collapsed(self, state: State) -> Iterator[str]:
        entropies = {
            name: state.scalars[f"entropy.{label}"]
            for name, label in self._candidates.labels.items()
            if f"entropy.{label}" in state.scalars
        }
        if low := [name for name, entropy in entropies.items() if entropy < self.settings.collapsed_below]:
            worst = min(low, key=entropies.__getitem__)
            yield (
                f"attention collapse: {_listed(low)} below an entropy of {self.settings.collapsed_below:g} "
                f"({worst} at {entropies[worst]:.3f}); their queries look at hardly more than one token each"
            )


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - SHOWN} more are" if len(names) > SHOWN else (" are" if len(names) > 1 else " is")
    return ", ".join(names[:SHOWN]) + more


def copies_in_training(training: Training) -> int:
    """Return how many copies of what trains there are beside its value: the gradient, and what the optimizer
    keeps."""
    if training.optimizer == "adamw":
        return 3
    return 2 if training.momentum else 1


# ---------------------------------------------------------------- the worker


class SAFLWorker(WorkerHalf[SAFLSettings]):
    def __init__(self, settings: SAFLSettings, run: RunInfo) -> None:
        super().__init__(settings, run)
        self._candidates = Candidates.of(settings, run.blocks)
        self._chosen: list[int] = []  # places among the candidates
        self._rows: dict[str, ByHead] = {}
        self._numbers: dict[str, float] = {}
        self._before: dict[str, Array] = {}

    def select(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> Selector:
        # Here too: what leaves a site is not for the coordinator to say.
        check_privacy(self.settings, self.run.privacy)
        self._recall(context.vault)
        if self._is_to_look(context.plan):
            self._look(context, First(batches, self._batches_to_measure))
        selected = context.plan.train
        if LAYERS in context.plan.scalars:
            layers = self._candidates.layers
            # What was chosen before stays in the vault for when there is room again.
            chosen = self._chosen if context.plan.scalars[LAYERS] else ()
            selected = self._candidates.selector([layers[place] for place in chosen])
        if self.settings.prune:
            matrices = (block for layer in self._candidates.layers for block in layer.blocks if len(block.shape) > 1)
            self._before = {block.name: context.read(block) for block in matrices if selected.holds(block)}
        return selected

    @property
    def _is_noisy(self) -> bool:
        return self.run.privacy is not None and self.run.privacy.selection == "noisy"

    @property
    def _batches_to_measure(self) -> int | None:
        # If an example more or less shifted which are the first ones, sums would not all move one way by at most 1.
        return None if self._is_noisy else self.settings.profile_batches

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected)] if selected else []

    def _is_to_look(self, plan: Plan) -> bool:
        """Return whether this task measures anything on the site's data."""
        own, sends = plan.scalars.get(LAYERS), bool(plan.upload)
        if own == 0:
            return False
        asked = self.settings.looks_at_data or (self.settings.needs_heads and sends)
        lacks_choice = own is not None and len(self._chosen) != own
        lacks_heads = self.settings.needs_heads and sends and not self._rows
        return (asked and bool(plan.scalars.get(PROFILE))) or lacks_choice or lacks_heads

    def _look(self, context: TaskContext, batches: First) -> None:
        settings = self.settings
        attention: Mapping[str, LayerAttention] = {}
        if settings.score in OF_ATTENTION or settings.needs_heads:
            attention = context.attention(batches, settings.tokens)
            self._rows = {name: rows for layer in attention.values() for name, rows in layer.rows.items()}
            self._tell("entropy", {name: layer.entropy for name, layer in attention.items()})
        scores = self._scores(context, batches, attention)
        if LAYERS in context.plan.scalars:
            self._chosen = self._choice(context, scores, attention, int(context.plan.scalars[LAYERS]))
        else:
            self._tell("score", {name: float(each.mean()) for name, each in scores.items()})

    def _scores(
        self, context: TaskContext, batches: First, attention: Mapping[str, LayerAttention]
    ) -> dict[str, Array]:
        """Of each layer, by name: of each example if attention is what counts, else one for all of them."""
        blocks = [block for layer in self._candidates.layers for block in layer.blocks]
        match self.settings.score:
            case "attention":
                return {name: layer.mass for name, layer in attention.items()}
            case "sink-corrected":
                return {name: beyond_the_sink(layer) for name, layer in attention.items()}
            case "gradient-norm":
                return {name: np.array([norm]) for name, norm in context.gradient_norms(batches, blocks).items()}
            case "fisher":
                return {name: np.array([trace]) for name, trace in context.fisher(batches, blocks).items()}
        return {}

    def _choice(
        self, context: TaskContext, scores: Mapping[str, Array], attention: Mapping[str, LayerAttention], count: int
    ) -> list[int]:
        places = {layer.name: place for place, layer in enumerate(self._candidates.layers)}
        means = {name: float(score.mean()) for name, score in scores.items()}
        chosen = {layer.name for layer in self._candidates.top(means, count)}
        if self.settings.score in OF_ATTENTION:
            stacks = [[layer.name for layer in stack] for stack in self._candidates.stacks]
            # Only sums over examples can be made noisy, and where no example has a part in them nothing need be.
            noisy = [all(attention[name].per_example for name in names) for names in stacks]
            mixed = [
                names
                for names, each in zip(stacks, noisy, strict=True)
                if not each and any(attention[name].per_example for name in names)
            ]
            if mixed and self._is_noisy:
                raise UnsupportedRun(
                    f"{', '.join(mixed[0][:SHOWN])}: some of these layers read examples and others what is common to "
                    "all, which no noise covers: take the score fixed, first, last or random"
                )
            quotas = [n if each else 0 for n, each in zip(self._candidates.quotas(count), noisy, strict=True)]
            for names, quota in compress(zip(stacks, quotas, strict=True), noisy):
                table = np.stack([scores[name] for name in names], axis=1)  # [examples, layers]
                best = {names[place] for place in context.top_k(table, quota, picks=sum(quotas))}
                chosen = (chosen - {*names}) | best
        return sorted(places[name] for name in chosen)

    def _tell(self, what: str, by_name: Mapping[str, float]) -> None:
        labels = self._candidates.labels
        self._numbers |= {f"{what}.{labels[name]}": value for name, value in by_name.items() if name in labels}

    # ------------------------------------------------------------ sending

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        whole = super().collect(context, selected, stats)
        sent = {name: self._pruned(name, values) for name, values in whole.upload.items()}
        keep = {**whole.keep, **self._memory()} if self.settings.profile_every > 1 else whole.keep
        return LocalResult(sent, keep, {**whole.metrics, **self._numbers})

    def _pruned(self, name: str, values: Array) -> Array:
        if name not in self._before:
            return values
        by_head = self._rows.get(name) if self.settings.needs_heads else None
        return pruned(self._before[name], values, self.settings.prune, by_head)

    # ------------------------------------------------------------ from round to round

    def _memory(self) -> dict[str, Array]:
        """Return what a site keeps until it profiles again: its choice, and whose rows matter."""
        kept: dict[str, Array] = {"safl/chosen": np.array(self._chosen, dtype=np.int64)} if self._chosen else {}
        for name, rows in self._rows.items():
            kept[f"safl/axis/{name}"] = np.array([rows.axis], dtype=np.int64)
            kept[f"safl/mass/{name}"] = rows.mass
        return kept

    def _recall(self, vault: Mapping[str, Array]) -> None:
        self._chosen = [int(place) for place in vault.get("safl/chosen", ())]
        self._rows = {
            name.removeprefix("safl/mass/"): ByHead(int(vault[name.replace("/mass/", "/axis/", 1)][0]), mass)
            for name, mass in vault.items()
            if name.startswith("safl/mass/")
        }


def beyond_the_sink(layer: LayerAttention) -> Array:
    """Return the mass on the task's tokens as a share of what the first token leaves over, [examples] in [0, 1].

    In causal models the first token draws attention that means nothing. (To subtract the mean over other tokens,
    as is also proposed, changes no ranking: rows sum to 1, so that mean falls as the mass rises.)
    """
    left = np.maximum(1 - layer.sink, np.finfo(np.float64).tiny)
    share: Array = np.minimum(layer.mass / left, 1.0)
    return share


def pruned(before: Array, after: Array, share: float, by_head: ByHead | None) -> Array:
    """`after` with the value that it had `before` in this share of its rows, rounded down.

    First the rows of the heads with the least mass, among equals those that changed least; where no heads are given,
    only those that changed least, along the first axis. In an update of differences such rows are zeros.
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
    settings=SAFLSettings,
    coordinator=SAFLCoordinator,
    worker=SAFLWorker,
    source="Selective Attention Federated Learning, arXiv 2504.11793, Sections III.A to III.C",
    charts=(
        Chart(
            name="attention entropy",
            scalars=("entropy.",),
            missing="no worker has measured it",
            title="Attention entropy by layer",
        ),
    ),
)
