"""`tessera coordinator`: serve, conduct, migrate."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from types import FrameType
from typing import Annotated

import structlog
import typer
import uvicorn
from alembic import command
from obstore.exceptions import BaseError
from pydantic import ValidationError
from sqlalchemy.exc import SQLAlchemyError

from coordinator import logs
from coordinator.app import GOODBYE_SECONDS, create_app
from coordinator.services import Services, assemble
from coordinator.settings import Settings
from coordinator.storage.blobs import StagingElsewhere
from coordinator.storage.database import Database, DatabaseInUse, NotAFile, SchemaBehind, alembic_config
from coordinator.storage.identity import first_token
from shared.memory import keep_freed_memory
from shared.methods import MethodsUnusable, methods

app = typer.Typer(help="Run a coordinator. Settings come from the environment: TESSERA_DATABASE_URL and others.")
log = structlog.get_logger()


@app.command()
def migrate() -> None:
    """Bring the database's schema to what this version needs. Safe to repeat."""
    database = Database(_settings().database_url)
    with database.engine.begin() as connection:
        command.upgrade(alembic_config(connection), "head")
    typer.echo(f"the schema of {database.url.render_as_string(hide_password=True)} is at head", err=True)


@app.command()
def serve(
    first_migrate: Annotated[bool, typer.Option("--migrate", help="bring the schema to head first")] = False,
) -> None:
    """Serve the API, and move the rounds."""
    if first_migrate:
        migrate()
    services = _opened()
    _hand_over_first_token(services)
    settings = services.settings
    config = uvicorn.Config(
        create_app(services),
        host=settings.host,
        port=settings.port,
        log_config=None,
        access_log=False,
        server_header=False,
        timeout_keep_alive=75,
        timeout_graceful_shutdown=5,
    )
    log.info("coordinator.serving", url=f"http://{settings.host}:{settings.port}")
    _Server(config, services).run()


@app.command()
def conduct() -> None:
    """Move the rounds without serving the API."""
    services = _opened()
    # Waited for rather than handled: a handler that sets an event can deadlock with the wait that it interrupts.
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    thread = threading.Thread(target=services.conductor.conduct, name="conductor", daemon=True)
    thread.start()
    log.info("coordinator.conducting")
    signal.sigwait(endings)
    services.conductor.end()
    thread.join(GOODBYE_SECONDS)


class _Server(uvicorn.Server):
    """A server that sends waiting workers home when it is told to stop, rather than waiting for them."""

    def __init__(self, config: uvicorn.Config, services: Services) -> None:
        super().__init__(config)
        self._services = services

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.gate.close()
        super().handle_exit(sig, frame)


def _settings() -> Settings:
    try:
        return Settings()
    except ValidationError as refusal:
        for error in refusal.errors(include_url=False, include_input=False):
            typer.echo(f"setting TESSERA_{'_'.join(map(str, error['loc'])).upper()}: {error['msg']}", err=True)
        raise typer.Exit(2) from None


def _opened() -> Services:
    """The services, with every method at hand and on a database at head that no other process holds."""
    logs.configure()
    keep_freed_memory()
    settings = _settings()
    try:
        methods()
    except MethodsUnusable as refusal:
        typer.echo(str(refusal), err=True)
        raise typer.Exit(2) from None
    try:
        services = assemble(settings)
        services.database.require_head()
        services.database.hold()
    except (DatabaseInUse, NotAFile, SchemaBehind, StagingElsewhere) as refusal:
        typer.echo(str(refusal), err=True)
        raise typer.Exit(2) from None
    except (OSError, ImportError, ValueError, SQLAlchemyError, BaseError) as fault:
        reason = str(fault).splitlines()[0] if str(fault) else type(fault).__name__
        typer.echo(f"the database, blob store or staging folder of the settings cannot be used: {reason}", err=True)
        raise typer.Exit(2) from None
    swept = services.blobs.sweep()
    log.info("coordinator.opened", database=services.database.url.render_as_string(), swept_files=swept)
    return services


def _hand_over_first_token(services: Services) -> None:
    """Prints the first admin token, once; only its hash is kept.

    It is handed over before it is entered: killed in between, the next start issues another.
    """
    with services.database.transaction() as session:
        secret = first_token(session, services.database.now())
        path = services.settings.admin_token_file
        if secret is None:
            return
        if path is not None:
            _write_secret(path, secret)
            log.info("coordinator.admin_token_written", path=str(path))
        else:
            print(f"first admin token (shown only this once): {secret}", file=sys.stderr, flush=True)


def _write_secret(path: Path, secret: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "w") as file:
        file.write(secret + "\n")
