"""A small model that no one builds, and workers that do what a test tells them: real HTTP, real update files."""

from __future__ import annotations

import io
import json
import uuid
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

import numpy as np
from safetensors.numpy import load

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Run, RunSpec
from tessera.shared.api.tasks import AdvertisedPolicy, Claim, EvaluationResult, Failure, Submission, Task, TaskView
from tessera.shared.api.versions import Manifest
from tessera.shared.client.client import Client
from tessera.shared.methods.base import MethodSpec
from tessera.shared.model.blocks import Block, TensorSlice
from tessera.shared.model.dataset_schema import DatasetSchema
from tessera.shared.model.spec import BLOCKS_FILE, WEIGHTS_FILE, Model
from tessera.shared.schema import canonical
from tessera.shared.secure_sums.messages import SiteKeys
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import ArrayTensor, as_bytes, digest_of, from_bytes
from tessera.shared.updates import safetensors_file
from tessera.shared.updates.update_file import TrainedBlock, write_update

Arrays = Mapping[str, np.ndarray]

HOLDING: WeakKeyDictionary[Client, Callable[[Iterable[bytes]], Iterable[str]]] = WeakKeyDictionary()
"""How a coordinator of this process takes many blobs at once and returns their digests, by its clients."""

_FETCHED: dict[str, bytes] = {}
"""Blobs by their digest: what has the same is the same, whichever coordinator it came from."""


def small_model(width: int = 4) -> Model:
    """One attention layer, its query, key and value fused, with an MLP and a head."""
    fused = [
        Block(
            tensor="layer.0.qkv.weight",
            part=TensorSlice(label=role, axis=0, spans=((i * width, (i + 1) * width),)),
            role=role,
            layer=0,
            shape=(width, width),
            dtype="F32",
        )
        for i, role in enumerate(("query", "key", "value"))
    ]
    rest = [
        Block(tensor="layer.0.output.weight", role="output", layer=0, shape=(width, width), dtype="F32"),
        Block(tensor="layer.0.mlp.weight", role="mlp", layer=0, shape=(width, 4 * width), dtype="F32"),
        Block(tensor="head.weight", role="head", shape=(2, width), dtype="F32"),
    ]
    return Model(config={"model_type": "bert"}, head="text-classification", blocks=(*fused, *rest))


