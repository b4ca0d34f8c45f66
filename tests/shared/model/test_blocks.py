"""Blocks, selectors over them, and tables that cover each tensor exactly once."""

from __future__ import annotations

import numpy as np
import pytest
from pydantic import ValidationError

from tessera.shared.model.blocks import Block, TensorSlice, check_table
from tessera.shared.model.selectors import EVERYTHING, NOTHING, Match, Selector, SelectorError, all_but, named, roles
from tests.support.federation import small_model

TABLE = small_model().blocks
NAMES = [block.name for block in TABLE]


def block(tensor: str = "w", label: str | None = None, span: tuple[int, int] = (0, 2), **fields: object) -> Block:
    rows = span[1] - span[0]
    part = TensorSlice(label=label, axis=0, spans=(span,)) if label else None
    return Block.model_validate(
        {"tensor": tensor, "part": part, "role": "other", "shape": (rows, 3), "dtype": "F32", **fields}
    )


def test_a_part_is_named_after_its_tensor_and_a_whole_tensor_after_itself() -> None:
    assert block("layer.qkv", "value").name == "layer.qkv#value"
    assert block("layer.out").name == "layer.out"


def test_a_block_knows_its_size() -> None:
    # 2 x 3 elements of 4, 8 and 2 bytes.
    assert [block(dtype=dtype).nbytes for dtype in ("F32", "F64", "BF16")] == [24, 48, 12]


def test_a_part_of_interleaved_spans_indexes_its_rows_in_order() -> None:
    part = TensorSlice(label="key", axis=0, spans=((1, 3), (6, 7)))
    np.testing.assert_array_equal(part.index(), [1, 2, 6])
    assert part.rows == 3


@pytest.mark.parametrize("spans", [(), ((2, 2),), ((3, 1),), ((0, 2), (1, 3)), ((2, 3), (0, 1)), ((-1, 1),)])
def test_spans_that_do_not_ascend_are_refused(spans: tuple[tuple[int, int], ...]) -> None:
    with pytest.raises(ValidationError):
        TensorSlice(label="key", axis=0, spans=spans)


@pytest.mark.parametrize(
    "fields", [{"shape": (3, 3)}, {"shape": ()}, {"shape": (0,)}, {"dtype": "I64"}, {"layer": -1}]
)
def test_a_block_that_cannot_be_is_refused(fields: dict[str, object]) -> None:
    with pytest.raises(ValidationError):
        block("w", "key", **fields)


@pytest.mark.parametrize("name", ["", "a\nb", "a\0", "größe", "x" * 513])
def test_names_are_printable_ascii(name: str) -> None:
    with pytest.raises(ValidationError):
        block(name)


# ---------------------------------------------------------------- selectors


def test_selectors_resolve_in_the_order_of_the_table() -> None:
    assert [b.name for b in EVERYTHING.resolve(TABLE)] == NAMES
    assert [b.role for b in roles("head", "value").resolve(TABLE)] == ["value", "head"]
    assert [b.role for b in all_but("query", "key").resolve(TABLE)] == ["value", "output", "mlp", "head"]
    assert [b.name for b in named(["layer.0.qkv*"]).resolve(TABLE)] == NAMES[:3]
    assert NOTHING.resolve(TABLE) == ()
    assert not NOTHING


def test_the_conditions_of_a_match_hold_together_and_matches_hold_apart() -> None:
    both = Selector(include=(Match(roles=("value", "head"), layers=(0,)),))
    either = Selector(include=(Match(roles=("head",)), Match(layers=(0,), names=("*mlp*",))))
    assert [b.role for b in both.resolve(TABLE)] == ["value"]
    assert [b.role for b in either.resolve(TABLE)] == ["mlp", "head"]


@pytest.mark.parametrize(
    "selector",
    [
        roles("prompt"),
        all_but("prompt"),
        named(["layer.9.*"]),
        Selector(include=(Match(), Match(layers=(7,)))),
        Selector(include=(Match(roles=("head",), layers=(0,)),)),
    ],
)
def test_a_condition_that_no_block_meets_is_an_error(selector: Selector) -> None:
    with pytest.raises(SelectorError, match=r"the model has the roles head, key, mlp, .* and the layers 0 to 0"):
        selector.resolve(TABLE)


def test_names_match_by_case() -> None:
    with pytest.raises(SelectorError):
        named(["LAYER.*"]).resolve(TABLE)


# ---------------------------------------------------------------- tables


def test_a_table_that_covers_each_tensor_once_is_accepted() -> None:
    check_table(TABLE)
    check_table([block("w", "b", (2, 5)), block("w", "a", (0, 2)), block("v")])


@pytest.mark.parametrize(
    "blocks",
    [
        [block("w"), block("w")],
        [block("w"), block("w", "a")],
        [block("w", "a", (0, 2)), block("w", "b", (1, 3))],
        [block("w", "a", (0, 2)), block("w", "b", (3, 4))],
        [block("w", "a", (1, 3)), block("w", "b", (3, 4))],
        [block("w", "a", (0, 2)), block("w", "a", (2, 4))],
        [block("w", "a", (0, 2)), block("w", "b", (2, 4), dtype="F16")],
        [block("w", "a", (0, 2)), block("w", "b", (2, 4), shape=(2, 4))],
        [block("w", "a", (0, 2)), block("w", "b", (2, 4), part=TensorSlice(label="b", axis=1, spans=((2, 5),)))],
    ],
)
def test_a_table_that_does_not_is_refused_and_the_tensor_is_named(blocks: list[Block]) -> None:
    with pytest.raises(ValueError, match=r"^w: "):
        check_table([*blocks, block("fine")])


def test_every_fault_of_a_table_is_named_at_once() -> None:
    with pytest.raises(ValueError, match=r"a: .*; b: "):
        check_table([block("b"), block("b"), block("a"), block("a")])


def test_exact_names_of_a_selector_are_looked_up_and_not_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    def compared(name: str, pattern: str) -> bool:
        raise AssertionError(pattern)

    monkeypatch.setattr("tessera.shared.model.selectors.fnmatchcase", compared)
    table = tuple(Block(tensor=f"t{number}", role="head", shape=(1,), dtype="F32") for number in range(2000))
    chosen = Selector(include=(Match(names=tuple(block.name for block in table[::2])),)).resolve(table)
    assert chosen == table[::2]


def test_a_selector_has_few_names_with_wildcards() -> None:
    Selector(include=(Match(names=("a*",) * 256),))
    with pytest.raises(ValueError, match="at most 256 names with wildcards"):
        Selector(include=(Match(names=("a*",) * 200),), exclude=(Match(names=("[ab]",) * 57),))
