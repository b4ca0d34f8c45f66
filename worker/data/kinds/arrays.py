"""A safetensors file whose tensors are the model's keyword inputs, [examples, ...], `labels` among them.

The simplest format for prepared data: images as `pixel_values`, text as `input_ids` and `attention_mask`. An integer
tensor `domain` is the origin of each example, for partitions by domain. Examples with the same value in an integer
tensor `group`, such as those of one patient, are held out together. Integer tensors that `subgroups` names are
columns by which figures may be counted.
"""

from collections.abc import Iterator, Mapping
from pathlib import Path

from pydantic import Field, ValidationError
from safetensors import SafetensorError
from safetensors.torch import load_file
from torch import Tensor

from tessera.shared.model.dataset_schema import PIXELS, DatasetSchema
from tessera.shared.schema import Label
from tessera.worker.data.dataset import LABELS, Adapter, Dataset, Options, schema_of
from tessera.worker.data.groups import SUBGROUPS, Subgroups, SubgroupValues
from tessera.worker.data.load_report import LoadReport
from tessera.worker.data.readers.class_labels import MAX_CLASSES
from tessera.worker.errors import DataError
from tessera.worker.model.forward import IGNORED

PIECE = 1 << 22
"""Number of values that are checked together."""
DOMAIN = "domain"
GROUP = "group"


class ArraysOptions(Options):
    file: Path = Field(description="a safetensors file of the model's inputs and `labels`")
    subgroups: dict[Label, SubgroupValues] = Field(default={}, description=SUBGROUPS)


def arrays(options: ArraysOptions) -> Dataset:
    """Return the file's tensors under their names and dtypes, with `domain` as domains and `group` as groups.

    Integer labels become int64, the only dtype that torch accepts for classes.
    """
    try:
        tensors = load_file(options.file)
        domains, groups = tensors.pop(DOMAIN, None), tensors.pop(GROUP, None)
        columns = {name: _names(name, tensors.pop(name, None)) for name in options.subgroups}
        if PIXELS in tensors:
            _require_floating_point(tensors[PIXELS])
        if LABELS in tensors and not tensors[LABELS].is_floating_point():
            tensors[LABELS] = tensors[LABELS].long()
        return Dataset(
            tensors,
            domains=domains,
            groups=None if groups is None else [name.encode() for name in _names("group", groups)],
            subgroups={name: Subgroups.of(options.subgroups[name], cells) for name, cells in columns.items()},
            schema=_schema(tensors),
            report=LoadReport(
                unusable=list(_unusable(tensors)), largest_pixel=_largest(tensors[PIXELS]) if PIXELS in tensors else 0
            ),
        )
    except (OSError, SafetensorError) as fault:
        raise DataError(f"file: {options.file} cannot be read as safetensors: {fault}") from fault
    except DataError as fault:
        raise DataError(f"file: {options.file}: {fault}") from fault


def _pieces(tensor: Tensor) -> Iterator[tuple[int, Tensor]]:
    """Yield parts of a tensor, each with the place of its first example, so that a check needs little memory."""
    rows = max(1, PIECE * len(tensor) // max(1, tensor.numel())) if tensor.ndim else 1
    yield from ((first, tensor[first : first + rows]) for first in range(0, len(tensor) if tensor.ndim else 0, rows))


def _require_floating_point(pixels: Tensor) -> None:
    if not pixels.is_floating_point():
        raise DataError(
            f"{PIXELS}: {pixels.dtype} is not read, since a model takes small numbers about 0: save floating-point "
            "values, scaled as in its training, such as (x / 255 - 0.5) / 0.5"
        )


def _unusable(tensors: Mapping[str, Tensor]) -> Iterator[str]:
    """Yield faults of values. They are not errors, since a private task must not fail by one example."""
    for name, tensor in sorted(tensors.items()):
        wrong: list[int] = []
        for first, part in _pieces(tensor):
            usable = _classes(part) if name == LABELS else part.isfinite()
            wrong += (first + (~usable.flatten(1).all(1) if part.ndim > 1 else ~usable).nonzero().flatten()).tolist()
        if wrong:
            what = "labels that are no class" if name == LABELS else "values that are not finite (nan or infinity)"
            yield f"{name}: {len(wrong)} with {what}, first example {wrong[0]} (counted from 0)"


def _classes(labels: Tensor) -> Tensor:
    """Return the mask of labels that can be classes, bool, of the same shape. A token's label may be -100, which the
    loss leaves out."""
    if labels.is_floating_point():
        return labels.isfinite()
    possible = (labels >= 0) & (labels < MAX_CLASSES)
    return possible | (labels == IGNORED) if labels.ndim > 1 else possible


def _largest(pixels: Tensor) -> float:
    """Return the largest absolute value that is finite."""
    return max((float(part.nan_to_num(0, 0, 0).abs().amax()) for _, part in _pieces(pixels)), default=0.0)


def _schema(tensors: Mapping[str, Tensor]) -> DatasetSchema:
    """Return the schema without lengths of texts, which may depend on the longest example."""
    shapes = {name: tuple(t.shape[1:]) for name, t in tensors.items() if name == PIXELS or t.ndim == 1}
    try:
        return schema_of(tensors, shapes)
    except ValidationError:
        # Too many tensors, or names and sizes that a claim cannot contain.
        return DatasetSchema()


def _names(tensor: str, values: Tensor | None) -> list[str]:
    if values is None:
        raise DataError(f"subgroups: there is no tensor {tensor!r}")
    if values.ndim != 1 or values.is_floating_point():
        raise DataError(f"{tensor}: {values.dtype} {list(values.shape)} is not one integer for each example")
    return list(map(str, values.tolist()))


ADAPTER = Adapter("arrays", ArraysOptions, arrays)
