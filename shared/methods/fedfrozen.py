"""FedFrozen: a warm-up of the whole model, then training with frozen query and key blocks.

arXiv 2605.06446. The paper does not define the other blocks that train, besides the value blocks, once query and key
are frozen; `scope` offers the possible readings. `freeze = "value"` is a control: the same two stages with the value
blocks frozen.

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

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import copysign, sqrt
from typing import Literal, Self

from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from tessera.shared.aggregation.drift import Agreement, agreement
from tessera.shared.methods.base import (
    Chart,
    CoordinatorHalf,
    Method,
    MethodSettings,
    Participant,
    Plan,
    State,
    UnsupportedRun,
    Update,
)
from tessera.shared.model.blocks import Role
from tessera.shared.model.selectors import Match, Selector
from tessera.shared.schema import ActsOnlyIf
from tessera.shared.tensors.lazy import Array, ArrayTensor, to_array

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
"""The roles that train in the second stage; None for all that are not frozen. The first of each is the default, and
the two lists mirror each other."""

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


class FedFrozenSettings(MethodSettings):
    conditions = (
        ActsOnlyIf(
            ("patience", "signal", "gain", "least_warmup_rounds", "most_warmup_rounds"),
            lambda settings: settings.warmup_rounds == "auto",
            'warmup_rounds to "auto"',
        ),
        ActsOnlyIf(("signals",), lambda s: s.warmup_rounds not in ("auto", 0), "warmup_rounds to a number above 0"),
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
        return Plan(stage="frozen", train=self._unfrozen, upload=self._unfrozen)

    @property
    def _unfrozen(self) -> Selector:
        """The blocks that train in the second stage."""
        roles = SCOPES[self.settings.freeze][self.settings.scope]
        return Selector(include=(Match(),) if roles is None else self._of(roles), exclude=self._frozen_blocks)

    @property
    def _frozen_blocks(self) -> tuple[Match, ...]:
        return self._of(FROZEN[self.settings.freeze])

    def _of(self, wanted: tuple[Role, ...]) -> tuple[Match, ...]:
        """Match the blocks of these roles and their adapters, if any: an adapter is treated like its matrix."""
        adapters = Match(adapts=wanted)
        adapted = any(adapters.holds(block) for block in self.run.blocks)
        return (Match(roles=wanted), adapters) if adapted else (Match(roles=wanted),)

    def _frozen(self, state: State) -> bool:
        if self.settings.warmup_rounds == "auto":
            return FROZEN_FROM in state.scalars
        return state.round >= self.settings.warmup_rounds

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged, settings = super().merge(state, updates), self.settings
        scalars, server_state = dict(merged.scalars), dict(merged.server_state)
        if self._frozen(state):
            # The warm-up's measurements stay with its own versions.
            scalars = {name: value for name, value in scalars.items() if not name.startswith(WARMUP)}
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

    def check_robust(self) -> None:
        """Accept every rule: all steps pass it. A malicious worker can affect only the length of the warm-up."""

    def check_client_privacy(self) -> None:
        """Accept a warm-up of fixed length without signals, which compare exact updates."""
        if self.settings.warmup_rounds == "auto" or self.settings.signals:
            raise UnsupportedRun(
                "a warm-up's signals compare exact updates, which client_privacy does not cover: set warmup_rounds "
                "to a number, and leave out signals"
            )

    def check_secure_sums(self) -> None:
        """Raise UnsupportedRun for a warm-up that compares the updates."""
        if self.settings.warmup_rounds == "auto" or self.settings.signals:
            raise UnsupportedRun(
                "secure_sums hides the single updates, whose agreement decides when an automatic warm-up ends: set "
                "warmup_rounds to a number, and leave signals out"
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


def observed(before: Mapping[str, float], seen: Agreement, last: Array | None) -> dict[str, float]:
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
    ),
)
