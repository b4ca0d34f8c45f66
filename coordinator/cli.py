"""`tessera coordinator`: serve, conduct, migrate."""

from __future__ import annotations

import asyncio
import os
import signal
import socket
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
from coordinator.bells import CONDUCTOR
from coordinator.listening import configuration, make_room
from coordinator.services import Duty, Services, assemble
from coordinator.settings import Settings
from coordinator.storage.blobs import StagingElsewhere
from coordinator.storage.database import Database, DatabaseInUse, NotAFile, SchemaBehind, alembic_config
from coordinator.storage.identity import first_token
from coordinator.supervision import ChildConductor, end_with_parent
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
    conducting: Annotated[
        bool,
        typer.Option("--conduct/--no-conduct", help="have a child process move the rounds, or not"),
    ] = True,
) -> None:
    """Serve the API, and have a process beside this one move the rounds."""
    if first_migrate:
        migrate()
    services = _opened("serve")
    _hand_over_first_token(services)
    settings = services.settings
    make_room(settings.max_connections)
    config = configuration(create_app(services, conduct=False), settings)
    log.info("coordinator.serving", url=f"http://{settings.host}:{settings.port}")
    child = ChildConductor() if conducting else None
    if child:
        child.start()
    _Server(config, services, child).run()


@app.command()
def conduct(
    attached: Annotated[
        bool,
        typer.Option("--attached", hidden=True, help="wait for an earlier one, end with stdin"),
    ] = False,
) -> None:
    """Move the rounds without serving the API: beside one or more `serve --no-conduct`."""
    if attached:
        end_with_parent()
    services = _opened("conduct", wait=attached)
    # Waited for rather than handled: a handler that sets an event can deadlock with the wait that it interrupts.
    endings = {signal.SIGTERM, signal.SIGINT}
    signal.pthread_sigmask(signal.SIG_BLOCK, endings)
    thread = threading.Thread(target=services.conductor.conduct, name="conductor", daemon=True)
    thread.start()
    threading.Thread(target=_heed, args=(services,), name="bell", daemon=True).start()
    log.info("coordinator.conducting")
    signal.sigwait(endings)
    services.conductor.end()
    thread.join(GOODBYE_SECONDS)


def _heed(services: Services) -> None:
    """Has the conductor look whenever its bell is rung."""
    with services.bells.hung_up(CONDUCTOR) as bell:
        services.conductor.call()
        while True:
            bell.wait()
            services.conductor.call()


class _Server(uvicorn.Server):
    """A server that sends waiting workers home when it is told to stop, rather than waiting for them."""

    def __init__(self, config: uvicorn.Config, services: Services, child: ChildConductor | None) -> None:
        super().__init__(config)
        self._services = services
        self._child = child

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        self._services.gate.close()
        super().handle_exit(sig, frame)

    async def shutdown(self, sockets: list[socket.socket] | None = None) -> None:
        await super().shutdown(sockets)
        # Here and not after `run`, which ends the process by the signal that it was sent.
        if self._child:
            await asyncio.to_thread(self._child.stop)


def _settings() -> Settings:
    try:
        return Settings()
    except ValidationError as refusal:
        for error in refusal.errors(include_url=False, include_input=False):
            typer.echo(f"setting TESSERA_{'_'.join(map(str, error['loc'])).upper()}: {error['msg']}", err=True)
        raise typer.Exit(2) from None


def _opened(duty: Duty, *, wait: bool = False) -> Services:
    """The services, with every method at hand and on a database at head that no other process holds for this duty."""
    logs.configure()
    keep_freed_memory()
    settings = _settings()
    try:
        methods()
    except MethodsUnusable as refusal:
        typer.echo(str(refusal), err=True)
        raise typer.Exit(2) from None
    try:
        services = assemble(settings, duty=duty)
        services.database.require_head()
        services.database.hold(duty, wait=wait)
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
