"""Published weights of a model, some of which transformers renames, joins, splits or casts while it loads them.

Most tensors stand in the files as the model has them, perhaps under another name, and are read in place. The others
are converted by transformers itself, a group at a time, such as the experts of one layer: memory holds the group's
result and what transformers makes on the way, at most about twice as much.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Self, cast

from pydantic import JsonValue
from safetensors import safe_open
from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import (
    WeightConverter,
    WeightRenaming,
    convert_and_load_state_dict_in_model,
    rename_source_key,
)
from transformers.modeling_utils import LoadStateDictConfig

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Head, stored_name
from tessera.shared.updates.base_folder import BaseFolder, ConvertedBlock, FoundBlock, RawTensor
from tessera.worker.model.block_map import DTYPES, named_tensors
from tessera.worker.model.build import instantiate
from tessera.worker.model.config import config_from
from tessera.worker.model.pretrained import block_data, quiet


@dataclass(frozen=True)
class Snapshot:
    """The tensors of a folder, and a model without storage that they belong to."""

    model: PreTrainedModel
    first_names: Mapping[str, str]
    """The first name of each of the model's tensors, by each of its names: tied tensors have several."""
    unchanged: Mapping[str, RawTensor]
    """The tensors that the model has as a file has them, by their first names in the model."""
    groups: tuple[tuple[RawTensor, ...], ...]
    """The other tensors that the model uses, in groups that become one or several of its tensors together."""

    @classmethod
    def open(cls, folder: BaseFolder, config: Mapping[str, JsonValue], head: Head) -> Self:
        """Lay out the model of a config, and find the folder's tensors in it. Raises ConfigError."""
        if config_from(config).dtype is None:
            # As transformers does.
            config = {**config, "dtype": _dtype_of(folder)}
        model = instantiate(config, head, random_weights=False)
        first = {id(tensor): name for name, tensor in named_tensors(model).items()}
        named = [*model.named_parameters(remove_duplicate=False), *model.named_buffers(remove_duplicate=False)]
        first_names = {name: first.get(id(tensor), name) for name, tensor in named}
        single: dict[str, RawTensor] = {}
        joined: dict[str, list[RawTensor]] = {}
        for raw, name, is_converted in _renamed(folder, model):
            own = first_names.get(name)
            if is_converted:
                joined.setdefault(name, []).append(raw)
            elif own and (name == own or own not in single):
                single[own] = raw
        tensors = named_tensors(model)
        fitting = {
            name: raw for name, raw in single.items() if name in tensors and raw.shape == tuple(tensors[name].shape)
        }
        unchanged = {name: raw for name, raw in fitting.items() if raw.dtype == DTYPES.get(tensors[name].dtype)}
        cast = [(raw,) for name, raw in fitting.items() if name not in unchanged]
        return cls(model, first_names, unchanged, (*map(tuple, joined.values()), *cast))

    def in_place(self, blocks: Iterable[Block]) -> list[FoundBlock]:
        """Return the blocks whose bytes stand in a file, in one piece or in several."""
        return [
            FoundBlock.of(block, self.unchanged[name])
            for block in blocks
            if (name := stored_name(block.tensor)) in self.unchanged
        ]

    def converted(self, blocks: Iterable[Block]) -> Iterator[ConvertedBlock]:
        """Yield the other blocks that the folder has. Each is valid until the next is asked for.

        Raises ValueError for tensors that transformers cannot convert.
        """
        by_tensor: dict[str, list[Block]] = {}
        for block in blocks:
            by_tensor.setdefault(stored_name(block.tensor), []).append(block)
        with ExitStack() as opened:
            files: dict[Path, Any] = {}
            for group in self.groups:
                sources = tuple(sorted({raw.span.path for raw in group}))
                for path in sources:
                    if path not in files:
                        files[path] = opened.enter_context(safe_open(path, framework="pt"))
                given = {raw.name: files[raw.span.path].get_slice(raw.name) for raw in group}
                for name, tensor in self._convert(given).items():
                    for block in by_tensor.get(name, ()):
                        yield ConvertedBlock(block, block_data({block.tensor: tensor}, block), sources)

    def _convert(self, given: Mapping[str, Any]) -> dict[str, Tensor]:
        """Return transformers' conversion of a group of tensors, by first names. The model keeps none of it."""
        before = {**dict(self.model.named_parameters(remove_duplicate=False)), **dict(self.model.named_buffers())}
        # Annotated as a list of their base class, which it never contains.
        mapping = cast("Any", get_model_conversion_mapping(self.model))
        with quiet():
            info, _ = convert_and_load_state_dict_in_model(
                self.model, dict(given), LoadStateDictConfig(weight_mapping=mapping)
            )
        if info.conversion_errors:
            said = " ".join(next(iter(info.conversion_errors.values())).split())
            raise ValueError(f"transformers cannot convert {', '.join(sorted(given)[:4])}: {said[-300:]}")
        made: dict[str, Tensor] = {}
        for name, tensor in before.items():
            path, _, own = name.rpartition(".")
            module = self.model.get_submodule(path)
            if getattr(module, own) is not tensor:
                made[self.first_names[name]] = getattr(module, own).detach()
                setattr(module, own, tensor)
        return made


def _renamed(folder: BaseFolder, model: PreTrainedModel) -> Iterator[tuple[RawTensor, str, bool]]:
    """Yield each tensor, the name of the model's tensor that it becomes (the first of several), and True if it is
    converted."""
    conversions = get_model_conversion_mapping(model)
    renamings = [each for each in conversions if isinstance(each, WeightRenaming)]
    converters = [each for each in conversions if isinstance(each, WeightConverter)]
    names: dict[str, Tensor] = model.state_dict()
    for raw in folder.tensors:
        name, converter = rename_source_key(raw.name, renamings, converters, model.base_model_prefix, names)
        if name not in names and raw.name in names:
            # transformers leaves what has the model's name already.
            name, converter = raw.name, None
        yield raw, name, converter is not None


def _dtype_of(folder: BaseFolder) -> str:
    dtypes = {name: str(dtype).removeprefix("torch.") for dtype, name in DTYPES.items()}
    return next((dtypes[raw.dtype] for raw in folder.tensors if raw.dtype in dtypes), "float32")


def convert_blocks(
    config: Mapping[str, JsonValue],
    head: Head,
    folder: BaseFolder,
    blocks: Iterable[Block],
    take: Callable[[ConvertedBlock], None],
) -> None:
    """Hand over the blocks that a folder has in another form than the model. Raises as `Snapshot`."""
    for made in Snapshot.open(folder, config, head).converted(blocks):
        take(made)
