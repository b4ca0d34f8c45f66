"""`tessera model`: model folders to start runs from, and their blocks."""

from __future__ import annotations

import json
import logging
import re
import shutil
from collections.abc import Callable, Collection, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, cast
from uuid import uuid4

import typer
from pydantic import ValidationError
from safetensors import SafetensorError, safe_open

from tessera.shared.cli.connection import client_of, connect
from tessera.shared.client.export import copy_rest, require_new_folder
from tessera.shared.lazy_import import DeferredModule
from tessera.shared.model.blocks import Block
from tessera.shared.model.dataset_schema import Problem as ProblemType
from tessera.shared.model.dataset_schema import class_count
from tessera.shared.model.spec import (
    BLOCKS_FILE,
    MAX_DEPTH,
    MAX_TOKENS,
    WEIGHTS_FILE,
    Float32Role,
    Head,
    Lora,
    Model,
    Prompts,
    stored_name,
)
from tessera.shared.near_names import absent
from tessera.shared.problems import Problem
from tessera.shared.terminal import output
from tessera.shared.terminal.output import AsJson
from tessera.shared.updates.model_folder import CONFIG_FILE, ModelFolder
from tessera.shared.validation_errors import in_one_line
from tessera.worker.cli.exits import BAD_SETTINGS, Errors, exits
from tessera.worker.cli.model_options import (
    OF_LABELS,
    VISION,
    Asks,
    Dtype,
    MappingOption,
    caption_ids,
    decoder_from,
    float32_of,
    label_keys,
    lora_from,
    padding_from,
    prompts_from,
    vision_start,
)
from tessera.worker.errors import DataError
from tessera.worker.model.layouts import MappingFile, read_mapping

if TYPE_CHECKING:
    import torch
    import transformers

    from tessera.worker.data.readers import image_processor, tokenizer
    from tessera.worker.model import block_map, build
    from tessera.worker.model import config as configs
    from tessera.worker.model import pretrained as pretrained_weights
    from tessera.worker.model import prompts as prompt_tokens
else:
    torch = DeferredModule("torch")
    transformers = DeferredModule("transformers")
    image_processor = DeferredModule("tessera.worker.data.readers.image_processor")
    tokenizer = DeferredModule("tessera.worker.data.readers.tokenizer")
    block_map = DeferredModule("tessera.worker.model.block_map")
    build = DeferredModule("tessera.worker.model.build")
    configs = DeferredModule("tessera.worker.model.config")
    pretrained_weights = DeferredModule("tessera.worker.model.pretrained")
    prompt_tokens = DeferredModule("tessera.worker.model.prompts")

ERRORS: Errors = {BAD_SETTINGS: (ValueError, OSError, ImportError, RuntimeError, SafetensorError, Problem)}


app = typer.Typer(
    no_args_is_help=True,
    add_completion=False,
    callback=connect,
    help="Make and inspect the models that runs start from.",
)

HUB_NAME = re.compile(r"[A-Za-z0-9][\w.-]*(/[A-Za-z0-9][\w.-]*)?")
PREPROCESSING = {
    "tokenizer": ("*token*.json", "*vocab*", "*.model"),
    "image processor": ("*processor_config.json",),
}
"""Preprocessing of a model's inputs: the names of each part's files."""


