"""Sweeps: a simulation for each combination of some settings and each seed, and the table over them."""

from __future__ import annotations

import csv
import hashlib
import os
import re
import signal
import sys
import tomllib
import traceback
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from multiprocessing import get_context
from multiprocessing.connection import wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from tessera.shared.client.run_file import steps_of, value_of
from tessera.shared.diagnostics import toml
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.metrics.convergence import COSTS
from tessera.shared.metrics.site_spread import PERSONAL
from tessera.shared.metrics.svg_charts import Panel, Series, lines, svg_file
from tessera.shared.problems import Invalid
from tessera.shared.updates.model_folder import ModelFolder
from tessera.simulation.comparison.folders import Figure, SimulationComparison
from tessera.simulation.config import SimulationFile, SimulationTable, read_file
from tessera.worker.executor.supervisor import end_with_parent
from tessera.worker.settings import SettingsError

if TYPE_CHECKING:
    from tessera.simulation import federation
else:
    federation = DeferredModule("tessera.simulation.federation")

IDENTITY = "sweep.json"
"""The file with the settings that all simulations of a sweep share."""
TABLE_CSV, TABLE, PLOT = "sweep.csv", "sweep.md", "sweep.svg"
FAILURE = "failure.txt"
"""The reason and the traceback of a simulation that failed, in its folder."""

MAX_FOLDER = 80
BAR = "\\|"
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
    def texts(self) -> list[str]:
        return list(map(_text, self.values.values()))

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
        path = steps_of(key)
        if path[0] in ("seed", "model", "name", "sweep"):
            raise Invalid(f"{key} cannot be varied", remedy="Give seeds with --seeds, and one --model for all.")
        # The value of one of them would be lost, and the results named after it.
        if same := [other for other in found if other != key and steps_of(other)[: len(path)] == path]:
            raise Invalid(f"{key} and {same[0]} are varied, and set the same", remedy="Vary one of them.")
        if twice := [value for place, value in enumerate(values) if value in values[:place]]:
            raise Invalid(f"--vary {key} has {toml(twice[0])} twice", remedy="Give each value once.")
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


def _spread(figure: Figure) -> str:
    return figure.shown if figure.deviation is None else f"{figure.mean:.4g} ± {figure.deviation:.2g}"


def _difference(figure: Figure) -> str:
    interval = "" if figure.low is None else f" [{figure.low:+.4f}, {figure.high:+.4f}]"
    return "-" if figure.difference is None else f"{figure.difference:+.4f}{interval}"


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
    files = {one: _valid(one.name, partial(read_file, file, [*settings, *one.settings])) for one in found}
    with federation.checks_of(start, is_tested=files[found[0]].table.test is not None) as (uploaded, check):
        for one, each in files.items():
            _valid(one.name, partial(check, {**each.spec, "seed": seed}))
        for one, table in {each.table.model_dump_json(): (one, each.table) for one, each in files.items()}.values():
            _valid(one.name, partial(_load_some, table, seed))
    return files, uploaded.version


def _valid(name: str, made: Callable[[], T]) -> T:
    """Return the result of `made`; its refusals name the combination."""
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
    # The fork repeats no import and no check of this process; and a process that is killed ends no other.
    context, left = get_context("fork"), deque(jobs)
    running: dict[Any, tuple[Job, BaseProcess]] = {}
    try:
        while left or running:
            while left and len(running) < processes:
                process: BaseProcess = context.Process(target=_child, args=(os.getpid(), run, left[0]), name="sweep")
                with _uninterrupted():
                    process.start()
                    running[process.sentinel] = (left.popleft(), process)
            for sentinel in wait(list(running)):
                job, process = running.pop(sentinel)
                process.join()
                ended(job, len(jobs) - len(left) - len(running), _reason(job, process.exitcode or 0))
    finally:
        with _uninterrupted():
            for _, process in running.values():
                process.kill()
                process.join()


@contextmanager
def _uninterrupted() -> Iterator[None]:
    """Hold back an interrupt, which would leave a process behind, or be lost in a fork's own callbacks.

    A process that is started meanwhile is never interrupted: this one ends it.
    """
    signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})


def _reason(job: Job, code: int) -> str | None:
    """Return the reason why a job's process failed; None if it did not."""
    if code < 0:
        return (
            f"its process was ended by {signal.Signals(-code).name}; with too little memory, give fewer --processes"
        )
    with suppress(OSError):
        return (job.folder / FAILURE).read_text("utf-8").partition("\n")[0] if code else None
    return f"its process ended with code {code}"


def _child(parent: int, run: Callable[[Job], None], job: Job) -> None:
    end_with_parent(parent, signal.SIGKILL)
    file = job.folder / FAILURE
    file.unlink(missing_ok=True)
    try:
        run(job)
    except Exception as fault:  # noqa: BLE001  (one that fails must not end the others)
        job.folder.mkdir(parents=True, exist_ok=True)
        reason = " ".join(str(fault).split()) or type(fault).__name__
        file.write_text(f"{reason}\n\n{traceback.format_exc()}", encoding="utf-8")
        sys.exit(1)


# ---------------------------------------------------------------- the table


