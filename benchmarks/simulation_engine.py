"""Whether `tessera simulate` could drive the coordinator itself: `python -m benchmarks.simulation_engine`.

A round of a hundred sites and a model of 24 kB, in CPU seconds of one process:

- simulated: `tessera simulate` with one batch of eight examples at each site, whole;
- training alone: the same steps of the same training loop, and nothing around them;
- coordinator: the coordinator's operations, conductor, SQLite database and blob store called in process, without
  HTTP, by workers that cost nothing: claim, submit and merge alone, with the disk's flushes left out.

One engine costs training alone + coordinator + what workers do (fetch, encode, write); it pays only if that is no
more than what is simulated today. So it is settled where coordinator alone exceeds simulated - training alone.
"""

from __future__ import annotations

import argparse
import hashlib
import io
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch

from benchmarks.federation import DATASET, Federation
from benchmarks.simulation_overhead import WARM_UP_ROUNDS, Cost, in_one_process, training_alone
from examples.processes import Processes, end_by_interrupt, tessera
from tessera.coordinator.db.tables import RunRow, SiteRow
from tessera.coordinator.domain.principal import Principal
from tessera.coordinator.operations import tasks
from tessera.coordinator.services import Services, assemble
from tessera.coordinator.settings import Settings
from tessera.shared.api.tasks import Claim, Submission
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.model_folder import ModelFolder
from tessera.shared.updates.update_file import Change, write_update
from tessera.worker.data.dataset import Dataset

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
    processes.start("model", tessera(*command, "--head", "image-classification"), {})
    processes.finish("model")
    return ModelFolder.open(folder / "model")


def coordinator_alone(folder: Path, model: ModelFolder, sites: int, rounds: int) -> Cost:
    """Rounds of a coordinator in this process; the first ones do not count."""
    with Federation(folder) as federation:
        run = federation.begin(model, rounds + WARM_UP_ROUNDS, sites, {"name": "fedavg"}, codec="raw").id
    home = folder / "coordinator"
    settings = Settings(
        database_url=f"sqlite:///{home / 'tessera.db'}", blob_url=str(home / "blobs"), staging_dir=home / "staging"
    )
    services = assemble(settings, clock=time.time)
    callers = [Principal(f"token-{index}", f"site-{index}", "site", f"site-{index}") for index in range(sites)]
    with services.database.transaction() as session:
        session.add_all(SiteRow(id=caller.name, name=caller.name, created_at=0.0) for caller in callers)
    spent = [_round(services, run, callers, model) for _ in range(rounds + WARM_UP_ROUNDS)]
    services.database.close()
    processor, wall = zip(*spent[WARM_UP_ROUNDS:], strict=True)
    return Cost(sum(processor) / rounds, sum(wall) / rounds)


def _round(services: Services, run: str, callers: Sequence[Principal], model: ModelFolder) -> tuple[float, float]:
    """Return a round's seconds of processor and of the wall, without those in which updates are written."""
    claim = Claim(worker="w", instance="0" * 16, datasets={DATASET: 8}, methods=("fedavg",))
    begun, left_out = _now(), np.zeros(2)
    workers = [tasks.declare(services, caller, claim) for caller in callers]
    services.conductor.step()
    version = _version(services, run)
    for place, (caller, worker) in enumerate(zip(callers, workers, strict=True)):
        task = tasks.lease(services, caller, worker, claim.instance, rung=False)
        if task is None:
            raise RuntimeError(f"{caller.name} was offered no task")
        before = _now()
        data = _update(model, task.version.number + place)
        left_out += _now() - before
        digest = f"sha256:{hashlib.sha256(data).hexdigest()}"
        report = Submission(token=task.token, version=task.version.digest, update=digest, examples=8, data=data)
        tasks.submit_update(services, caller, task.id, report)
    while _version(services, run) == version:
        services.conductor.step()
        time.sleep(0.001)
    processor, wall = _now() - begun - left_out
    return float(processor), float(wall)


def _now() -> np.ndarray[tuple[int], np.dtype[np.float64]]:
    return np.array([time.process_time(), time.perf_counter()])


def _version(services: Services, run: str) -> int:
    with services.database.snapshot() as session:
        return session.get_one(RunRow, run).version_number


def _update(model: ModelFolder, seed: int) -> bytes:
    """Return an update of the whole model: random values, as they are."""
    dice = np.random.default_rng(seed)
    values = [(block, dice.standard_normal(block.shape, np.float32)) for block in model.model.blocks]
    file = io.BytesIO()
    write_update(file, "raw", [Change(block, ArrayTensor(array), ArrayTensor(array)) for block, array in values])
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
        simulated = in_one_process(sites, model, given.rounds)
        bare = training_alone(sites, model, given.rounds)
    for what, cost in {"simulated": simulated, "training alone": bare, "coordinator": coordinator}.items():
        print(f"{what:15} {cost.processor:7.3f} s of processor, {cost.wall:7.3f} s on the wall a round")
    print(
        f"coordinator / (simulated - training): {coordinator.processor / (simulated.processor - bare.processor):.2f}"
    )


if __name__ == "__main__":
    main()
