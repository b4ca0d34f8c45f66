"""The versions of all packages, and the hashes of those that a release installs: `make lock`.

`constraints.txt` has the version of each package of each extra, for Python 3.11 and newer on every platform;
development, CI and the locks use it. A lock in deploy/ adds the hash of each file that the package index has. The
lock of an image names all packages that the image installs, and the others what comes on top of an image's lock.

The CPU build of torch, `+cpu`, is not on the package index. Its hashes are those of the wheels in the folder
`--torch-cpu`, and those that the lock has already. A lock without hashes of that build is not written.
"""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from hashlib import sha256
from pathlib import Path

ROOT = Path(__file__).parents[1]
CONSTRAINTS = "constraints.txt"
OLDEST_PYTHON = "3.11"

IMAGES = {
    "coordinator": ("coordinator", "otel"),
    "worker": ("worker", "privacy", "lora", "augmentation", "dicom", "otel"),
}
"""The images, each with the extras that are in it."""
SIGNING = "signing"
"""The extra that can be added to the coordinator."""
CUDA = re.compile(r"cuda-|nvidia-|triton==")
"""The packages of PyPI's torch for GPUs. The CPU build needs none of them."""

Lock = dict[str, str]
"""The lines of each package, by its name and version."""


def lock_file(name: str) -> Path:
    return ROOT / "deploy" / f"requirements-{name}.lock"


def compiled(*options: str) -> str:
    """Return what uv resolves from pyproject.toml, as lines of requirements."""
    command = [sys.executable, "-m", "uv", "pip", "compile", "--quiet", "--universal", "--native-tls"]
    command += ["--python-version", OLDEST_PYTHON, "--no-header", "--no-annotate", "pyproject.toml", *options]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr)
    return done.stdout


def parsed(text: str) -> Lock:
    """Return the packages of a lock."""
    packages = re.findall(r"^[a-z0-9].*(?:\n .*)*\n", text, re.MULTILINE)
    return {re.split(r"[\s;]", package, maxsplit=1)[0]: package for package in packages}


def resolved(extras: tuple[str, ...]) -> Lock:
    """Return what these extras need, with hashes, in the versions of the constraints."""
    wanted = [word for extra in extras for word in ("--extra", extra)]
    return parsed(compiled("--generate-hashes", "--constraint", CONSTRAINTS, *wanted))


def with_cpu_build(lock: Lock, wheels: Path | None) -> Lock:
    """Add the hashes of torch's CPU build. Raises SystemExit if there is none."""
    (name,) = (name for name in lock if name.startswith("torch=="))
    of_index = set(_hashes(lock[name]))
    before = parsed(lock_file("worker").read_text()) if lock_file("worker").exists() else {}
    found = set(_hashes(before.get(name, ""))) - of_index
    for wheel in wheels.glob(f"torch-{name.removeprefix('torch==')}+cpu-*.whl") if wheels else ():
        found.add(sha256(wheel.read_bytes()).hexdigest())
    if not found:
        raise SystemExit(f"{name}: no hash of its CPU build. Name a folder with its wheels: make lock TORCH_CPU=...")
    marker = lock[name].partition(" \\\n")[0]
    hashes = [f"    --hash=sha256:{one}" for one in sorted(of_index | found)]
    return {**lock, name: " \\\n".join([marker, *hashes]) + "\n"}


def _hashes(package: str) -> list[str]:
    return re.findall(r"sha256:([0-9a-f]{64})", package)


def write(name: str, purpose: str, lock: Lock) -> None:
    lock_file(name).write_text(f"# {purpose} Made by `make lock`.\n" + "".join(lock[each] for each in sorted(lock)))
    print(f"{lock_file(name).relative_to(ROOT)}: {len(lock)} packages")


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m release.locks", description="Write constraints.txt and the locks.")
    made.add_argument("--torch-cpu", type=Path, help="a folder with wheels of torch's CPU build")
    made.add_argument("--upgrade", action="store_true", help="take the newest versions; without it, keep those there")
    given = made.parse_args()
    file = ROOT / CONSTRAINTS
    head = "".join(line for line in file.read_text().splitlines(keepends=True) if line.startswith("#"))
    # uv keeps the versions that it finds in that file.
    compiled("--all-extras", "--output-file", CONSTRAINTS, *(["--upgrade"] if given.upgrade else []))
    file.write_text(head + file.read_text())
    images = {image: resolved(extras) for image, extras in IMAGES.items()}
    worker = with_cpu_build(images["worker"], given.torch_cpu)
    cuda = {name: lines for name, lines in worker.items() if CUDA.match(name)}
    write("coordinator", "What the coordinator's image installs.", images["coordinator"])
    write("worker", "What the worker's image installs, with either build of torch.", _less(worker, cuda))
    write("cuda", "What a worker with PyPI's torch, which computes on GPUs, needs on Linux on top.", cuda)
    signing = resolved((*IMAGES["coordinator"], SIGNING))
    write(SIGNING, "What a coordinator that signs dossiers needs on top.", _less(signing, images["coordinator"]))


def _less(lock: Lock, other: Lock) -> Lock:
    return {name: lines for name, lines in lock.items() if name not in other}


if __name__ == "__main__":
    main()
