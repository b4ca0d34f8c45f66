"""A guard against regressions: the same rounds of this checkout and of an earlier commit, by turns.

python -m benchmarks.regression main        about four minutes; also `make bench-quick BASE=main`

Exit with status 1 if the coordinator or the workers need over a quarter more CPU than the commit's for rounds of any
kind, or if these move more bytes, and with 2 if there is no such commit. Both sides use the libraries of this
environment.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from time import sleep

from benchmarks import payloads
from benchmarks.federation import Federation
from benchmarks.measuring import OUT, Results, median, processor_seconds
from benchmarks.rounds.cases import Case
from tessera.examples.processes import ROOT, end_by_interrupt
from tessera.shared.updates.model_folder import ModelFolder

MOST_PROCESSOR = 1.25
"""Of the earlier commit's CPU seconds."""

TURNS = 3
WORKERS = 2

SETTLE_SECONDS = 0.5
"""For what a coordinator and its workers still do after a round's commit."""

CASES: Mapping[str, tuple[Case, int]] = {
    "10 kB": (Case("0.01", WORKERS), 10),
    "10 MB, lossless": (Case("10", WORKERS), 3),
    "10 MB, int8": (Case("10", WORKERS, codec="delta+int8"), 3),
}
"""The rounds of each kind, and how many of them a turn has."""


@dataclass(frozen=True)
class Cost:
    """CPU seconds and bytes of a turn."""

    coordinator: float
    workers: float
    nbytes: int

    @property
    def processor(self) -> dict[str, float]:
        return {"coordinator": self.coordinator, "workers": self.workers}

    @classmethod
    def of(cls, turns: Sequence[Cost]) -> Cost:
        """Return the medians of some turns."""
        return cls(
            median(turn.coordinator for turn in turns),
            median(turn.workers for turn in turns),
            int(median(turn.nbytes for turn in turns)),
        )


def faults(name: str, base: Cost, now: Cost) -> list[str]:
    """Return a sentence for each way in which `now` costs more than it may."""
    found = []
    for part, before in base.processor.items():
        if (seconds := now.processor[part]) > MOST_PROCESSOR * before:
            times = f"{seconds / before:.2f} times the commit's, at most {MOST_PROCESSOR:g}"
            found.append(f"{name}: {seconds:.2f} CPU s of the {part}, {times}")
    if now.nbytes > base.nbytes:
        found.append(f"{name}: {now.nbytes} bytes, {now.nbytes - base.nbytes} more than the commit's")
    return found


class Side:
    """The federation of one checkout, whose rounds are measured in turns."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._federation = Federation(folder, root=root)
        self._folder = folder
        self._root = root
        self._models: dict[str, ModelFolder] = {}

    def start(self, stack: ExitStack) -> None:
        """Start the processes, make the models, and have one round of each kind."""
        stack.enter_context(self._federation)
        self._require_own_code()
        self._federation.start_workers(WORKERS, payloads.write_examples(self._folder))
        for case, _ in CASES.values():
            if case.size not in self._models:
                self._models[case.size] = payloads.make(self._folder, self._federation.processes, case.size)
            self.turn(case, 1)

    def _require_own_code(self) -> None:
        environment = self._federation.processes.environment({})
        command = [sys.executable, "-c", "import tessera.shared; print(tessera.shared.__file__)"]
        found = subprocess.run(command, cwd=self._root, env=environment, capture_output=True, text=True, check=True)
        if not Path(found.stdout).is_relative_to(self._root):
            raise RuntimeError(f"processes would run {found.stdout.strip()}, not the code in {self._root}")

    def turn(self, case: Case, rounds: int) -> Cost:
        """Return the cost of a run of that many rounds, from its creation to its last commit."""
        federation = self._federation
        coordinator, workers = [federation.coordinator_pid], federation.worker_pids
        model = self._models[case.size]
        before = processor_seconds(coordinator), processor_seconds(workers), federation.moved()
        run = federation.begin(model, rounds, WORKERS, {"name": "drift"}, codec=case.codec)
        federation.await_version(run, rounds, every_seconds=0.2)
        sleep(SETTLE_SECONDS)
        moved = federation.moved().since(before[2])
        return Cost(
            processor_seconds(coordinator) - before[0],
            processor_seconds(workers) - before[1],
            moved.received + moved.sent,
        )


def measure(base: Side, now: Side, turns: int) -> Iterator[tuple[str, list[Cost], list[Cost]]]:
    """Yield each case's costs on both sides, which take turns; every other time the later one begins."""
    for name, (case, rounds) in CASES.items():
        taken: dict[Side, list[Cost]] = {base: [], now: []}
        for turn in range(turns):
            for side in (base, now) if turn % 2 == 0 else (now, base):
                taken[side].append(side.turn(case, rounds))
        yield name, taken[base], taken[now]


def commit_of(revision: str) -> str | None:
    """Return the full name of a commit of this repository; None if there is no such commit."""
    command = ["git", "rev-parse", "--verify", "--quiet", "--end-of-options", f"{revision}^{{commit}}"]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    return found.stdout.strip() or None


def unpack(commit: str, folder: Path) -> Path:
    """Write a commit's files into a new folder."""
    command = ["git", "archive", commit]
    archive = subprocess.run(command, cwd=ROOT, capture_output=True, check=True).stdout
    folder.mkdir(parents=True)
    # `tarfile` has had its filters since Python 3.11.4.
    extract = ["tar", "--extract", "--directory", str(folder)]
    subprocess.run(extract, input=archive, check=True)
    return folder


def add(results: Results, name: str, base: Sequence[Cost], now: Sequence[Cost]) -> list[str]:
    """Add the rows of a case; `spread` is the largest turn of a side by its smallest. Return the faults."""
    before, after = Cost.of(base), Cost.of(now)
    for part, seconds in before.processor.items():
        turns = [[cost.processor[part] for cost in side] for side in (base, now)]
        results.add(
            rounds=name,
            of=part,
            base_cpu_s=seconds,
            cpu_s=after.processor[part],
            of_base=after.processor[part] / seconds,
            spread=max(max(side) / min(side) for side in turns),
            base_bytes=before.nbytes,
            bytes=after.nbytes,
        )
    return faults(name, before, after)


def main(arguments: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.regression",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("base", metavar="COMMIT", help="the earlier commit, as git names it")
    parser.add_argument("--turns", type=int, default=TURNS, help="how often each side has its turn")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args(arguments)
    commit = commit_of(given.base)
    if commit is None:
        parser.error(f"{given.base!r} is no commit of the repository in {ROOT}. Give a commit, a branch or a tag.")
    end_by_interrupt()
    results = Results("regression", f"a turn of this checkout, and of {commit[:12]} (base); medians of {given.turns}")
    found: list[str] = []
    with tempfile.TemporaryDirectory(prefix="tessera-regression-") as name, ExitStack() as stack:
        folder = Path(name)
        roots = {"base": unpack(commit, folder / "checkout"), "now": ROOT}
        base, now = (Side(folder / side, root) for side, root in roots.items())
        for side in (base, now):
            side.start(stack)
        for case, before, after in measure(base, now, given.turns):
            found += add(results, case, before, after)
    results.notes += [f"REGRESSION  {fault}" for fault in found]
    results.finish(given.out)
    return min(len(found), 1)


if __name__ == "__main__":
    sys.exit(main())
