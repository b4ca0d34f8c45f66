"""Weights that others have trained: folders and names on the hub, as transformers converts them while loading."""

import json
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from pydantic import JsonValue
from safetensors import SafetensorError, safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import WEIGHTS_FILE, Head
from tessera.shared.tensors.lazy import as_bytes, digest_of
from tessera.worker.model.block_map import block_table, numpy_view, tied_names
from tessera.worker.model.build import AUTO_CLASSES, instantiate, read_block, require_head, tensor_of
from tessera.worker.model.config import config_from
from tessera.worker.model.layouts import MappingFile

Config = dict[str, JsonValue]

# Keys of transformers' own bookkeeping, and of code that is never run here. None of them shapes a tensor.
BOOKKEEPING = {"transformers_version", "architectures", "auto_map", "name_or_path"}

SAFE_WEIGHTS = (WEIGHTS_FILE, "model.safetensors.index.json")
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")
ADAPTER_FILE = "adapter_config.json"


SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
LFS_POINTER = b"version https://git-lfs"
BYTE_ORDER_MARK = b"\xef\xbb\xbf"
WRAPPERS = {
    "_orig_mod.": "torch.compile, whose model is its `_orig_mod`",
    "module.": "DataParallel or DistributedDataParallel, whose model is its `module`",
    "base_model.model.": "PEFT, whose model `merge_and_unload` returns",
}
"""Beginnings of all tensors' names in weights of a model that something wraps, with the remedy."""
LAYER = re.compile(r"\.\d+\.")
ADAPTER = re.compile(r"\.lora_[A-Za-z_]+\.")


def weights_place(source: str) -> str:
    """Return the folder or name on the hub with the weights of a config. Raises ValueError if it has none."""
    path = Path(source)
    if not path.exists():
        return source
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or path.name == "config.json":
        if reason := _unusable(folder):
            raise ValueError(f"{folder} {reason}")
        if any((folder / name).is_file() for name in SAFE_WEIGHTS):
            return str(folder)
    raise ValueError(
        f"there are no weights beside {source}: name a folder with {WEIGHTS_FILE}, or start from random weights with "
        f"--random"
    )


def _unusable(folder: Path) -> str | None:
    """Return the reason for which no model can be read from a folder, with the remedy; None if one can."""
    if (folder / ADAPTER_FILE).is_file():
        return _of_adapter(folder)
    files = sorted(file for file in folder.iterdir() if file.suffix in (".safetensors", ".bin", ".gguf"))
    for file in files:
        with file.open("rb") as opened:
            if opened.read(len(LFS_POINTER)) == LFS_POINTER:
                return f"has a pointer of Git LFS in place of {file.name}: run `git lfs pull` where it was cloned"
    names = [file.name for file in files]
    if any((folder / name).is_file() for name in SAFE_WEIGHTS):
        return _wrapped(folder)
    if shards := [name for name in names if SHARD.fullmatch(name)]:
        return f"has {shards[0]} without {SAFE_WEIGHTS[1]}, the index of all shards: copy the index there too"
    if pickled := next((name for name in PICKLED_WEIGHTS if (folder / name).is_file()), None):
        return (
            f"has its weights in {pickled}, a pickle, which may run code: where you trust it, load it "
            f"and `save_pretrained` it again, which writes {WEIGHTS_FILE}"
        )
    if not names:
        return None
    if names[0].endswith(".gguf"):
        return f"has {names[0]}, weights in llama.cpp's format: name the folder that they were converted from"
    return f"has {names[0]}, and no {WEIGHTS_FILE}: if that is the whole model, rename it to {WEIGHTS_FILE}"


def _of_adapter(folder: Path) -> str:
    try:
        base = json.loads((folder / ADAPTER_FILE).read_bytes()).get("base_model_name_or_path")
    except (ValueError, AttributeError):
        base = None
    what = "beside a whole model" if any((folder / name).is_file() for name in SAFE_WEIGHTS) else "and no whole model"
    return (
        f"has an adapter ({ADAPTER_FILE}) {what}: name its base, {base}, without it; or merge it into the base by "
        "PEFT's `merge_and_unload`, and `save_pretrained` the result into another folder"
    )


def _wrapped(folder: Path) -> str | None:
    """Return a fault in the names of a folder's tensors or shards, with the remedy."""
    index = folder / SAFE_WEIGHTS[1]
    try:
        if (folder / WEIGHTS_FILE).is_file():
            with safe_open(folder / WEIGHTS_FILE, framework="numpy") as opened:
                places: dict[str, str] = dict.fromkeys(opened.keys(), WEIGHTS_FILE)
        else:
            places = dict(json.loads(index.read_bytes())["weight_map"])
    except (OSError, SafetensorError, ValueError, LookupError, TypeError):
        # Loading says what is wrong with it.
        return None
    if missing := sorted(name for name in set(places.values()) if not (folder / name).is_file()):
        return f"lacks {some(missing)}, of which {index.name} says that it is a part of the model: copy it there too"
    for prefix, what in WRAPPERS.items():
        if places and all(name.startswith(prefix) for name in places):
            return f"has tensors whose names all begin with {prefix!r}, of {what}: `save_pretrained` that one"
    return None


def require_unmarked(path: Path) -> None:
    """Raise ValueError for a JSON file that begins with a byte order mark, which transformers cannot read."""
    with path.open("rb") as opened:
        if opened.read(len(BYTE_ORDER_MARK)) == BYTE_ORDER_MARK:
            raise ValueError(f"{path} begins with a byte order mark: save it as UTF-8 without one (BOM)")


