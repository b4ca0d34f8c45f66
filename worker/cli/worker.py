"""`tessera worker`: joining a coordinator, running a worker, and checks of its settings."""

from __future__ import annotations

import signal
import sys
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Annotated

import typer

from tessera.shared.client.client import Client
from tessera.shared.diagnostics import Finding, examined
from tessera.shared.host_memory import keep_freed_memory
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.methods.registry import MethodsUnusable, methods
from tessera.shared.problems import Forbidden, Problem, Unauthenticated
from tessera.shared.telemetry import logging, spans
from tessera.shared.terminal.output import AsJson, print_findings, print_json, print_settings
from tessera.shared.urls import without_password
from tessera.worker.cli import cache
from tessera.worker.cli.approval import COMMANDS
from tessera.worker.cli.exits import (
    BAD_SETTINGS,
    DEVICE_FAILED,
    DISK_FULL,
    NOT_ADMITTED,
    ConfigFile,
    Errors,
    end,
    exits,
    fail,
)
from tessera.worker.cli.join import join, rotate
from tessera.worker.cli.ledger import adopt, ledger
from tessera.worker.cli.roster import roster
from tessera.worker.cli.site import report
from tessera.worker.errors import ExecutorEnded
from tessera.worker.executor.slurm.examination import findings
from tessera.worker.faults.disk import is_of_disk
from tessera.worker.governance.descriptions import OWN_SCRIPT, privacy_in_words, unprotected
from tessera.worker.governance.policy import PolicyViolation
from tessera.worker.settings import SettingsError, WorkerSettings, effective_settings, read_settings, tls_of, token_of
from tessera.worker.settings_reload import SettingsFile
from tessera.worker.state.atomic_files import alone_or
from tessera.worker.stores import run_history_of
from tessera.worker.task.heartbeat import Stop

if TYPE_CHECKING:
    from tessera.worker import agent, deltas, inventory
    from tessera.worker import doctor as examination
else:
    agent = DeferredModule("tessera.worker.agent")
    examination = DeferredModule("tessera.worker.doctor")
    deltas = DeferredModule("tessera.worker.deltas")
    inventory = DeferredModule("tessera.worker.inventory")

ERRORS: Errors = {BAD_SETTINGS: (SettingsError, MethodsUnusable, PolicyViolation)}

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Run a worker beside the data, and check its settings."
)


@app.command()
def run(config: ConfigFile) -> None:
    """Claim tasks and do them until SIGTERM or SIGINT; a second one ends the process at once.

    Exit code 1: the coordinator refuses the worker, 2: invalid settings, 3: the token is not admitted. To be started
    again: 4: the process that loads the data sets ended, 5: the worker's folders could not be written at its start.
    """
    stop = Stop()

    def ask_to_stop(number: int, _: FrameType | None) -> None:
        signal.signal(number, signal.SIG_DFL)
        stop.request()

    with exits(ERRORS):
        file = SettingsFile(config)
        settings = file.settings
        logging.configure(sys.stdout, console=settings.logs_to_console)
        # Without it the scratch of each chunk that is encoded would be mapped anew.
        keep_freed_memory()
        # Cache and vault belong to one process.
        with alone_or(lambda reason: SettingsError(f"state_dir: {reason}"), settings.state_dir):
            for number in (signal.SIGTERM, signal.SIGINT):
                signal.signal(number, ask_to_stop)
            try:
                worker = agent.Agent(settings, stop, file)
            except (SettingsError, OSError) as fault:
                if not is_of_disk(fault):
                    raise
                fail(f"the worker's folders cannot be written: {fault}", DISK_FULL)
            except ExecutorEnded as end_of_executor:
                fail(f"{end_of_executor}: start the worker again", DEVICE_FAILED)
            _run(worker, settings)
    end()


regional = typer.Typer(add_completion=False)


@regional.command(help="Train for a parent coordinator by rounds of this region's own coordinator.")
def regional_run(config: ConfigFile) -> None:
    """Run a worker whose settings have a `[region]`, as `tessera worker run` does."""
    with exits(ERRORS):
        if read_settings(config).region is None:
            raise SettingsError(
                f"{config}: region: missing. Add [region] with url and token_file (`tessera docs regions`)"
            )
    run(config)


def _run(worker: agent.Agent, settings: WorkerSettings) -> None:
    spans.begin("tessera-worker")
    try:
        worker.run()
    except (Unauthenticated, Forbidden) as problem:
        fail(f"{without_password(settings.url)} does not admit worker {settings.name}: {problem}", NOT_ADMITTED)
    except Problem as problem:
        fail(f"{without_password(settings.url)} refuses worker {settings.name}: {problem}", 1)
    finally:
        spans.end()


def _settings_of_site(config: Path) -> WorkerSettings:
    """Return the settings of a worker with data of its own. Raises SettingsError."""
    settings = read_settings(config)
    if settings.region:
        raise SettingsError(f"{config}: region: its sites have the data. `tessera worker doctor` checks its needs")
    return settings


