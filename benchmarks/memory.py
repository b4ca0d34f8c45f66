"""The coordinator's memory in a round, by model, workers and codec.

python -m benchmarks.memory                                      2 to 64 workers of 100 and 440 MB; most of an hour
python -m benchmarks.memory --sizes 100 --workers 64 --codecs raw
python -m benchmarks.memory --quick                              seconds: to see that it works

Workers are those of `benchmarks.light`, which all download and upload at once. While a round lasts, 64 updates of
440 MB take 28 GB of disk.
"""

from __future__ import annotations

import argparse
import tempfile
from pathlib import Path

from benchmarks import light
from benchmarks.federation import Federation
from benchmarks.measuring import (
    MIB,
    OUT,
    PeakMemory,
    Results,
    forget_peak,
    peak_bytes,
    processor_seconds,
    proportional_bytes,
)
from benchmarks.payloads import Weights
from tessera.examples.processes import end_by_interrupt
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW

SIZES = (100.0, 440.0)
WORKERS = (2, 8, 64)
CODECS = {"raw": RAW, "lossless": LOSSLESS, "int8": "delta+int8"}

LAYERS = 16
LEASE_SECONDS = 3600
"""Light workers send no heartbeats."""

MOST_MIB = 300


def measure(results: Results, folder: Path, megabytes: float, workers: int, codec: str) -> float:
    """Add a row for one round on a new coordinator. Return the coordinator's peak in MiB."""
    with Federation(folder, lease_seconds=LEASE_SECONDS) as federation:
        light.start(federation, workers)
        pid = federation.coordinator_pid
        idle = peak_bytes(pid)
        forget_peak(pid)
        before = processor_seconds([pid])
        weights = Weights.of(int(megabytes * 1e6), LAYERS)
        with PeakMemory({"coordinator": [pid]}, 0.25, proportional_bytes) as memory:
            run = federation.begin(weights, 1, workers, {"name": "fedavg"}, codec=CODECS[codec])
            federation.await_version(run, 1, every_seconds=0.2)
        peak = memory.peaks["coordinator"] / MIB
        results.add(
            MB=megabytes,
            workers=workers,
            codec=codec,
            round_s=federation.spans(run)[0],
            server_cpu_s=processor_seconds([pid]) - before,
            idle_MiB=idle / MIB,
            server_MiB=peak,
            at_most_MiB=peak_bytes(pid) / MIB,
            received_MB=federation.moved().received / 1e6,
        )
        return peak


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.memory", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", type=float, default=SIZES, help="megabytes of float32")
    parser.add_argument("--workers", nargs="+", type=int, default=WORKERS, help=f"at most {light.MAX_WORKERS}")
    parser.add_argument("--codecs", nargs="+", choices=CODECS, default=["raw", "lossless"])
    parser.add_argument("--quick", action="store_true", help="small and few, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    end_by_interrupt()
    about = "the coordinator's two processes, shared pages counted once (Pss); at most: the sum of both peaks"
    results = Results("memory", about)
    sizes, workers = ([1.0], [3]) if given.quick else (given.sizes, given.workers)
    for megabytes in sizes:
        for count in workers:
            for codec in given.codecs:
                with tempfile.TemporaryDirectory(prefix="tessera-memory-") as name:
                    peak = measure(results, Path(name) / "federation", megabytes, count, codec)
                if not given.quick:
                    what = f"the coordinator's peak with {count} workers of {megabytes:g} MB, {codec}"
                    results.aim(what, peak, MOST_MIB, " MiB")
    results.finish(given.out)


if __name__ == "__main__":
    main()
