"""Tokenizers and image processors of transformers: from a local folder, or by a name on the hub."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.worker.data.dataset import DataError

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")

MAX_SHOWN = 300


def load_pretrained(option: str, source: str, load: Callable[..., Any], **more: object) -> Any:
    """Return what `load`, a `from_pretrained`, makes of a folder, or else of a name on the hub, perhaps with
    `@revision`.

    Never runs code that comes with it, and looks nowhere else if there is such a folder. Raises DataError.
    """
    folder = Path(source).expanduser()
    hub = HUB_NAME.fullmatch(source)
    where: dict[str, object]
    if folder.is_dir():
        name, where = str(folder), {"local_files_only": True}
    elif hub:
        name, where = hub["name"], {"revision": hub["revision"] or "main"}
    else:
        raise DataError(f"{option}: there is no folder {source}, and no model on the hub has such a name")
    try:
        return load(name, trust_remote_code=False, **where, **more)
    except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError) as fault:
        told = " ".join(str(fault).split())[:MAX_SHOWN]
        raise DataError(f"{option}: {source} cannot be loaded: {told}") from fault
