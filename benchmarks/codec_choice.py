"""The choice between raw and lossless blocks: rounds of both, and as workers choose, by line and number of workers.

python -m benchmarks.codec_choice                                   all lines and numbers; half an hour
python -m benchmarks.codec_choice --lines 100 loopback --workers 4
python -m benchmarks.codec_choice --quick                           one small case, seconds: to see that it works

Workers are those of `benchmarks.light`, each a process with a line of its own. A turn is two rounds of each side, of
which the second one counts.
"""

from __future__ import annotations

import argparse
import tempfile
from contextlib import ExitStack
from itertools import permutations
from pathlib import Path

from benchmarks import light
from benchmarks.federation import Federation
from benchmarks.lines.shaper import Line, Shaper
from benchmarks.measuring import OUT, Results, machine_speeds, median, processor_seconds
from benchmarks.network import DIRECT, Network
from benchmarks.payloads import Weights
from examples.processes import end_by_interrupt
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW

LINES = {"10": Line(10, 0.03), "100": Line(100, 0.03), "1000": Line(1000, 0.005), "loopback": None}
MEGABYTES = {"10": 4.0, "100": 16.0, "1000": 32.0, "loopback": 32.0}
"""Of the model, so that a round takes seconds."""

WORKERS = (1, 4, 16)
TURNS = 5
SIDES = {"raw": RAW, "lossless": LOSSLESS, light.CHOOSING: LOSSLESS}

STRIDE = 5
"""Between the orders of two turns, so that few turns have different sides first and last."""

LAYERS = 8
LEASE_SECONDS = 3600
"""Light workers send no heartbeats."""

QUICK_BYTES = 1 << 26
MOST_OF_BEST = 1.10


class Case:
    """Rounds over one line with one number of workers. `seconds` and `megabytes` are those of each side's turns: the
    time of a round, and what each worker uploads in it."""

    def __init__(self, federation: Federation, workers: int, megabytes: float) -> None:
        self._federation = federation
        self._workers = workers
        self._weights = Weights.of(int(megabytes * 1e6), LAYERS)
        self.seconds: dict[str, list[float]] = {side: [] for side in SIDES}
        self.megabytes: dict[str, list[float]] = {side: [] for side in SIDES}
        self.cpu: dict[str, list[float]] = {side: [] for side in SIDES}

    def turn(self, number: int) -> None:
        """Let each side have its two rounds, in another order in each turn: a round leaves work to the disk. Raises
        RuntimeError or TimeoutError if a round does not end."""
        federation = self._federation
        pids = [federation.coordinator_pid, *light.pids(federation, self._workers)]
        orders = list(permutations(SIDES.items()))
        for side, codec in orders[number * STRIDE % len(orders)]:
            method = {"name": "fedavg"}
            run = federation.begin(self._weights, 2, self._workers, method, name=side, codec=codec)
            federation.await_version(run, 1)
            before, spent = federation.moved(), processor_seconds(pids)
            federation.await_version(run, 2)
            self.seconds[side].append(federation.spans(run)[1])
            self.megabytes[side].append(federation.moved().since(before).received / self._workers / 1e6)
            self.cpu[side].append(processor_seconds(pids) - spent)

    def of_best(self) -> float:
        """Return the time of the workers' choice as a multiple of the better of the others."""
        medians = {side: median(turns) for side, turns in self.seconds.items()}
        chosen = medians.pop(light.CHOOSING)
        return chosen / min(medians.values())


def measure(
    results: Results, folder: Path, name: str, line: Line | None, megabytes: float, workers: int, turns: int
) -> None:
    """Add a row of one case, and its aim."""
    print(f"{name}, {workers} workers, {megabytes:g} MB ...", flush=True)
    with ExitStack() as stack:
        network = Network(stack.enter_context(Shaper(line))) if line else DIRECT
        federation = stack.enter_context(Federation(folder, network, lease_seconds=LEASE_SECONDS))
        light.start(federation, workers, processes=workers)
        case = Case(federation, workers, megabytes)
        for number in range(turns):
            case.turn(number)
    shown = {"s": case.seconds, "up_MB": case.megabytes, "cpu_s": case.cpu}
    results.add(
        line=str(line or name),
        workers=workers,
        MB=megabytes,
        **{f"{side}_{unit}": median(turns[side]) for unit, turns in shown.items() for side in SIDES},
        of_best=case.of_best(),
    )
    results.aim(f"{line or name}, {workers} workers: the choice, of the best", case.of_best(), MOST_OF_BEST)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.codec_choice",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES), help="megabits per second")
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS)
    parser.add_argument("--turns", type=int, default=TURNS)
    parser.add_argument("--megabytes", type=float, help="of the model, on all lines")
    parser.add_argument("--quick", action="store_true", help="one small case, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    end_by_interrupt()
    results = Results(
        "codec_choice", "seconds of a round, MB that each worker uploads, CPU s of all; medians of turns"
    )
    results.speeds |= machine_speeds(QUICK_BYTES if given.quick else 1 << 30)
    with tempfile.TemporaryDirectory(prefix="tessera-codec-choice-") as name:
        if given.quick:
            measure(results, Path(name) / "quick", "quick", Line(400, 0.005), 2.0, 2, 1)
        else:
            for line in given.lines:
                for workers in given.workers:
                    size = given.megabytes or MEGABYTES[line]
                    measure(results, Path(name) / f"{line}-{workers}", line, LINES[line], size, workers, given.turns)
    results.finish(given.out)


if __name__ == "__main__":
    main()
