"""How soon real processes of unequal speed reach a score: `python -m small_tasks.unequal_processes`.

The federation of `unequal_speeds` on one machine: a coordinator, eight sites of dissimilar digits, and one that
measures each version. A site's worker sleeps in each step, the slowest ten times as long as the fastest, so that few
cores are enough. Times are the coordinator's: from the first round's opening to a version.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Sequence
from math import ceil
from pathlib import Path
from statistics import fmean
from tempfile import TemporaryDirectory
from time import sleep

import torch
from safetensors.torch import save_file

from common.federation import Federation
from common.figures import Results
from common.modeling import init
from small_tasks.lora_ranks import HEAD, VIT
from small_tasks.unequal_speeds import ALL, ALPHA, ARMS, SITES, SMOOTHED, SPEEDS, STEPS, TRAINING, base
from tessera.shared.api.runs import Run
from tessera.shared.client.client import Client
from tessera.worker.data.partition.division import divide
from tessera.worker.data.partition.schemes import Dirichlet
from tessera.worker.data.registry import load
from tessera.worker.model.build import instantiate

SLOWED = """
import os
import time

from tessera.shared.methods.base import Method, WorkerHalf


class SlowedWorker(WorkerHalf):
    def after_backward(self, context):
        time.sleep(float(os.environ["PAUSE_SECONDS"]))


METHOD = Method(name="slowed", worker=SlowedWorker, source="small_tasks.unequal_processes")
"""
RUN_ARMS = tuple(arm for arm in ARMS if arm != "first 6 of 8")
ROUNDS, SEED = 5, 0
PAUSE_SECONDS = 0.6
"""Of the fastest site in each step."""
TOLD_SECONDS = 30.0
"""By then each worker has learnt from a heartbeat that the run before has ended."""
UNROUNDED = {"TESSERA_WORKER_DURATION_QUANTUM_SECONDS": "0.01"}
"""The digits are public."""


def start_model(folder: Path) -> Path:
    """Write the model that has learnt digits on their side."""
    model, values = instantiate(VIT, HEAD, seed=0), base("digits").values
    model.load_state_dict({name: torch.tensor(values[name]) for name in model.state_dict()})
    model.save_pretrained(folder / "digits")
    init(folder / "model", config=folder / "digits", head=HEAD)
    return folder / "model"


def start_sites(federation: Federation, folder: Path, pause_seconds: float) -> None:
    scheme = Dirichlet(scheme="dirichlet", count=SITES, alpha=ALPHA, seed=SEED)
    for (site, speed), part in zip(SPEEDS.items(), divide(load("digits", {"split": "train"}), scheme), strict=True):
        file, key = folder / f"{site}.safetensors", hashlib.sha256(site.encode()).digest()
        save_file(part.tensors, file)
        slowed = {"PAUSE_SECONDS": str(pause_seconds * speed)}
        federation.start_worker(site, "digits", {"kind": "arrays", "file": str(file)}, "w", key, slowed)
    central = {"kind": "digits", "split": "test", "use": "evaluate"}
    federation.start_worker("laboratory", "test", central, "w", hashlib.sha256(b"laboratory").digest(), UNROUNDED)


def curve(client: Client, run: Run) -> list[tuple[float, float]]:
    """Return the mean accuracy of each three versions in a row, and before it the seconds from the first round's
    opening to the last of them."""
    opened = min(each.opened_at for each in client.rounds(run.id))
    made = {each.number: (each.created_at - opened).total_seconds() for each in client.versions(run.id)}
    found = sorted((one.version, 100 * one.metrics["accuracy"]) for one in client.measurements(run.id))
    return [
        (made[found[end - 1][0]], fmean(accuracy for _, accuracy in found[end - SMOOTHED : end]))
        for end in range(SMOOTHED, len(found) + 1)
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=ROUNDS, help="that wait for all")
    parser.add_argument("--pause", type=float, default=PAUSE_SECONDS, help="seconds of the fastest site in each step")
    chosen = parser.parse_args(arguments)
    results = Results("unequal_processes", "Eight real workers: the slowest takes ten times as long as the fastest")
    goal = 0.0
    with TemporaryDirectory() as place:
        folder, methods = Path(place), Path(place) / "methods"
        methods.mkdir()
        (methods / "slowed.py").write_text(SLOWED)
        model = start_model(folder)
        with Federation(folder / "federation", methods) as federation:
            start_sites(federation, folder, chosen.pause)
            for arm in RUN_ARMS:
                spec = {
                    "name": "unequal",
                    "method": {"name": "slowed"},
                    "dataset": "digits",
                    "rounds": ceil(chosen.rounds * ARMS[arm].versions),
                    "seed": SEED,
                    "training": {**TRAINING, "steps": STEPS},
                    "evaluation": {"dataset": "test"},
                    "cohort": ARMS[arm].cohort,
                }
                points = curve(federation.client, federation.run(spec, model))
                last, final = points[-1]
                goal = final if arm == ALL else goal
                reached = next((seconds for seconds, accuracy in points if accuracy >= goal), None)
                times = {"seconds to it": reached, "seconds in all": last}
                results.add(arm=arm, versions=ceil(chosen.rounds * ARMS[arm].versions), accuracy=final, **times)
                results.show()
                sleep(TOLD_SECONDS)
    results.write()


if __name__ == "__main__":
    main()