def values(model: Model, seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {b.name: rng.normal(size=b.shape).astype(NUMPY_DTYPES[b.dtype]) for b in model.blocks}


def whole_tensors(model: Model) -> dict[str, np.ndarray]:
    """The small model's tensors, its fused matrix whole."""
    blocks = values(model)
    fused = np.concatenate([blocks.pop(f"layer.0.qkv.weight#{role}") for role in ("query", "key", "value")])
    return {"layer.0.qkv.weight": fused, **blocks}


def model_folder(folder: Path, model: Model) -> Path:
    """The small model as `tessera model init` writes one."""
    folder.mkdir()
    (folder / BLOCKS_FILE).write_text(model.model_dump_json())
    (folder / "config.json").write_text(json.dumps(model.config))
    (folder / "tokenizer.json").write_text("{}")
    tensors = whole_tensors(model)
    with (folder / WEIGHTS_FILE).open("wb") as file:
        layout = [(name, "F32", array.shape) for name, array in tensors.items()]
        safetensors_file.write(file, layout, [as_bytes(array) for array in tensors.values()])
    return folder


def start_run(client: Client, model: Model, start: Arrays, **spec: Any) -> Run:
    """Uploads a model and its first version, and starts a run on it."""
    hold = HOLDING.get(client) or (lambda raw: map(client.put_bytes, raw))
    blocks = dict(zip(start, hold(bytes(as_bytes(array)) for array in start.values()), strict=True))
    model_digest = client.put_bytes(canonical(model))
    version = client.put_bytes(canonical(Manifest(blocks=blocks)))
    wanted = {"name": "test", "method": MethodSpec(name="fedavg"), "dataset": "data", "rounds": 1, **spec}
    return client.create_run(RunSpec(model=model_digest, version=version, **wanted))


def exported(client: Client, run: Run) -> dict[str, np.ndarray]:
    """The tensors of a run's latest version."""
    file = io.BytesIO()
    client.export(run.id, file)
    return load(file.getvalue())


def head_of(client: Client, run: Run) -> np.ndarray:
    return exported(client, run)["head.weight"]


@dataclass
class ScriptedWorker:
    """A worker that trains by adding a constant."""

    client: Client
    name: str = "w"
    kinds: tuple[Any, ...] = ("train",)
    datasets: dict[str, int] = field(default_factory=lambda: {"data": 10})
    held_out: dict[str, int] = field(default_factory=dict)
    methods: tuple[str, ...] = ("fedavg", "fedfrozen")
    schemas: dict[str, DatasetSchema] = field(default_factory=dict)
    advertised_policy: AdvertisedPolicy | None = None
    withheld: dict[str, str] = field(default_factory=dict)
    resources: dict[Any, float] = field(default_factory=dict)
    version: str = ""
    site_keys: SiteKeys | None = None
    instance: str = field(default_factory=lambda: uuid.uuid4().hex)
    state_id: str | None = None
    started_at: float = 0.0
    forgets: bool = False
    """Fetches each blob every time, for tests of which requests are made."""

    def claim(self, wait_seconds: int = 5) -> Task | None:
        claim = Claim(
            worker=self.name,
            instance=self.instance,
            state_id=self.state_id,
            started_at=self.started_at,
            kinds=self.kinds,
            datasets=self.datasets,
            held_out=self.held_out,
            schemas=self.schemas,
            methods=self.methods,
            advertised_policy=self.advertised_policy,
            withheld=self.withheld,
            resources=self.resources,
            version=self.version,
            site_keys=self.site_keys,
        )
        return self.client.claim(claim, wait_seconds)

    def enrol(self) -> Self:
        """Makes itself known. A task that it gets by the way, `take` gets again."""
        self.claim(0)
        return self

    def take(self) -> Task:
        """A task, for which it asks again for as long as a busy machine may need to offer one."""
        for _ in range(12):
            if task := self.claim():
                return task
        raise AssertionError(f"no task was offered to {self.name}")

    def fetch(self, task: Task) -> dict[str, np.ndarray]:
        blocks = task.plan.fetch.resolve(self.model_of(task).blocks)
        manifest = Manifest.read(self.read(task.version.digest), self.read)
        return {b.name: from_bytes(self.read(manifest.blocks[b.name]), b.dtype).reshape(b.shape) for b in blocks}

    def model_of(self, task: Task) -> Model:
        return Model.model_validate_json(self.read(task.model))

    def read(self, digest: str) -> bytes:
        if self.forgets:
            return self.client.read_blob(digest)
        if digest not in _FETCHED:
            _FETCHED[digest] = self.client.read_blob(digest)
        return _FETCHED[digest]

    def upload(self, task: Task, changed: Arrays) -> str:
        """Writes these blocks as an update, asked for or not, uploads it and returns its digest."""
        model, base = self.model_of(task), self.fetch(task)
        changes = [
            TrainedBlock(model.by_name[name], ArrayTensor(array, model.by_name[name].dtype), ArrayTensor(base[name]))
            for name, array in changed.items()
        ]
        file = io.BytesIO()
        write_update(file, task.codec, changes)
        return self.client.put_bytes(file.getvalue())

    def submit(self, task: Task, digest: str, examples: int | None = None, **metrics: float) -> TaskView:
        submission = Submission(
            token=task.token,
            version=task.version.digest,
            update=digest,
            examples=examples or self.datasets[task.dataset],
            metrics=metrics,
        )
        return self.client.submit(task.id, submission)

    def train(self, task: Task, step: float = 1.0, **metrics: float) -> TaskView:
        """Adds `step` to every block that the plan trains, and sends what it asks for, with these numbers."""
        model, base = self.model_of(task), self.fetch(task)
        trained = {b.name for b in task.plan.train.resolve(model.blocks)}
        sent = [b.name for b in task.plan.upload.resolve(model.blocks) if b.name in trained]
        changed = {name: base[name] + np.float32(step) for name in sent}
        return self.submit(task, self.upload(task, changed), **metrics)

    def evaluate(self, task: Task, download_bytes: int = 0, **metrics: float) -> TaskView:
        examples = (self.held_out if task.held_out else self.datasets)[task.dataset]
        evaluated = EvaluationResult(
            token=task.token,
            version=task.version.digest,
            examples=examples,
            metrics=metrics,
            download_bytes=download_bytes,
        )
        return self.client.submit_evaluation(task.id, evaluated)

    def fail(self, task: Task) -> TaskView:
        return self.client.fail(task.id, Failure(token=task.token, code="failed", detail="no"))


__all__ = ["Cohort", "Evaluation", "ScriptedWorker", "small_model", "start_run", "values"]


class Difference(NamedTuple):
    digest: str
    nbytes: int


def difference_of(client: Client, run_id: str, number: int, since: int) -> Difference | None:
    """The difference of a version from an earlier one; None if they are too far apart."""
    file = io.BytesIO()
    comes = client.copy_difference(run_id, number, since, file, below=1 << 30)
    return Difference(digest_of(file.getvalue()), file.tell()) if comes else None