def read_object(path: Path) -> Config:
    """Return the content of a config file. Raises ValueError if it is missing or no JSON object."""
    try:
        require_unmarked(path)
        content = json.loads(path.read_bytes())
    except FileNotFoundError as fault:
        if (path.parent / ADAPTER_FILE).is_file():
            raise ValueError(f"{path.parent} {_of_adapter(path.parent)}") from fault
        raise ValueError(
            f"{path.parent} has no {path.name}: name a folder that `save_pretrained` has written"
        ) from fault
    except json.JSONDecodeError as fault:
        raise ValueError(f"{path} is not JSON: {fault}. Save the config again with `save_pretrained`") from fault
    if not isinstance(content, dict):
        raise ValueError(f"{path} is not a transformers config: it contains no JSON object")
    return content


def plain_config(config: Config) -> Config:
    """Return a config without transformers' own bookkeeping, at any depth."""

    def strip(value: JsonValue) -> JsonValue:
        if isinstance(value, list):
            return [strip(item) for item in value]
        if not isinstance(value, dict):
            return value
        kept = {key: item for key, item in value.items() if key not in BOOKKEEPING and not key.startswith("_")}
        # A label may have any name.
        return {key: item if key == "label2id" else strip(item) for key, item in kept.items()}

    return cast("Config", strip(config))


def load_pretrained(
    source: str, config: Config, head: Head, seed: int, mapping: MappingFile | None, revision: str | None = None
) -> tuple[PreTrainedModel, set[str]]:
    """Return the model of a folder or a name on the hub, as transformers converts it, and the names of its tensors
    that the weights lack, which are random from `seed`. Only safetensors are read, mapped from their files.

    Raises ValueError for weights that cannot be read or do not fit, and as `config_from` does.
    """
    built = config_from(config)
    require_head(built, head)
    with torch.random.fork_rng(devices=[]), quiet():
        torch.default_generator.manual_seed(seed)
        try:
            model, info = AUTO_CLASSES[head].from_pretrained(
                source,
                config=built,
                trust_remote_code=False,
                use_safetensors=True,
                ignore_mismatched_sizes=True,
                dtype=built.dtype or "auto",
                **({} if revision is None else {"revision": revision}),
                output_loading_info=True,
            )
        except Exception as error:  # each model class and each format of weights fails in its own way
            damaged = isinstance(error, SafetensorError)
            reason = "the file is damaged" if damaged else " ".join(str(error).split())[:300]
            raise ValueError(
                f"the weights of {source} cannot be read as a {built.model_type}: {reason}. Save the model again "
                "with `save_pretrained`"
            ) from error
    if lost := _left_out(info["unexpected_keys"], model):
        raise ValueError(f"{source}: {lost}")
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    # Transformers replaces missing weights by random ones. Only a head may be new.
    old = {block.tensor for block in block_table(model, mapping) if block.role not in {"head", "other"}}
    if shapes := sorted(
        f"{name} is {list(stored)}, not {list(made)}"
        for name, stored, made in info["mismatched_keys"]
        if name in old or "num_labels" not in config
    ):
        raise ValueError(
            f"{source}: the weights have other shapes than the config says: {some(shapes)}. Correct its config.json, "
            "such as vocab_size, the rows of the table of tokens"
        )
    if odd := sorted(absent & old):
        raise ValueError(f"the weights do not fit a {model.config.model_type}; they lack {some(odd)}")
    with torch.device("meta"):
        tied = tied_names(instantiate(config, head))
    if apart := sorted(tied.keys() - tied_names(model).keys()):
        raise ValueError(
            f"{source}: {apart[0]} and {tied[apart[0]][0]} are two tensors in the weights, and one by the config: "
            "set tie_word_embeddings to false in its config.json"
        )
    return cast("PreTrainedModel", model), absent


def _left_out(names: Iterable[str], model: PreTrainedModel) -> str | None:
    """Return the fault of a model without these tensors of its weights, with the remedy. Heads
    of other tasks may be left out."""
    if adapters := sorted(name for name in names if ADAPTER.search(name)):
        return (
            f"the weights have an adapter's tensors too ({some(adapters)}), which would be left out: merge them by "
            "PEFT's `merge_and_unload`, and `save_pretrained` the result"
        )
    known = {LAYER.sub(".*.", name) for name in model.state_dict()}
    if layers := sorted(name for name in names if LAYER.search(name) and LAYER.sub(".*.", name) in known):
        return f"the weights have more layers than its config.json says: {some(layers)}. Correct the number there"
    return None


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' tables of loaded tensors: one line here has the relevant part."""
    verbosity, bars = transformers_logging.get_verbosity(), transformers_logging.is_progress_bar_enabled()
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        transformers_logging.set_verbosity(verbosity)
        if bars:
            transformers_logging.enable_progress_bar()  # type: ignore[no-untyped-call]


def some(names: Sequence[str]) -> str:
    """Return the first names."""
    return ", ".join(names[:6]) + (", ..." if len(names) > 6 else "")


def block_data(tensors: Mapping[str, Tensor], block: Block) -> memoryview:
    """Return the block's bytes as they are stored and sent. A whole tensor on the CPU is not copied."""
    tensor = tensor_of(tensors, block).detach()
    if block.part or tensor.device.type != "cpu":
        return as_bytes(read_block(tensors, block))
    return as_bytes(numpy_view(tensor))


def digests_of(tensors: Mapping[str, Tensor], blocks: Sequence[Block]) -> dict[str, str]:
    """Return the digest of each block, by its name. Tensors that are mapped from files are read once."""
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda block: digest_of(block_data(tensors, block)), blocks)
        return {block.name: digest for block, digest in zip(blocks, found, strict=True)}
