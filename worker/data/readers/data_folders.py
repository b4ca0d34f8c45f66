"""The files of a folder of data, without those that systems, file servers and programs leave beside data."""

import os
import re
from collections import Counter
from collections.abc import Iterator
from fnmatch import translate
from pathlib import Path

from tessera.worker.errors import DataError

FOREIGN = (
    # AppleDouble files of macOS on other file systems, and the folders of its servers; netatalk writes :2e for a dot.
    *("._*", ":2e*", "__macosx", "icon\r", "network trash folder", "temporary items", "thevolumesettingsfolder"),
    # Windows: recycle bins, indexes, replication and repair.
    *("$recycle.bin", "recycler", "recycled", "recycle bin", "system volume information", "dfsrprivate"),
    *("found.[0-9][0-9][0-9]", "desktop.ini", "thumbs.db*", "ehthumbs*.db", "~$*"),
    *("albumartsmall.jpg", "albumart_{*}*.jpg"),
    # Network storage: thumbnails, recycle bins and snapshots.
    *("@eadir", "synophoto_thumb_*", "@tmp", "@sharebin", "#recycle", "#snapshot", "~snapshot"),
    *("@recycle", "@recently-snapshot", "@__thumb", "@transcode", "trashbox"),
    # Other file systems, archives, and programs that synchronise folders or browse photos.
    *("lost+found", "paxheader", "paxheaders*", "@paxheader", "@longlink", "pax_global_header"),
    *("_gsdata_", "picasa.ini", "zbthumbnail.info", "pspbrwse.jbf", "__pycache__"),
)
"""Patterns of such names, in lower case. Names that begin with a dot are foreign, too."""
ONE_FOR_EACH = ("._*", ":2e*", "synophoto_thumb_*")
"""Patterns that match a file for each image."""
_FOREIGN = re.compile("|".join(f"({translate(pattern)})" for pattern in FOREIGN))


def foreign(name: str) -> str | None:
    """Return the name under which to count a foreign file or folder, its own or a pattern; None if it may be data."""
    found = _FOREIGN.match(name.lower())
    pattern = FOREIGN[(found.lastindex or 1) - 1] if found else None
    return pattern if pattern in ONE_FOR_EACH else name if pattern or name[0] == "." else None


def names_below(folder: Path) -> tuple[list[str], Counter[str]]:
    """Return the paths, from the folder, of all files below it, and the number of foreign files and folders by name.

    Follows links, except one to a folder that contains it. A link to nothing counts as a file, which cannot be read.
    Raises DataError for a folder that cannot be read.
    """
    passed_over = Counter[str]()

    def data(names: list[str]) -> Iterator[str]:
        for name in names:
            if label := foreign(name):
                passed_over[label] += 1
            else:
                yield name

    found = []
    for at, folders, names in os.walk(folder, followlinks=True, onerror=_refuse):
        here = Path(at)
        above = here.resolve().is_relative_to
        folders[:] = [name for name in data(folders) if not above((here / name).resolve())]
        below = "" if here == folder else f"{here.relative_to(folder)}{os.sep}"
        for name in data(names):
            path = f"{at}{os.sep}{name}"
            if os.path.isfile(path) or os.path.islink(path):  # noqa: PTH113, PTH114  (a path for each takes ten times as long)
                found.append(below + name)
    return found, passed_over


def _refuse(fault: OSError) -> None:
    raise DataError(f"folder: {fault.filename} cannot be read: {fault.strerror}") from fault
