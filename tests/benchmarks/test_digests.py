"""A digest of a model depends on names and bits alone."""

from __future__ import annotations

from pathlib import Path

import numpy as np
from safetensors.numpy import save_file

from benchmarks.digests import digest_of_tensors

WEIGHTS = {"a": np.arange(6, dtype=np.float32).reshape(2, 3), "b": np.array(1.5, np.float32)}


def digest(folder: Path, tensors: dict[str, np.ndarray], metadata: dict[str, str] | None = None) -> tuple[int, str]:
    save_file(tensors, folder / "model.safetensors", metadata)
    return digest_of_tensors(folder / "model.safetensors")


def test_metadata_does_not_count(tmp_path: Path) -> None:
    assert digest(tmp_path, WEIGHTS) == digest(tmp_path, WEIGHTS, {"format": "pt"})


def test_one_bit_and_one_name_count(tmp_path: Path) -> None:
    other = {**WEIGHTS, "b": np.array(np.nextafter(WEIGHTS["b"], np.float32(2)))}
    renamed = {"a": WEIGHTS["a"], "c": WEIGHTS["b"]}
    assert len({digest(tmp_path, tensors)[1] for tensors in (WEIGHTS, other, renamed)}) == 3
