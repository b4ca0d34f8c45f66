"""How a round's cost grows: with the model, with the workers, and with the rounds that went before (not at all).

python -m benchmarks.growth            some minutes
python -m benchmarks.growth --quick    seconds: to see that it works

Workers are those of `benchmarks.light`: the whole protocol, without torch.
"""

from __future__ import annotations

import argparse
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks import light
from benchmarks.federation import Federation
from benchmarks.measuring import MIB, OUT, Results, forget_peak, median, peak_bytes, processor_seconds
from benchmarks.payloads import Weights
from examples.processes import end_by_interrupt

MEGABYTES = (0.01, 1.0, 10.0, 100.0)
WORKERS = (2, 4, 16, 64)
PAST = 300
COMPARED = 50

FLAT = 1.2
"""How much more a late round may cost than an early one, which is what medians of fifty rounds differ by on a machine
that does other things too."""


@dataclass(frozen=True)
class Cost:
    seconds: list[float]
    server_processor: float
    """CPU seconds per round."""
    server_peak: int


def measure(folder: Path, megabytes: float, workers: int, rounds: int) -> Cost:
    """Rounds after the first of a run, on a fresh coordinator."""
    with Federation(folder) as federation:
        light.start(federation, workers)
        pid = federation.coordinator_pid
        run = federation.begin(Weights.of(int(megabytes * 1e6)), rounds + 1, workers, {"name": "fedavg"})
        federation.await_version(run, 1)
        forget_peak(pid)
        before = processor_seconds([pid])
        federation.await_version(run, rounds + 1, every_seconds=0.5)
        spent = (processor_seconds([pid]) - before) / rounds
        return Cost(federation.spans(run)[1:], spent, peak_bytes(pid))


def add(results: Results, by: str, megabytes: float, workers: int, cost: Cost) -> None:
    results.add(
        by=by,
        MB=megabytes,
        workers=workers,
        rounds=len(cost.seconds),
        round_s=median(cost.seconds),
        server_cpu_s=cost.server_processor,
        cpu_ms_per_worker=1e3 * cost.server_processor / workers,
        cpu_s_per_GB=cost.server_processor / (workers * megabytes / 1e3),
        server_MiB=cost.server_peak / MIB,
    )


def past_rounds(results: Results, folder: Path, rounds: int, compared: int) -> None:
    cost = measure(folder, 0.01, 2, rounds)
    add(results, "past rounds", 0.01, 2, cost)
    early, late = median(cost.seconds[:compared]), median(cost.seconds[-compared:])
    results.notes.append(f"the first {compared} of {rounds} rounds: {early:.3f} s; the last: {late:.3f} s")
    results.aim(f"the last {compared} rounds, of the first", late / early, FLAT)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.growth", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", choices=["size", "workers", "past"], help="this question alone")
    parser.add_argument("--quick", action="store_true", help="small and few, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    end_by_interrupt()
    results = Results("growth", "medians of rounds after a run's first")
    with tempfile.TemporaryDirectory(prefix="tessera-growth-") as name:
        folder = Path(name)
        if given.quick:
            past_rounds(results, folder / "past", rounds=6, compared=3)
            results.targets.clear()
        if not given.quick and given.only in (None, "past"):
            past_rounds(results, folder / "past", PAST, COMPARED)
        if not given.quick and given.only in (None, "size"):
            for megabytes in MEGABYTES:
                cost = measure(folder / f"size-{megabytes}", megabytes, 2, 3 if megabytes >= 100 else 10)
                add(results, "model", megabytes, 2, cost)
        if not given.quick and given.only in (None, "workers"):
            for workers in WORKERS:
                add(results, "workers", 1.0, workers, measure(folder / f"workers-{workers}", 1.0, workers, 5))
    results.finish(given.out)


if __name__ == "__main__":
    main()
