"""A safetensors file whose tensors are the model's keyword inputs, `labels` among them, example by example.

The plainest way to bring data of one's own: images as `pixel_values`, text as `input_ids` and `attention_mask`. A
tensor `domain` of integers says where each example comes from, for dividing them by that; a tensor `group` of
integers says which examples are held out together, such as those of one patient.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tessera.worker.data.dataset import LABELS, Adapter, DataError, Dataset, Options

DOMAIN = "domain"
GROUP = "group"


class ArraysOptions(Options):
    file: Path


def arrays(options: ArraysOptions) -> Dataset:
    """Return the file's tensors under their own names and dtypes, each [examples, ...]; `domain` as domains, `group`
    as groups.

    Labels that are integers become int64, the only ones that torch takes for classes.
    """
    try:
        tensors = load_file(options.file)
        domains, groups = tensors.pop(DOMAIN, None), tensors.pop(GROUP, None)
        if LABELS in tensors and not tensors[LABELS].is_floating_point():
            tensors[LABELS] = tensors[LABELS].long()
        return Dataset(tensors, domains=domains, groups=None if groups is None else _groups(groups))
    except (OSError, SafetensorError) as fault:
        raise DataError(f"file: {options.file} cannot be read as safetensors: {fault}") from fault
    except DataError as fault:
        raise DataError(f"file: {options.file}: {fault}") from fault


def _groups(groups: Tensor) -> list[bytes]:
    if groups.ndim != 1 or groups.is_floating_point():
        raise DataError(f"group: {groups.dtype} {list(groups.shape)} is not one integer for each example")
    return [str(group).encode() for group in groups.tolist()]


ADAPTER = Adapter("arrays", ArraysOptions, arrays)
