"""`tessera run`: commands to start, watch, steer and export runs."""

import uuid
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Annotated

import typer
from pydantic import TypeAdapter, ValidationError
from rich.markup import escape
from rich.table import Table

from tessera.shared import units
from tessera.shared.api.runs import (
    Coverage,
    Measurement,
    Preview,
    Round,
    Run,
    RunPatch,
    RunSpec,
    SiteCoverage,
    WorkerPreview,
)
from tessera.shared.cli.comparison import compare
from tessera.shared.cli.connection import RunNamed, client_of, connect
from tessera.shared.cli.dossier import dossier
from tessera.shared.cli.metrics import metrics
from tessera.shared.cli.run_template import template
from tessera.shared.client.client import WATCHING_PATIENCE_SECONDS, Client, despite_changes
from tessera.shared.client.lookup import find_run
from tessera.shared.client.previews import (
    attack_of,
    ended,
    forecast_of,
    preview_notes,
    previewed,
    rehearsal_of,
    remarks,
)
from tessera.shared.client.round_outcomes import RoundOutcome, follow, outcomes
from tessera.shared.client.run_file import installed_method, live_changes, read_spec
from tessera.shared.client.run_versions import described, export_version, new_run, parse_version
from tessera.shared.methods.base import LORA_RANK
from tessera.shared.metrics.classification import FigureTables, GroupFigures, group_figures
from tessera.shared.metrics.comparison import (
    BestVersion,
    History,
    MainScore,
    best_version,
    different_sites,
    main_score,
    setting_text,
)
from tessera.shared.metrics.membership import AttackResult
from tessera.shared.metrics.site_spread import PERSONAL, name_over_sites, spreads
from tessera.shared.model.dataset_schema import class_names
from tessera.shared.problems import Invalid, validated
from tessera.shared.schema import DEFAULT_STUDY, Label, RunState
from tessera.shared.terminal import output
from tessera.shared.terminal.failures import MAX_SHOWN, print_failures
from tessera.shared.terminal.metric_tables import (
    epsilon_table,
    figure_tables,
    number_table,
    score_table,
    spread_table,
)
from tessera.shared.terminal.output import AsJson, Reach
from tessera.shared.terminal.rehearsal_table import show_attack, show_rehearsal
from tessera.shared.terminal.watch import watch_as_json, watch_as_text
from tessera.shared.updates.model_folder import ModelFolder

app = typer.Typer(
    no_args_is_help=True, add_completion=False, callback=connect, help="Start, watch, steer and export runs."
)
app.command()(metrics)
app.command()(compare)
app.command()(dossier)

EXIT_CODES: dict[RunState, int] = {"completed": 0, "cancelled": 1, "paused": 3}

MEAN_OF_SITES = (
    "the mean of the sites' macro-F1 is not that of their examples together: it is lower where sites lack classes"
)


def _header_value(key: str | None) -> str | None:
    if key is not None and not (key.isascii() and key.isprintable()):
        raise typer.BadParameter(f"{key!r} has characters other than printable ASCII")
    return key


SpecFile = Annotated[
    Path | None,
    typer.Argument(
        metavar="FILE.toml",
        help="The run's settings: method, dataset, rounds, cohort ...; by default those of the run given by --from.",
    ),
]
ModelFolderIn = Annotated[
    Path | None, typer.Option("--model", help="The model folder to start from (see `tessera model init`).")
]
StartFrom = Annotated[
    str | None,
    typer.Option(
        "--from",
        metavar="RUN[@VERSION]",
        help="Start from a version of another run: its number, `latest` (the default) or `best`.",
    ),
]
StudyName = Annotated[
    str | None, typer.Option("--study", metavar="STUDY", help="The run's study: the same as --set study=STUDY.")
]
Without = Annotated[
    str | None,
    typer.Option(
        "--without",
        metavar="SITE",
        help="With --from: leave this site out, and start from the last version before its first merged update.",
    ),
]
Changes = Annotated[
    list[str] | None, typer.Option("--set", metavar="KEY=VALUE", help="Change a setting, e.g. cohort.quorum=2.")
]

