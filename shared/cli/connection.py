"""How the commands reach a coordinator, and how they find what a person names."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer

from tessera.shared.api.admin import Token
from tessera.shared.api.runs import Run
from tessera.shared.cli.render.output import ago
from tessera.shared.client.client import DEFAULT_URL, Client
from tessera.shared.problems import Fault, Invalid, NotFound
from tessera.shared.telemetry import spans

# Long enough for a passing fault, short enough that a person at a terminal does not wonder.
PATIENCE_SECONDS = 10.0

# A run outlives many a restart of its coordinator, and so does watching it.
WATCHING_PATIENCE_SECONDS = 300.0

Url = Annotated[str, typer.Option(envvar="TESSERA_URL", help="Where the coordinator is.")]
TokenText = Annotated[
    str | None, typer.Option(envvar="TESSERA_TOKEN", show_envvar=True, help="The token; stronger than --token-file.")
]
TokenFile = Annotated[Path | None, typer.Option(envvar="TESSERA_TOKEN_FILE", help="A file that holds the token.")]

CaBundle = Annotated[Path | None, typer.Option(envvar="TESSERA_CA_BUNDLE", help="The CAs to trust, as PEM.")]
ClientCert = Annotated[Path | None, typer.Option(envvar="TESSERA_CLIENT_CERT", help="A certificate to show, as PEM.")]
ClientKey = Annotated[Path | None, typer.Option(envvar="TESSERA_CLIENT_KEY", help="Its key, if in another file.")]

T = TypeVar("T")


@dataclass(frozen=True)
class Connection:
    """Which coordinator, and as whom: what a command group's options say."""

    url: str
    token: str | None
    token_file: Path | None
    ca_bundle: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def client(self, patience_seconds: float = PATIENCE_SECONDS) -> Client:
        """Return a client, to be closed by the caller. Raises Invalid for a token that cannot be read, or be sent
        there."""
        return Client.as_told(**vars(self), patience_seconds=patience_seconds)


def connect(
    ctx: typer.Context,
    url: Url = DEFAULT_URL,
    token: TokenText = None,
    token_file: TokenFile = None,
    ca_bundle: CaBundle = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
) -> None:
    """A command group's callback: its options become what `client_of` connects with. All that a command asks is one
    trace."""
    spans.begin("tessera")
    ctx.call_on_close(spans.end)
    ctx.with_resource(spans.span(f"tessera {ctx.info_name} {ctx.invoked_subcommand}"))
    ctx.obj = Connection(url, token, token_file, ca_bundle, client_cert, client_key)


def client_of(ctx: typer.Context, patience_seconds: float = PATIENCE_SECONDS) -> Client:
    """Return the client for a command, closed when the command ends."""
    connection: Connection = ctx.obj
    return ctx.with_resource(connection.client(patience_seconds))


def find_run(client: Client, named: str) -> Run:
    """Return the run with this id, or the only one whose id begins so or whose name it is."""
    try:
        return client.run(named)
    except NotFound:
        return only("run", named, client.runs(), lambda run: run.id, lambda run: run.spec.name, _told_run)


def _told_run(run: Run) -> str:
    """Return what tells a run from others of its name."""
    at = f"version {run.version.number} of {run.spec.rounds}"
    return f"{run.spec.name}, {run.state}, {at}, begun {ago(run.created_at)}"


def find_token(client: Client, named: str) -> Token:
    """Return the token with this id, or the only one not revoked whose id begins so or whose name it is."""
    tokens = list(client.tokens())
    exact = [token for token in tokens if token.id == named]
    if exact:
        return exact[0]
    live = [token for token in tokens if token.revoked_at is None]
    return only("token", named, live, lambda token: token.id, lambda token: token.name)


def only(
    kind: str,
    named: str,
    among: Iterable[T],
    id_of: Callable[[T], str],
    name_of: Callable[[T], str],
    told: Callable[[T], str] | None = None,
) -> T:
    """Return the one thing whose name is `named` or whose id begins so.

    Raises NotFound if there is none, and Invalid naming them if there are several, each as `told`, or by its name.
    """
    found = [thing for thing in among if named and (name_of(thing) == named or id_of(thing).startswith(named))]
    if not found:
        raise NotFound(f"there is no {kind} {named!r}", remedy=f"List what there is: `tessera {_LISTS[kind]}`.")
    if len(found) > 1:
        faults = [Fault(pointer=id_of(thing), detail=(told or name_of)(thing)) for thing in found]
        detail = f"{named!r} could be any of {len(found)} {kind}s"
        raise Invalid(
            detail, errors=faults, remedy="Name the one that you mean by its id, or by as much of it as tells."
        )
    return found[0]


_LISTS = {"run": "run list", "token": "admin token list"}
