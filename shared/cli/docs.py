"""`tessera docs`: the documentation, which each installation has."""

from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer

import tessera
from tessera.shared.cli.reference import commands, problems, run_settings, settings
from tessera.shared.near_names import did_you_mean
from tessera.shared.problems import NotFound
from tessera.shared.terminal.output import AsJson, print_json, show, table

FOLDER = Path(tessera.__file__).with_name("docs")

GENERATED: dict[str, tuple[str, Callable[[], str]]] = {
    "cli": ("Commands", commands.document),
    "run-keys": ("Keys of a run's file", run_settings.document),
    "worker-keys": ("Keys of a worker's settings", settings.worker),
    "data-keys": ("Keys of a data set", settings.data),
    "operating/settings": ("Settings of the coordinator", settings.coordinator),
    "problems": ("Problems", problems.document),
}
"""The pages that are made from the code, each with its title."""

app = typer.Typer(add_completion=False)


@app.command(name="docs")
def command(
    page: Annotated[str | None, typer.Argument(help="The page's name, such as site or operating/tls.")] = None,
    as_json: AsJson = False,
) -> None:
    """List the pages of the documentation, or print one as Markdown."""
    found = sorted(FOLDER.rglob("*.md"), key=lambda file: (file.parent != FOLDER, file))
    files = {file.relative_to(FOLDER).with_suffix("").as_posix(): file for file in found}
    if page is None:
        titles = {
            name: file.read_text(encoding="utf-8").partition("\n")[0].lstrip("# ") for name, file in files.items()
        }
        titles |= {name: title for name, (title, _) in GENERATED.items()}
        show(titles, table(("page", "title"), titles.items()), as_json=as_json)
        return
    name = page.removeprefix("docs/").removesuffix(".md")
    if name not in {*files, *GENERATED}:
        raise NotFound(
            f"there is no page {page!r}{did_you_mean(name, (*files, *GENERATED))}",
            remedy="List the pages: `tessera docs`.",
        )
    text = GENERATED[name][1]() if name in GENERATED else files[name].read_text(encoding="utf-8")
    if as_json:
        print_json({"page": name, "text": text})
    else:
        typer.echo(text, nl=False)
