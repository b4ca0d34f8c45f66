"""`tessera admin study`: the studies, and their sites, orchestrators and viewers."""

from collections.abc import Callable, Iterator
from typing import Annotated

import typer

from tessera.shared import units
from tessera.shared.api.admin import Study, StudyMember
from tessera.shared.cli.connection import checked_label, client_of
from tessera.shared.client.client import Client
from tessera.shared.client.lookup import find_site, find_token
from tessera.shared.problems import Invalid
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson

app = typer.Typer(no_args_is_help=True, help="Keep sites, people and runs of different studies apart.")

Name = Annotated[str, typer.Argument(help="The study's name.")]
Sites = Annotated[list[str] | None, typer.Option("--site", help="A site, by its name. Repeatable.")]
Tokens = Annotated[
    list[str] | None, typer.Option("--token", help="An orchestrator's or viewer's token, by name or id. Repeatable.")
]
People = Annotated[
    list[str] | None, typer.Option("--person", help="A person of the OpenID provider, by the subject. Repeatable.")
]


@app.command()
def create(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(callback=checked_label, help="The name of the new study.")],
    purpose: Annotated[str, typer.Option(help="The purpose, for people.")] = "",
    as_json: AsJson = False,
) -> None:
    """Create a study without members."""
    found = client_of(ctx).create_study(name, purpose)
    output.show(found, f"study {name} exists; add its members: `tessera admin study add {name}`", as_json=as_json)


@app.command("list")
def list_studies(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the studies."""
    found = list(client_of(ctx).studies())
    rows = [(one.name, one.purpose, units.ago(one.created_at) if one.created_at else None) for one in found]
    output.show(found, output.table(("name", "purpose", "created"), rows), as_json=as_json)


@app.command()
def show(ctx: typer.Context, name: Name, as_json: AsJson = False) -> None:
    """Show the members of a study."""
    _show(client_of(ctx).study(name), as_json=as_json)


@app.command()
def add(
    ctx: typer.Context,
    name: Name,
    site: Sites = None,
    token: Tokens = None,
    person: People = None,
    as_json: AsJson = False,
) -> None:
    """Add members to a study. They stay in their other studies."""
    _change(ctx, client_of(ctx).add_to_study, name, (site, token, person), as_json=as_json)


@app.command()
def remove(
    ctx: typer.Context,
    name: Name,
    site: Sites = None,
    token: Tokens = None,
    person: People = None,
    as_json: AsJson = False,
) -> None:
    """Remove members from a study at once. A site's open tasks in its runs are cancelled."""
    _change(ctx, client_of(ctx).remove_from_study, name, (site, token, person), as_json=as_json)


Named = tuple[list[str] | None, list[str] | None, list[str] | None]


def _change(
    ctx: typer.Context, change: Callable[[str, StudyMember], Study], name: str, named: Named, *, as_json: bool
) -> None:
    # All are looked up before the first is changed.
    members = list(_members(client_of(ctx), *named))
    if not members:
        raise Invalid("no member is named", remedy="Name one: --site NAME, --token NAME or --person SUBJECT.")
    _show([change(name, member) for member in members][-1], as_json=as_json)


def _members(
    client: Client, sites: list[str] | None, tokens: list[str] | None, people: list[str] | None
) -> Iterator[StudyMember]:
    yield from (StudyMember(kind="site", member=find_site(client, name).id) for name in sites or ())
    yield from (StudyMember(kind="token", member=find_token(client, name).id) for name in tokens or ())
    yield from (StudyMember(kind="person", member=name) for name in people or ())


def _show(study: Study, *, as_json: bool) -> None:
    rows = [(member.kind, member.name, member.member) for member in study.members]
    output.show(study, output.table(("member", "name", "id"), rows), as_json=as_json)
