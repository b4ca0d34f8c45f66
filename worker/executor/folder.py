"""The folder of a task: what the agent hands over, and what the executor returns. No key and no token lies in it.

- `task.json`, `arrays.safetensors`: the task, and the tensors that the site keeps of the run. Blocks lie elsewhere.
- `check.json`, `digests.json`, `subjects.json` or `convert.json`, in place of a task: its model to check, a data set
  whose examples' digests or whose subjects the agent needs, or a published model to convert.
- `progress.json`: the report so far, replaced twice a second.
- `request-N.json`, `answer-N.json`: what the agent has to record before the executor goes on, such as privacy.
- `stop`: the task is no longer wanted.
- `result.json`, `result.safetensors`, or `failure.json`: the end, written last.

Each file appears complete, by a rename. Other users cannot enter the folder. Beside it lies `wake`, a named pipe by
which the executor wakes the agent. Above it and the folder of the processes lie files of later processes, too:
`inventory.json`, the facts about the data sets that the first processes
have loaded, and `dataset-NAME`, a data set that several processes map.
"""

import os
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from pydantic import BaseModel, ConfigDict, JsonValue

from tessera.shared.api.descriptions import TableName
from tessera.shared.api.tasks import Task
from tessera.shared.api.versions import Manifest
from tessera.shared.model.blocks import Block
from tessera.shared.model.preprocessing import FileName
from tessera.shared.model.spec import Head, Model
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import Array, as_bytes
from tessera.shared.updates.safetensors_file import read_header, write
from tessera.worker.compute import Compute, MicroBatch
from tessera.worker.data.dataset_info import DatasetInfo, Inventory
from tessera.worker.governance.policy import Allowance
from tessera.worker.model.layouts import MappingFile
from tessera.worker.state.atomic_files import written_whole
from tessera.worker.state.checkpoints import CheckpointKey
from tessera.worker.task.handover import CheckedModel
from tessera.worker.training.progress import Report

TASK, ARRAYS = "task.json", "arrays.safetensors"
DIGESTS, SUBJECTS, CHECK, CONVERT = "digests.json", "subjects.json", "check.json", "convert.json"
INVENTORY = "inventory.json"
PROGRESS, STOP = "progress.json", "stop"
RESULT, RESULT_ARRAYS, FAILURE = "result.json", "result.safetensors", "failure.json"
WAKE = "wake"
STOPPED = "stopped"
"""The code of a failure that is the end of a task which the agent asked to stop."""

UNEXPLAINED = "failed"
"""The code of failures that only the worker's own log explains."""

D = TypeVar("D", bound=BaseModel)

