"""What a worker of one version and its coordinator said to each other, kept so that later versions can be held to it.

`python -m tests.support.recording` records the present version into `tests/support/recorded/`, before a release; what
is there stays as it is for as long as the version is to be understood. A recording is JSON lines: first whose it is,
then one exchange a line, with bodies as JSON where they are, and else, or for blobs behind a document, in base64:

    {"version": "0.1.0", "protocol": 1}
    {"request": {"method": "POST", "path": "/v1/tasks/claim", "headers": {...}, "json": {...}},
     "answer": {"status": 200, "headers": {...}, "json": {...}}}
"""

from __future__ import annotations

import base64
import hashlib
import io
import json
import re
import sys
import tempfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import httpx
import numpy as np

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.framing import MEDIA_TYPE, pack, unpack
from tessera.shared.api.runs import Evaluation
from tessera.shared.api.tasks import Submission, Task
from tessera.shared.client import transfers
from tessera.shared.client.client import Client
from tessera.shared.schema import PROTOCOL
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.update_file import TrainedBlock, write_update
from tessera.shared.version import VERSION
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import ScriptedWorker, difference_of, small_model, start_run, values

FOLDER = Path(__file__).parent / "recorded"
MODEL = small_model()
START = values(MODEL)

SENT = (
    "accept",
    "content-type",
    "prefer",
    "range",
    "if-range",
    "upload-offset",
    "upload-length",
    "upload-complete",
    "repr-digest",
)
"""What a coordinator reads of a request's headers, beside the token and the idempotency key."""
RECEIVED = ("content-type", "content-range", "etag", "location", "retry-after", "upload-offset", "upload-complete")
"""What a worker reads of an answer's."""

STRICT = ("/plan", "/training", "/method", "/privacy")
"""Of a task, what workers read strictly: to pass over a part of it would be to train something else."""

Exchange = dict[str, Any]


def conversation(client: Client, begin: Callable[[], object]) -> list[Task]:
    """All that a worker says to a coordinator, in one short run; returns the tasks that it got.

    `begin` has the run started, on a coordinator that has no other.
    """
    worker = ScriptedWorker(client, instance="0" * 32, forgets=True)
    judge = ScriptedWorker(client, "judge", kinds=("evaluate",), datasets={"test": 5}, instance="1" * 32)
    worker.enrol()
    judge.enrol()
    begin()
    given_back = worker.take()
    client.heartbeat(given_back.id, given_back.token)
    client.release(given_back.id, given_back.token)
    # The update in parts, blocks one by one.
    first = worker.take()
    base = worker.fetch(first)
    with mock.patch.object(transfers, "ONE_REQUEST_BYTES", 0):
        worker.submit(first, worker.upload(first, {name: array + np.float32(1) for name, array in base.items()}))
    measured = judge.take()
    judge.evaluate(measured, accuracy=0.5, loss=1.25)
    # The update in its submission; all blocks in one answer, and as a difference.
    second = worker.take()
    manifest = client.manifest(second.version.digest)
    client.copy_blobs(sorted(manifest.blocks.values()), _Unhashed())
    assert difference_of(client, second.run, second.version.number, 0)
    data = _update(second, worker.fetch(second))
    client.submit(
        second.id,
        Submission(
            token=second.token,
            version=second.version.digest,
            update=f"sha256:{hashlib.sha256(data).hexdigest()}",
            data=data,
            examples=10,
            metrics={"loss": 0.75},
            download_bytes=1000,
        ),
    )
    third = worker.take()
    worker.fail(third)
    client.task(third.id)
    return [given_back, first, measured, second, third]


class _Unhashed(io.BytesIO):
    """Takes bytes whose digest somebody else checks."""


def _update(task: Task, base: dict[str, np.ndarray]) -> bytes:
    changes = [
        TrainedBlock(
            block, ArrayTensor(base[block.name] * np.float32(1.5), block.dtype), ArrayTensor(base[block.name])
        )
        for block in task.plan.upload.resolve(MODEL.blocks)
    ]
    file = io.BytesIO()
    write_update(file, task.codec, changes)
    return file.getvalue()


# ---------------------------------------------------------------- recording


