"""The licences of what a release installs, as its packages state them; `make sbom` fails for one not permitted here.

Tessera itself names no licence yet: its owner is to choose one. Permitted is what any choice can be combined with:
licences without copyleft, and those whose copyleft ends at the file (MPL) or at the library (LGPL).
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from packaging.utils import canonicalize_name

PERMITTED = {
    *(
        "0BSD",
        "Apache-2.0",
        "BSD-2-Clause",
        "BSD-3-Clause",
        "BSL-1.0",
        "CC0-1.0",
        "CNRI-Python",
        "ISC",
        "LLVM-exception",
    ),
    *("MIT", "MIT-0", "MIT-CMU", "PSF-2.0", "Unlicense", "Zlib"),
    *("LGPL-3.0-only", "MPL-2.0"),
    # As in older metadata, which names no clauses.
    *("Apache Software License", "BSD License", "ISC License", "MIT License"),
}
NVIDIA = "LicenseRef-NVIDIA-Proprietary"
"""Of the packages that PyTorch's build for GPUs needs: a site may build an image with them, but not publish it."""
STATED = {
    "cuda-toolkit": NVIDIA,  # has no file but the names of NVIDIA's packages
    "nvidia-cusparselt-cu13": NVIDIA,  # "NVIDIA Proprietary Software"
    "email-validator": "Unlicense",  # "The Unlicense"
    "sigstore-models": "MIT",  # by its file LICENSE
    "protobuf": "BSD-3-Clause",  # "3-Clause BSD License"
    "transformers": "Apache-2.0",  # "Apache 2.0 License"
    "dp-accounting": "Apache-2.0",  # "Apache 2.0"
    "nvidia-nvtx": "Apache-2.0",  # "Apache 2.0"
}
"""Licences of packages whose metadata has free text or nothing, read from it or from their pages."""
REMEDY = "Read its licence; then permit it in release/licences.py, or remove the package."
OSI = "License :: OSI Approved :: "


def licences(lock: str) -> dict[str, str]:
    """Return the licence of each package of a lock by its name: an SPDX expression, or its metadata's words.

    pip reads the metadata alone, without the packages.
    """
    with TemporaryDirectory() as place:
        file, report = Path(place) / "requirements.txt", Path(place) / "report.json"
        file.write_text(lock)
        command = [sys.executable, "-m", "pip", "install", "--quiet", "--dry-run", "--ignore-installed", "--no-deps"]
        words = ["--report", str(report), "--requirement", str(file)]
        done = subprocess.run([*command, *words], capture_output=True, text=True, check=False)
        if done.returncode:
            raise SystemExit(done.stderr)
        found = [one["metadata"] for one in json.loads(report.read_text())["install"]]
    return {canonicalize_name(metadata["name"]): stated(metadata) for metadata in found}


def stated(metadata: Mapping[str, Any]) -> str:
    """Return the licence that a package's metadata states; nothing if it states none."""
    named = [one.removeprefix(OSI) for one in metadata.get("classifier", ()) if one.startswith(OSI)]
    words = metadata.get("license") or ""
    short = words if parts(words) <= PERMITTED | {NVIDIA} else ""
    given = metadata.get("license_expression") or STATED.get(canonicalize_name(metadata["name"])) or short
    return given or " OR ".join(sorted(one.partition(" (")[0] for one in named))


def parts(licence: str) -> set[str]:
    """Return the licences that an expression names."""
    return {part.strip("() ") for part in re.split(r" (?:AND|OR|WITH) ", licence)}


def faults(found: Mapping[str, str], permitted: Iterable[str] = ()) -> Iterator[str]:
    """Yield a line for each package whose licence is unknown, or neither permitted to all nor here."""
    for name, licence in sorted(found.items()):
        if wrong := parts(licence) - PERMITTED - {*permitted}:
            yield f"{name}: {', '.join(sorted(wrong)) or 'it states none'}. {REMEDY}"
