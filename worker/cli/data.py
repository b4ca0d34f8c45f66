"""`tessera data`: a site's data sets, and the division of one among sites."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from tessera.shared.cli.data_comparison import compare
from tessera.shared.diagnostics import reason_of, toml_of
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.near_names import absent, did_you_mean
from tessera.shared.terminal.output import AsJson, note, out, print_json, table
from tessera.shared.validation_errors import message_of
from tessera.shared.version import install_line
from tessera.worker.cli.exits import BAD_SETTINGS, Errors, exits, fail
from tessera.worker.data.partition.schemes import Partition, Scheme
from tessera.worker.data.prepared import PreparedFolder
from tessera.worker.errors import DataError
from tessera.worker.settings import (
    DataSettings,
    DataSource,
    SettingsError,
    WorkerSettings,
    read_data_settings,
    read_settings,
)

if TYPE_CHECKING:
    import torch

    from tessera.worker import inventory
    from tessera.worker.cli import split_plot
    from tessera.worker.data import dataset as datasets
    from tessera.worker.data import proposal as proposals
    from tessera.worker.data import registry
    from tessera.worker.data.partition import division
else:
    torch = DeferredModule("torch")
    inventory = DeferredModule("tessera.worker.inventory")
    split_plot = DeferredModule("tessera.worker.cli.split_plot")
    datasets = DeferredModule("tessera.worker.data.dataset")
    proposals = DeferredModule("tessera.worker.data.proposal")
    registry = DeferredModule("tessera.worker.data.registry")
    division = DeferredModule("tessera.worker.data.partition.division")

WIDEST = 16
"""Limit on the classes with a column each in a table; for more, the table has the number of each site's classes."""

PARTITION: TypeAdapter[Scheme] = TypeAdapter(Partition)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Show a site's data sets, and the division of one among sites."
)

app.command()(compare)

ConfigFile = Annotated[
    Path, typer.Argument(help="A worker's settings, or a TOML file with only tables of data sets.")
]

ERRORS: Errors = {BAD_SETTINGS: (SettingsError, OSError)}


