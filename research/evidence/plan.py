"""The tables of evidence as `evidence.toml` states them."""

from __future__ import annotations

import hashlib
import tomllib
from collections.abc import Collection
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from evidence.rates import Ladder
from evidence.strict import Frozen, in_one_line

FILE = Path(__file__).parents[1] / "evidence.toml"
SITES = "sites"
"""The part that consists of each site's own test examples; other parts are a federation's central tests."""

RUNGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Multiples of a grid's base."""

Scope = Literal["core", "full", "gpu"]


class UnusablePlan(ValueError):
    """A plan that contradicts itself, or is not written as one."""


class SecondRules(Frozen):
    """What differs in tables with `rules = 2`: seeds that no earlier row has, and what may be concluded."""

    seeds: tuple[int, ...] = Field(min_length=2)
    headline_seeds: tuple[int, ...]
    drift_points: float = Field(gt=0)
    """What the reference must lose to the same run without skew, for a table that names one (`alike`)."""


class Protocol(Frozen):
    """The rules that all tables share."""

    tuning_seed: int
    seeds: tuple[int, ...] = Field(min_length=2)
    headline_seeds: tuple[int, ...]
    """Those of the two arms of a headline claim."""
    tuning_share: float = Field(gt=0, le=1)
    """Of the rounds, in runs that choose a learning rate."""
    tuning_versions: int = Field(ge=1)
    """The last versions of these runs, whose mean validation score counts."""
    factors: tuple[float, ...] = Field(min_length=1)
    """The first learning rates, as multiples of a grid's base."""
    outward: int = Field(ge=0)
    final_versions: int = Field(ge=1)
    """The last versions of a run, whose mean test score is its final figure."""
    rising_versions: int = Field(ge=3)
    rising_points: float = Field(gt=0)
    """The slope over the last versions, in points a round, above which a row is not flat."""
    rising_share: float = Field(default=0.5, gt=0, le=1)
    """The share of the rounds over whose versions it is taken, which are `rising_versions` at least."""
    standard_errors: float = Field(gt=0)
    significance: float = Field(gt=0, lt=1)
    check_rounds: int = Field(ge=1)
    check_versions: int = Field(ge=1)
    """`final_versions` of the short check, whose rows take longer to measure versions than to train."""
    check_seeds: tuple[int, ...]
    second: SecondRules | None = None

    @model_validator(mode="after")
    def _apart(self) -> Self:
        again = self.second or SecondRules(seeds=(-1, -2), headline_seeds=(-1, -2), drift_points=1.0)
        if {*again.seeds, *again.headline_seeds} & {*self.headline_seeds, *self.check_seeds}:
            raise ValueError("seeds of the second rules are in earlier tables: take others")
        if not {*again.seeds} <= {*again.headline_seeds}:
            raise ValueError("headline_seeds of the second rules must contain their seeds: add the missing ones")
        if self.tuning_seed in {*self.seeds, *self.headline_seeds, *self.check_seeds, *again.headline_seeds}:
            raise ValueError(
                f"seed {self.tuning_seed} chooses rates and must be in no table: remove it from the seeds"
            )
        if not {*self.seeds} <= {*self.headline_seeds}:
            raise ValueError("headline_seeds must contain all seeds: add the missing ones")
        return self


class Grid(Frozen):
    """A local optimizer, and the learning rate from which its grid is made."""

    base: float = Field(gt=0)
    training: dict[str, Any] = {}


class Arm(Frozen):
    """A method with its settings."""

    name: str = Field(pattern=r"^[a-z0-9-]+$")
    method: str
    settings: dict[str, Any] = {}
    training: dict[str, Any] = {}
    """What differs from the table's local training."""
    server_optimizer: dict[str, Any] | None = None
    grid: str = "adamw"
    model: str = "plain"
    """The federation's model that it starts from."""
    central: bool = False
    """Whether one site holds all training data."""
    personal: bool = False
    """Whether each site has a model of its own, which is measured there alone."""
    seeded: str | None = None
    """A setting of the method that takes the run's seed."""
    rate_of: str | None = None
    """The arm whose learning rate it takes, for a variant of that arm; by default its own is chosen."""
    core: bool = True
    short: dict[str, Any] = {}
    """What differs in the settings of the method in the short check."""


class Away(Frozen):
    """Sites that miss rounds."""

    share: float = Field(gt=0, lt=1)
    """Of the sites, drawn by the run's seed."""
    first: int = Field(ge=1)
    last: int = Field(ge=1)
    """The first and the last round that they miss; from round 1, they join late."""

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.first > self.last:
            raise ValueError(f"sites come back after round {self.last} and leave in round {self.first}: swap both")
        return self


