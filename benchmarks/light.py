"""Workers without torch, many to a process, that speak the whole protocol and send prepared updates.

For more workers than fit on a machine. One worker of each process downloads a version and writes an update, through
the same client and codecs as a real worker. The others of the process download the version too, keep nothing of it,
and send the same bytes but the last one, which makes theirs another update.
"""

from __future__ import annotations

import hashlib
import json
import sys
import threading
from collections.abc import Mapping, Sequence
from io import RawIOBase
from pathlib import Path
from typing import BinaryIO, cast
from uuid import uuid4

import numpy as np
from typing_extensions import Buffer

from benchmarks.federation import DATASET, Federation
from benchmarks.measuring import await_true
from benchmarks.own_methods.drift import drawn
from tessera.shared.api.tasks import Claim, Failure, Submission, Task
from tessera.shared.client.client import Client
from tessera.shared.model.blocks import Block
from tessera.shared.problems import Problem
from tessera.shared.tensors.lazy import Array, ComputedTensor
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.worker.state.blob_cache import BlobTensor

EXAMPLES = 8
MAX_WORKERS = 64
"""The last byte of an update is the worker's number. As the highest byte of a float32 it gives one below 2."""


class Nowhere:
    """A sink that counts."""

    def __init__(self) -> None:
        self._nbytes = 0

    def write(self, data: bytes | memoryview, /) -> int:
        self._nbytes += len(data)
        return len(data)

    def tell(self) -> int:
        return self._nbytes


class LastByteReplaced(RawIOBase):
    """A file with another last byte. It has no descriptor, so that the kernel does not send the file's own byte."""

    def __init__(self, path: Path, last: bytes) -> None:
        self._file = path.open("rb")
        self._length = path.stat().st_size
        self._last = last

    def readinto(self, buffer: Buffer, /) -> int:
        count = self._file.readinto(buffer)
        if count and self._file.tell() == self._length:
            memoryview(buffer)[count - 1 : count] = self._last
        return int(count)

    def seek(self, offset: int, whence: int = 0, /) -> int:
        return self._file.seek(offset, whence)

    def tell(self) -> int:
        return self._file.tell()

    def close(self) -> None:
        self._file.close()
        super().close()


class Prepared:
    """The update for the latest version, shared by the workers of a process, unless there is only one."""

    def __init__(self, folder: Path, *, shared: bool) -> None:
        self._shared = shared
        self._base, self._update = folder / "base", folder / "update"
        self._version = ""
        self._lock = threading.Lock()

    def downloaded(self, client: Client, task: Task, blocks: Sequence[Block], digests: Mapping[str, str]) -> None:
        """Download the task's version; the first worker to do so writes the update."""
        wanted = [digests[block.name] for block in blocks]
        with self._lock:
            if self._version != task.version.digest:
                with self._base.open("wb") as file:
                    client.copy_blobs(wanted, file)
                self._write(task, blocks)
                self._version = task.version.digest
                return
        client.copy_blobs(wanted, Nowhere())

    def _write(self, task: Task, blocks: Sequence[Block]) -> None:
        steps = drawn(task.seed)

        def moved(pieces: Sequence[Array]) -> Array:
            return np.asarray(pieces[0] + steps[: pieces[0].size])

        changes, start = [], 0
        for block in blocks:
            base = BlobTensor(self._base, block, start)
            changes.append(TrainedBlock(block, ComputedTensor(block.shape, block.dtype, (base,), moved), base))
            start += block.nbytes
        with self._update.open("wb") as file:
            self._digest = write_update(file, task.codec, changes).digest
        if not self._shared:
            return
        with self._update.open("rb") as written:
            self._hash = hashlib.sha256()
            left = self._update.stat().st_size - 1
            while piece := written.read(min(left, 1 << 20)):
                self._hash.update(piece)
                left -= len(piece)

    def upload(self, client: Client, number: int) -> str:
        """Upload the update, with the worker's number as its last byte if it is shared. Return its digest."""
        if not self._shared:
            return client.put_file(self._update, digest=self._digest)
        last = bytes([number])
        whole = self._hash.copy()
        whole.update(last)
        digest = f"sha256:{whole.hexdigest()}"
        with LastByteReplaced(self._update, last) as file:
            client.put_stream(digest, cast("BinaryIO", file), self._update.stat().st_size)
        return digest


class LightWorker:
    def __init__(self, url: str, token: str, number: int, prepared: Prepared) -> None:
        self._client = Client(url, token)
        self._number = number
        self._prepared = prepared
        self._claim = Claim(
            worker="w", instance=uuid4().hex, datasets={DATASET: EXAMPLES}, methods=("fedavg", "drift")
        )

    def work(self) -> None:
        while True:
            try:
                if task := self._client.claim(self._claim, 25):
                    self._attempt(task)
            except Problem as problem:
                print(problem.code, problem.detail, file=sys.stderr, flush=True)

    def _attempt(self, task: Task) -> None:
        """Do the task, or fail it with the reason, so that nothing waits for it."""
        try:
            self._do(task)
        except Exception as fault:
            detail = f"{type(fault).__name__}: {fault}"[:2000]
            self._client.fail(task.id, Failure(token=task.token, code="light-worker", detail=detail))
            raise

    def _do(self, task: Task) -> None:
        """Download the whole version and send an update of all blocks."""
        model, manifest = self._client.model(task.model), self._client.manifest(task.version.digest)
        self._prepared.downloaded(self._client, task, model.blocks, manifest.blocks)
        update = self._prepared.upload(self._client, self._number)
        submission = Submission(token=task.token, version=task.version.digest, update=update, examples=EXAMPLES)
        self._client.submit(task.id, submission)


def start(federation: Federation, count: int, processes: int = 2) -> None:
    """Start that many workers, divided among processes, and return once all wait for a task."""
    if count > MAX_WORKERS:
        raise ValueError(f"there are at most {MAX_WORKERS} light workers, not {count}")
    tokens = {index: federation.site_token(f"light-{index}") for index in range(count)}
    for index in range(min(processes, count)):
        file = federation.folder / f"light-{index}.json"
        some = {number: tokens[number] for number in range(index, count, processes)}
        url = federation.url
        file.write_text(json.dumps({"url": url, "tokens": some}), encoding="ascii")
        federation.processes.start(f"light-{index}", [sys.executable, "-m", "benchmarks.light", str(file)], {})
    await_true(
        lambda: sum(worker.live for worker in federation.admin.workers()) >= count, 60, "light workers wait", 0.1
    )


def pids(federation: Federation, processes: int) -> list[int]:
    """Return the ids of the processes that `start` has started."""
    return [federation.processes.pid(f"light-{index}") for index in range(processes)]


def main(file: Path) -> None:
    given = json.loads(file.read_text(encoding="ascii"))
    folder = file.with_suffix("")
    folder.mkdir()
    prepared = Prepared(folder, shared=len(given["tokens"]) > 1)
    threads = [
        threading.Thread(target=LightWorker(given["url"], token, int(number), prepared).work, daemon=True)
        for number, token in given["tokens"].items()
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
