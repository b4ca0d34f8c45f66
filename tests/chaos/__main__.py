"""Random faults at real processes: `python -m tests.chaos [--faults 200] [--seed 0]`.

Runs go on, one after the other, for as long as faults come; then all must be well again. Nothing that was accepted
may be lost, no run may stand still, and each must end with the bits that it ends with on one undisturbed coordinator.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from unittest.mock import patch

from tessera.coordinator.maintenance import backup
from tessera.coordinator.services import assemble
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tests.chaos.federation import Federation, calm, stormy
from tests.chaos.weather import Weather
from tests.support import histories, zygote

STUCK_SECONDS = 120.0
"""Without a fault, what a round may take at most on a busy machine."""


@dataclass(frozen=True)
class Outcome:
    runs: int
    rounds: int
    faults: dict[str, int]
    revived: dict[str, int]
    wrong: tuple[str, ...]


# While a process is forked, what a crash of PostgreSQL leaves behind would become a child of this one.
@patch.dict(zygote.NEEDS, clear=True)
def storm(
    folder: Path, seed: int, faults: int, rounds: int, pause_seconds: float, told: Callable[[str], object] = print
) -> Outcome:
    """Runs under faults, and what was wrong with them."""
    wrong: list[str] = []
    digests: list[str] = []
    with stormy(folder / "stormy", seed) as federation:
        admin = federation.admin()
        weather = Weather(federation, seed, faults, pause_seconds, told)
        weather.start()
        while not (weather.over and digests):
            run = federation.begin(admin, len(digests), rounds)
            wrong += _ended(admin, run, weather, told)
            digests.append(admin.run(run.id).version.digest)
            told(f"run {len(digests)} has ended: {digests[-1]}")
        weather.join()
        wrong += [f"the weather itself failed: {fault!r}" for fault in weather.faults]
        admin.close()
        wrong += _audited(federation)
    told(f"the same {len(digests)} runs without faults ...")
    with calm(folder / "calm", seed) as quiet:
        admin = quiet.admin()
        for number, digest in enumerate(digests):
            run = quiet.begin(admin, number, rounds)
            wrong += _ended(admin, run, None, told)
            undisturbed = admin.run(run.id).version.digest
            if undisturbed != digest:
                wrong.append(f"run {number + 1} ended with {digest}; without faults it ends with {undisturbed}")
        admin.close()
    return Outcome(
        len(digests), len(digests) * rounds, dict(weather.happened), dict(federation.revived), tuple(wrong)
    )


def _ended(admin: Client, run: Run, weather: Weather | None, told: Callable[[str], object]) -> list[str]:
    """Waits for the run's end. One that pauses is resumed, and one that stands still is cancelled; both are wrong."""
    wrong = []
    moved_at, version = time.monotonic(), 0
    while True:
        found = admin.run(run.id)
        if found.version.number > version or (weather and not weather.over):
            moved_at, version = time.monotonic(), found.version.number
        if found.state == "completed":
            return wrong
        if found.state == "paused":
            wrong.append(f"run {run.id} paused at version {version}: {found.reason}")
            told(wrong[-1])
            admin.set_run_state(run.id, "running")
        if time.monotonic() - moved_at > STUCK_SECONDS:
            admin.set_run_state(run.id, "cancelled")
            return [*wrong, f"run {run.id} stood still at version {version}"]
        time.sleep(0.2)


def _audited(federation: Federation) -> list[str]:
    services = assemble(federation.services_settings())
    lines = histories.read(sorted(federation.history.glob("*.jsonl")))
    findings = histories.check(lines, services.database, services.blobs)
    faults = backup.verify(services.database, services.blobs, services.states)
    found = [*(f"{finding.kind}: {finding.detail}" for finding in findings), *faults]
    services.database.close()
    return found


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.chaos", description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument("--faults", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=20, help="of each run")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--pause", type=float, default=0.5, help="seconds between two faults, in the mean")
    parser.add_argument(
        "--folder", type=Path, help="where all is kept; a new one that is removed at the end if left out"
    )
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="tessera-chaos-") as made:
        folder = given.folder or Path(made)
        outcome = storm(folder, given.seed, given.faults, given.rounds, given.pause)
    happened = sum(outcome.faults.values())
    print(f"\nseed {given.seed}: {happened} faults over {outcome.runs} runs, {outcome.rounds} rounds")
    for kind, count in sorted(outcome.faults.items()):
        print(f"{count:5}  {kind}")
    for group, count in sorted(outcome.revived.items()):
        print(f"{count:5}  times a {group} ended of itself and was started again")
    for fault in outcome.wrong:
        print(f"WRONG  {fault}")
    if not outcome.wrong:
        print("nothing accepted was lost, no run stood still, and all ended with the same bits as without faults")
    return 1 if outcome.wrong else 0


if __name__ == "__main__":
    sys.exit(main())
