"""`tessera demo`: real processes, a FedFrozen run shown round by round, a chart, and a check of the export."""

from __future__ import annotations

import math
import time
import uuid
from argparse import Namespace
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console
from rich.markup import escape

from tessera.examples.digits import screen
from tessera.examples.federation import LABORATORY, SEED, SITES, VIT, Federation, holdings
from tessera.examples.ledger import Entry, percent_of_full, stages
from tessera.examples.staging import OUT, DemoFailed, play
from tessera.shared.api.runs import Run, RunSpec
from tessera.shared.client.client import Client
from tessera.shared.client.export import export_folder
from tessera.shared.client.model_upload import upload_model
from tessera.shared.client.round_outcomes import RunProgress, at_work, follow
from tessera.shared.client.run_file import read_spec
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.methods.fedfrozen import Scope
from tessera.shared.metrics.site_spread import scores_by_version
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.cli.model import init

# Used after the run, with libraries that take seconds to import.
if TYPE_CHECKING:
    from tessera.examples.digits import picture, reload
else:
    picture = DeferredModule("tessera.examples.digits.picture")
    reload = DeferredModule("tessera.examples.digits.reload")

HERE = Path(__file__).parent


app = typer.Typer(add_completion=False)


@app.command(name="demo")
def command(
    out: Annotated[Path, typer.Option(help="A folder, replaced on each run.")] = OUT,
    settings: Annotated[
        list[str] | None,
        typer.Option("--set", metavar="KEY=VALUE", help="Change a setting of the run, e.g. rounds=8."),
    ] = None,
    scope: Annotated[
        Scope | None, typer.Option(help="The blocks that train once queries and keys are frozen.")
    ] = None,
) -> None:
    """Watch four institutions train a vision transformer on this machine, without sharing an image.

    It starts a coordinator and five workers on loopback, and stops them at its end.
    """
    raise typer.Exit(play(_demo, Namespace(out=out, settings=settings or [], scope=scope)))


def _demo(console: Console, federation: Federation, given: Namespace) -> None:
    begun_at = time.monotonic()
    console.print(
        "[bold]Tessera[/]: four institutions train a vision transformer, and no image leaves any of them.\n"
    )
    wanted = read_spec(HERE / "run.toml", [*given.settings, *_scope_setting(given.scope)])
    with console.status("starting a coordinator"):
        federation.start_coordinator()
    with federation.admin() as client:
        folder = _gather(console, federation, client)
        uploaded = upload_model(client, folder)
        spec = RunSpec.model_validate({**wanted, "model": uploaded.model, "version": uploaded.version})
        run = client.create_run(spec, key=uuid.uuid4().hex)
        entries = _follow(console, federation, client, run, folder.model.nbytes)
        screen.print_summary(console, entries, time.monotonic() - begun_at)
        _say_what_it_shows(console, entries)
        picture.draw(entries, federation.folder / "rounds.png")
        _check_export(console, federation, client, run, entries[-1])
    console.print(f"Picture, model and logs: {escape(str(given.out))}")


def _scope_setting(scope: str | None) -> list[str]:
    return [f"method.settings.scope={scope}"] if scope else []


def _gather(console: Console, federation: Federation, client: Client) -> ModelFolder:
    """Start every worker, and create the model while they start."""
    for holding in holdings():
        federation.start_worker(client, holding)
    screen.print_skew(console, holdings())
    with console.status("making the model") as status:
        # In this process: another one would import torch once more.
        out = federation.folder / "model"
        init(out, str(VIT), "image-classification", SEED, pretrained=False)
        folder = ModelFolder.open(out)
        for there in federation.await_workers(client):
            status.update(f"{there} of {len(SITES) + 1} workers are there")
    console.print(
        f"\nA coordinator at {federation.url} and {len(SITES)} workers that train; {LABORATORY} measures every "
        f"version. The model has {len(folder.model.blocks)} blocks, {folder.model.nbytes / 1e6:.2f} MB.",
        soft_wrap=True,
    )
    return folder


def _follow(console: Console, federation: Federation, client: Client, run: Run, model_bytes: int) -> list[Entry]:
    """Print each round as it ends, and return the committed ones."""
    entries: list[Entry] = []
    screen.print_header(console)
    with console.status("") as status:
        for glimpse in follow(client, run.id, poll_seconds=0.25):
            federation.processes.check()
            for outcome in glimpse.ended:
                if outcome.round.state == "committed":
                    before = entries[-1].scores if entries else _untrained(client, run)
                    entries.append(Entry.of(outcome, model_bytes))
                    screen.print_round(console, entries[-1], before)
                else:
                    console.print(f"round {outcome.round.number} was abandoned: {escape(outcome.round.reason or '')}")
            status.update(_open_line(glimpse))
    if glimpse.run.state != "completed" or not entries:
        raise DemoFailed(f"the run is {glimpse.run.state}: {glimpse.run.reason}")
    return entries


def _untrained(client: Client, run: Run) -> Mapping[str, float]:
    """Return the model's scores before the first round."""
    return scores_by_version(client.measurements(run.id)).get(0, {})


def _open_line(glimpse: RunProgress) -> str:
    made = glimpse.open
    if made is None:
        return "the last version is being measured"
    return escape(f"round {made.number}: {made.state}; {at_work(made)}".replace("/worker-1", ""))


def _say_what_it_shows(console: Console, entries: list[Entry]) -> None:
    frozen = stages(entries).get("frozen", [])
    if len(frozen) > 1:
        console.print(
            f"Stage two moved {percent_of_full(frozen):.1f} % of the bytes of full exchanges; its first round still "
            f"fetched what the last warm-up round had changed, and without that one it is "
            f"{percent_of_full(frozen[1:]):.1f} %.",
            soft_wrap=True,
        )


def _check_export(console: Console, federation: Federation, client: Client, run: Run, last: Entry) -> None:
    """Export the global model, and check that it has the same accuracy in transformers alone."""
    out = federation.folder / "global-model"
    export_folder(client, run, out, None, lambda _: None)
    again = reload.measure(out)
    told = reload.Scores(**{name: last.scores.get(name, math.nan) for name in ("accuracy", "macro_f1")})
    console.print(
        f"\nExported; loaded again with transformers' from_pretrained: accuracy {again.accuracy:.4f}, "
        f"macro F1 {again.macro_f1:.4f}. {LABORATORY} had measured {told.accuracy:.4f} and {told.macro_f1:.4f}.",
        soft_wrap=True,
    )
    # Figures leave a site with three significant digits, so that 1.00 may be 0.995.
    pairs = ((again.accuracy, told.accuracy), (again.macro_f1, told.macro_f1))
    if not all(math.isclose(here, there, rel_tol=0.0051) for here, there in pairs):
        raise DemoFailed("the exported model differs from the measured model")
