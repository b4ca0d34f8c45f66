"""`tessera data`: shows a site's data sets, and how one of them divides among sites."""

import importlib
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any

import typer
from pydantic import TypeAdapter, ValidationError

from tessera.shared.cli.render.output import AsJson, complain, note, out, print_json, table
from tessera.shared.problems import message_of
from tessera.worker.data.partition.division import ClassCounts, class_counts, divide, key_of_seed
from tessera.worker.data.partition.schemes import Partition, Scheme
from tessera.worker.data.registry import Dataset, load
from tessera.worker.inventory import held_out_key, load_source, named
from tessera.worker.settings import DataSettings, DataSource, SettingsError, read_data_settings, read_settings

WIDEST = 16
"""Classes that a table has a column for each of; with more it says how many a site has."""

PARTITION: TypeAdapter[Scheme] = TypeAdapter(Partition)

app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Show a site's data sets, and how one divides among sites."
)

ConfigFile = Annotated[
    Path, typer.Argument(help="A worker's settings, or a TOML file with nothing but [datasets.NAME] tables.")
]


@contextmanager
def _bad_settings_in_one_line() -> Iterator[None]:
    try:
        yield
    except (SettingsError, OSError) as fault:
        complain(str(fault))
        raise typer.Exit(2) from fault


@app.command()
def show(
    config: ConfigFile,
    dataset: Annotated[str | None, typer.Option(help="Only this one.")] = None,
    as_json: AsJson = False,
) -> None:
    """Load each data set as a worker would, and show what is in it.

    Exit code 2: the settings, or what they name, cannot be used.
    """
    with _bad_settings_in_one_line():
        settings = read_data_settings(config)
        wanted = settings.datasets if dataset is None else {dataset: _source(settings, dataset)}
        key = _key(config)
        shown = [_described(name, source, key) for name, source in wanted.items()]
    if as_json:
        print_json({"datasets": shown})
        return
    rows = [[", ".join(cell) if isinstance(cell, list) else cell for cell in row.values()] for row in shown]
    out().print(table(list(shown[0]), rows, right=("examples", "held out", "classes", "domains")))


def _key(config: Path) -> bytes:
    """Return the worker's own; of a file that is no worker's, one that holds out about as many."""
    try:
        return held_out_key(read_settings(config), make=False)
    except SettingsError:
        return key_of_seed(0)


def _described(name: str, source: DataSource, key: bytes) -> dict[str, Any]:
    with named(name):
        loaded = load_source(source, key)
    part = source.part and f"{source.part.index} of {source.part.count}, {source.part.scheme}"
    return {
        "name": name,
        "kind": source.kind,
        "part": part,
        "examples": loaded.examples,
        "held out": loaded.held_out and loaded.held_out.examples,
        "classes": None if loaded.classes is None else len(set(loaded.classes.tolist())),
        "domains": None if loaded.domains is None else len(set(loaded.domains.tolist())),
        "tensors of each": _shapes(loaded, common=False),
        "common to all": _shapes(loaded, common=True),
    }


def _shapes(loaded: Dataset, *, common: bool) -> list[str]:
    tensors = loaded.common if common else loaded.tensors
    shapes = {name: list(tensor.shape if common else tensor.shape[1:]) for name, tensor in sorted(tensors.items())}
    return [
        f"{name} {str(tensors[name].dtype).removeprefix('torch.')}{shape or ''}" for name, shape in shapes.items()
    ]


@app.command()
def split(
    config: ConfigFile,
    dataset: Annotated[str | None, typer.Option(help="Which data set; needless if there is one.")] = None,
    sites: Annotated[int | None, typer.Option(help="Among how many sites.")] = None,
    scheme: Annotated[
        str | None, typer.Option(help="iid, dirichlet, shards, quantity, domain or shift; the settings' if left out.")
    ] = None,
    alpha: Annotated[float | None, typer.Option(help="How alike the sites are; the smaller, the less.")] = None,
    label_alpha: Annotated[float | None, typer.Option(help="The same for labels within a domain.")] = None,
    each: Annotated[int | None, typer.Option(help="Shards for each site.")] = None,
    seed: Annotated[int | None, typer.Option(help="Decides all that is drawn.")] = None,
    picture: Annotated[Path | None, typer.Option("--out", help="Draw it, as .svg, .png or .pdf.")] = None,
    as_json: AsJson = False,
) -> None:
    """Divide a data set among sites and count what each would have; nothing is written but the picture.

    What is not given here is as the data set's `part` says. Exit code 2: the settings, what they name, or the
    division cannot be used.
    """
    given = {"scheme": scheme, "count": sites, "alpha": alpha, "label_alpha": label_alpha, "each": each, "seed": seed}
    with _bad_settings_in_one_line():
        draw = _drawing() if picture else None
        settings = read_data_settings(config)
        name = _only(settings) if dataset is None else dataset
        source = _source(settings, name)
        partition = _partition(source, {key: value for key, value in given.items() if value is not None})
        with named(name):
            parts = divide(load(source.kind, source.options), partition)
        counted = class_counts(parts, _names(source))
        told = [partition.describe(index) for index in range(partition.count)]
        if draw and picture:
            try:
                draw(counted, f"{name}: {_sentence(partition)}", picture)
            except ValueError as fault:
                raise SettingsError(f"--out: {fault}") from fault
    if as_json:
        print_json(_document(name, partition, parts, counted))
        return
    for tally in counted:
        out().print(_table(tally, told))
    if picture:
        note(f"drawn in {picture}")


