"""The running installation: its version, and the command that adds an extra to it."""

import json
import os
import re
import shlex
import shutil
import sys
from importlib.metadata import PackageNotFoundError, distributions, version
from pathlib import Path
from urllib.parse import unquote, urlsplit

NAME = "tessera-fl"
"""The distribution's name. The package index has another project as `tessera`, whose version is higher."""

_SOURCE = Path(__file__).resolve().parents[1]

try:
    VERSION = version(NAME)
except PackageNotFoundError:
    _IS_CHECKOUT = (_SOURCE / "pyproject.toml").is_file()
    _REMEDY = f"pip install -e {shlex.quote(str(_SOURCE))}" if _IS_CHECKOUT else "install its wheel with pip"
    raise ImportError(
        f"Tessera is imported from {_SOURCE}, but {NAME} is not installed in this environment: {_REMEDY}"
    ) from None


def numbers_of(version: str) -> tuple[int, ...]:
    """Return the numbers of a version, for comparisons; none of a worker that does not say its version."""
    return tuple(map(int, re.findall(r"[0-9]+", version)[:3]))


def compared(version: str, own: str = VERSION) -> str:
    """Return the difference of a worker's version from the coordinator's: "older", "newer", "other build" (of the
    same numbers) or "not stated"; empty if they are equal."""
    if version in ("", own):
        return "" if version else "not stated"
    theirs, ours = numbers_of(version), numbers_of(own)
    return "other build" if theirs == ours else "older" if theirs < ours else "newer"


def install_line(extra: str = "", *, elsewhere: bool = False) -> str:
    """Return the shell command that adds an extra to this installation, or its own missing requirements.

    `elsewhere`: for the installation of another machine, about which nothing is known.
    """
    wanted = f"[{extra}]" if extra else ""
    # Installed already, so that pip takes nothing but the extra's packages from an index.
    requirement = shlex.quote(NAME + wanted)
    if elsewhere:
        return f"pip install {requirement}"
    folder, is_editable = _checkout()
    words = [_pip(), "install"]
    if folder and (constraints := folder / "constraints.txt").is_file():
        words += ["-c", shlex.quote(str(constraints))]
    # The extras of an editable installation are those of the checkout as it is now.
    words += ["-e", shlex.quote(f"{folder}{wanted}")] if is_editable else [requirement]
    return " ".join(words)


def _pip() -> str:
    """Return the command that runs this environment's pip: a service's environment is not on its user's PATH."""
    beside = Path(sys.executable).parent
    found = shutil.which("pip")
    return "pip" if found and Path(found).parent == beside else f"{shlex.quote(os.fspath(sys.executable))} -m pip"


def _checkout() -> tuple[Path | None, bool]:
    """Return the folder of source that this was installed from, if it is still there; and whether it is editable."""
    # A build leaves another description of the distribution in a checkout, which lacks the origin.
    found = (each.read_text("direct_url.json") for each in distributions(name=NAME))
    origin = json.loads(next(filter(None, found), "{}"))
    if "dir_info" not in origin:
        return None, False
    folder = Path(unquote(urlsplit(origin["url"]).path))
    if not (folder / "pyproject.toml").is_file():
        return None, False
    return folder, origin["dir_info"].get("editable", False)
