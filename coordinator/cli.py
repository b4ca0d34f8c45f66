"""The commands of `tessera coordinator`."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import structlog
import typer
from pydantic import ValidationError

from tessera.coordinator.settings import CoordinatorSettings, data_dir
from tessera.coordinator.telemetry import logging
from tessera.shared import environment
from tessera.shared.diagnostics import effective, examined
from tessera.shared.host_memory import keep_freed_memory
from tessera.shared.lazy_import import DeferredModule, load
from tessera.shared.problems import Conflict, Invalid, Problem, StoreAway
from tessera.shared.telemetry import spans
from tessera.shared.terminal.output import AsJson, print_findings, print_json, print_settings
from tessera.shared.validation_errors import message_of, messages_of

if TYPE_CHECKING:
    from obstore import exceptions as storage
    from sqlalchemy import exc

    from tessera.coordinator import services as serving
    from tessera.coordinator.auth import tokens
    from tessera.coordinator.blobs import store
    from tessera.coordinator.conductor import child_process
    from tessera.coordinator.db import engine
    from tessera.coordinator.dossier import signing_key
    from tessera.coordinator.maintenance import backup
    from tessera.coordinator.notify import wakeup
    from tessera.coordinator.operations import remerge
    from tessera.shared.api import admin
    from tessera.shared.methods import registry
else:
    # Help and a mistyped line need no database.
    storage, exc = DeferredModule("obstore.exceptions"), DeferredModule("sqlalchemy.exc")
    serving = DeferredModule("tessera.coordinator.services")
    tokens = DeferredModule("tessera.coordinator.auth.tokens")
    store = DeferredModule("tessera.coordinator.blobs.store")
    child_process = DeferredModule("tessera.coordinator.conductor.child_process")
    engine = DeferredModule("tessera.coordinator.db.engine")
    signing_key = DeferredModule("tessera.coordinator.dossier.signing_key")
    backup = DeferredModule("tessera.coordinator.maintenance.backup")
    remerge = DeferredModule("tessera.coordinator.operations.remerge")
    wakeup = DeferredModule("tessera.coordinator.notify.wakeup")
    admin = DeferredModule("tessera.shared.api.admin")
    registry = DeferredModule("tessera.shared.methods.registry")

app = typer.Typer(
    add_completion=False,
    help="Run a coordinator. Settings come from the environment: TESSERA_DATABASE_URL and others.",
)
log = structlog.get_logger()

Folder = Annotated[Path, typer.Argument(help="folder of the backup, for its database and blobs")]


@app.command()
def migrate() -> None:
    """Migrate the database's schema to this version. Safe to repeat."""
    with _database("the schema was not changed") as database:
        database.migrate()
    typer.echo(f"the schema of {database.shown} is up to date", err=True)


@app.command()
def token(
    name: Annotated[str, typer.Option(help="Name of the token in the audit chain.")] = "recovered-admin",
    as_json: AsJson = False,
) -> None:
    """Issue an administrator's token on the coordinator's own machine and print it once.

    Use it when every such token is lost. It needs no token, but write access to the database.
    """
    with _database("no token was issued") as database:
        database.require_head(or_ahead=True)
        try:
            spec = admin.TokenSpec(name=name, role="admin")
        except ValidationError as refusal:
            raise _exit(f"--name: {message_of(refusal.errors()[0])}") from None
        with database.transaction() as session:
            try:
                tokens.require_free_name(session, database.now(), name)
            except Conflict as refusal:
                raise _exit(f"{refusal.detail}: choose another with --name") from None
            _, secret = tokens.issue_token(session, database.now(), "coordinator", spec)
            # Printed before it is committed, as the first one.
            if as_json:
                print_json({"name": name, "secret": secret})
            else:
                print(f"admin token (shown only this once): {secret}", file=sys.stderr, flush=True)


@app.command()
def serve(
    first_migrate: Annotated[bool, typer.Option("--migrate", help="migrate the schema first")] = False,
    conducting: Annotated[
        bool, typer.Option("--conduct/--no-conduct", help="start a child process that conducts the rounds, or not")
    ] = True,
) -> None:
    """Serve the API, with a child process that conducts the rounds."""
    # Imported here, because the process that conducts does not need it and stays smaller.
    limits = load("tessera.coordinator.server.http_limits")
    try:
        limits.require_private(_settings())
        limits.require_free(_settings())
    except (limits.BadCertificate, limits.InsecureBindError, limits.PortInUseError) as refusal:
        raise _exit(str(refusal)) from None
    if first_migrate:
        migrate()
    services = _opened("serve")
    _hand_over_first_token(services)
    settings = services.settings
    child = child_process.ChildConductor(settings.heartbeat, settings.tick_seconds) if conducting else None
    load("tessera.coordinator.server.serve").serve(services, child)