class Recorder(httpx.BaseTransport):
    """Passes requests on, and keeps what was said."""

    def __init__(self) -> None:
        self.exchanges: list[Exchange] = []
        self._transport = httpx.HTTPTransport()

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        asked = _said(request.read(), request.headers, SENT)
        answer = self._transport.handle_request(request)
        told = _said(answer.read(), answer.headers, RECEIVED)
        path = request.url.raw_path.decode()
        self.exchanges.append(
            {
                "request": {"method": request.method, "path": path, **asked},
                "answer": {"status": answer.status_code, **told},
            }
        )
        return httpx.Response(answer.status_code, headers=answer.headers, stream=httpx.ByteStream(answer.content))

    def close(self) -> None:
        self._transport.close()


def _said(content: bytes, headers: httpx.Headers, wanted: Sequence[str]) -> dict[str, Any]:
    kept: dict[str, Any] = {"headers": {name: headers[name] for name in wanted if name in headers}}
    if headers.get("content-type") == MEDIA_TYPE:
        document, blobs = unpack(content)
        kept |= {"json": json.loads(document), "blobs": [base64.b64encode(blob).decode() for blob in blobs]}
    elif "json" in headers.get("content-type", ""):
        kept["json"] = json.loads(content)
    elif content:
        kept["bytes"] = base64.b64encode(content).decode()
    return kept


def _body(said: dict[str, Any]) -> bytes:
    """The body that `_said` kept."""
    if "blobs" in said:
        return pack(json.dumps(said["json"]), [base64.b64decode(blob) for blob in said["blobs"]])
    return json.dumps(said["json"]).encode() if "json" in said else base64.b64decode(said.get("bytes", ""))


def through(client: Client, transport: httpx.BaseTransport) -> Client:
    """The client, whose requests go this way from here on."""
    client._transport._http._transport.close()
    client._transport._http._transport = transport
    return client


def begin(live: LiveCoordinator) -> Callable[[], object]:
    """Starts the run that the conversation is about."""
    return lambda: start_run(
        live.client(),
        MODEL,
        START,
        rounds=5,
        seed=1,
        cohort=Cohort(size=1, max_task_attempts=5),
        evaluation=Evaluation(dataset="test", every=5),
    )


def record() -> list[Exchange]:
    recorder = Recorder()
    with tempfile.TemporaryDirectory() as folder, LiveCoordinator(Path(folder)) as live:
        conversation(through(live.client("site", "a"), recorder), begin(live))
    return recorder.exchanges


def recordings() -> list[Path]:
    return sorted(FOLDER.glob("*.jsonl"))


def read(path: Path) -> tuple[dict[str, Any], list[Exchange]]:
    """Whose it is, and what was said."""
    whose, *exchanges = map(json.loads, path.read_text().splitlines())
    return whose, exchanges


# ---------------------------------------------------------------- replaying


@dataclass
class Replay:
    """A recorded worker before a present coordinator. What the recorded one was given, ids and lease tokens,
    it finds in the present answers."""

    http: httpx.Client
    texts: dict[str, str] = field(default_factory=dict)
    tokens: dict[int, int] = field(default_factory=dict)

    def step(self, exchange: Exchange) -> list[str]:
        """Says again what was said; returns what the recorded worker would miss in the answer."""
        asked, told = exchange["request"], exchange["answer"]
        body = _body({**asked, "json": self._present(asked["json"])} if "json" in asked else asked)
        path = self._present(asked["path"])
        answer = self.http.request(asked["method"], path, headers=asked["headers"], content=body)
        here = f"{asked['method']} {asked['path']}"
        if answer.status_code != told["status"]:
            return [f"{here}: {answer.status_code} in place of {told['status']}: {answer.text[:500]}"]
        missed = [f"{here}: no {name}" for name in told["headers"] if name not in answer.headers]
        if location := told["headers"].get("location"):
            self._learn(location.rpartition("/")[2], answer.headers["location"].rpartition("/")[2])
        if "json" in told:
            present = _said(answer.content, answer.headers, ())["json"]
            self._compare(told["json"], present)
            missed += [f"{here}: {what}" for what in lacking(told["json"], present)]
        elif "bytes" in told:
            missed += [f"{here}: {what}" for what in self._misread(asked, base64.b64decode(told["bytes"]), answer)]
        return missed

    def _misread(self, asked: Exchange, before: bytes, answer: httpx.Response) -> Iterator[str]:
        if (named := re.search(r"/v1/blobs/(sha256:[0-9a-f]{64})", self._present(asked["path"]))) is not None:
            if f"sha256:{hashlib.sha256(answer.content).hexdigest()}" != named[1]:
                yield "not the bytes of this digest"
        elif not self.texts.keys() & set(asked.get("json", {}).get("digests", ())) and answer.content != before:
            yield "other bytes of the same blobs"

    def _present(self, recorded: Any) -> Any:
        """What is to be said in place of what was."""
        if isinstance(recorded, dict):
            return {
                name: self.tokens.get(value, value) if name == "token" else self._present(value)
                for name, value in recorded.items()
            }
        if isinstance(recorded, list):
            return [self._present(value) for value in recorded]
        if isinstance(recorded, str):
            for before, now in self.texts.items():
                recorded = recorded.replace(before, now)
        return recorded

    def _compare(self, recorded: Any, present: Any) -> None:
        if isinstance(recorded, dict) and isinstance(present, dict):
            for name in recorded.keys() & present.keys():
                if name == "token":
                    self.tokens[recorded[name]] = present[name]
                else:
                    self._compare(recorded[name], present[name])
        elif isinstance(recorded, list) and isinstance(present, list):
            for before, now in zip(recorded, present, strict=False):
                self._compare(before, now)
        elif isinstance(recorded, str) and isinstance(present, str):
            self._learn(recorded, present)

    def _learn(self, before: str, now: str) -> None:
        # Ids and digests; no other text is so long.
        if before != now and len(before) >= 20:
            self.texts[before] = now


