"""FedFrozen: a warm-up of the whole model, then training with frozen query and key blocks.

arXiv 2605.06446. The paper does not define the other blocks that train, besides the value blocks, once query and key
are frozen; `scope` offers the possible readings. `freeze = "value"` is a control: the same two stages with the value
blocks frozen; `lower_rate` is another, whose second stage trains the blocks at a lower rate and freezes none.

Frozen query and key blocks do not mean frozen attention. With `kernel_drift` each site measures on its first examples
how far the attention of each layer has moved since the switch, from the version of the switch on:

    drift_l = sum |A_t - A_Tw| / sum A_Tw        over examples, heads, and some queries with all their keys

This is the mean over queries of the l1 distance of their probabilities, from 0 to 2.

The paper also leaves open how to choose the warm-up's length. With `warmup_rounds = "auto"` the rule is ours. Each
round it measures, on the blocks that are to be frozen, the clients' mean step m and its noise n: the value of |m| if
their steps had no common direction (`shared/aggregation/drift.py`). A step has value if the next one continues it,
and none if the next one reverses it; so a round's progress is <m, last m>, to first order proportional to the
decrease of the objective. The warm-up ends when, for `patience` rounds and with both values smoothed over rounds,

  progress <= signal^2 * n^2              the clients' common movement is lost in their disagreement, and
  progress * rounds left <= gain * won    freezing would lose little: the rest of the run, at this pace, would add
                                          less than this share of the progress so far (the sum of progress)

The first is false while clients agree, even if they move slowly; the second at the start from scratch, which is slow
and noisy. Both are true while rounds only oscillate.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import copysign, sqrt
from typing import TYPE_CHECKING, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tessera.shared.aggregation.drift import DriftLengths, agreement
from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
    Guard,
    LocalResult,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    TaskContext,
    UnsupportedRun,
    Update,
    WorkerHalf,
    median_metrics,
)
from tessera.shared.model.blocks import Block, Role, layer_labels, layers_of
from tessera.shared.model.selectors import Match, Selector
from tessera.shared.schema import Compatibility, Condition
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array

if TYPE_CHECKING:
    import torch

Freeze = Literal["query_key", "value"]
Scope = Literal["all_but_qk", "attn_vo", "v_head", "v_only"]
ControlScope = Literal["all_but_v", "attn_qko", "qk_head", "qk_only"]

FROZEN: dict[Freeze, tuple[Role, ...]] = {"query_key": ("query", "key"), "value": ("value",)}

SCOPES: dict[Freeze, dict[Scope | ControlScope, tuple[Role, ...] | None]] = {
    "query_key": {
        "all_but_qk": None,
        "attn_vo": ("value", "output", "head"),
        "v_head": ("value", "head"),
        "v_only": ("value",),
    },
    "value": {
        "all_but_v": None,
        "attn_qko": ("query", "key", "output", "head"),
        "qk_head": ("query", "key", "head"),
        "qk_only": ("query", "key"),
    },
}
"""The roles that train in the second stage; None for every role that is not frozen. The first of each is the default,
and the two lists mirror each other."""

SMOOTHING = 0.3
"""The weight of the last round in a smoothed value, which averages over about five rounds."""

SKETCH = "warmup/step"
"""The server state with the sketch of the last mean step."""
FROZEN_FROM = "frozen_from"
"""The number of the version with which the second stage begins, once known."""

WARMUP = "warmup."
"""The prefix of the scalars of a warm-up's versions."""
MOVEMENT = f"{WARMUP}movement"
"""|m| over the blocks' own length."""
DISAGREEMENT = f"{WARMUP}disagreement"
"""The weighted rms over clients of their step's distance from m, over the blocks' own length."""
PERSISTENCE = f"{WARMUP}persistence"
"""The cosine between m and the last m."""
PROGRESS = f"{WARMUP}progress"
"""<m, last m>, smoothed."""
NOISE = f"{WARMUP}noise"
"""n^2, smoothed."""
WON = f"{WARMUP}won"
"""The sum of all positive <m, last m>."""
SIGNAL = f"{WARMUP}signal"
"""The root of progress over noise, with progress's sign."""
TO_WIN = f"{WARMUP}to_win"
"""The progress of the rest of the run at this pace, as a share of the progress so far."""
QUIET_ROUNDS = f"{WARMUP}quiet_rounds"
"""The number of consecutive rounds that met the rule."""


