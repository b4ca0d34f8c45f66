"""`tessera model`: makes the folder that a run starts from, and shows the blocks of one."""

import json
import shutil
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, Literal, cast
from uuid import uuid4

import torch
import typer
from pydantic import JsonValue, ValidationError
from rich.console import Console
from rich.table import Table
from safetensors import SafetensorError, safe_open
from transformers import AutoTokenizer, PreTrainedConfig, PreTrainedModel

from tessera.shared.cli.render.output import AsJson, print_json
from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import (
    BLOCKS_FILE,
    MAX_TOKENS,
    WEIGHTS_FILE,
    Fusion,
    Head,
    Lora,
    Model,
    Prompts,
    stored_name,
)
from tessera.shared.problems import Problem, message_of
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import AUTO_CLASSES, check_model, insert, instantiate, load, merge_adapters
from tessera.worker.model.config import config_from
from tessera.worker.model.layouts import MappingFile, read_mapping
from tessera.worker.model.prompts import caption_start, prompts_of

Asks = Literal["local", "global"]

VisionPrompts = Annotated[
    int,
    typer.Option(min=0, max=MAX_TOKENS, help="How many learnt tokens go into the image tower (CLIP and its kin)."),
]
TextPrompts = Annotated[
    int | None,
    typer.Option(
        min=0, max=MAX_TOKENS, help="How many learnt tokens go into the text tower, before each class name."
    ),
]
TextPromptFrom = Annotated[
    str | None, typer.Option(help="A caption whose embeddings the text prompts start from, such as 'a photo of a'.")
]
PromptFusion = Annotated[
    Asks | None,
    typer.Option(help="Also make the attention that fuses prompts a part of the run: whose prompts ask in it."),
]
FusionHeads = Annotated[int | None, typer.Option(min=1, help="The heads of that attention; 8 if not given.")]
LoraRank = Annotated[int | None, typer.Option(min=1, help="Put low-rank adapters of this rank into the model.")]
LoraAlpha = Annotated[
    float | None, typer.Option(help="How much adapters count: alpha / rank. Twice the rank if not given.")
]
LoraRoles = Annotated[str, typer.Option(help="The roles of the matrices to adapt, divided by commas.")]


def caption_ids(caption: str | None, source: str) -> list[int] | None:
    """Return the caption's tokens, by the tokenizer of the model's folder or name, without start and end."""
    if caption is None:
        return None
    ids = AutoTokenizer.from_pretrained(source, trust_remote_code=False)(caption, add_special_tokens=False)[
        "input_ids"
    ]
    if not ids:
        raise ValueError("the caption for the text prompts has no tokens")
    return list(ids)


def prompts_from(
    vision: int, text: int | None, caption: list[int] | None, asks: Asks | None, heads: int | None
) -> Prompts | None:
    """Raise ValueError for a caption of another length than the text prompts, a fusion of no prompts, or heads of no
    fusion."""
    if heads is not None and not asks:
        raise ValueError("--fusion-heads needs --prompt-fusion: a fusion that stays at its site has the run's heads")
    if caption is not None and text is not None and text != len(caption):
        raise ValueError(f"the caption has {len(caption)} tokens: leave --text-prompts out, or say {len(caption)}")
    wanted = text or 0 if caption is None else len(caption)
    if not vision and not wanted:
        if asks:
            raise ValueError("--prompt-fusion needs --vision-prompts or --text-prompts")
        return None
    return Prompts(vision=vision, text=wanted, fusion=Fusion(asks=asks, heads=heads or 8) if asks else None)


def lora_from(rank: int | None, alpha: float | None, roles: str) -> Lora | None:
    """Raise ValueError for an alpha without a rank, or a role that there is none of."""
    if rank is None:
        if alpha is not None:
            raise ValueError("--lora-alpha needs --lora-rank")
        return None
    names = [name.strip() for name in roles.split(",") if name.strip()]
    return Lora.model_validate({"rank": rank, "alpha": alpha if alpha is not None else 2 * rank, "roles": names})


def start_from_caption(model: PreTrainedModel, ids: list[int]) -> None:
    """Give the text prompts the caption's embeddings."""
    tokens = prompts_of(model)
    own = tokens.own("text") if tokens else None
    if own is not None:
        own.detach().copy_(caption_start(model, torch.tensor(ids)))


app = typer.Typer(
    no_args_is_help=True, add_completion=False, help="Make and inspect the models that runs start from."
)

Config = dict[str, JsonValue]

MappingOption = Annotated[
    Path | None, typer.Option("--mapping", help="A TOML file that describes attention which is not known here.")
]

# What transformers notes down for itself, and what names code that we never run: nothing here shapes a tensor.
BOOKKEEPING = {"transformers_version", "architectures", "auto_map", "name_or_path"}


@contextmanager
def _bad_input_in_one_line() -> Iterator[None]:
    try:
        yield
    except (ValueError, OSError, ImportError, RuntimeError, SafetensorError, Problem) as error:
        typer.echo(f"error: {' '.join(str(error).split())}", err=True)
        raise typer.Exit(2) from error


