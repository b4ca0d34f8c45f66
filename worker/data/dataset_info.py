"""The facts about a data set that admission, claims and approvals need. Imports no torch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec

from tessera.shared.model.dataset_schema import PIXELS, DatasetSchema
from tessera.shared.run_settings import Augmentation, Unit


@dataclass(frozen=True)
class Pixels:
    """The images of a data set, as its tensors hold them."""

    dtype: str
    shape: tuple[int, ...]
    """Of one image."""
    is_floating_point: bool
    from_bytes: bool
    """True if black and white are known, so that colours can be changed."""


@dataclass(frozen=True)
class DatasetInfo:
    """A data set as the agent knows it. `worker.data.dataset.Dataset` has the examples."""

    examples: int
    held_out: int = 0
    """The number of examples on which no run trains."""
    opted_out: int = 0
    """The number of examples that the site's opt-out list leaves out. It is not sent."""
    groups: int | None = None
    """The number of distinct groups; None without groups."""
    ungrouped: str | None = None
    """The reason why no run can protect groups of these examples. It does not depend on them."""
    schema: DatasetSchema = field(default_factory=DatasetSchema)
    pack: bool = False
    """True if a row holds several texts."""
    raw_texts: bool = False
    """True if each run's own tokenizer converts texts to tokens."""
    raw_examples: bool = False
    """True if these texts are examples, and not the names of classes alone."""
    several_labels: bool = False
    """True if an example has several labels, as each token of a text."""
    pixels: Pixels | None = None

    def units(self, unit: Unit) -> int:
        """Return the number of examples, or of groups; 0 without groups."""
        return self.examples if unit == "example" else self.groups or 0

    def augmentation_misfit(self, settings: Augmentation) -> str | None:
        """Return the reason why the images cannot be changed so, with the remedy, or None."""
        pixels = self.pixels
        if pixels is None:
            return f"it has no {PIXELS}: leave training.augmentation out, or name a data set of images"
        shape = list(pixels.shape)
        if len(shape) != 3 or shape[0] not in (1, 3) or not pixels.is_floating_point:
            what = f"its {PIXELS} are {pixels.dtype} {shape}"
            return f"{what}, not images [1 or 3 channels, height, width]: leave training.augmentation out"
        if settings.colours and not pixels.from_bytes:
            return (
                f"which of its {PIXELS} are black and white is not known, which {', '.join(settings.colours)} need: "
                "leave these out, or use the kind `images`"
            )
        return None


@dataclass(frozen=True)
class Inventory:
    """The data sets and the devices of a worker."""

    datasets: Mapping[str, DatasetInfo]
    groups: int = 0
    """The number of distinct groups of all data sets that runs train on."""
    device: str = "cpu"
    """The devices' names, in at most 64 characters."""
    gpu: str | None = None
    """The name of the GPU, if the devices are GPUs."""


def augments_images() -> bool:
    """Return True if the extra `augmentation` is installed."""
    return find_spec("kornia") is not None
