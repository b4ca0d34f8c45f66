"""The tables of evidence as `benchmarks/evidence.toml` states them, their runs, and the order in which these start.

Nothing here trains or reads data.
"""

from __future__ import annotations

import hashlib
import json
import tomllib
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import Field, ValidationError, model_validator

from benchmarks.evidence.rates import Ladder, best
from tessera.shared.schema import Frozen
from tessera.shared.validation_errors import in_one_line

FILE = Path(__file__).parents[1] / "evidence.toml"
SITES = "sites"
"""The part that consists of each site's own test examples; other parts are a federation's central tests."""

RUNGS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0, 300.0)
"""Multiples of a grid's base."""

Scope = Literal["core", "full", "gpu"]


class UnusablePlan(ValueError):
    """A plan that contradicts itself, or is not written as one."""


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
    """The last versions are so much of the rounds, and at least `rising_versions`."""
    standard_errors: float = Field(gt=0)
    significance: float = Field(gt=0, lt=1)
    check_rounds: int = Field(ge=1)
    check_versions: int = Field(ge=1)
    """`final_versions` of the short check, whose rows take longer to measure versions than to train."""
    check_seeds: tuple[int, ...]

    @model_validator(mode="after")
    def _apart(self) -> Self:
        if self.tuning_seed in {*self.seeds, *self.headline_seeds, *self.check_seeds}:
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
    """Arms on one federation. The first setting is the one of the core, and of the check."""

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
    gate: tuple[str, str] | None = None
    """The task and the model of `benchmarks.evidence.gate`: without a pass the table is void."""
    concludes: str | None = None
    """The setting that claims are about, if it is not the first: one with enough rounds for rows to be flat."""
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
            {name for name in (self.concludes, *(c.setting for c in self.claims)) if name} - settings
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

    @model_validator(mode="after")
    def _known(self) -> Self:
        claims = {claim.name for table in self.tables.values() for claim in table.claims}
        if unknown := sorted({name for question in self.questions for name in question.claims} - claims):
            raise ValueError(f"no claim is called {', '.join(unknown)}; there are {', '.join(sorted(claims))}")
        wanted = {arm.grid for table in self.tables.values() for arm in table.arms}
        if unknown := sorted(wanted - set(self.grids)):
            raise ValueError(f"no grid is called {', '.join(unknown)}; there are {', '.join(sorted(self.grids))}")
        return self

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
                    "rounds": min(table.rounds, protocol.check_rounds),
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
        raise UnusablePlan(f"{file.name}: {in_one_line(fault, root='plan', model=Plan)}") from None


def digest_of(file: Path = FILE) -> str:
    """Return the first 12 hexadecimal digits of a plan's SHA-256."""
    return hashlib.sha256(file.read_bytes()).hexdigest()[:12]


# ---------------------------------------------------------------- runs


@dataclass(frozen=True)
class Job:
    """One run. Those of the tuning seed choose a learning rate and are in no table."""

    table: str
    setting: str
    arm: str
    seed: int
    rate: float

    @property
    def name(self) -> str:
        return f"{self.table}/{self.setting}/{self.arm}/seed-{self.seed}-rate-{self.rate:g}"


Scores = Mapping[Job, float]
"""The score of each finished run, from 0 to 1: on the validation parts for the tuning seed."""


def whole_rounds(plan: Plan, job: Job) -> int:
    """Return the rounds of a setting's rows."""
    table = plan.tables[job.table]
    return table.setting(job.setting).rounds or table.rounds


def rounds_of(plan: Plan, job: Job) -> int:
    """Return the rounds that a run takes."""
    rounds = whole_rounds(plan, job)
    return max(1, round(plan.protocol.tuning_share * rounds)) if job.seed == plan.protocol.tuning_seed else rounds


