"""Rounds over network lines: Tessera's exchanges, Flower, NVIDIA FLARE and the bare loop through one traffic shaper.

python -m benchmarks.lines                                     everything; two and a half hours
python -m benchmarks.lines --lines 100 --sizes 100 --only lossless int8
python -m benchmarks.lines --no-rivals --tls
python -m benchmarks.lines --quick                             tiny models, seconds: to see that it works
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from benchmarks.lines.shaper import Line, Shaper
from benchmarks.measuring import OUT, Results, machine_speeds, processor_seconds
from benchmarks.network import Certificates, Network
from benchmarks.rounds.cases import RIVALS, Case, federation_of, measure
from benchmarks.rounds.sides import Comparison, Summary
from examples.processes import end_by_interrupt
from tessera.shared.updates.codecs.pipeline import LOSSLESS

LINES = {"20": Line(20, 0.06), "100": Line(100, 0.03), "1000": Line(1000, 0.005)}
QUICK = Line(400, 0.005)
QUICK_BYTES = 1 << 26

SIZES = ("100", "440")
WORKERS = 2
"""Of 440 MB, four clients of Flower do not fit into 24 GiB."""

INT8 = "delta+int8"
BOTH = "int8 both ways"
KINDS = ("lossless", "int8", BOTH, "value blocks", "safl", "lora", "prompts")
EXCHANGES = {"lossless": "full", "int8": "full", BOTH: "full"}
"""The other kinds are named after their exchange."""

CASE_SECONDS = 30.0
"""A turn has more than one round after its first where they fit into this."""

AIMED_AT = "100"
OF_RIVAL = {"lossless": 0.75, "int8": 0.5, BOTH: 0.35}
OF_LINE = {"value blocks": 1.1, "safl": 1.1}


def cases(sizes: Sequence[str], kinds: Sequence[str], workers: int) -> Iterator[tuple[str, Case]]:
    """Yield each kind's case for each size, the lossless one first, and prompts once."""
    for size in sizes:
        for kind in kinds:
            if kind != "prompts":
                codec = INT8 if kind in ("int8", BOTH) else LOSSLESS
                down = "int8" if kind == BOTH else "lossless"
                yield kind, Case(size, workers, EXCHANGES.get(kind, kind), codec, down)
    if "prompts" in kinds:
        yield "prompts", Case("prompts", workers, "prompts")


def rounds_of(line: Line, size: str) -> int:
    """Return the number of rounds after the first in a turn."""
    seconds = 0.0 if size == "prompts" else 2 * line.seconds(1e6 * float(size))
    return 4 if seconds <= CASE_SECONDS / 4 else max(1, int(CASE_SECONDS / seconds))


class Report:
    """The rows of one line, with what each is a multiple of."""

    def __init__(self, results: Results, name: str, line: Line, workers: int) -> None:
        self._results = results
        self._name = name
        self._line = line
        self._workers = workers
        self._rival_seconds: dict[str, float] = {}
        """The faster rival's, by size."""

    def add(self, kind: str, case: Case, comparison: Comparison) -> None:
        found = comparison.found
        rivals = [found[name].seconds for name in RIVALS if name in found]
        if rivals:
            self._rival_seconds[case.size] = min(rivals)
        for name, summary in found.items():
            self._add_row(kind, case, name, summary, found["bare loop"].seconds)
        for name, reason in comparison.failures.items():
            self._results.add(line=str(self._line), MB=case.size, side=name, failed=reason)
        if self._name == AIMED_AT:
            self._aim(kind, case, found["tessera"])

    def _add_row(self, kind: str, case: Case, name: str, summary: Summary, bare_seconds: float) -> None:
        self._results.add(
            line=str(self._line),
            MB=case.size,
            side=name,
            exchange=kind if name in ("tessera", "bare loop") else None,
            first_s=summary.first_seconds,
            round_s=summary.seconds,
            of_line=self._of_line(summary),
            of_bare=summary.seconds / bare_seconds,
            of_rival=self._of_rival(case, summary),
            down_MB=(summary.sent or 0.0) / self._workers / 1e6,
            up_MB=(summary.received or 0.0) / self._workers / 1e6,
            server_cpu_s=summary.server_processor,
            clients_cpu_s=summary.client_processor,
        )

    def _of_line(self, summary: Summary) -> float:
        """Return the round's time as a multiple of what the line needs for its bytes, down and then up."""
        nbytes = ((summary.sent or 0.0) + (summary.received or 0.0)) / self._workers
        return summary.seconds / self._line.seconds(nbytes)

    def _of_rival(self, case: Case, summary: Summary) -> float | None:
        seconds = self._rival_seconds.get(case.size)
        return summary.seconds / seconds if seconds else None

    def _aim(self, kind: str, case: Case, ours: Summary) -> None:
        at = f"{case.size} MB at {self._line}, {kind}"
        of_rival = self._of_rival(case, ours)
        if kind in OF_RIVAL and of_rival:
            self._results.aim(f"{at}, of the faster rival", of_rival, OF_RIVAL[kind])
        if kind in OF_LINE:
            self._results.aim(f"{at}, of the line's time for its bytes", self._of_line(ours), OF_LINE[kind])


