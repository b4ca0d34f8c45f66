"""SAFL: each round trains and sends only some layers, by default those that attend most to the task's tokens.

Selective Attention Federated Learning, arXiv 2504.11793, Sections III.A to III.C. Every point that the paper leaves
open is a setting; docs/methods.md gives the reasons for the defaults. A layer's score is its attention mass,
normalized to [0, 1], or a control that shows whether attention matters. Layers of several stacks (encoder and
decoder, two towers) are ranked within their stack, and each stack contributes its share of the K layers.

    S_k = the K layers of the largest score;   w_l = w_l + sum_{k: l in S_k} n_k d_kl / sum_{k: l in S_k} n_k

A version's scalars, by layer number (with several stacks, the stack's number and the layer's): `picks`, the number of
updates with the layer; `last_pick`, the last version that it was sent for; `score`, `vote` (the share of the ballots
with the layer) and `entropy`, as last measured; `held`, 1 for the layers that a common choice with hysteresis holds.
Besides, `score_spread` over the layers.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fnmatch import fnmatchcase
from itertools import islice
from math import inf, isfinite, nan
from random import Random
from statistics import fmean
from typing import TYPE_CHECKING

import numpy as np

from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
    Guard,
    LocalResult,
    Method,
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
    median_metrics,
)
from tessera.shared.methods.layer_choice import (
    LONE,
    OVERLAP,
    TURNOVER,
    ChosenLayers,
    CommonChoice,
    check_ballot,
    check_calendar,
    due,
    explored,
    waiting,
)
from tessera.shared.methods.safl_settings import OF_ATTENTION, OF_HEADS, ON_PURPOSE, SAFLSettings, check_privacy
from tessera.shared.model.attention_stats import ByHead, LayerAttention
from tessera.shared.model.blocks import Block, Layer
from tessera.shared.model.selectors import NOTHING, Selector
from tessera.shared.run_settings import Training
from tessera.shared.schema import Compatibility
from tessera.shared.tensors.lazy import Array

if TYPE_CHECKING:
    import torch

DEFAULT_SHARE = 1 / 3
"""The paper's 8 of 24."""

SHOWN = 8

CODED = 4
"""The compression by int8, at half a percent of error: a run's byte budget is filled with layers for this codec."""

ENTROPY = "entropy."
"""The prefix, before a layer, of a site's metric of its attention."""
SCORE_SPREAD = "score_spread"
"""A site's largest score less its smallest, over their mean: of several stacks, where this is least."""
CONVERGED = 0.05
"""The spread of scores below which their order is chance."""
UNSTABLE = 3
"""The turnover above which a choice is more noise than principle."""
MISMATCH = 0.5
"""The share of layers with one sender above which most layers are one site's."""
UNIFORM = 0.99
"""The mean entropy above which attention hardly distinguishes tokens."""

# The scalars of a plan: whether to measure scores, the number of the period in which a choice is valid, the number of
# layers to choose, the number to vote for, and by layer those that were drawn for the worker.
PROFILE = "profile"
PERIOD = "period"
LAYERS = "layers"
VOTES = "votes"
DRAWN = "drawn"


# ---------------------------------------------------------------- the coordinator


