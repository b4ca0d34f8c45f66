"""The file that a table means by a path: one in another Unicode form, spelt otherwise, or elsewhere."""

from __future__ import annotations

import os
from collections.abc import Callable, Collection, Iterable
from pathlib import Path
from unicodedata import normalize

from tessera.shared.near_names import composed

MAX_FOLDERS = 100
"""Number of folders beside a table in which to look for a file."""


def _folded(name: str) -> str:
    return composed(name).casefold()


def _stem(name: str) -> str:
    return _folded(os.path.splitext(name)[0])  # noqa: PTH122  (a folder's name may end in a dot)


def in_its_form(folder: Path, path: str) -> str:
    """Return the path in the Unicode form that names the file on this disk; unchanged if there is no such file."""
    forms = () if path.isascii() else (path, composed(path), normalize("NFD", path))
    return next((form for form in forms if (folder / form).is_file()), path)


def near_file(folder: Path, name: str, suffixes: Collection[str]) -> tuple[Path, str] | None:
    """Return the file below `folder` that a table there means by `name`, and how the name differs from its path; None
    if there is none. A name may lack one of the suffixes."""
    differences = []
    spelt = name.replace("\\", "/")
    if spelt != name:
        differences.append("has the separators of Windows")
    if spelt.strip() != spelt:
        differences.append("has spaces around it")
    steps = [step for step in spelt.strip().split("/") if step not in ("", ".")]
    if found := _walk(folder, steps, suffixes):
        return found[0], " and ".join([*differences, *found[1]])
    try:
        below = sorted(each.name for each in folder.iterdir() if each.is_dir())[:MAX_FOLDERS]
    except OSError:
        return None
    elsewhere = [*(steps[first:] for first in range(1, len(steps))), *([each, *steps[-1:]] for each in below)]
    found = next(filter(None, (_walk(folder, places, suffixes) for places in elsewhere)), None)
    return (found[0], " and ".join([*differences, "names another folder", *found[1]])) if found else None


def _walk(at: Path, steps: Iterable[str], suffixes: Collection[str]) -> tuple[Path, list[str]] | None:
    """Return the file at the end of these steps, each spelt in any way, and how the steps differ from its path."""
    differences: list[str] = []
    for step in steps:
        found = (step, None) if (at / step).exists() else _alike(at, step, suffixes)
        if found is None:
            return None
        name, difference = found
        differences += [difference] if difference else []
        at /= name
    return (at, list(dict.fromkeys(differences))) if at.is_file() else None


def _alike(at: Path, step: str, suffixes: Collection[str]) -> tuple[str, str] | None:
    """Return the entry of a folder whose name is like `step`, and how `step` differs from it."""
    try:
        names = sorted(os.listdir(at))  # noqa: PTH208  (a path for each takes ten times as long)
    except OSError:
        return None
    complete = [name for name in names if os.path.splitext(name)[1].lower() in suffixes]  # noqa: PTH122
    ways: list[tuple[Callable[[str], str], Callable[[str], str], Collection[str], str]] = [
        (composed, composed, names, "writes its letters in another Unicode form (NFC or NFD)"),
        (_folded, _folded, names, "differs in upper and lower case"),
        (_folded, _stem, complete, "lacks its suffix"),
        (_stem, _stem, complete, "has another suffix"),
    ]
    for of_step, of_name, among, difference in ways:
        if found := next((name for name in among if of_name(name) == of_step(step)), None):
            return found, difference
    return None
