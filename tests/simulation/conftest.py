from __future__ import annotations

from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from tessera.simulation import Weights
from tessera.worker.model.build import instantiate
from tests.support.tasks import VIT

SITES = ("north", "south", "east")


@pytest.fixture(scope="module")
def model() -> Weights:
    return Weights.of(instantiate(VIT, "image-classification", seed=1), VIT, "image-classification")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Sixteen random images of three classes at each of three sites."""
    folder = tmp_path_factory.mktemp("data")
    for seed, site in enumerate(SITES):
        dice = torch.Generator().manual_seed(seed)
        pixels, labels = torch.randn(16, 1, 8, 8, generator=dice), torch.randint(0, 3, (16,), generator=dice)
        save_file({"pixel_values": pixels, "labels": labels}, folder / f"{site}.safetensors")
    return {site: folder / f"{site}.safetensors" for site in SITES}
