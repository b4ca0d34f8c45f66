"""Reading of the files of a site's own training script: bounded before they are parsed, and following no link."""

import os
import stat
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import BinaryIO

import structlog
from pydantic import ValidationError

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import Array
from tessera.shared.updates.safetensors_file import MAX_HEADER_BYTES, ContainerError, TensorEntry, read_header
from tessera.worker.errors import TaskFailure
from tessera.worker.executor.folder import read_arrays
from tessera.worker.executor.script_folder import BLOCKS, FIGURES, PROGRESS, RESULT, ScriptFigures, ScriptProgress
from tessera.worker.task.fetch import require_finite

MAX_DOCUMENT_BYTES = 1 << 14


class _NoFile(ValueError):
    """A path that is no regular file of its own, or one with too many bytes."""


def read_progress(folder: Path) -> ScriptProgress | None:
    """Return a script's progress; None if it wrote none that can be read."""
    try:
        return ScriptProgress.model_validate_json(_small(folder / PROGRESS))
    except (OSError, ValueError):
        return None


def read_result(folder: Path, blocks: Sequence[Block]) -> tuple[dict[str, Array], dict[str, float]]:
    """Return the values of these blocks, and the figures, in the result of a script that has ended.

    Raises TaskFailure for anything else than these blocks in their shapes and dtypes, and for values that are not
    finite. Its text names only blocks of the plan: the site's log has the rest.
    """
    # Beside the folder, which a container of the script may still hold.
    copy = folder.with_name(f"{folder.name}.safetensors")
    try:
        return _read_result(folder, blocks, copy)
    finally:
        # Its pages stay.
        copy.unlink(missing_ok=True)


def _read_result(folder: Path, blocks: Sequence[Block], copy: Path) -> tuple[dict[str, Array], dict[str, float]]:
    try:
        figures = ScriptFigures.model_validate_json(_small(folder / RESULT / FIGURES))
        # A process that the script left behind may still write, which does not change the copy.
        _copy(folder / RESULT / BLOCKS, copy, sum(block.nbytes for block in blocks) + MAX_HEADER_BYTES)
        with copy.open("rb") as file:
            entries = read_header(file, copy.stat().st_size, max_tensors=len(blocks) + 1).entries
    except ValidationError as fault:
        raise refusal(f"{FIGURES} does not hold figures", fault) from None
    except ContainerError as fault:
        raise refusal(f"{BLOCKS} is no safetensors file of {len(blocks)} tensors", fault) from None
    except (OSError, _NoFile) as fault:
        raise refusal("its files are missing, too large, or links", fault) from None
    _require_planned(entries, {block.name: block for block in blocks})
    arrays = read_arrays(copy)
    for name, values in arrays.items():
        try:
            require_finite(name, values)
        except TaskFailure as fault:
            raise TaskFailure("script-not-finite", f"after the site's own script {fault}") from None
    return arrays, figures.metrics


def _require_planned(entries: Mapping[str, TensorEntry], table: Mapping[str, Block]) -> None:
    """Raise TaskFailure unless a file's tensors are the blocks of a table."""
    if unplanned := sorted(entries.keys() - table.keys()):
        raise refusal(f"it has {len(unplanned)} tensors that are no blocks which the plan sends", unplanned[:8])
    if lacking := sorted(table.keys() - entries.keys()):
        raise refusal(f"it lacks {len(lacking)} of {len(table)} blocks that the plan sends, such as {lacking[0]}")
    for name, block in table.items():
        if (entries[name].dtype, entries[name].shape) != (block.dtype, block.shape):
            found, wanted = (f"{each.dtype} {list(each.shape)}" for each in (entries[name], block))
            raise refusal(f"{name} is {found}, and the plan's is {wanted}")


def refusal(what: str, cause: object = None) -> TaskFailure:
    """Return the failure of a result. Its cause, which may quote the script, is for the site's log alone."""
    structlog.get_logger("worker").error("script-result", detail=what, cause=str(cause)[:1000] if cause else None)
    return TaskFailure("script-result", f"the result of the site's own script is refused: {what}")


def _small(path: Path) -> bytes:
    with _opened(path, MAX_DOCUMENT_BYTES) as file:
        return file.read(MAX_DOCUMENT_BYTES)


def _copy(path: Path, copy: Path, most: int) -> None:
    with _opened(path, most) as file, copy.open("xb") as own:
        while piece := file.read(1 << 20):
            if (most := most - len(piece)) < 0:
                raise _NoFile(f"{path.name} has become larger")
            own.write(piece)


def _opened(path: Path, most: int) -> BinaryIO:
    """Open a regular file of at most this many bytes, in a folder that is no link. Raises OSError and _NoFile."""
    if path.parent.is_symlink():
        raise _NoFile(f"{path.parent.name} is a link")
    # Opening a named pipe would wait for a writer.
    file = os.fdopen(os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK), "rb")
    about = os.fstat(file.fileno())
    if not stat.S_ISREG(about.st_mode) or about.st_nlink > 1 or about.st_size > most:
        file.close()
        raise _NoFile(f"{path.name} is no regular file with one name and at most {most} bytes")
    return file
