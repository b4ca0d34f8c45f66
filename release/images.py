"""The images of coordinator and worker as OCI archives: `make image-archives`.

buildah builds them from the Dockerfile as root, without a daemon. Debian has the programs: `apt-get install buildah
mmdebstrap`. Without TESSERA_IMAGE_BASE the base is made of Debian's packages, which needs no registry.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from release.packages import ROOT

IMAGES = ("tessera-coordinator", "tessera-worker")
BASE = "localhost/tessera-base"


class Engine:
    """The images and containers of one folder, apart from all others of the machine."""

    def __init__(self, folder: Path) -> None:
        """Write the engine's settings into the folder."""
        self.folder = folder
        # A root without CAP_SYS_RESOURCE may not set podman's default limits. crun refuses hybrid cgroups.
        (folder / "containers.conf").write_text(
            f'[containers]\ndefault_ulimits = ["nofile=16384:16384", "nproc=16384:16384"]\nlog_driver = "k8s-file"\n'
            '[engine]\nruntime = "runc"\ncgroup_manager = "cgroupfs"\nevents_logger = "file"\n'
            f'[network]\nnetwork_backend = "netavark"\nnetwork_config_dir = {json.dumps(str(folder / "networks"))}\n'
        )
        (folder / "storage.conf").write_text(
            f"[storage]\ndriver = {json.dumps(os.environ.get('STORAGE_DRIVER', 'overlay'))}\n"
            f"graphroot = {json.dumps(str(folder / 'storage'))}\nrunroot = {json.dumps(str(folder / 'run'))}\n"
        )
        self.environment = {
            **os.environ,
            "CONTAINERS_CONF": str(folder / "containers.conf"),
            "CONTAINERS_STORAGE_CONF": str(folder / "storage.conf"),
            "TMPDIR": str(folder),
        }

    def run(self, *command: str | Path, check: bool = True) -> str:
        """Run a command on this folder, and return what it prints.

        Raises:
            RuntimeError: It failed, with its messages.
        """
        done = subprocess.run(command, env=self.environment, capture_output=True, text=True, check=False)
        if check and done.returncode:
            raise RuntimeError(f"{command}\n{done.stdout}\n{done.stderr}")
        return done.stdout

    def build(self, image: str) -> Path:
        """Build an image, where pip finds the packages that it finds here. Return its archive."""
        base = os.environ.get("TESSERA_IMAGE_BASE") or self.debian_base()
        # Any index leaves out CUDA. In one that does not exist, pip finds only what its configuration names.
        torch = os.environ.get("TORCH_INDEX") or "file:///no-index"
        arguments = [f"--build-arg={argument}" for argument in (f"BASE={base}", f"TORCH_INDEX={torch}")]
        mounts = [f"--volume={path}:{inside}:ro" for path, inside in self._pip_mounts()]
        self.run(
            "buildah", "build", "--layers", "--force-rm", "--isolation", "chroot", "--format", "docker", *mounts,
            *arguments, "--target", image.removeprefix("tessera-"), "--tag", image, str(ROOT),
        )  # fmt: skip
        archive = self.folder / f"{image}.oci.tar"
        archive.unlink(missing_ok=True)
        self.run("buildah", "push", "--quiet", image, f"oci-archive:{archive}:{image}")
        return archive

    def debian_base(self) -> str:
        """Make, once, a base of Debian's packages and pip's wheel: Python with pip, as in Docker's image."""
        if self.run("buildah", "images", "--quiet", BASE, check=False).strip():
            return BASE
        wheels, archive = self.folder / "wheels", self.folder / "base.tar"
        self.run(sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--dest", wheels, "pip")
        (pip,) = wheels.glob("pip-*.whl")
        release = dict(re.findall(r'^(\w+)="?([^"\n]*)', Path("/etc/os-release").read_text(), re.MULTILINE))
        sources = [Path("/etc/apt/sources.list"), *sorted(Path("/etc/apt/sources.list.d").glob("*.sources"))]
        left_out = [f"--dpkgopt=path-exclude=/usr/share/{name}/*" for name in ("doc", "man", "locale")]
        self.run(
            "mmdebstrap", "--quiet", "--variant=minbase", "--format=tar", *left_out,
            "--aptopt=APT::Install-Recommends false",
            # Instead of usrmerge, which needs all of Perl.
            "--hook-dir=/usr/share/mmdebstrap/hooks/merged-usr",
            "--include=usr-is-merged,python3,python-is-python3,ca-certificates",
            # Debian's pip would refuse to remove itself. A wheel is an archive of what it installs.
            f'--customize-hook=cd "$1"/usr/lib/python3.*/ && rm -f EXTERNALLY-MANAGED && python3 -m zipfile -e {pip} '
            '"$1/usr/local/lib/${PWD##*/}/dist-packages"',
            release["VERSION_CODENAME"], archive, *(source for source in sources if source.exists()),
        )  # fmt: skip
        container = self.run("buildah", "from", "scratch").strip()
        self.run("buildah", "add", "--quiet", container, archive, "/")
        self.run("buildah", "commit", "--quiet", "--rm", container, BASE)
        archive.unlink()
        return BASE

    def _pip_mounts(self) -> Iterator[tuple[Path, str]]:
        """Yield this machine's configuration of pip, and the folders and files that it names."""
        listed = self.run(sys.executable, "-m", "pip", "config", "list")
        named = dict(re.findall(r"^(?:global|:env:)\.([\w-]+)='(.*)'$", listed.replace("\\n", " "), re.MULTILINE))
        configuration = self.folder / "pip.conf"
        configuration.write_text("[global]\n" + "".join(f"{key} = {value}\n" for key, value in named.items()))
        yield configuration, "/etc/pip.conf"
        for value in " ".join(named.values()).split():
            # The packages of an index in a folder are beside it.
            path = Path(re.sub("^file://[^/]*(.*)/[^/]+$", r"\1", value))
            if path.is_absolute() and path.exists():
                yield path, str(path)


@contextmanager
def engine() -> Iterator[Engine]:
    """Yield an engine in a folder that is removed afterwards, or in TESSERA_IMAGE_FOLDER, which keeps its layers."""
    kept = os.environ.get("TESSERA_IMAGE_FOLDER")
    made = Engine(Path(kept or tempfile.mkdtemp(prefix="tessera-images-", dir="/var/tmp")))
    try:
        yield made
    finally:
        if not kept:
            made.run("buildah", "rm", "--all", check=False)
            made.run("buildah", "rmi", "--all", "--force", check=False)
            shutil.rmtree(made.folder)


def main() -> None:
    (ROOT / "dist").mkdir(exist_ok=True)
    with engine() as made:
        for image in IMAGES:
            print(shutil.copy(made.build(image), ROOT / "dist"))


if __name__ == "__main__":
    main()
