"""`tessera admin`: sites, tokens, enrolments, workers and the coordinator's status."""

import errno
import os
import secrets
import sys
import time
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Group, RenderableType
from rich.live import Live
from rich.markup import escape

from tessera.shared import units
from tessera.shared.api.admin import (
    WITHDRAWAL,
    Approval,
    Enrolment,
    FailureGroup,
    IssuedToken,
    LiveRun,
    Site,
    Status,
    Token,
    TokenSpec,
    WorkerView,
)
from tessera.shared.api.audit_chain import named
from tessera.shared.api.token_format import hash_of, new_secret
from tessera.shared.cli import studies
from tessera.shared.cli.connection import checked_label, client_of, connect
from tessera.shared.client.client import WATCHING_PATIENCE_SECONDS, Client
from tessera.shared.client.lookup import find_site, find_token
from tessera.shared.near_names import did_you_mean
from tessera.shared.problems import Conflict, Invalid, NotFound, Problem
from tessera.shared.schema import DEFAULT_STUDY, TokenRole
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson
from tessera.shared.version import compared

app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    callback=connect,
    help="Sites, workers, tokens, and the coordinator at a glance.",
)
site_app = typer.Typer(no_args_is_help=True, help="Admit institutions.")
token_app = typer.Typer(no_args_is_help=True, help="Issue, rotate and revoke tokens.")
join_app = typer.Typer(no_args_is_help=True, help="Admit workers that ask to join.")
app.add_typer(join_app, name="join")
app.add_typer(site_app, name="site")
app.add_typer(token_app, name="token")
app.add_typer(studies.app, name="study")


Days = Annotated[int | None, typer.Option(min=1, max=3650, help="Days until it expires; never by default.")]
TokenFileOut = Annotated[
    Path | None, typer.Option(help="Write the secret to this new file (mode 0600) instead of printing it.")
]
SiteName = Annotated[str, typer.Argument(help="The site's name.")]
TokenName = Annotated[str, typer.Argument(help="The token's id, the beginning of it, or its name.")]
StudyNames = Annotated[
    list[str] | None, typer.Option("--study", help="A study to belong to, by default `default`. Repeatable.")
]
Code = Annotated[str, typer.Argument(help="The code that the worker shows, such as WDJB-MJHT.")]