@app.command()
def conduct(
    attached: Annotated[
        bool, typer.Option("--attached", hidden=True, help="wait for an earlier conductor to end; end with stdin")
    ] = False,
) -> None:
    """Conduct the rounds without serving the API, beside one or more `serve --no-conduct`."""
    if attached:
        child_process.end_with_parent()
    services = _opened("conduct", wait=attached)
    spans.begin("tessera-conductor")
    # Waited for instead of handled: a handler that sets an event can deadlock with the wait that it interrupts.
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    thread = threading.Thread(target=services.conductor.conduct, name="conductor", daemon=True)
    thread.start()
    services.retention.start()
    if services.shipper:
        services.shipper.start()
    threading.Thread(target=_listen, args=(services,), name="wakeup", daemon=True).start()
    log.info("coordinator.conducting")
    signal.sigwait(endings)
    services.retention.end()
    if services.shipper:
        services.shipper.end()
    services.conductor.wakeups.end()
    thread.join(child_process.GOODBYE_SECONDS)
    spans.end()


@app.command()
def gc(as_json: AsJson = False) -> None:
    """Collect garbage now, as a conductor does at an interval. Safe while coordinators run."""
    freed = _assembled().retention.collect()
    if as_json:
        print_json(asdict(freed))
        return
    typer.echo(
        f"removed {freed.blobs} blobs of {freed.bytes} bytes, {freed.updates} of them updates, "
        f"{freed.uploads} unfinished uploads and {freed.strays} stray files; retired {freed.versions} versions"
    )


