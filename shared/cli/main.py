"""The command `tessera`: subcommands from the entry point group `tessera.commands`, imported only when they run.

So `tessera run list` and `tessera coordinator serve` need no torch, and other packages can add commands. An error
that the user can fix becomes one message and an exit code: 1 for a refusal, 2 for an invalid command or setting, 3
for a rejected token.
"""

import errno
import os
import re
import sys
from collections.abc import Iterator
from contextlib import suppress
from functools import cache
from importlib.metadata import EntryPoint, entry_points
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import ValidationError
from typer.core import TyperGroup
from typer.main import get_command

from tessera.shared.diagnostics import reason_of
from tessera.shared.environment import refuse_misspelt
from tessera.shared.lazy_import import load
from tessera.shared.near_names import MISSPELT, did_you_mean, nearest
from tessera.shared.problems import Invalid, Problem, Unauthenticated
from tessera.shared.terminal.output import complain, show_problem, wants_json
from tessera.shared.validation_errors import message_of
from tessera.shared.version import VERSION, install_line

COMMANDS = "tessera.commands"

BAD_USAGE, NOT_ADMITTED = 2, 3

# Repeated here so that `tessera --help` imports no command.
SUMMARIES = {
    "admin": "Sites, workers, tokens, and the coordinator at a glance.",
    "audit": "Verify, export and compare what coordinator and site wrote down.",
    "compare": "Compare simulations, paired by seed.",
    "coordinator": "Serve the API and conduct runs; migrate the database.",
    "data": "Show a site's data sets, and how one divides among sites.",
    "demo": "Watch four institutions train a model on this machine.",
    "docs": "Read the documentation.",
    "model": "Make and inspect the models that runs start from.",
    "regional": "Train for a parent coordinator with the sites of a region.",
    "run": "Start, watch, steer and export runs.",
    "simulate": "Run a whole federation in this process.",
    "verify": "Check a dossier, a bundle or another signed folder, without a coordinator.",
    "worker": "Train for a coordinator with this site's data.",
}

_END, _SHOW, _NEW = (
    ("cancel", "revoke", "suspend", "remove"),
    ("show", "watch"),
    ("create", "add", "init", "run", "serve"),
)
MEANT = {
    **dict.fromkeys(("delete", "remove", "rm", "destroy", "drop"), _END),
    **dict.fromkeys(("stop", "abort", "kill", "end", "disable"), ("pause", *_END)),
    **dict.fromkeys(("ban", "block", "suspend"), ("suspend", "pause")),
    **dict.fromkeys(("info", "describe", "get", "view", "inspect", "open"), (*_SHOW, "status")),
    **dict.fromkeys(("logs", "log", "history"), (*_SHOW, "audit")),
    **dict.fromkeys(("status", "health"), (*_SHOW, "check", "doctor")),
    **dict.fromkeys(("check", "test", "validate", "verify"), ("check", "doctor", "preview", "show")),
    **dict.fromkeys(("result", "results", "score", "scores"), ("metrics", "show")),
    **dict.fromkeys(("register", "enrol", "enroll"), ("join",)),
    **dict.fromkeys(
        ("new", "make", "add", "start", "submit", "launch", "begin", "clone", "copy", "fork", "issue"), _NEW
    ),
    **dict.fromkeys(("edit", "update", "rename", "modify"), ("change", "annotate", "create")),
    **dict.fromkeys(("follow", "tail", "monitor"), ("watch", "show")),
    **dict.fromkeys(("download", "save", "fetch"), ("export",)),
    **dict.fromkeys(("continue", "unpause", "restart", "enable"), ("resume",)),
    **dict.fromkeys(("accept", "admit", "allow"), ("approve",)),
    **dict.fromkeys(("reject", "deny", "refuse"), ("decline",)),
    **dict.fromkeys(("ls", "all"), ("list",)),
}
"""Words of other programs, with the commands that may be meant by each."""

MAX_ELSEWHERE = 3
"""Number of commands of one name above which none of them is probably meant."""
WORKER_TOML = Path("worker.toml")

# Packages of this project, each with the extra that it needs.
PARTS = {
    "shared": "",
    "coordinator": "coordinator",
    "examples": "demo",
    "worker": "worker",
    "simulation": "simulation",
}


class InstalledCommands(TyperGroup):
    """The group of all installed commands."""

    def list_commands(self, ctx: object) -> list[str]:
        return sorted(installed())

    def get_command(self, ctx: object, cmd_name: str) -> TyperGroup | None:
        """Return a placeholder with the name and summary, for `--help`."""
        return TyperGroup(name=cmd_name, help=SUMMARIES.get(cmd_name)) if cmd_name in installed() else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Import and return the command, to run it or complete its arguments."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        if name is None or placeholder is None:
            return name, placeholder, rest
        entry, ctx.invoked_subcommand = installed()[name], name
        try:
            load(entry.module)
            return name, get_command(entry.load()), rest
        except ModuleNotFoundError:
            if ctx.resilient_parsing:
                # A shell that completes a line shows no errors.
                return name, placeholder, rest
            raise

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as fault:
            complain(what_is_missing(installed()[ctx.invoked_subcommand], fault))
            raise typer.Exit(BAD_USAGE) from fault
        except typer.TyperException as refusal:
            refusal.message = _reworded(refusal)
            raise
        except Problem as problem:
            show_problem(problem, as_json=wants_json(ctx))
            # Subclasses of Invalid are not about the user's input.
            usage = type(problem) is Invalid and not problem.from_document
            code = NOT_ADMITTED if isinstance(problem, Unauthenticated) else BAD_USAGE if usage else 1
            raise typer.Exit(code) from problem
        except OSError as fault:
            # Of other files the commands themselves say that their disk is full.
            if fault.errno != errno.ENOSPC or fault.filename is not None:
                raise
            complain(f"the output cannot be written: {reason_of(fault)}; what the command has changed stays changed")
            # Python would flush the rest at its end, and fail again.
            sys.stdout = None
            raise typer.Exit(1) from fault


