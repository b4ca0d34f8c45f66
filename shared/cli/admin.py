"""`tessera admin`: sites, workers, tokens, and the coordinator at a glance."""

from __future__ import annotations

from collections import deque
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from shared.cli import output
from shared.cli.connection import client_of, connect, find_token
from shared.cli.output import AsJson
from shared.cli.rounds import at_work
from shared.cli.secret import place_for, put_secret
from shared.wire import IssuedToken, Label, Status, TokenRole, TokenSpec

app = typer.Typer(
    no_args_is_help=True, callback=connect, help="Sites, workers, tokens, and the coordinator at a glance."
)
site_app = typer.Typer(no_args_is_help=True, help="Admit institutions.")
token_app = typer.Typer(no_args_is_help=True, help="Issue and revoke tokens.")
app.add_typer(site_app, name="site")
app.add_typer(token_app, name="token")


def _label(name: str | None) -> str | None:
    """A name as the coordinator takes it. Raises BadParameter, which names the parameter."""
    try:
        return _LABEL.validate_python(name)
    except ValidationError as fault:
        shape = "up to 64 letters, digits, dots, dashes and underscores, the first a letter or digit"
        raise typer.BadParameter(f"{name!r} is not {shape}") from fault


_LABEL: TypeAdapter[str | None] = TypeAdapter(Label | None)

Days = Annotated[int | None, typer.Option(min=1, max=3650, help="Days until it expires; never if left out.")]
TokenFileOut = Annotated[
    Path | None, typer.Option(help="Write the secret to this new file (mode 0600) instead of printing it.")
]


@app.command()
def status(ctx: typer.Context, as_json: AsJson = False) -> None:
    """Show the coordinator at a glance."""
    found = client_of(ctx).status()
    if as_json:
        output.print_json(found)
        return
    console = output.out()
    console.print(output.table(("", ""), _facts(found)))
    if found.open_rounds:
        rows = [(r.number, r.stage, r.state, at_work(r)) for r in found.open_rounds]
        console.print()
        console.print(output.table(("round", "stage", "state", "tasks"), rows, right=("round",)))


def _facts(found: Status) -> list[tuple[str, str]]:
    runs = ", ".join(f"{count} {state}" for state, count in sorted(found.runs.items()))
    live = sum(worker.live for worker in found.workers)
    return [
        ("version", f"{found.version}, protocol {found.protocol}"),
        ("runs", runs or "none"),
        ("workers", f"{live} live of {len(found.workers)}"),
        ("blobs", f"{found.blobs}, {output.size(found.blob_bytes)}"),
    ]


@app.command()
def sites(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the sites."""
    found = list(client_of(ctx).sites())
    if as_json:
        output.print_json(found)
        return
    rows = [(site.id, site.name, output.ago(site.created_at)) for site in found]
    output.out().print(output.table(("id", "name", "added"), rows))


@app.command()
def workers(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the workers that were ever heard of."""
    found = list(client_of(ctx).workers())
    if as_json:
        output.print_json(found)
        return
    rows = [
        (
            f"{worker.site}/{worker.name}",
            "live" if worker.live else "silent",
            output.ago(worker.last_seen_at),
            ", ".join(worker.kinds),
            ", ".join(f"{name} ({count})" for name, count in worker.datasets.items()),
            worker.device,
        )
        for worker in found
    ]
    output.out().print(output.table(("worker", "state", "heard of", "does", "datasets", "device"), rows))


@app.command()
def audit(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="How many of the latest entries.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show the latest changes of state, oldest first."""
    found = deque(client_of(ctx).audit(), maxlen=limit)
    if as_json:
        output.print_json(list(found))
        return
    rows = [
        (
            entry.seq,
            entry.at.isoformat(timespec="seconds"),
            entry.actor,
            entry.action,
            entry.subject,
            ", ".join(f"{name} {value}" for name, value in entry.detail.items() if value is not None),
        )
        for entry in found
    ]
    output.out().print(output.table(("seq", "at", "actor", "action", "subject", "detail"), rows, right=("seq",)))


@site_app.command("add")
def add_site(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(callback=_label, help="What the site is called.")],
    days: Days = None,
    token_file: TokenFileOut = None,
    as_json: AsJson = False,
) -> None:
    """Add a site and issue the token that admits its workers."""
    spec = TokenSpec(name=name, role="site", site=name, expires_in_days=days)
    client = client_of(ctx)
    with place_for(token_file) as file:
        site = client.create_site(name)
        issued = client.issue_token(spec)
        put_secret(issued, file)
    _tell_issued(issued, token_file, as_json=as_json, more={"site": site.model_dump(mode="json")})


@token_app.command("create")
def create_token(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(callback=_label, help="What the token is called.")],
    role: Annotated[TokenRole, typer.Option(help="What it allows.")],
    site: Annotated[str | None, typer.Option(callback=_label, help="For role site: whose workers it admits.")] = None,
    days: Days = None,
    token_file: TokenFileOut = None,
    as_json: AsJson = False,
) -> None:
    """Issue a token."""
    if (role == "site") != (site is not None):
        raise typer.BadParameter("a token of role site needs one, and no other role has one", param_hint="'--site'")
    spec = TokenSpec(name=name, role=role, site=site, expires_in_days=days)
    client = client_of(ctx)
    with place_for(token_file) as file:
        issued = client.issue_token(spec)
        put_secret(issued, file)
    _tell_issued(issued, token_file, as_json=as_json, more={})


def _tell_issued(issued: IssuedToken, file: Path | None, *, as_json: bool, more: dict[str, Any]) -> None:
    if as_json:
        kept = {"secret"} if file else None
        output.print_json({**more, "token": issued.model_dump(mode="json", exclude=kept)})
        return
    named = f"token {issued.name} ({issued.role}, {issued.id})"
    if file:
        output.note(f"{named}: the secret is in {file}")
    else:
        output.note(f"{named}: this is its secret, shown this once")
        typer.echo(issued.secret)


@token_app.command("list")
def list_tokens(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the tokens, without their secrets."""
    found = list(client_of(ctx).tokens())
    if as_json:
        output.print_json(found)
        return
    rows = [
        (
            token.id,
            token.name,
            token.role,
            token.site,
            token.expires_at.date() if token.expires_at else "never",
            f"revoked {output.ago(token.revoked_at)}" if token.revoked_at else "valid",
        )
        for token in found
    ]
    output.out().print(output.table(("id", "name", "role", "site", "expires", "state"), rows))


@token_app.command()
def revoke(
    ctx: typer.Context,
    token: Annotated[str, typer.Argument(help="The token's id, the beginning of it, or its name.")],
    as_json: AsJson = False,
) -> None:
    """Make a token worthless from now on."""
    client = client_of(ctx)
    found = find_token(client, token)
    client.revoke_token(found.id)
    if as_json:
        output.print_json(next(token for token in client.tokens() if token.id == found.id))
    else:
        output.out().print(f"token {found.name} ({found.id}) is revoked")