@app.command()
def init(
    out: Annotated[Path, typer.Argument(help="The folder to make. It may not exist yet.")],
    config: Annotated[str, typer.Option(help="A config.json, a folder that has one, or a name on the hub.")],
    head: Annotated[Head, typer.Option(help="What the model is for.")],
    seed: Annotated[int, typer.Option(help="Decides the weights that are random.")] = 0,
    pretrained: Annotated[bool, typer.Option(help="Take the weights from the folder or the hub too.")] = False,
    labels: Annotated[int | None, typer.Option(min=1, help="How many classes the head tells apart.")] = None,
    mapping_file: MappingOption = None,
    vision_prompts: VisionPrompts = 0,
    text_prompts: TextPrompts = None,
    text_prompt_from: TextPromptFrom = None,
    prompt_fusion: PromptFusion = None,
    fusion_heads: FusionHeads = None,
    lora_rank: LoraRank = None,
    lora_alpha: LoraAlpha = None,
    lora_roles: LoraRoles = "query,value",
    as_json: AsJson = False,
) -> None:
    """Make a model folder: transformers' own layout, and the table of the model's blocks."""
    with _bad_input_in_one_line():
        if out.exists():
            raise ValueError(f"{out} exists already: remove it or choose another name")
        mapping = read_mapping(mapping_file) if mapping_file else None
        settings = _plain(_read_config(config))
        if labels is not None:
            settings = {key: value for key, value in settings.items() if key not in {"id2label", "label2id"}}
            settings["num_labels"] = labels
        caption = caption_ids(text_prompt_from, config)
        prompts = prompts_from(vision_prompts, text_prompts, caption, prompt_fusion, fusion_heads)
        lora = lora_from(lora_rank, lora_alpha, lora_roles)
        if pretrained:
            model = _pretrained(config, settings, head, seed, mapping)
            with torch.random.fork_rng(devices=[]):
                torch.manual_seed(seed)
                insert(model, prompts, lora, mapping)
        else:
            model = instantiate(settings, head, seed=seed, prompts=prompts, lora=lora, mapping=mapping)
        if caption:
            start_from_caption(model, caption)
        document = _document(model, head, mapping, prompts, lora)
        _write(out, model, document)
    _tell_made(out, document, as_json=as_json)


def _tell_made(out: Path, document: Model, *, as_json: bool) -> None:
    if as_json:
        print_json({"path": str(out), "blocks": len(document.blocks), "bytes": document.nbytes})
    else:
        typer.echo(f"{out}: {len(document.blocks)} blocks, {document.nbytes} bytes")


@app.command("merge")
def merge(
    source: Annotated[Path, typer.Argument(help="A model folder with adapters, such as an exported version.")],
    out: Annotated[Path, typer.Argument(help="The folder to make. It may not exist yet.")],
    mapping_file: MappingOption = None,
    as_json: AsJson = False,
) -> None:
    """Add the adapters of a model folder to its matrices: what comes out needs transformers alone."""
    with _bad_input_in_one_line():
        if out.exists():
            raise ValueError(f"{out} exists already: remove it or choose another name")
        folder = ModelFolder.open(source)
        if not folder.model.lora or folder.model.prompts:
            raise ValueError(f"{source} has no adapters, or prompts too, which cannot become part of any matrix")
        mapping = read_mapping(mapping_file) if mapping_file else None
        model = load(folder, mapping)
        merge_adapters(model)
        document = _document(model, folder.model.head, mapping)
        _write(out, model, document)
    _tell_made(out, document, as_json=as_json)


@app.command()
def blocks(
    source: Annotated[
        str, typer.Argument(help="A model folder, its blocks.json, a config.json or a folder with one.")
    ],
    pretrained: Annotated[
        bool, typer.Option(help="SOURCE is a name on the hub; only its config is fetched.")
    ] = False,
    head: Annotated[Head | None, typer.Option(help="What a config's model is for, if not just for features.")] = None,
    mapping_file: MappingOption = None,
    as_json: AsJson = False,
) -> None:
    """Show how many parameters and bytes each layer has in each role. A config is laid out without any weights."""
    with _bad_input_in_one_line():
        path = Path(source)
        if not pretrained and _holds_table(path):
            if head or mapping_file:
                raise ValueError(f"{path} has a table of blocks already: --head and --mapping are for configs")
            table_of = _read_document(path).blocks
        else:
            mapping = read_mapping(mapping_file) if mapping_file else None
            table_of = _laid_out(_plain(_read_config(source)), head or "features", mapping)
        rows = _summary(table_of)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    table = Table("layer", "role", "blocks", "parameters", "bytes")
    for column in (0, 2, 3, 4):
        table.columns[column].justify = "right"
    for row in rows:
        layer = "-" if row["layer"] is None else str(row["layer"])
        table.add_row(layer, str(row["role"]), *(f"{row[key]:,}" for key in ("blocks", "parameters", "bytes")))
    totals = (sum(cast("int", row[key]) for row in rows) for key in ("blocks", "parameters", "bytes"))
    table.add_section()
    table.add_row("", "total", *(f"{total:,}" for total in totals))
    Console().print(table)


