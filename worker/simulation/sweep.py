"""Sweeps: a simulation for each combination of some settings and each seed, and the table over them."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import signal
import tomllib
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tessera.shared.cli.lazy_import import Deferred
from tessera.shared.cli.run_file import value_of
from tessera.shared.cli.run_keys import toml
from tessera.shared.metrics.convergence import COSTS
from tessera.shared.metrics.site_spread import PERSONAL
from tessera.shared.metrics.svg_charts import Panel, Series, lines, svg_file
from tessera.shared.problems import Invalid
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.ranks.launcher import end_with_parent
from tessera.worker.settings import SettingsError
from tessera.worker.simulation.comparison import Comparison, Figure
from tessera.worker.simulation.config import SimulationFile, SimulationTable, read_file

if TYPE_CHECKING:
    from tessera.worker.simulation import federation
else:
    federation = Deferred("tessera.worker.simulation.federation")

IDENTITY = "sweep.json"
"""The file with the settings that all simulations of a sweep share."""
TABLE_CSV, TABLE, PLOT = "sweep.csv", "sweep.md", "sweep.svg"
FAILURE = "failure.txt"
"""The traceback of a simulation that failed, in its folder."""

MAX_FOLDER = 80
REMEDY = "For example: --vary method.layers=2,4,8"

T = TypeVar("T")


@dataclass(frozen=True, eq=False)
class Combination:
    """One value of each varied setting."""

    values: Mapping[str, Any]
    """By dotted key."""
    name: str

    @property
    def settings(self) -> list[str]:
        """The values as `--set` takes them."""
        return [f"{key}={toml(value)}" for key, value in self.values.items()]

    @property
    def folder(self) -> str:
        """A name that no other combination has, on any file system."""
        plain = re.sub(r"[^A-Za-z0-9.=,_-]+", "_", self.name.replace(", ", ","))
        if plain == self.name.replace(", ", ",") and len(plain) <= MAX_FOLDER:
            return plain
        return f"{plain[:MAX_FOLDER]}-{hashlib.sha256(self.name.encode()).hexdigest()[:8]}"


def varied(options: Iterable[str], given: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    """Return the values of each varied key, of a file's table and of `KEY=VALUE,VALUE...` options, which replace it.

    Values are in TOML, or plain text. Raises Invalid.
    """
    found: dict[str, list[Any]] = {}
    for option in options:
        key, equals, text = (part.strip() for part in option.partition("="))
        if not (key and equals and text):
            raise Invalid(f"--vary {option!r} is not KEY=VALUE,VALUE...", remedy=REMEDY)
        if key in found:
            raise Invalid(f"--vary {key} is given twice", remedy="Give all its values in one option.")
        found[key] = _listed(text)
    found = {key: list(values) for key, values in given.items() if key not in found} | found
    for key, values in found.items():
        if key in ("seed", "model", "name"):
            raise Invalid(f"{key} cannot be varied", remedy="Give seeds with --seeds, and one --model for all.")
        shown = Counter(map(toml, values))
        if twice := [value for value, count in shown.items() if count > 1]:
            raise Invalid(f"--vary {key} has {twice[0]} twice", remedy="Give each value once.")
    return found


def _listed(text: str) -> list[Any]:
    with suppress(tomllib.TOMLDecodeError):
        if len(parsed := tomllib.loads(f"values = [{text}]")) == 1:
            return list(parsed["values"])
    return [value_of(part.strip()) for part in text.split(",")]


def combinations(vary: Mapping[str, Sequence[Any]]) -> list[Combination]:
    """Return all combinations of the values, the last key's values first."""
    last = Counter(key.rpartition(".")[2] for key in vary)
    short = {key: key if last[key.rpartition(".")[2]] > 1 else key.rpartition(".")[2] for key in vary}
    found = [dict(zip(vary, values, strict=True)) for values in product(*vary.values())]
    return [
        Combination(values, ", ".join(f"{short[key]}={_text(value)}" for key, value in values.items()))
        for values in found
    ]


def _text(value: Any) -> str:
    return value if isinstance(value, str) else toml(value)


def checked(
    file: Path,
    settings: Sequence[str],
    found: Sequence[Combination],
    start: ModelFolder,
    seed: int,
) -> tuple[dict[Combination, SimulationFile], str]:
    """Return each combination's settings, and the model's digest. Raises Invalid for the first that cannot begin."""
    files = {one: _valid(one.name, partial(read_file, file, [*settings, *one.settings], quiet=True)) for one in found}
    with federation.checks_of(start, is_tested=files[found[0]].table.test is not None) as (uploaded, check):
        for one, each in files.items():
            _valid(one.name, partial(check, {**each.spec, "seed": seed}))
        for one, table in {each.table.model_dump_json(): (one, each.table) for one, each in files.items()}.values():
            _valid(one.name, partial(_load_some, table, seed))
    return files, uploaded.version