LiveChanges = Annotated[
    list[str],
    typer.Option(
        "--set", metavar="KEY=VALUE", help="Set rounds, cohort.quorum or cohort.deadline_seconds, e.g. rounds=20."
    ),
]


@app.command()
def init(
    method: Annotated[str, typer.Argument(metavar="METHOD", help="The method, such as fedavg.")],
    dataset: Annotated[str, typer.Option(help="The sites' name of the data to train on.")] = "data",
    paper: Annotated[
        bool, typer.Option("--paper", help="Use the values that the method's paper states, each with its source.")
    ] = False,
    out: Annotated[Path | None, typer.Option(help="The new file; by default the text is printed.")] = None,
    as_json: AsJson = False,
) -> None:
    """Write a run's file for a method, with the meaning, type and default of each key. Asks no coordinator.

    The file is valid as it is, and evaluates at the sites.
    """
    try:
        TypeAdapter(Label).validate_python(dataset)
    except ValidationError:
        remedy = "Use letters, digits, dot, dash and underscore, 64 at most."
        raise Invalid(f"--dataset: {dataset!r} is no name of a data set", remedy=remedy) from None
    text = template(installed_method(method), dataset, paper=paper)
    if out is not None:
        try:
            with out.open("x", encoding="utf-8") as file:
                file.write(text)
        except OSError as fault:
            raise Invalid(f"{out} cannot be created: {fault.strerror}", remedy="Choose another file.") from fault
    if as_json:
        output.print_json({"method": method, "path": out and str(out), "text": text})
    elif out is None:
        typer.echo(text, nl=False)
    else:
        output.out().print(f"{out}: a run of {method}", soft_wrap=True, markup=False)