def _holds_table(path: Path) -> bool:
    """Return whether this is a table of blocks, or a folder that has one, rather than a config."""
    if path.is_dir():
        return (path / BLOCKS_FILE).exists() or not (path / "config.json").exists()
    if path.name == BLOCKS_FILE:
        return True
    content = json.loads(path.read_bytes())
    return isinstance(content, dict) and "blocks" in content


def _laid_out(config: Config, head: Head, mapping: MappingFile | None) -> tuple[Block, ...]:
    """Return the blocks of the config's model, which takes no memory: nothing of it is allocated."""
    with torch.device("meta"):
        return block_table(instantiate(config, head), mapping)


def _read_config(source: str) -> Config:
    path = Path(source)
    if path.is_dir():
        path /= "config.json"
    if path.suffix == ".json" or path.is_file():
        config = json.loads(path.read_bytes())
    else:
        config, _ = PreTrainedConfig.get_config_dict(source)
    if not isinstance(config, dict):
        raise ValueError(f"{path} is not a transformers config: it holds no JSON object")
    return config


def _plain(config: Config) -> Config:
    """Return the config without what transformers notes down for itself, at any depth."""

    def strip(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [strip(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {key: item for key, item in value.items() if key not in BOOKKEEPING and not key.startswith("_")}
        # A label may be called anything.
        return {key: item if key == "label2id" else strip(item) for key, item in kept.items()}

    return cast("Config", strip(config))


def _pretrained(source: str, config: Config, head: Head, seed: int, mapping: MappingFile | None) -> PreTrainedModel:
    if not Path(source).is_dir() and Path(source).suffix == ".json":
        raise ValueError(f"--pretrained takes weights from a folder or the hub, and {source} is neither")
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        loaded: tuple[PreTrainedModel, dict[str, Any]] = AUTO_CLASSES[head].from_pretrained(
            source,
            config=config_from(config),
            trust_remote_code=False,
            use_safetensors=True,
            ignore_mismatched_sizes="num_labels" in config,
            output_loading_info=True,
        )
    model, info = loaded
    _check_loaded(model, {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}, mapping)
    return model


def _check_loaded(model: PreTrainedModel, absent: set[str], mapping: MappingFile | None) -> None:
    """Refuse weights of another architecture, which transformers would quietly replace by random ones."""
    may_be_new = {"head", "other"}
    table = block_table(model, mapping)
    if odd := sorted({b.tensor for b in table if b.tensor in absent and b.role not in may_be_new}):
        shown = ", ".join(odd[:6]) + (", ..." if len(odd) > 6 else "")
        raise ValueError(f"the weights do not fit a {model.config.model_type}; they lack {shown}")
    if absent:
        typer.echo(f"new and random: {', '.join(sorted(absent))}")


def _document(
    model: PreTrainedModel,
    head: Head,
    mapping: MappingFile | None,
    prompts: Prompts | None = None,
    lora: Lora | None = None,
) -> Model:
    """Return the model as a run names it, proven to be rebuilt from its document alone."""
    config = _plain(json.loads(model.config.to_json_string()))
    document = Model(config=config, head=head, prompts=prompts, lora=lora, blocks=block_table(model, mapping))
    check_model(document, mapping)
    return document


def _write(out: Path, model: PreTrainedModel, document: Model) -> None:
    """Make the folder under another name first, so that `out` is whole or not there."""
    folder = out.parent / f".{out.name}.{uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        # One file, with the names that the model has in memory rather than those of older checkpoints.
        tensors = {stored_name(name): tensor.detach() for name, tensor in named_tensors(model).items()}
        model.save_pretrained(folder, state_dict=tensors, save_original_format=False, max_shard_size=1 << 62)
        _check_names(folder / WEIGHTS_FILE, document)
        table = folder / BLOCKS_FILE
        table.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
        # safetensors lets only the owner read; a coordinator may run as another user.
        (folder / WEIGHTS_FILE).chmod(table.stat().st_mode)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _check_names(weights: Path, document: Model) -> None:
    with safe_open(weights, framework="numpy") as file:
        odd = {stored_name(block.tensor) for block in document.blocks} ^ set(file.keys())
    if odd:
        raise ValueError(f"transformers saved other tensors than the model has: {', '.join(sorted(odd))}")


def _read_document(path: Path) -> Model:
    file = path / BLOCKS_FILE if path.is_dir() else path
    try:
        return Model.model_validate_json(file.read_bytes())
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(str(step) for step in first["loc"])
        raise ValueError(f"{file} is not a table of blocks: {where} {message_of(first)}") from error


def _summary(blocks: Sequence[Block]) -> list[dict[str, str | int | None]]:
    """Return a row for each layer and role, what is outside the layers first."""
    groups: dict[tuple[int, str], list[Block]] = {}
    for block in blocks:
        groups.setdefault((-1 if block.layer is None else block.layer, block.role), []).append(block)
    return [
        {
            "layer": None if layer < 0 else layer,
            "role": role,
            "blocks": len(group),
            "parameters": sum(block.numel for block in group),
            "bytes": sum(block.nbytes for block in group),
        }
        for (layer, role), group in sorted(groups.items())
    ]
