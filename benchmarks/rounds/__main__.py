"""What a round costs without training, beside the least that moving its bytes over HTTP costs.

python -m benchmarks.rounds                     sizes from 10 kB to 440 MB, 2 to 8 workers; some minutes
python -m benchmarks.rounds --sizes 100 --workers 4 --turns 3
python -m benchmarks.rounds --beside NAME COMMAND   another system too: see benchmarks/rounds/beside.py
python -m benchmarks.rounds --tls               with TLS between each server and its clients
python -m benchmarks.rounds --quick             small models, seconds: to see that it works
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from pathlib import Path

from benchmarks.federation import Federation
from benchmarks.measuring import MIB, OUT, Results, machine_speeds
from benchmarks.network import Certificates
from benchmarks.rounds.cases import Case, federation_of, measure
from benchmarks.rounds.sides import Comparison, Summary
from tessera.examples.processes import end_by_interrupt
from tessera.shared.updates.codecs.pipeline import RAW

QUICK_BYTES = 1 << 26
"""Of memory, to see that the machine's speeds are measured."""

SIZES = ("0.01", "10", "100", "440")
WORKERS = (2, 4, 8)

KINDS = ("full", "raw", "value blocks", "prompts")


def cases(sizes: Sequence[str], workers: Sequence[int]) -> Iterator[Case]:
    for size in sizes:
        for count in workers:
            yield Case(size, count)
    largest = sizes[-1] if sizes[-1] != "440" else "100"
    some = 4 if 4 in workers else workers[0]
    yield Case(largest, some, codec=RAW)
    yield Case(largest, some, "value blocks")
    yield Case("prompts", some, "prompts")


def rounds_of(case: Case) -> int:
    return {"0.01": 20, "10": 8, "440": 2}.get(case.size, 4)


def add(results: Results, case: Case, comparison: Comparison) -> None:
    found = comparison.found
    bare = found["bare loop"].seconds
    for name, summary in found.items():
        results.add(
            side=name,
            MB=case.size,
            workers=case.workers,
            exchange=case.exchange,
            codec=case.codec if name == "tessera" else None,
            first_s=summary.first_seconds,
            round_s=summary.seconds,
            fastest_s=summary.fastest,
            slowest_s=summary.slowest,
            of_bare=summary.seconds / bare,
            rounds_per_s=1 / summary.seconds,
            server_cpu_s=summary.server_processor,
            clients_cpu_s=summary.client_processor,
            server_MiB=summary.server_peak / MIB,
            server_pss_MiB=None if summary.server_proportional is None else summary.server_proportional / MIB,
            client_MiB=summary.client_peak / MIB,
            clients_faulted_MB=None if summary.client_faulted is None else summary.client_faulted / 1e6,
            up_MB=None if summary.received is None else summary.received / 1e6,
            down_MB=None if summary.sent is None else summary.sent / 1e6,
        )
    for name, reason in comparison.failures.items():
        results.add(side=name, MB=case.size, workers=case.workers, exchange=case.exchange, failed=reason)


def aim(results: Results, case: Case, found: Mapping[str, Summary]) -> None:
    ours = found["tessera"]
    if (case.size, case.workers, case.exchange) == ("0.01", 4, "full"):
        results.aim("a round of 10 kB and 4 workers, opening to commit", ours.seconds, 0.15, " s")
    if (case.size, case.workers, case.exchange) == ("100", 4, "full"):
        at = f"4 x 100 MB, {case.codec}"
        results.aim(f"{at}, of the bare loop", ours.seconds / found["bare loop"].seconds, 1.5)
        results.aim(f"{at}, the sum of the coordinator's peaks", ours.server_peak / MIB, 300, " MiB")
        if ours.server_proportional:
            pss = ours.server_proportional / MIB
            results.aim(f"{at}, the coordinator's peak, shared pages once", pss, 300, " MiB")
    if case.size == "prompts":
        if case.workers == 4:
            results.aim("a round of prompts and 4 workers, opening to commit", ours.seconds, 0.1, " s")
        moved = (ours.received or 0) + (ours.sent or 0)
        results.aim("a round of prompts, both ways, each worker", moved / case.workers / 1e3, 200, " kB")


def quickly(federation: Federation, folder: Path, results: Results) -> None:
    """Each exchange once on tiny models, all on one federation."""
    for index, case in enumerate((Case("0.01", 2), Case("few prompts", 2, "prompts"))):
        add(results, case, measure(case, federation, folder / str(index), turns=1, rounds=2))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.rounds", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "1"], default=list(SIZES), help="megabytes")
    parser.add_argument("--workers", nargs="+", type=int, default=list(WORKERS))
    parser.add_argument("--turns", type=int, default=2, help="how often each side has its turn")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="these exchanges alone")
    parser.add_argument(
        "--beside", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="another system's side"
    )
    parser.add_argument("--tls", action="store_true", help="with TLS")
    parser.add_argument("--quick", action="store_true", help="small models, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    end_by_interrupt()
    about = "seconds from a round's opening to its commit, medians; bytes and CPU of one round"
    results = Results(
        "rounds-tls" if given.tls else "rounds", about + (", over TLS" if given.tls else ""), out=given.out
    )
    with tempfile.TemporaryDirectory(prefix="tessera-rounds-") as name, ExitStack() as stack:
        folder = Path(name)
        certificates = Certificates.made(folder / "certificates") if given.tls else None
        results.speeds |= machine_speeds(QUICK_BYTES if given.quick else 1 << 30)
        if given.quick:
            quickly(stack.enter_context(federation_of(folder / "all", 2, certificates)), folder, results)
            wanted = []
        else:
            wanted = [case for case in cases(given.sizes, given.workers) if case.kind in given.only]
        for index, case in enumerate(wanted):
            print(f"{case} ...", flush=True)
            with federation_of(folder / str(index), case.workers, certificates) as federation:
                # They have one exchange, full and uncompressed, which is compared with both of ours.
                beside = dict(given.beside) if case.exchange == "full" else {}
                comparison = measure(
                    case, federation, folder / f"{index}-sides", given.turns, rounds_of(case), beside
                )
            for used in (str(index), f"{index}-sides"):
                shutil.rmtree(folder / used)
            add(results, case, comparison)
            aim(results, case, comparison.found)
    results.finish(given.out)


if __name__ == "__main__":
    main()
