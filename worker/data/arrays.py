"""A safetensors file whose tensors are the model's keyword inputs, `labels` among them, example by example.

The plainest way to bring data of one's own: images as `pixel_values`, text as `input_ids` and `attention_mask`.
"""

from __future__ import annotations

from pathlib import Path

from safetensors import SafetensorError
from safetensors.torch import load_file

from worker.data.dataset import Adapter, DataError, Dataset, Options


class ArraysOptions(Options):
    file: Path


def arrays(options: ArraysOptions) -> Dataset:
    """The file's tensors under their own names and dtypes, each [examples, ...]."""
    try:
        return Dataset(load_file(options.file))
    except (OSError, SafetensorError) as fault:
        raise DataError(f"file: {options.file} cannot be read as safetensors: {fault}") from fault
    except DataError as fault:
        raise DataError(f"file: {options.file}: {fault}") from fault


ADAPTER = Adapter("arrays", ArraysOptions, arrays)