def _reworded(refusal: Any) -> str:
    """Return the message for a line that cannot be parsed, without pydantic's words and with the nearest name."""
    if unknown := re.match("No such command '(.*?)'", refusal.message):
        name, known = unknown[1], refusal.ctx.command.list_commands(refusal.ctx)
        meant = [each for each in MEANT.get(name, ()) if each in known]
        if nearest(name, known, MISSPELT) is None and (meant := meant or _elsewhere(name, refusal.ctx.command_path)):
            return f"there is no command {name!r}; did you mean {' or '.join(f'`{each}`' for each in meant)}?"
        # A word that is less alike would name a command that does something else, such as `release` for `delete`.
        return f"there is no command {name!r}{did_you_mean(name, known, MISSPELT)}"
    if getattr(refusal, "param", None) is not None and refusal.param.name == "config" and WORKER_TOML.exists():
        return f"For the settings that lie here, add --config {WORKER_TOML}"
    if "'%Y-%m-%d'" in str(refusal.message):
        return "must be a date, such as 2027-06-30"
    if not isinstance(refusal.__cause__, ValidationError):
        return str(refusal.message)
    error: dict[str, Any] = {**refusal.__cause__.errors()[0]}
    if names := error["msg"].partition(" is not one of ")[2]:
        error |= {"type": "enum", "ctx": {"expected": names}}
    return message_of(error)


def _elsewhere(name: str, path: str) -> list[str]:
    """Return the commands of this name in other groups, the nearest groups first; none if there are many."""
    found: list[str] = []
    for group, entry in sorted(installed().items()):
        with suppress(ModuleNotFoundError):
            found += _named(name, f"tessera {group}", get_command(entry.load()))
    if len(found) > MAX_ELSEWHERE:
        return []
    return sorted(found, key=lambda words: not words.startswith(f"{path} "))


def _named(name: str, path: str, command: Any) -> Iterator[str]:
    """Yield the words of each command of this name under a command."""
    for each, found in getattr(command, "commands", {}).items():
        if not found.hidden:
            if each == name:
                yield f"{path} {each}"
            yield from _named(name, f"{path} {each}", found)


@cache
def installed() -> dict[str, EntryPoint]:
    """Return the commands' entry points by name, without loading them."""
    return {entry.name: entry for entry in entry_points(group=COMMANDS)}


def what_is_missing(entry: EntryPoint, fault: ModuleNotFoundError) -> str:
    """Return a message for a missing package. Raises `fault` again if a module of this project is missing."""
    ours, _, inner = entry.module.partition("tessera.")
    part = "" if ours else inner.partition(".")[0]
    missing = (fault.name or "").partition(".")[0]
    if fault.name == f"tessera.{part}" and find_spec(fault.name) is None:
        return f"`tessera {entry.name}` is not part of this installation: it has no package {part!r}."
    if missing in ("", "tessera"):
        raise fault
    if missing in sys.stdlib_module_names:
        return f"`tessera {entry.name}` needs {missing}, which Python has on Linux and macOS. On Windows, use WSL."
    lacking = f"`tessera {entry.name}` needs {missing}, which is not installed"
    if part in PARTS:
        return f"{lacking}: {install_line(PARTS[part])}"
    # A package index may have a stranger's package of the module's name.
    owner = entry.dist.name if entry.dist else entry.module
    return f"{lacking}: install what {owner} requires, the package that adds this command"


app = typer.Typer(cls=InstalledCommands, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(ctx: typer.Context, wanted: bool) -> None:
    if wanted:
        # Imported here: no other command looks at the packages.
        typer.echo(
            "\n".join(load("tessera.shared.cli.versions").lines()) if ctx.params["verbose"] else f"tessera {VERSION}"
        )
        raise typer.Exit


@app.callback()
def tessera(
    ctx: typer.Context,
    verbose: Annotated[
        bool, typer.Option("--verbose", is_eager=True, help="With --version: also that of each package.")
    ] = False,
    # Not eager, so that --verbose is known.
    _version: Annotated[
        bool, typer.Option("--version", callback=_print_version, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning of transformers over REST: only the blocks a round asks for travel."""
    if verbose:
        raise typer.BadParameter("--verbose is for --version: tessera --version --verbose")
    # The coordinator compares variables with its own settings too.
    if ctx.invoked_subcommand != "coordinator":
        refuse_misspelt(os.environ)


def main() -> None:
    """Run the command line. Exit codes: 0, 1 refused, 2 invalid usage, 3 token rejected, 130 interrupted."""
    get_command(app).main(prog_name="tessera")
