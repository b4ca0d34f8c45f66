"""The environments that other systems run in: `python -m rivals.environments` makes what is missing.
It prints the interpreters; of `python -m rivals.environments flower-simulation` that one.

They are no part of the project's own environment, which need not agree with what they require.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
import sysconfig
from collections.abc import Mapping
from pathlib import Path

FOLDER = Path(__file__).parents[1] / "build" / "rivals"

REQUIREMENTS: Mapping[str, tuple[str, ...]] = {
    "flower": ("flwr==1.41.0", "numpy"),
    "flower-simulation": ("flwr[simulation]==1.41.0",),
    "flare": ("nvflare==2.9.0", "numpy", "torch==2.13.0"),
}

WITH_OUR_LIBRARIES = ("flower-simulation",)
"""Environments that find in the project's own what they lack: the same torch, so that it is not what is compared."""


def python(name: str) -> Path:
    """The interpreter of an environment, which is made if it is not there. Raises CalledProcessError."""
    folder = FOLDER / name
    made = folder / "made"
    wanted = "\n".join(REQUIREMENTS[name])
    interpreter = folder / "bin" / "python"
    if made.is_file() and made.read_text(encoding="utf-8") == wanted:
        return interpreter
    shutil.rmtree(folder, ignore_errors=True)
    print(f"installing {', '.join(REQUIREMENTS[name])} into {folder} ...", file=sys.stderr, flush=True)
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    pip = (interpreter, "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    subprocess.run([*pip, *REQUIREMENTS[name]], check=True, stderr=subprocess.DEVNULL)
    if name in WITH_OUR_LIBRARIES:
        place = sysconfig.get_path("purelib", vars={"base": str(folder), "platbase": str(folder)})
        (Path(place) / "ours.pth").write_text(sysconfig.get_path("purelib") + "\n", encoding="utf-8")
    made.write_text(wanted, encoding="utf-8")
    return interpreter


if __name__ == "__main__":
    for rival in sys.argv[1:] or REQUIREMENTS:
        print(python(rival))