def _slurm(settings: WorkerSettings) -> list[Finding]:
    """Return the findings about Slurm, if its jobs execute tasks. Raises SettingsError if it takes none."""
    found = [*findings(settings.slurm, settings.state_dir)] if settings.slurm else []
    for one in found:
        if one.verdict == "fail":
            raise SettingsError(f"executor.slurm: {one.detail}. {one.remedy}")
    return found


@app.command()
def check(config: ConfigFile, as_json: AsJson = False) -> None:
    """Read the settings, count the examples of each data set, and check that the coordinator admits the token.

    Exit code 0: all is well, 1: the coordinator does not answer, 2: invalid settings, 3: the token is not admitted.
    """
    with exits(ERRORS):
        settings = _settings_of_site(config)
        token, verify = token_of(settings), tls_of(settings)
        device = inventory.describe(*inventory.devices_of(settings))
        methods()
        loaded = inventory.datasets_of(settings.sources)
        deltas.check_deltas(settings, inventory.inventory_of(settings.datasets, loaded))
        slurm = _slurm(settings)
        measured = {name: run_history_of(settings).measured(name) for name in settings.datasets}
    scripted = [OWN_SCRIPT] if settings.own_script else []
    rules = [*privacy_in_words(settings.policy, settings.allowances), *scripted]
    if lacking := unprotected(settings.policy, settings.allowances):
        rules.append(lacking)
    examples = {name: loaded[name].examples if name in loaded else None for name in settings.datasets}
    url, days = without_password(settings.url), settings.keep_vaults_days
    version, problem = None, None
    try:
        with Client(settings.url, token, patience_seconds=0, verify=verify) as client:
            version = client.about().version
            examination.try_token(client)
    except Problem as refusal:
        problem = refusal
    if as_json:
        coordinator = {"url": url, "version": version, "problem": problem.json() if problem else None}
        data = {"datasets": examples, "measured": measured, "keep_vaults_days": days, "privacy": rules}
        about_slurm = {"slurm": [found.detail for found in slurm]} if slurm else {}
        print_json({"device": device, **data, **about_slurm, "coordinator": coordinator})
    else:
        typer.echo(f"device       {device}")
        has_own_key = settings.sources.held_out_key_file.exists()
        for name, count in examples.items():
            # The first start makes the key that decides which examples are held out.
            about = "approximately " if settings.datasets[name].held_out and not has_own_key else ""
            available = "kept from runs by the policy" if count is None else f"{about}{count} examples"
            typer.echo(f"data set     {name}: {available}")
        if version is not None:
            typer.echo(f"coordinator  {url} answers: version {version}")
        most = settings.policy.max_evaluations
        versions = [f"measured     {name}: {times} versions, of at most {most}" for name, times in measured.items()]
        for line in [*(f"slurm        {found.detail}" for found in slurm), *versions]:
            typer.echo(line)
        for rule in rules:
            typer.echo(f"privacy      {rule}")
        kept = "kept for ever" if days == "forever" else f"removed {days:g} days after their last use"
        typer.echo(f"vaults       those of ended runs are {kept}")
    if isinstance(problem, Unauthenticated | Forbidden):
        fail(f"{url} does not admit the token: {problem}", NOT_ADMITTED)
    if problem:
        fail(f"{url} does not answer: {problem}", 1)


@app.command()
def doctor(
    config: ConfigFile,
    probe: Annotated[
        bool, typer.Option("--probe/--no-probe", help="Upload 256 KiB of noise to time it, and wait as a claim does.")
    ] = True,
    model: Annotated[
        Path | None, typer.Option(metavar="FOLDER", help="A model, to see which of its blocks the policy keeps.")
    ] = None,
    notify: Annotated[bool, typer.Option("--notify", help="Send a test notice as [notices] says.")] = False,
    as_json: AsJson = False,
) -> None:
    """Check a worker's needs: network, coordinator, token, disk, device, data, policy and upload speed.

    Exit code 0: it can work, 1: a check fails, 2: invalid settings.
    """
    with exits(ERRORS):
        settings = read_settings(config)
    print_findings(examined(examination.checks(settings, probe=probe, model=model, notify=notify)), as_json=as_json)


config_app = typer.Typer(no_args_is_help=True, help="The settings from the file and the environment.")
app.add_typer(config_app, name="config")


@config_app.command()
def show(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show each setting and its origin: the file, the environment or the default. Hides secrets.

    A running worker applies a changed policy and changed privacy budgets at once, other settings when it restarts.
    """
    with exits(ERRORS):
        found = effective_settings(config)
    print_settings(found, as_json=as_json)


app.add_typer(cache.app, name="cache")

for command in (join, rotate, ledger, adopt, roster, report, *COMMANDS):
    app.command()(command)
