"""Layers, as they are found in a block table."""

from __future__ import annotations

from tessera.shared.model.blocks import Block, layers_of, stack_of


def block(tensor: str, layer: int | None) -> Block:
    return Block(tensor=tensor, role="mlp", layer=layer, shape=(2,), dtype="F32")


def test_layers_are_by_stack_in_the_tables_order_and_then_by_number() -> None:
    names = ["text.layers.1.a", "text.layers.0.a", "vision.layers.0.a", "text.layers.0.b"]
    table = [block(name, int(name.split(".")[2])) for name in names]
    found = layers_of([block("embedding", None), *table, block("head", None)])
    assert [layer.name for layer in found] == ["text.layers.0", "text.layers.1", "vision.layers.0"]
    assert [[b.name for b in layer.blocks] for layer in found] == [
        ["text.layers.0.a", "text.layers.0.b"], ["text.layers.1.a"], ["vision.layers.0.a"],
    ]  # fmt: skip
    assert [layer.nbytes for layer in found] == [16, 8, 8]


def test_a_list_within_a_layer_makes_no_layers_of_its_own() -> None:
    assert stack_of(block("decoder.block.1.layer.0.q", 1)) == "decoder.block"
    [layer] = layers_of([block("h.3.experts.0.w", 3), block("h.3.experts.1.w", 3)])
    assert layer.name == "h.3"


def test_a_number_that_a_mapping_took_from_within_a_name_tells_of_no_stack() -> None:
    [layer] = layers_of([block("attn_3.q", 3), block("mlp_3.w", 3)])
    assert (layer.stack, layer.name, len(layer.blocks)) == ("", "3", 2)
