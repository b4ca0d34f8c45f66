"""The page of every command, made from the commands themselves: `tessera docs cli`."""

from __future__ import annotations

import typer
from typer.cli import get_docs_for_click
from typer.main import get_command

from tessera.shared.cli.main import SUMMARIES, installed, what_is_missing

PREAMBLE = """\
# Commands

Results go to stdout and everything about them to stderr. With `--json` stdout has JSON and nothing else, a refusal's
problem document too; it stays empty where the command line itself, or a coordinator's or worker's settings, cannot be
read. `tessera --version` prints the version. `tessera --install-completion` has your shell (bash, zsh or fish)
complete commands and options; `tessera --show-completion` prints what that installs.

## Exit codes

| code | meaning | for example |
|---|---|---|
| 0 | it is done, or all is well | |
| 1 | refused, failed, or found to be wrong | the coordinator's problems; a cancelled run; a broken chain |
| 2 | wrong usage or settings; nothing was done | an unknown option; a file that makes no run; a part not installed |
| 3 | a person has to act | a run that is paused; fewer sites than the quorum; a token that is not admitted |
| 4 | the command has to be started again | a worker whose GPU failed |
| 5 | the same, once there is room | a worker on a full disk |
| 130 | interrupted | ^C |

A command with further meanings of a code lists them below.
"""


def document() -> str:
    """Return the page, with a line break at its end. Loads the code of every command."""
    parts = [PREAMBLE]
    for name, entry in sorted(installed().items()):
        if name in SUMMARIES:
            try:
                command = get_command(entry.load())
                parts.append(
                    get_docs_for_click(obj=command, ctx=typer.Context(command), indent=1, name=f"tessera {name}")
                )
            except ModuleNotFoundError as fault:
                parts.append(f"## `tessera {name}`\n\n{what_is_missing(entry, fault)}\n\n")
    return "".join(parts)
