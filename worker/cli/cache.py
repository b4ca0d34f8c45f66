"""`tessera worker cache`: the external bases that runs at this site may use."""

import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from safetensors import SafetensorError

from tessera.shared import units
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.model.spec import Head
from tessera.shared.near_names import absent
from tessera.shared.problems import Problem
from tessera.shared.tensors.lazy import digest_of
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson
from tessera.shared.updates.base_folder import BaseFolder
from tessera.shared.updates.model_folder import CONFIG_FILE, head_of
from tessera.worker.cli.exits import BAD_SETTINGS, ConfigFile, Errors, exits
from tessera.worker.cli.model_options import Dtype, MappingOption
from tessera.worker.model.layouts import MappingFile, read_mapping
from tessera.worker.settings import read_settings
from tessera.worker.state.base_cache import BaseCache, BaseRecord, Place

if TYPE_CHECKING:
    from tessera.worker.model import block_map, pretrained, snapshot
    from tessera.worker.state import base_sources
else:
    block_map = DeferredModule("tessera.worker.model.block_map")
    pretrained = DeferredModule("tessera.worker.model.pretrained")
    snapshot = DeferredModule("tessera.worker.model.snapshot")
    base_sources = DeferredModule("tessera.worker.state.base_sources")

ERRORS: Errors = {BAD_SETTINGS: (ValueError, OSError, SafetensorError, Problem)}

app = typer.Typer(no_args_is_help=True, help="Add, list and remove the bases that lie at this site (external bases).")

Source = Annotated[
    str, typer.Argument(help="A folder with safetensors files, or a name on the hub at a commit: NAME@COMMIT.")
]


@app.command()
def add(
    source: Source,
    config: ConfigFile,
    head: Annotated[Head | None, typer.Option(help="The model's task; by default that of its config.")] = None,
    dtype: Annotated[
        Dtype | None, typer.Option(help="The dtype of the run's base; by default that of the config.")
    ] = None,
    mapping_file: MappingOption = None,
    copy: Annotated[
        bool, typer.Option(help="Copy every block, for other workers to fetch: a mirror is this folder over HTTP.")
    ] = False,
    as_json: AsJson = False,
) -> None:
    """Verify a local snapshot block by block, so that runs with this external base need no download.

    Blocks that stand in its files as they are, are not copied: keep the files.
    """
    with exits(ERRORS):
        cache = _cache(config)
        folder, name = _folder_of(source)
        mapping = read_mapping(mapping_file) if mapping_file else None
        record = _added(cache, name, folder, head or head_of(folder), dtype, mapping, copy=copy)
    if as_json:
        output.print_json(_row(cache, record))
    else:
        row = _row(cache, record)
        copied = units.size(row["copied_bytes"])
        typer.echo(f"{name}: {row['blocks']} different blocks, {units.size(record.nbytes)}, of them {copied} copied")


@app.command("list")
def list_(config: ConfigFile, as_json: AsJson = False) -> None:
    """Show the bases that were added, and whether their files are still as they were."""
    with exits(ERRORS):
        cache = _cache(config)
        rows = [_row(cache, record) for record in cache.records()]
    if as_json:
        output.print_json({"bases": rows})
        return
    shown = [
        (row["source"], row["blocks"], units.size(row["bytes"]), units.size(row["copied_bytes"]), row["changed"])
        for row in rows
    ]
    columns = ("source", "different blocks", "size", "copied", "changed files")
    output.out().print(output.table(columns, shown, right=columns[1:4]))


@app.command()
def remove(
    source: Annotated[str, typer.Argument(help="The base, as `list` shows it.")],
    config: ConfigFile,
    as_json: AsJson = False,
) -> None:
    """Forget a base, and delete what was copied of it. The files of its snapshot stay."""
    with exits(ERRORS):
        cache = _cache(config)
        record = cache.remove(source) or cache.remove(os.path.realpath(source))
        if record is None:
            known = ", ".join(record.source for record in cache.records()) or "none"
            raise ValueError(f"no base {source} was added; these were: {known}")
    if as_json:
        output.print_json({"source": record.source})
    else:
        typer.echo(f"{record.source}: removed")


def _cache(config: Path) -> BaseCache:
    return BaseCache(read_settings(config).state_dir)


def _folder_of(source: str) -> tuple[Path, str]:
    """Return the folder of a base, fetched if it is a name on the hub, and the name to record."""
    path = Path(source)
    if path.is_dir():
        return path.resolve(), str(path.resolve())
    if pinned := base_sources.PINNED.fullmatch(source):
        return base_sources.snapshot_folder(pinned), source
    if "@" in source or not path.exists():
        raise ValueError(
            absent(path, "name a folder, or a name on the hub with its commit of 40 hexadecimal digits: NAME@COMMIT")
        )
    raise ValueError(f"{source} is a file: name the folder that it lies in")


def _added(
    cache: BaseCache,
    name: str,
    folder: Path,
    head: Head,
    dtype: Dtype | None,
    mapping: MappingFile | None,
    *,
    copy: bool,
) -> BaseRecord:
    settings = pretrained.plain_config(pretrained.read_object(folder / CONFIG_FILE)) | (
        {"dtype": dtype} if dtype else {}
    )
    weights = snapshot.Snapshot.open(BaseFolder.open(folder), settings, head)
    blocks = block_map.block_table(weights.model, mapping)
    places: dict[str, Place] = {}
    found = weights.in_place(blocks)
    there = {each.block.name for each in found}
    with ThreadPoolExecutor() as pool:
        for each, digest in zip(found, pool.map(lambda each: digest_of(each.data()), found), strict=True):
            span = None if copy else each.span
            span = span or cache.keep(digest, [each.data()], each.block.nbytes)
            places[digest] = Place.of(each.block.name, span, () if span == each.span else [each.raw.span.path])
    for made in weights.converted(blocks):
        digest = digest_of(made.data)
        span = cache.keep(digest, [made.data], made.block.nbytes)
        places[digest] = Place.of(made.block.name, span, made.sources)
        there.add(made.block.name)
    # Only a head may be new, and what transformers computes.
    if lacking := sorted(b.name for b in blocks if b.name not in there and b.role not in {"head", "other"}):
        raise ValueError(
            f"the weights do not fit a {weights.model.config.model_type}; they lack {pretrained.some(lacking)}"
        )
    return cache.add(name, places)


def _row(cache: BaseCache, record: BaseRecord) -> dict[str, Any]:
    copied = sum(place.nbytes for place in record.places.values() if Path(place.file).parent == cache.blobs)
    changed = cache.changed(record)
    return {
        "source": record.source,
        "added_at": record.added_at,
        "blocks": len(record.places),
        "bytes": record.nbytes,
        "copied_bytes": copied,
        "changed": ", ".join(sorted(Path(name).name for name in changed)) or None,
    }