@app.command()
def init(
    out: Annotated[Path, typer.Argument(help="The folder to create.")],
    config: Annotated[str, typer.Option(help="A folder of transformers, a config.json, or a name on the hub.")],
    head: Annotated[Head, typer.Option(help="The model's task.")],
    seed: Annotated[int, typer.Option(help="The seed of random weights.")] = 0,
    pretrained: Annotated[
        bool,
        typer.Option("--pretrained/--random", help="Take the weights that lie beside the config, or random ones."),
    ] = True,
    labels: Annotated[
        str | None,
        typer.Option(
            help="The head's classes: their names in order, separated by commas as in CSV, or their number."
        ),
    ] = None,
    problem_type: Annotated[
        ProblemType | None,
        typer.Option(help="Several labels for each example, or a number; one class if unset."),
    ] = None,
    target_mean: Annotated[
        float | None, typer.Option(help="For regression: about the mean of the targets, which becomes 0 in training.")
    ] = None,
    target_deviation: Annotated[
        float | None, typer.Option(help="For regression: about their standard deviation, which becomes 1.")
    ] = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="The weights' dtype; the config's if unset. Blocks to be trained must be float32."),
    ] = None,
    mapping_file: MappingOption = None,
    vision_prompts: Annotated[
        int, typer.Option(min=0, max=MAX_TOKENS, help="Learnt tokens in the image tower of a dual encoder.")
    ] = 0,
    text_prompts: Annotated[
        int | None, typer.Option(min=0, max=MAX_TOKENS, help="Learnt tokens in the text tower, before each text.")
    ] = None,
    text_prompt_from: Annotated[
        str | None, typer.Option(help="A caption to start the text prompts from, such as 'a photo of a'.")
    ] = None,
    vision_prompt_from: Annotated[
        str | None,
        typer.Option(
            metavar="FILE|VERSION",
            help="Vision prompts to start from: of a safetensors file or a model folder, or RUN[@VERSION] at the "
            "coordinator.",
        ),
    ] = None,
    prompt_depth: Annotated[
        int,
        typer.Option(min=1, max=MAX_DEPTH, help="Layers of each tower, from the first, with prompts of their own."),
    ] = 1,
    prompt_fusion: Annotated[
        Asks | None,
        typer.Option(help="Add the attention that fuses prompts to the run; these prompts are its queries."),
    ] = None,
    fusion_heads: Annotated[
        int | None, typer.Option(min=1, help="The heads of that attention; 8 by default.")
    ] = None,
    lora_rank: Annotated[
        str | None,
        typer.Option(
            metavar="RANK[,RANK...]",
            help="Add low-rank adapters of this rank; several ranks, as in 4,8,16, let sites train different ones.",
        ),
    ] = None,
    lora_alpha: Annotated[
        float | None, typer.Option(help="The adapters' weight is alpha / rank; twice the rank by default.")
    ] = None,
    lora_roles: Annotated[
        str, typer.Option(help="The roles of the matrices to adapt, separated by commas.")
    ] = "query,value",
    dora: Annotated[
        bool, typer.Option("--dora", help="Let the adapters also learn the lengths of rows (DoRA).")
    ] = False,
    external_base: Annotated[
        bool,
        typer.Option(help="Leave out the pretrained weights, which the sites have: the run keeps digests alone."),
    ] = False,
    as_json: AsJson = False,
    # A call as a function, without a version of a run, has none.
    ctx: typer.Context = cast("typer.Context", None),  # noqa: B008
) -> None:
    """Create a model folder: transformers' own layout, and the table of the model's blocks.

    A tokenizer and an image processor beside the config are saved there too.
    """
    with exits(ERRORS):
        require_new_folder(out)
        mapping = read_mapping(mapping_file) if mapping_file else None
        keys = label_keys(problem_type, labels, target_mean, target_deviation)
        if problem_type and head not in ("text-classification", "image-classification"):
            raise ValueError(f"--problem-type: a model with the head {head} has one kind of labels; leave it out")
        settings = _settings(config, head, keys, dtype, hub=pretrained)
        caption = caption_ids(text_prompt_from, config)
        started = vision_start(vision_prompt_from, partial(client_of, ctx))
        counts, fusion = (vision_prompts, text_prompts), (prompt_fusion, fusion_heads)
        prompts = prompts_from(*counts, started, caption, *fusion, prompt_depth)
        lora = lora_from(lora_rank, lora_alpha, lora_roles, dora=dora)
        new: set[str] = set()
        if external_base and not pretrained:
            raise ValueError("--external-base is for pretrained weights, which the sites have; leave out --random")
        if pretrained:
            model, new = pretrained_weights.load_pretrained(
                pretrained_weights.weights_place(config), settings, head, seed, mapping
            )
            if new:
                output.note(f"new and random: {', '.join(sorted(new))}")
            with torch.random.fork_rng(devices=[]):
                torch.default_generator.manual_seed(seed)
                float32 = float32_of(model.dtype, head, prompts, lora)
                build.insert(model, prompts, lora, mapping, float32)
        else:
            float32 = float32_of(configs.config_from(settings).dtype, head, prompts, lora)
            model = build.instantiate(
                settings, head, seed=seed, prompts=prompts, lora=lora, float32=float32, mapping=mapping
            )
        if caption:
            text = model.get_parameter(f"{prompt_tokens.PROMPTS}.text")
            text.detach().copy_(prompt_tokens.caption_start(model, torch.tensor(caption)))
        if started is not None:
            vision = model.get_parameter(VISION)
            if vision.shape != started.shape:
                raise ValueError(
                    f"--vision-prompt-from: the prompts are {started.shape[1]} wide, and the image tower "
                    f"{vision.shape[1]}: take those of a model with a tower of this width"
                )
            vision.detach().copy_(started)
        document = _document(model, head, mapping, prompts, lora, float32)
        if external_base:
            document = _with_external_base(document, model, new)
        _write(out, model, document, partial(_save_preprocessing, config, hub=pretrained))
    weights = f"weights of {config}" if pretrained else f"random weights from seed {seed}"
    _print_created(out, document, weights, as_json=as_json, warns=problem_type is None)


