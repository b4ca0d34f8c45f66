"""Federations on one seed after the other; lists the seeds that break an invariant.

python -m tests.model_checking --seed 0 --federations 1000
python -m tests.model_checking --federations 2000 --buffered --done seeds.txt   # goes on where it ended
python -m tests.model_checking --hours 3
python -m tests.model_checking --crash-points --shapes buffer --done crashes.txt
python -m tests.model_checking --rules --steps 100000000
"""

from __future__ import annotations

import argparse
import itertools
import sys
import time
import traceback
from itertools import product
from pathlib import Path

from tests.model_checking.crash_points import DIFFER, SHAPES, killed, undisturbed
from tests.model_checking.federation import Shape, simulate
from tests.model_checking.invariants import Violated
from tests.model_checking.rules import rehearse

RULES_STEPS = 125_000
"""Events of the rules on one seed."""


def federations(wanted: argparse.Namespace) -> int:
    began_at, done, broken = time.monotonic(), 0, []
    clean = set(wanted.done.read_text().split()) if wanted.done and wanted.done.exists() else set()
    count = itertools.count() if wanted.federations is None else range(wanted.federations)
    ran, seeds = 0, (seed for seed in (wanted.seed + number for number in count) if str(seed) not in clean)
    for seed in seeds:
        over = wanted.hours is not None and time.monotonic() - began_at > wanted.hours * 3600
        if over or (wanted.steps is not None and done >= wanted.steps):
            break
        ran += 1
        try:
            outcome = simulate(seed, shape=Shape.buffered(seed) if wanted.buffered else None)
        except Exception:  # noqa: BLE001  (a handler that raises is a find like any other; the hunt goes on)
            traceback.print_exc()
            broken.append(seed)
            continue
        done += outcome.steps
        print(f"seed {outcome.seed}: {outcome.steps} steps, {outcome.changes} changes, {outcome.versions} versions, "
              f"{outcome.state}, trace {outcome.trace}", flush=True)  # fmt: skip
        if wanted.done:
            with wanted.done.open("a") as file:
                file.write(f"{seed}\n")
    seconds = time.monotonic() - began_at
    found = f"seeds that broke an invariant: {broken}" if broken else "no invariant was broken"
    before = f", {len(clean)} before" if clean else ""
    print(f"{ran} federations{before}, {done} steps, {done / seconds:.0f} a second: {found}")
    return 1 if broken else 0


def crash_points(every: int, named: str, done: Path | None) -> int:
    count, clean = 0, set(done.read_text().splitlines()) if done and done.exists() else set[str]()
    for name, shape in SHAPES.items():
        if named not in name:
            continue
        calm, points = undisturbed(shape)
        for point, power_cut in product(points[::every], (False, True)):
            count += 1
            line = f"{name}: {'power cut' if power_cut else 'killed'} at point {point}"
            if line in clean:
                continue
            found = killed(shape, point, power_cut=power_cut)
            same = name in DIFFER or found.digest == calm.digest
            if not same or (found.state, found.versions) != (calm.state, calm.versions):
                print(f"{line}, it ended {found.state} with {found.digest}, not {calm.state} with {calm.digest}")
                return 1
            if done:
                with done.open("a") as file:
                    file.write(f"{line}\n")
        print(
            f"{name}: {len(points)} points, every {every}. killed and cut off from power: {calm.digest[:19]}",
            flush=True,
        )
    print(f"{count} crashes: each run ended as without them")
    return 0


def rules(seed: int, steps: int) -> int:
    began_at, done = time.monotonic(), 0
    for number in itertools.count():
        if done >= steps:
            break
        try:
            runs = rehearse(seed + number, RULES_STEPS)
        except Violated:
            traceback.print_exc(limit=0)
            return 1
        done += runs.steps
        print(f"seed {seed + number}: {runs.steps} events, {runs.runs} runs, {runs.ended}", flush=True)
    print(f"{done} events, {done / (time.monotonic() - began_at):.0f} a second: no invariant was broken")
    return 0


if __name__ == "__main__":
    parser = argparse.ArgumentParser(prog="python -m tests.model_checking", description=__doc__.splitlines()[0])
    parser.add_argument("--seed", type=int, default=0, help="the first seed")
    parser.add_argument("--federations", type=int, help="how many seeds")
    parser.add_argument("--steps", type=int, help="ends after so many steps")
    parser.add_argument("--hours", type=float, help="ends after so long")
    parser.add_argument("--buffered", action="store_true", help="runs that buffer updates")
    parser.add_argument("--done", type=Path, help="a file of seeds or crashes that broke nothing, left out")
    parser.add_argument("--crash-points", action="store_true", help="kills one round at every point instead")
    parser.add_argument("--shapes", default="", help="of the crash points, only shapes with this in their names")
    parser.add_argument("--every", type=int, default=1, help="of the crash points, every n-th")
    parser.add_argument("--rules", action="store_true", help="the pure rules alone, on records in memory")
    wanted = parser.parse_args()
    if wanted.rules:
        sys.exit(rules(wanted.seed, wanted.steps or RULES_STEPS))
    if wanted.crash_points:
        sys.exit(crash_points(wanted.every, wanted.shapes, wanted.done))
    sys.exit(federations(wanted))