class Setting(Frozen):
    """A variant of a table."""

    name: str = Field(pattern=r"^[A-Za-z0-9.-]+$")
    scope: Scope = "full"
    federation: dict[str, Any] = {}
    """What differs in the federation."""
    settings: dict[str, Any] = {}
    """What differs in the settings of each arm's method."""
    arms: tuple[str, ...] | None = None
    """Those that run; all if left out."""
    rounds: int | None = Field(default=None, ge=1)
    """The table's if left out."""
    sites_a_round: int | None = Field(default=None, ge=1)
    """The table's if left out."""
    dropout: float = Field(default=0.0, ge=0, lt=1)
    """The probability that a site does not answer in a round, which then goes on without it."""
    away: Away | None = None
    gate: tuple[str, str] | None = None
    """The table's if left out."""
    tuned: bool = False
    """Whether its learning rates are chosen in it; if not, they are those of the table's first setting."""


class Claim(Frozen):
    """A statement about the difference of two arms, which the runs support or refute."""

    name: str
    text: str
    arm: str
    against: str
    kind: Literal["greater", "equivalent"] = "greater"
    margin: float = Field(gt=0)
    """Points. Within it a difference counts as none."""
    part: str | None = None
    """The table's by default."""
    setting: str | None = None
    """The one in which the table concludes by default."""
    worst: bool = False
    """Whether it is about the worst site, for the part `sites`."""
    absent: bool = False
    """Whether it is about the sites that miss rounds, for the part `sites`."""
    headline: bool = False


class Table(Frozen):
    """Arms on one federation. Rates are chosen in the first setting; the short check runs the one that concludes."""

    title: str
    paper: str
    question: str
    federation: str
    options: dict[str, Any] = {}
    score: Literal["macro_f1", "accuracy"]
    part: str
    reference: str
    """FedAvg: what rows are compared with, and what must learn the task."""
    equal_bytes: str | None = None
    """The arm at whose total of bytes other arms are scored too."""
    rounds: int = Field(ge=1)
    sites_a_round: int | None = None
    training: dict[str, Any]
    curve_examples: int = Field(ge=1)
    """Of each test part, the examples on which every version is measured. The last ones are measured on all."""
    check: tuple[str, ...] = ()
    """The arms of the short check."""
    check_rounds: int | None = Field(default=None, ge=1)
    """Its rounds, if not the protocol's: enough for the saved runs to show each known direction."""
    gate: tuple[str, str] | None = None
    """The task and the model of `evidence.gate`: without a pass the table is void."""
    concludes: str | None = None
    """The setting that claims are about, if it is not the first: one with enough rounds for rows to be flat."""
    rules: Literal[1, 2] = 1
    """2: the seeds of `protocol.second`; the final figure of the table's part is the mean of all versions of the
    second half of the rounds, each on all examples; equality within a margin is adjusted by Holm as support is."""
    alike: str | None = None
    """The setting without skew, to which the reference must lose `drift_points`, or nothing is concluded."""
    settings: tuple[Setting, ...] = Field(min_length=1)
    arms: tuple[Arm, ...]
    claims: tuple[Claim, ...] = ()

    @model_validator(mode="after")
    def _known(self) -> Self:
        arms, settings = {arm.name for arm in self.arms}, {setting.name for setting in self.settings}
        if len(arms) < len(self.arms) or len(settings) < len(self.settings):
            raise ValueError("two arms or two settings have one name: rename one")
        named = {self.reference, *self.check, *([self.equal_bytes] if self.equal_bytes else [])}
        named |= {arm.rate_of for arm in self.arms if arm.rate_of}
        named |= {name for claim in self.claims for name in (claim.arm, claim.against)}
        named |= {name for setting in self.settings for name in setting.arms or ()}
        if unknown := sorted(named - arms):
            raise ValueError(f"no arm is called {', '.join(unknown)}; there are {', '.join(sorted(arms))}")
        if unknown := sorted(
            {name for name in (self.concludes, self.alike, *(c.setting for c in self.claims)) if name} - settings
        ):
            raise ValueError(f"no setting is called {', '.join(unknown)}; there are {', '.join(sorted(settings))}")
        arm_of = {arm.name: arm for arm in self.arms}
        for arm in self.arms:
            if arm.rate_of and (arm_of[arm.rate_of].rate_of or arm_of[arm.rate_of].grid != arm.grid):
                raise ValueError(
                    f"{arm.name} takes the rate of {arm.rate_of}, which chooses none in the grid {arm.grid}: name "
                    "another arm"
                )
        return self

    def arm(self, name: str) -> Arm:
        return next(arm for arm in self.arms if arm.name == name)

    def setting(self, name: str) -> Setting:
        return next(setting for setting in self.settings if setting.name == name)

    def arms_of(self, setting: Setting) -> list[Arm]:
        """Return the arms that run in a setting."""
        return [arm for arm in self.arms if setting.arms is None or arm.name in setting.arms]

    def tuned(self, setting: Setting) -> Setting:
        """Return the setting in which the learning rates of this one are chosen."""
        return setting if setting.tuned else self.settings[0]

    def reference_of(self, setting: Setting) -> Setting:
        """Return the setting in which the reference of a setting runs: where claims are about, if it runs no other
        way here."""
        runs = setting.arms is None or self.reference in setting.arms
        differs = setting.federation, setting.rounds, setting.sites_a_round, setting.dropout, setting.away
        base = self.concluding
        same = differs == (base.federation, base.rounds, base.sites_a_round, base.dropout, base.away)
        return base if not runs and same else setting

    def gate_of(self, setting: Setting) -> tuple[str, str] | None:
        """Return the task and the model that must pass the gate; None for a table without one."""
        return setting.gate or self.gate

    @property
    def concluding(self) -> Setting:
        """The setting that claims are about, unless they name another."""
        return self.setting(self.concludes) if self.concludes else self.settings[0]

    @property
    def headliners(self) -> set[str]:
        """The arms of headline claims, which get more seeds in the concluding setting."""
        return {name for claim in self.claims if claim.headline for name in (claim.arm, claim.against)}