@app.command("remerge")
def merge_again(
    run: Annotated[str, typer.Argument(metavar="RUN", help="The run's id.")],
    without: Annotated[
        list[str] | None, typer.Option(metavar="SITE", help="A site to leave out; repeatable.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Merge a run's rounds again from the updates that it kept (`keep_updates = "run"`), without a site.

    Each update is decoded against the version that it started from. The result is a new run, paused or completed.
    Without --without, nothing is created, and the digests are compared. Exit code 1: they differ, or merging again
    is not possible.
    """
    try:
        found = remerge.remerge(_assembled(), run, *without or ())
    except Problem as problem:
        raise _exit(f"{problem.detail}. {problem.advice}", 1) from None
    if as_json:
        print_json(asdict(found))
    elif found.run:
        typer.echo(
            f"run {found.run}: versions {found.first} and later are merged again without {', '.join(without or ())}"
        )
    else:
        typer.echo(f"{len(found.digests)} versions have {'the same' if found.same else 'other'} digests")
    raise typer.Exit(0 if found.run or found.same else 1)


@app.command()
def verify(as_json: AsJson = False) -> None:
    """Hash every blob, read every version and check the audit chain.

    Exit code 0: no faults, 1: faults, 2: the database or the blob store did not answer.
    """
    services = _assembled()
    faults: list[str] = []
    try:
        for fault in backup.verify(services.database, services.blobs, services.states):
            faults.append(fault)
            typer.echo(fault, err=True)
    except StoreAway as away:
        raise _exit(f"not all was verified: {away.detail}") from None
    except exc.SQLAlchemyError as away:
        raise _exit(f"not all was verified: {engine.reason_of(away)}") from None
    if as_json:
        print_json({"faults": faults})
    else:
        typer.echo(f"{len(faults)} faults")
    raise typer.Exit(1 if faults else 0)


@app.command("backup")
def back_up(
    folder: Folder,
    verifying: Annotated[
        bool, typer.Option("--verify", help="hash the blobs in the folder too, and copy damaged ones again")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Copy every table and blob into a folder while the coordinator runs. Into the same folder again, it copies
    only new blobs."""
    services = _assembled()
    _copying(
        "backed up",
        folder,
        lambda: backup.back_up(services.database, services.blobs, folder, verifying=verifying),
        as_json=as_json,
    )


@app.command()
def restore(folder: Folder, as_json: AsJson = False) -> None:
    """Copy a backup into an empty, migrated database and into the blob store, of any kind."""
    services = _assembled()
    _copying("restored", folder, lambda: backup.restore(folder, services.database, services.blobs), as_json=as_json)


@app.command("signing-key")
def create_signing_key(as_json: AsJson = False) -> None:
    """Create the key that signs dossiers, unless there is one, and show the path and fingerprint of its public key.

    Give the fingerprint to the readers of dossiers by another way than the dossiers themselves.
    """
    settings = _settings()
    _make_default_folder(settings, "signing_key")
    try:
        key = signing_key.create(settings.signing_key)
    except (OSError, ValueError) as fault:
        named = f"TESSERA_SIGNING_KEY: {settings.signing_key} cannot be used: {_reason_of(fault)}"
        raise _exit(f"{named}; create its folder, or name another file", 1) from None
    if as_json:
        print_json({"public_key": str(key.public_path), "fingerprint": key.fingerprint})
    else:
        typer.echo(f"{key.public_path}\n{key.fingerprint}")


@app.command()
def doctor(
    notify: Annotated[bool, typer.Option("--notify", help="send a test notice by each channel")] = False,
    as_json: AsJson = False,
) -> None:
    """Check the needs of a coordinator: database, blobs, disk, address, limits, notices, unsafe settings.
    Safe beside a running one.

    Exit code 0: it could work, 1: something fails, 2: it cannot be opened at all.
    """
    # As for `serve`.
    checks = load("tessera.coordinator.server.doctor").checks
    print_findings(examined(checks(_assembled(at_head=False), notify=notify)), as_json=as_json)


config_app = typer.Typer(no_args_is_help=True, help="The settings that are in force.")
app.add_typer(config_app, name="config")


@config_app.command()
def show(as_json: AsJson = False) -> None:
    """Show every setting, and whether it comes from the environment or is the default. Hides secrets."""
    print_settings(effective(_settings().model_dump(), {}, os.environ, "TESSERA_"), as_json=as_json)


def _reason_of(fault: Exception) -> str:
    if isinstance(fault, OSError):
        return f"{fault.filename}: {fault.strerror}" if fault.filename else fault.strerror or str(fault)
    return engine.reason_of(fault) if isinstance(fault, exc.SQLAlchemyError) else str(fault)


def _copying(what: str, folder: Path, work: Callable[[], backup.CopyCounts], *, as_json: bool) -> None:
    try:
        copied = work()
    except (
        backup.BackupNotFound,
        backup.BackupRunning,
        backup.DatabaseNotEmpty,
        Problem,
        OSError,
        exc.SQLAlchemyError,
    ) as fault:
        raise _exit(f"not {what}: {folder}: {_reason_of(fault)}", 1) from None
    if as_json:
        print_json(asdict(copied))
        return
    typer.echo(f"{what}: {copied.rows} rows, {copied.blobs} new blobs of {copied.bytes} bytes")


def _listen(services: serving.Services) -> None:
    """Call the conductor on every wakeup, for the runs that it names."""
    with services.wakeups.listener(wakeup.CONDUCTOR) as listener:
        services.conductor.wakeups.call()
        while True:
            services.conductor.wakeups.call(*listener.wait())


def _exit(message: str, code: int = 2) -> typer.Exit:
    typer.echo(message, err=True)
    return typer.Exit(code)


@contextmanager
def _database(failure: str) -> Iterator[engine.Database]:
    """Yield the database of the settings. If it cannot be used, report the failure and exit with status 2, or with 1
    if it is only away."""
    settings = _settings()
    _make_default_folder(settings, "database_url")
    try:
        database = engine.Database(settings.database_url)
    except engine.UnknownDatabase as refusal:
        raise _exit(str(refusal)) from None
    try:
        yield database
    except (exc.SQLAlchemyError, OSError) as fault:
        unusable = f"{failure}: the database {database.shown} cannot be used: {engine.reason_of(fault)}"
        raise _exit(unusable, 1 if engine.is_away(fault) else 2) from None
    except engine.SchemaMismatch as refusal:
        raise _exit(f"{failure}: {refusal}") from None


def _settings() -> CoordinatorSettings:
    try:
        return CoordinatorSettings()
    except Invalid as refusal:
        raise _exit(f"{refusal.detail} {refusal.advice}") from None
    except ValidationError as refusal:
        for steps, message in messages_of(refusal.errors(include_url=False), CoordinatorSettings):
            within = "".join(f"[{step}]" for step in steps[1:])
            named = f"setting TESSERA_{str(steps[0]).upper()}{within}: " if steps else ""
            typer.echo(f"{named}{message}", err=True)
        raise typer.Exit(2) from None


def _make_default_folder(settings: CoordinatorSettings, *used: str) -> None:
    """Create the default folder, unless the settings that are used name others: those folders have to be there."""
    if settings.model_fields_set.issuperset(used):
        return
    try:
        data_dir().mkdir(mode=0o700, parents=True, exist_ok=True)
    except OSError as fault:
        places = " and ".join(f"TESSERA_{name.upper()}" for name in used)
        raise _exit(f"the folder {data_dir()} cannot be created: {fault.strerror}; name others in {places}") from None


def _opened(duty: serving.Duty, *, wait: bool = False) -> serving.Services:
    """Return the services for a duty that no other process has on this database, with every method loaded."""
    try:
        registry.methods()
    except registry.MethodsUnusable as refusal:
        raise _exit(str(refusal)) from None
    for variable, _ in environment.unknown(os.environ, CoordinatorSettings.model_fields):
        log.warning("coordinator.variable_ignored", variable=variable)
    services = _assembled(duty, wait=wait)
    if duty == "serve" and services.database.ended_uncleanly():
        # Beside the work: damage that it finds is remembered, and the process is not ready then.
        threading.Thread(target=_check, args=(services.database,), name="check", daemon=True).start()
    swept = services.blobs.sweep()
    settings = services.settings
    blobs = settings.blob_url if "://" in settings.blob_url else str(Path(settings.blob_url).absolute())
    places = {"database": services.database.shown, "blobs": blobs, "staging": str(settings.staging_dir.absolute())}
    log.info("coordinator.opened", **places, swept_files=swept)
    return services


def _check(database: engine.Database) -> None:
    with suppress(exc.SQLAlchemyError):
        database.check()


def _assembled(duty: serving.Duty = "both", *, at_head: bool = True, wait: bool = False) -> serving.Services:
    """Return the services, with a duty other than "both" held; otherwise print why not, and exit with status 2.

    For such a duty the status is 1 if the database is only away: a service manager starts the process again.
    """
    logging.configure()
    keep_freed_memory()
    settings = _settings()
    _make_default_folder(settings, "database_url", "blob_url", "staging_dir")
    try:
        services = serving.assemble(settings, duty=duty)
        if at_head:
            services.database.require_head(or_ahead=duty != "both")
        if duty != "both":
            services.database.hold(duty, wait=wait)
    except (engine.DatabaseInUse, engine.SchemaMismatch, store.StagingOnOtherDisk, engine.UnknownDatabase) as refusal:
        raise _exit(str(refusal)) from None
    except exc.SQLAlchemyError as fault:
        unusable = (
            f"the database {engine.Database(settings.database_url).shown} cannot be used: {engine.reason_of(fault)}"
        )
        raise _exit(unusable, 1 if duty != "both" and engine.is_away(fault) else 2) from None
    except (OSError, ImportError, ValueError, storage.BaseError) as fault:
        reason = _reason_of(fault).partition("\n")[0] or type(fault).__name__
        reason += "; create the folder around it, or correct its name" * isinstance(fault, FileNotFoundError)
        places = "database, blob store or staging folder"
        raise _exit(f"the {places} of the settings cannot be used: {reason}") from None
    return services


def _hand_over_first_token(services: serving.Services) -> None:
    """Print the first administrator's token, then commit it: after a crash in between, another is issued.

    Without a file, only a terminal gets it: a log would keep it.
    """
    path = services.settings.admin_token_file
    admins_sign_in = "admin" in services.settings.oidc_roles.values()
    with services.database.transaction() as session:
        secret = tokens.first_token(session, services.database.now(), admins_sign_in=admins_sign_in)
        if secret is None:
            if path is not None and not path.exists():
                remedy = (
                    "The database has an administrator already. `tessera coordinator token` issues another token."
                )
                log.warning("coordinator.admin_token_not_written", path=str(path), remedy=remedy)
            return
        if path is None and not sys.stderr.isatty():
            session.rollback()
            log.warning(
                "coordinator.no_administrator",
                remedy="No administrator has a valid token. Set TESSERA_ADMIN_TOKEN_FILE and start again.",
            )
            return
        if path is not None:
            try:
                with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
                    file.write(secret + "\n")
            except OSError as fault:
                raise _exit(
                    f"the administrator's token cannot be written to {path}: {fault.strerror}; create its folder, or "
                    "name another file in TESSERA_ADMIN_TOKEN_FILE"
                ) from None
            log.info("coordinator.admin_token_written", path=str(path))
        else:
            print(
                f"first admin token (shown only this once, valid for a day: create your own with it): {secret}",
                file=sys.stderr,
                flush=True,
            )