def run(
    results: Results,
    folder: Path,
    name: str,
    line: Line,
    wanted: Sequence[tuple[str, Case]],
    rivals: Sequence[str],
    certificates: Certificates | None,
) -> None:
    """Measure all cases on one kind of line."""
    folder.mkdir()
    report = Report(results, name, line, wanted[0][1].workers)
    with Shaper(line) as shaper:
        network = Network(shaper, certificates)
        for kind, case in wanted:
            print(f"{line}: {case} ...", flush=True)
            with federation_of(folder / "federation", case.workers, network) as federation:
                # They have one exchange, full and uncompressed.
                beside = rivals if kind == "lossless" else ()
                comparison = measure(case, federation, folder / "sides", 1, rounds_of(line, case.size), beside)
            for used in ("federation", "sides"):
                shutil.rmtree(folder / used)
            report.add(kind, case, comparison)
        moved, spent = shaper.moved(), processor_seconds([shaper.pid])
        gigabytes = (moved.received + moved.sent) / 1e9
        results.notes.append(f"{line}: the shaper took {spent / gigabytes:.2f} CPU s a GB, of {gigabytes:.2f} GB")


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.lines", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--lines", nargs="+", choices=LINES, default=list(LINES), help="megabits per second")
    parser.add_argument("--sizes", nargs="+", choices=[*SIZES, "1", "10"], default=list(SIZES), help="megabytes")
    parser.add_argument("--only", nargs="+", choices=KINDS, default=KINDS, help="these exchanges of Tessera alone")
    parser.add_argument("--workers", type=int, default=WORKERS)
    parser.add_argument("--no-rivals", action="store_true", help="without Flower and FLARE, which take longest")
    parser.add_argument("--tls", action="store_true", help="with TLS; FLARE has it always")
    parser.add_argument("--quick", action="store_true", help="a tiny model, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    end_by_interrupt()
    about = "seconds from a round's opening to its commit; bytes of one round on each worker's line, all included"
    name = "lines-tls" if given.tls else "lines"
    results = Results(name, about + (", over TLS" if given.tls else ""), out=given.out)
    results.speeds |= machine_speeds(QUICK_BYTES if given.quick else 1 << 30)
    with tempfile.TemporaryDirectory(prefix="tessera-lines-") as used:
        folder = Path(used)
        certificates = Certificates.made(folder / "certificates") if given.tls else None
        if given.quick:
            wanted = [("lossless", Case("0.01", 2)), ("lora", Case("0.01", 2, "lora"))]
            run(results, folder / "quick", "quick", QUICK, wanted, (), certificates)
        else:
            rivals = () if given.no_rivals else tuple(RIVALS)
            for chosen in given.lines:
                wanted = list(cases(given.sizes, given.only, given.workers))
                run(results, folder / chosen, chosen, LINES[chosen], wanted, rivals, certificates)
    results.finish(given.out)


if __name__ == "__main__":
    main()
