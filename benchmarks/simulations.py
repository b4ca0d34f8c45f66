"""Simulated clients per second: `python -m benchmarks.simulations [--beside NAME COMMAND]`.

Every site takes part in every round of FedAvg with AdamW on one batch. Of each side, processes at work, clients per
second, seconds of processor per client and the memory of all processes (Pss) are measured from the second round on;
`bare` is the same training alone, in one process, whose seconds of processor over a side's are its share of training.
Sides run one after the other on the same machine: trust the ratios.

Another system's COMMAND gets a JSON file as its last argument: `config` of a transformers' image classifier,
`weights` (safetensors), `sites`, `steps`, `batch`, `rounds` and `processes`. At the end of each round it appends a
line of JSON to the file `times`: `at`, in seconds since 1970, and the number of `clients` that returned an update.
"""

from __future__ import annotations

import argparse
import json
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from benchmarks.measuring import (
    MIB,
    OUT,
    PeakMemory,
    Results,
    await_true,
    failure,
    processor_seconds,
    proportional_bytes,
)
from tessera.shared.client.round_outcomes import RoundOutcome
from tessera.shared.methods.base import Plan, RunInfo
from tessera.shared.methods.fedavg import METHOD
from tessera.shared.run_settings import Training
from tessera.simulation import Conditions, VirtualSite, Weights, simulate
from tessera.worker.data.dataset import Dataset
from tessera.worker.model.build import instantiate
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer

ROUND_SECONDS = 600.0
BATCH = 8
VIT = {"model_type": "vit", "num_channels": 1, "num_labels": 3}
TINY = {
    **VIT, "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2,
    "intermediate_size": 40,
}  # fmt: skip
LARGE = {
    **VIT, "image_size": 32, "patch_size": 8, "hidden_size": 320, "num_hidden_layers": 5, "num_attention_heads": 4,
    "intermediate_size": 1280,
}  # fmt: skip


@dataclass(frozen=True)
class Work:
    """What every side does."""

    name: str
    config: Mapping[str, Any]
    sites: int
    steps: int
    rounds: int

    @property
    def training(self) -> dict[str, Any]:
        return {"optimizer": "adamw", "learning_rate": 1e-4, "batch_size": BATCH, "steps": self.steps}


CASES = (
    Work("tiny", TINY, sites=100, steps=1, rounds=6),
    Work("large", LARGE, sites=8, steps=10, rounds=3),
    Work("thousand", TINY, sites=1000, steps=1, rounds=3),
)
QUICK = (Work("tiny", TINY, sites=4, steps=1, rounds=2),)


def images(config: Mapping[str, Any], seed: int) -> Dataset:
    dice, side = torch.Generator().manual_seed(seed), config["image_size"]
    pixels = torch.randn(BATCH, config["num_channels"], side, side, generator=dice)
    return Dataset(
        {"pixel_values": pixels, "labels": torch.randint(0, config["num_labels"], (BATCH,), generator=dice)}
    )


# ---------------------------------------------------------------- the sides, each a process


def simulated(work: Work, times: Path, processes: int) -> None:
    """Our simulation."""
    weights = Weights.of(instantiate(work.config, "image-classification"), work.config, "image-classification")
    sites = {f"site-{n:04}": VirtualSite(lambda n=n: images(work.config, n)) for n in range(work.sites)}  # type: ignore[misc]
    spec = {"method": {"name": "fedavg"}, "rounds": work.rounds, "training": work.training}

    def watch(outcome: RoundOutcome) -> None:
        _note(times, outcome.accepted)

    conditions = Conditions(threads=1, processes=processes)
    simulate({**spec, "cohort": {"quorum": work.sites}}, weights, sites, conditions=conditions, watch=watch)


def bare(work: Work, times: Path, processes: int) -> None:
    """The same training, and nothing around it."""
    torch.set_num_threads(1)
    built = instantiate(work.config, "image-classification")
    document = Weights.of(built, work.config, "image-classification").model
    training = Training.model_validate(work.training)
    half = METHOD.worker(METHOD.settings(), RunInfo(document.blocks, 1))
    data = [images(work.config, n) for n in range(min(work.sites, 100))]
    for _ in range(work.rounds):
        for n in range(work.sites):
            context = LocalTaskContext(built, document.head, Plan(), document.blocks)
            trainer = Trainer(half, context, training, TrainingSetup(torch.device("cpu")), lambda: None)
            trainer.train(half.phases(context, Plan().train), data[n % len(data)], n)
        _note(times, work.sites)


SIDES: dict[str, Callable[[Work, Path, int], None]] = {"tessera": simulated, "bare": bare}


def _note(times: Path, clients: int) -> None:
    with times.open("a", encoding="ascii") as file:
        file.write(json.dumps({"at": time.time(), "clients": clients}) + "\n")


