"""Images in folders of their classes."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from PIL import Image


def write_scans(folder: Path, count: int, *, classes: int = 2, shape: tuple[int, ...] = (9, 7, 3)) -> Path:
    """Write images of random pixels, dealt to the classes in turn, and return their folder."""
    dice = np.random.default_rng(0)
    for place in range(count):
        file = folder / str(place % classes) / f"{place:02}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(dice.integers(0, 256, shape, dtype=np.uint8)).save(file)
    return folder
