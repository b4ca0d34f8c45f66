"""The runs of a plan, and the order in which they start. Nothing here trains or reads data."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Literal

from evidence.plan import Arm, Plan, Scope, Setting, Table
from evidence.rates import best


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
        **({"rules": table.rules} if table.rules != 1 else {}),
    }
    return hashlib.sha256(json.dumps(about, sort_keys=True).encode()).hexdigest()[:12]


@dataclass(frozen=True)
class Selection:
    """The runs of a plan that are asked for."""

    scope: Scope | Literal["headlines"] = "full"
    """`headlines`: the arms of headline claims in the settings that they are about."""
    tables: Collection[str] = ()
    """All if empty, as are arms and the seeds of rows."""
    arms: Collection[str] = ()
    only_seeds: Collection[int] = ()

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
        return tuple(
            seed for seed in plan.seeds_of(table, headline=more) if not self.only_seeds or seed in self.only_seeds
        )


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