KERNEL_DRIFT = "kernel_drift."
"""The prefix, before a layer, of a site's metric of how far attention has moved since the switch; in a version, the
sites' median."""
SINCE = "since"
"""The scalar of a plan with the number of rounds since the switch, where kernel drift is measured."""
PROBES = 20
"""Examples on which kernel drift is measured."""
QUERIES = 8
"""Queries of each of them, for each head: all of them would take tens of megabytes of a vault."""
SLOWED = "slowed"
"""The second stage with a lower rate, and a scalar of its plans."""


class FedFrozenSettings(MethodSettings):
    conditions = (
        Condition(
            ("patience", "signal", "gain", "least_warmup_rounds", "most_warmup_rounds"),
            lambda settings: settings.warmup_rounds == "auto",
            'warmup_rounds to "auto"',
        ),
        Condition(("signals",), lambda s: s.warmup_rounds not in ("auto", 0), "warmup_rounds to a number above 0"),
    )

    freeze: Freeze = Field(default="query_key", description="the blocks that the second stage freezes")
    warmup_rounds: NonNegativeInt | Literal["auto"] = Field(
        default=5, description="rounds in which everything trains; auto: until the frozen blocks' rule ends them"
    )
    scope: Scope | ControlScope = Field(
        default_factory=lambda data: next(iter(SCOPES[data.get("freeze", "query_key")])),
        description="the blocks that train in the second stage; by default all but the frozen ones",
    )
    least_warmup_rounds: PositiveInt = Field(default=5, description="auto: the shortest warm-up")
    most_warmup_rounds: PositiveInt | None = Field(default=None, description="auto: the longest warm-up")
    signals: bool = Field(
        default=False,
        description="measure the warm-up's signals although its length is fixed; slows merging by a fifth",
    )
    patience: PositiveInt = Field(default=3, description="auto: consecutive rounds that must meet the rule")
    signal: float = Field(
        default=1.0, gt=0, description="auto: largest ratio of progress to the noise from disagreement"
    )
    gain: float = Field(
        default=0.1, gt=0, description="auto: largest progress of the rest of the run, as a share of that so far"
    )

    lower_rate: float | None = Field(
        default=None,
        gt=0,
        lt=1,
        description="a control: the multiple of the learning rate at which the second stage trains the blocks that "
        "it would freeze",
    )
    kernel_drift: bool = Field(
        default=False,
        description=f"from the switch on, sites measure on {PROBES} examples how far attention has moved by layer",
    )

    @property
    def probe_examples(self) -> int:
        return PROBES if self.kernel_drift else 0

    @model_validator(mode="after")
    def _fitting(self) -> Self:
        if self.scope not in (fitting := SCOPES[self.freeze]):
            raise ValueError(
                f"with freeze {self.freeze!r} the scope is one of {', '.join(fitting)}; not {self.scope}"
            )
        if self.most_warmup_rounds is not None and self.most_warmup_rounds < self.least_warmup_rounds:
            raise ValueError(
                f"most_warmup_rounds is {self.most_warmup_rounds}, below least_warmup_rounds, "
                f"{self.least_warmup_rounds}: raise the one or lower the other"
            )
        return self