@app.command()
def show(
    config: ConfigFile,
    dataset: Annotated[str | None, typer.Option(help="Show only this data set.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load each data set as a worker would, and show its contents.

    Exit code 2: the settings are invalid, or name something unusable.
    """
    with exits(ERRORS):
        settings = read_data_settings(config)
        wanted = settings.datasets if dataset is None else dict([_source(settings, dataset)])
        key, own = _key(config)
        shown = [
            _described(name, source, key, inventory.prepared_of(own or settings, name))
            for name, source in wanted.items()
        ]
    if as_json:
        print_json({"datasets": shown})
        return
    if any(row["held out"] for row in shown) and (own is None or not own.sources.held_out_key_file.exists()):
        note("held out: approximate numbers, until the first start of the worker makes its key")
    filled = [
        column
        for column in shown[0]
        if column not in ("warnings", "example")
        and any(row[column] is not None and row[column] != [] for row in shown)
    ]
    rows = [[_cell(row[column]) for column in filled] for row in shown]
    out().print(
        table(
            filled,
            rows,
            right=("examples", "held out", "opted out", "labels", "classes", "domains", "unknown tokens"),
        )
    )
    if converted := [row["name"] for row in shown if row["tokenizer"]]:
        names = ", ".join(converted)
        note(f"{names}: tokens and unknown words depend on each run's tokenizer, and cannot be shown here")
    for row in shown:
        if example := row["example"]:
            text = f"{row['name']}: one example, with its scored parts in [[ ]]:\n{example}"
            out().print(text, markup=False, highlight=False, soft_wrap=True)
        for warning in row["warnings"]:
            note(f"warning: {row['name']}: {warning}")


def _cell(value: object) -> object:
    if isinstance(value, float):
        return f"{value:.1%}"
    return ", ".join(value) if isinstance(value, list) else value


@app.command()
def init(
    path: Annotated[Path, typer.Argument(help="A folder of images, a table, or a folder saved by `datasets`.")],
    name: Annotated[str | None, typer.Option(help="The data set's name; by default the path's.")] = None,
    split: Annotated[str | None, typer.Option(help="The split, if the folder has several.")] = None,
    tokenizer: Annotated[
        str | None,
        typer.Option(
            help="For texts, or for images to compare with a text for each class: a folder, a name on the hub, "
            "or run."
        ),
    ] = None,
    processor: Annotated[str | None, typer.Option(help="For images: a folder, or a name on the hub.")] = None,
    text: Annotated[
        str | None, typer.Option(help="For a table of texts: their column, if several may be it.")
    ] = None,
    label: Annotated[str | None, typer.Option(help="For a table: the column of classes.")] = None,
    to: Annotated[
        Path | None,
        typer.Option("--out", help="Append it to this file, such as worker.toml, instead of printing it."),
    ] = None,
) -> None:
    """Write the settings of a data set for a folder or a file, with the reason for each option.

    Exit code 2: the data leave a choice that only a person can make, or there is such a table already.
    """
    if not path.exists():
        fail(absent(path), BAD_SETTINGS)
    given = name or re.sub(r"[^A-Za-z0-9_-]+", "-", path.resolve().stem).strip("-_") or "data"
    with exits(ERRORS):
        try:
            proposal = proposals.propose(
                path, split=split, tokenizer=tokenizer, processor=processor, text=text, label=label
            )
            lines = proposal.toml(given)
            tomllib.loads(lines)
            lines.encode()
        except (DataError, tomllib.TOMLDecodeError, UnicodeEncodeError) as fault:
            raise SettingsError(str(fault)) from fault
        if to is None:
            typer.echo(lines, nl=False)
        else:
            _append(to, given, lines)
    for warning in proposal.warnings:
        note(f"warning: {warning}")
    note(f"then check it: tessera data show {to or 'FILE'}")


def _append(file: Path, name: str, text: str) -> None:
    """Append a data set's table to settings. Raises SettingsError if they have one of this name, or cannot grow."""
    try:
        before = file.read_bytes() if file.exists() else b""
        settings = toml_of(before)
    except tomllib.TOMLDecodeError as fault:
        raise SettingsError(f"{file} cannot be read: {fault}") from fault
    datasets = settings.get("datasets", {})
    if not isinstance(datasets, dict):
        raise SettingsError(f"{file}: datasets must be tables such as [datasets.{name}], and is {datasets!r}")
    if name in datasets:
        raise SettingsError(f"{file} has a data set {name!r} already: give another --name")
    added = (("\n" if before else "") + text).encode()
    # Unbuffered and at the end, so that on a full disk the settings can stay as they were.
    with file.open("ab", buffering=0) as opened:
        length = opened.tell()
        try:
            written = opened.write(added)
        except OSError as fault:
            raise SettingsError(f"{file} is unchanged: {reason_of(fault)}") from fault
        if written < len(added):
            opened.truncate(length)
            raise SettingsError(f"{file} is unchanged: there is no room on its disk for another {len(added)} bytes")


def _key(config: Path) -> tuple[bytes, WorkerSettings | None]:
    """Return the worker's key of held-out examples and its settings, or for other files a key that holds out about as
    many."""
    try:
        settings = read_settings(config)
        return inventory.held_out_key(settings.sources, make=False), settings
    except SettingsError:
        return division.key_of_seed(0), None


def _described(name: str, source: DataSource, key: bytes, prepared: PreparedFolder) -> dict[str, Any]:
    with inventory.named(name):
        # No pixel is shown, so none has to stay in memory.
        loaded = inventory.load_source(
            source.model_copy(update=registry.streamed(source.kind, source.options)), key, prepared
        )
    part = source.part and f"{source.part.index} of {source.part.count}, {source.part.scheme}"
    return {
        "name": name,
        "kind": source.kind,
        "part": part,
        "examples": loaded.examples,
        "held out": loaded.held_out and loaded.held_out.examples,
        "opted out": loaded.report.opted_out and loaded.report.opted_out.examples,
        "problem type": loaded.schema.problem,
        "labels": loaded.schema.classes if loaded.schema.problem == "multi_label" else None,
        "classes": None if loaded.classes is None else len(torch.unique(loaded.classes)),
        "domains": None if loaded.domains is None else len(torch.unique(loaded.domains)),
        "tensors of each": _shapes(loaded, common=False),
        "common to all": _shapes(loaded, common=True),
        "tokenizer": "of each run" if loaded.texts else None,
        "unknown tokens": loaded.report.unknown_tokens,
        "truncated": None if loaded.texts or not loaded.report.truncation else str(loaded.report.truncation),
        "example": loaded.report.shown,
        "warnings": loaded.report.sentences(held_out=loaded.held_out is not None),
    }


def _shapes(loaded: datasets.Dataset, *, common: bool) -> list[str]:
    shapes = []
    for name, tensor in sorted((loaded.common if common else loaded.inputs).items()):
        shape = list(tensor.shape if common else tensor.shape[1:])
        # Labels of words become those of tokens.
        if not (loaded.texts and name == datasets.LABELS and shape):
            shapes.append(f"{name} {str(tensor.dtype).removeprefix('torch.')}{shape or ''}")
    return shapes


@app.command()
def split(
    config: ConfigFile,
    dataset: Annotated[str | None, typer.Option(help="The data set; optional if there is only one.")] = None,
    sites: Annotated[int | None, typer.Option(help="The number of sites.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="iid, dirichlet, shards, quantity, domain or shift; by default the settings'.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="Similarity of the sites; a small one skews them.")] = None,
    label_alpha: Annotated[float | None, typer.Option(help="The same, for labels within a domain.")] = None,
    each: Annotated[int | None, typer.Option(help="The number of shards for each site.")] = None,
    seed: Annotated[int | None, typer.Option(help="The seed of all random draws.")] = None,
    picture: Annotated[Path | None, typer.Option("--out", help="Draw it to this .svg, .png or .pdf file.")] = None,
    as_json: AsJson = False,
) -> None:
    """Divide a data set among sites, and count the examples of each. Writes nothing but the picture.

    Options that are left out are those of the data set's `part`. Exit code 2: the settings or the division are
    invalid, or name something unusable.
    """
    given = {"scheme": scheme, "count": sites, "alpha": alpha, "label_alpha": label_alpha, "each": each, "seed": seed}
    with exits(ERRORS):
        settings = read_data_settings(config)
        draw = _drawing() if picture else None
        name, source = _source(settings, dataset)
        partition = _partition(source, {key: value for key, value in given.items() if value is not None})
        with inventory.named(name):
            parts = division.divide(registry.load(source.kind, source.options), partition)
        names = source.options.get("labels")
        counted = division.class_counts(parts, [str(name) for name in names] if isinstance(names, list) else None)
        if draw and picture:
            try:
                draw(counted, f"{name}: {_sentence(partition)}", picture)
            except ValueError as fault:
                raise SettingsError(f"--out: {fault}") from fault
    if as_json:
        sites_of = [
            {
                "site": site,
                "examples": part.examples,
                **{tally.what: dict(zip(tally.names, tally.counts[site], strict=True)) for tally in counted},
            }
            for site, part in enumerate(parts)
        ]
        print_json({"dataset": name, "partition": partition.model_dump(exclude={"index"}), "sites": sites_of})
        return
    changes = [partition.describe(index) for index in range(partition.count)]
    for tally in counted:
        out().print(_table(tally, changes))
    if picture:
        note(f"drawn in {picture}")


def _source(settings: DataSettings, name: str | None) -> tuple[str, DataSource]:
    """Return the named data set, or else the only one, with its name."""
    if name is None and len(settings.datasets) > 1:
        raise SettingsError(f"there are several data sets: give --dataset {' or '.join(settings.datasets)}")
    if name is None:
        name = next(iter(settings.datasets))
    if name not in settings.datasets:
        raise SettingsError(f"there is no data set {name!r}{did_you_mean(name, settings.datasets)}")
    return name, settings.datasets[name]


def _partition(source: DataSource, given: dict[str, object]) -> Scheme:
    """Return the data set's own partition, changed by the given options, or a new one for another scheme."""
    own = source.part.model_dump(exclude_unset=True, exclude={"index"}) if source.part else {}
    scheme = given.get("scheme", own.get("scheme"))
    if scheme is None:
        raise SettingsError("the settings do not divide the data set: give --scheme and --sites")
    if scheme != own.get("scheme"):
        own = {"count": own["count"]} if own else {}
    try:
        return PARTITION.validate_python({**own, **given})
    except ValidationError as fault:
        first = fault.errors(include_url=False)[0]
        key = str(first["loc"][-1]) if first["loc"] else "scheme"
        option = "sites" if key == "count" else key.replace("_", "-")
        reason = f"scheme {scheme} has no such setting" if first["type"] == "extra_forbidden" else message_of(first)
        raise SettingsError(f"--{option}: {reason}") from None


def _drawing() -> Any:
    try:
        return split_plot.draw
    except ModuleNotFoundError as fault:
        raise SettingsError(f"--out: {fault.name} is not installed: {install_line('demo')}") from fault


def _sentence(partition: Scheme) -> str:
    options = partition.model_dump(exclude={"scheme", "count", "index", "distortions"}, exclude_none=True)
    return f"{partition.scheme} among {partition.count} sites, " + ", ".join(f"{k} {v:g}" for k, v in options.items())


def _table(tally: division.SiteCounts, changes: Sequence[str | None]) -> Any:
    """Return a row for each site: its examples of each class, or the number of its classes."""
    cells: list[list[object]]
    if len(tally.names) <= WIDEST:
        columns = [f"{tally.what} {tally.names[0]}", *tally.names[1:]]
        cells = [[count or None for count in counts] for counts in tally.counts]
    else:
        columns = [f"{tally.what} kinds", "the largest"]
        cells = [[sum(map(bool, counts)), f"{max(counts) / sum(counts):.0%}"] for counts in tally.counts]
    rows = [
        [site, *of_site, sum(counts), *([change] if change else [])]
        for site, (of_site, counts, change) in enumerate(zip(cells, tally.counts, changes, strict=True))
    ]
    numeric = ["site", *columns, "in all"]
    return table([*numeric, *(["images"] if any(changes) else [])], rows, right=numeric)
