"""How fast updates merge: `python -m benchmarks.merging [--mb 440] [--updates 10 100 1000]`.

A model of that many megabytes of float32, in blocks as BERT has them, is merged from that many stored updates, once
for each way of sending them. What is measured, each in a process of its own:

- `sum`: reading, decoding and adding up, its result thrown away;
- `merge`: the coordinator's whole merge, with hashes, files and flushes, in as many threads as there are cores.

Speeds are gigabytes of float32 that the updates stand for. Last come the robust rules, in one thread and from memory;
`--only rules` measures nothing else.
"""

from __future__ import annotations

import argparse
import multiprocessing
import os
import shutil
import tempfile
import time
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch
from alembic import command

from benchmarks.measuring import MIB, OUT, Results, forget_peak, own_peak_bytes, resident_bytes
from tessera.coordinator.blobs.store import Blobs
from tessera.coordinator.db.engine import Database, alembic_config
from tessera.shared.aggregation.robust import (
    CentredClipping,
    GeometricMedian,
    Mean,
    Median,
    MultiKrum,
    RobustRule,
    TrimmedMean,
)
from tessera.shared.api.runs import Bounds, RunSpec
from tessera.shared.api.versions import Manifest, VersionRef
from tessera.shared.host_memory import keep_freed_memory
from tessera.shared.methods.base import CoordinatorHalf, MethodSettings, MethodSpec, Plan, RunInfo, State, Update
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Model
from tessera.shared.rounds.aggregate import AcceptedUpdate, Aggregation
from tessera.shared.rounds.outliers import scores
from tessera.shared.rounds.validation import Inspector
from tessera.shared.rounds.versions import States
from tessera.shared.schema import canonical
from tessera.shared.tensors.lazy import ArrayTensor, as_bytes, lockstep, related
from tessera.shared.updates.update_file import TrainedBlock, write_update

RULES: tuple[RobustRule, ...] = (Mean(), Median(), TrimmedMean(), CentredClipping(), MultiKrum(), GeometricMedian())
CODECS = {
    "float32, raw": "raw",
    "int8": "delta+int8",
    "lossless": "bits+shuffle+zstd",
}
CORES = len(os.sched_getaffinity(0))


@dataclass(frozen=True)
class Speed:
    """The best of several tries."""

    gigabytes: float
    wall_seconds: float
    cpu_seconds: float

    @property
    def per_cpu_second(self) -> float:
        return self.gigabytes / self.cpu_seconds


def best(gigabytes: float, work: Callable[[], object], tries: int = 3) -> Speed:
    walls, cpus = [], []
    for _ in range(tries):
        wall, cpu = time.perf_counter(), time.process_time()
        work()
        walls.append(time.perf_counter() - wall)
        cpus.append(time.process_time() - cpu)
    return Speed(gigabytes, min(walls), min(cpus))


# ---------------------------------------------------------------- stored updates


def bert_like(mb: float) -> Model:
    """Blocks in the proportions of BERT base: of 110 M parameters 23 M in one table of embeddings."""
    width = max(8, int((mb * 1e6 / 4 / 185) ** 0.5))
    shapes: dict[str, tuple[int, ...]] = {"embeddings.weight": (int(39.75 * width), width)}
    for layer in range(12):
        for name in ("query", "key", "value", "output"):
            shapes[f"layer.{layer}.{name}.weight"] = (width, width)
            shapes[f"layer.{layer}.{name}.bias"] = (width,)
        shapes[f"layer.{layer}.up.weight"] = (4 * width, width)
        shapes[f"layer.{layer}.down.weight"] = (width, 4 * width)
    blocks = tuple(
        Block(tensor=name, role="mlp", layer=0, shape=shape, dtype="F32") for name, shape in shapes.items()
    )
    return Model(config={"model_type": "bert"}, head="features", blocks=blocks)


def opened(folder: Path) -> Blobs:
    # By a clock that stands at zero all that is stored came later, and is not hashed again: as in a coordinator that
    # was there when it came.
    database = Database(f"sqlite:///{folder}/bench.db", lambda: 0.0)
    return Blobs(database, str(folder / "blobs"), folder / "staging", 65_536, 1 << 18)


@dataclass(frozen=True)
class Bench:
    """Where a version and the updates to it are stored."""

    folder: Path
    model: str
    version: str
    updates: tuple[str, ...]
    gigabytes: float
    """Of float32 that the updates stand for."""
    stored_mb: float


