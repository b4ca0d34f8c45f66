"""FedFrozen: warm up the whole model, then freeze where tokens look (query, key) and go on with what they carry.

arXiv 2605.06446. The paper leaves open what, besides the value blocks, is trained once query and key are frozen;
`scope` names the readings of it. `freeze = "value"` is a control: the same two stages, the other blocks frozen.

The paper also leaves open how to choose the warm-up's length. With `warmup_rounds = "auto"` the rule is ours. Of
each round it measures, on the blocks that are to be frozen, the clients' mean step m and its noise n, which is what
|m| would be if their steps had no common direction (`shared/aggregation/drift.py`). A step is worth something if the
next one goes on with it, and nothing if the next one takes it back; so a round's progress is <m, last m>, which to
first order and but for a constant is what the objective falls by. The warm-up ends when, for `patience` rounds and
with both figures smoothed over rounds,

  progress <= signal^2 * n^2              the clients' common movement is lost in their disagreement, and
  progress * rounds left <= gain * won    what freezing would lock in is small: the rest of the run, at this pace,
                                          would add less than this part of what was won so far (the sum of progress)

The first holds off where clients agree, however slowly they move; the second where nothing has begun yet, since a
start from scratch is slow and noisy. Neither holds off where rounds only go to and fro.
"""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from math import copysign, sqrt
from typing import Any, Literal, Self

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
    WorkerHalf,
)
from tessera.shared.model.blocks import Role
from tessera.shared.model.selectors import EVERYTHING, Match, Selector
from tessera.shared.tensors.lazy import Array, ArrayTensor, Tensor, to_array

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
"""What trains in the second stage, by role; None for all that is not frozen. The first of each is the default, and
the two lists mirror each other."""

SMOOTHING = 0.3
"""How much of a smoothed figure the last round makes up: it remembers about five rounds."""

SKETCH = "warmup/step"
"""The server state that holds the last mean step in short."""
FROZEN_FROM = "frozen_from"
"""The number of the version with which the second stage begins, once it is there."""

WARMUP = "warmup."
"""What the names of the numbers that a warm-up's versions hold begin with."""
MOVEMENT = f"{WARMUP}movement"
"""|m| over the blocks' own length."""
DISAGREEMENT = f"{WARMUP}disagreement"
"""The rms over clients, weighted, of how far their step is from m, over the blocks' own length."""
PERSISTENCE = f"{WARMUP}persistence"
"""The cosine between m and the last one."""
PROGRESS = f"{WARMUP}progress"
"""<m, last m>, smoothed."""
NOISE = f"{WARMUP}noise"
"""n^2, smoothed."""
WON = f"{WARMUP}won"
"""The sum of all positive <m, last m>."""
SIGNAL = f"{WARMUP}signal"
"""The root of progress over noise, with progress's sign."""
TO_WIN = f"{WARMUP}to_win"
"""What the rest of the run would add at this pace, as a part of what was won."""
QUIET_ROUNDS = f"{WARMUP}quiet_rounds"
"""Rounds in a row that called for the end."""


def _widest(data: Mapping[str, Any]) -> Scope | ControlScope:
    return next(iter(SCOPES[data.get("freeze", "query_key")]))