# ---------------------------------------------------------------- measuring


@dataclass(frozen=True)
class Cost:
    """Of one client."""

    seconds: float
    processor: float
    peak_bytes: int


def measured(command: Sequence[str], times: Path, work: Work, log: Path) -> Cost:
    """Run a side, and measure it from the end of its first round to the end of its last. Raises RuntimeError."""

    def ended() -> list[float]:
        # A side that has ended writes no more rounds.
        if process.poll() is not None and len(_times(times, work.sites)) < work.rounds:
            raise RuntimeError(f"{command} failed: {log.read_text(encoding='utf-8')[-2000:]}")
        return _times(times, work.sites)

    with log.open("w") as out:
        process = subprocess.Popen(command, stdout=out, stderr=out, start_new_session=True)
    try:
        with PeakMemory({"all": [process.pid]}, every_seconds=0.2, measure=proportional_bytes) as memory:
            await_true(lambda: len(ended()) >= 1, ROUND_SECONDS, "the first round ends")
            before = processor_seconds([process.pid])
            await_true(lambda: len(ended()) >= work.rounds, ROUND_SECONDS * work.rounds, "all rounds end")
            after = processor_seconds([process.pid])
        first, *_, last = ended()
    finally:
        process.terminate()
        process.wait()
    clients = work.sites * (work.rounds - 1)
    return Cost((last - first) / clients, (after - before) / clients, memory.peaks["all"])


def _times(file: Path, sites: int) -> list[float]:
    """Return when rounds ended. Raises RuntimeError for a round in which clients failed: it would seem fast."""
    rounds = [json.loads(line) for line in file.read_text(encoding="ascii").splitlines()] if file.exists() else []
    for number, ended in enumerate(rounds, start=1):
        if ended["clients"] < sites:
            raise RuntimeError(f"{ended['clients']} of {sites} clients returned an update in round {number}")
    return [ended["at"] for ended in rounds]


def side(name: str, work: Work, folder: Path, processes: int, command: str = "") -> Cost:
    """Measure a side; `command` is that of another system."""
    times, given = folder / "times", folder / "work.json"
    folder.mkdir()
    settings = {**vars(work), "times": str(times), "processes": processes, "batch": BATCH, "side": name}
    program = [sys.executable, "-m", "benchmarks.simulations", "--side"]
    if command:
        weights = folder / "weights.safetensors"
        save_file(instantiate(work.config, "image-classification").state_dict(), weights)
        settings["weights"] = str(weights)
        program = shlex.split(command)
    given.write_text(json.dumps(settings), encoding="utf-8")
    return measured([*program, str(given)], times, work, folder / "log")


def compare(work: Work, results: Results, processes: Sequence[int], beside: Mapping[str, str]) -> None:
    arms = [("bare", 1), *(("tessera", count) for count in processes), *((other, max(processes)) for other in beside)]
    found: dict[tuple[str, int], Cost] = {}
    with tempfile.TemporaryDirectory() as name:
        for arm, count in arms:
            try:
                cost = found[arm, count] = side(arm, work, Path(name) / f"{arm}-{count}", count, beside.get(arm, ""))
            except (TimeoutError, RuntimeError, OSError, subprocess.SubprocessError) as fault:
                if arm not in beside:
                    raise
                results.add(case=work.name, side=arm, processes=count, failed=failure(fault))
                continue
            results.add(
                case=work.name,
                side=arm,
                processes=count,
                clients_per_s=1 / cost.seconds,
                processor_ms=1e3 * cost.processor,
                training_share=found["bare", 1].processor / cost.processor if cost.processor else None,
                pss_MB=cost.peak_bytes / MIB,
            )
    if work.steps > 1:
        share = found["bare", 1].processor / found["tessera", min(processes)].processor
        results.aim(f"{work.name}: share of our processor time beside training", 1 - share, 0.2)


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulations",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--processes", type=int, nargs="+", default=[1, 2])
    parser.add_argument("--cases", nargs="+", choices=[work.name for work in CASES])
    parser.add_argument(
        "--beside", nargs=2, action="append", default=[], metavar=("NAME", "COMMAND"), help="another system"
    )
    parser.add_argument("--quick", action="store_true", help="on tiny sizes, to see that it works")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--side", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.side:
        settings = json.loads(given.side.read_text(encoding="utf-8"))
        work = Work(**{name: settings[name] for name in ("name", "config", "sites", "steps", "rounds")})
        SIDES[settings["side"]](work, Path(settings["times"]), settings["processes"])
        return
    results = Results("simulations", "clients of a simulation per second", out=given.out)
    cases = QUICK if given.quick else [work for work in CASES if not given.cases or work.name in given.cases]
    for work in cases:
        compare(work, results, given.processes, dict(given.beside))
    results.finish(given.out)


if __name__ == "__main__":
    main()
