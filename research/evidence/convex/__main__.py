"""Methods against client drift on a convex problem of known minimum: `python -m evidence.convex`.

python -m evidence.convex                      phrases, if they are prepared: see docs/evidence.md
python -m evidence.convex --problem images     the small problem, which needs no prepared files
python -m evidence.convex fednova "feddyn alpha=1.0" --scenarios "by time" --seeds 1
python -m evidence.convex --report             the tables and the plot of what is finished
python -m evidence.convex --save               the finished runs into the repository

Newton's method finds the minimum. Each method runs in the product's simulation, and its paper's equations in numpy on
the same cohorts. A finished run is kept; repeat the command to continue. `seconds` are those of the study's clock: a
step lasts 4, 1 or 2 s at a site, a model over a line 2 s, and a round as long as its slowest site.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from multiprocessing import get_context
from pathlib import Path
from typing import Any

from common.document import write_block
from evidence.convex.problem import Problem, images, phrases
from evidence.convex.report import lines, picture
from evidence.convex.runs import Key, begin, key_of, limits, one, ordered, read, write
from evidence.convex.study import ARMS, ROUNDS, differs, scenarios
from evidence.sources.prepare import OUT as PREPARED
from evidence.sources.prepare import PHRASES

SAVED = Path(__file__).with_name("runs.json")
"""The finished runs of `phrases`."""
OUT = Path("bench-output/convex")
COMMAND = "python -m evidence.convex"
RUNS, PLOT = "runs.json", "convex.png"
SEEDS = (1, 2, 3, 4, 5)


class OtherStudy(ValueError):
    """A folder with runs of another problem or length."""


def work(
    given: argparse.Namespace,
    drawn: Callable[[int], Problem],
    found: dict[Key, dict[str, Any]],
    keep: Callable[[], None],
) -> None:
    """Run what is not finished, seed by seed, in several processes."""
    with ProcessPoolExecutor(given.processes, mp_context=get_context("spawn"), initializer=begin) as pool:
        for seed in given.seeds:
            problem = drawn(seed)
            known = scenarios(problem, given.rounds)
            begun = {
                pool.submit(one, problem, arm, name, given.rounds): (arm.name, name, seed)
                for name in given.scenarios or known
                for arm in ARMS
                if arm.name in (given.methods or [arm.name])
                if differs(arm, known[name]) and (arm.name, name, seed) not in found
            }
            for future in as_completed(begun):
                key = begun[future]
                found[key] = future.result()
                keep()
                print(f"{key_of(key)}: {found[key]['distances'][-1]:g} %", file=sys.stderr, flush=True)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m evidence.convex",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("methods", nargs="*", help="rows, such as fedavg or 'feddyn alpha=1.0'; all if none")
    parser.add_argument("--problem", choices=["phrases", "images"], help="phrases if they are prepared, else images")
    parser.add_argument("--prepared", type=Path, default=PREPARED, help="the folder of the model and the phrases")
    parser.add_argument("--scenarios", nargs="+", help="all if not given")
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--processes", type=int, default=1)
    parser.add_argument("--out", type=Path, default=OUT, help="the folder of results")
    parser.add_argument("--limits", action="store_true", help="compute the limits of FedAvg and FedNova too")
    parser.add_argument("--report", action="store_true", help="print the tables of finished runs, and start none")
    parser.add_argument("--save", action="store_true", help="write finished runs to the repository and its document")
    given = parser.parse_args(arguments)
    chosen = given.problem or ("phrases" if (given.prepared / PHRASES).exists() else "images")
    drawn: Callable[[int], Problem] = images if chosen == "images" else lambda seed: phrases(given.prepared, seed)
    if given.save and (chosen, given.rounds) != ("phrases", ROUNDS):
        parser.error("--save is for all rounds of the phrases: prepare them, and leave --problem and --rounds out")
    file = given.out / chosen / RUNS
    settings, found, limited = read(file)
    wanted = {"problem": chosen, "rounds": given.rounds}
    if settings and settings != wanted and not given.report:
        raise OtherStudy(f"{file} has runs of {settings}, not {wanted}: name another folder with --out, or remove it")
    saved_settings, saved, saved_limits = read(SAVED)
    if saved_settings == (settings or wanted):
        found, limited = saved | found, limited or saved_limits
    names = list(scenarios(images()))
    if given.save:
        write(SAVED, wanted, ordered(found, names), limited)
        write_block(COMMAND, lines(ordered(found, names), limited))
        return
    if not given.report:
        begin()
        work(given, drawn, found, lambda: write(file, wanted, found, limited))
        if given.limits:
            limited = limits({seed: drawn(seed) for seed in given.seeds})
            write(file, wanted, found, limited)
    for line in lines(ordered(found, names), limited):
        print(line)
    if found:
        given.out.mkdir(parents=True, exist_ok=True)
        picture(found, given.out / PLOT)


if __name__ == "__main__":
    main()
