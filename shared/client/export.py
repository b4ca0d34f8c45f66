"""Export of a run's version to a file, or to a folder that transformers' `from_pretrained` loads."""

import os
import shutil
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO, Protocol
from uuid import uuid4

from tessera.shared.api.runs import Run
from tessera.shared.methods.base import State
from tessera.shared.model.spec import WEIGHTS_FILE, Model
from tessera.shared.problems import Invalid
from tessera.shared.rounds.export import Export, small_files
from tessera.shared.updates.base_folder import base_blocks, write_with_base
from tessera.shared.updates.model_folder import CONFIG_FILE

WEIGHTS = {".safetensors", ".bin", ".pt", ".pth", ".h5", ".msgpack", ".gguf"}
"""Endings of files with weights. Beside a version they would belong to another one."""
OTHER_FORMATS = {".onnx", ".ckpt", ".pkl", ".npz", ".tflite", ".zip", ".tar", ".gz"}

Progress = Callable[[int], None]


class Exports(Protocol):
    """A source of a run's versions: a `Client`, or a simulation's result."""

    def model(self, digest: str) -> Model: ...
    def read_blob(self, digest: str, max_bytes: int = ...) -> bytes: ...
    def export(
        self, run_id: str, file: BinaryIO, number: int | None = None, progress: Progress | None = None
    ) -> None: ...


def export_file(
    source: Exports, run: Run, out: Path, number: int | None, progress: Progress, base: Path | None = None
) -> None:
    """Write a version (the latest if `number` is None) as one safetensors file, replacing an existing file.

    `base` is the folder of a model's external base. Raises Invalid if it is missing or another one.
    """
    model = source.model(run.spec.model)
    with in_place_of(out) as partial:
        _export(source, run, model, partial, number, progress, base)
        partial.replace(out)


def export_folder(
    source: Exports,
    run: Run,
    out: Path,
    number: int | None,
    progress: Progress,
    like: Path | None = None,
    base: Path | None = None,
) -> None:
    """Write a model folder from which a run can start: a version's weights, config, tokenizer and table of blocks.

    Other files of the folder `like` are copied too; `base` is as in `export_file`. Raises Invalid if `out` exists,
    and for unsafe settings of the model, its tokenizer or image processor.
    """
    require_new_folder(out)
    model = source.model(run.spec.model)
    with in_place_of(out) as partial:
        write_small_files(source, model.model_copy(update={"external": {}}), partial)
        _export(source, run, model, partial / WEIGHTS_FILE, number, progress, base)
        if like:
            copy_rest(like, partial)
        partial.rename(out)


def write_small_files(source: Exports, model: Model, folder: Path) -> None:
    """Create a model folder without its weights. Raises Invalid as `small_files` does."""
    folder.mkdir()
    for name, raw in small_files(model, source.read_blob):
        (folder / name).write_bytes(raw)


def require_new_folder(out: Path) -> None:
    """Raise Invalid if a model folder of this name would replace something, or be taken for a file."""
    if out.exists():
        raise Invalid(f"{out} exists already", remedy="Remove it or choose another name.")
    if out.suffix in WEIGHTS | OTHER_FORMATS:
        raise Invalid(
            f"{out} is a file's name, and a model folder would be written",
            remedy=f"Choose a name without {out.suffix}; `tessera run export` writes one file if the name ends in "
            ".safetensors and --model is left out.",
        )


def _export(
    source: Exports,
    run: Run,
    model: Model,
    file: Path,
    number: int | None,
    progress: Progress,
    base: Path | None,
) -> None:
    if bool(model.external) == (base is None):
        raise Invalid(
            "the run's base is external: the coordinator has its digests alone"
            if model.external
            else "the run has no external base",
            remedy="Name the folder with its weights: --base FOLDER." if model.external else "Leave --base out.",
        )
    if base is None:
        with file.open("wb") as opened:
            fetch_stored(source, run, model, opened, number, progress)
        return
    # Verified before anything is fetched.
    found = base_blocks(base, model)
    with tempfile.TemporaryFile(dir=file.parent) as trained, file.open("wb") as opened:
        fetch_stored(source, run, model, trained, number, progress)
        write_with_base(opened, trained, model, found)


def fetch_stored(
    source: Exports, run: Run, model: Model, file: BinaryIO, number: int | None, progress: Progress
) -> None:
    """Write a version's own tensors, without those of an external base. Raises Invalid for more bytes than they
    have."""
    most, received = Export(State(round=0, model={}), model).nbytes, 0

    def bounded(count: int) -> None:
        nonlocal received
        received += count
        if received > most:
            raise Invalid(
                f"the export is longer than the {most} bytes of the model's table",
                remedy="Do not trust this coordinator, or what stands between: compare the run's model document.",
            )
        progress(count)

    source.export(run.id, file, number, bounded)


def copy_rest(like: Path, folder: Path) -> None:
    """Copy what a model folder has besides a model, such as a tokenizer, to a new one. Raises Invalid."""
    if not (like / CONFIG_FILE).is_file():
        raise Invalid(f"{like} is not a model folder: it has no {CONFIG_FILE}", remedy="Name the run's model folder.")
    for file in sorted(like.iterdir()):
        if file.is_file() and file.suffix not in WEIGHTS and not (folder / file.name).exists():
            shutil.copyfile(file, folder / file.name)


@contextmanager
def in_place_of(out: Path) -> Iterator[Path]:
    """Yield a temporary path beside `out`, for the caller to write and rename; remove it at the end if it remains."""
    partial = out.parent / f".{out.name}.{uuid4().hex}.partial"
    try:
        yield partial
    except OSError as fault:
        # pyarrow's own text repeats the number and names the temporary file.
        reason = os.strerror(fault.errno) if fault.errno else str(fault)
        remedy = "Choose another path." if out.parent.is_dir() else f"Create the folder {out.parent}."
        raise Invalid(f"{out} cannot be written: {reason}", remedy=remedy) from fault
    finally:
        if partial.is_dir():
            shutil.rmtree(partial)
        else:
            partial.unlink(missing_ok=True)