class FedFrozenSettings(MethodSettings):
    freeze: Freeze = Field(default="query_key", description="the blocks that the second stage freezes")
    warmup_rounds: NonNegativeInt | Literal["auto"] = Field(
        default=5, description="rounds in which everything trains; auto: until the frozen blocks' rule ends them"
    )
    scope: Scope | ControlScope = Field(
        default_factory=_widest, description="what trains in the second stage; all but the frozen blocks if left out"
    )
    least_warmup_rounds: PositiveInt = Field(default=5, description="auto: no shorter than this")
    most_warmup_rounds: PositiveInt | None = Field(default=None, description="auto: no longer than this")
    signals: bool = Field(
        default=False,
        description="measure the warm-up's signals although its length is fixed; slows merging by a fifth",
    )
    patience: PositiveInt = Field(default=3, description="auto: rounds in a row that must call for the end")
    signal: float = Field(
        default=1.0, gt=0, description="auto: progress is lost below this many times what disagreement explains"
    )
    gain: float = Field(
        default=0.1,
        gt=0,
        description="auto: what the rest of the run would add, as a part of what was won, is little",
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
                "make the model again with `tessera model init`"
            )
        scopes = SCOPES[self.settings.freeze]
        if "head" in (scopes[self.settings.scope] or ()) and not any(block.role == "head" for block in blocks):
            others = [scope for scope, trained in scopes.items() if "head" not in (trained or ())]
            raise UnsupportedRun(
                f"scope {self.settings.scope!r} trains the head, and this model has none of its own: its output "
                f"matrix is tied to the token embeddings. Choose scope {' or '.join(others)}"
            )
        return state

    def plan_for(self, state: State, worker: Participant) -> Plan:
        if not self._frozen(state):
            return Plan(stage="warm-up", train=EVERYTHING, upload=EVERYTHING)
        open_blocks = self._open()
        return Plan(stage="frozen", train=open_blocks, upload=open_blocks)

    def _open(self) -> Selector:
        """Select what trains in the second stage: an adapter trains with its matrix, and is frozen with it."""
        wanted = SCOPES[self.settings.freeze][self.settings.scope]
        return Selector(
            include=(Match(),) if wanted is None else self._of(wanted),
            exclude=self._of(FROZEN[self.settings.freeze]),
        )

    def _of(self, wanted: tuple[Role, ...]) -> tuple[Match, ...]:
        """Match the blocks of these roles, and the adapters of such blocks where the model has any."""
        adapters = Match(adapts=wanted)
        found = any(adapters.holds(block) for block in self.run.blocks)
        return (Match(roles=wanted), adapters) if found else (Match(roles=wanted),)

    def _frozen(self, state: State) -> bool:
        if self.settings.warmup_rounds == "auto":
            return FROZEN_FROM in state.scalars
        return state.round >= self.settings.warmup_rounds

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        merged = super().merge(state, updates)
        if self._frozen(state):
            # What the warm-up measured stays with the versions that it made.
            scalars = {name: value for name, value in merged.scalars.items() if not name.startswith(WARMUP)}
            server_state = {name: tensor for name, tensor in merged.server_state.items() if name != SKETCH}
            return replace(merged, scalars=scalars, server_state=server_state)
        scalars = dict(merged.scalars)
        server_state = dict(merged.server_state)
        if self.settings.warmup_rounds == "auto" or self.settings.signals:
            self._measure(state, updates, scalars, server_state)
        if self._over(scalars, merged.round):
            scalars[FROZEN_FROM] = float(merged.round)
        return replace(merged, scalars=scalars, server_state=server_state)

    def _measure(
        self, state: State, updates: Sequence[Update], scalars: dict[str, float], server_state: dict[str, Tensor]
    ) -> None:
        """Add a round's signals to the numbers, and its mean step to the memory. Reads the updates once more."""
        seen = agreement(state.model, self._watched(), [(self.weight(u), u.blocks) for u in updates])
        last = server_state.get(SKETCH)
        scalars |= observed(scalars, seen, None if last is None else to_array(last))
        if seen.senders > 1:
            server_state[SKETCH] = ArrayTensor(seen.sketch, "F64")
            scalars |= judged(scalars, self.settings, self.run.rounds - state.round - 1)

    def check_robust(self) -> None:
        """None that moves a block; when a warm-up of `auto` ends, a hostile worker has a say in."""

    def _watched(self) -> list[str]:
        frozen = Selector(include=self._of(FROZEN[self.settings.freeze]))
        return [block.name for block in frozen.resolve(self.run.blocks)]

    def _over(self, scalars: Mapping[str, float], round_number: int) -> bool:
        settings = self.settings
        if settings.warmup_rounds != "auto":
            return round_number >= settings.warmup_rounds
        if settings.most_warmup_rounds is not None and round_number >= settings.most_warmup_rounds:
            return True
        return round_number >= settings.least_warmup_rounds and scalars.get(QUIET_ROUNDS, 0) >= settings.patience

    def warnings(self, state: State) -> Sequence[str]:
        if self.settings.warmup_rounds != "auto" or self._frozen(state) or 2 * state.round < self.run.rounds:
            return ()
        why = "its rule sees the blocks still getting somewhere"
        if state.scalars.get(NOISE) is None:
            why = "no round had updates from two workers, which its rule compares"
        remedy = "Set most_warmup_rounds, or warmup_rounds to a number, if there must be a second stage"
        return (f"still warming up after {state.round} of {self.run.rounds} rounds: {why}. {remedy}",)


def observed(before: Mapping[str, float], seen: Agreement, last: Array | None) -> dict[str, float]:
    """Return what a round adds to the warm-up's numbers. `last` is the sketch of the last round with two senders or
    more.

    A round with one sender tells how far that one went, but not how far clients disagree; all else stays as it was.
    """
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
    """For how many rounds in a row the rule has called for the end, and by what ratios it judged this one."""
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


METHOD = Method(
    name="fedfrozen",
    settings=FedFrozenSettings,
    coordinator=FedFrozenCoordinator,
    worker=WorkerHalf[FedFrozenSettings],
    source="FedFrozen, arXiv 2605.06446, two-stage algorithm; the automatic warm-up is ours",
    charts=(
        Chart(
            name="warm-up signals",
            scalars=(SIGNAL, TO_WIN, PERSISTENCE),
            missing="they need two rounds with two updates each",
            requires={"warmup_rounds": "auto"},
        ),
    ),
)
