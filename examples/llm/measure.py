"""Evaluation of a folder's language model: with transformers alone, or as sites with a base in 4 bits trained it."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import NamedTuple

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM

from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.model.build import load
from tessera.worker.model.forward import IGNORED
from tessera.worker.model.four_bits import four_bit_tensors, put_four_bits

AT_ONCE = 16


class AnswerScores(NamedTuple):
    right: float
    """The share of answers that are right to the last token, as greedy decoding would write them."""
    loss: float
    """The mean cross-entropy of the answers' tokens."""


def measure(folder: Path, inputs: Mapping[str, Mapping[str, Tensor]]) -> dict[str, AnswerScores]:
    """Return a folder's scores on encoded texts, by their names."""
    return _measure(AutoModelForCausalLM.from_pretrained(folder, local_files_only=True), inputs)


def measure_in_four_bits(folder: Path, inputs: Mapping[str, Mapping[str, Tensor]]) -> dict[str, AnswerScores]:
    """Return the scores of an exported model whose adapters stay beside its base, which is put into 4 bits."""
    found = ModelFolder.open(folder)
    model = load(found)
    put_four_bits(model, four_bit_tensors(found.model), fill=True)
    return _measure(model, inputs)


def _measure(model: torch.nn.Module, inputs: Mapping[str, Mapping[str, Tensor]]) -> dict[str, AnswerScores]:
    model.eval()
    with torch.inference_mode():
        return {name: _scores(model, encoded) for name, encoded in inputs.items()}


def _scores(model: torch.nn.Module, encoded: Mapping[str, Tensor]) -> AnswerScores:
    right = loss = 0.0
    for first in range(0, len(encoded["labels"]), AT_ONCE):
        batch = {name: tensor[first : first + AT_ONCE] for name, tensor in encoded.items()}
        labels = batch.pop("labels")[:, 1:]  # [texts, tokens]
        logits = model(**batch).logits[:, :-1].float()  # [texts, tokens, words]
        # Greedy decoding writes an answer exactly if each of its tokens is the likeliest after those before it.
        right += int(((logits.argmax(dim=-1) == labels) | (labels == IGNORED)).all(dim=1).sum())
        loss += float(torch.nn.functional.cross_entropy(logits.transpose(1, 2), labels, reduction="sum"))
    answers = int((encoded["labels"][:, 1:] != IGNORED).sum())
    return AnswerScores(right / len(encoded["labels"]), loss / answers)