@app.command()
def create(
    ctx: typer.Context,
    file: SpecFile = None,
    model: ModelFolderIn = None,
    start_from: StartFrom = None,
    study: StudyName = None,
    without: Without = None,
    settings: Changes = None,
    key: Annotated[
        str | None,
        typer.Option(
            "--idempotency-key",
            callback=_header_value,
            help="Idempotency key: repeating the command with it returns the same run.",
        ),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Start a run from a model folder or from a version of another run, and print its id."""
    client = client_of(ctx)
    spec, sent = _spec(client, file, model, start_from, study, settings, without, as_json=as_json)
    _warn_if_too_few(client, spec)
    run = client.create_run(spec, key=key or uuid.uuid4().hex)
    if as_json:
        output.print_json(run)
        return
    output.note(sent)
    output.out().print(run.id)


@app.command()
def preview(
    ctx: typer.Context,
    file: SpecFile = None,
    model: ModelFolderIn = None,
    start_from: StartFrom = None,
    study: StudyName = None,
    without: Without = None,
    settings: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Show which workers would take part in a run, which not and why, and their first round's work. Starts nothing.

    Uploads the model, as `create` does. Exit code 3 if fewer sites than the quorum would take part, or a required
    site would not.
    """
    client = client_of(ctx)
    spec, sent = _spec(client, file, model, start_from, study, settings, without, as_json=as_json)
    found = client.preview_run(spec)
    if as_json:
        output.print_json(found)
    else:
        output.note(sent)
        output.out().print(preview_table(found))
        for sentence in preview_notes(found):
            output.note(sentence)
    if found.eligible < found.quorum or found.lacking:
        raise typer.Exit(3)


@app.command()
def rehearse(
    ctx: typer.Context,
    file: SpecFile = None,
    model: ModelFolderIn = None,
    start_from: StartFrom = None,
    study: StudyName = None,
    settings: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Train two steps of a run at each site, and forecast the run's time, bytes and epsilon. Merges nothing.

    Sites send a report alone, and keep nothing. Exit code 3 if fewer sites than the quorum could train.
    """
    client = client_of(ctx, WATCHING_PATIENCE_SECONDS)
    spec, sent = _spec(client, file, model, start_from, study, settings, as_json=as_json)
    rehearsal = rehearsal_of(spec)
    known, run = client.preview_run(rehearsal), client.create_run(rehearsal, key=uuid.uuid4().hex)
    if not as_json:
        output.note(sent)
        output.note(f"waiting for the sites; `tessera run show {run.id}` has what came so far")
    run, found = forecast_of(client, run)
    further = list(remarks(known, {one.worker for one in found.workers}))
    show_rehearsal(run, found, further, as_json=as_json)
    if found.slowest is None:
        raise typer.Exit(3)


@app.command()
def attack(
    ctx: typer.Context,
    file: SpecFile = None,
    model: ModelFolderIn = None,
    start_from: StartFrom = None,
    study: StudyName = None,
    settings: Changes = None,
    as_json: AsJson = False,
) -> None:
    """Measure how well a membership inference attack separates a version's training examples from held-out ones.

    Each site sends counts of the version's losses alone. Exit code 3 if no site did.
    """
    client = client_of(ctx, WATCHING_PATIENCE_SECONDS)
    spec, sent = _spec(client, file, model, start_from, study, settings, as_json=as_json)
    asked = attack_of(spec)
    known, run = client.preview_run(asked), client.create_run(asked, key=uuid.uuid4().hex)
    if not as_json:
        output.note(sent)
        output.note(f"waiting for the sites; `tessera run show {run.id}` has what came so far")
    run, reports = ended(client, run)
    found = AttackResult.of(run, reports)
    show_attack(run, found, list(remarks(known, {one.worker for one in reports})), as_json=as_json)
    if not found.found:
        raise typer.Exit(3)


def _spec(
    client: Client,
    file: Path | None,
    model: Path | None,
    start_from: str | None,
    study: str | None,
    settings: list[str] | None,
    without: str | None = None,
    *,
    as_json: bool,
) -> tuple[RunSpec, str]:
    """Return a run's spec, whose model is uploaded with a progress bar, and a note of its start."""
    settings = [*(settings or ()), *([f"study={study}"] if study else ())]
    given = read_spec(file, settings, output.note) if file else None
    with output.progress(quiet=as_json or model is None) as bar:

        def progress_of(folder: ModelFolder) -> Callable[[int], None]:
            return partial(bar.advance, bar.add_task("model", total=folder.model.stored_bytes))

        return new_run(client, given, model, start_from, settings, progress_of, output.note, without)


@app.command("list")
def list_runs(
    ctx: typer.Context,
    state: Annotated[RunState | None, typer.Option(help="Only runs in this state.")] = None,
    name: Annotated[str, typer.Option(help="Only runs with this text in their names, in any case.")] = "",
    as_json: AsJson = False,
) -> None:
    """List the runs, newest first."""
    every = sorted(client_of(ctx).runs(), key=lambda run: run.created_at, reverse=True)
    runs = [run for run in every if state in (None, run.state) and name.lower() in run.spec.name.lower()]
    several = len({run.spec.study for run in every}) > 1
    rows = [
        (
            run.id,
            run.spec.name,
            *([run.spec.study] if several else []),
            run.shown_state,
            run.spec.method.name,
            f"{run.version.number}/{run.spec.rounds}",
            units.ago(run.updated_at),
            ", ".join(run.tags),
        )
        for run in runs
    ]
    study = ("study",) if several else ()
    columns = ("id", "name", *study, "state", "method", "rounds", "changed", "tags")
    output.show(runs, output.table(columns, rows), as_json=as_json)


def _show_reports(client: Client, run: Run, *, as_json: bool) -> None:
    if run.spec.rehearsal:
        show_rehearsal(*forecast_of(client, run, wait=False), as_json=as_json)
    else:
        show_attack(run, AttackResult.of(run, client.reports(run.id)), as_json=as_json)


@app.command()
def show(
    ctx: typer.Context,
    run: RunNamed,
    numbers: Annotated[bool, typer.Option("--scalars", help="Also the method's metrics of each version.")] = False,
    reach: Reach = None,
    scores: Annotated[
        bool, typer.Option("--scores", help="Also the distance of each update from the others of its round.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Show a run: its rounds, the cost of a score, metrics at sites, failed tasks with reasons, and warnings."""
    client = client_of(ctx)
    found = find_run(client, run)
    if found.spec.rehearsal or found.spec.membership_attack:
        _show_reports(client, found, as_json=as_json)
        return
    measurements, versions = list(client.measurements(found.id)), list(client.versions(found.id))
    at_sites = spreads(measurements)
    rounds = list(client.rounds(found.id))
    ended = outcomes(rounds, found.spec, measurements, versions)
    best = best_version(measurements)
    covered = list(client.coverage(found.id))
    converged = History.of(found, rounds, measurements).convergence(reach or ())
    figures = _figures(client, found, measurements)
    if as_json:
        sites = {
            number: {name: asdict(spread) for name, spread in names.items()} for number, names in at_sites.items()
        }
        listed = [outcome.as_json() for outcome in ended]
        shown = {"run": found, "rounds": listed, "sites": sites, "versions": versions, "best": best}
        measured = [one.as_json() for one in figures]
        output.print_json({**shown, "convergence": converged, "coverage": covered, "figures": measured})
        return
    console = output.out()
    warnings = (("warning", warning) for warning in (versions[-1].warnings if versions else ()))
    facts = [*_facts(found), ("best version", described(best) if best else "none was evaluated")]
    facts += converged.facts() if converged and found.spec.rounds else ()
    console.print(
        output.table(("", ""), [*facts, *_ranks(rounds), *_reasons(found, rounds), *_held(rounds), *warnings])
    )
    _warn_between_rounds(client, found, rounds)
    tables = [_round_table(ended, best, main_score(measurements))]
    if found.coverage and (left_out := [one for one in covered if one.missed]):
        rows = [(one.site, one.examples, one.missed, one.reason) for one in left_out]
        tables.append(output.table(("left out", "examples", "rounds in a row", "because"), rows, right=("examples",)))
    tables += _buffer_tables(covered)
    if at_sites:
        tables.append(spread_table(at_sites))
    column = found.spec.evaluation.subgroups if found.spec.evaluation else None
    if figures and (listed_figures := FigureTables.of(figures, column, _class_names(client, found))):
        tables += figure_tables(listed_figures)
    if (spent := epsilon_table(rounds, found.spec.privacy)).row_count:
        tables.append(spent)
    if numbers:
        tables.append(number_table(versions))
    if scores:
        tables.append(score_table(rounds))
    for table in tables:
        console.print()
        console.print(table)
    print_failures(console, rounds)


def _buffer_tables(covered: Iterable[SiteCoverage]) -> list[Table]:
    """Return a table of each site's part in the latest versions, of a run that buffers updates."""
    columns = ("site", "now", "updates", "staleness", "largest", "share", "of all examples", "")
    rows = [
        (
            site,
            part.doing,
            part.updates,
            f"{part.staleness:g}",
            part.most_stale,
            f"{part.share:.1%}",
            f"{part.weight:.1%}",
            "below half" if part.is_behind else "",
        )
        for site, part in ((one.site, one.buffered) for one in covered)
        if part
    ]
    return [output.table(columns, rows, right=columns[2:-1])] if rows else []


def _figures(client: Client, run: Run, measurements: Sequence[Measurement]) -> list[GroupFigures]:
    """Return the figures of the latest version whose sites sent counts of their predictions."""
    latest = max((one.version for one in measurements if one.class_counts), default=None)
    if latest is None or run.spec.evaluation is None:
        return []
    counted = [one for one in client.measurements(run.id, latest, counts=True) if one.version == latest]
    return list(group_figures(counted, run.spec.evaluation.specificity))


def _class_names(client: Client, run: Run) -> list[str]:
    return class_names(client.model(run.spec.model))


def _warn_between_rounds(client: Client, run: Run, rounds: Iterable[Round]) -> None:
    # A run without an open round either is between two rounds or waits for workers.
    if run.state == "running" and not {"open", "merging"} & {round_.state for round_ in rounds}:
        _warn_if_too_few(client, run.spec)


def _facts(run: Run) -> list[tuple[str, str]]:
    optimizer, privacy, sites = run.spec.server_optimizer, run.spec.privacy, run.spec.client_privacy
    cohort = run.spec.cohort
    return [
        ("run", f"{run.spec.name} ({run.id})"),
        *([("study", run.spec.study)] if run.spec.study != DEFAULT_STUDY else []),
        ("state", run.shown_state + (f": {run.reason}" if run.reason else "")),
        ("method", _with_settings(run.spec.method.name, run.spec.method.settings)),
        ("server optimizer", _with_settings(optimizer.kind, optimizer.model_dump(exclude={"kind"}))),
        ("robust", _with_settings(run.spec.robust.rule, run.spec.robust.model_dump(exclude={"rule"}))),
        *([("a site counts", run.bounds.summary)] if run.bounds else []),
        ("privacy", privacy.at_workers if privacy else "none"),
        *([("privacy of a site", f"{run.client_epsilon or 0:.3g} spent of {sites.bound}")] if sites else []),
        ("version", f"{run.version.number} of {run.spec.rounds}"),
        *([("coverage", run.coverage.words)] if run.coverage else []),
        ("round", f"quorum {cohort.quorum}, deadline {output.seconds(cohort.deadline_seconds)}"),
        ("dataset", run.spec.dataset),
        ("model", units.size(run.model_bytes) or ""),
        ("codec", run.spec.codec),
        *([("tags", ", ".join(run.tags))] if run.tags else []),
        *([("note", run.note)] if run.note else []),
    ]


def _ranks(rounds: Iterable[Round]) -> list[tuple[str, str]]:
    """Return the latest rank at which each worker trained adapters, if sites train different ones."""
    tasks = [task for round_ in rounds for task in round_.tasks if LORA_RANK in task.metrics]
    latest = {task.worker: task.metrics[LORA_RANK] for task in tasks}
    named = ", ".join(f"{worker} {rank:g}" for worker, rank in sorted(latest.items()))
    return [("adapter ranks", named)] if named else []


def _held(rounds: Iterable[Round]) -> Iterator[tuple[str, str]]:
    """Yield the updates that wait for a person at their site."""
    for task in (task for round_ in rounds for task in round_.tasks):
        if task.held_since:
            yield "held for release", f"round {task.round}, {task.worker}, {units.ago(task.held_since)}"


def _reasons(run: Run, rounds: Sequence[Round]) -> list[tuple[str, str]]:
    """Return the distinct reasons of the abandoned attempts at a paused run's next round, or the reason why the open
    round asks no idle site."""
    last = [round_ for round_ in rounds if round_.number == run.version.number + 1]
    if last and last[-1].state == "open" and last[-1].reason:
        return [("no site asked", last[-1].reason)]
    reasons = dict.fromkeys(round_.reason for round_ in last if round_.state == "abandoned" and round_.reason)
    return [("reason", reason) for reason in reasons] if run.state == "paused" else []


def _with_settings(name: str, settings: Mapping[str, object]) -> str:
    shown = ", ".join(f"{setting} {setting_text(value)}" for setting, value in settings.items())
    return f"{name} ({shown})" if shown else name


BESIDE = {"mae": "r2", "entity_f1": "entity_partial_f1"}
"""The metric beside a main score; the macro F1 beside any other."""


def _round_table(rounds: list[RoundOutcome], best: BestVersion | None, main: MainScore | None) -> Table:
    first = main.name if main else "accuracy"
    if first.removeprefix(PERSONAL) == "loss":
        first = f"{PERSONAL}accuracy" if first.startswith(PERSONAL) else "accuracy"
    second = BESIDE.get(first.removeprefix(PERSONAL), "macro_f1")
    over_sites = name_over_sites(second)
    second = over_sites if any(over_sites in outcome.scores for outcome in rounds) else second
    titles = [name.replace("_f1", "-F1").replace("_", " ") for name in (first, second)]
    columns = ("round", "stage", "state", "accepted", "coverage", *titles, "down", "up", "seconds", "")
    measured = main.values if main and main.name == first else {}
    # An attempt that was abandoned made no version.
    made = [outcome.round.version for outcome in rounds]
    shown = [None if number is None else measured.get(number) for number in made]
    scores = [(value, outcome.scores.get(second)) for value, outcome in zip(shown, rounds, strict=True)]
    rows = [_row(outcome, found, best) for outcome, found in zip(rounds, scores, strict=True)]
    table = output.table(columns, rows, right=("round", "accepted", "coverage", *titles, "down", "up", "seconds"))
    notes = [different_sites([main]) if main else "", MEAN_OF_SITES if second == over_sites else ""]
    table.caption, table.caption_justify = "\n".join(f"note: {note}" for note in notes if note) or None, "left"
    return table


def _row(outcome: RoundOutcome, scores: Iterable[float | None], best: BestVersion | None) -> tuple[object, ...]:
    made, covered = outcome.round, Coverage.of(outcome.scalars)
    return (
        made.number if made.attempt == 1 else f"{made.number} (try {made.attempt})",
        made.stage,
        made.state + (f": {made.reason}" if made.state == "abandoned" and made.reason else ""),
        str(outcome.accepted) if outcome.buffers else f"{outcome.accepted}/{outcome.asked}",
        f"{covered.examples:.0%}" if covered else None,
        *map(output.share, scores),
        units.size(outcome.download_bytes),
        units.size(outcome.upload_bytes),
        output.seconds(outcome.seconds(datetime.now(UTC))),
        "best" if best and made.version == best.number else "",
    )


@app.command()
def watch(ctx: typer.Context, run: RunNamed, as_json: AsJson = False) -> None:
    """Follow a run until it ends or pauses. Exit code 0: completed, 1: cancelled, 3: paused, or low coverage.

    A terminal shows the phase, step, loss and time left of each worker in place; a pipe gets lines.
    Times are estimated from the rounds that have ended and, before that, from the steps of each task.
    """
    client = client_of(ctx, WATCHING_PATIENCE_SECONDS)
    found = find_run(client, run)
    if not as_json:
        _warn_between_rounds(client, found, client.rounds(found.id))
    glimpses = follow(client, found.id)
    last = watch_as_json(glimpses) if as_json else watch_as_text(glimpses)
    raise typer.Exit(EXIT_CODES[last.state] or 3 * last.has_low_coverage)


@app.command()
def pause(ctx: typer.Context, run: RunNamed, as_json: AsJson = False) -> None:
    """Open no more rounds; an open round continues to its end."""
    _set_state(ctx, run, "paused", as_json=as_json)


@app.command()
def resume(ctx: typer.Context, run: RunNamed, as_json: AsJson = False) -> None:
    """Resume a paused run."""
    _set_state(ctx, run, "running", as_json=as_json)


@app.command()
def cancel(ctx: typer.Context, run: RunNamed, as_json: AsJson = False) -> None:
    """End a run for good; its committed versions stay."""
    _set_state(ctx, run, "cancelled", as_json=as_json)


@app.command()
def change(ctx: typer.Context, run: RunNamed, settings: LiveChanges, as_json: AsJson = False) -> None:
    """Change the number of rounds, the quorum or the deadline of a live run, from its next round on.

    The open round keeps its settings, but a longer deadline is its own too. Sites that approve runs are asked again.
    """
    client = client_of(ctx)
    found = find_run(client, run)
    patch = live_changes(found.id, settings)
    found = despite_changes(lambda: client.patch_run(found.id, patch))
    cohort = found.spec.cohort
    text = f"{found.spec.rounds} rounds, quorum {cohort.quorum}, deadline {cohort.deadline_seconds:g} s"
    output.show(found, f"{found.spec.name}: {text}", as_json=as_json)


@app.command()
def annotate(
    ctx: typer.Context,
    run: RunNamed,
    tags: Annotated[list[str] | None, typer.Option("--tag", help="Add a tag.")] = None,
    removed: Annotated[list[str] | None, typer.Option("--untag", help="Remove a tag.")] = None,
    note: Annotated[str | None, typer.Option(help="Replace the note; an empty text removes it.")] = None,
    as_json: AsJson = False,
) -> None:
    """Change the tags and the note of a run, which help people to find it."""
    client = client_of(ctx)

    def annotated() -> Run:
        found = find_run(client, run)
        if not (tags or removed or note is not None):
            return found
        kept = [tag for tag in dict.fromkeys((*found.tags, *(tags or ()))) if tag not in (removed or ())]
        given = {"tags": kept} | ({} if note is None else {"note": note})
        patch = validated(RunPatch, given, "the tags or the note are invalid")
        return client.patch_run(found.id, patch, found.revision)

    # At the revision with the tags that were read, so that no tag of another person is lost.
    found = despite_changes(annotated)
    text = f"{found.spec.name}: {', '.join(found.tags) or 'no tags'}" + (f"; {found.note}" if found.note else "")
    output.show(found, text, as_json=as_json)


def _set_state(ctx: typer.Context, named: str, state: RunState, *, as_json: bool) -> None:
    client = client_of(ctx)
    run = client.set_run_state(find_run(client, named).id, state)
    output.show(run, f"{run.spec.name} is {run.state}", as_json=as_json)


@app.command()
def export(
    ctx: typer.Context,
    run: RunNamed,
    out: Annotated[Path, typer.Argument(help="A .safetensors file, or the model folder to create.")],
    version: Annotated[
        str,
        typer.Option(metavar="VERSION", help="The version's number, `latest`, or `best` by the run's main score."),
    ] = "latest",
    model: Annotated[
        Path | None, typer.Option(help="Create a folder, with the other files of this one (such as a README).")
    ] = None,
    base: Annotated[
        Path | None, typer.Option(help="The folder with the weights of an external base, which are verified.")
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Write a version as one safetensors file, or as a folder that transformers' from_pretrained loads.

    LoRA adapters stay beside their matrices, where from_pretrained ignores them: `tessera model merge` adds them.
    """
    wanted = parse_version(version)
    client = client_of(ctx)
    found = find_run(client, run)
    with output.progress(quiet=as_json) as bar:
        advance = partial(bar.advance, bar.add_task(escape(out.name), total=found.model_bytes))
        number, best = export_version(client, found, out, wanted, advance, model, base)
    if as_json:
        output.print_json({"run": found.id, "version": number, "path": str(out), "best": best})
    else:
        words = f"the best version, {described(best)}," if best else f"version {number}"
        output.out().print(f"{out}: {words} of {found.spec.name}", soft_wrap=True, markup=False)
    if found.coverage and found.coverage.low:
        output.note(f"warning: the latest version of {found.spec.name} rests on {found.coverage.words}")
    if out.is_dir() and client.model(found.spec.model).lora:
        output.note(
            f"{out} has LoRA adapters, which from_pretrained ignores: `tessera model merge {out} MERGED` writes a "
            "folder with the adapters added to the weights"
        )


def preview_table(found: Preview) -> Table:
    columns = ("worker", "takes part", "fetches", "trains", "sends, at most", "because")
    return output.table(columns, map(_preview_row, found.workers))


def _preview_row(prospect: WorkerPreview) -> tuple[object, ...]:
    work, reasons = prospect.workload, (*prospect.ineligibilities, *prospect.warnings)
    because = "; ".join(f"{one.rule}: {one.detail}" for one in reasons)
    yes = "yes, but" if prospect.warnings else "yes"
    takes_part = "no" if prospect.ineligibilities else yes if work else "not in the first round"
    amounts: tuple[str | None, ...] = (None, None, None)
    if work:
        amounts = (
            f"{work.fetch_blocks} blocks, {units.size(work.fetch_bytes)}",
            f"{work.train_blocks} blocks, {units.size(work.train_bytes)}",
            f"{work.upload_blocks} blocks, {units.size(work.upload_bytes)}",
        )
        if work.largest_update_bytes not in (None, work.upload_bytes):
            amounts = (*amounts[:2], f"{units.size(work.largest_update_bytes)}, chosen from {amounts[2]}")
    return (prospect.worker, takes_part, *amounts, because or None)


def _warn_if_too_few(client: Client, spec: RunSpec) -> None:
    """Warn if too few sites would take part; a preview that fails does not prevent the run's start."""
    if found := previewed(client, spec):
        for sentence in preview_notes(found):
            output.note(sentence)
        if found.eligible < found.quorum:
            lacking = [one for one in found.workers if one.ineligibilities]
            for one in lacking[:MAX_SHOWN]:
                output.note(f"{one.worker}: {'; '.join(reason.detail for reason in one.ineligibilities)}")
            more = f" {len(lacking) - MAX_SHOWN} more have such reasons." if len(lacking) > MAX_SHOWN else ""
            output.note(f"The run waits for workers.{more}")
