"""`tessera worker join` and `tessera worker rotate`."""

import re
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Annotated

import typer

from tessera.shared.cli.connection import checked_label
from tessera.shared.client.client import PATIENCE_SECONDS, Client
from tessera.shared.client.transport import tls_context
from tessera.shared.problems import Forbidden, Problem, Unauthenticated
from tessera.shared.terminal.output import AsJson, note, print_json
from tessera.shared.urls import require_private
from tessera.shared.version import VERSION
from tessera.worker.cli.exits import BAD_SETTINGS, INTERRUPTED, NOT_ADMITTED, ConfigFile, Errors, exits, fail
from tessera.worker.enrolment import prepare, request, wait_for
from tessera.worker.enrolment import rotate as rotate_secret
from tessera.worker.settings import SettingsError, read_settings, tls_of

ERRORS: Errors = {BAD_SETTINGS: (SettingsError, OSError), NOT_ADMITTED: (Unauthenticated, Forbidden)}

CaBundle = Annotated[Path | None, typer.Option(envvar="TESSERA_WORKER_CA_BUNDLE", help="The CAs to trust, as PEM.")]
ClientCert = Annotated[
    Path | None, typer.Option(envvar="TESSERA_WORKER_CLIENT_CERT", help="The client certificate, as PEM.")
]
ClientKey = Annotated[
    Path | None, typer.Option(envvar="TESSERA_WORKER_CLIENT_KEY", help="Its key, if in another file.")
]


@contextmanager
def _resumable() -> Iterator[None]:
    try:
        yield
    except KeyboardInterrupt:
        note("stopped; the same command continues")
        raise typer.Exit(INTERRUPTED) from None


def join(
    url: Annotated[str, typer.Argument(help="The coordinator's URL.")],
    site: Annotated[
        str | None,
        typer.Option(callback=checked_label, help="The worker's site; an enrolment token names it itself."),
    ] = None,
    name: Annotated[
        str | None,
        typer.Option(
            callback=checked_label, help="The worker's name; by default that in the settings, or this machine's."
        ),
    ] = None,
    config: ConfigFile = Path("worker.toml"),
    token_file: Annotated[
        Path | None, typer.Option(help="A file with an enrolment token, which admits the worker at once.")
    ] = None,
    ca_bundle: CaBundle = None,
    client_cert: ClientCert = None,
    client_key: ClientKey = None,
    as_json: AsJson = False,
) -> None:
    """Ask to be admitted, and wait for an administrator's decision. Creates the settings if there are none.

    The worker's secret is created here, in a file that only its owner can read, and is not printed. After an
    interruption, the same command resumes. Exit code 3: not admitted.
    """
    if (site is None) == (token_file is None):
        raise typer.BadParameter("give either the site, or the file of an enrolment token", param_hint="'--site'")
    require_private(url)
    fresh = not config.exists()
    tls = {"ca_bundle": ca_bundle, "client_cert": client_cert, "client_key": client_key}
    chosen = {key: file for key, file in tls.items() if file}
    with exits(ERRORS), _resumable():
        # Refuse an unusable file before its path is written into new settings, which a repetition would keep.
        tls_context(**chosen)
        place = prepare(config, url, name, chosen)
        verify = tls_context(**place.tls)
        try:
            shown = token_file.read_text(encoding="utf-8-sig").strip() if token_file else None
            note(f"asking {url} ...")
            with Client(url, shown, patience_seconds=PATIENCE_SECONDS, verify=verify, awaits_start=False) as client:
                enrolment = request(client, place, site, _device(), VERSION)
        except Problem as problem:
            if fresh and token_file is None and not problem.from_document:
                # No coordinator answered, so the URL may be wrong. No more than a hash of the secret can have left. A
                # token may be used up by a request whose answer was lost: only this secret is admitted then.
                config.unlink()
                place.token_file.unlink(missing_ok=True)
            raise
        if enrolment.state == "pending":
            if as_json:
                print_json(enrolment, line=True)
            else:
                note(f"the settings are in {place.config}. Give an administrator of {url} this code:")
                typer.echo(f"\n    {enrolment.code}\n")
                minutes = round(enrolment.expires_in_seconds / 60)
                note(f"It is not secret, and is valid for {minutes} minutes. Waiting to be admitted ...")
            with Client(url, place.secret, verify=verify) as client:
                enrolment = wait_for(client, enrolment)
    if as_json:
        print_json(enrolment, line=True)
    if enrolment.state != "approved":
        remedy = "Ask its administrators why; the same command asks again"
        fail(f"{url} did not admit this worker: the enrolment is {enrolment.state}. {remedy}", NOT_ADMITTED)
    note(f"admitted as a worker of site {enrolment.site}; the secret is in {place.token_file}")
    for line in place.missing:
        # Below a table's head it would be a setting of that table.
        note(f"write at the top of {place.config}: {line}")
    if place.is_region:
        note(f"then: tessera worker doctor --config {config}, and tessera regional --config {config}")
        return
    note(f"name the data in {place.config}: tessera data init PATH --out {config} writes a table")
    note(f"then: tessera worker check --config {config}")


def _device() -> str:
    """Return the name of this machine's GPU by its driver, since torch would take seconds to import."""
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        if found := re.search(r"^Model:\s*([ -~]{1,64})", file.read_text(errors="replace"), re.MULTILINE):
            return found[1]
    return "cpu"


def rotate(config: ConfigFile, as_json: AsJson = False) -> None:
    """Replace the worker's secret by a new one, created here. A running worker continues with the new secret.

    Exit code 2: invalid settings, 3: the present secret is not admitted.
    """
    with exits(ERRORS):
        settings = read_settings(config)
        if settings.token is not None or settings.token_file is None:
            raise SettingsError(f"{config} has a token: only a token_file can be rotated")
        rotated = rotate_secret(partial(Client, settings.url, verify=tls_of(settings)), settings.token_file)
    if as_json:
        print_json(rotated)
    else:
        grace = f"the previous one is accepted for another {rotated.grace_seconds:g} s"
        note(f"{settings.token_file} has a new secret; {grace}")
