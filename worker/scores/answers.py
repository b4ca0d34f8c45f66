"""Scores of a language model's answers: the choices of a question, and generated texts."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from inspect import signature
from typing import Any

import structlog
import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from transformers import GenerationConfig, PreTrainedModel, StoppingCriteria

from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.model.dataset_schema import IDS
from tessera.shared.schema import CHOICE_ACCURACY, EXACT_MATCH, ROUGE_L
from tessera.worker.data.dataset import LABELS, Choices, Dataset
from tessera.worker.data.readers.tokens import MASK
from tessera.worker.errors import is_machine_failure
from tessera.worker.model.forward import IGNORED, uncompiled
from tessera.worker.model.prompts import token_embedding
from tessera.worker.scores.text_overlap import is_same, rouge_l
from tessera.worker.training.progress import Check
from tessera.worker.training.ranks import Ranks
from tessera.worker.training.tallies import ExampleFigures, Range

AT_ONCE = 8
"""Number of answers to generate together."""
SHARE = (0.0, 1.0)


@dataclass(frozen=True)
class AnswerScorer:
    """The scores of a model's answers to a data set's examples."""

    model: PreTrainedModel
    dataset: Dataset
    max_new_tokens: int = 0
    """The most tokens of a generated answer; 0 generates none."""
    positions: int | None = None
    """The most tokens that the model takes; None for any number."""
    alone: bool = False
    """True to let no example change another's result, nor the time that it takes."""
    between_tokens: Check = lambda: None
    """Called after each generated token, where it may raise what ends the task."""

    @property
    def ranges(self) -> dict[str, Range]:
        """The ranges of an example's value in each figure."""
        generates = self.max_new_tokens and self.dataset.tokenizer
        return ({CHOICE_ACCURACY: SHARE} if self.dataset.choices else {}) | (
            {EXACT_MATCH: SHARE, ROUGE_L: SHARE} if generates else {}
        )

    def add_to(self, figures: ExampleFigures, check: Check, ranks: Ranks) -> None:
        """Add the scores of this rank's examples. An example that the model cannot answer counts as wrong, unless the
        machine failed. Raises UnsupportedRun for a model that can answer none, which depends on no example."""
        self.model.train(mode=False)
        # Without a mask, a model would read padding.
        together = 1 if self.alone or MASK not in self.dataset.inputs else AT_ONCE
        with torch.inference_mode(), uncompiled(self.model), _plain_generation(self.model), _unwrapped():
            self._rehearse()
            for rows in ranks.share_of(self.dataset).order(together * ranks.size):
                places = rows.tolist()
                for _ in places:
                    check()
                if places and not self._added(places, figures):
                    for place in places if len(places) > 1 else ():
                        self._added([place], figures)

    def _rehearse(self) -> None:
        """Answer a question of one token. Raises UnsupportedRun."""
        try:
            log_likelihoods(self.model, [0], Choices(0, 1, ((0,), (0, 0))), masks=MASK in self.dataset.inputs)
            if ROUGE_L in self.ranges:
                self._generated([[0]], [], 1)
        except Exception as fault:
            if is_machine_failure(fault) or isinstance(fault, _TaskEnded):
                raise
            said = f"{type(fault).__name__}: {fault}"
            raise UnsupportedRun(f"the model cannot answer questions: {said}: leave out the evaluation") from fault

    def _added(self, places: list[int], figures: ExampleFigures) -> bool:
        """Add the scores of some examples, all or none. Return False if the model cannot answer one."""
        try:
            found = self._scores(places)
        except Exception as fault:
            if is_machine_failure(fault) or isinstance(fault, _TaskEnded):
                raise
            structlog.get_logger("worker").warning("answer-not-scored", examples=len(places), exc_info=fault)
            return False
        for name, values in found.items():
            figures.add(name, torch.tensor(values, dtype=torch.float64))
        return True

    def _scores(self, places: list[int]) -> dict[str, list[float]]:
        rows = self.dataset.read(torch.tensor(places, dtype=torch.int64))
        found: dict[str, list[float]] = {name: [] for name in self.ranges}
        for ids, place in zip(rows[IDS].tolist(), places, strict=True):
            if self.dataset.choices:
                found[CHOICE_ACCURACY].append(self._is_right(ids, self.dataset.choices[place]))
        if ROUGE_L in found:
            for made, right in self._texts(rows[IDS], rows[LABELS]):
                found[EXACT_MATCH].append(is_same(made, right))
                found[ROUGE_L].append(rouge_l(made, right))
        return found

    def _is_right(self, ids: list[int], choices: Choices) -> bool:
        limit = self.dataset.padding.width if self.dataset.padding else len(ids)
        before = _cut(ids[: choices.shared], limit - max(map(len, choices.answers)))
        found = log_likelihoods(self.model, before, choices, masks=MASK in self.dataset.inputs)
        # Equal ones would make the first place right.
        return bool((found < found[choices.right]).sum() == len(found) - 1)

    def _texts(self, ids: Tensor, labels: Tensor) -> Iterator[tuple[str, str]]:
        """Yield the text that the model generates in place of the last answer of each row, and that answer."""
        tokenizer = self.dataset.tokenizer
        assert tokenizer is not None  # noqa: S101  (as `ranges` requires)
        control = tokenizer.get_added_tokens_decoder().keys()
        said = self.model.config.eos_token_id
        ends = {*(said if isinstance(said, list) else [said])} - {None}
        room = (self.positions or ids.shape[1] + self.max_new_tokens) - self.max_new_tokens
        before, answers = list[list[int]](), list[list[int]]()
        for row, scored in zip(ids.tolist(), (labels != IGNORED).tolist(), strict=True):
            end = len(scored) - scored[::-1].index(True)
            begin = next(place + 1 for place in range(end - 1, -1, -1) if not scored[place])
            before.append(_cut(row[:begin], room))
            answers.append(row[begin:end])
            # The token that ends the turn is scored too.
            ends |= {row[end - 1]} & control
        made_of_each = self._generated(before, sorted(ends), self.max_new_tokens)
        for made, right in zip(made_of_each, answers, strict=True):
            yield tuple(tokenizer.decode(_until(tokens, ends), skip_special_tokens=True) for tokens in (made, right))  # type: ignore[misc]

    def _generated(self, before: list[list[int]], ends: list[int], most: int) -> list[list[int]]:
        """Return the likeliest tokens after others, one at a time, at most `most`, up to one of the `ends`."""
        # Padding on the left: a model continues the last place.
        ids = pad_sequence([torch.tensor(row[::-1]) for row in before], batch_first=True).flip(1)
        if int(ids.max()) >= token_embedding(self.model).num_embeddings:
            raise ValueError("the model has no embedding for a token")
        widths = torch.tensor(list(map(len, before)))[:, None]
        mask = (torch.arange(ids.shape[1]) >= ids.shape[1] - widths).long()
        config = GenerationConfig(  # type: ignore[no-untyped-call]
            do_sample=False,
            num_beams=1,
            max_new_tokens=most,
            pad_token_id=0,
            eos_token_id=None if self.alone else ends or None,
        )
        device = self.model.device
        # Without one, `generate` would take tokens with the number of its padding for padding.
        given: dict[str, Any] = {MASK: mask.to(device)} if MASK in signature(self.model.forward).parameters else {}
        given["stopping_criteria"] = [_Check(self.between_tokens)]
        made = self.model.generate(ids.to(device), generation_config=config, **given)  # type: ignore[operator]
        tokens: list[list[int]] = made[:, ids.shape[1] :].tolist()
        return tokens


class _TaskEnded(Exception):
    """Its cause ended the task: the model has not failed at an example."""


@contextmanager
def _unwrapped() -> Iterator[None]:
    """Raise what ended the task, where the block raises `_TaskEnded`."""
    try:
        yield
    except _TaskEnded as ended:
        raise (ended.__cause__ or ended) from None


class _Check(StoppingCriteria):
    """Ends no text, but perhaps the task."""

    def __init__(self, check: Check) -> None:
        self._check = check

    def __call__(self, input_ids: Tensor, scores: Tensor, **_: object) -> Tensor:
        try:
            self._check()
        except Exception as fault:
            raise _TaskEnded from fault
        return torch.zeros(len(input_ids), dtype=torch.bool, device=input_ids.device)


@contextmanager
def _plain_generation(model: PreTrainedModel) -> Iterator[None]:
    """Leave out the settings of generation that a model brings, such as a temperature or a penalty."""
    before, model.generation_config = model.generation_config, GenerationConfig()  # type: ignore[no-untyped-call]
    try:
        yield
    finally:
        model.generation_config = before


def _until(tokens: list[int], ends: set[int]) -> list[int]:
    return tokens[: next((place for place, token in enumerate(tokens) if token in ends), None)]


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
