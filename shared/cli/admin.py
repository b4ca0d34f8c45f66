"""`tessera admin`: who may come in (joining, sites, tokens), workers, and the coordinator at a glance."""

from __future__ import annotations

import os
import sys
import time
from collections import deque
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, TextIO

import typer
from pydantic import TypeAdapter, ValidationError
from rich.console import Group
from rich.live import Live
from rich.markup import escape

from tessera.shared.api.admin import Approval, Enrolment, IssuedToken, Site, Status, Token, TokenSpec
from tessera.shared.cli.connection import WATCHING_PATIENCE_SECONDS, client_of, connect, find_token
from tessera.shared.cli.render import output
from tessera.shared.cli.render.output import AsJson
from tessera.shared.client.client import Client
from tessera.shared.client.round_outcomes import at_work
from tessera.shared.problems import Conflict, Invalid, NotFound
from tessera.shared.schema import Label, TokenRole
from tessera.shared.token_format import normal_code

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    callback=connect,
    help="Sites, workers, tokens, and the coordinator at a glance.",
)
site_app = typer.Typer(no_args_is_help=True, help="Admit institutions.")
token_app = typer.Typer(no_args_is_help=True, help="Issue and revoke tokens.")
join_app = typer.Typer(no_args_is_help=True, help="Admit workers that ask to join.")
app.add_typer(join_app, name="join")
app.add_typer(site_app, name="site")
app.add_typer(token_app, name="token")


def _label(name: str | None) -> str | None:
    """Return a name as the coordinator takes it. Raises BadParameter, which names the parameter."""
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


SiteName = Annotated[str, typer.Argument(help="The site's name.")]
Code = Annotated[str, typer.Argument(help="What the worker shows, as in WDJB-MJHT.")]


