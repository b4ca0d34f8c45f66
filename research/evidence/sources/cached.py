"""Folders that are made once from inputs, and again when an input changes."""

from __future__ import annotations

import json
import shutil
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

INPUTS = "inputs.json"


def made(out: Path, inputs: Mapping[str, object], make: Callable[[Path], object]) -> bool:
    """Call `make` with a new folder and move that to `out`, unless `out` was made from equal inputs.

    Return True if it was made now. `inputs` are values of JSON, such as digests of files and settings; they are kept
    in the folder. A folder is whole or absent, also after a kill.
    """
    written = json.dumps(dict(inputs), sort_keys=True, indent=1)
    kept = out / INPUTS
    if kept.is_file() and kept.read_text(encoding="utf-8") == written:
        return False
    out.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=out.parent) as name:
        folder = Path(name) / "made"
        folder.mkdir()
        make(folder)
        (folder / INPUTS).write_text(written, encoding="utf-8")
        if out.exists():
            shutil.rmtree(out)
        folder.rename(out)
    return True
