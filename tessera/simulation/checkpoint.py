"""The inputs of a simulation in a file, by which its folder is known again."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tessera.shared.problems import Fault, Invalid
from tessera.worker.state.atomic_files import written_whole

SETTINGS = "simulation.json"
"""The file with the settings that determine a simulation's results."""
SHOWN = 20
"""Most differences that a refusal lists."""


def claim(file: Path, identity: Mapping[str, Any], what: str) -> None:
    """Record in a file which inputs its folder belongs to. Raises Invalid with the first that differ from before."""
    if not file.exists():
        _write(file, json.dumps(identity, indent=1, sort_keys=True))
        return
    before = json.loads(file.read_text(encoding="utf-8"))
    if faults := [
        Fault(pointer=pointer, detail=f"was {shortened(was)} and is {shortened(now)}")
        for pointer, was, now in differences("", before, json.loads(json.dumps(identity)))
    ]:
        more = f", the first {SHOWN} of {len(faults)}" if len(faults) > SHOWN else ""
        raise Invalid(
            f"{file.parent} holds {what} with other settings or data{more}",
            errors=faults[:SHOWN],
            remedy="Choose another folder, or remove this one to start again.",
        )


def _write(path: Path, text: str) -> None:
    with written_whole(path, durable=False) as file:
        file.write(text.encode())


def differences(pointer: str, before: Any, now: Any) -> list[tuple[str, Any, Any]]:
    """Return the differences between two documents, each under its pointer: the value before and now."""
    if isinstance(before, dict) and isinstance(now, dict):
        keys = sorted({*before, *now})
        return [d for key in keys for d in differences(f"{pointer}/{key}", before.get(key), now.get(key))]
    return [] if before == now else [(pointer, before, now)]


def shortened(value: Any) -> str:
    """Return a setting as JSON of at most 60 characters."""
    text = json.dumps(value)
    return text if len(text) <= 60 else text[:57] + "..."