class SAFLCoordinator(CoordinatorHalf[SAFLSettings]):
    # `merge` adds the choices of sites, and averages scaled steps.
    unequal_steps = Compatibility()
    buffered = regional = Compatibility(
        "the method compares the sites' scores of one version",
        'chooser = "worker" or a score that reads no data',
        lambda settings: settings.chooser == "worker" or not settings.looks_at_data,
    )
    averages_parts = True

    def __init__(self, settings: SAFLSettings, run: RunInfo) -> None:
        super().__init__(settings, run)
        self._candidates = settings.candidates(run.blocks, run.trainable)
        self._common = CommonChoice(
            self._candidates,
            "vote" if settings.chooser == "vote" else "score",
            by_examples=settings.chooser == "consensus" or settings.votes_by == "examples",
            smoothing=settings.smoothing,
            hysteresis=settings.hysteresis,
        )
        layers = self._candidates.layers
        self._fixed = [layer for layer in layers if any(fnmatchcase(layer.name, name) for name in settings.fixed)]

    def start(self, state: State) -> State:
        layers, settings = self._candidates.layers, self.settings
        check_privacy(settings, self.run.privacy)
        if not layers:
            raise UnsupportedRun(
                "the model has no layers that SAFL can choose with these settings: set score to random or within to "
                "other roles. Of a model with adapters or prompts only these train in a layer, unless the run sets "
                "training.full_fine_tuning to true"
            )
        if settings.needs_heads and not any(block.role in OF_HEADS for layer in layers for block in layer.blocks):
            raise UnsupportedRun(
                "prune_by is attention, and no block that SAFL trains in a layer has the rows of heads: set prune_by "
                "to magnitude, or leave out prune"
            )
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
        if settings.pick_every:
            check_calendar(self._candidates, settings.pick_every, self._k)
        if settings.explore_after:
            # With fewer rounds, layers that wait would take every place, and no score would choose.
            check_calendar(self._candidates, settings.explore_after, self._k, "explore_after")
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
        if self.settings.chooser == "worker":
            return {
                w.name: self._plan(state, w, self._drawn(rng), self._places(state, self._k_of(w), rng))
                for w in cohort
            }
        places = self._places(state, self._k, rng)
        return {worker.name: self._plan(state, worker, common, places) for worker in cohort}

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return self.plan(state, [worker], Random(state.round))[worker.name]  # noqa: S311 (no secret)

    def _drawn(self, rng: Random) -> dict[str, float]:
        """Return the random scores of layers."""
        return {layer.name: rng.random() for layer in self._candidates.layers}

    def _places(self, state: State, count: int, rng: Random) -> list[str]:
        """Return the layers of the next round that no score chooses."""
        every, after, share = self.settings.pick_every, self.settings.explore_after, self.settings.explore
        taken = due(self._candidates, count, every, state.round + 1) if every else []
        if after:
            taken = waiting(self._candidates, count, self._last_picks(state), state.round - after)
        return taken + (explored(self._candidates, count, share, taken, rng) if share else [])

    def _last_picks(self, state: State) -> dict[str, int]:
        """Return the last version that each layer was sent for, by name; 0 for a layer that never was."""
        labels = self._candidates.labels
        return {name: int(state.scalars.get(f"last_pick.{label}", 0)) for name, label in labels.items()}

    def _plan(self, state: State, worker: Participant, random: Mapping[str, float], places: Sequence[str]) -> Plan:
        settings, candidates, count = self.settings, self._candidates, self._k_of(worker)
        scalars = {PROFILE: float(state.round % settings.profile_every == 0)}
        if settings.profile_every > 1:
            scalars[PERIOD] = float(state.round // settings.profile_every)
        layers: Sequence[Layer] = candidates.layers
        if settings.score == "fixed":
            layers = self._fixed[:count]
        elif not settings.looks_at_data:
            sign = {"first": -1, "last": 1}.get(settings.score)
            scores = {each.name: sign * each.index if sign else random[each.name] for each in layers}
            layers = candidates.top(scores, count, places)
        elif settings.chooser == "worker":
            scalars |= {LAYERS: float(count), **{f"{DRAWN}.{candidates.labels[name]}": 1.0 for name in places}}
        else:
            if settings.chooser == "vote":
                scalars[VOTES] = float(self._k)
            if (common := self._common.layers(state.scalars, count, places)) is None:
                return Plan(stage="profile", train=NOTHING, upload=NOTHING, scalars={**scalars, PROFILE: 1.0})
            layers = common
        selector = candidates.selector(layers)
        return Plan(train=selector, upload=selector, scalars=scalars)

    # ------------------------------------------------------------ merging

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        super().check(plan, examples, metrics)
        labels = self._candidates.labels
        if self.settings.chooser == "worker" or not self.settings.looks_at_data:
            return
        kind = "vote" if self.settings.chooser == "vote" else "score"
        # Unrequested reports of a worker count too.
        if not plan.scalars.get(PROFILE) and not any(f"{kind}.{label}" in metrics for label in labels.values()):
            return
        if self.settings.chooser == "vote":
            votes = {name: metrics[at] for name, label in labels.items() if (at := f"vote.{label}") in metrics}
            check_ballot(self._candidates, votes, self._k)
            return
        largest = 1.0 if self.settings.score in OF_ATTENTION else inf
        for name, label in labels.items():
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
        # Both bounds have room for roundings: a spread is at most the number of layers.
        labels = self._candidates.labels.values()
        scalars |= median_metrics(updates, [ENTROPY + label for label in labels], 1.01)
        scalars |= median_metrics(updates, [SCORE_SPREAD], 1.01 * len(labels))
        if self.settings.chooser != "worker":
            scalars |= self._common.after(scalars, updates, self._k)
        return replace(merged, scalars=scalars)

    def check_merge(self, guard: Guard) -> None:
        """Accept every robust rule, past which a malicious worker can affect the layers that a consensus chooses, and
        has one ballot in a vote; and sums of the same layers of all sites, chosen without their data."""
        if guard == "client_privacy" and self.settings.looks_at_data:
            raise UnsupportedRun("client_privacy covers no choice by data: set score to random, first, last or fixed")
        if guard != "secure_sums":
            return
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
        if settings.pick_every:
            raise UnsupportedRun(
                "with pick_every the probability that a layer is sent differs by round: leave it out, or choose "
                "another normalization than inverse-probability"
            )
        limits = (settings.memory_share, settings.upload_seconds, self.run.upload_seconds)
        if settings.prune or any(limit is not None for limit in limits):
            raise UnsupportedRun(
                "inverse-probability requires that all workers send whole layers, with the same probability: leave "
                "out prune, upload_seconds and memory_share, or choose another normalization"
            )
        if settings.score == "random":
            for stack, quota in self._candidates.shares(self._k):
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
        last = self._last_picks(state)
        # The calendar trains a layer in time. Layers that wait for explore_after together may wait as long again.
        limit = max(settings.starved_after, settings.pick_every or 0, 2 * (settings.explore_after or 0))
        starved = [name for name, version in last.items() if state.round - version >= limit]
        if starved and settings.score not in ON_PURPOSE:
            warnings.append(
                f"layer starvation: {_listed(starved)} in no update of the last {limit} rounds, and not trained by "
                "any worker"
            )
        entropies = {
            n: state.scalars[at] for n, label in labels.items() if (at := f"entropy.{label}") in state.scalars
        }
        if low := [name for name, entropy in entropies.items() if entropy < settings.collapsed_below]:
            worst = min(low, key=entropies.__getitem__)
            warnings.append(
                f"peaked attention: {_listed(low)} below an entropy of {settings.collapsed_below:g} ({worst} at "
                f"{entropies[worst]:.3f}); their queries attend to hardly more than one token each"
            )
        if settings.score != "random" and state.scalars.get(TURNOVER, 0.0) > UNSTABLE:
            warnings.append(
                f"unstable selection: a site changes more than {UNSTABLE} of its layers from one update to the next, "
                "so that the choice is more noise than principle. Let a site keep it (hysteresis, smoothing or "
                "profile_every), or lower explore"
            )
        if state.scalars.get(LONE, 0.0) > MISMATCH:
            warnings.append(
                "aggregation mismatch: most layers of the round come from one site each, so their average is that "
                "site's alone. Let the sites agree on layers (chooser consensus or vote), or have each train more of "
                "them"
            )
        by_attention, collapsed = settings.score in OF_ATTENTION, []
        if state.scalars.get(SCORE_SPREAD, inf) < CONVERGED:
            collapsed.append(f"the layers' scores differ by less than {CONVERGED:.0%} of their mean")
        if by_attention and entropies and fmean(entropies.values()) > UNIFORM:
            collapsed.append(f"heads attend to all tokens alike, with a mean entropy above {UNIFORM:g}")
        if collapsed:
            others = ", name other task tokens (tokens), or set score to fisher" if by_attention else ""
            warnings.append(
                f"{'attention' if by_attention else 'score'} collapse: {' and '.join(collapsed)}, so that the choice "
                f"of layers is hardly better than a random one. Begin with a pre-trained model{others}"
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
    signals = (ENTROPY, SCORE_SPREAD)

    @classmethod
    def beyond_training(cls, settings: SAFLSettings) -> str | None:
        # By other scores the plan alone says which layers train.
        own = settings.looks_at_data or settings.prune > 0
        return super().beyond_training(settings) if own else None

    def __init__(self, settings: SAFLSettings, run: RunInfo) -> None:
        super().__init__(settings, run)
        self._candidates = settings.candidates(run.blocks, run.trainable)
        self._noisy = run.privacy is not None and run.privacy.selection == "noisy"
        self._chosen: list[int] = []  # indices of candidates, by stack the best first
        self._scores: Array = np.zeros(0)  # [candidates], the exponential mean of profiles, if it is needed
        self._rows: dict[str, ByHead] = {}
        self._period: float | None = None  # that of the last profile
        self._metrics: dict[str, float] = {}
        self._before: dict[str, Array] = {}

    def select(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> Selector:
        # Here too: a site does not rely on the coordinator for its privacy.
        check_privacy(self.settings, self.run.privacy)
        vault, candidates, scalars = context.vault, self._candidates, context.plan.scalars
        self._chosen = [int(place) for place in vault.get("safl/chosen", ())]
        self._scores = vault.get("safl/scores", self._scores)
        self._period = float(vault["safl/period"][0]) if "safl/period" in vault else None
        names = [name.removeprefix("safl/mass/") for name in vault if name.startswith("safl/mass/")]
        self._rows = {name: ByHead(int(vault[f"safl/axis/{name}"][0]), vault[f"safl/mass/{name}"]) for name in names}
        drawn = [name for name, label in candidates.labels.items() if scalars.get(f"{DRAWN}.{label}")]
        if self._must_profile(context.plan, len(drawn)):
            self._profile(context, batches)
        selected = context.plan.train
        if LAYERS in scalars:
            # A choice that there is no room for now stays in the vault for later.
            ranks = {candidates.layers[place].name: -rank for rank, place in enumerate(self._chosen)}
            scores = {layer.name: ranks.get(layer.name, -inf) for layer in candidates.layers}
            selected = candidates.selector(candidates.top(scores, int(scalars[LAYERS]), drawn))
        if self.settings.prune:
            matrices = (block for layer in self._candidates.layers for block in layer.blocks if len(block.shape) > 1)
            self._before = context.read_all(block for block in matrices if selected.holds(block))
        return selected

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected)] if selected else []

    def _must_profile(self, plan: Plan, drawn: int) -> bool:
        own, sends, period = plan.scalars.get(LAYERS), bool(plan.upload), plan.scalars.get(PERIOD)
        # A site that missed the round of the profiles profiles when it is back.
        is_due = bool(plan.scalars.get(PROFILE)) or (self._period is not None and period not in {None, self._period})
        if own == 0:
            return False
        lacks_choice = own is not None and len(self._chosen) != own
        # If all places are drawn, there is nothing to choose, and no reason to look at data.
        for_choice = self.settings.looks_at_data and (is_due or lacks_choice) and (own is None or drawn < own)
        return for_choice or (self.settings.needs_heads and sends and (is_due or not self._rows))

    def _profile(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> None:
        settings, self._period = self.settings, context.plan.scalars.get(PERIOD)
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
        if scores and isfinite(spread := self._spread(scores)):
            self._metrics[SCORE_SPREAD] = spread
        scalars = context.plan.scalars
        if LAYERS in scalars:
            if settings.smoothing:
                scores = self._smoothed(scores)
            self._chosen = self._choice(context, scores, attention, int(scalars[LAYERS]))
        elif VOTES in scalars:
            ballot = self._choice(context, scores, attention, int(scalars[VOTES]))
            self._report("vote", {e.name: float(at in ballot) for at, e in enumerate(self._candidates.layers)})
        else:
            self._report("score", {name: float(score.mean()) for name, score in scores.items()})

    def _spread(self, scores: Mapping[str, Array]) -> float:
        """Return the least spread of a stack's scores; inf if no stack has a choice."""
        means = [[float(scores[layer.name].mean()) for layer in stack] for stack in self._candidates.stacks]
        # Scores that are all 0 are equal.
        return min(((max(each) - min(each)) / (fmean(each) or 1.0) for each in means if len(each) > 1), default=inf)

    def _smoothed(self, scores: Mapping[str, Array]) -> dict[str, Array]:
        """Return the exponential mean of each layer's score over this site's profiles, [1], and keep it."""
        names, old = [layer.name for layer in self._candidates.layers], self.settings.smoothing
        found = np.array([scores[name].mean() for name in names])
        self._scores = old * self._scores + (1 - old) * found if len(self._scores) == len(found) else found
        return {name: self._scores[[place]] for place, name in enumerate(names)}

    def _choice(
        self, context: TaskContext, scores: Mapping[str, Array], attention: Mapping[str, LayerAttention], count: int
    ) -> list[int]:
        """Return the candidates of the largest scores, by stack the best first. Layers that this site chose last hold
        their places by the hysteresis."""
        layers, margin = self._candidates.layers, self.settings.hysteresis
        held = ChosenLayers(
            frozenset(layers[place].name for place in self._chosen) if margin else frozenset(), margin
        )
        shares: list[tuple[list[str], int, bool]] = []
        for stack, quota in self._candidates.shares(count):
            # Of equals the first is chosen, so those that hold a place come first.
            names = sorted((layer.name for layer in stack), key=lambda name: name not in held.names)
            shares.append((names, quota, self._reads_examples(names, attention)))
        picks = sum(quota for _, quota, by_example in shares if by_example)
        chosen: list[str] = []
        for names, quota, by_example in shares:
            # Factors of at most 1 keep the scores in [0, 1], for which the noise is made.
            if by_example:
                table = np.stack([scores[name] * held.factor(name) for name in names], axis=1)  # [examples, layers]
                best = context.top_k(table, quota, picks=picks)
            else:
                means = np.array([scores[name].mean() * held.factor(name) for name in names])
                best = np.argsort(-means, kind="stable")[:quota].tolist()
            chosen += [names[place] for place in best]
        places = {layer.name: place for place, layer in enumerate(layers)}
        return [places[name] for name in chosen]

    def _reads_examples(self, names: Sequence[str], attention: Mapping[str, LayerAttention]) -> bool:
        """Return True if the scores of a stack are by example. Only sums over examples can be made noisy; a stack
        that reads no examples needs no noise. Raises UnsupportedRun for a noisy choice if only some layers do."""
        if self.settings.score not in OF_ATTENTION:
            return False
        by_example = {attention[name].per_example for name in names}
        if by_example == {True, False} and self._noisy:
            raise UnsupportedRun(
                f"{', '.join(names[:SHOWN])}: some of these layers read examples and others only inputs common to "
                "all, which no noise covers: set score to fixed, first, last or random"
            )
        return by_example == {True}

    def _report(self, kind: str, by_name: Mapping[str, float]) -> None:
        labels = self._candidates.labels
        self._metrics |= {f"{kind}.{labels[name]}": value for name, value in by_name.items() if name in labels}

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        whole = super().collect(context, selected, stats)
        upload, keep = dict(whole.upload), dict(whole.keep)
        for name in upload.keys() & self._before.keys():
            by_head = self._rows.get(name) if self.settings.needs_heads else None
            upload[name] = pruned(self._before[name], upload[name], self.settings.prune, by_head)
        # Until the next profile a site keeps its choice, and the masses by head.
        if self._chosen and (self.settings.profile_every > 1 or self.settings.hysteresis):
            keep["safl/chosen"] = np.array(self._chosen, dtype=np.int64)
        if len(self._scores):
            keep["safl/scores"] = self._scores
        if self.settings.profile_every > 1:
            if self._period is not None:
                keep["safl/period"] = np.array([self._period])
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
    paper={
        "method.settings.score": ("attention", "section III.A, formula 1"),
        "method.settings.tokens.where": ("first", "section III.A: [CLS] for classification"),
        "method.settings.chooser": ("worker", "section III.A: each client profiles and chooses"),
        "method.settings.layers": (8, "section V: K = 8 of 24, chosen on a validation set"),
        "method.settings.profile_every": (1, "section III: the layers are chosen again in each round"),
        "method.settings.prune": (0.375, "derived from section V.D: pruning takes 60 % saved to 75 %"),
        "method.settings.prune_by": ("attention", "section V.D"),
    },
    unstated="rounds, epochs, optimizer, learning rate, batch size, sites, the rule of pruning, and delta, clip norm "
    "and accountant of the privacy with epsilon 8, 4, 2, 1 and 0.5 (Table II)",
    charts=(
        Chart("agreement of sites", (OVERLAP, LONE), "no version has layers of two sites"),
        Chart("turnover", (TURNOVER,), "no site has sent layers twice", title="Layers that a site changed"),
        Chart("spread of scores", (SCORE_SPREAD,), "no worker has measured it", title="Spread of the layers' scores"),
        Chart("attention entropy", ("entropy.",), "no worker has measured it", title="Attention entropy by layer"),
    ),
)
