"""Connection options of the commands, names in options, and look-up of runs and tokens by id or name."""

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, TypeVar

import typer
from pydantic import TypeAdapter, ValidationError

from tessera.shared.api.admin import Token
from tessera.shared.api.runs import Run
from tessera.shared.cli.render.output import ago
from tessera.shared.client.client import DEFAULT_URL, Client
from tessera.shared.near_names import nearest
from tessera.shared.problems import Fault, Invalid, NotFound
from tessera.shared.schema import Label
from tessera.shared.telemetry import spans
from tessera.shared.validation_errors import message_of

# Long enough for a passing fault, short enough for a person who waits at a terminal.
PATIENCE_SECONDS = 10.0

# Long enough to keep watching a run while its coordinator restarts.
WATCHING_PATIENCE_SECONDS = 300.0

Url = Annotated[str, typer.Option(envvar="TESSERA_URL", help="The coordinator's URL.")]
TokenText = Annotated[
    str | None,
    typer.Option(envvar="TESSERA_TOKEN", show_envvar=True, help="The token. As an option it overrides --token-file."),
]
TokenFile = Annotated[Path | None, typer.Option(envvar="TESSERA_TOKEN_FILE", help="A file that holds the token.")]

CaBundle = Annotated[Path | None, typer.Option(envvar="TESSERA_CA_BUNDLE", help="The CAs to trust, as PEM.")]
ClientCert = Annotated[
    Path | None, typer.Option(envvar="TESSERA_CLIENT_CERT", help="The client certificate, as PEM.")
]
ClientKey = Annotated[Path | None, typer.Option(envvar="TESSERA_CLIENT_KEY", help="Its key, if in another file.")]

T = TypeVar("T")

_LABEL: TypeAdapter[str | None] = TypeAdapter(Label | None)


@dataclass(frozen=True)
class Connection:
    """A coordinator's URL and the caller's credentials, from a command group's options."""

    url: str
    token: str | None
    token_file: Path | None
    ca_bundle: Path | None = None
    client_cert: Path | None = None
    client_key: Path | None = None

    def client(self, patience_seconds: float = PATIENCE_SECONDS) -> Client:
        """Return a client for the caller to close. Raises Invalid for a token that cannot be read or sent there."""
        return Client.from_options(**vars(self), patience_seconds=patience_seconds, awaits_start=False)


def connect(
    ctx: typer.Context,
    url: Url = DEFAULT_URL,
    token: TokenText = None,
    token_file: TokenFile = None,
    ca_bundle: CaBundle = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
) -> None:
    """Store a command group's options for `client_of`, and begin the trace of all the command's requests."""
    spans.begin("tessera")
    ctx.call_on_close(spans.end)
    ctx.with_resource(spans.span(f"tessera {ctx.info_name} {ctx.invoked_subcommand}"))
    # The variable TESSERA_TOKEN must not override a file that the command line names.
    text = None if _is_given(ctx, "token_file") and not _is_given(ctx, "token") else token
    ctx.obj = Connection(url, text, token_file, ca_bundle, client_cert, client_key)


def _is_given(ctx: typer.Context, option: str) -> bool:
    """Return whether an option is on the command line, rather than in a variable or by default."""
    source = ctx.get_parameter_source(option)
    return source is not None and source.name == "COMMANDLINE"


def checked_label(name: str | None) -> str | None:
    """Return the name of a site, a worker or a token that an option gives, as its callback. Raises BadParameter."""
    try:
        return _LABEL.validate_python(name)
    except ValidationError as fault:
        raise typer.BadParameter(f"{name!r}: {message_of(fault.errors()[0])}") from None


def client_of(ctx: typer.Context, patience_seconds: float = PATIENCE_SECONDS) -> Client:
    """Return a client that is closed when the command ends."""
    connection: Connection = ctx.obj
    return ctx.with_resource(connection.client(patience_seconds))


def find_run(client: Client, named: str) -> Run:
    """Return the run with this id, or the only run with this name or id prefix."""

    def describe(run: Run) -> str:
        at = f"version {run.version.number} of {run.spec.rounds}"
        return f"{run.spec.name}, {run.state}, {at}, created {ago(run.created_at)}"

    try:
        return client.run(named)
    except NotFound:
        return only("run", named, client.runs(), lambda run: run.id, lambda run: run.spec.name, describe)


def find_token(client: Client, named: str) -> Token:
    """Return the token with this id, or the only valid token with this name or id prefix."""
    tokens = list(client.tokens())
    if exact := [token for token in tokens if token.id == named]:
        return exact[0]
    live = [token for token in tokens if token.revoked_at is None]
    return only("token", named, live, lambda token: token.id, lambda token: token.name)


def only(
    kind: str,
    named: str,
    among: Iterable[T],
    id_of: Callable[[T], str],
    name_of: Callable[[T], str],
    describe: Callable[[T], str] | None = None,
) -> T:
    """Return the only item whose name is `named` or whose id begins with it.

    Raises NotFound if there is none, and Invalid that lists the matches if there are several.
    """
    items = list(among)
    found = [item for item in items if named and (name_of(item) == named or id_of(item).startswith(named))]
    if not found:
        near = nearest(named, sorted({name_of(item) for item in items}))
        suggestion = f"; did you mean {near!r}?" if near else ""
        raise NotFound(
            f"there is no {kind} {named!r}{suggestion}", remedy=f"List the {kind}s: `tessera {_LISTS[kind]}`."
        )
    if len(found) > 1:
        faults = [Fault(pointer=id_of(item), detail=(describe or name_of)(item)) for item in found]
        detail = f"{named!r} could be any of {len(found)} {kind}s"
        raise Invalid(detail, errors=faults, remedy="Give the id, or as much of it as is unique.")
    return found[0]


_LISTS = {"run": "run list", "token": "admin token list", "site": "admin sites"}