def _settings(
    source: str, head: Head, of_labels: pretrained_weights.Config, dtype: Dtype | None, *, hub: bool
) -> pretrained_weights.Config:
    """Return a source's config with the changes of the head and the options. Raises ValueError."""
    settings = pretrained_weights.plain_config(_read_config(source))
    if of_labels:
        if not head.endswith("-classification"):
            raise ValueError(f"--labels: a model with the head {head} has no classes; leave it out")
        settings = {key: value for key, value in settings.items() if key not in OF_LABELS}
        settings |= of_labels
    settings |= padding_from(settings, head, partial(_padding_token, source, hub=hub))
    settings |= decoder_from(settings, head)
    return settings if dtype is None else settings | {"dtype": dtype}


def _with_external_base(document: Model, model: transformers.PreTrainedModel, new: Collection[str]) -> Model:
    """Return the document with the digests of the blocks that stay as the weights have them. Raises ValueError."""
    # A classifier is small and trains; the head of a language model is as large as its embeddings.
    adapted = (document.lora or document.prompts) and not document.head.endswith("-classification")
    trained = {"adapter", "prompt"} if adapted else {"adapter", "prompt", "head"}
    base = [b for b in document.blocks if b.role not in trained and stored_name(b.tensor) not in new]
    if not base or len(base) == len(document.blocks):
        raise ValueError(
            "--external-base needs blocks that train beside it: add --lora-rank or prompts, or choose a --head"
        )
    return Model.model_validate(
        document.model_copy(
            update={"external": pretrained_weights.digests_of(block_map.named_tensors(model), base)}
        ).model_dump()
    )


def _print_created(out: Path, document: Model, weights: str, *, as_json: bool, warns: bool = False) -> None:
    if warns and document.head.endswith("-classification") and class_count(document) is None:
        output.note(
            "warning: the model learns numbers rather than classes, by problem_type or the number of labels in its "
            "config: give --labels for classes"
        )
    blocks, nbytes = len(document.stored), document.stored_bytes
    external = {"external_blocks": len(document.base), "external_bytes": document.nbytes - nbytes}
    if as_json:
        made = {"path": str(out), "blocks": blocks, "bytes": nbytes, "weights": weights}
        output.print_json(made | (external if document.external else {}))
        return
    typer.echo(f"{out}: {blocks} blocks, {nbytes} bytes, {weights}")
    if document.external:
        typer.echo(
            f"external base: {len(document.base)} blocks, {document.nbytes - nbytes} bytes; each site adds it with "
            "`tessera worker cache add`"
        )


