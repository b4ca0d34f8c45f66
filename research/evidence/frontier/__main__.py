"""Macro F1 by epsilon for whole layers, SAFL, LoRA and the head: `python -m evidence.frontier`.

python -m evidence.sources.prepare --only text fetches what it needs, once; the only step that downloads
python -m evidence.frontier --processes 2      all runs; hours on a CPU, resumes after a kill
python -m evidence.frontier --device cuda --processes 10 --deadline 360
python -m evidence.frontier --report           the tables and the plot of what is finished
python -m evidence.frontier --save             the finished runs into the repository and its document

Each finished run is one JSON file in the output folder. Repeat the command to continue. A new folder begins with the
runs of the repository. `--arms head lora` runs these alone, for a machine that is too slow for the others.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Collection, Iterator, Mapping
from math import inf
from pathlib import Path
from time import monotonic
from typing import Any

from common.document import EVIDENCE, write_block
from evidence import pool
from evidence.frontier import runs
from evidence.frontier.report import lines, picture
from evidence.frontier.study import QUICK, SCORE, STANDARD, Job, Study, startable
from evidence.pool import Figures
from evidence.results_folder import RUNS, file_of, keep, kept, write
from evidence.sources.prepare import OUT as PREPARED

SAVED = Path(__file__).with_name("runs.json")
"""The settings and inputs of the study, and the figures of its finished runs."""
OUT = Path("bench-output/frontier")
COMMAND = "python -m evidence.frontier"
MODELS, ABOUT, PLOT = "models", "study.json", "frontier.png"


class OtherStudy(ValueError):
    """A folder with results of other settings or inputs."""


def finished(out: Path) -> dict[Job, Figures]:
    """Return the figures of every finished run in the folder."""
    found = {}
    for figures in kept(out):
        epsilon = inf if figures["epsilon"] is None else figures["epsilon"]
        found[Job(figures["arm"], epsilon, figures["seed"], figures["rate"])] = figures
    return found


def claim(out: Path, study: Study, inputs: Mapping[str, str]) -> None:
    """Record the study's settings and inputs in the folder. Raises OtherStudy if it holds results of others."""
    file = out / ABOUT
    about = {"settings": study.described(), "inputs": dict(inputs)}
    if file.exists():
        before = json.loads(file.read_bytes())
        if changed := [key for key, value in about.items() if before[key] != value]:
            raise OtherStudy(
                f"{out} has runs with other {' and '.join(changed)}: name another folder with --out, or remove it"
            )
    else:
        write(file, about)


def save(out: Path, saved: Path = SAVED) -> None:
    """Write the folder's finished runs, with their settings and inputs, into one file: a line for each run.

    Raises OtherStudy if they are not of the whole study.
    """
    about = {**json.loads((out / ABOUT).read_bytes()), RUNS: {}}
    if about["settings"] != STANDARD.described():
        raise OtherStudy(f"{out} has runs with other settings: name the folder of the whole study with --out")
    lines = sorted(
        f"{json.dumps(job.name)}: {json.dumps(figures, sort_keys=True)}" for job, figures in finished(out).items()
    )
    head, brace, rest = json.dumps(about, indent=1, sort_keys=True).partition(f'"{RUNS}": {{')
    saved.write_text(f"{head}{brace}\n" + ",\n".join(lines) + f"\n{rest}\n", encoding="utf-8")


def begin_with_saved(out: Path, study: Study, saved: Path = SAVED) -> None:
    """Write the saved runs that a folder lacks into it, if they are of the same study and inputs."""
    document = json.loads(saved.read_bytes())
    found, about = document.pop(RUNS), out / ABOUT
    if document["settings"] != study.described() or (about.exists() and json.loads(about.read_bytes()) != document):
        return
    write(about, document)
    for name, figures in found.items():
        if not file_of(out, name).exists():
            keep(out, name, figures)


def work(
    study: Study,
    prepared: Path,
    out: Path,
    device: str,
    processes: int,
    over: Callable[[], bool] = lambda: False,
    only: Callable[[Job], bool] = lambda _: True,
) -> dict[Job, str]:
    """Run all jobs of `only` that are not finished, several at the same time, until `over` says to start no more.

    Return the reason of each that failed. The others go on.
    """
    scores = {job: figures[SCORE] for job, figures in finished(out).items()}

    def wanted(begun: Collection[Job]) -> Iterator[Job]:
        return (job for job in startable(study, scores, begun) if only(job))

    def task(job: Job) -> tuple[Any, ...]:
        return runs.run, study, job, prepared, out / MODELS, device

    def end(job: Job, figures: Figures) -> None:
        keep(out, job.name, figures)
        scores[job] = figures[SCORE]
        print(f"{job.name}: {figures[SCORE]:.4f}, {figures.get('seconds', 0)} s", file=sys.stderr, flush=True)

    return pool.work(wanted, task, end, processes, over)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m evidence.frontier",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of prepared models and data")
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--device", default="cpu", help="cpu, cuda or cuda:N, which all processes share")
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--deadline", type=float, default=inf, help="seconds after which no run starts")
    parser.add_argument("--arms", nargs="+", choices=[arm.name for arm in STANDARD.arms], help="only these arms")
    parser.add_argument("--quick", action="store_true", help="a few steps on few phrases: to see that it works")
    parser.add_argument("--report", action="store_true", help="print the tables of finished runs, and start none")
    parser.add_argument("--save", action="store_true", help=f"write finished runs to {SAVED.name} and the document")
    given = parser.parse_args(arguments)
    if given.quick and given.save:
        parser.error("--save is for the whole study: leave --quick out")
    study = QUICK if given.quick else STANDARD
    failed: dict[Job, str] = {}
    begin_with_saved(given.out, study)
    if given.save:
        save(given.out)
        write_block(COMMAND, lines(study, finished(given.out)))
        picture(study, finished(given.out), EVIDENCE.with_name(PLOT))
        return 0
    if not given.report:
        began = monotonic()
        claim(given.out, study, runs.inputs(given.prepared))
        failed = work(
            study,
            given.prepared,
            given.out,
            given.device,
            given.processes,
            over=lambda: monotonic() - began >= given.deadline,
            only=lambda job: job.arm in (given.arms or [job.arm]),
        )
    found = finished(given.out)
    for line in lines(study, found):
        print(line)
    if found:
        picture(study, found, given.out / PLOT)
        print(f"\nEach run's figures and a plot: {given.out}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
