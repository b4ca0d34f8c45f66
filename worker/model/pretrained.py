"""Weights that others have trained: folders and names on the hub, as transformers converts them while loading."""

import json
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import cast

import torch
from pydantic import JsonValue
from safetensors import SafetensorError
from torch import Tensor
from transformers import PreTrainedModel
from transformers.utils import logging as transformers_logging

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import WEIGHTS_FILE, Head
from tessera.shared.tensors.lazy import as_bytes, digest_of
from tessera.worker.model.block_map import block_table, numpy_view
from tessera.worker.model.build import AUTO_CLASSES, read_block, require_head, tensor_of
from tessera.worker.model.config import config_from
from tessera.worker.model.layouts import MappingFile

Config = dict[str, JsonValue]

# Keys of transformers' own bookkeeping, and of code that is never run here. None of them shapes a tensor.
BOOKKEEPING = {"transformers_version", "architectures", "auto_map", "name_or_path"}

SAFE_WEIGHTS = (WEIGHTS_FILE, "model.safetensors.index.json")
PICKLED_WEIGHTS = ("pytorch_model.bin", "pytorch_model.bin.index.json")


def weights_place(source: str) -> str:
    """Return the folder or name on the hub with the weights of a config. Raises ValueError if it has none."""
    path = Path(source)
    if not path.exists():
        return source
    folder = path if path.is_dir() else path.parent
    if path.is_dir() or path.name == "config.json":
        if any((folder / name).is_file() for name in SAFE_WEIGHTS):
            return str(folder)
        if pickled := next((name for name in PICKLED_WEIGHTS if (folder / name).is_file()), None):
            raise ValueError(
                f"{folder} has its weights in {pickled}, a pickle, which may run code: where you trust it, load it "
                f"and `save_pretrained` it again, which writes {WEIGHTS_FILE}"
            )
    raise ValueError(
        f"there are no weights beside {source}: name a folder with {WEIGHTS_FILE}, or start from random weights with "
        f"--random"
    )


def read_object(path: Path) -> Config:
    """Return the content of a config file. Raises ValueError if it is missing or no JSON object."""
    try:
        content = json.loads(path.read_bytes())
    except FileNotFoundError as fault:
        raise ValueError(
            f"{path.parent} has no {path.name}: name a folder that `save_pretrained` has written"
        ) from fault
    except ValueError as fault:
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
    if "num_labels" not in config and (shapes := sorted(name for name, *_ in info["mismatched_keys"])):
        raise ValueError(f"{source}: the weights have other shapes than the config says: {some(shapes)}")
    absent = {*info["missing_keys"], *(key for key, *_ in info["mismatched_keys"])}
    # Transformers replaces missing weights by random ones. Only a head may be new.
    old = (block.tensor for block in block_table(model, mapping) if block.role not in {"head", "other"})
    if odd := sorted(absent.intersection(old)):
        raise ValueError(f"the weights do not fit a {model.config.model_type}; they lack {some(odd)}")
    return cast("PreTrainedModel", model), absent


@contextmanager
def quiet() -> Iterator[None]:
    """Silence transformers' tables of what it loaded: one line here says what matters of them."""
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