def lacking(recorded: Any, present: Any, at: str = "") -> list[str]:
    """What an answer has no longer, or has of another kind; and what is new where that may not be passed over."""
    if recorded is None:
        return []
    if _kind(recorded) != _kind(present):
        return [f"{at or '/'} is {_kind(present)} in place of {_kind(recorded)}"]
    if isinstance(recorded, dict):
        found = [f"{at}/{name} is missing" for name in recorded if name not in present]
        if at.startswith(STRICT):
            found += [f"{at}/{name} is new, and read strictly" for name in present if name not in recorded]
        both = [name for name in recorded if name in present]
        return found + [what for name in both for what in lacking(recorded[name], present[name], f"{at}/{name}")]
    if isinstance(recorded, list) and recorded:
        if not present:
            return [f"{at} is empty"]
        return lacking(recorded[0], present[0], f"{at}/0")
    return []


def _kind(value: Any) -> str:
    for kind, name in ((bool, "a boolean"), (int | float, "a number"), (str, "a text"), (list, "a list")):
        if isinstance(value, kind):
            return name
    return "null" if value is None else "an object"


class Recorded(httpx.BaseTransport):
    """A recorded coordinator before a present worker: it gives the answers that it gave."""

    def __init__(self, exchanges: Sequence[Exchange]) -> None:
        self._left = list(exchanges)
        self.misses: list[str] = []
        """What the recorded coordinator would miss in what it is asked."""

    def handle_request(self, request: httpx.Request) -> httpx.Response:
        exchange = self._left.pop(0)
        asked, told = exchange["request"], exchange["answer"]
        here = f"{request.method} {request.url.raw_path.decode()}"
        if here != f"{asked['method']} {asked['path']}":
            self.misses.append(f"{here} in place of {asked['method']} {asked['path']}")
        self.misses += [f"{here}: no {name}" for name in asked["headers"] if name not in request.headers]
        if "json" in asked:
            present = _said(request.read(), request.headers, ())["json"]
            self.misses += [f"{here}: {what}" for what in lacking(asked["json"], present)]
        content = _body(told)
        headers = {**told["headers"], "content-length": str(len(content))}
        return httpx.Response(told["status"], headers=headers, stream=httpx.ByteStream(content))

    @property
    def over(self) -> bool:
        return not self._left


def main() -> None:
    exchanges = record()
    FOLDER.mkdir(exist_ok=True)
    path = FOLDER / f"{VERSION}.jsonl"
    lines = [{"version": VERSION, "protocol": PROTOCOL}, *exchanges]
    path.write_text("".join(json.dumps(line, separators=(",", ":")) + "\n" for line in lines))
    print(f"{path}: {len(exchanges)} exchanges, {path.stat().st_size} bytes")


if __name__ == "__main__":
    sys.exit(main())
