"""Image processors: pixels are read as bytes where the device can do the rest of the arithmetic."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from PIL import Image
from transformers import CLIPImageProcessorPil, SiglipImageProcessorPil, ViTImageProcessorPil

from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tests.support.scans import write_scans

SIZE = {"height": 8, "width": 8}


def opened(folder: Path, processor: Any, **options: Any) -> Dataset:
    processor.save_pretrained(folder / "processor")
    scans = write_scans(folder / "scans", 6)
    return load("images", {"folder": str(scans), "processor": str(folder / "processor"), **options})


def expected(folder: Path, processor: Any) -> torch.Tensor:
    images = [Image.open(path) for path in sorted((folder / "scans").glob("*/*.png"))]
    pixels: torch.Tensor = processor(images=images, return_tensors="pt")["pixel_values"]
    return pixels


@pytest.mark.parametrize("in_memory", [True, False])
@pytest.mark.parametrize(
    "processor",
    [
        CLIPImageProcessorPil(size={"shortest_edge": 9}, crop_size=SIZE),
        CLIPImageProcessorPil(do_resize=False, crop_size={"height": 12, "width": 12}),  # with a margin of zeros
        ViTImageProcessorPil(size=SIZE, do_normalize=False),
        SiglipImageProcessorPil(size=SIZE, rescale_factor=1 / 127.5, image_mean=[1.0] * 3, image_std=[1.0] * 3),
    ],
    ids=["clip", "margin", "rescaled", "siglip"],
)
def test_pixels_are_read_as_bytes_and_have_the_processors_bits(
    tmp_path: Path, processor: Any, *, in_memory: bool
) -> None:
    dataset = opened(tmp_path, processor, in_memory=in_memory)
    assert torch.equal(dataset.read(torch.arange(6))["pixel_values"], expected(tmp_path, processor))
    if not in_memory:
        assert dataset.on_disk
        assert dataset.on_disk.read(torch.tensor([0]))["pixel_values"].dtype == torch.uint8


@pytest.mark.parametrize(
    "processor",
    [
        ViTImageProcessorPil(size=SIZE, do_rescale=False),
        # Padded with zeros after the normalisation, which are no bytes.
        ViTImageProcessorPil(size=SIZE, do_pad=True, pad_size={"height": 10, "width": 10}),
    ],
    ids=["not rescaled", "padded"],
)
def test_other_processors_do_all_of_it(tmp_path: Path, processor: Any) -> None:
    dataset = opened(tmp_path, processor, in_memory=False)
    assert torch.equal(dataset.read(torch.arange(6))["pixel_values"], expected(tmp_path, processor))
    assert dataset.on_disk
    assert dataset.on_disk.read(torch.tensor([0]))["pixel_values"].dtype == torch.float32
