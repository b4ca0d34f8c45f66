"""The settings of SAFL, and the combinations that it refuses."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from tessera.shared.methods.base import MethodSettings, UnsupportedRun
from tessera.shared.methods.layer_choice import Candidates
from tessera.shared.model.attention_stats import TaskTokens
from tessera.shared.model.blocks import Block, Role
from tessera.shared.model.selectors import EVERYTHING, Selector
from tessera.shared.run_settings import Privacy
from tessera.shared.schema import Condition

Score = Literal["attention", "sink-corrected", "gradient-norm", "fisher", "random", "first", "last", "fixed"]
OF_ATTENTION = frozenset({"attention", "sink-corrected"})
OF_HEADS: frozenset[Role] = frozenset({"query", "key", "value", "output"})
"""Roles of matrices whose rows or columns are those of heads."""
OF_DATA = OF_ATTENTION | {"gradient-norm", "fisher"}
ON_PURPOSE = frozenset({"first", "last", "fixed"})


class SAFLSettings(MethodSettings):
    conditions = (
        Condition(
            ("tokens", "collapsed_below"),
            lambda settings: settings.score in OF_ATTENTION or settings.needs_heads,
            "score to attention",
        ),
        Condition(
            ("profile_every", "profile_batches"),
            lambda settings: settings.looks_at_data or settings.needs_heads,
            "score to attention",
        ),
        Condition(("prune_by",), lambda settings: settings.prune > 0, "prune above 0"),
        Condition(("starved_after",), lambda settings: settings.score not in ON_PURPOSE, "score to attention"),
        Condition(("layers", "share", "upload_bytes"), lambda settings: settings.score != "fixed", "score to last"),
    )

    score: Score = Field(
        default="attention", description="the ranking of layers; `random` and later ones use no data"
    )
    tokens: TaskTokens = Field(default=TaskTokens(), description="the tokens whose attention counts")
    chooser: Literal["worker", "consensus", "vote"] = Field(
        default="worker",
        description="each worker by its own scores, or all train the same: by the mean score, or by the sites' votes",
    )
    votes_by: Literal["site", "examples"] = Field(
        default="site", description="the weight of a site's vote; by examples at most that of the second largest site"
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
    smoothing: float = Field(
        default=0.0,
        ge=0,
        lt=1,
        description="the weight of earlier profiles in the exponential mean of scores or votes",
    )
    hysteresis: float = Field(
        default=0.0, ge=0, description="share by which a score must exceed that of a chosen layer to take its place"
    )
    explore: float = Field(
        default=0.0, ge=0, lt=1, description="the probability of each of the K places to be drawn at random"
    )
    explore_after: PositiveInt | None = Field(
        default=None,
        description="rounds without an update of a layer after which all sites train it, regardless of its score: of "
        "several such layers the K that wait longest, until an update has them",
    )
    pick_every: PositiveInt | None = Field(
        default=None,
        description="rounds in which every layer trains at least once, in turn, regardless of its score; the "
        "first time one round later with a common choice by data, whose first round only profiles",
    )
    profile_batches: PositiveInt = Field(
        default=4, description="local batches to measure scores on; a noisy private choice uses all"
    )
    prune: float = Field(default=0.0, ge=0, lt=1, description="share of each matrix's rows whose changes are dropped")
    prune_by: Literal["attention", "magnitude"] = Field(
        default="attention", description="rows of the heads with the least mass first, or of the smallest change"
    )
    starved_after: PositiveInt = Field(default=10, description="rounds without a pick before a warning")
    collapsed_below: float = Field(
        default=0.1, ge=0, le=1, description="attention entropy below which to warn of peaked attention"
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if sum(given is not None for given in (self.layers, self.share, self.upload_bytes)) > 1:
            raise ValueError("give one of layers, share and upload_bytes, not several")
        if (self.score == "fixed") != bool(self.fixed):
            raise ValueError("give fixed if, and only if, the score is fixed")
        if self.score == "sink-corrected" and self.tokens.where == "first":
            raise ValueError("the first token is the sink itself: choose other task tokens, or the score attention")
        if self.chooser == "vote" and not self.looks_at_data:
            raise ValueError(
                f"sites cannot vote by the score {self.score}, which is common: set chooser to consensus"
            )
        if self.votes_by != "site" and self.chooser != "vote":
            raise ValueError("there are no votes to weigh: leave out votes_by, or set chooser to vote")
        by_data = [name for name in ("smoothing", "hysteresis", "explore", "explore_after") if getattr(self, name)]
        if by_data and not self.looks_at_data:
            raise ValueError(
                f"{by_data[0]} acts on a choice by data, and the score is {self.score}: leave it out, or set score "
                "to attention"
            )
        if self.pick_every and self.explore_after:
            raise ValueError("pick_every and explore_after both let every layer train in time: leave out one of them")
        if self.pick_every and self.score in ON_PURPOSE:
            raise ValueError(
                f"the score {self.score} leaves out layers on purpose: leave out pick_every, or set score to random"
            )
        return self

    @property
    def looks_at_data(self) -> bool:
        return self.score in OF_DATA

    @property
    def needs_heads(self) -> bool:
        return self.prune > 0 and self.prune_by == "attention"

    def candidates(self, blocks: Sequence[Block], trainable: Selector = EVERYTHING) -> Candidates:
        # A layer without attention has no such score.
        attention = self.score in OF_ATTENTION
        return Candidates.of(blocks, attention=attention, within=self.within, always=self.always, trainable=trainable)


def check_privacy(settings: SAFLSettings, privacy: Privacy | None) -> None:
    """Raise UnsupportedRun if SAFL would disclose more about a site's data than the run's privacy covers, or if part
    of the budget were for a choice that is not by data."""
    if privacy is None:
        return
    if not (settings.looks_at_data or settings.needs_heads):
        if privacy.selection == "noisy":
            raise UnsupportedRun(
                f"privacy.selection would spend privacy on nothing: the score {settings.score} is not one of data. "
                "Leave it out, or set score to attention"
            )
        return
    if privacy.selection == "refused":
        raise UnsupportedRun(
            "SAFL reads the data to choose layers, which the run's epsilon does not cover: set privacy.selection to "
            "noisy, or to uncovered to accept this explicitly; or set score to random and prune_by to magnitude"
        )
    if settings.looks_at_data and settings.chooser != "worker":
        raise UnsupportedRun("a private worker reports neither scores nor votes: set chooser to worker")
    if privacy.selection == "noisy" and settings.looks_at_data and settings.score not in OF_ATTENTION:
        raise UnsupportedRun(
            f"no noise covers the score {settings.score}, which one example can change without bound: set score to "
            "attention, sink-corrected or random"
        )
    if privacy.selection == "noisy" and settings.smoothing:
        raise UnsupportedRun(
            "no noise covers scores of earlier rounds: leave out smoothing; hysteresis, which noise covers, also "
            "steadies a choice"
        )
    if privacy.selection == "noisy" and settings.needs_heads:
        raise UnsupportedRun("noise covers the choice of layers, not that of heads: set prune_by to magnitude")
