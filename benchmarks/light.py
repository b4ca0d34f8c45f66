"""Workers without torch, many to a process: they speak the whole protocol and send real updates, and train nothing.

For what a real worker would be too large for. Each downloads every block that it is asked about, and writes, uploads
and submits an update of its own, through the same client and codecs; what it does not do is build a model.
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from uuid import uuid4

import numpy as np

from benchmarks.federation import DATASET, Federation
from benchmarks.measuring import await_true
from benchmarks.methods.drift import drawn
from tessera.shared.api.tasks import Claim, Submission, Task
from tessera.shared.client.client import Client
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Problem
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import CHUNK, Array, Computed
from tessera.shared.updates.update_file import TrainedBlock, write_update

EXAMPLES = 8
AT_WORK = 2
"""Of one process's workers, how many have a task in hand at a time; the others wait, as if they were slower."""


@dataclass(frozen=True)
class FileTensor:
    """A block in a file of its own."""

    path: Path
    block: Block

    @property
    def shape(self) -> tuple[int, ...]:
        return self.block.shape

    @property
    def dtype(self) -> DType:
        return self.block.dtype

    def chunks(self) -> Iterator[Array]:
        dtype = NUMPY_DTYPES[self.block.dtype]
        with self.path.open("rb") as file:
            while piece := file.read(CHUNK * dtype.itemsize):
                yield np.frombuffer(piece, dtype)


class LightWorker:
    def __init__(self, url: str, token: str, name: str, folder: Path, turn: threading.Semaphore) -> None:
        self._client = Client(url, token)
        self._folder = folder
        self._turn = turn
        self._claim = Claim(
            worker=name, instance=uuid4().hex, datasets={DATASET: EXAMPLES}, methods=("fedavg", "drift")
        )

    def work(self) -> None:
        while True:
            try:
                task = self._client.claim(self._claim, 25)
                if task:
                    with self._turn, tempfile.TemporaryDirectory(dir=self._folder) as folder:
                        self._do(task, Path(folder))
            except Problem as problem:
                print(problem.code, problem.detail, file=sys.stderr, flush=True)

    def _do(self, task: Task, folder: Path) -> None:
        model, manifest = self._client.model(task.model), self._client.manifest(task.version.digest)
        bases = {}
        for index, block in enumerate(task.plan.fetch.resolve(model.blocks)):
            base = FileTensor(folder / f"block-{index}", block)
            with base.path.open("wb") as file:
                self._client.fetch_blob(manifest.blocks[block.name], file)
            bases[block.name] = base
        steps = drawn(task.seed)

        def moved(pieces: Sequence[Array]) -> Array:
            return np.asarray(pieces[0] + steps[: pieces[0].size])

        changes = [
            TrainedBlock(block, Computed(block.shape, block.dtype, (bases[block.name],), moved), bases[block.name])
            for block in task.plan.upload.resolve(model.blocks)
        ]
        update = folder / "update"
        with update.open("wb") as written:
            write_update(written, task.codec, changes)
        digest = self._client.put_file(update)
        submission = Submission(token=task.token, version=task.version.digest, update=digest, examples=EXAMPLES)
        self._client.submit(task.id, submission)


def start(federation: Federation, count: int, processes: int = 2) -> list[int]:
    """Starts that many, divided among processes; returns once all wait. Gives the processes' ids."""
    tokens = [federation.site_token(f"light-{index}") for index in range(count)]
    pids = []
    for index in range(min(processes, count)):
        file = federation.folder / f"light-{index}.json"
        file.write_text(json.dumps({"url": federation.url, "tokens": tokens[index::processes]}), encoding="ascii")
        federation.processes.start(f"light-{index}", [sys.executable, "-m", "benchmarks.light", str(file)], {})
        pids.append(federation.processes.pid(f"light-{index}"))
    await_true(
        lambda: sum(worker.live for worker in federation.admin.workers()) >= count, 60, "light workers wait", 0.1
    )
    return pids


def main(file: Path) -> None:
    given = json.loads(file.read_text(encoding="ascii"))
    folder = file.with_suffix("")
    folder.mkdir()
    turn = threading.Semaphore(AT_WORK)
    threads = [
        threading.Thread(target=LightWorker(given["url"], token, "w", folder, turn).work, daemon=True)
        for token in given["tokens"]
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
