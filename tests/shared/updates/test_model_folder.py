"""The model folder: blocks are exact slices of the file, and a folder that does not fit its table is refused."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import numpy as np
import pytest

from tessera.shared.model.blocks import Block, TensorSlice
from tessera.shared.model.spec import BLOCKS_FILE, WEIGHTS_FILE, Model
from tessera.shared.problems import Invalid
from tessera.shared.tensors.dtypes import NUMPY_DTYPES
from tessera.shared.tensors.lazy import as_bytes
from tessera.shared.updates import safetensors_file
from tessera.shared.updates.model_folder import ModelFolder

WIDTH = 3


def part(label: str, axis: int, *spans: tuple[int, int]) -> TensorSlice:
    return TensorSlice(label=label, axis=axis, spans=spans)


def make_model() -> Model:
    """A fused matrix interleaved by head, one in Conv1D layout, a scalar and a bfloat16 vector."""
    interleaved = [
        Block(
            tensor="qkv",
            part=part(role, 0, (i, i + 1), (i + 3, i + 4)),
            role=role,
            layer=0,
            shape=(2, WIDTH),
            dtype="F32",
        )
        for i, role in enumerate(("query", "key", "value"))
    ]
    conv1d = [
        Block(tensor="c_attn", part=part("key", 1, (0, 2)), role="key", layer=0, shape=(WIDTH, 2), dtype="F32"),
        Block(tensor="c_attn", part=part("value", 1, (2, 6)), role="value", layer=0, shape=(WIDTH, 4), dtype="F32"),
    ]
    rest = [
        Block(tensor="scale", role="head", shape=(), dtype="F64"),
        Block(tensor="norm", role="norm", layer=0, shape=(5,), dtype="BF16"),
    ]
    return Model(config={"model_type": "vit"}, head="features", blocks=(*interleaved, *conv1d, *rest))


def make_tensors() -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        "norm": rng.normal(size=5).astype(NUMPY_DTYPES["BF16"]),
        "scale": np.array(2.5),
        "qkv": rng.normal(size=(6, WIDTH)).astype("<f4"),
        "c_attn": rng.normal(size=(WIDTH, 6)).astype("<f4"),
    }


DTYPES = {np.dtype("<f8"): "F64", np.dtype("<f4"): "F32", NUMPY_DTYPES["BF16"]: "BF16"}


def write_folder(folder: Path, model: Model, tensors: Mapping[str, np.ndarray]) -> Path:
    (folder / BLOCKS_FILE).write_text(model.model_dump_json())
    with (folder / WEIGHTS_FILE).open("wb") as file:
        safetensors_file.write(
            file,
            [(name, DTYPES[array.dtype], array.shape) for name, array in tensors.items()],
            [as_bytes(array) for array in tensors.values()],
            {"format": "pt"},
        )
    return folder


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    return write_folder(tmp_path, make_model(), make_tensors())


def test_each_block_is_its_slice_of_the_tensor(folder: Path) -> None:
    tensors = make_tensors()
    expected = {
        "qkv#query": tensors["qkv"][[0, 3]],
        "qkv#key": tensors["qkv"][[1, 4]],
        "qkv#value": tensors["qkv"][[2, 5]],
        "c_attn#key": tensors["c_attn"][:, :2],
        "c_attn#value": tensors["c_attn"][:, 2:],
        "scale": tensors["scale"],
        "norm": tensors["norm"],
    }
    read = {block.name: bytes(data) for block, data in ModelFolder.open(folder).blocks()}
    assert read == {name: array.tobytes() for name, array in expected.items()}


def test_each_block_has_the_bytes_that_its_table_says(folder: Path) -> None:
    assert all(len(data) == block.nbytes for block, data in ModelFolder.open(folder).blocks())


def test_a_missing_an_unexpected_and_a_misshapen_tensor_are_named_at_once(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["more"] = tensors.pop("norm")
    tensors["qkv"] = tensors["qkv"][:3]
    with pytest.raises(Invalid) as refused:
        ModelFolder.open(write_folder(tmp_path, make_model(), tensors))
    faults = {fault.pointer: fault.detail for fault in refused.value.errors}
    assert faults == {
        "more": "is in the weights and not in the table",
        "norm": "is not in the weights",
        "qkv": "is F32 [3, 3] in the weights and F32 [6, 3] in the table",
    }


@pytest.mark.parametrize("missing", [BLOCKS_FILE, WEIGHTS_FILE])
def test_a_missing_file_is_named(folder: Path, missing: str) -> None:
    (folder / missing).unlink()
    with pytest.raises(Invalid, match=f"{missing} cannot be read: No such file"):
        ModelFolder.open(folder)


def test_a_cut_off_file_is_refused(folder: Path) -> None:
    weights = folder / WEIGHTS_FILE
    weights.write_bytes(weights.read_bytes()[:-1])
    with pytest.raises(Invalid, match="is not a well-formed safetensors file"):
        ModelFolder.open(folder)


def test_a_table_with_an_unknown_role_is_refused_with_its_place(folder: Path) -> None:
    table = folder / BLOCKS_FILE
    table.write_text(table.read_text().replace('"role":"norm"', '"role":"nrm"'))
    with pytest.raises(Invalid) as refused:
        ModelFolder.open(folder)
    assert [fault.pointer for fault in refused.value.errors] == ["/blocks/6/role"]


@pytest.mark.parametrize(
    ("config", "head"),
    [
        ({"architectures": ["BertForSequenceClassification"]}, "text-classification"),
        ({"architectures": ["CLIPModel"], "text_config": {}, "vision_config": {}}, "contrastive"),
        ({"architectures": None}, "features"),
        ([], "features"),
    ],
)
def test_a_folder_of_transformers_is_refused_with_the_command_that_makes_a_model_of_it(
    tmp_path: Path, config: object, head: str
) -> None:
    folder = tmp_path / "my bert"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(Invalid, match="without Tessera's table of blocks") as refused:
        ModelFolder.open(folder)
    command = f"tessera model init '{folder}-tessera' --config '{folder}' --head {head}`"
    assert refused.value.advice.endswith(command)
    with pytest.raises(Invalid, match=f"there is no folder {tmp_path}/none"):
        ModelFolder.open(tmp_path / "none")