class Question(Frozen):
    """A question that a paper or its reviewers ask. Claims answer it, or a text that names where."""

    paper: str
    text: str
    claims: tuple[str, ...] = ()
    answer: str = ""

    @model_validator(mode="after")
    def _answered(self) -> Self:
        if bool(self.claims) == bool(self.answer):
            raise ValueError(f"give claims or an answer: {self.text}")
        return self


class Plan(Frozen):
    """All tables, and the rules that they share."""

    protocol: Protocol
    grids: dict[str, Grid]
    tables: dict[str, Table]
    questions: tuple[Question, ...] = ()
    unrun: dict[str, int] = {}
    """Headline claims of a paper that were deleted before they ran. Holm still counts them, with p = 1."""

    @model_validator(mode="after")
    def _known(self) -> Self:
        if self.protocol.second is None and (name := next((n for n, t in self.tables.items() if t.rules == 2), None)):
            raise ValueError(f"{name} has the second rules, which [protocol.second] must state: add it")
        claims = {claim.name for table in self.tables.values() for claim in table.claims}
        if unknown := sorted({name for question in self.questions for name in question.claims} - claims):
            raise ValueError(f"no claim is called {', '.join(unknown)}; there are {', '.join(sorted(claims))}")
        wanted = {arm.grid for table in self.tables.values() for arm in table.arms}
        if unknown := sorted(wanted - set(self.grids)):
            raise ValueError(f"no grid is called {', '.join(unknown)}; there are {', '.join(sorted(self.grids))}")
        return self

    def seeds_of(self, table: Table, *, headline: bool) -> tuple[int, ...]:
        """Return the seeds of a row; a row of a headline claim has more."""
        of = self.protocol if table.rules == 1 or self.protocol.second is None else self.protocol.second
        return of.headline_seeds if headline else of.seeds

    def final_count(self, table: Table, rounds: int, part: str) -> int:
        """Return how many last versions of a run a part's final figure is the mean of."""
        return rounds - rounds // 2 if table.rules == 2 and part == table.part else self.protocol.final_versions

    def ladder(self, arm: Arm) -> Ladder:
        """Return the learning rates of an arm."""
        base, protocol = self.grids[arm.grid].base, self.protocol

        def of(factors: Collection[float]) -> tuple[float, ...]:
            # 3 times 0.0001 is not 0.0003 in binary, and rates stand in names.
            return tuple(float(f"{factor * base:.6g}") for factor in factors)

        return Ladder(of(sorted({*RUNGS, *protocol.factors})), of(protocol.factors), protocol.outward)

    def shortened(self) -> Plan:
        """Return the plan of the short check: a few arms, rounds and seeds of the settings that claims are about."""
        protocol = self.protocol
        tables = {
            name: table.model_copy(
                update={
                    "rounds": min(table.rounds, table.check_rounds or protocol.check_rounds),
                    "settings": (table.concluding.model_copy(update={"rounds": None}),),
                    "arms": tuple(
                        arm.model_copy(update={"settings": {**arm.settings, **arm.short}})
                        for arm in table.arms
                        if arm.name in {*table.check, table.reference}
                    ),
                    "claims": tuple(
                        c for c in table.claims if {c.arm, c.against} <= {*table.check} and not c.setting
                    ),
                }
            )
            for name, table in self.tables.items()
            if table.check
        }
        short = {
            "seeds": protocol.check_seeds,
            "headline_seeds": protocol.check_seeds,
            "final_versions": protocol.check_versions,
        }
        return self.model_copy(
            update={"tables": tables, "protocol": protocol.model_copy(update=short), "questions": ()}
        )


def read(file: Path = FILE) -> Plan:
    """Read a plan. Raises UnusablePlan with the fields that are wrong."""
    try:
        return Plan.model_validate(tomllib.loads(file.read_text(encoding="utf-8")))
    except tomllib.TOMLDecodeError as fault:
        raise UnusablePlan(f"{file.name} is no TOML: {fault}; mend that line") from fault
    except ValidationError as fault:
        raise UnusablePlan(f"{file.name}: {in_one_line(fault)}") from None


def digest_of(file: Path = FILE) -> str:
    """Return the first 12 hexadecimal digits of a plan's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]
