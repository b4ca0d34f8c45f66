"""New models, made by the command that a user runs."""

from __future__ import annotations

from importlib.metadata import entry_points
from pathlib import Path
from typing import Any


def init(folder: Path, **options: Any) -> None:
    """Run `tessera model init` in this process; `--random` is the option `pretrained=False`."""
    arguments = ["init", str(folder)]
    for name, value in options.items():
        if name == "pretrained":
            arguments.append("--pretrained" if value else "--random")
        else:
            arguments += [f"--{name.replace('_', '-')}", str(value)]
    (command,) = entry_points(group="tessera.commands", name="model")
    command.load()(arguments, standalone_mode=False)
