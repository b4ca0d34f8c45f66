"""A folder with all that a network without internet needs, signed: `make bundle`; docs/offline.md.

Every file but `model.sig` is equal bit for bit when the same commit is packed with the same tools. A signature on an
elliptic curve differs each time.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path
from tempfile import TemporaryDirectory

from release.locks import IMAGES, SIGNING, lock_file, parsed
from release.packages import EPOCH, ROOT, build, epoch
from release.sbom import BILLS, bill
from tessera.coordinator.dossier import signing_key
from tessera.shared.tensors.hashing import digest_at
from tessera.shared.updates.signatures import KEY_FILE, SIGNATURE_FILE, sign
from tessera.shared.version import VERSION

LOCKS = (*IMAGES, SIGNING)
SUMS = "SHA256SUMS"
MANIFEST = "bundle.json"
PAGE = "offline.md"
PLATFORM = f"{platform.system()}-{platform.machine()}-cp{sys.version_info.major}{sys.version_info.minor}".lower()
"""What wheels with compiled code are for: the platform and the Python that make the bundle."""


def wheels(out: Path, torch_cpu: Path | None) -> None:
    """Write the wheels of the locks' packages into a folder, with the CPU build of torch."""
    with TemporaryDirectory() as place:
        lock = {name: lines for each in LOCKS for name, lines in parsed(lock_file(each).read_text()).items()}
        torch = {name: lines for name, lines in lock.items() if name.startswith("torch==")}
        rest = Path(place) / "rest.lock"
        rest.write_text("".join(lines for name, lines in lock.items() if name not in torch))
        _pip("download", "--dest", str(out), "--requirement", str(rest))
        alone = Path(place) / "torch.lock"
        alone.write_text("".join(torch.values()))
        # Of an index, pip would take PyPI's build, which is for GPUs.
        found = ["--find-links", str(torch_cpu.resolve())] if torch_cpu else []
        remedy = "\nName a folder with the wheel of torch's CPU build: make bundle TORCH_CPU=FOLDER"
        _pip("download", "--no-index", *found, "--dest", str(out), "--requirement", str(alone), remedy=remedy)
    if not list(out.glob("torch-*+cpu-*.whl")):
        raise SystemExit(f"pip found another build of torch than that for CPUs.{remedy}")


def _pip(action: str, *words: str, remedy: str = "") -> None:
    command = [sys.executable, "-m", "pip", action, "--quiet", "--no-deps", "--require-hashes", "--only-binary=:all:"]
    done = subprocess.run([*command, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stderr + remedy)


def site(out: Path) -> None:
    """Write the documents as a site."""
    environment = {**os.environ, EPOCH: str(epoch()), "NO_MKDOCS_2_WARNING": "1"}
    command = [sys.executable, "-m", "mkdocs", "build", "--quiet", "--site-dir", str(out)]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        raise SystemExit(done.stdout + done.stderr)


def make(out: Path, images: list[Path], torch_cpu: Path | None) -> None:
    """Write all files of a bundle but the key and the signature into a new folder."""
    for name in ("wheels", "locks", "sbom", "source"):
        (out / name).mkdir(parents=True)
    for file in build(out / "source"):
        if file.suffix == ".whl":
            wheel = file.rename(out / "wheels" / file.name)
            pinned = f"tessera-fl=={VERSION} --hash={digest_at(wheel)}\n"
            (out / "locks/requirements-tessera.lock").write_text(pinned)
    for name in LOCKS:
        shutil.copyfile(lock_file(name), out / "locks" / lock_file(name).name)
    for name, locks in BILLS.items():
        # The bundle has no packages for GPUs.
        if {*locks} <= {*LOCKS}:
            (out / "sbom" / f"tessera-{name}.cdx.json").write_text(bill(locks), encoding="utf-8")
    wheels(out / "wheels", torch_cpu)
    site(out / "docs")
    shutil.copyfile(ROOT / "docs" / PAGE, out / PAGE)
    shutil.copyfile(ROOT / "release/verify.py", out / "verify.py")
    for image in images:
        (out / "images").mkdir(exist_ok=True)
        shutil.copyfile(image, out / "images" / image.name)
    about = {
        "version": VERSION,
        "platform": PLATFORM,
        "torch": "CPU build",
        "images": [image.name for image in images] or "none: this bundle has no container images",
        "time": epoch(),
    }
    (out / MANIFEST).write_text(json.dumps(about, indent=1) + "\n")


def seal(folder: Path, key: signing_key.SigningKey) -> None:
    """Add the key, the sums and the signature over all files."""
    (folder / KEY_FILE).write_bytes(key.public)
    digests = _digests(folder)
    lines = (f"{digest.removeprefix('sha256:')}  {name}\n" for name, digest in digests.items())
    (folder / SUMS).write_text("".join(lines))
    sign(folder.name, {**digests, SUMS: digest_at(folder / SUMS)}, key.path, folder / SIGNATURE_FILE)


def _digests(folder: Path) -> dict[str, str]:
    return {one.relative_to(folder).as_posix(): digest_at(one) for one in sorted(folder.rglob("*")) if one.is_file()}


def pack(folder: Path) -> Path:
    """Write the folder as one tar, which needs no compression: wheels and images have it already."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        member.mtime, member.mode = epoch(), 0o755 if member.isdir() else 0o644
        member.uid, member.gid, member.uname, member.gname = 0, 0, "", ""
        return member

    packed = folder.with_name(f"{folder.name}.tar")
    with tarfile.open(packed, "w") as archive:
        archive.add(folder, folder.name, filter=plain)
    return packed


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m release.bundle", description="Write a signed bundle.")
    made.add_argument("--key", type=Path, required=True, help="the signer's private key; created if it is missing")
    made.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder; a bundle of this name is replaced")
    made.add_argument("--torch-cpu", type=Path, help="a folder with the wheel of torch's CPU build")
    given = made.parse_args()
    key = signing_key.create(given.key.expanduser())
    folder = given.out / f"tessera-{VERSION}-{PLATFORM}"
    shutil.rmtree(folder, ignore_errors=True)
    images = sorted((ROOT / "dist").glob("*.oci.tar"))
    make(folder, images, given.torch_cpu)
    seal(folder, key)
    print(f"{pack(folder)}, signed by {key.fingerprint}; the public key is {key.public_path}")
    if not images:
        print("The bundle has no container images: dist/ has no *.oci.tar.")


if __name__ == "__main__":
    main()
