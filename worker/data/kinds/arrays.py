"""A safetensors file whose tensors are the model's keyword inputs, [examples, ...], `labels` among them.

The simplest format for prepared data: images as `pixel_values`, text as `input_ids` and `attention_mask`. An integer
tensor `domain` is the origin of each example, for partitions by domain. Examples with the same value in an integer
tensor `group`, such as those of one patient, are held out together.
"""

from collections.abc import Mapping
from pathlib import Path

from pydantic import ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tessera.shared.model.dataset_schema import PIXELS, DatasetSchema
from tessera.worker.data.dataset import LABELS, Adapter, DataError, Dataset, Options, schema_of

DOMAIN = "domain"
GROUP = "group"


class ArraysOptions(Options):
    file: Path


def arrays(options: ArraysOptions) -> Dataset:
    """Return the file's tensors under their names and dtypes, with `domain` as domains and `group` as groups.

    Integer labels become int64, the only dtype that torch accepts for classes.
    """
    try:
        tensors = load_file(options.file)
        domains, groups = tensors.pop(DOMAIN, None), tensors.pop(GROUP, None)
        if LABELS in tensors and not tensors[LABELS].is_floating_point():
            tensors[LABELS] = tensors[LABELS].long()
        return Dataset(
            tensors, domains=domains, groups=None if groups is None else _groups(groups), schema=_schema(tensors)
        )
    except (OSError, SafetensorError) as fault:
        raise DataError(f"file: {options.file} cannot be read as safetensors: {fault}") from fault
    except DataError as fault:
        raise DataError(f"file: {options.file}: {fault}") from fault


def _schema(tensors: Mapping[str, Tensor]) -> DatasetSchema:
    """Return what does not depend on the examples: not the length of texts, which may be that of the longest."""
    shapes = {name: tuple(t.shape[1:]) for name, t in tensors.items() if name == PIXELS or t.ndim == 1}
    try:
        return schema_of(tensors, shapes)
    except ValidationError:
        # Too many tensors, or names and sizes that a claim cannot contain.
        return DatasetSchema()


def _groups(groups: Tensor) -> list[bytes]:
    if groups.ndim != 1 or groups.is_floating_point():
        raise DataError(f"group: {groups.dtype} {list(groups.shape)} is not one integer for each example")
    return [str(group).encode() for group in groups.tolist()]


ADAPTER = Adapter("arrays", ArraysOptions, arrays)
