"""Scores of a language model's answers to single examples."""

from __future__ import annotations

from collections.abc import Sequence
from inspect import signature

import structlog
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import PreTrainedModel

from tessera.shared.model.dataset_schema import IDS
from tessera.shared.schema import CHOICE_ACCURACY
from tessera.worker.data.dataset import Choices, Dataset
from tessera.worker.data.readers.tokens import MASK
from tessera.worker.errors import is_device_failure
from tessera.worker.model.prompts import token_embedding
from tessera.worker.scores.example_figures import ExampleFigures
from tessera.worker.training.optimization.compilation import uncompiled
from tessera.worker.training.progress import Check
from tessera.worker.training.ranks import Ranks


def answer_figures(dataset: Dataset) -> dict[str, tuple[float, float]]:
    """Return the ranges of an example's values in the figures that this module makes of a data set."""
    return {CHOICE_ACCURACY: (0.0, 1.0)} if dataset.choices else {}


def add_answers(
    model: PreTrainedModel, dataset: Dataset, figures: ExampleFigures, check: Check, ranks: Ranks
) -> None:
    """Add the scores of this rank's examples, one after another, so that none changes another's.

    An example that the model cannot answer counts as wrong, unless the machine failed.
    """
    model.train(mode=False)
    with torch.inference_mode(), uncompiled(model):
        for rows in ranks.share_of(dataset).order(ranks.size):
            for place in rows.tolist():
                check()
                try:
                    _add_answer(model, dataset, place, figures)
                except Exception as fault:
                    if isinstance(fault, torch.OutOfMemoryError | MemoryError) or is_device_failure(fault):
                        raise
                    structlog.get_logger("worker").warning("answer-not-scored", exc_info=fault)


def _add_answer(model: PreTrainedModel, dataset: Dataset, place: int, figures: ExampleFigures) -> None:
    row = dataset.read(torch.tensor([place]))
    if dataset.choices:
        choices = dataset.choices[place]
        before = row[IDS][0, : choices.shared].tolist()
        limit = dataset.padding.width if dataset.padding else row[IDS].shape[1]
        found = log_likelihoods(
            model, _cut(before, limit - max(map(len, choices.answers))), choices, masks=MASK in row
        )
        # Equal ones would make the first place right.
        is_right = bool((found < found[choices.right]).sum() == len(found) - 1)
        figures.add(CHOICE_ACCURACY, torch.tensor([float(is_right)]))


def _cut(tokens: list[int], most: int) -> list[int]:
    """Return the first token and the last ones, at most `most` together."""
    return tokens if len(tokens) <= most else [*tokens[:1], *tokens[len(tokens) - most + 1 :]][:most]


def log_likelihoods(model: PreTrainedModel, before: Sequence[int], choices: Choices, *, masks: bool = True) -> Tensor:
    """Return the log-likelihood of each answer after the tokens before it, float64 [answers]: the sum over its
    tokens, as for PubMedQA and MedQA in the Language Model Evaluation Harness.

    Without tokens before it, an answer's first token counts for nothing, as nothing predicts it. Raises ValueError
    for a token that the model does not have.
    """
    rows = [torch.tensor([*before, *answer]) for answer in choices.answers]
    ids = pad_sequence(rows, batch_first=True)  # [answers, tokens]
    if int(ids.max()) >= token_embedding(model).num_embeddings:
        raise ValueError("the model has no embedding for a token")
    lengths = torch.tensor(list(map(len, rows)))[:, None]
    at = torch.arange(ids.shape[1])
    inputs = {IDS: ids.to(model.device)} | ({MASK: (at < lengths).long().to(model.device)} if masks else {})
    first = max(len(before), 1)
    last = ids.shape[1] - first + 1
    # Of a vocabulary of 150,000, the logits of a long question would take gigabytes.
    options = {"use_cache": False, "logits_to_keep": last}
    known = signature(model.forward).parameters
    output = model(**inputs, **{name: value for name, value in options.items() if name in known})
    logits = output.logits[:, -last:-1]  # [answers, tokens, vocabulary]
    found = logits.float().log_softmax(dim=-1).gather(2, inputs[IDS][:, first:, None])[..., 0].double().cpu()
    return torch.where(at[first:] < lengths, found, 0.0).sum(dim=1)
