"""The bills of materials of the images, as CycloneDX 1.6, from their locks: `make sbom`.

They name each package with its version, package URL, licence and the hashes of its files, for the Python and the
platform of the images. They are equal bit for bit each time: the only time in them is that of SOURCE_DATE_EPOCH.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cyclonedx.schema import SchemaVersion
from cyclonedx.spdx import is_expression, is_supported_id
from cyclonedx.validation.json import JsonStrictValidator
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from release.licences import NVIDIA, faults, licences
from release.locks import lock_file, parsed
from release.packages import EPOCH, ROOT, epoch

BILLS = {
    "coordinator": ("coordinator",),
    "coordinator-signing": ("coordinator", "signing"),
    "worker": ("worker",),
    "worker-cuda": ("worker", "cuda"),
}
"""Each bill, with the locks that are installed together."""
IMAGE = {
    "implementation_name": "cpython",
    "platform_machine": "x86_64",
    "platform_python_implementation": "CPython",
    "platform_system": "Linux",
    "python_full_version": "3.11.0",
    "python_version": "3.11",
    "sys_platform": "linux",
}
"""What markers of the locks are about, in the Dockerfile's images."""


def installed(lock: str) -> Iterator[str]:
    """Yield the lines of the packages of a lock that an image installs."""
    for package in parsed(lock_file(lock).read_text()).values():
        marker = Requirement(package.partition(" \\\n")[0]).marker
        if marker is None or marker.evaluate(IMAGE):
            yield package


def bill(locks: tuple[str, ...]) -> str:
    """Return the bill of these locks' packages."""
    lock = "".join(package for each in locks for package in installed(each))
    found = licences(lock)
    if wrong := list(faults(found, {NVIDIA} if "cuda" in locks else ())):
        raise SystemExit("\n".join(wrong))
    command = [sys.executable, "-m", "cyclonedx_py", "requirements", "-", "--output-reproducible", "--short-PURLs"]
    done = subprocess.run(
        [*command, "--pyproject", "pyproject.toml"],
        cwd=ROOT,
        input=lock,
        env={**os.environ, EPOCH: str(epoch())},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(done.stderr)
    made = json.dumps(_completed(json.loads(done.stdout), found), indent=1, sort_keys=True) + "\n"
    if invalid := JsonStrictValidator(SchemaVersion.V1_6).validate_str(made):
        raise SystemExit(f"the bill of {', '.join(locks)} is not valid: {invalid}")
    return made


def _completed(made: dict[str, Any], found: dict[str, str]) -> dict[str, Any]:
    """Name each component by its package URL instead of its line, which its description repeats with all hashes, and
    add its licence."""
    root = made["metadata"]["component"]["bom-ref"]
    for component in made["components"]:
        component["bom-ref"] = component["purl"]
        del component["description"]
        licence = found[canonicalize_name(component["name"])]
        kind = "id" if is_supported_id(licence) else "name"
        compound = " " in licence and is_expression(licence)
        component["licenses"] = [{"expression": licence} if compound else {"license": {kind: licence}}]
    names = sorted(component["purl"] for component in made["components"])
    made["dependencies"] = [{"ref": root, "dependsOn": names}, *({"ref": name} for name in names)]
    return made


def main() -> None:
    made = argparse.ArgumentParser(prog="python -m release.sbom", description="Write the bills of materials.")
    made.add_argument("--out", type=Path, default=ROOT / "dist", help="a folder; files of these names are replaced")
    out = made.parse_args().out
    out.mkdir(parents=True, exist_ok=True)
    for name, locks in BILLS.items():
        file = out / f"tessera-{name}.cdx.json"
        file.write_text(bill(locks), encoding="utf-8")
        print(file)


if __name__ == "__main__":
    main()
