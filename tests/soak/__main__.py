"""Hundreds of rounds, and what grows with them: `python -m tests.soak --rounds 500`.

A coordinator that serves, one that conducts, and workers that train nothing, as processes, on SQLite and a folder of
blobs, with all that is to be removed being removed soon. Memory, open files, rows, blobs and the size of the database
are looked at as it goes on; over the second half a line is laid through each, and what rises more than it may is
named, with exit code 1.

What grows by design is what a run remembers of its rounds: `GROWS` has it, by the round. Everything else is to stay.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path

import psutil
from sqlalchemy import func, select

from tessera.coordinator.db.engine import Database
from tessera.coordinator.db.tables import Table
from tessera.shared.api.cohort import Cohort
from tests.support.coordinator import until
from tests.support.federation import small_model, start_run, values
from tests.support.processes import CoordinatorProcess, Process

WORKERS = 2
MODEL = small_model(width=48)
"""Updates of some 100 kB, and blobs of which most are files."""

KIB, MIB = 1 << 10, 1 << 20

GROWS = {
    "rows of rounds": 1.0,
    "rows of versions": 1.0,
    # One for each worker.
    "rows of tasks": float(WORKERS),
    # Opening, closing and committing the round; offering, leasing and accepting each task; versions that are retired.
    "rows of audit": 4.0 + 4.0 * WORKERS,
    # Its manifest, which is kept when its blocks go.
    "rows of blobs": 1.0,
    "rows of run_blobs": 1.0,
    # Of all these rows, with their indexes.
    "database bytes": 16.0 * KIB,
}
"""By how much each may grow with a round."""

NOISE = {
    "memory": 4.0 * MIB,
    "open files": 4.0,
    "blob files": 60.0,
    # Each file has a row.
    "rows of blobs": 60.0,
    "blob bytes": 4.0 * MIB,
    "database bytes": 256.0 * KIB,
}
"""By how much each may end higher than it was halfway, besides: the removal comes in steps."""
ROWS_NOISE = 20.0
LATE_ROUNDS = 8
"""In the second half, how many rounds are looked at, at least: enough for a line through them."""

Sample = Mapping[str, float]


@dataclass(frozen=True)
class Trend:
    """How something went over the second half: from where to where on the line through it, and by the round."""

    name: str
    halfway: float
    end: float
    per_round: float
    allowed: float
    """What it may end at."""

    @property
    def grows(self) -> bool:
        return self.end > self.allowed


@contextmanager
def soaking(
    folder: Path, rounds: int, unused_seconds: float
) -> Iterator[tuple[CoordinatorProcess, dict[str, Process]]]:
    """The processes by their names, and a run that has begun."""
    brief = {"keep_versions": 2, "keep_updates_seconds": unused_seconds, "keep_unused_seconds": unused_seconds}
    removing = {**brief, "gc_interval_seconds": unused_seconds / 4}
    with ExitStack() as stack:
        serving = stack.enter_context(
            CoordinatorProcess(folder, "--no-conduct", module="tests.soak.coordinator", inline_bytes=KIB)
        )
        environment = serving.environment | {f"TESSERA_{key.upper()}": str(value) for key, value in removing.items()}
        conducting = Process(folder, "conduct", ["tests.soak.coordinator", "conduct"], environment)
        processes = {"serve": serving.process, "conduct": conducting}
        stack.callback(lambda: [process.kill() for process in processes.values()])
        for number in range(WORKERS):
            arguments = ["tests.soak.worker", serving.url, serving.site_token(f"site-{number}")]
            processes[f"worker-{number}"] = Process(folder, f"worker-{number}", arguments)
        admin = serving.admin()
        until(lambda: sum(worker.live for worker in admin.workers()) == WORKERS, 60)
        cohort = Cohort(size=WORKERS, quorum=WORKERS, max_attempts=100, max_task_attempts=100)
        # More than are watched: how many pass between two looks is the machine's.
        start_run(admin, MODEL, values(MODEL), rounds=1000 * rounds, cohort=cohort)
        yield serving, processes


def soak(folder: Path, rounds: int, every_seconds: float, unused_seconds: float) -> list[Sample]:
    """Measure a run at intervals, until it has `rounds` rounds, and enough of them in the second half."""
    samples: list[Sample] = []
    with soaking(folder, rounds, unused_seconds) as (serving, processes):
        database = Database(f"sqlite:///{folder / 'tessera.db'}")
        admin = serving.admin()
        (run,) = admin.runs()
        began_at = time.monotonic()
        while not samples or samples[-1]["round"] < rounds or _late_rounds(samples) < LATE_ROUNDS:
            run = admin.run(run.id)
            if run.state != "running":
                raise RuntimeError(f"the run was {run.state}: {run.reason}")
            for name, process in processes.items():
                if process.popen.poll() is not None:
                    raise RuntimeError(f"{name} has ended: {process.log.read_text()[-2000:]}")
            seconds = time.monotonic() - began_at
            # Before, nothing is old enough to be removed.
            if seconds > 2 * unused_seconds:
                samples.append(
                    {"seconds": seconds, "round": float(run.version.number), **looked(folder, database, processes)}
                )
            time.sleep(every_seconds)
        database.close()
    return samples


def looked(folder: Path, database: Database, processes: Mapping[str, Process]) -> Sample:
    found: dict[str, float] = {}
    for name, process in processes.items():
        there = psutil.Process(process.pid)
        found[f"memory of {name}"] = float(there.memory_info().rss)
        found[f"open files of {name}"] = float(there.num_fds())
    with database.snapshot() as session:
        for table in Table.metadata.sorted_tables:
            found[f"rows of {table.name}"] = float(session.scalar(select(func.count()).select_from(table)) or 0)
    sizes = _sizes(folder / "blobs")
    found["blob files"], found["blob bytes"] = float(len(sizes)), float(sum(sizes))
    found["staging files"] = float(len(_sizes(folder / "staging")))
    found["database bytes"] = float((folder / "tessera.db").stat().st_size)
    found["log bytes of the database"] = float((folder / "tessera.db-wal").stat().st_size)
    return found


def _sizes(folder: Path) -> list[int]:
    """Of all files in it, in bytes."""
    found = []
    for path in folder.rglob("*"):
        # One may go while it is looked at.
        with suppress(FileNotFoundError):
            if path.is_file():
                found.append(path.stat().st_size)
    return found


def _late_rounds(samples: Sequence[Sample]) -> int:
    return len({sample["round"] for sample in _late(samples)})


def _late(samples: Sequence[Sample]) -> list[Sample]:
    return [sample for sample in samples if sample["round"] >= samples[-1]["round"] / 2]


def trends(samples: Sequence[Sample]) -> list[Trend]:
    """Of everything that was looked at, over the second half of the rounds."""
    late = _late(samples)
    return [_trend(name, late) for name in sorted(samples[0]) if name not in ("seconds", "round")]


def _trend(name: str, late: Sequence[Sample]) -> Trend:
    rounds = [sample["round"] for sample in late]
    slope, start = statistics.linear_regression(rounds, [sample[name] for sample in late])
    halfway, end = (start + slope * at for at in (rounds[0], rounds[-1]))
    kind = name.partition(" of ")[0]
    noise = NOISE.get(name, NOISE.get(kind, ROWS_NOISE))
    if name == "log bytes of the database":
        noise = 4.0 * MIB
    allowed = halfway + GROWS.get(name, 0.0) * (rounds[-1] - rounds[0]) + noise
    return Trend(name, halfway, end, slope, allowed)


def table(found: Sequence[Trend]) -> str:
    lines = [f"{'':34}{'halfway':>14}{'at the end':>14}{'a round':>12}{'by design':>12}"]
    for trend in found:
        design = f"{GROWS[trend.name]:,.0f}" if trend.name in GROWS else ""
        wrong = "  GROWS" if trend.grows else ""
        lines.append(
            f"{trend.name:34}{trend.halfway:14,.0f}{trend.end:14,.0f}{trend.per_round:12,.2f}{design:>12}{wrong}"
        )
    return "\n".join(lines)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.soak", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--rounds", type=int, default=500)
    parser.add_argument("--every", type=float, default=1.0, help="seconds between two looks")
    parser.add_argument("--unused", type=float, default=20.0, help="seconds that what is unused is kept")
    parser.add_argument(
        "--out", type=Path, default=Path("bench-output/soak.json"), help="where all looks are written"
    )
    given = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory(prefix="tessera-soak-") as folder:
        samples = soak(Path(folder), given.rounds, given.every, given.unused)
    found = trends(samples)
    given.out.parent.mkdir(parents=True, exist_ok=True)
    given.out.write_text(json.dumps({"samples": samples, "trends": [asdict(trend) for trend in found]}))
    print(table(found))
    print(f"{samples[-1]['round']:.0f} rounds in {samples[-1]['seconds']:.0f} s, {len(samples)} looks: {given.out}")
    return 1 if any(trend.grows for trend in found) else 0


if __name__ == "__main__":
    sys.exit(main())