def _only(settings: DataSettings) -> str:
    if len(settings.datasets) > 1:
        raise SettingsError(f"there are several data sets: say --dataset {' or '.join(settings.datasets)}")
    return next(iter(settings.datasets))


def _source(settings: DataSettings, name: str) -> DataSource:
    if name not in settings.datasets:
        raise SettingsError(f"there is no data set {name!r}, but {', '.join(settings.datasets)}")
    return settings.datasets[name]


def _partition(source: DataSource, given: dict[str, object]) -> Scheme:
    """Return the data set's own partition, changed by what is given; a new one if that is of another scheme."""
    own = source.part.model_dump(exclude_unset=True, exclude={"index"}) if source.part else {}
    scheme = given.get("scheme", own.get("scheme"))
    if scheme is None:
        raise SettingsError("the data set is not divided by its settings: say --scheme and --sites")
    if scheme != own.get("scheme"):
        own = {"count": own["count"]} if own else {}
    try:
        return PARTITION.validate_python({**own, **given})
    except ValidationError as fault:
        first = fault.errors(include_url=False, include_input=False)[0]
        key = str(first["loc"][-1]) if first["loc"] else "scheme"
        option = "sites" if key == "count" else key.replace("_", "-")
        told = f"scheme {scheme} has no such setting" if first["type"] == "extra_forbidden" else message_of(first)
        raise SettingsError(f"--{option}: {told}") from None


def _drawing() -> Any:
    try:
        return importlib.import_module("tessera.worker.cli.split_plot").draw
    except ModuleNotFoundError as fault:
        cure = "in a checkout of Tessera run: pip install '.[demo]'"
        raise SettingsError(f"--out: {fault.name} is not installed: {cure}, or pip install {fault.name}") from fault


def _names(source: DataSource) -> Sequence[str] | None:
    names = source.options.get("labels")
    return [str(name) for name in names] if isinstance(names, list) else None


def _sentence(partition: Scheme) -> str:
    said = partition.model_dump(exclude={"scheme", "count", "index", "distortions"}, exclude_none=True)
    return f"{partition.scheme} among {partition.count} sites, " + ", ".join(f"{k} {v:g}" for k, v in said.items())


def _table(tally: ClassCounts, told: Sequence[str | None]) -> Any:
    """Return a row for each site: its examples of each class, or of how many classes they are."""
    cells: list[list[object]]
    if len(tally.names) <= WIDEST:
        columns = [f"{tally.what} {tally.names[0]}", *tally.names[1:]]
        cells = [[count or None for count in counts] for counts in tally.counts]
    else:
        columns = [f"{tally.what} kinds", "the largest"]
        cells = [[sum(map(bool, counts)), f"{max(counts) / sum(counts):.0%}"] for counts in tally.counts]
    rows = [
        [site, *of_site, sum(counts), *([how] if how else [])]
        for site, (of_site, counts, how) in enumerate(zip(cells, tally.counts, told, strict=True))
    ]
    numeric = ["site", *columns, "in all"]
    return table([*numeric, *(["images"] if any(told) else [])], rows, right=numeric)


def _document(
    name: str, partition: Scheme, parts: Sequence[Dataset], counted: Sequence[ClassCounts]
) -> dict[str, Any]:
    sites = [
        {
            "site": site,
            "examples": part.examples,
            **{tally.what: dict(zip(tally.names, tally.counts[site], strict=True)) for tally in counted},
        }
        for site, part in enumerate(parts)
    ]
    return {"dataset": name, "partition": partition.model_dump(exclude={"index"}), "sites": sites}
