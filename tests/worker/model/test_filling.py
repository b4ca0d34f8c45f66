"""A model that is built without weights and then filled is, bit for bit, the model built with random weights."""

from collections.abc import Mapping
from typing import Any

import pytest
import torch
from torch import nn

from tessera.shared.model.blocks import Block
from tessera.shared.model.spec import Fusion, Head, Lora, Prompts
from tessera.worker.model.block_map import block_table, named_tensors
from tessera.worker.model.build import allocate, instantiate, read_block, write_block
from tessera.worker.model.forward import forward
from tests.support.duals import dual, pairs
from tests.support.variants import variants
from tests.worker.model.test_lora import SIZES
from tests.worker.model.test_zoo import OFTEN, VARIANTS, ZOO

CPU = torch.device("cpu")
CASES = {**{name: (name, case) for name, case in ZOO.items()}, **VARIANTS}
PROMPTS = Prompts(vision=3, text=2, fusion=Fusion(heads=2))
INSERTED: dict[str, tuple[Mapping[str, Any], Head, dict[str, Any]]] = {
    "llama with adapters": ({"model_type": "llama", **SIZES, "num_key_value_heads": 1}, "causal-lm", {}),
    "tied and in 16 bits": (
        {"model_type": "llama", **SIZES, "tie_word_embeddings": True, "dtype": "bfloat16"},
        "causal-lm",
        {"lora": Lora(rank=2, alpha=4)},
    ),
    "bert with adapters": (
        {"model_type": "bert", **SIZES, "num_labels": 3},
        "text-classification",
        {"lora": Lora(rank=2, alpha=4, roles=("query", "mlp"))},
    ),
    "clip with prompts": (dual("clip"), "contrastive", {"prompts": PROMPTS}),
    "dinov2 and bert with prompts": (dual("dinov2+bert"), "contrastive", {"prompts": PROMPTS}),
    "clip with deep prompts": (dual("clip"), "contrastive", {"prompts": Prompts(vision=2, text=2, depth=2)}),
    "siglip with prompts and adapters": (
        dual("siglip"), "contrastive", {"prompts": PROMPTS, "lora": Lora(rank=2, alpha=4)}
    ),
}  # fmt: skip


def filled(
    old: nn.Module, blocks: tuple[Block, ...], config: Mapping[str, Any], head: Head, **more: Any
) -> nn.Module:
    """The same model, built without weights and filled with the blocks of `old`."""
    model = instantiate(config, head, seed=6, random_weights=False, **more)
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
    assert {buffer.device.type for buffer in model.buffers()} <= {"cpu"}
    allocate(model, CPU)
    theirs, ours = named_tensors(old), named_tensors(model)
    for block in blocks:
        write_block(ours, block, read_block(theirs, block))
    return model.eval()


def assert_same(old: nn.Module, new: nn.Module) -> None:
    for each in ("named_parameters", "named_buffers"):
        ours, theirs = (list(getattr(model, each)(remove_duplicate=False)) for model in (new, old))
        assert [name for name, _ in ours] == [name for name, _ in theirs]
        for (name, tensor), (_, other) in zip(ours, theirs, strict=True):
            assert (tensor.dtype, tensor.requires_grad) == (other.dtype, other.requires_grad), name
            assert torch.equal(tensor.nan_to_num(), other.nan_to_num()), name
    # Tied tensors are one in both.
    assert [*dict(new.named_parameters())] == [*dict(old.named_parameters())]


@pytest.mark.parametrize("name", variants(CASES, OFTEN))
def test_every_tensor_and_buffer_of_the_zoo_is_the_same(name: str) -> None:
    model_type, case = CASES[name]
    config = {"model_type": model_type, **case.config}
    old = instantiate(config, "features", seed=5).eval()
    new = filled(old, block_table(old), config, "features")
    assert_same(old, new)
    tower = case.tower
    with torch.no_grad():
        out, other = (model.get_submodule(tower)(**case.inputs).last_hidden_state for model in (new, old))
    assert torch.equal(out, other)


@pytest.mark.parametrize("name", INSERTED)
def test_prompts_adapters_and_tied_weights_are_filled_too(name: str) -> None:
    config, head, more = INSERTED[name]
    old = instantiate(config, head, seed=5, **more).eval()
    new = filled(old, block_table(old), config, head, **more)
    assert_same(old, new)
    batch = {"input_ids": torch.tensor([[3, 5, 6, 7]]), "labels": torch.tensor([0])}
    if head == "contrastive":
        batch = next(pairs(str(config["model_type"]), 3).batches(None))
    elif head == "causal-lm":
        batch["labels"] = batch["input_ids"]
    with torch.no_grad():
        out, other = (forward(model, head, batch).logits for model in (new, old))
    assert out is not None
    assert other is not None
    assert torch.equal(out, other)


def test_no_memory_is_taken_for_weights_before_they_are_filled() -> None:
    """Four gigabytes of weights: random ones would take a minute and fill the machine."""
    config = {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 16384, "num_hidden_layers": 2,
              "num_attention_heads": 8, "vocab_size": 1000}  # fmt: skip
    model = instantiate(config, "causal-lm", random_weights=False)
    assert sum(parameter.nbytes for parameter in model.parameters()) > 4e9
    assert {parameter.device.type for parameter in model.parameters()} == {"meta"}
