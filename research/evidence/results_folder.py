"""A folder of results: a JSON file for each finished run of a study."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from common.files import written_whole

RUNS = "runs"
"""The folder's part for the runs."""


def file_of(out: Path, name: str) -> Path:
    """Return the file of a run."""
    return out / RUNS / f"{name}.json"


def keep(out: Path, name: str, figures: Mapping[str, Any]) -> None:
    """Write the figures of a run, whole or not at all."""
    write(file_of(out, name), figures)


def kept(out: Path) -> Iterator[dict[str, Any]]:
    """Yield the figures of every finished run."""
    for file in sorted((out / RUNS).rglob("*.json")):
        yield json.loads(file.read_bytes())


def write(file: Path, document: Mapping[str, Any]) -> None:
    """Write a document, whole or not at all."""
    with written_whole(file) as opened:
        opened.write(json.dumps(document, sort_keys=True).encode())
