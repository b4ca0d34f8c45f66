"""What a wakeup of the conductor costs with few and with many live runs.

python -m benchmarks.conducting      half a minute

Each live run has an open round with leased tasks; a wakeup, as an update's, names one of them.
"""

from __future__ import annotations

import argparse
import random
import tempfile
import time
from pathlib import Path

from alembic import command

from benchmarks.measuring import OUT, Results
from benchmarks.page import fill, fill_run
from tessera.coordinator.db.engine import alembic_config
from tessera.coordinator.services import assemble
from tessera.coordinator.settings import CoordinatorSettings

FEW, MANY = 5, 50
WAKEUPS = 200
LIMIT_RATIO = 1.2


def measure(results: Results, folder: Path, count: int) -> float:
    settings = CoordinatorSettings(database_url=f"sqlite:///{folder}/tessera.db", blob_url=str(folder / "blobs"),
                        staging_dir=folder / "staging", liveness_seconds=3600)  # fmt: skip
    services = assemble(settings, duty="conduct")
    with services.database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    fill(services, 20, 200, 50, 0)
    workers = [f"w{site:03}{gpu}" for site in range(50) for gpu in range(4)]
    runs = [f"{number:030x}d0" for number in range(count)]
    for run in runs:
        fill_run(services, run, 20, 40, workers, random.Random(0), services.database.now())  # noqa: S311 (no secret)
    services.conductor.step()
    began = time.process_time()
    for number in range(WAKEUPS):
        services.conductor.step([runs[number % count]])
    wakeup_ms = 1e3 * (time.process_time() - began) / WAKEUPS
    began = time.process_time()
    services.conductor.step()
    results.add(live_runs=count, wakeup_ms=wakeup_ms, tick_ms=1e3 * (time.process_time() - began))
    services.database.close()
    return wakeup_ms


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.conducting",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", type=Path, default=OUT, help="where results go")
    given = parser.parse_args(arguments)
    results = Results("conducting", "processor time of a wakeup for one run and of a tick; 200 workers of 50 sites")
    costs = []
    for count in (FEW, MANY):
        with tempfile.TemporaryDirectory() as name:
            costs.append(measure(results, Path(name), count))
    results.aim(f"a wakeup with {MANY} live runs, times that with {FEW}", costs[1] / costs[0], LIMIT_RATIO)
    results.finish(given.out)


if __name__ == "__main__":
    main()