def _valid(name: str, made: Callable[[], T]) -> T:
    """Return what a combination makes; its refusals name it."""
    try:
        return made()
    except Invalid as fault:
        raise Invalid(f"{name}: {fault.detail}", errors=fault.errors, remedy=fault.advice) from None


def _load_some(table: SimulationTable, seed: int) -> None:
    """Raise Invalid if the data of the first site, or of the test, cannot be loaded."""
    try:
        next(iter(table.population(seed).values())).load()
        table.central()
    except SettingsError as fault:
        raise Invalid(f"simulation.{fault}", remedy="Correct this setting.") from None


# ---------------------------------------------------------------- processes


@dataclass(frozen=True)
class Job:
    """One simulation of a sweep."""

    combination: Combination
    seed: int
    folder: Path

    @property
    def name(self) -> str:
        return f"{self.combination.name}, seed {self.seed}"


def work(
    jobs: Sequence[Job], run: Callable[[Job], None], processes: int, ended: Callable[[Job, int, str | None], None]
) -> None:
    """Run the jobs, each in a process that is forked from this one, several at the same time.

    `ended` receives each job, the number that have ended, and the reason of its failure or None. All processes end
    with this one, and with any exception in it.
    """
    # What this process imported and checked need not be repeated; and a process that is killed takes no other along.
    context, left = get_context("fork"), deque(jobs)
    running: dict[Any, tuple[Job, BaseProcess, Connection]] = {}
    try:
        while left or running:
            while left and len(running) < processes:
                ours, theirs = context.Pipe(duplex=False)
                arguments = (theirs, os.getpid(), run, left[0])
                process: BaseProcess = context.Process(target=_child, args=arguments, name="sweep")
                with _uninterrupted():
                    process.start()
                    theirs.close()
                    running[process.sentinel] = (left.popleft(), process, ours)
            for sentinel in wait(list(running)):
                job, process, ours = running.pop(sentinel)
                process.join()
                ended(job, len(jobs) - len(left) - len(running), _reason(process, ours))
    finally:
        with _uninterrupted():
            for _, process, _ in running.values():
                process.kill()
            for _, process, _ in running.values():
                process.join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back an interrupt, which would leave a process behind, or be lost in a fork's own callbacks."""
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _reason(process: BaseProcess, connection: Connection) -> str | None:
    """Return why a process failed that has ended; None if it did not."""
    with connection, suppress(EOFError):
        if connection.poll():
            return str(connection.recv())
    code = process.exitcode or 0
    killed = f"by {signal.Signals(-code).name}; with too little memory, give fewer --processes" if code < 0 else ""
    return f"its process was ended {killed}" if killed else f"its process ended with code {code}" if code else None


def _child(connection: Connection, parent: int, run: Callable[[Job], None], job: Job) -> None:
    end_with_parent(parent, signal.SIGKILL)
    # The parent is interrupted too, and ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    file = job.folder / FAILURE
    try:
        run(job)
        file.unlink(missing_ok=True)
    except Exception as fault:  # noqa: BLE001  (one that fails must not end the others)
        job.folder.mkdir(parents=True, exist_ok=True)
        file.write_text(traceback.format_exc(), encoding="utf-8")
        connection.send(" ".join(str(fault).split()) or type(fault).__name__)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class Row:
    """A combination's figures over the seeds, or why it has none."""

    combination: Combination
    figures: Mapping[str, Figure]
    failure: str = ""