@app.command("merge")
def merge(
    source: Annotated[Path, typer.Argument(help="A model folder with adapters, such as an exported version.")],
    out: Annotated[Path, typer.Argument(help="The folder to create.")],
    mapping_file: MappingOption = None,
    as_json: AsJson = False,
) -> None:
    """Add the adapters of a model folder to its matrices: transformers alone can run the result."""
    with exits(ERRORS):
        require_new_folder(out)
        folder = ModelFolder.open(source)
        if not folder.model.lora or folder.model.prompts:
            raise ValueError(f"{source} has no adapters, or prompts too, which cannot become part of any matrix")
        mapping = read_mapping(mapping_file) if mapping_file else None
        model = build.load(folder, mapping)
        build.merge_adapters(model)
        float32 = tuple(role for role in folder.model.float32 if role == "head")
        document = _document(model, folder.model.head, mapping, float32=float32)
        _write(out, model, document, partial(copy_rest, source))
    _print_created(out, document, f"weights of {source}", as_json=as_json)


@app.command()
def blocks(
    source: Annotated[
        str, typer.Argument(help="A model folder, its blocks.json, a config.json or a folder that contains one.")
    ],
    pretrained: Annotated[
        bool, typer.Option(help="SOURCE is a name on the hub; only its config is fetched.")
    ] = False,
    head: Annotated[Head | None, typer.Option(help="The task of a config's model; features by default.")] = None,
    mapping_file: MappingOption = None,
    as_json: AsJson = False,
) -> None:
    """Show the parameters and bytes of each role in each layer. A config is laid out without weights."""
    with exits(ERRORS):
        path = Path(source)
        if not pretrained and not path.exists():
            raise ValueError(absent(path))
        if not pretrained and _holds_table(path):
            if head or mapping_file:
                raise ValueError(f"{path} has a table of blocks already: --head and --mapping are for configs")
            listed = _read_document(path).blocks
        else:
            mapping = read_mapping(mapping_file) if mapping_file else None
            with torch.device("meta"):
                listed = block_map.block_table(
                    build.instantiate(pretrained_weights.plain_config(_read_config(source)), head or "features"),
                    mapping,
                )
        rows = _summary(listed)
    if as_json:
        typer.echo(json.dumps(rows, indent=1))
        return
    counts = ("blocks", "parameters", "bytes")
    shown = [(row["layer"], row["role"], *(f"{row[key]:,}" for key in counts)) for row in rows]
    shown.append(("", "total", *(f"{sum(row[key] for row in rows):,}" for key in counts)))
    output.out().print(output.table(("layer", "role", *counts), shown, right=("layer", *counts)))


def _holds_table(path: Path) -> bool:
    """Return True if this is a table of blocks or a folder that contains one, rather than a config."""
    if path.is_dir():
        return (path / BLOCKS_FILE).exists() or not (path / "config.json").exists()
    if path.name == BLOCKS_FILE:
        return True
    return "blocks" in pretrained_weights.read_object(path)


def _read_config(source: str) -> pretrained_weights.Config:
    path = Path(source)
    if path.is_dir():
        return pretrained_weights.read_object(path / CONFIG_FILE)
    if path.exists():
        return pretrained_weights.read_object(path)
    missing = absent(path, "name a folder that `save_pretrained` has written")
    if path.suffix == ".json" or not HUB_NAME.fullmatch(source) or ("/" in source and path.parent.is_dir()):
        raise ValueError(missing)
    output.note(f"there is no file or folder {path}; asking the Hugging Face hub ...")
    # It logs each of several attempts at WARNING.
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        config, _ = transformers.PreTrainedConfig.get_config_dict(source)
    except (OSError, ValueError) as fault:
        raise ValueError(f"the hub has no model {source} or cannot be reached, and {missing}") from fault
    return cast("pretrained_weights.Config", config)


