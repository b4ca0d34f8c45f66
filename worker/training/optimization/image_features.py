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
from torch import Tensor
from transformers import PreTrainedModel
from transformers.modeling_outputs import BaseModelOutputWithPooling

from tessera.shared.model.dataset_schema import PIXELS
from tessera.shared.model.spec import Head
from tessera.worker.data.dataset import LABELS, Dataset, RowsOnDisk
from tessera.worker.model.prompts import PromptError, prompts_of, towers_of

TOWER = "vision_model"
READ_BY_TOWER = (f"{TOWER}.", "prompts.vision", "prompts.deep.vision")
"""The beginnings of the names of the tensors that decide the tower's output."""
MAX_BYTES = 1 << 28
"""Most bytes of the features of a data set: of 87,000 images, for a tower of width 768 in float32."""


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

    def of(self, pixels: Tensor | RowsOnDisk, *, alone: bool) -> "_ImageTable":
        """Return the table of a data set's images, which are recognised by their identity."""
        self._tables = [table for table in self._tables if table.pixels() is not None]
        for table in self._tables:
            if table.pixels() is pixels and table.alone == alone:
                return table
        self._tables.append(_ImageTable(pixels, alone=alone))
        return self._tables[-1]


class _ImageTable:
    """The features of a data set's images, as far as they are known."""

    def __init__(self, pixels: Tensor | RowsOnDisk, *, alone: bool) -> None:
        self.pixels = ref(pixels)
        """The images, which this does not keep in memory once the worker has other data."""
        self.alone = alone
        """True if each image is computed by itself."""
        self._known = torch.zeros(pixels.shape[0], dtype=torch.bool)
        self._is_complete = False
        """Then a step need not wait for a GPU to say which images it has."""
        self._features: Tensor | None = None
        """[images, width]"""

    def rows(self, places: Tensor, pixels: Tensor | RowsOnDisk, model: PreTrainedModel, tower: Any) -> Tensor:
        """Return the features of the images at these places, [places, width]. Raises DataError."""
        if not self._is_complete:
            self._compute(places.cpu(), pixels, model, tower)
        if self._features is None:
            raise ValueError("a batch without images has no features")
        return self._features[places]

    def _compute(self, places: Tensor, pixels: Tensor | RowsOnDisk, model: PreTrainedModel, tower: Any) -> None:
        absent = torch.unique(places[~self._known[places]])
        parts = list(absent[:, None]) if self.alone else [absent] * bool(len(absent))
        # A tensor that is made in inference mode cannot be used in training.
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
    model: PreTrainedModel,
    head: Head,
    kept: ImageFeatures,
    data: Dataset,
    changed: Collection[str] = (),
    *,
    in_order: bool,
) -> Iterator[Dataset]:
    """Let the vision tower look up the features of images within the block. Yield the data set with the places of
    images instead of their pixels; the same data set if the tower's output may change.

    `changed` are the names of the tensors that train, or no longer have the values of the version. Batches that are
    always `in_order`, as in evaluations, are computed together, with the same bits as without this. Batches of
    training differ, also after a restart: on the CPU each image is computed alone, so that its bits do not depend on
    the others. On a GPU, whose bits nothing depends on, they are computed together.
    """
    if not _is_constant(model, head, data, changed):
        yield data
        return
    tower, pixels = getattr(model, TOWER), data.inputs[PIXELS]
    table = kept.of(pixels, alone=not in_order and model.device.type == "cpu")

    def look_up(pixel_values: Tensor, **_: Any) -> BaseModelOutputWithPooling:
        # The tower computes what is absent with its hooks, which insert prompts. A reference of this function to
        # itself would keep the model in memory until Python's garbage collector happens to run.
        this = vars(tower).pop("forward")
        try:
            features = table.rows(pixel_values, pixels, model, tower)
        finally:
            tower.forward = this
        # Some models take the pooled output by its place, which is the second.
        return BaseModelOutputWithPooling(features.new_empty(0), features)

    tensors = {**data.tensors, PIXELS: torch.arange(data.examples)}
    # Classes are in memory, which `_is_constant` requires.
    tower.forward = look_up
    try:
        yield replace(data, tensors=tensors, on_disk=None)
    finally:
        del tower.forward


def _is_constant(model: PreTrainedModel, head: Head, data: Dataset, changed: Collection[str]) -> bool:
    """Return True if the vision tower has the same output for an image in each pass, and it can be kept."""
    prompts = prompts_of(model)
    if (
        head != "contrastive"
        or data.inputs.keys() != {PIXELS, LABELS}
        or LABELS not in data.tensors
        or (prompts and "vision" in prompts.transforms)
    ):
        return False
    try:
        # Other families may read more of the tower than its pooled output.
        towers_of(model.config)
    except PromptError:
        return False
    tower = getattr(model, TOWER)
    if "forward" in vars(tower) or any(name.startswith(READ_BY_TOWER) for name in changed):
        return False
    is_random = tower.training and any("drop" in name and value for name, value in vars(tower.config).items())
    return not is_random and data.examples * tower.config.hidden_size * 4 <= MAX_BYTES