class FedFrozenCoordinator(CoordinatorHalf[FedFrozenSettings]):
    buffered = unequal_steps = regional = Compatibility(
        "signals and an automatic warm-up compare the updates of one version as sites sent them",
        "warmup_rounds of a number and signals = false",
        lambda settings: settings.warmup_rounds != "auto" and not settings.signals,
    )
    averages_parts = True

    def start(self, state: State) -> State:
        blocks = self.run.blocks
        if any(block.role == "adapter" and not block.adapts for block in blocks):
            raise UnsupportedRun(
                "the model's adapters do not say which matrices they belong to, so they cannot be frozen with them: "
                "create the model again with `tessera model init`"
            )
        scopes = SCOPES[self.settings.freeze]
        if "head" in (scopes[self.settings.scope] or ()) and not any(block.role == "head" for block in blocks):
            others = [scope for scope, trained in scopes.items() if "head" not in (trained or ())]
            raise UnsupportedRun(
                f"scope {self.settings.scope!r} trains the head, and this model has none of its own: its output "
                f"matrix is tied to the token embeddings. Choose scope {' or '.join(others)}"
            )
        # Else a model without such blocks would fail only after the warm-up.
        self._unfrozen.resolve(blocks)
        self._check_controls()
        self._require_second_stage()
        self.run.require_trainable(self._unfrozen, f"trains scope {self.settings.scope!r} after the warm-up")
        trained = [block for block in blocks if self.run.trainable.holds(block)]
        if self.settings.warmup_rounds and all(map(self._unfrozen.holds, trained)):
            raise UnsupportedRun(
                "the warm-up trains nothing that the method then freezes: the model's adapters or prompts are beside "
                f"no {' or '.join(FROZEN[self.settings.freeze])} matrix. Create the model with adapters of these "
                "(--lora-roles), choose another method, or set training.full_fine_tuning to true"
            )
        return state

    def _require_second_stage(self) -> None:
        name = "least_warmup_rounds" if self.settings.warmup_rounds == "auto" else "warmup_rounds"
        if name in self.settings.model_fields_set and self._never_frozen:
            raise UnsupportedRun(
                f"{name} is {getattr(self.settings, name)}, and the run has {self.run.rounds} rounds: nothing would "
                f"ever be frozen, as in fedavg. Either lower {name}, or raise rounds"
            )

    def check_rounds(self) -> None:
        """Accept a warm-up of fixed length that ends before the run does."""
        if self.settings.warmup_rounds == "auto" or self.settings.signals:
            raise UnsupportedRun("the warm-up's stages are judged by the number of rounds that are left")
        self._require_second_stage()

    def plan_for(self, state: State, worker: Participant) -> Plan:
        if not self._frozen(state):
            return Plan(stage="warm-up")
        stage, trained, scalars = "frozen", self._unfrozen, {}
        if self.settings.lower_rate is not None:
            stage, trained, scalars = SLOWED, self._trained(()), {SLOWED: 1.0}
        if self.settings.kernel_drift:
            warmup = self.settings.warmup_rounds
            scalars[SINCE] = state.round - (state.scalars[FROZEN_FROM] if warmup == "auto" else warmup)
        return Plan(stage=stage, train=trained, upload=trained, scalars=scalars)

    def open_blocks(self, state: State) -> Selector:
        return self.plan_for(state, Participant("any", 1)).upload

    def _check_controls(self) -> None:
        """Raise UnsupportedRun for a control that the run does not allow."""
        run, slowed = self.run, Selector(include=self._frozen_blocks)
        if self.settings.kernel_drift and (run.privacy or run.client_privacy or run.secure_sums):
            raise UnsupportedRun(
                "kernel_drift is a metric of a site's examples, which neither differential privacy nor secure_sums "
                "lets it send: leave it out"
            )
        parts = {block.tensor for block in run.blocks if slowed.holds(block)}
        fused = [block.tensor for block in run.blocks if block.tensor in parts and not slowed.holds(block)]
        if self.settings.lower_rate is not None and fused:
            raise UnsupportedRun(
                f"lower_rate is for whole tensors, and {fused[0]} has other blocks beside the slowed ones: "
                "leave lower_rate out, or choose a model with a matrix for each role"
            )

    @property
    def _unfrozen(self) -> Selector:
        """The blocks that train in the second stage at the run's rate."""
        return self._trained(self._frozen_blocks)

    def _trained(self, frozen: tuple[Match, ...]) -> Selector:
        """Select the scope, with the blocks to be frozen unless these are `frozen`."""
        roles = SCOPES[self.settings.freeze][self.settings.scope]
        slowed = () if frozen else self._frozen_blocks
        return Selector(include=(Match(),) if roles is None else (*self._of(roles), *slowed), exclude=frozen)

    @property
    def _frozen_blocks(self) -> tuple[Match, ...]:
        return self._of(FROZEN[self.settings.freeze])

    def _of(self, wanted: tuple[Role, ...]) -> tuple[Match, ...]:
        return with_adapters(wanted, self.run.blocks)

    def _frozen(self, state: State) -> bool:
        if self.settings.warmup_rounds == "auto":
            return FROZEN_FROM in state.scalars
        return state.round >= self.settings.warmup_rounds

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged, settings = super().merge(state, updates), self.settings
        scalars, server_state = dict(merged.scalars), dict(merged.server_state)
        if self._frozen(state):
            # The warm-up's measurements stay with its own versions.
            of_others = (WARMUP, KERNEL_DRIFT)
            scalars = {name: value for name, value in scalars.items() if not name.startswith(of_others)}
            names = [KERNEL_DRIFT + label for label in attention_labels(self.run.blocks).values()]
            # The largest distance, with room for roundings.
            scalars |= median_metrics(updates, names, 2.01)
            server_state.pop(SKETCH, None)
            return replace(merged, scalars=scalars, server_state=server_state)
        if settings.warmup_rounds == "auto" or settings.signals:
            # Reads the updates once more.
            frozen = self.run.trained(Selector(include=self._frozen_blocks)).resolve(self.run.blocks)
            senders = [(self.weight(update), update.blocks) for update in updates]
            seen = agreement(state.model, [block.name for block in frozen], senders)
            last = server_state.get(SKETCH)
            scalars |= observed(scalars, seen, None if last is None else to_array(last))
            if seen.senders > 1:
                server_state[SKETCH] = ArrayTensor(seen.sketch, "F64")
                scalars |= judged(scalars, settings, self.run.rounds - merged.round)
        if self._over(scalars, merged.round):
            scalars[FROZEN_FROM] = float(merged.round)
        return replace(merged, scalars=scalars, server_state=server_state)

    def check_merge(self, guard: Guard) -> None:
        """Accept every robust rule, past which a malicious worker can affect only the length of the warm-up."""
        if guard != "robust" and (self.settings.warmup_rounds == "auto" or self.settings.signals):
            raise UnsupportedRun(
                f"a warm-up's signals compare exact updates of single sites, which {guard} hides: set warmup_rounds "
                "to a number, and leave out signals"
            )

    def _over(self, scalars: Mapping[str, float], round_number: int) -> bool:
        settings = self.settings
        if settings.warmup_rounds != "auto":
            return round_number >= settings.warmup_rounds
        if settings.most_warmup_rounds is not None and round_number >= settings.most_warmup_rounds:
            return True
        return round_number >= settings.least_warmup_rounds and scalars.get(QUIET_ROUNDS, 0) >= settings.patience

    @property
    def _never_frozen(self) -> bool:
        """True if the run ends with its warm-up, and not only to measure its signals."""
        settings = self.settings
        shortest = settings.least_warmup_rounds if settings.warmup_rounds == "auto" else settings.warmup_rounds
        return shortest >= self.run.rounds and not settings.signals

    def warnings(self, state: State) -> Sequence[str]:
        if self._never_frozen:
            never = f"all {self.run.rounds} rounds of the run are the warm-up, so that nothing is ever frozen"
            return (f"{never}: raise rounds, or shorten the warm-up",)
        if self.settings.warmup_rounds != "auto" or self._frozen(state) or 2 * state.round < self.run.rounds:
            return ()
        why = "its rule sees the blocks still getting somewhere"
        if state.scalars.get(NOISE) is None:
            why = "no round had updates from two workers, which its rule compares"
        remedy = "Set most_warmup_rounds, or warmup_rounds to a number, if there must be a second stage"
        return (f"still warming up after {state.round} of {self.run.rounds} rounds: {why}. {remedy}",)