@dataclass(frozen=True)
class SweepTable:
    """The finished simulations of a sweep, each combination compared with the first complete one."""

    vary: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    rows: Sequence[Row]
    score: str
    """The name of the main score; empty if nothing was measured."""

    @classmethod
    def of(
        cls,
        vary: Mapping[str, Sequence[Any]],
        jobs: Sequence[Job],
        failed: Mapping[Job, str],
        reach: Sequence[float],
    ) -> SweepTable:
        """Read the results. A combination with a seed that failed is not compared."""
        reasons = {job.combination: f"seed {job.seed}: {failed[job]}" for job in reversed(jobs) if job in failed}
        folders = {job.combination: job.folder.parent for job in jobs if job.combination not in reasons}
        seeds, curves, figures = sorted({job.seed for job in jobs}), {}, {}
        if folders:
            # The folders may have more seeds, of an earlier command.
            comparison = replace(Comparison.of(list(folders.values()), reach), seeds=seeds)
            figures, curves = comparison.figures(), comparison.curves
        rows = [
            Row(
                one,
                {name: by[str(folders[one])] for name, by in figures.items()} if one in folders else {},
                reasons.get(one, ""),
            )
            for one in dict.fromkeys(job.combination for job in jobs)
        ]
        curve = next((curve for each in curves.values() for curve in each.values()), None)
        return cls(vary, seeds, rows, curve.title.removeprefix(PERSONAL) if curve else "")

    @property
    def baseline(self) -> str:
        return next((row.combination.name for row in self.rows if not row.failure), "none, because all failed")

    @property
    def names(self) -> list[str]:
        """The figures of the table for people: the score, its jitter, bytes, and what each level took."""
        every = next((row.figures for row in self.rows if row.figures), {})
        costs = [name for name in every if name.startswith((f"{COSTS[0]} to ", f"{COSTS[-1]} to "))]
        wanted = [self.score, f"jitter of {self.score}", "megabytes down", "megabytes up", *costs]
        return [name for name in wanted if name in every]

    def document(self) -> dict[str, Any]:
        """Return the table as JSON."""
        rows = [
            {
                "settings": dict(row.combination.values),
                "figures": {name: asdict(figure) for name, figure in row.figures.items()},
                "failure": row.failure or None,
            }
            for row in self.rows
        ]
        return {"seeds": list(self.seeds), "baseline": self.baseline, "rows": rows}

    def write(self, out: Path) -> None:
        """Write the table as CSV, with all figures, and as Markdown, and the plot of the score."""
        with (out / TABLE_CSV).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            fields = ("mean", "deviation", "difference", "low", "high", "lacking")
            writer.writerow((*self.vary, "figure", "seeds", *fields, "failure"))
            for row in self.rows:
                values = [_text(value) for value in row.combination.values.values()]
                for name, figure in row.figures.items():
                    writer.writerow((*values, name, len(self.seeds), *(getattr(figure, f) for f in fields), ""))
                if row.failure:
                    writer.writerow((*values, "", len(self.seeds), *[""] * len(fields), row.failure))
        (out / TABLE).write_text(self.markdown(), encoding="utf-8")
        if picture := self.plot():
            (out / PLOT).write_text(picture, encoding="utf-8")

    def markdown(self) -> str:
        """Return the table for people, with what its differences are."""
        figures = [*self.names[:1], *(["difference [95 %]"] if self.score else []), *self.names[1:]]
        head = [*self.vary, *(figures or ["figures"])]
        table = [f"| {' | '.join(head)} |", f"|{' --- |' * len(head)}", *map(self._line, self.rows)]
        difference = f"A difference is from {self.baseline}"
        if len(self.seeds) > 1:
            seeds = ", ".join(map(str, self.seeds))
            said = (
                f"Means over seeds {seeds}, with the standard deviation. {difference}, paired by seed, with its 95 % "
            )
            said += "t-interval: where that includes 0, the seeds do not show a difference."
        else:
            said = (
                f"Of seed {self.seeds[0]} alone, which shows no difference: give more with `--seeds`. {difference}."
            )
        return "\n".join([said, "", *table, ""])

    def _line(self, row: Row) -> str:
        values = [_text(value) for value in row.combination.values.values()]
        if row.failure:
            return f"| {' | '.join(map(_cell, values))} | failed: {_cell(row.failure)} |"
        cells = list(values)
        for name in self.names:
            figure = row.figures[name]
            spread = "" if figure.deviation is None else f" ± {figure.deviation:.2g}"
            cells.append(figure.shown if figure.mean is None else f"{figure.mean:.4g}{spread}")
            if name == self.score:
                interval = "" if figure.low is None else f" [{figure.low:+.4f}, {figure.high:+.4f}]"
                cells.append("-" if figure.difference is None else f"{figure.difference:+.4f}{interval}")
        return f"| {' | '.join(map(_cell, cells))} |"

    def plot(self) -> str:
        """Return the score over the first key's values, a line for each combination of the others; empty without."""
        first, *others = self.vary
        names = [_text(value) for value in self.vary[first]]
        points: dict[str, dict[float, float]] = {}
        for row in self.rows:
            line = ", ".join(f"{key.rpartition('.')[2]}={_text(row.combination.values[key])}" for key in others)
            figure = row.figures.get(self.score)
            if figure and figure.mean is not None:
                points.setdefault(line or self.score, {})[names.index(_text(row.combination.values[first]))] = (
                    figure.mean
                )
        series = [Series(name, values, main=True) for name, values in points.items()]
        picture = lines("sweep", self.score, series, along=first, names=names)
        title = f"{self.score}, mean of {len(self.seeds)} seeds" if len(self.seeds) > 1 else self.score
        return str(svg_file(Panel("sweep", title, picture, (), (), series))) if picture else ""


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")
