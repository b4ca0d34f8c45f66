"""`tessera run`: starts, watches, steers and exports runs."""

from __future__ import annotations

import uuid
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from tessera.shared.api.runs import Preview, Round, RoundWorkload, Run, RunSpec, WorkerPreview
from tessera.shared.cli.connection import WATCHING_PATIENCE_SECONDS, client_of, connect, find_run
from tessera.shared.cli.export import export_file, export_folder
from tessera.shared.cli.metrics import metrics
from tessera.shared.cli.render import output
from tessera.shared.cli.render.failures import print_troubles
from tessera.shared.cli.render.metric_tables import epsilon_table, number_table, score_table, spread_table
from tessera.shared.cli.render.output import AsJson
from tessera.shared.cli.render.watch import watch_as_json, watch_as_text
from tessera.shared.cli.run_file import read_spec
from tessera.shared.cli.upload import upload_model
from tessera.shared.client.client import Client
from tessera.shared.client.round_outcomes import Outcome, follow, outcomes
from tessera.shared.metrics.site_spread import scores_by_version, spreads
from tessera.shared.problems import Problem
from tessera.shared.schema import RoundState, RunState
from tessera.shared.updates.model_folder import ModelFolder

app = typer.Typer(
    no_args_is_help=True, add_completion=False, callback=connect, help="Start, watch, steer and export runs."
)
app.command()(metrics)

EXIT_CODES: dict[RunState, int] = {"completed": 0, "failed": 1, "cancelled": 1, "paused": 3}

ROUND_COLUMNS = ("round", "stage", "state", "accepted", "accuracy", "macro-F1", "down", "up", "seconds")

Named = Annotated[str, typer.Argument(metavar="RUN", help="The run's id, the beginning of it, or its name.")]


def _sendable(key: str | None) -> str | None:
    """Return a key that a header can carry. Raises BadParameter."""
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter(f"{key!r} has characters other than printable ASCII")
    return key


SpecFile = Annotated[
    Path, typer.Argument(metavar="FILE.toml", help="What to run: method, dataset, rounds, cohort ...")
]
ModelFolderIn = Annotated[
    Path, typer.Option("--model", help="The model folder to start from (see `tessera model init`).")
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Changes a setting, e.g. cohort.quorum=2.")
]


