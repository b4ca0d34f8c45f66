"""The page of every command, made from the commands themselves: `tessera docs cli`."""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterator, Mapping
from importlib.metadata import EntryPoint
from typing import Any, Literal, get_args, get_origin, get_type_hints

from typer.main import get_command

from tessera.shared.cli.main import SUMMARIES, app, installed, what_is_missing

PREAMBLE = """\
# Commands

Results go to stdout and everything about them to stderr. With `--json` stdout has JSON and nothing else, a refusal's
problem document too; it stays empty where the command line itself, or a coordinator's or worker's settings, cannot be
read. `tessera --install-completion` has your shell (bash, zsh or fish) complete commands and options;
`tessera --show-completion` prints what that installs.

## Exit codes

| code | what it says | for example |
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
    parts = [PREAMBLE, *_options(get_command(app))]
    for name, entry in sorted(installed().items()):
        if name in SUMMARIES:
            parts += [f"\n## tessera {name}\n\n", *_group(name, entry)]
    return "".join(part if part.endswith("\n") else f"{part}\n" for part in parts)


def _group(name: str, entry: EntryPoint) -> Iterator[str]:
    """Yield a command with all under it, or a sentence about the extra that it lacks."""
    try:
        yield from _command(f"tessera {name}", get_command(entry.load()))
    except ModuleNotFoundError as fault:
        yield what_is_missing(entry, fault)


def _command(path: str, command: Any) -> Iterator[str]:
    """Yield a command or group: what it is for, its line, its options, and what is under it."""
    yield _prose(command.help)
    under = getattr(command, "commands", None)
    arguments = " ".join(_argument(p) for p in command.params if p.param_type_name == "argument")
    if under is None:
        yield f"\n```text\n{' '.join(filter(None, (path, '[OPTIONS]', arguments)))}\n```"
    yield from _options(command)
    for name, found in (under or {}).items():
        if not found.hidden:
            yield f"\n### {path} {name}\n\n"
            yield from _command(f"{path} {name}", found)


def _argument(parameter: Any) -> str:
    name = parameter.metavar or parameter.name.upper()
    return name if parameter.required else f"[{name}]"


def _prose(text: str | None) -> str:
    """Return a docstring's paragraphs, each on a line of its own."""
    paragraphs = re.split(r"\n\s*\n", inspect.cleandoc(text or ""))
    return "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def _options(command: Any) -> Iterator[str]:
    """Yield a table of what may be given, less `--help`."""
    shown = [p for p in command.params if p.name != "help" and not getattr(p, "hidden", False)]
    if not shown:
        return
    yield "\n| option | what it is |\n|---|---|"
    hints = get_type_hints(command.callback) if command.callback else {}
    for parameter in shown:
        yield f"| {_name(parameter, hints)} | {_meaning(parameter)} |"


def _name(parameter: Any, hints: Mapping[str, Any]) -> str:
    if parameter.param_type_name == "argument":
        return f"`{parameter.metavar or parameter.name.upper()}`"
    names = ", ".join(f"`{name}`" for name in (*parameter.opts, *parameter.secondary_opts))
    return names if parameter.is_flag else f"{names} {_kind(parameter, hints)}"


def _kind(parameter: Any, hints: Mapping[str, Any]) -> str:
    """Return what it takes: the words that there are, or a word that stands for it."""
    words = [str(word) for word in _words(hints.get(parameter.name))]
    return "`" + (parameter.metavar or "\\|".join(words) or parameter.opts[-1].lstrip("-").upper()) + "`"


def _words(hint: Any) -> Iterator[Any]:
    """Yield the values of the literal types in an annotation."""
    hint = getattr(hint, "__value__", hint)
    if get_origin(hint) is Literal:
        yield from get_args(hint)
    else:
        for part in get_args(hint):
            yield from _words(part)


def _meaning(parameter: Any) -> str:
    said = " ".join((parameter.help or "").split()).replace("|", "\\|")
    default = parameter.default
    notes = []
    if parameter.required:
        notes.append("required")
    elif (
        parameter.param_type_name == "option"
        and not parameter.is_flag
        and default
        and isinstance(default, str | int | float)
    ):
        notes.append(f"default `{default}`")
    if getattr(parameter, "envvar", None):
        notes.append(f"`{parameter.envvar}`")
    return " ".join(filter(None, (said, f"({', '.join(notes)})" if notes else "")))