def setup_of(plan: Plan, job: Job) -> str:
    """Return a digest of all settings that a run's figures depend on, of which 12 digits are enough here."""
    table, protocol = plan.tables[job.table], plan.protocol
    arm, setting = table.arm(job.arm), table.setting(job.setting)
    common = table.model_dump(
        include={"federation", "options", "score", "part", "rounds", "sites_a_round", "training", "curve_examples"}
    )
    about = {
        "table": common,
        # Without defaults, so that a new field changes the digest of no run.
        "arm": arm.model_dump(exclude={"core", "rate_of", "short"}, exclude_defaults=True),
        "setting": setting.model_dump(
            include={"federation", "settings", "rounds", "sites_a_round", "dropout", "away"}, exclude_defaults=True
        ),
        "grid": plan.grids[arm.grid].model_dump(exclude={"base"}),
        "protocol": protocol.model_dump(
            include={"tuning_seed", "tuning_share", "tuning_versions", "final_versions", "rising_versions"}
        ),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Selection:
    """The runs of a plan that are asked for."""

    scope: Scope | Literal["headlines"] = "full"
    """`headlines`: the arms of headline claims in the settings that they are about."""
    tables: Collection[str] = ()
    """All if empty, as are arms."""
    arms: Collection[str] = ()

    def settings(self, plan: Plan) -> Iterator[tuple[str, Table, Setting]]:
        """Yield the settings in the scope, with their tables' names."""
        scopes = {"core": {"core"}, "gpu": {"gpu"}}.get(self.scope, {"core", "full"})
        for name, table in plan.tables.items():
            if not self.tables or name in self.tables:
                settings = [table.concluding] if self.scope == "headlines" else table.settings
                yield from ((name, table, setting) for setting in settings if setting.scope in scopes)

    def arms_of(self, table: Table, setting: Setting) -> list[Arm]:
        """Return the arms that run in a setting."""
        return [
            arm
            for arm in table.arms_of(setting)
            if (arm.core or self.scope != "core")
            and (arm.name in table.headliners or self.scope != "headlines")
            and (not self.arms or arm.name in self.arms)
        ]

    def seeds(self, plan: Plan, table: Table, setting: Setting, arm: Arm) -> tuple[int, ...]:
        """Return the seeds of a row. The arms of headline claims have more, except in the core."""
        more = self.scope != "core" and setting == table.concluding and arm.name in table.headliners
        return plan.protocol.headline_seeds if more else plan.protocol.seeds


Cell = tuple[str, str, str]
"""A table, a setting and an arm."""


def cells(plan: Plan, selection: Selection) -> Iterator[Cell]:
    """Yield what is asked for, table by table."""
    for name, table, setting in selection.settings(plan):
        for arm in selection.arms_of(table, setting):
            yield name, setting.name, arm.name


def tuned_cell(plan: Plan, cell: Cell) -> Cell:
    """Return the cell in which a cell's learning rate is chosen."""
    name, setting, arm = cell
    table = plan.tables[name]
    return name, table.tuned(table.setting(setting)).name, table.arm(arm).rate_of or arm


def tried(plan: Plan, scores: Scores, cell: Cell) -> dict[float, float]:
    """Return the score of each learning rate that a cell has finished on the tuning seed."""
    return {
        job.rate: score
        for job, score in scores.items()
        if job.seed == plan.protocol.tuning_seed and (job.table, job.setting, job.arm) == cell
    }


def wanted_rates(plan: Plan, scores: Scores, cell: Cell) -> tuple[float, ...]:
    """Return the learning rates that a cell still has to try."""
    return plan.ladder(plan.tables[cell[0]].arm(cell[2])).wanted(tried(plan, scores, cell))


def choices(plan: Plan, selection: Selection, scores: Scores) -> dict[Cell, float]:
    """Return the learning rate of each cell whose choice is settled."""
    chosen: dict[Cell, float] = {}
    for cell in cells(plan, selection):
        if (rate := choice(plan, scores, cell)) is not None:
            chosen[cell] = rate
    return chosen


def choice(plan: Plan, scores: Scores, cell: Cell) -> float | None:
    """Return the learning rate of a cell, or None while its choice is not settled."""
    source = tuned_cell(plan, cell)
    found = tried(plan, scores, source)
    return best(found) if found and not wanted_rates(plan, scores, source) else None


def at_end(plan: Plan, scores: Scores, cell: Cell) -> bool:
    """True if the best of several learning rates is the smallest or the largest one."""
    found = tried(plan, scores, tuned_cell(plan, cell))
    return len(found) > 1 and best(found) in (min(found), max(found))


def rows(plan: Plan, selection: Selection) -> Iterator[tuple[Cell, int]]:
    """Yield every cell and seed of the tables: within a setting, seed by seed all arms."""
    for name, table, setting in selection.settings(plan):
        arms = selection.arms_of(table, setting)
        seeds = {arm.name: selection.seeds(plan, table, setting, arm) for arm in arms}
        for seed in sorted({seed for of_arm in seeds.values() for seed in of_arm}):
            yield from (((name, setting.name, arm.name), seed) for arm in arms if seed in seeds[arm.name])


def startable(
    plan: Plan,
    selection: Selection,
    scores: Scores,
    begun: Collection[Job],
    rates: Mapping[Cell, float] | None = None,
) -> Iterator[Job]:
    """Yield the runs that can start, the most important first: those that are neither finished nor `begun`.

    Table by table, first the runs that choose rates, then the rows. A row waits until its rate is settled. Given
    `rates` replace the choice.
    """
    found = choices(plan, selection, scores) if rates is None else rates
    for table in dict.fromkeys(cell[0] for cell in cells(plan, selection)):
        of_table = [cell for cell in cells(plan, selection) if cell[0] == table]
        jobs: list[Job] = []
        if rates is None:
            for cell in dict.fromkeys(tuned_cell(plan, cell) for cell in of_table):
                jobs += [Job(*cell, plan.protocol.tuning_seed, rate) for rate in wanted_rates(plan, scores, cell)]
        jobs += [
            Job(*cell, seed, found[cell])
            for cell, seed in rows(plan, selection)
            if cell[0] == table and cell in found
        ]
        yield from (job for job in jobs if job not in scores and job not in begun)


def left(
    plan: Plan, selection: Selection, scores: Scores, rates: Mapping[Cell, float] | None = None
) -> dict[tuple[str, bool], int]:
    """Return how many runs of each table are left, by whether they choose a rate. Further rates may come on top."""
    found = choices(plan, selection, scores) if rates is None else rates
    counts: dict[tuple[str, bool], int] = {}
    for cell in dict.fromkeys(tuned_cell(plan, cell) for cell in cells(plan, selection)) if rates is None else ():
        counts[cell[0], True] = counts.get((cell[0], True), 0) + len(wanted_rates(plan, scores, cell))
    for cell, seed in rows(plan, selection):
        is_done = cell in found and Job(*cell, seed, found[cell]) in scores
        counts[cell[0], False] = counts.get((cell[0], False), 0) + (not is_done)
    return counts