@dataclass(frozen=True)
class SweepResults:
    """The simulations of a sweep, each combination compared with the first complete one."""

    vary: Mapping[str, Sequence[Any]]
    seeds: Sequence[int]
    rows: Mapping[Combination, Mapping[str, Figure] | str]
    """A combination's figures over the seeds, or why it has none."""
    score: str = ""
    """The name of the main score; empty if nothing was measured."""
    remarks: Sequence[str] = ()

    @classmethod
    def of(
        cls,
        vary: Mapping[str, Sequence[Any]],
        jobs: Sequence[Job],
        failed: Mapping[Job, str],
        reach: Sequence[float],
    ) -> SweepResults:
        """Read the results. A combination with a seed that failed is not compared."""
        seeds, rows = sorted({job.seed for job in jobs}), dict[Combination, Mapping[str, Figure] | str]()
        for job in jobs:
            if not rows.setdefault(job.combination, {}) and job in failed:
                rows[job.combination] = f"seed {job.seed}: {failed[job]}"
        folders = {job.combination: job.folder.parent for job in jobs if rows[job.combination] == {}}
        if not folders:
            return cls(vary, seeds, rows)
        # The folders may have more seeds, of an earlier command.
        comparison = replace(SimulationComparison.of(list(folders.values()), reach), seeds=seeds)
        figures = comparison.figures()
        for one, folder in folders.items():
            rows[one] = {name: by_folder[str(folder)] for name, by_folder in figures.items()}
        titles = {
            curve.title.removeprefix(PERSONAL) for each in comparison.curves.values() for curve in each.values()
        }
        score = next((title for title in sorted(titles) if title in figures), "")
        return cls(vary, seeds, rows, score, list(comparison.remarks()))

    @property
    def baseline(self) -> str:
        return next((one.name for one, found in self.rows.items() if not isinstance(found, str)), "none: all failed")

    def document(self) -> dict[str, Any]:
        """Return the table as JSON."""
        rows = []
        for one, found in self.rows.items():
            figures, failure = ({}, found) if isinstance(found, str) else (found, None)
            shown = {name: asdict(figure) for name, figure in figures.items()}
            rows.append({"settings": dict(one.values), "figures": shown, "failure": failure})
        return {"seeds": list(self.seeds), "baseline": self.baseline, "remarks": list(self.remarks), "rows": rows}

    def write(self, out: Path) -> list[str]:
        """Write the table as CSV, with all figures, and as Markdown, and the plot of the score if there is one.

        Return the names of the files.
        """
        fields = ("mean", "deviation", "difference", "low", "high", "lacking")
        with (out / TABLE_CSV).open("w", encoding="utf-8", newline="") as file:
            writer = csv.writer(file, lineterminator="\n")
            writer.writerow((*self.vary, "figure", "seeds", *fields, "failure"))
            for one, found in self.rows.items():
                if isinstance(found, str):
                    writer.writerow((*one.texts, "", len(self.seeds), *[""] * len(fields), found))
                    continue
                for name, figure in found.items():
                    shown = (getattr(figure, field) for field in fields)
                    writer.writerow((*one.texts, name, len(self.seeds), *shown, ""))
        (out / TABLE).write_text(self.markdown(), encoding="utf-8")
        picture = self.plot()
        (out / PLOT).write_text(picture, encoding="utf-8") if picture else (out / PLOT).unlink(missing_ok=True)
        return [TABLE, TABLE_CSV, *([PLOT] if picture else [])]

    def markdown(self) -> str:
        """Return the table for people: the score, its jitter, bytes, and the cost of each level."""
        if len(self.seeds) > 1:
            said = (
                f"Means over seeds {', '.join(map(str, self.seeds))}, with the standard deviation. A difference is "
            )
            said += (
                f"from {self.baseline}, paired by seed, with its 95 % t-interval: where that includes 0, the seeds "
            )
            said += "do not show a difference."
        else:
            said = (
                f"Of seed {self.seeds[0]} alone, which shows no difference: give more with `--seeds`. A difference "
            )
            said += f"is from {self.baseline}."
        every = next((found for found in self.rows.values() if not isinstance(found, str)), {})
        costs = [name for name in every if name.startswith((f"{COSTS[0]} to ", f"{COSTS[-1]} to "))]
        wanted = [f"jitter of {self.score}", "megabytes down", "megabytes up", *costs]
        names = [name for name in wanted if name in every]
        scored = [self.score, "difference [95 %]"] if self.score else []
        head = [*self.vary, *scored, *names]
        lines = [head, ["---"] * len(head)]
        for one, found in self.rows.items():
            if isinstance(found, str):
                lines.append([*one.texts, f"failed: {found}"])
                continue
            own = [_spread(found[self.score]), _difference(found[self.score])] if self.score else []
            lines.append([*one.texts, *own, *(_spread(found[name]) for name in names)])
        table = [f"| {' | '.join(cell.replace('|', BAR).replace(chr(10), ' ') for cell in line)} |" for line in lines]
        return "\n".join([said, "", *table, *(f"\n{remark}" for remark in self.remarks), ""])

    def plot(self) -> str:
        """Return the score over the first key's values, a line for each combination of the others; empty without."""
        first, *others = self.vary
        names = list(map(_text, self.vary[first]))
        points: dict[str, dict[float, float]] = {}
        for one, found in self.rows.items():
            mean = None if isinstance(found, str) or not self.score else found[self.score].mean
            if mean is not None:
                line = ", ".join(f"{key.rpartition('.')[2]}={_text(one.values[key])}" for key in others)
                points.setdefault(line or self.score, {})[names.index(one.texts[0])] = mean
        series = [Series(name, values, main=True) for name, values in points.items()]
        picture = lines("sweep", self.score, series, along=first, names=names)
        title = f"{self.score}, mean of {len(self.seeds)} seeds" if len(self.seeds) > 1 else self.score
        return str(svg_file(Panel("sweep", title, picture, (), (), series))) if picture else ""