class FedFrozenWorker(WorkerHalf[FedFrozenSettings]):
    signals = (KERNEL_DRIFT,)

    @classmethod
    def beyond_training(cls, settings: FedFrozenSettings) -> str | None:
        controls = settings.lower_rate is not None or settings.kernel_drift
        return super().beyond_training(settings) if controls else None

    def rates(self, plan: Plan) -> Sequence[tuple[Selector, float]]:
        if self.settings.lower_rate is None or not plan.scalars.get(SLOWED):
            return ()
        slowed = Selector(include=with_adapters(FROZEN[self.settings.freeze], self.run.blocks))
        return ((slowed, self.settings.lower_rate),)

    def measure(self, context: TaskContext, probes: Mapping[str, torch.Tensor]) -> LocalResult:
        """Return the movement of attention since the switch, if this site measured it then on these examples."""
        since = context.plan.scalars.get(SINCE)
        # In the warm-up too, so that a model whose attention cannot be measured fails in its first round.
        measured = context.attention_rows(probes, QUERIES)
        if since is None:
            return LocalResult({})
        content = hashlib.sha256(b"".join(probes[name].cpu().numpy().tobytes() for name in sorted(probes)))
        labels = attention_labels(self.run.blocks)
        now = {f"kernel/{labels[name]}": rows for name, rows in measured.items()}
        now["kernel/probes"] = np.frombuffer(content.digest(), np.uint8)
        first = now if since == 0 else {name: context.vault[name] for name in now if name in context.vault}
        if first.keys() != now.keys() or not np.array_equal(first["kernel/probes"], now["kernel/probes"]):
            return LocalResult({})
        metrics = {
            KERNEL_DRIFT + name.removeprefix("kernel/"): float(np.abs(rows - first[name]).sum() / first[name].sum())
            for name, rows in now.items()
            if name != "kernel/probes"
        }
        return LocalResult({}, first, metrics)


