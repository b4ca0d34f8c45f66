"""Whether `tessera simulate` could drive the coordinator itself: `python -m benchmarks.simulation_engine`.

A round of a hundred sites and a model of 24 kB, in CPU seconds of one process:

- simulated: `tessera simulate` with one batch of eight examples at each site, whole;
- its coordinator: the part of that which checks updates and merges them, and which one engine would not need;
- the coordinator: operations, conductor, SQLite database and blob store, called in process without HTTP, on a folder
  in memory: declare, claim, submit, merge.

With one engine a round costs simulated - its coordinator + the coordinator. It pays if that is no more than today.
"""

from __future__ import annotations

import argparse
import io
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.federation import DATASET, Federation
from benchmarks.simulation_overhead import WARM_UP_ROUNDS, in_one_process
from examples.processes import Processes, end_by_interrupt, tessera
from tessera.coordinator.db.tables import RunRow, SiteRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations import tasks
from tessera.coordinator.services import Services, assemble
from tessera.coordinator.settings import CoordinatorSettings
from tessera.shared.api.tasks import Claim, Submission
from tessera.shared.tensors.lazy import ArrayTensor, digest_of
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.worker.data.dataset import Dataset
from tessera.worker.simulation.in_process_coordinator import InProcessCoordinator
from tessera.worker.simulation.round_loop import Simulation

MEMORY = Path("/dev/shm")  # noqa: S108 (a folder of our own is made in it)
CONFIG = (
    '{"model_type": "vit", "num_channels": 1, "image_size": 8, "patch_size": 4, "hidden_size": 16, "num_labels": 3,'
    ' "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40}'
)


def _images(seed: int) -> Dataset:
    generator = torch.Generator().manual_seed(seed)
    pixels = torch.randn(8, 1, 8, 8, generator=generator)
    return Dataset({"pixel_values": pixels, "labels": torch.randint(0, 3, (8,), generator=generator)})


def _model(folder: Path, processes: Processes) -> ModelFolder:
    (folder / "config.json").write_text(CONFIG, encoding="ascii")
    command = ("model", "init", str(folder / "model"), "--config", str(folder / "config.json"))
    processes.start("model", tessera(*command, "--head", "image-classification", "--random"), {})
    processes.finish("model")
    return ModelFolder.open(folder / "model")


def coordinator_alone(folder: Path, model: ModelFolder, sites: int, rounds: int) -> float:
    """Return the seconds of a round of a coordinator in this process; the first ones do not count."""
    with Federation(folder) as federation:
        run = federation.begin(model, rounds + WARM_UP_ROUNDS, sites, {"name": "fedavg"}, codec="raw").id
    home = folder / "coordinator"
    settings = CoordinatorSettings(
        database_url=f"sqlite:///{home / 'tessera.db'}", blob_url=str(home / "blobs"), staging_dir=home / "staging"
    )
    services = assemble(settings, clock=time.time)
    callers = [Principal(f"token-{index}", f"site-{index}", "site", f"site-{index}") for index in range(sites)]
    with services.database.transaction() as session:
        session.add_all(SiteRow(id=caller.name, name=caller.name, created_at=0.0) for caller in callers)
    spent = [_round(services, run, callers, model) for _ in range(rounds + WARM_UP_ROUNDS)]
    services.database.close()
    return sum(spent[WARM_UP_ROUNDS:]) / rounds


def _round(services: Services, run: str, callers: Sequence[Principal], model: ModelFolder) -> float:
    """Return a round's seconds of processor, without those in which updates are written."""
    claim = Claim(worker="w", instance="0" * 16, datasets={DATASET: 8}, methods=("fedavg",))
    begun, left_out = time.process_time(), 0.0
    workers = [tasks.declare(services, caller, claim) for caller in callers]
    services.conductor.step()
    version = _version(services, run)
    for place, (caller, worker) in enumerate(zip(callers, workers, strict=True)):
        task = tasks.lease(services, caller, worker, claim.instance, woken=False)
        if task is None:
            raise RuntimeError(f"{caller.name} was offered no task")
        before = time.process_time()
        data = _update(model, task.version.number + place)
        left_out += time.process_time() - before
        digest = digest_of(data)
        report = Submission(token=task.token, version=task.version.digest, update=digest, examples=8, data=data)
        tasks.submit_update(services, caller, task.id, report)
    services.conductor.step()
    while _version(services, run) == version:
        time.sleep(0.01)
    return time.process_time() - begun - left_out


def _version(services: Services, run: str) -> int:
    with services.database.snapshot() as session:
        return session.get_one(RunRow, run).version_number


def _update(model: ModelFolder, seed: int) -> bytes:
    """Return an update of the whole model: random values, as they are."""
    dice = np.random.default_rng(seed)
    values = [(block, dice.standard_normal(block.shape, np.float32)) for block in model.model.blocks]
    file = io.BytesIO()
    write_update(
        file, "raw", [TrainedBlock(block, ArrayTensor(array), ArrayTensor(array)) for block, array in values]
    )
    return file.getvalue()


def main() -> None:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.simulation_engine",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--sites", type=int, default=100)
    parser.add_argument("--rounds", type=int, default=10)
    given = parser.parse_args()
    torch.set_num_threads(1)
    end_by_interrupt()
    sites = {f"site-{index}": _images(index) for index in range(given.sites)}
    # In memory: a simulation does not wait for the disk.
    with tempfile.TemporaryDirectory(dir=MEMORY if MEMORY.is_dir() else None) as name:
        processes = Processes(Path(name))
        try:
            model = _model(Path(name), processes)
        finally:
            processes.stop()
        nbytes = sum(block.nbytes for block in model.model.blocks)
        print(f"{given.sites} sites, {len(model.model.blocks)} blocks of together {nbytes} bytes")
        coordinator = coordinator_alone(Path(name), model, given.sites, given.rounds)
        with _spent_in((InProcessCoordinator, "submit"), (Simulation, "_merge")) as parts:
            simulated = in_one_process(sites, model, given.rounds)
    part = sum(parts) / (given.rounds + WARM_UP_ROUNDS)
    for what, seconds in {
        "simulated": simulated.processor,
        "its coordinator": part,
        "the coordinator": coordinator,
    }.items():
        print(f"{what:16} {seconds:7.3f} s of processor a round")
    print(f"one engine / today: {(simulated.processor - part + coordinator) / simulated.processor:.2f}")


@contextmanager
def _spent_in(*methods: tuple[type, str]) -> Iterator[list[float]]:
    """Collect the seconds of processor of each call of these methods."""
    spent: list[float] = []

    def timed(method: Callable[..., Any]) -> Callable[..., Any]:
        @wraps(method)
        def call(*arguments: Any) -> Any:
            begun = time.process_time()
            try:
                return method(*arguments)
            finally:
                spent.append(time.process_time() - begun)

        return call

    methods_as_they_are = [(owner, name, getattr(owner, name)) for owner, name in methods]
    for owner, name, method in methods_as_they_are:
        setattr(owner, name, timed(method))
    try:
        yield spent
    finally:
        for owner, name, method in methods_as_they_are:
            setattr(owner, name, method)


if __name__ == "__main__":
    main()