def prepared(folder: Path, mb: float, count: int, codec: str) -> Bench:
    """Raises CodecError if there is no such codec."""
    database = Database(f"sqlite:///{folder}/bench.db", lambda: 0.0)
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    database.close()
    blobs, model = opened(folder), bert_like(mb)
    rng = np.random.default_rng(0)
    largest = max(block.numel for block in model.blocks)
    noise = (rng.random(largest + 4096, dtype=np.float32) - np.float32(0.5)) * np.float32(1e-3)
    values = {block.name: (rng.random(block.numel, dtype=np.float32) - np.float32(0.5)) for block in model.blocks}
    new = [blobs.put([as_bytes(values[block.name])]) for block in model.blocks]
    manifest = Manifest(blocks={block.name: blob.digest for block, blob in zip(model.blocks, new, strict=True)})
    documents = [blobs.put([canonical(model)]), blobs.put([canonical(manifest)])]
    updates = []
    for index in range(count):
        changes = [
            TrainedBlock(
                block,
                ArrayTensor((values[block.name] + noise[8 * (index % 512) :][: block.numel]).reshape(block.shape)),
                ArrayTensor(values[block.name].reshape(block.shape)),
            )
            for block in model.blocks
        ]
        path = folder / "staging" / "update"
        with path.open("wb") as file:
            write_update(file, codec, changes)
        with path.open("rb") as file:
            updates.append(blobs.put(iter(partial(file.read, 1 << 20), b"")))
    with blobs._database.transaction() as session:  # noqa: SLF001 (a benchmark looks inside)
        blobs.record(session, 1.0, [*new, *documents, *updates])
    return Bench(
        folder,
        documents[0].digest,
        documents[1].digest,
        tuple(blob.digest for blob in updates),
        count * sum(block.nbytes for block in model.blocks) / 1e9,
        sum(blob.size for blob in updates) / 1e6,
    )


# ---------------------------------------------------------------- merging them


def measured(bench: Bench) -> tuple[Speed, Speed, float]:
    """To be run in a process of its own: the sum, the merge, and the MiB that they needed at most."""
    keep_freed_memory()
    blobs = opened(bench.folder)
    states = States(blobs, CORES)
    aggregation = Aggregation(states, Inspector(blobs, states))
    spec = RunSpec(
        name="bench",
        method=MethodSpec(name="fedavg"),
        model=bench.model,
        version=bench.version,
        dataset="none",
        rounds=2,
    )
    base = VersionRef(number=0, digest=bench.version)
    accepted = [
        AcceptedUpdate(f"{index:02}", f"{index:02}/w", digest, 100, {}, Plan(), base)
        for index, digest in enumerate(bench.updates)
    ]
    forget_peak(os.getpid())
    held = resident_bytes([os.getpid()])

    def summed() -> None:
        state, _ = aggregation.next_state(spec, Bounds(), base, accepted)
        for group in related([tensor for _, tensor in sorted(state.model.items())]):
            for _ in lockstep(group):
                pass

    speeds = (
        best(bench.gigabytes, summed),
        best(bench.gigabytes, lambda: aggregation.merge(spec, Bounds(), base, accepted)),
    )
    return *speeds, (own_peak_bytes(os.getpid()) - held) / MIB


# ---------------------------------------------------------------- robust rules


def rules(mb: float, count: int) -> dict[str, Speed]:
    """One block in memory, by each rule; and the scores of a round, by the median."""
    rng = np.random.default_rng(0)
    base, *sent = (
        ArrayTensor(rng.random(int(mb * 1e6 / 4), dtype=np.float32) * np.float32(0.02)) for _ in range(count + 1)
    )
    state, updates = State(0, {"w": base}), [Update(f"{index}/w", 10, {"w": one}) for index, one in enumerate(sent)]

    def merged(rule: RobustRule) -> State:
        # Anew each time: what a rule finds of its senders it keeps.
        return CoordinatorHalf(MethodSettings(), RunInfo((), rounds=1, robust=rule)).merge(state, updates)

    def read(rule: RobustRule) -> None:
        for _ in merged(rule).model["w"].chunks():
            pass

    gigabytes = len(sent) * base.values.nbytes / 1e9
    found = {str(rule.model_dump()["rule"]): best(gigabytes, partial(read, rule)) for rule in RULES}
    scored = best(gigabytes, lambda: scores(state.model, merged(Median()).model, updates))
    return {**found, "scores": scored}


# ---------------------------------------------------------------- the table


def add_codecs(results: Results, folder: Path, mb: float, count: int) -> None:
    for number, (name, codec) in enumerate(CODECS.items()):
        here = folder / str(number)
        here.mkdir()
        bench = prepared(here, mb, count, codec)
        with ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn")) as alone:
            summed, merged, needed = alone.submit(measured, bench).result()
        shutil.rmtree(here)
        results.add(
            updates=count,
            sent_as=name,
            stored_MB=bench.stored_mb,
            sum_GB_per_cpu_s=summed.per_cpu_second,
            merge_GB_s=merged.gigabytes / merged.wall_seconds,
            merge_s=merged.wall_seconds,
            merge_cpu_s=merged.cpu_seconds,
            added_MiB=needed,
        )


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--mb", type=float, default=440, help="size of an update as float32")
    parser.add_argument("--updates", type=int, nargs="+", default=[10])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--only", choices=["rules"])
    asked = parser.parse_args()
    torch.set_num_threads(1)
    about = f"updates of {asked.mb:g} MB as float32, {CORES} cores"
    results = Results("merging", about, out=asked.out)
    if not asked.only:
        asked.out.mkdir(parents=True, exist_ok=True)
        for count in asked.updates:
            with tempfile.TemporaryDirectory(dir=asked.out) as folder:
                add_codecs(results, Path(folder), asked.mb, count)
    found = rules(min(asked.mb, 100), asked.updates[0])
    for name, speed in found.items():
        times = found["mean"].per_cpu_second / speed.per_cpu_second
        results.add(rule=name, GB_per_cpu_s=speed.per_cpu_second, of_the_mean=times)
    results.finish(asked.out)


if __name__ == "__main__":
    main()
