"""Connection options of the commands, and names in options."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from tessera.shared.client.client import DEFAULT_URL, PATIENCE_SECONDS, Client
from tessera.shared.schema import Label
from tessera.shared.telemetry import spans
from tessera.shared.validation_errors import message_of

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

RunNamed = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, the beginning of it, or its name.")]

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
    """Return True if an option is on the command line, rather than in a variable or by default."""
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