@app.command()
def create(
    ctx: typer.Context,
    file: SpecFile,
    model: ModelFolderIn,
    settings: Changes = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            callback=_sendable,
            help="Repeating the command with the same key returns the same run.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Upload a model and start a run; prints the run's id."""
    client = client_of(ctx)
    spec, sent = _uploaded(client, file, model, settings, as_json=as_json)
    warn_of_few(client, spec)
    run = client.create_run(spec, key=key or uuid.uuid4().hex)
    if as_json:
        output.print_json(run)
        return
    output.note(sent)
    output.out().print(run.id)


@app.command()
def preview(
    ctx: typer.Context, file: SpecFile, model: ModelFolderIn, settings: Changes = None, as_json: AsJson = False
) -> None:
    """Show who would take part in a run, who not and why, and what its first round would ask. Starts nothing.

    The model is uploaded as by `create`, which then has nothing more to send. Exit code 3 for fewer than the quorum.
    """
    client = client_of(ctx)
    spec, sent = _uploaded(client, file, model, settings, as_json=as_json)
    found = client.preview_run(spec)
    if as_json:
        output.print_json(found)
    else:
        output.note(sent)
        output.out().print(preview_table(found))
        for sentence in preview_notes(found):
            output.note(sentence)
    if found.eligible < found.quorum:
        raise typer.Exit(3)


def _uploaded(
    client: Client, file: Path, model: Path, settings: list[str] | None, *, as_json: bool
) -> tuple[RunSpec, str]:
    """Return the run that a file and a model folder make, whose model is uploaded, and what that took."""
    wanted = read_spec(file, settings or [])
    folder = ModelFolder.open(model)
    with output.progress(quiet=as_json) as bar:
        task = bar.add_task("model", total=folder.model.nbytes)
        uploaded = upload_model(client, folder, lambda count: bar.advance(task, count))
    spec = RunSpec.model_validate({**wanted, "model": uploaded.model, "version": uploaded.version})
    return spec, f"sent {output.size(uploaded.sent_bytes)} of a model of {output.size(folder.model.nbytes)}"


@app.command("list")
def list_runs(ctx: typer.Context, as_json: AsJson = False) -> None:
    """List the runs."""
    runs = list(client_of(ctx).runs())
    rows = [
        (
            run.id,
            run.spec.name,
            run.state,
            run.spec.method.name,
            f"{run.version.number}/{run.spec.rounds}",
            output.ago(run.updated_at),
        )
        for run in runs
    ]
    output.show(runs, output.table(("id", "name", "state", "method", "rounds", "changed"), rows), as_json=as_json)


@app.command()
def show(
    ctx: typer.Context,
    run: Named,
    numbers: Annotated[bool, typer.Option("--scalars", help="Also what the method tells of each version.")] = False,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also how far each worker's updates are from the others'.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run, its rounds, how its sites fare, which workers failed and why, and what its method warns of."""
    client = client_of(ctx)
    found = find_run(client, run)
    measurements, versions = list(client.measurements(found.id)), list(client.versions(found.id))
    at_sites = spreads(measurements)
    made = list(client.rounds(found.id))
    rounds = outcomes(made, scores_by_version(measurements), at_sites, versions)
    if as_json:
        shown = {"run": found, "rounds": [outcome.as_json() for outcome in rounds]}
        sites = {
            number: {name: asdict(spread) for name, spread in names.items()} for number, names in at_sites.items()
        }
        output.print_json({**shown, "sites": sites, "versions": versions})
        return
    console = output.out()
    warnings = (("warning", said) for said in versions[-1].warnings)
    console.print(output.table(("", ""), [*_facts(found), *_reasons(found, made), *warnings]))
    _tell_what_it_waits_for(client, found, [round_.state for round_ in made])
    tables = [_round_table(rounds)]
    if at_sites:
        tables.append(spread_table(at_sites))
    if (spent := epsilon_table(made)).row_count:
        tables.append(spent)
    if numbers:
        tables.append(number_table(versions))
    if scores:
        tables.append(score_table(made))
    for table in tables:
        console.print()
        console.print(table)
    print_troubles(console, made)


def _tell_what_it_waits_for(client: Client, run: Run, rounds: Sequence[RoundState]) -> None:
    """Between rounds a run is for a moment, or waits for workers."""
    if run.state == "running" and not {"open", "merging"} & set(rounds):
        warn_of_few(client, run.spec)


def _facts(run: Run) -> list[tuple[str, str]]:
    optimizer, privacy = run.spec.server_optimizer, run.spec.privacy
    bounds = f"epsilon {privacy.epsilon:g}, delta {privacy.delta:g} at each worker" if privacy else "none"
    return [
        ("run", f"{run.spec.name} ({run.id})"),
        ("state", run.state + (f": {run.reason}" if run.reason else "")),
        ("method", _with_settings(run.spec.method.name, run.spec.method.settings)),
        ("server optimizer", _with_settings(optimizer.kind, optimizer.model_dump(exclude={"kind"}))),
        ("robust", _with_settings(run.spec.robust.rule, run.spec.robust.model_dump(exclude={"rule"}))),
        *([("a site counts", run.bounds.summary)] if run.bounds else []),
        ("privacy", bounds),
        ("version", f"{run.version.number} of {run.spec.rounds}"),
        ("dataset", run.spec.dataset),
        ("model", output.size(run.model_bytes) or ""),
        ("codec", run.spec.codec),
    ]


def _reasons(run: Run, rounds: Sequence[Round]) -> list[tuple[str, str]]:
    """Return why the rounds ended for which a run was paused."""
    last = [round_ for round_ in rounds if round_.number == run.version.number + 1]
    told = dict.fromkeys(round_.reason for round_ in last if round_.state == "abandoned" and round_.reason)
    return [("reason", said) for said in told] if run.state == "paused" else []


def _with_settings(name: str, settings: Mapping[str, object]) -> str:
    shown = ", ".join(f"{setting} {value}" for setting, value in settings.items())
    return f"{name} ({shown})" if shown else name


def _round_table(rounds: list[Outcome]) -> Table:
    numbers = ("round", "accepted", "accuracy", "macro-F1", "down", "up", "seconds")
    return output.table(ROUND_COLUMNS, [_row(outcome) for outcome in rounds], right=numbers)


def _row(outcome: Outcome) -> tuple[object, ...]:
    made = outcome.round
    return (
        made.number if made.attempt == 1 else f"{made.number} (try {made.attempt})",
        made.stage,
        made.state + (f": {made.reason}" if made.state == "abandoned" and made.reason else ""),
        f"{outcome.accepted}/{outcome.asked}",
        output.share(outcome.scores.get("accuracy")),
        output.share(outcome.scores.get("macro_f1")),
        output.size(outcome.download_bytes),
        output.size(outcome.upload_bytes),
        output.seconds(outcome.seconds(datetime.now(UTC))),
    )


@app.command()
def watch(ctx: typer.Context, run: Named, as_json: AsJson = False) -> None:
    """Follow a run until it ends or pauses. Exit code 0: completed, 1: failed or cancelled, 3: paused."""
    client = client_of(ctx, WATCHING_PATIENCE_SECONDS)
    found = find_run(client, run)
    if not as_json:
        _tell_what_it_waits_for(client, found, [made.state for made in client.rounds(found.id)])
    glimpses = follow(client, found.id)
    last = watch_as_json(glimpses) if as_json else watch_as_text(glimpses)
    raise typer.Exit(EXIT_CODES[last.state])


@app.command()
def pause(ctx: typer.Context, run: Named, as_json: AsJson = False) -> None:
    """Open no more rounds; the one that is open goes on to its end."""
    _set_state(ctx, run, "paused", as_json=as_json)


@app.command()
def resume(ctx: typer.Context, run: Named, as_json: AsJson = False) -> None:
    """Let a paused run go on."""
    _set_state(ctx, run, "running", as_json=as_json)


@app.command()
def cancel(ctx: typer.Context, run: Named, as_json: AsJson = False) -> None:
    """End a run for good; what it has committed stays."""
    _set_state(ctx, run, "cancelled", as_json=as_json)


def _set_state(ctx: typer.Context, named: str, state: RunState, *, as_json: bool) -> None:
    client = client_of(ctx)
    run = client.set_run_state(find_run(client, named).id, state)
    output.show(run, f"{run.spec.name} is {run.state}", as_json=as_json)


@app.command()
def export(
    ctx: typer.Context,
    run: Named,
    out: Annotated[Path, typer.Argument(help="A .safetensors file, or the model folder to make.")],
    version: Annotated[int | None, typer.Option(min=0, help="Which version; the latest if left out.")] = None,
    model: Annotated[
        Path | None, typer.Option(help="Make a folder, with what else is in this one (a tokenizer, say).")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as one safetensors file, or as a folder that transformers' from_pretrained loads."""
    client = client_of(ctx)
    found = find_run(client, run)
    with output.progress(quiet=as_json) as bar:
        task = bar.add_task(out.name, total=found.model_bytes)

        def progress(count: int) -> None:
            bar.advance(task, count)

        if out.suffix == ".safetensors" and model is None:
            export_file(client, found, out, version, progress)
        else:
            export_folder(client, found, out, version, progress, model)
    number = found.version.number if version is None else version
    if as_json:
        output.print_json({"run": found.id, "version": number, "path": str(out)})
    else:
        output.out().print(f"{out}: version {number} of {found.spec.name}", soft_wrap=True)


def preview_table(found: Preview) -> Table:
    columns = ("worker", "takes part", "fetches", "trains", "sends, at most", "because")
    return output.table(columns, map(_preview_row, found.workers))


def _preview_row(prospect: WorkerPreview) -> tuple[object, ...]:
    asked, said = prospect.workload, (*prospect.ineligibilities, *prospect.warnings)
    because = "; ".join(f"{one.rule}: {one.detail}" for one in said)
    willing = "yes, but" if prospect.warnings else "yes"
    takes_part = "no" if prospect.ineligibilities else willing if asked else "not in the first round"
    return (prospect.worker, takes_part, *_parts(asked), because or None)


def _parts(asked: RoundWorkload | None) -> tuple[str | None, str | None, str | None]:
    if asked is None:
        return None, None, None
    return (
        f"{asked.fetch_blocks} blocks, {output.size(asked.fetch_bytes)}",
        f"{asked.train_blocks} blocks, {output.size(asked.train_bytes)}",
        f"{asked.upload_blocks} blocks, {output.size(asked.upload_bytes)}",
    )


def preview_notes(found: Preview) -> Iterator[str]:
    """Yield what a person should know before the run is started."""
    if found.missing_sites:
        yield f"nobody was ever heard of from {', '.join(found.missing_sites)}"
    if found.eligible < found.quorum:
        after = (
            f"; {found.awaiting_approval} more once their sites have approved it" if found.awaiting_approval else ""
        )
        yield f"warning: {found.eligible} would take part now, fewer than the quorum of {found.quorum}{after}"
    yield from (f"warning: {warning}" for warning in found.warnings)


def warn_of_few(client: Client, spec: RunSpec) -> None:
    """Say if too few would take part. A coordinator that cannot tell is no reason not to start the run."""
    try:
        found = client.preview_run(spec)
    except Problem:
        return
    for sentence in preview_notes(found):
        output.note(sentence)
