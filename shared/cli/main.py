"""`tessera`: finds its commands by the entry point group `tessera.commands` and imports one only to run it.

So `tessera run list` needs no torch, `tessera coordinator serve` neither, and another installed package can add a
command. What a user can mend becomes one message and an exit code: 1 for a refusal, 2 for a wrong or missing command
or what cannot be used of its settings, 3 for a token that is not admitted.
"""

from __future__ import annotations

from importlib.metadata import EntryPoint, entry_points, version
from importlib.util import find_spec
from typing import Annotated, Any

import typer
from typer.core import TyperGroup
from typer.main import get_command

from tessera.shared.cli.lazy_import import load
from tessera.shared.cli.render.output import complain, show_problem, wants_json
from tessera.shared.problems import Invalid, Problem, Unauthenticated

COMMANDS = "tessera.commands"

BAD_USAGE, NOT_ADMITTED = 2, 3

# Said here rather than taken from the commands, so that `tessera --help` imports none of them.
SUMMARIES = {
    "admin": "Sites, workers, tokens, and the coordinator at a glance.",
    "audit": "Verify, export and compare what coordinator and site wrote down.",
    "coordinator": "Serve the API and conduct runs; migrate the database.",
    "data": "Show a site's data sets, and how one divides among sites.",
    "model": "Make and inspect the models that runs start from.",
    "run": "Start, watch, steer and export runs.",
    "simulate": "Run a whole federation in this process.",
    "worker": "Train for a coordinator with this site's data.",
}

# What is imported from these is part of this project; anything else comes with an extra.
PARTS = ("shared", "coordinator", "worker")


class Installed(TyperGroup):
    """The commands that are installed."""

    def list_commands(self, ctx: object) -> list[str]:
        return sorted(installed())

    def get_command(self, ctx: object, cmd_name: str) -> TyperGroup | None:
        """Return what `--help` lists: the name and a summary, without the command's code."""
        return TyperGroup(name=cmd_name, help=SUMMARIES.get(cmd_name)) if cmd_name in installed() else None

    def resolve_command(self, ctx: Any, args: list[str]) -> Any:
        """Return the command itself, for running it and for completing its arguments."""
        name, placeholder, rest = super().resolve_command(ctx, args)
        if name is None or placeholder is None:
            return name, placeholder, rest
        entry = installed()[name]
        try:
            load(entry.module)
            return name, get_command(entry.load()), rest
        except ModuleNotFoundError as fault:
            if ctx.resilient_parsing:
                # Nobody reads sentences while a shell completes a line: there is nothing to complete.
                return name, placeholder, rest
            complain(_what_is_missing(entry, fault))
            raise typer.Exit(BAD_USAGE) from fault

    def invoke(self, ctx: Any) -> Any:
        try:
            return super().invoke(ctx)
        except Problem as problem:
            show_problem(problem, as_json=wants_json(ctx))
            raise typer.Exit(_code_of(problem)) from problem


def _code_of(problem: Problem) -> int:
    if isinstance(problem, Unauthenticated):
        return NOT_ADMITTED
    # Of the kinds below it none is about what a person wrote.
    return BAD_USAGE if type(problem) is Invalid and not problem.from_document else 1


def installed() -> dict[str, EntryPoint]:
    """Return the commands by name, none of them loaded."""
    return {entry.name: entry for entry in entry_points(group=COMMANDS)}


def _what_is_missing(entry: EntryPoint, fault: ModuleNotFoundError) -> str:
    """Return one sentence for a package that is not installed. Raises `fault` again if it is a module of our own."""
    ours, _, inner = entry.module.partition("tessera.")
    part = "" if ours else inner.partition(".")[0]
    missing = (fault.name or "").partition(".")[0]
    if fault.name == f"tessera.{part}" and find_spec(fault.name) is None:
        return f"`tessera {entry.name}` is not part of this installation: it has no package {part!r}."
    if missing in ("", "tessera"):
        raise fault
    # Tessera itself is on no package index; what another package brought may be.
    cure = f"in a checkout of Tessera run: pip install '.[{part}]'" if part in PARTS else f"pip install {missing}"
    return f"`tessera {entry.name}` needs {missing}, which is not installed: {cure}"


app = typer.Typer(cls=Installed, no_args_is_help=True, pretty_exceptions_enable=False)


def _print_version(wanted: bool) -> None:
    if wanted:
        typer.echo(f"tessera {version('tessera')}")
        raise typer.Exit


@app.callback()
def tessera(
    show_version: Annotated[
        bool, typer.Option("--version", callback=_print_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """Federated learning of transformers over REST: only the blocks a round asks for travel."""


def main() -> None:
    """The entry point `tessera`. Exit codes: 0, 1 refused, 2 wrong usage or settings, 3 not admitted, 130
    interrupted, or a command's own."""
    get_command(app).main(prog_name="tessera")
