"""The source archive and the wheel, equal bit for bit wherever they are built: `make wheel`.

Times are those of SOURCE_DATE_EPOCH, by default the time of the last commit. Modes and owners depend neither on the
umask nor on the user, and files that git ignores, such as those of an earlier build, are not packed. Other versions
of Python, setuptools or zlib can change the files.
"""

from __future__ import annotations

import argparse
import gzip
import os
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

ROOT = Path(__file__).parents[1]
EPOCH = "SOURCE_DATE_EPOCH"


def epoch() -> int:
    """Return the time to give to all files, in seconds since 1970."""
    return int(os.environ.get(EPOCH) or _git("log", "-1", "--format=%ct"))


def build(out: Path) -> Iterator[Path]:
    """Build both files into a folder, and yield each."""
    os.environ[EPOCH] = str(epoch())
    os.umask(0o022)
    out.mkdir(parents=True, exist_ok=True)
    with TemporaryDirectory() as place:
        folder = Path(place)
        copy_source(folder / "source")
        # The wheel is built from the archive, as it would be from an index.
        yield (archive := _packed(_built("sdist", folder / "source", folder / "dist"), out))
        with tarfile.open(archive) as file:
            file.extractall(folder, filter="tar")
        yield _built("wheel", folder / archive.name.removesuffix(".tar.gz"), out)


def copy_source(to: Path) -> None:
    """Copy what git tracks, and new files that it does not ignore."""
    for name in filter(None, _git("ls-files", "-z", "--cached", "--others", "--exclude-standard").split("\0")):
        source, copy = ROOT / name, to / name
        if source.is_symlink() or source.exists():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(source, copy, follow_symlinks=False)


def _built(kind: str, source: Path, out: Path) -> Path:
    command = [sys.executable, "-m", "build", "--no-isolation", f"--{kind}", "--outdir", str(out), str(source)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)
    (made,) = out.glob("*.whl" if kind == "wheel" else "*.tar.gz")
    return made


def _packed(archive: Path, out: Path) -> Path:
    """Pack a source archive again, with the same times, modes and owners in each build."""
    packed = out / archive.name
    with (
        tarfile.open(archive) as given,
        packed.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch()) as compressed,
        tarfile.open(fileobj=compressed, mode="w", format=tarfile.PAX_FORMAT) as made,
    ):
        for member in sorted(given.getmembers(), key=lambda one: one.name):
            member.mtime, member.mode = epoch(), 0o755 if member.isdir() else 0o644
            member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
            member.pax_headers = {}
            made.addfile(member, given.extractfile(member) if member.isfile() else None)
    return packed


def _git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m release.packages", description="Build the wheel and its source.")
    made.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder; files of these names are replaced")
    for file in build(made.parse_args().out):
        print(f"{sha256(file.read_bytes()).hexdigest()}  {file}")


if __name__ == "__main__":
    main()