def _document(
    model: transformers.PreTrainedModel,
    head: Head,
    mapping: MappingFile | None,
    prompts: Prompts | None = None,
    lora: Lora | None = None,
    float32: tuple[Float32Role, ...] = (),
) -> Model:
    """Return the model's document. Raises unless the model can be rebuilt from the document alone."""
    config = pretrained_weights.plain_config(json.loads(model.config.to_json_string()))
    table = block_map.block_table(model, mapping)
    document = Model(config=config, head=head, prompts=prompts, lora=lora, float32=float32, blocks=table)
    build.check_model(document, mapping)
    return document


def _save_preprocessing(source: str, folder: Path, *, hub: bool) -> None:
    """Save the tokenizer and the image processor of a config's folder, or of its name on the hub, to a folder."""
    loaders = {"tokenizer": tokenizer.load_tokenizer, "image processor": image_processor.load_processor}
    for what, load_one in loaders.items():
        if (place := _preprocessing_place(what, source, hub=hub)) is None:
            continue
        try:
            with pretrained_weights.quiet():
                load_one(what, place).save_pretrained(folder)
        except DataError as fault:
            output.note(f"warning: the model folder is without this {fault}")


def _padding_token(source: str, *, hub: bool) -> int | None:
    """Return the token with which the tokenizer beside a config pads; None without a usable tokenizer."""
    if (place := _preprocessing_place("tokenizer", source, hub=hub)) is None:
        return None
    try:
        with pretrained_weights.quiet():
            padding: int | None = tokenizer.tokenizer_of("tokenizer", place).pad_token_id
    except DataError:
        return None
    return padding


def _preprocessing_place(what: str, source: str, *, hub: bool) -> str | None:
    """Return the folder, or the name on the hub, with this part of the preprocessing; None if it has none."""
    path = Path(source)
    beside = path.parent if path.name == CONFIG_FILE else path
    there = any(next(beside.glob(pattern), None) for pattern in PREPROCESSING[what]) if path.exists() else hub
    return str(beside) if there else None


def _write(out: Path, model: transformers.PreTrainedModel, document: Model, add_rest: Callable[[Path], None]) -> None:
    """Write the model folder under another name first, so that `out` is whole or missing."""
    folder = out.parent / f".{out.name}.{uuid4().hex}"
    folder.mkdir(parents=True)
    try:
        # One file, with the names of the tensors in memory rather than those of older checkpoints.
        stored = {block.tensor for block in document.stored}
        tensors = {
            stored_name(name): t.detach() for name, t in block_map.named_tensors(model).items() if name in stored
        }
        model.save_pretrained(folder, state_dict=tensors, save_original_format=False, max_shard_size=1 << 62)
        with safe_open(folder / WEIGHTS_FILE, framework="numpy") as file:
            odd = set(map(stored_name, stored)) ^ set(file.keys())
        if odd:
            raise ValueError(f"transformers saved other tensors than the model has: {', '.join(sorted(odd))}")
        table = folder / BLOCKS_FILE
        table.write_text(document.model_dump_json(indent=1) + "\n", encoding="utf-8")
        # safetensors lets only the owner read; a coordinator may run as another user.
        (folder / WEIGHTS_FILE).chmod(table.stat().st_mode)
        add_rest(folder)
        folder.rename(out)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _read_document(path: Path) -> Model:
    file = path / BLOCKS_FILE if path.is_dir() else path
    try:
        return Model.model_validate_json(file.read_bytes())
    except ValidationError as error:
        raise ValueError(f"{file} is not a table of blocks: {in_one_line(error, 'file', Model)}") from error


def _summary(blocks: Sequence[Block]) -> list[dict[str, Any]]:
    """Return a row for each layer and role, beginning with the blocks outside layers."""
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
