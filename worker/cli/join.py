"""`tessera worker join` and `rotate`."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from ssl import SSLContext
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError

from tessera.shared.api.admin import Enrolment
from tessera.shared.cli.connection import PATIENCE_SECONDS
from tessera.shared.cli.render.output import AsJson, complain, note, print_json
from tessera.shared.client.client import Client
from tessera.shared.client.transport import Unreachable, tls_context
from tessera.shared.problems import Forbidden, Unauthenticated
from tessera.shared.schema import Label
from tessera.shared.urls import require_private
from tessera.shared.version import VERSION
from tessera.worker.enrolment import Place, asked, awaited, prepared
from tessera.worker.enrolment import rotate as rotate_secret
from tessera.worker.inventory import describe, device_of
from tessera.worker.settings import SettingsError, read_settings, tls_of

BAD_SETTINGS = 2
NOT_ADMITTED = 3

ConfigFile = Annotated[Path, typer.Option("--config", help="The worker's settings, as TOML.")]

CaBundle = Annotated[Path | None, typer.Option(envvar="TESSERA_WORKER_CA_BUNDLE", help="The CAs to trust, as PEM.")]
ClientCert = Annotated[
    Path | None, typer.Option(envvar="TESSERA_WORKER_CLIENT_CERT", help="A certificate to show, as PEM.")
]
ClientKey = Annotated[
    Path | None, typer.Option(envvar="TESSERA_WORKER_CLIENT_KEY", help="Its key, if in another file.")
]


@contextmanager
def _said_in_one_line() -> Iterator[None]:
    try:
        yield
    except (SettingsError, OSError) as fault:
        complain(str(fault))
        raise typer.Exit(BAD_SETTINGS) from fault
    except (Unauthenticated, Forbidden) as fault:
        complain(str(fault))
        raise typer.Exit(NOT_ADMITTED) from fault


def join(
    url: Annotated[str, typer.Argument(help="Where the coordinator is.")],
    site: Annotated[
        str | None, typer.Option(help="Which site this worker is of; as an enrolment token says.")
    ] = None,
    name: Annotated[str | None, typer.Option(help="What it is called; as the settings or this machine.")] = None,
    config: ConfigFile = Path("worker.toml"),
    token_file: Annotated[
        Path | None, typer.Option(help="A file with an enrolment token, which admits the worker at once.")
    ] = None,
    ca_bundle: CaBundle = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    as_json: AsJson = False,
) -> None:
    """Ask to be admitted, and wait for an administrator's word; makes the settings if there are none.

    The worker's secret is made here, stays in a file that only its owner reads, and is shown to nobody. Should this
    be cut off, the same command goes on with it. Exit code 3: not admitted.
    """
    if (site is None) == (token_file is None):
        raise typer.BadParameter("give either the site, or the file of an enrolment token", param_hint="'--site'")
    _require_label("'--site'", site)
    _require_label("'--name'", name)
    require_private(url)
    fresh = not config.exists()
    tls = {"ca_bundle": ca_bundle, "client_cert": client_cert, "client_key": client_key}
    with _said_in_one_line():
        place = prepared(config, url, name, {key: file for key, file in tls.items() if file})
        verify = tls_context(**place.tls)
        try:
            enrolment = _ask(url, verify, place, site, token_file)
        except Unreachable:
            if fresh:
                # With another URL the same command is to begin anew; only a hash of the secret can have left.
                config.unlink()
                place.token_file.unlink(missing_ok=True)
            raise
        if enrolment.state == "pending":
            _show_code(url, place, enrolment, as_json=as_json)
            with Client(url, place.secret, verify=verify) as client:
                enrolment = awaited(client, enrolment)
    if as_json:
        print_json(enrolment, line=True)
    if enrolment.state != "approved":
        complain(f"{url} did not admit this worker: the enrolment is {enrolment.state}")
        note("Talk to its administrators; the same command asks again.")
        raise typer.Exit(NOT_ADMITTED)
    note(f"admitted as a worker of site {enrolment.site}; the secret is in {place.token_file}")
    for line in place.missing:
        note(f"add to {place.config}: {line}")
    note(f"name the data in {place.config}, then: tessera worker check --config {config}")


def rotate(config: ConfigFile, as_json: AsJson = False) -> None:
    """Put a new secret in place of the worker's, made here; a running worker goes on with it by itself.

    Exit code 2: bad settings, 3: the present secret is not admitted.
    """
    with _said_in_one_line():
        settings = read_settings(config)
        if settings.token is not None or settings.token_file is None:
            raise SettingsError(f"{config}: what is rotated is a token_file; there is a token")
        rotated = rotate_secret(partial(Client, settings.url, verify=tls_of(settings)), settings.token_file)
    if as_json:
        print_json(rotated)
    else:
        note(f"{settings.token_file} has a new secret; the one before is good for {rotated.grace_seconds:g} s more")


def _ask(url: str, verify: SSLContext, place: Place, site: str | None, token_file: Path | None) -> Enrolment:
    shown = None
    if token_file is not None:
        shown = token_file.read_text(encoding="utf-8").strip()
    note(f"asking {url} ...")
    with Client(url, shown, patience_seconds=PATIENCE_SECONDS, verify=verify) as client:
        return asked(client, place, site, describe(device_of("auto")), VERSION)


def _show_code(url: str, place: Place, enrolment: Enrolment, *, as_json: bool) -> None:
    if as_json:
        print_json(enrolment, line=True)
        return
    minutes = round(enrolment.expires_in_seconds / 60)
    note(f"{place.config} and {place.token_file} are there. Tell an administrator of {url} this code:")
    typer.echo(f"\n    {enrolment.code}\n")
    note(f"It is no secret, and good for {minutes} minutes. Waiting to be admitted ...")


def _require_label(option: str, value: str | None) -> None:
    try:
        TypeAdapter(Label | None).validate_python(value)
    except ValidationError:
        said = "a name is up to 64 letters, digits, dots, dashes and underscores, and begins with a letter or digit"
        raise typer.BadParameter(f"{value!r}: {said}", param_hint=option) from None
