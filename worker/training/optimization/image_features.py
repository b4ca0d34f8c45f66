"""Features of images that a dual encoder computes once for many rounds, while its vision tower stays as it is.

Text prompts, or a text tower, train on the same images in each pass, and most of the time of a step is the vision
tower's. Its output for each image is kept with the model, so that further passes and evaluations look it up.
"""

from collections.abc import Collection, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _NormBase
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tessera.shared.model.dataset_schema import PIXELS
from tessera.worker.data.dataset import LABELS, Dataset, RowsOnDisk
from tessera.worker.model.prompts import prompts_of

TOWER = "vision_model"
READ_BY_TOWER = (f"{TOWER}.", "prompts.vision", "prompts.deep.vision")
"""The beginnings of the names of the tensors that decide the tower's output."""
MAX_BYTES = 1 << 28
"""Most bytes of features that are kept with a model: of 87,000 images, for a tower of width 768 in float32."""


class ImageFeatures:
    """The vision tower's pooled outputs for the images of data sets, which are kept with a model."""

    def __init__(self) -> None:
        self.is_settled = False
        """True if the tower's tensors had the same values in the last task."""
        self._content: Mapping[str, str] = {}
        self._tables: list[_ImageTable] = []

    def begin(self, digests: Mapping[str, str]) -> None:
        """Begin a task. Forget all features unless the tower's blocks, digests by name, are those of the last one."""
        content = {name: digest for name, digest in digests.items() if name.startswith(READ_BY_TOWER)}
        self.is_settled = content == self._content
        if not self.is_settled:
            self._tables.clear()
        self._content = content

    def of(self, pixels: Tensor | RowsOnDisk) -> "_ImageTable":
        """Return the table of a data set's images, which are recognised by their identity."""
        table = next((each for each in self._tables if each.pixels() is pixels), None) or _ImageTable(pixels)
        # The last one used is the last to be dropped.
        self._tables = [*(each for each in self._tables if each.pixels() is not None and each is not table), table]
        while len(self._tables) > 1 and sum(each.nbytes for each in self._tables) > MAX_BYTES:
            self._tables.pop(0)
        return table


class _ImageTable:
    """The features of a data set's images, as far as they are known."""

    def __init__(self, pixels: Tensor | RowsOnDisk) -> None:
        self.pixels = ref(pixels)
        """The images, which this does not keep in memory once the worker has other data."""
        self._known = torch.zeros(pixels.shape[0], dtype=torch.bool)
        self._is_complete = False
        """Then a step need not wait for a GPU to say which images it has."""
        self._features: Tensor | None = None
        """[images, width]"""

    @property
    def nbytes(self) -> int:
        return 0 if self._features is None else self._features.nbytes

    def rows(self, places: Tensor, pixels: Tensor | RowsOnDisk, model: PreTrainedModel, tower: Any) -> Tensor:
        """Return the features of the images at these places, [places, width]. Raises DataError.

        On the CPU each image is computed alone, so that its bits do not depend on the others of its batch, which
        differ after a restart.
        """
        if not self._is_complete:
            self._compute(places.cpu(), pixels, model, tower)
        if self._features is None:
            raise ValueError("a batch without images has no features")
        return self._features[places]

    def _compute(self, places: Tensor, pixels: Tensor | RowsOnDisk, model: PreTrainedModel, tower: Any) -> None:
        absent = torch.unique(places[~self._known[places]])
        parts = list(absent[:, None]) if model.device.type == "cpu" else [absent] * bool(len(absent))
        # What is computed in inference mode cannot be used in training.
        with torch.inference_mode(mode=False), torch.no_grad():
            for some in parts:
                found = tower(pixel_values=pixels[some].to(model.device, model.dtype)).pooler_output
                if self._features is None:
                    self._features = found.new_empty(len(self._known), *found.shape[1:])
                self._features[some] = found
                self._known[some] = True
        self._is_complete = bool(self._known.all())


@contextmanager
def images_once(
    model: PreTrainedModel, kept: ImageFeatures, data: Dataset, changed: Collection[str] = ()
) -> Iterator[Dataset]:
    """Let the vision tower look up the features of images within the block. Yield the data set with the places of
    images instead of their pixels; the same data set if the tower's output may change.

    `changed` are the names of the tensors that train, or no longer have the values of the version.
    """
    if not _is_constant(model, kept, data, changed):
        yield data
        return
    tower, pixels = getattr(model, TOWER), data.inputs[PIXELS]
    table = kept.of(pixels)

    def look_up(pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        # The tower computes what is absent with its hooks, which insert prompts.
        del tower.forward
        try:
            features = table.rows(pixel_values, pixels, model, tower)
        finally:
            tower.forward = look_up
        # Some models take the pooled output by its place, which is the second.
        return BaseModelOutputWithPooling(features.new_empty(0), features)

    tensors = {**data.tensors, PIXELS: torch.arange(data.examples)}
    on_disk = {name: rows for name, rows in data.on_disk.items() if name != PIXELS}
    tower.forward = look_up
    try:
        yield replace(data, tensors=tensors, on_disk=on_disk)
    finally:
        del tower.forward


def _is_constant(model: PreTrainedModel, kept: ImageFeatures, data: Dataset, changed: Collection[str]) -> bool:
    """Return whether the vision tower has the same output for an image in each pass, and it can be kept."""
    tower, prompts = getattr(model, TOWER, None), prompts_of(model)
    if tower is None or data.inputs.keys() != {PIXELS, LABELS}:
        return False
    if "forward" in vars(tower) or (prompts and "vision" in prompts.transforms):
        return False
    if any(name.startswith(READ_BY_TOWER) for name in changed) or _is_random(tower):
        return False
    # Loaders read pixels while a GPU computes. It is not made to wait for pixels once unless that pays later.
    waits = model.device.type != "cpu" and bool(data.for_loaders) and not kept.is_settled
    return not waits and data.examples * tower.config.hidden_size * 4 <= MAX_BYTES


def _is_random(tower: nn.Module) -> bool:
    """Return whether a tower's output for an image depends on random numbers, or on the other images of its batch."""
    settings = vars(tower.config) if tower.training else {}
    return any("drop" in name and value for name, value in settings.items()) or any(
        isinstance(module, _NormBase) for module in tower.modules()
    )