def attention_labels(blocks: Sequence[Block]) -> dict[str, str]:
    """Return the labels of the layers with attention, by name."""
    return layer_labels([layer for layer in layers_of(blocks) if any(b.role == "query" for b in layer.blocks)])


def with_adapters(wanted: tuple[Role, ...], blocks: Sequence[Block]) -> tuple[Match, ...]:
    """Match the blocks of these roles and their adapters, if any: an adapter is treated like its matrix."""
    adapters = Match(adapts=wanted)
    adapted = any(adapters.holds(block) for block in blocks)
    return (Match(roles=wanted), adapters) if adapted else (Match(roles=wanted),)


def observed(before: Mapping[str, float], seen: DriftLengths, last: Array | None) -> dict[str, float]:
    """Return a round's changed scalars; with one sender, only the movement. `last` is the sketch of the last round
    with at least two senders."""
    size = sqrt(seen.size) or 1.0
    scalars = {MOVEMENT: sqrt(seen.movement) / size}
    if seen.senders < 2:
        return scalars
    scalars[DISAGREEMENT] = sqrt(seen.disagreement) / size
    scalars[NOISE] = _smoothed(before.get(NOISE), seen.noise)
    if last is not None:
        progress = float(last @ seen.sketch)
        scalars[PROGRESS] = _smoothed(before.get(PROGRESS), progress)
        scalars[WON] = before.get(WON, 0.0) + max(0.0, progress)
        lengths = sqrt(float(last @ last) * float(seen.sketch @ seen.sketch))
        scalars[PERSISTENCE] = progress / lengths if lengths else 0.0
    return scalars


def judged(scalars: Mapping[str, float], settings: FedFrozenSettings, rounds_left: int) -> dict[str, float]:
    """Return the number of consecutive rounds that met the rule, and this round's ratios."""
    if PROGRESS not in scalars:
        return {}
    progress, noise, won = scalars[PROGRESS], scalars[NOISE], scalars[WON]
    lost = progress <= settings.signal**2 * noise
    little = progress * rounds_left <= settings.gain * won
    judgement = {QUIET_ROUNDS: scalars.get(QUIET_ROUNDS, 0.0) + 1 if lost and little else 0.0}
    if noise:
        judgement[SIGNAL] = copysign(sqrt(abs(progress) / noise), progress)
    if won:
        judgement[TO_WIN] = progress * rounds_left / won
    return judgement


def _smoothed(before: float | None, value: float) -> float:
    return value if before is None else before + SMOOTHING * (value - before)


APPENDIX = "appendix, experimental settings (before Table 5)"

METHOD = Method(
    name="fedfrozen",
    good_for="fewer bytes: after a warm-up, query and key matrices are frozen",
    sends="the whole model in the warm-up, then the rest without query and key",
    settings=FedFrozenSettings,
    coordinator=FedFrozenCoordinator,
    worker=FedFrozenWorker,
    source="FedFrozen, arXiv 2605.06446, two-stage algorithm; the automatic warm-up is ours",
    paper={
        "training.optimizer": ("adamw", APPENDIX),
        "training.learning_rate": (1e-4, APPENDIX),
        "training.weight_decay": (0.01, APPENDIX),
        "evaluation.every": (1, "appendix: evaluated at the end of every round, there on a central test set"),
    },
    unstated="warmup_rounds, scope, rounds, epochs, batch size, sites, data sets",
    charts=(
        Chart(
            name="warm-up signals",
            scalars=(SIGNAL, TO_WIN, PERSISTENCE),
            missing="they need two rounds with two updates each",
            requires={"warmup_rounds": "auto"},
        ),
        Chart(
            name="kernel drift",
            scalars=(KERNEL_DRIFT,),
            missing="no site that measured attention at the switch has measured it since",
            requires={"kernel_drift": True},
            title="Kernel drift by layer",
            description="How far attention has moved since the switch: the mean l1 distance, from 0 to 2.",
        ),
    ),
)
