"""What a round costs beside local training, simulated and over HTTP: `python -m benchmarks.simulation_overhead`.

The demo's four sites and model with next to no training, one batch each a round, so that what is left is planning,
moving, encoding, checking and merging. Processor time is that of every process that takes part; it depends less than
the clock on what else the machine does.
"""

from __future__ import annotations

import argparse
import tempfile
import time
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import psutil
import torch

from examples.federation import SITES, Federation, holdings
from examples.processes import Processes, end_by_interrupt
from tessera.shared.api.runs import RunSpec
from tessera.shared.cli.upload import upload_model
from tessera.shared.client.round_outcomes import Outcome
from tessera.shared.methods.base import Plan, RunInfo
from tessera.shared.methods.fedavg import METHOD
from tessera.shared.run_settings import Training
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.dataset import Dataset
from tessera.worker.inventory import load_source
from tessera.worker.model.build import load
from tessera.worker.simulation import Conditions, simulate
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.setup import TrainingSetup
from tessera.worker.training.trainer import Trainer

SPEC = {
    "name": "overhead",
    "dataset": "digits",
    "method": {"name": "fedavg"},
    "training": {"batch_size": None, "learning_rate": 1e-4},
    "cohort": {"size": len(SITES), "quorum": len(SITES)},
}
WARM_UP_ROUNDS = 2


@dataclass(frozen=True)
class Cost:
    """Of one round, in seconds."""

    processor: float
    wall: float


def over_http(federation: Federation, model: ModelFolder, rounds: int) -> Cost:
    """Rounds between real processes; the first ones, in which models are built, do not count."""
    with federation.admin() as client:
        uploaded = upload_model(client, model)
        wanted = {**SPEC, "rounds": rounds + WARM_UP_ROUNDS, "model": uploaded.model, "version": uploaded.version}
        run = client.create_run(RunSpec.model_validate(wanted), key=uuid.uuid4().hex)

        def reach(version: int) -> tuple[float, float]:
            while client.run(run.id).version.number < version:
                federation.processes.check()
                time.sleep(0.1)
            return _processor_of_children(), time.monotonic()

        return _cost(reach, rounds)


def in_one_process(sites: dict[str, Dataset], model: ModelFolder, rounds: int) -> Cost:
    times: list[tuple[float, float]] = []

    def watch(outcome: Outcome) -> None:
        times.append((time.process_time(), time.monotonic()))

    cohort = {"size": len(sites), "quorum": len(sites)}
    spec = {**SPEC, "cohort": cohort, "rounds": rounds + WARM_UP_ROUNDS}
    simulate(spec, model, sites, conditions=Conditions(threads=1), watch=watch)
    return _cost(lambda version: times[version - 1], rounds)


def training_alone(sites: dict[str, Dataset], model: ModelFolder, rounds: int) -> Cost:
    """The same steps of the same loop, and nothing around them."""
    built, document = load(model), model.model
    training = Training.model_validate(SPEC["training"])
    half = METHOD.worker(METHOD.settings(), RunInfo(document.blocks, 1))

    def reach(version: int) -> tuple[float, float]:
        for _ in range(WARM_UP_ROUNDS if version == WARM_UP_ROUNDS else rounds):
            for dataset in sites.values():
                work = LocalTaskContext(built, document.head, Plan(), document.blocks)
                trainer = Trainer(half, work, training, TrainingSetup(torch.device("cpu")), lambda: None)
                trainer.train(half.phases(work, Plan().train), dataset, 0)
        return time.process_time(), time.monotonic()

    return _cost(reach, rounds)


def _cost(reach: Callable[[int], tuple[float, float]], rounds: int) -> Cost:
    begun, ended = reach(WARM_UP_ROUNDS), reach(WARM_UP_ROUNDS + rounds)
    return Cost((ended[0] - begun[0]) / rounds, (ended[1] - begun[1]) / rounds)


def _processor_of_children() -> float:
    times = [child.cpu_times() for child in psutil.Process().children(recursive=True)]
    return sum(spent.user + spent.system for spent in times)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.simulation_overhead", description=__doc__)
    parser.add_argument("--rounds", type=int, default=20)
    rounds: int = parser.parse_args().rounds
    torch.set_num_threads(1)
    end_by_interrupt()
    sites = {held.site: load_source(held.source) for held in holdings() if held.kind == "train"}
    with tempfile.TemporaryDirectory() as folder:
        processes = Processes(Path(folder))
        try:
            federation = Federation(Path(folder), processes)
            federation.start_coordinator()
            with federation.admin() as client:
                for holding in holdings():
                    federation.start_worker(client, holding)
                model = federation.make_model()
                for _ in federation.await_workers(client):
                    pass
            http = over_http(federation, model, rounds)
        finally:
            processes.stop()
        simulated = in_one_process(sites, model, rounds)
        bare = training_alone(sites, model, rounds)
    for name, cost in {"over HTTP": http, "simulated": simulated, "training alone": bare}.items():
        print(f"{name:15} {cost.processor:7.3f} s of processor, {cost.wall:7.3f} s on the wall a round")
    beside = (http.processor - bare.processor) / (simulated.processor - bare.processor)
    print(f"beside training HTTP takes {beside:.1f} times the processor time of a simulation")


if __name__ == "__main__":
    main()