@app.command()
def status(
    ctx: typer.Context,
    watch: Annotated[bool, typer.Option("--watch", help="Refresh on every change, until ^C.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show the coordinator's status.

    With `--watch`, a terminal shows a view that is updated in place; a pipe and `--json` print a line per change.
    """
    if watch:
        watch_status(client_of(ctx, WATCHING_PATIENCE_SECONDS), as_json=as_json)
        return
    found = client_of(ctx).status()
    output.show(found, status_view(found), as_json=as_json)


@app.command()
def sites(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the sites."""
    found = list(client_of(ctx).sites())
    rows = [
        (
            site.id,
            site.name,
            f"suspended {units.ago(site.suspended_at)}" if site.suspended_at else "admitted",
            units.ago(site.created_at),
        )
        for site in found
    ]
    output.show(found, output.table(("id", "name", "state", "added"), rows), as_json=as_json)


@app.command()
def workers(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List all workers that have ever connected."""
    client = client_of(ctx)
    found, own = list(client.workers()), client.about().version
    rows = [
        (
            f"{worker.site}/{worker.name}",
            _state(worker),
            units.ago(worker.last_seen_at),
            ", ".join(worker.kinds),
            ", ".join(f"{name} ({count})" for name, count in worker.datasets.items()),
            worker.device,
            f"{worker.version} {compared(worker.version, own)}".strip(),
        )
        for worker in found
    ]
    columns = ("worker", "state", "last contact", "does", "datasets", "device", "version")
    output.show(found, output.table(columns, rows), as_json=as_json)


def _state(worker: WorkerView) -> str:
    if worker.revoked or worker.suspended:
        return "revoked" if worker.revoked else "suspended"
    return "live" if worker.live else "silent"


@app.command()
def audit(
    ctx: typer.Context,
    limit: Annotated[int, typer.Option(min=1, help="Number of entries, counted from the latest.")] = 50,
    as_json: AsJson = False,
) -> None:
    """Show the latest entries of the audit log, oldest first, with the names behind the sites' pseudonyms.

    With --json, entries are as the chain has them.
    """
    client = client_of(ctx)
    found, names = deque(client.audit(), maxlen=limit), client.audit_names()
    rows = [
        (
            entry.seq,
            entry.at.isoformat(timespec="seconds"),
            entry.actor,
            entry.action,
            entry.subject,
            ", ".join(f"{name} {value}" for name, value in entry.detail.items() if value is not None),
        )
        for entry in (named(names, each) for each in found)
    ]
    columns = ("seq", "at", "actor", "action", "subject", "detail")
    output.show(list(found), output.table(columns, rows, right=("seq",)), as_json=as_json)


@site_app.command("add")
def add_site(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(callback=checked_label, help="The name of the new site.")],
    study: StudyNames = None,
    days: Days = None,
    token_file: TokenFileOut = None,
    as_json: AsJson = False,
) -> None:
    """Add a site and issue the token that admits its workers."""
    spec = TokenSpec(name=name, role="site", site=name, expires_in_days=days)
    client = client_of(ctx)
    with new_secret_file(token_file) as store:
        site = client.create_site(name, study or [DEFAULT_STUDY])
        try:
            issued = _issue(client, spec, store)
        except Problem:
            output.note(
                f"site {name} exists now, without a token. When nothing prevents it, issue one: "
                f"`tessera admin token create NAME --role site --site {name}`"
            )
            raise
    _print_issued(issued, token_file, as_json=as_json, more={"site": site.model_dump(mode="json")})


@site_app.command()
def suspend(ctx: typer.Context, name: SiteName, as_json: AsJson = False) -> None:
    """Reject all of a site's tokens and select none of its workers until the site is resumed."""
    client = client_of(ctx)
    _print_site(client.suspend_site(find_site(client, name).id), as_json=as_json)


@site_app.command()
def resume(ctx: typer.Context, name: SiteName, as_json: AsJson = False) -> None:
    """Accept a suspended site's tokens again."""
    client = client_of(ctx)
    _print_site(client.resume_site(find_site(client, name).id), as_json=as_json)


@site_app.command(help=WITHDRAWAL)
def withdraw(
    ctx: typer.Context,
    name: SiteName,
    study: Annotated[
        str | None, typer.Option(help="Withdraw it from this study alone, if it is in others too.")
    ] = None,
    sure: Annotated[bool, typer.Option("--yes", help="Do not ask for the site's name again.")] = False,
    as_json: AsJson = False,
) -> None:
    client = client_of(ctx)
    site = find_site(client, name)
    if not sure:
        if not sys.stdin.isatty():
            raise Invalid(
                f"withdrawing {site.name} is final, and there is no terminal to confirm it", remedy="Add --yes."
            )
        output.note(WITHDRAWAL)
        if typer.prompt("Type the site's name to withdraw it", err=True) != site.name:
            raise Invalid(f"this is not the name {site.name!r}; nothing was changed", remedy="Repeat the command.")
    done = client.withdraw_site(site.id, study)
    remains = (
        f"is still {done.name} in other studies" if done.name == site.name else f"is called {done.name} from now on"
    )
    output.show(done, f"site {site.name} has withdrawn, and {remains}", as_json=as_json)
    for run in done.runs:
        output.note(
            f"versions {run.first_version} and later of {run.name} keep its influence. To begin before them: "
            f"tessera run create --from {run.run} --without {done.name}"
        )


def _print_site(site: Site, *, as_json: bool) -> None:
    output.show(site, f"site {site.name} is {'suspended' if site.suspended_at else 'admitted'}", as_json=as_json)


@join_app.command("list")
def list_joining(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the workers that wait for approval."""
    found = list(client_of(ctx).enrolments())
    rows = [(e.code, e.site, e.worker, e.device, e.version, e.address, units.ago(e.created_at)) for e in found]
    columns = ("code", "site", "worker", "device", "version", "from", "asked")
    output.show(found, output.table(columns, rows), as_json=as_json)


@join_app.command()
def approve(
    ctx: typer.Context,
    code: Code,
    site: Annotated[
        str | None,
        typer.Option(
            callback=checked_label,
            help="The worker's site, created if missing; by default the site that the worker names, if it exists.",
        ),
    ] = None,
    study: StudyNames = None,
    as_json: AsJson = False,
) -> None:
    """Admit the worker that shows this code."""
    client = client_of(ctx)
    enrolment = _pending(client, code)
    name = site or enrolment.site
    sites = [one.name for one in client.sites()]
    known = name in sites
    if site is None and not known:
        unknown = f"there is no site {name!r}{did_you_mean(name, sites)}"
        if not sys.stdin.isatty():
            raise Invalid(unknown, remedy=f"Create it with --site {name}.")
        typer.confirm(f"{unknown} Create {name!r}?", abort=True, err=True)
    _require_new(name, known=known, study=study)
    approval = Approval(code=code, site=name, create_site=not known, studies=tuple(study or [DEFAULT_STUDY]))
    admitted = client.approve(enrolment.id, approval)
    output.show(admitted, f"{admitted.worker} is admitted as a worker of site {admitted.site}", as_json=as_json)


@join_app.command()
def decline(ctx: typer.Context, code: Code, as_json: AsJson = False) -> None:
    """Decline the worker that shows this code."""
    client = client_of(ctx)
    declined = client.decline(_pending(client, code).id)
    output.show(declined, f"{declined.worker} of {declined.site} is not admitted", as_json=as_json)


@join_app.command("token")
def create_enrolment_token(
    ctx: typer.Context,
    site: Annotated[str, typer.Option(callback=checked_label, help="The workers' site, created if missing.")],
    uses: Annotated[int, typer.Option(min=1, max=10_000, help="The number of workers that it admits.")] = 1,
    study: StudyNames = None,
    days: Annotated[int, typer.Option(min=1, max=3650, help="Days until it expires.")] = 1,
    token_file: TokenFileOut = None,
    as_json: AsJson = False,
) -> None:
    """Issue a token that lets workers join without approval: `tessera worker join URL --token-file FILE`."""
    # Several may be valid at the same time, and a name is one token's.
    name = f"join-{site}"[:59] + f"-{secrets.token_hex(2)}"
    spec = TokenSpec(name=name, role="enrolment", site=site, expires_in_days=days, uses=uses)
    client = client_of(ctx)
    with new_secret_file(token_file) as store:
        known = site in (one.name for one in client.sites())
        _require_new(site, known=known, study=study)
        if not known:
            client.create_site(site, study or [DEFAULT_STUDY])
        issued = _issue(client, spec, store)
    _print_issued(issued, token_file, as_json=as_json)


def _require_new(site: str, *, known: bool, study: list[str] | None) -> None:
    """Raise Invalid if studies are named for a site that has its own."""
    if known and study:
        raise Invalid(
            f"site {site} exists, and its studies stay as they are",
            remedy=f"Leave out --study, and use `tessera admin study add STUDY --site {site}`.",
        )


def _pending(client: Client, code: str) -> Enrolment:
    found = list(client.enrolments(code[:16]))
    if not found:
        raise NotFound(
            f"no worker waits under the code {code!r}", remedy="List those that wait: `tessera admin join list`."
        )
    last = found[-1]
    if last.state != "pending":
        ended = {"approved": "was admitted", "declined": "was declined"}.get(
            last.state, "waited until its code expired"
        )
        when = f" {units.ago(last.decided_at)}" if last.decided_at else ""
        remedy = "Nothing is left to do." if last.state == "approved" else "Have the worker join again."
        raise Conflict(f"{last.worker} of site {last.site} {ended}{when}, under the code {last.code}", remedy=remedy)
    return last


@token_app.command("create")
def create_token(
    ctx: typer.Context,
    name: Annotated[str, typer.Argument(callback=checked_label, help="The name of the new token.")],
    role: Annotated[TokenRole, typer.Option(help="The token's permissions.")],
    site: Annotated[
        str | None, typer.Option(callback=checked_label, help="For role site: the site of the workers.")
    ] = None,
    study: StudyNames = None,
    days: Days = None,
    token_file: TokenFileOut = None,
    as_json: AsJson = False,
) -> None:
    """Issue a token."""
    if role == "enrolment":
        raise typer.BadParameter("`tessera admin join token` issues these", param_hint="'--role'")
    if role == "site" and site is None:
        raise typer.BadParameter("a token of role site needs it: --site NAME", param_hint="'--site'")
    if role != "site" and site is not None:
        raise typer.BadParameter(f"a token of role {role} has no site: leave it out", param_hint="'--site'")
    if role not in ("orchestrator", "viewer") and study:
        raise typer.BadParameter(f"a token of role {role} has no studies: leave it out", param_hint="'--study'")
    spec = TokenSpec(name=name, role=role, site=site, studies=tuple(study or ()) or None, expires_in_days=days)
    with new_secret_file(token_file) as store:
        issued = _issue(client_of(ctx), spec, store)
    _print_issued(issued, token_file, as_json=as_json)


def _issue(client: Client, spec: TokenSpec, store: Callable[[str], None]) -> IssuedToken:
    issued = client.issue_token(spec)
    store(issued.secret)
    return issued


def _print_issued(
    issued: IssuedToken, file: Path | None, *, as_json: bool, more: dict[str, Any] | None = None
) -> None:
    if as_json:
        hidden = {"secret"} if file else None
        output.print_json({**(more or {}), "token": issued.model_dump(mode="json", exclude=hidden)})
        return
    token = f"token {issued.name} ({issued.role}, {issued.id})"
    if file:
        output.note(f"{token}: the secret is in {file}")
    else:
        output.note(f"{token}: this is its secret, which is not shown again")
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
            units.ago(token.created_at),
            units.ago(token.last_used_at) if token.last_used_at else "never",
            token.expires_at.date() if token.expires_at else "never",
            _validity(token),
            token.uses_left,
        )
        for token in found
    ]
    columns = ("id", "name", "role", "site", "created", "last used", "expires", "state", "uses left")
    output.show(found, output.table(columns, rows, right=("uses left",)), as_json=as_json)


def _validity(token: Token) -> str:
    if token.revoked_at:
        return f"revoked {units.ago(token.revoked_at)}"
    if token.expires_at and token.expires_at <= datetime.now(UTC):
        return f"expired {units.ago(token.expires_at)}"
    return "used up" if token.uses_left == 0 else "valid"


@token_app.command()
def rotate(ctx: typer.Context, token: TokenName, token_file: TokenFileOut = None, as_json: AsJson = False) -> None:
    """Give a token a new secret. The present one stays valid for a while, so that its holder can change over."""
    client = client_of(ctx)
    found = find_token(client, token)
    secret = new_secret(found.role)
    with new_secret_file(token_file) as store:
        store(secret)
        rotated = client.rotate_token(found.id, hash_of(secret))
    _print_issued(IssuedToken(**found.model_dump(), secret=secret), token_file, as_json=as_json)
    output.note(f"the secret before it stays valid for another {rotated.grace_seconds:g} s")


@token_app.command()
def revoke(ctx: typer.Context, token: TokenName, as_json: AsJson = False) -> None:
    """Revoke a token, effective at once."""
    client = client_of(ctx)
    found = find_token(client, token)
    client.revoke_token(found.id)
    if as_json:
        output.print_json(next(token for token in client.tokens() if token.id == found.id))
    else:
        output.out().print(f"token {found.name} ({found.id}) is revoked")


LOOK_SECONDS = 1.0


def status_view(found: Status) -> Group:
    """Return tables of the coordinator's facts, the live runs, what needs a person, and the latest failures."""
    parts: list[RenderableType] = [output.table(("", ""), list(_facts(found).items()))]
    if found.live_runs:
        runs = [(r.name, r.state, r.method, f"{r.version} of {r.rounds}", _round(r)) for r in found.live_runs]
        parts += ["", output.table(("run", "state", "method", "versions", "round"), runs)]
        parts += [escape(f"{r.name} warns: {warning}") for r in found.live_runs for warning in r.warnings]
    if found.needs_attention:
        parts += ["", "Needs attention"]
        parts += [_line_of(one.title, one.detail, one.remedy) for one in found.needs_attention]
        if left := found.needs_attention_total - len(found.needs_attention):
            parts.append(f"and {left} more")
    if found.failures:
        parts += ["", "Latest failures"]
        parts += [_line_of(_failure(one), one.detail, one.remedy) for one in found.failures]
    return Group(*parts)


def _line_of(*sentences: str) -> str:
    return escape("- " + " ".join(f"{one.removesuffix('.')}." for one in sentences if one))


def _failure(group: FailureGroup) -> str:
    when = f" {units.ago(group.latest_at)}" if group.latest_at else ""
    return f"{group.name}: {group.tasks} {group.state}, {group.code}, at {', '.join(group.workers)}{when}"


def _round(run: LiveRun) -> str:
    if run.round is None:
        return run.reason or "none open"
    tasks = ", ".join(f"{count} {state}" for state, count in run.round.tasks.items())
    return f"{run.round.number} {run.round.stage} {run.round.state} ({tasks or 'no task'})"


def watch_status(client: Client, *, as_json: bool) -> None:
    """Show each status that differs from the previous one, until interrupted."""
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
            live.update(status_view(found))


def _changes(client: Client) -> Iterator[Status]:
    before: Status | None = None
    while True:
        found = client.status()
        # Free disk and memory differ at each look.
        if before is None or found != found.model_copy(
            update={"free_disk_bytes": before.free_disk_bytes, "memory_share": before.memory_share}
        ):
            yield found
        before = found
        time.sleep(LOOK_SECONDS)


def _facts(found: Status) -> dict[str, str]:
    runs = ", ".join(f"{count} {state}" for state, count in sorted(found.runs.items()))
    return {
        "version": f"{found.version}, protocol {found.protocol}",
        "runs": runs or "none",
        "workers": f"{found.live_workers} live of {found.workers}",
    } | _process_facts(found)


def _process_facts(found: Status) -> dict[str, str]:
    """Return the facts that a caller who does not read all studies does not get."""
    if found.free_disk_bytes is None:
        return {}
    return {
        "blobs": f"{found.blobs}, {units.size(found.blob_bytes or 0)}",
        "disk": f"{units.size(found.free_disk_bytes)} free",
        "memory": f"{output.share(found.memory_share)} in use" if found.memory_share else "no limit",
    }


def _line(found: Status) -> str:
    facts = [f"{name} {value}" for name, value in _facts(found).items() if name not in ("version", "disk", "memory")]
    runs = (f"{r.name} {r.version} of {r.rounds}, round {_round(r)}" for r in found.live_runs)
    needs = (one.title for one in found.needs_attention)
    return "; ".join((*facts, *runs, *needs))


@contextmanager
def new_secret_file(file: Path | None) -> Iterator[Callable[[str], None]]:
    """Yield a function that stores a secret in a new file of mode 0600, or does nothing if `file` is None.

    The file has the room for the secret before that is issued, since a secret is shown only once. It is removed if no
    secret was stored or the coordinator refuses it, and stays if no answer came. Raises Invalid if the file exists or
    cannot be written.
    """
    if file is None:
        yield lambda _: None
        return
    stored = False
    with _refusing(f"{file} cannot be created", "Remove it or choose another name."):
        descriptor = os.open(file, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)

    def store(secret: str) -> None:
        nonlocal stored
        with _refusing(f"{file} cannot be written", "Make room there, or choose another file."):
            _overwrite(descriptor, f"{secret}\n".encode("ascii"))
        stored = True

    try:
        store(" " * len(new_secret("enrolment")))
        stored = False
        yield store
    except Problem as problem:
        # With 5xx, or without an answer of the coordinator, the secret may be valid.
        if stored and problem.from_document and problem.status < 500:
            stored = False
        elif stored:
            output.note(f"{file} has the new secret; it is not known whether the coordinator has accepted it")
        raise
    finally:
        os.close(descriptor)
        if not stored:
            file.unlink()


@contextmanager
def _refusing(detail: str, remedy: str) -> Iterator[None]:
    try:
        yield
    except OSError as fault:
        raise Invalid(f"{detail}: {fault.strerror}; no token was issued or changed", remedy=remedy) from fault


def _overwrite(descriptor: int, content: bytes) -> None:
    """Make this the whole content of a file, which survives a power cut."""
    if os.pwrite(descriptor, content, 0) < len(content):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    os.ftruncate(descriptor, len(content))
    os.fsync(descriptor)
