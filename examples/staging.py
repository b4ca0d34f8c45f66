"""Shared code of the demos: an output folder, processes that end with the demo, and a run followed to its end."""

from __future__ import annotations

import argparse
import shutil
import uuid
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.markup import escape

from tessera.examples.federation import Federation, Holding
from tessera.examples.ledger import Entry, percent_of_full
from tessera.examples.processes import Died, Processes, end_by_interrupt
from tessera.shared import lazy_import, units
from tessera.shared.api.runs import RunSpec
from tessera.shared.client.export import export_folder
from tessera.shared.client.model_upload import upload_model
from tessera.shared.client.round_outcomes import follow
from tessera.shared.client.run_file import read_spec
from tessera.shared.problems import Problem
from tessera.shared.terminal import output
from tessera.shared.terminal.watch import print_ended
from tessera.shared.updates.model_folder import ModelFolder

# Says that a folder was made by a demo, and so may be replaced by one.
MARK = ".tessera-demo"

OUT = Path("demo-output")


class DemoFailed(Exception):
    """The demo ran, but its result is not the expected one."""


def parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return a parser with the options of every demo."""
    made = argparse.ArgumentParser(prog=f"python -m {name}", description=description)
    made.add_argument("--out", type=Path, default=OUT, help="a folder, replaced on each run")
    made.add_argument(
        "--set", dest="settings", action="append", default=[], metavar="KEY=VALUE", help="as in run.toml"
    )
    return made


def play(demo: Callable[[Console, Federation, argparse.Namespace], None], given: argparse.Namespace) -> int:
    """Play a demo. Return 0 when done, 1 when a process ended unexpectedly, 130 when interrupted."""
    console = output.out()
    lazy_import.frozen = True
    end_by_interrupt()
    try:
        folder = _fresh(given.out)
        processes = Processes(folder)
        try:
            demo(console, Federation(folder, processes), given)
        finally:
            processes.stop()
    except KeyboardInterrupt:
        console.print(f"\nInterrupted. Every process was stopped; their logs are in {escape(str(given.out))}.")
        return 130
    except Died as death:
        console.print(f"\n[red]{escape(str(death))}[/]. The end of {escape(str(death.log))}:\n")
        console.print(escape(death.tail()), soft_wrap=True)
        return 1
    except Problem as problem:
        output.show_problem(problem, as_json=False)
        return 1
    except (DemoFailed, TimeoutError) as fault:
        console.print(f"\n[red]{escape(str(fault))}[/]")
        return 1
    return 0


def _fresh(out: Path) -> Path:
    """Replace the previous demo's folder by an empty one."""
    if out.exists():
        if not (out / MARK).is_file():
            raise DemoFailed(f"{out} exists and no demo made it: remove it, or give another --out")
        shutil.rmtree(out)
    out.mkdir(parents=True)
    (out / MARK).touch()
    return out.resolve()


def run_through(
    console: Console,
    federation: Federation,
    holdings: Sequence[Holding],
    model: Callable[[], ModelFolder],
    run_file: Path,
    settings: Sequence[str],
    base: Path | None = None,
) -> list[Entry]:
    """Start a coordinator and a worker per site, and run the file's run. Print each round as it ends and the total
    bytes, and export the last version into `global-model`, with the external base of the folder `base` if the model
    has one. Return the committed rounds."""
    wanted: dict[str, Any] = read_spec(run_file, list(settings))
    federation.start_coordinator()
    entries: list[Entry] = []
    with federation.admin() as client:
        for holding in holdings:
            federation.start_worker(client, holding)
        folder = model()
        for _ in federation.await_workers(client, len(holdings)):
            pass
        console.print(
            f"A coordinator at {federation.url} and {len(holdings)} workers, a process each. The model has "
            f"{len(folder.model.blocks)} blocks, {units.size(folder.model.nbytes)}. Bytes are of all sites.\n",
            soft_wrap=True,
        )
        uploaded = upload_model(client, folder)
        spec = RunSpec.model_validate({**wanted, "model": uploaded.model, "version": uploaded.version})
        run = client.create_run(spec, key=uuid.uuid4().hex)
        for glimpse in follow(client, run.id, poll_seconds=0.25):
            federation.processes.check()
            for outcome in glimpse.ended:
                print_ended(console, outcome)
                if outcome.round.state == "committed":
                    entries.append(Entry.of(outcome, folder.model.nbytes))
        if glimpse.run.state != "completed":
            raise DemoFailed(f"the run is {glimpse.run.state}: {glimpse.run.reason}")
        export_folder(client, run, federation.folder / "global-model", None, lambda _: None, folder.path, base)
    first, *later = entries
    console.print(
        f"\nRound 1 moved {percent_of_full([first]):.1f} % of the bytes of exchanging the whole model uncompressed"
        + (f"; the {len(later)} after it {percent_of_full(later):.2f} %." if later else ".")
        + " Blocks that were fetched only for evaluation are not among them.",
        soft_wrap=True,
    )
    return entries
