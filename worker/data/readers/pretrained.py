"""Loading of transformers' tokenizers and image processors, from a local folder or from the hub by name."""

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

from tessera.shared.near_names import absent
from tessera.worker.errors import DataError, in_short
from tessera.worker.model.pretrained import require_unmarked

HUB_NAME = re.compile(r"(?P<name>\w[\w.-]*(/[\w.-]+)?)(@(?P<revision>[\w./-]+))?")


def load_pretrained(option: str, source: str, load: Callable[..., Any], **more: object) -> Any:
    """Return the result of `load`, a `from_pretrained`, for a local folder or a name on the hub with `@revision`.

    Never runs code that the source contains. If the folder exists, the hub is not accessed. Raises DataError.
    """
    folder = Path(source).expanduser()
    hub = HUB_NAME.fullmatch(source)
    if folder.is_dir():
        try:
            for file in sorted(folder.glob("*.json")):
                require_unmarked(file)
        except (ValueError, OSError) as fault:
            raise DataError(f"{option}: {fault}") from fault
        name, more = str(folder), {**more, "local_files_only": True}
    elif hub and not ("/" in source and folder.parent.is_dir()):
        # It logs each of several attempts at WARNING.
        logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
        name, more = hub["name"], {**more, "revision": hub["revision"] or "main"}
    else:
        raise DataError(f"{option}: {absent(folder, 'and it is not a valid name on the hub')}")
    try:
        return load(name, trust_remote_code=False, **more)
    except (OSError, ValueError, LookupError, ImportError, TypeError, AttributeError) as fault:
        remedy = (
            "save it there with `save_pretrained`, or name the folder that has it"
            if folder.is_dir()
            else "the hub has no such name or cannot be reached: name a local folder"
        )
        needs = f" ({in_short(fault)})" if isinstance(fault, ImportError) else ""
        raise DataError(f"{option}: {source} cannot be loaded{needs}; {remedy}") from fault
