"""Data sets in files of their own, as a site has them whose data nobody divides."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import save_file

from tessera.worker.data.partition.division import key_of_seed
from tessera.worker.data.partition.schemes import Iid
from tessera.worker.data.registry import load

KEY = key_of_seed(0)


def eighth_of_digits(folder: Path, **more: Any) -> dict[str, Any]:
    """The settings of a data set of 180 of the digits, in a file under `folder`."""
    return some_digits(folder, 8, 0, **more)


def some_digits(folder: Path, count: int, index: int, **more: Any) -> dict[str, Any]:
    """The same of one of `count` parts."""
    file = folder / f"digits-{index}-of-{count}.safetensors"
    if not file.exists():
        folder.mkdir(parents=True, exist_ok=True)
        save_file(load("digits", {}, part=Iid(scheme="iid", count=count, index=index)).tensors, file)
    return {"kind": "arrays", "file": str(file), **more}


def key_file(folder: Path) -> Path:
    """A key by which always the same examples are held out: of those 180, with a share of 0.2, 33."""
    file = folder / "held-out.key"
    folder.mkdir(parents=True, exist_ok=True)
    file.write_text(KEY.hex())
    return file