_DTYPES: dict[str, np.dtype] = {
    **{str(name): dtype for name, dtype in NUMPY_DTYPES.items()},
    "I64": np.dtype("<i8"),
    "I32": np.dtype("<i4"),
    "I16": np.dtype("<i2"),
    "I8": np.dtype("i1"),
    "U8": np.dtype("u1"),
    "BOOL": np.dtype("?"),
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


class Document(BaseModel):
    """A JSON document of a task's folder."""

    model_config = ConfigDict(frozen=True, ser_json_inf_nan="constants")


class Base(Document):
    """The place of a block's values on this machine."""

    path: str
    offset: int = 0


class CheckpointPlace(Document):
    """The place of a task's checkpoint, and the time between two of them."""

    key: CheckpointKey
    path: Path
    seconds: float


class ContextRecord(Document):
    """The context of a task: its model, and the site's rules and settings."""

    task: Task
    """The task, with the site's seed and no lease."""
    document: Model
    mapping: MappingFile | None
    report: Report
    micro_batch: MicroBatch
    compute: Compute
    policy: dict[str, Any]
    """Without its defaults, some of which are no settings that a person can write."""
    allowances: dict[str, Allowance]
    full_precision: bool


class CheckRecord(ContextRecord):
    """A request to check a task's model, before its version is fetched."""

    dataset: DatasetInfo
    names_tied: bool = False
    """True if the agent checks the plan itself, by all names of tied tensors."""
    elsewhere: bool = False
    """True if another machine executes the task."""


class TaskDocument(ContextRecord):
    """One task, after everything that needs the coordinator."""

    manifest: Manifest
    blocks: tuple[Block, ...]
    bases: dict[str, Base]
    four_bits: frozenset[str]
    tokenizer: dict[FileName, str]
    loss_scale: dict[str, float]
    units: int | None
    """The number of protected examples or groups; None if the agent keeps no account of the task's privacy."""
    checkpoint: CheckpointPlace | None
    """The checkpoint to resume from and to write; None if this worker writes none."""
    noise_seed: str | None
    """The noise of a simulation, which protects no data; None has the executor draw a secret key of its own."""


class ConvertRecord(Document):
    """A request for blocks that transformers makes of the tensors of a published model."""

    config: dict[str, JsonValue]
    head: Head
    folder: Path
    blocks: tuple[Block, ...]


class DatasetRecord(Document):
    """A request for the digests of a data set's examples, or for its subjects."""

    dataset: str
    report: Report
    in_sum: bool = False
    """True for a secure sum: the coordinator learns nothing of a failure that may depend on the data."""


DiskError = tuple[int, str, str | None]
"""The error number, text and file of a full or failing disk."""


class InventoryRecord(Document):
    """The facts about the loaded data sets and the devices."""

    inventory: Inventory | None = None
    fingerprints: dict[str, str] = {}
    """The fingerprint of each data set's content, without a key."""
    fault: str | None = None
    """The setting that cannot be used, and the reason."""
    disk: DiskError | None = None
    """The error of the disk that is the reason."""


class ProgressDocument(BaseModel):
    """The progress of a task."""

    report: Report


class AgentCall(Document):
    """A call of a function of the agent, by its name, and the report so far."""

    call: str
    arguments: list[Any]
    report: Report


class CallResult(Document):
    """The result of a call; None if the agent refused it, and has ended the task."""

    value: Any = None
    refused: bool = False


class ResultRecord(Document):
    """The end of a task that succeeded."""

    report: Report
    examples: int = 0
    metrics: dict[str, float] | None = None
    """The metrics of the method's result; None for an evaluation."""
    content: str = ""
    """The digest of a data set's content, if digests were asked for."""
    tables: dict[TableName, int] = {}
    """The number of cells of each table, if subjects were asked for."""
    unknown_tokens: float | None = None
    checked: CheckedModel | None = None
    """The model's block table, if it was to be checked."""


class FailureRecord(Document):
    """The end of a task that failed: its code and text for the coordinator, which quote no data."""

    code: str
    detail: str
    rule: str | None = None
    """The rule of the site's policy that the task violated."""
    hidden: bool = False
    """True if the coordinator may learn nothing of it. `detail` is then the name of its class."""
    disk: DiskError | None = None
    """An error of the disk: no failure of the task."""


def write_document(path: Path, document: BaseModel) -> None:
    """Write a document, which appears when it is complete. Raises OSError."""
    with written_whole(path, durable=False, mode=0o600) as file:
        file.write(document.model_dump_json().encode())


def read_document(kind: type[D], path: Path) -> D:
    return kind.model_validate_json(path.read_bytes())


def wake_agent(home: Path) -> None:
    """Wake the agent from its wait for a document, which it would find a little later by itself."""
    with suppress(OSError):
        descriptor = os.open(home / WAKE, os.O_WRONLY | os.O_NONBLOCK)
        try:
            os.write(descriptor, b"\n")
        finally:
            os.close(descriptor)


def write_arrays(path: Path, arrays: Mapping[str, Array]) -> None:
    """Write arrays, which appear when they are complete, and no file for none. Raises OSError, and ValueError for a
    kind without a name."""
    if not arrays:
        return
    if odd := sorted({str(array.dtype) for array in arrays.values() if array.dtype not in _NAMES}):
        raise ValueError(f"no file can hold arrays of {', '.join(odd)}")
    layout = [(name, _NAMES[array.dtype], array.shape) for name, array in arrays.items()]
    with written_whole(path, durable=False, mode=0o600) as file:
        write(file, layout, (as_bytes(array) if array.size else b"" for array in arrays.values()))


def read_arrays(path: Path) -> dict[str, Array]:
    """Return the arrays of a file, as its pages until they are written to; none if there is no file."""
    if not path.exists():
        return {}
    nbytes = path.stat().st_size
    with path.open("rb") as file:
        header = read_header(file, nbytes)
    whole = np.memmap(path, dtype=np.uint8, mode="c")
    arrays = {}
    for name, entry in header.entries.items():
        start = header.data_start + entry.start
        plain = np.asarray(whole[start : start + entry.nbytes])
        arrays[name] = plain.view(_DTYPES[entry.dtype]).reshape(entry.shape)
    return arrays


def dataset_file(home: Path, name: str) -> Path:
    """Return the file of a data set that the processes with the folder `home`, and later ones, map."""
    return home.parent / f"dataset-{name}"


def under(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    return {f"{prefix}/{name}": array for name, array in arrays.items()}


def below(prefix: str, arrays: Mapping[str, Array]) -> dict[str, Array]:
    start = f"{prefix}/"
    return {name.removeprefix(start): array for name, array in arrays.items() if name.startswith(start)}
