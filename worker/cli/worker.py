"""`tessera worker`: joins, runs a worker, and checks its settings."""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tessera.shared.cli.lazy_import import load
from tessera.shared.cli.render.output import AsJson, print_findings, print_json, print_settings
from tessera.shared.client.client import Client
from tessera.shared.diagnostics import examined
from tessera.shared.methods.registry import MethodsUnusable, methods
from tessera.shared.problems import Forbidden, NotFound, Problem, Unauthenticated
from tessera.shared.telemetry import logging, spans
from tessera.shared.urls import without_password
from tessera.worker.cli.approval import COMMANDS
from tessera.worker.cli.join import join, rotate
from tessera.worker.cli.ledger import adopt, ledger
from tessera.worker.doctor import checks
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.inventory import datasets_of, describe, device_of
from tessera.worker.settings import SettingsError, WorkerSettings, effective_settings, read_settings, tls_of, token_of
from tessera.worker.settings_reload import SettingsFile
from tessera.worker.state.atomic_files import alone
from tessera.worker.stores import run_history_of
from tessera.worker.task.heartbeat import Stop

if TYPE_CHECKING:
    from tessera.worker.agent import Agent

BAD_SETTINGS = 2
NOT_ADMITTED = 3

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Run a worker beside the data, and check its settings."
)

ConfigFile = Annotated[Path, typer.Option("--config", help="The worker's settings, as TOML.")]


@contextmanager
def _bad_settings_in_one_line() -> Iterator[None]:
    try:
        yield
    except (SettingsError, MethodsUnusable, PolicyViolation) as fault:
        typer.echo(f"error: {fault}", err=True)
        raise typer.Exit(BAD_SETTINGS) from fault


@app.command()
def run(config: ConfigFile) -> None:
    """Claim tasks and do them until SIGTERM or SIGINT; a second one ends the process at once."""
    stop = Stop()

    def ask_to_stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.request()

    with _bad_settings_in_one_line():
        file = SettingsFile(config)
        settings = file.settings
        _log_as(settings)
        with _alone(settings.state_dir):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, ask_to_stop)
            # Loaded to run and for nothing else: transformers takes seconds, and who decides here need not wait.
            _run(load("tessera.worker.agent").Agent(settings, stop, file), settings)


def _run(agent: Agent, settings: WorkerSettings) -> None:
    spans.begin("tessera-worker")
    try:
        agent.run()
    except (Unauthenticated, Forbidden) as problem:
        typer.echo(f"error: {_place(settings)} does not admit worker {settings.name}: {problem}", err=True)
        raise typer.Exit(NOT_ADMITTED) from problem
    except Problem as problem:
        typer.echo(f"error: {_place(settings)} refuses worker {settings.name}: {problem}", err=True)
        raise typer.Exit(1) from problem
    finally:
        spans.end()


@app.command()
def check(config: ConfigFile, as_json: AsJson = False) -> None:
    """Read the settings, count the examples of each data set, and see whether the coordinator admits the token.

    Exit code 0: all is well, 1: the coordinator does not answer, 2: bad settings, 3: the token is not admitted.
    """
    with _bad_settings_in_one_line():
        settings = read_settings(config)
        token, verify = token_of(settings), tls_of(settings)
        device = describe(device_of(settings.device))
        methods()
        loaded = datasets_of(settings)
        measured = {name: run_history_of(settings).measured(name) for name in settings.datasets}
    examples = {name: loaded[name].examples if name in loaded else None for name in settings.datasets}
    version, problem = None, None
    try:
        with Client(settings.url, token, patience_seconds=0, verify=verify) as client:
            version = client.about().version
            _try_token(client)
    except Problem as refusal:
        problem = refusal
    if as_json:
        coordinator = {"url": _place(settings), "version": version, "problem": problem.json() if problem else None}
        print_json(
            {
                "device": device,
                "datasets": examples,
                "measured": measured,
                "keep_vaults_days": settings.keep_vaults_days,
                "coordinator": coordinator,
            }
        )
    else:
        _tell(device, examples, _place(settings), version)
        for name, times in measured.items():
            typer.echo(f"measured     {name}: {times} versions, of at most {settings.policy.max_evaluations}")
        days = settings.keep_vaults_days
        kept = "kept for ever" if days == "forever" else f"removed {days:g} days after their last use"
        typer.echo(f"vaults       those of ended runs are {kept}")
    if isinstance(problem, Unauthenticated | Forbidden):
        typer.echo(f"error: {_place(settings)} does not admit the token: {problem}", err=True)
        raise typer.Exit(NOT_ADMITTED)
    if problem:
        typer.echo(f"error: {_place(settings)} does not answer: {problem}", err=True)
        raise typer.Exit(1)


@app.command()
def doctor(
    config: ConfigFile,
    probe: Annotated[bool, typer.Option("--probe/--no-probe", help="Upload 256 KiB of noise, to time it.")] = True,
    as_json: AsJson = False,
) -> None:
    """Look at all that a worker needs: the way to the coordinator, token, disk, device, data, policy, line.

    Exit code 0: it could work, 1: something fails, 2: bad settings.
    """
    with _bad_settings_in_one_line():
        settings = read_settings(config)
    print_findings(examined(checks(settings, probe=probe)), as_json=as_json)


config_app = typer.Typer(no_args_is_help=True, help="The settings, as the file and the environment have them.")
app.add_typer(config_app, name="config")


@config_app.command()
def show(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show every setting, and whether it comes from the file, the environment or is the default. Hides secrets.

    A running worker heeds a changed policy and changed privacy budgets at once, and all else when it next starts.
    """
    with _bad_settings_in_one_line():
        found = effective_settings(config)
    print_settings(found, as_json=as_json)


for command in (join, rotate, ledger, adopt, *COMMANDS):
    app.command()(command)


def _place(settings: WorkerSettings) -> str:
    """Return the coordinator's URL as it may be shown."""
    return without_password(settings.url)


def _try_token(client: Client) -> None:
    """Renew a lease that there is not, which only a site's token may. Raises Problem if it is not admitted."""
    try:
        client.heartbeat("0", 0)
    except NotFound as problem:
        if not problem.from_document:
            raise


def _tell(device: str, examples: dict[str, int | None], url: str, version: str | None) -> None:
    typer.echo(f"device       {device}")
    for name, count in examples.items():
        told = "kept from runs by the policy" if count is None else f"{count} examples"
        typer.echo(f"data set     {name}: {told}")
    if version is not None:
        typer.echo(f"coordinator  {url} answers: version {version}")


@contextmanager
def _alone(state_dir: Path) -> Iterator[None]:
    """Keep a second worker out of the same folder: cache and vault belong to one process."""
    with ExitStack() as stack:
        try:
            stack.enter_context(alone(state_dir))
        except BlockingIOError as fault:
            raise SettingsError(f"state_dir: another worker is using {state_dir}") from fault
        except OSError as fault:
            raise SettingsError(f"state_dir: {state_dir} cannot be used: {fault.strerror}") from fault
        yield


def _log_as(settings: WorkerSettings) -> None:
    console = sys.stdout.isatty() if settings.log == "auto" else settings.log == "console"
    logging.configure(sys.stdout, console=console)