@app.command()
def status(
    ctx: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Show it anew as it changes, until ^C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the coordinator at a glance.

    Watched in a terminal, the picture changes; elsewhere, and with `--json`, each change is a line.
    """
    if watch:
        watch_status(client_of(ctx, WATCHING_PATIENCE_SECONDS), as_json=as_json)
        return
    found = client_of(ctx).status()
    output.show(found, status_picture(found), as_json=as_json)


@app.command()
def sites(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the sites."""
    found = list(client_of(ctx).sites())
    rows = [(site.id, site.name, _state(site), output.ago(site.created_at)) for site in found]
    output.show(found, output.table(("id", "name", "state", "added"), rows), as_json=as_json)


def _state(site: Site) -> str:
    return f"suspended {output.ago(site.suspended_at)}" if site.suspended_at else "admitted"


@app.command()
def workers(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the workers that were ever heard of."""
    found = list(client_of(ctx).workers())
    rows = [
        (
            f"{worker.site}/{worker.name}",
            "suspended" if worker.suspended else "live" if worker.live else "silent",
            output.ago(worker.last_seen_at),
            ", ".join(worker.kinds),
            ", ".join(f"{name} ({count})" for name, count in worker.datasets.items()),
            worker.device,
            worker.version or None,
        )
        for worker in found
    ]
    columns = ("worker", "state", "heard of", "does", "datasets", "device", "version")
    output.show(found, output.table(columns, rows), as_json=as_json)


@app.command()
def audit(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="How many of the latest entries.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show the latest changes of state, oldest first."""
    found = deque(client_of(ctx).audit(), maxlen=limit)
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
    columns = ("seq", "at", "actor", "action", "subject", "detail")
    output.show(list(found), output.table(columns, rows, right=("seq",)), as_json=as_json)


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


@site_app.command()
def suspend(ctx: typer.Context, name: SiteName, as_json: AsJson = False) -> None:
    """Refuse all of a site's tokens and choose none of its workers, until it is resumed."""
    client = client_of(ctx)
    _tell_site(client.suspend_site(_site(client, name).id), as_json=as_json)


@site_app.command()
def resume(ctx: typer.Context, name: SiteName, as_json: AsJson = False) -> None:
    """Admit a suspended site's tokens again."""
    client = client_of(ctx)
    _tell_site(client.resume_site(_site(client, name).id), as_json=as_json)


def _site(client: Client, name: str) -> Site:
    for site in client.sites():
        if site.name == name:
            return site
    raise NotFound(f"there is no site {name!r}", remedy="List what there is: `tessera admin sites`.")


def _tell_site(site: Site, *, as_json: bool) -> None:
    output.show(site, f"site {site.name} is {'suspended' if site.suspended_at else 'admitted'}", as_json=as_json)


@join_app.command("list")
def list_joining(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the workers that wait to be admitted."""
    found = list(client_of(ctx).enrolments())
    rows = [
        (
            asked.code,
            asked.site,
            asked.worker,
            asked.device,
            asked.version,
            asked.address,
            output.ago(asked.created_at),
        )
        for asked in found
    ]
    columns = ("code", "site", "worker", "device", "version", "from", "asked")
    output.show(found, output.table(columns, rows), as_json=as_json)


@join_app.command()
def approve(
    ctx: typer.Context,
    code: Code,
    site: Annotated[
        str | None, typer.Option(callback=_label, help="The site that it is of, made if there is none; as it says.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Admit the worker that shows this code."""
    client = client_of(ctx)
    asked = _waiting(client, code)
    name = site or asked.site
    known = name in (one.name for one in client.sites())
    if site is None and not known:
        _confirm_new(name)
    admitted = client.approve(asked.id, Approval(code=code, site=name, create_site=not known))
    output.show(admitted, f"{admitted.worker} is admitted as a worker of site {admitted.site}", as_json=as_json)


@join_app.command()
def decline(ctx: typer.Context, code: Code, as_json: AsJson = False) -> None:
    """Turn away the worker that shows this code."""
    client = client_of(ctx)
    declined = client.decline(_waiting(client, code).id)
    output.show(declined, f"{declined.worker} of {declined.site} is not admitted", as_json=as_json)


@join_app.command("token")
def create_enrolment_token(
    ctx: typer.Context,
    site: Annotated[str, typer.Option(callback=_label, help="Whose workers it admits; made if there is none.")],
    uses: Annotated[int, typer.Option(min=1, max=10_000, help="How many workers.")] = 1,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until it expires.")] = 1,
    token_file: TokenFileOut = None,
    as_json: AsJson = False,
) -> None:
    """Issue a token with which workers join without being waited for: `tessera worker join URL --token-file FILE`."""
    spec = TokenSpec(name=f"join-{site}"[:64], role="enrolment", site=site, expires_in_days=days, uses=uses)
    client = client_of(ctx)
    with place_for(token_file) as file:
        if site not in (known.name for known in client.sites()):
            client.create_site(site)
        issued = client.issue_token(spec)
        put_secret(issued, file)
    _tell_issued(issued, token_file, as_json=as_json, more={})


def _waiting(client: Client, code: str) -> Enrolment:
    """Return who waits under a code. Raises NotFound, and Conflict for one that was decided about already."""
    # A coordinator of the version before gives all that wait.
    found = [asked for asked in client.enrolments(code[:16]) if asked.code == normal_code(code)]
    if not found:
        raise NotFound(
            f"no worker waits under the code {code!r}", remedy="List those that do: `tessera admin join list`."
        )
    asked = found[-1]
    if asked.state != "pending":
        ended = {"approved": "was admitted", "declined": "was declined"}.get(
            asked.state, "waited until its code expired"
        )
        when = f" {output.ago(asked.decided_at)}" if asked.decided_at else ""
        remedy = "Nothing is left to do." if asked.state == "approved" else "Have the worker join again."
        raise Conflict(
            f"{asked.worker} of site {asked.site} {ended}{when}, under the code {asked.code}", remedy=remedy
        )
    return asked


def _confirm_new(site: str) -> None:
    """Raise Abort if a person says no, and Invalid if there is none to ask."""
    if not sys.stdin.isatty():
        raise Invalid(f"there is no site {site!r}", remedy=f"Give --site {site} to make it.")
    typer.confirm(f"There is no site {site}. Make it?", abort=True, err=True)


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
    if role == "enrolment":
        raise typer.BadParameter("`tessera admin join token` issues these", param_hint="'--role'")
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
    rows = [
        (
            token.id,
            token.name,
            token.role,
            token.site,
            token.expires_at.date() if token.expires_at else "never",
            _validity(token),
            token.uses_left,
        )
        for token in found
    ]
    columns = ("id", "name", "role", "site", "expires", "state", "uses left")
    output.show(found, output.table(columns, rows, right=("uses left",)), as_json=as_json)


def _validity(token: Token) -> str:
    if token.revoked_at:
        return f"revoked {output.ago(token.revoked_at)}"
    if token.expires_at and token.expires_at <= datetime.now(UTC):
        return f"expired {output.ago(token.expires_at)}"
    return "used up" if token.uses_left == 0 else "valid"


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


LOOK_SECONDS = 1.0


def status_picture(found: Status) -> Group:
    """Return two tables: the coordinator's facts, and the rounds that are open if there are any."""
    facts = output.table(("", ""), list(_facts(found).items()))
    if not found.open_rounds:
        return Group(facts)
    rows = [(r.number, r.stage, r.state, at_work(r)) for r in found.open_rounds]
    return Group(facts, "", output.table(("round", "stage", "state", "tasks"), rows, right=("round",)))


def watch_status(client: Client, *, as_json: bool) -> None:
    """Show each status that differs from the one before, until it is interrupted."""
    if as_json:
        for found in _changes(client):
            output.print_json(found, line=True)
        return
    console = output.out()
    if not console.is_terminal:
        before = ""
        for found in _changes(client):
            if (line := _line(found)) != before:
                console.print(escape(line), soft_wrap=True)
            before = line
        return
    with Live(console=console) as live:
        for found in _changes(client):
            live.update(status_picture(found))


def _changes(client: Client) -> Iterator[Status]:
    before: Status | None = None
    while True:
        found = client.status()
        if found != before:
            yield found
        before = found
        time.sleep(LOOK_SECONDS)


def _facts(found: Status) -> dict[str, str]:
    runs = ", ".join(f"{count} {state}" for state, count in sorted(found.runs.items()))
    live = sum(worker.live for worker in found.workers)
    return {
        "version": f"{found.version}, protocol {found.protocol}",
        "runs": runs or "none",
        "workers": f"{live} live of {len(found.workers)}",
        "blobs": f"{found.blobs}, {output.size(found.blob_bytes)}",
    }


def _line(found: Status) -> str:
    facts = [f"{name} {value}" for name, value in _facts(found).items() if name != "version"]
    return "; ".join((*facts, *(f"round {r.number} {r.stage} {r.state} ({at_work(r)})" for r in found.open_rounds)))


@contextmanager
def place_for(file: Path | None) -> Iterator[TextIO | None]:
    """Yield a new file that only its owner may read, opened before the secret is issued: a lost one cannot be had
    again.

    Nothing if `file` is None. Raises Invalid if it exists or cannot be made; it is removed if no secret came.
    """
    if file is None:
        yield None
        return
    try:
        opened = os.fdopen(os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w", encoding="ascii")
    except OSError as fault:
        detail = f"{file} cannot be made: {fault.strerror}; no token was issued"
        raise Invalid(detail, remedy="Remove it or choose another name.") from fault
    written = False
    try:
        with opened:
            yield opened
            written = opened.tell() > 0
    finally:
        if not written:
            file.unlink()


def put_secret(issued: IssuedToken, file: TextIO | None) -> None:
    if file:
        file.write(f"{issued.secret}\n")
