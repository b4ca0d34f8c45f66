"""An error of a library becomes an input mismatch only where that says nothing of an example."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tessera.shared.methods.base import Plan, UnsupportedRun
from tessera.shared.model.spec import Model
from tessera.worker.data.dataset import Dataset, Padding, schema_of
from tessera.worker.errors import InputMismatch
from tessera.worker.model.block_map import block_table
from tessera.worker.model.build import instantiate
from tessera.worker.task.fetch import require_fit
from tessera.worker.training.context import LocalTaskContext
from tessera.worker.training.input_mismatch import explained

SECRET = 31
BERT = {
    "model_type": "bert", "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "intermediate_size": 16, "vocab_size": 20, "max_position_embeddings": 12,
}  # fmt: skip


def texts(width: int, word: int, longest: int = 16) -> Dataset:
    """Two texts of up to `width` tokens where the settings allow `longest`."""
    tensors = {"input_ids": torch.full((2, width), word), "labels": torch.tensor([0, 1])}
    schema = schema_of(tensors, {"input_ids": (longest,), "labels": ()})
    return Dataset(tensors, padding=Padding(longest, {"input_ids": 0}), schema=schema)


def failure(data: Dataset, *, private: bool, fault: Exception | None = None) -> Exception:
    model = instantiate(BERT, "text-classification")
    context = LocalTaskContext(model, "text-classification", Plan(), block_table(model))
    document = Model(config=BERT, head="text-classification", blocks=tuple(context.blocks))
    with pytest.raises(Exception) as raised, explained(document, context, data, private=private):  # noqa: PT011, PT012
        if fault:
            raise fault
        context.forward(data.tensors)
    return raised.value


LACKS = "the data set has tokens or labels that the model lacks. The model is a bert for text-classification, max_"
ASSERTED, FAULTY = map(torch.AcceleratorError, ("CUDA error: device-side assert triggered", "CUDA error: unknown"))
NO_OUTPUT = (
    "the model gives no output for a synthetic example of the data set (input_ids int64 [16], labels int64 [])"
    ": max_length 16 is more than the 12 tokens that the model takes: set it to 12 or less. The model is a bert"
)


@pytest.mark.parametrize(
    ("data", "private", "fault", "kind", "said"),
    [
        pytest.param(texts(14, 5), False, None, InputMismatch, NO_OUTPUT, id="too long"),
        pytest.param(texts(8, SECRET), False, None, InputMismatch, LACKS, id="unknown word"),
        pytest.param(texts(8, SECRET, 8), True, None, IndexError, "index out of range", id="unknown word, private"),
        pytest.param(texts(8, 5), True, ValueError("x"), InputMismatch, NO_OUTPUT, id="longest too long, private"),
        pytest.param(texts(8, 5), False, ValueError("x"), ValueError, "x", id="another error"),
        pytest.param(texts(8, 5), False, ASSERTED, InputMismatch, "the GPU stopped at", id="unknown word, on a GPU"),
        pytest.param(texts(8, 5), True, ASSERTED, type(ASSERTED), "CUDA error", id="unknown word, on a GPU, private"),
        pytest.param(texts(14, 5), False, FAULTY, type(FAULTY), "CUDA error", id="a faulty GPU"),
        pytest.param(texts(14, 5), False, UnsupportedRun("x"), UnsupportedRun, "x", id="our own error"),
    ],
)
def test_what_fails_on_a_synthetic_example_is_told_by_what_the_settings_fix(
    data: Dataset, fault: Exception | None, kind: type[Exception], said: str, *, private: bool
) -> None:
    found = failure(data, private=private, fault=fault)
    assert type(found) is kind
    assert str(found).startswith(said)
    assert str(SECRET) not in str(found)
    assert "14" not in str(found)


def test_the_cause_of_a_failure_on_a_synthetic_example_is_told() -> None:
    tensors = texts(8, 5, 8).tensors
    tensors = {**tensors, "token_type_ids": torch.zeros(2, 8)}
    shapes: dict[str, Any] = {"input_ids": (8,), "labels": (), "token_type_ids": (8,)}
    declared, open_shape = (schema_of(tensors, {**shapes, "token_type_ids": shape}) for shape in ((8,), None))
    told = str(failure(Dataset(tensors, schema=declared), private=False))
    assert "token_type_ids float32 [8]): RuntimeError: Expected tensor for argument #1 'indices'" in told
    assert "RuntimeError" not in str(failure(Dataset(tensors, schema=open_shape), private=False))


@pytest.mark.parametrize("padded", [True, False])
def test_a_task_is_refused_before_data_are_read_if_its_settings_show_the_mismatch(*, padded: bool) -> None:
    model = instantiate(BERT, "text-classification")
    document = Model(config=BERT, head="text-classification", blocks=block_table(model))
    said: Any = (
        "the data set 'notes' does not fit the model: max_length 16 is more than the 12 tokens that the model takes"
    )
    if padded:
        with pytest.raises(InputMismatch, match=said):
            require_fit(document, "notes", texts(8, 5).schema, padded=True)
    else:
        require_fit(document, "notes", texts(8, 5).schema, padded=False)
