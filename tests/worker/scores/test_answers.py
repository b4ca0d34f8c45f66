"""Answers of a language model: which of a question's choices it finds most likely."""

from __future__ import annotations

import json
from itertools import count
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer

from tessera.shared.privacy.noise import NoiseSource
from tessera.worker.data.dataset import Choices, Dataset
from tessera.worker.data.registry import load
from tessera.worker.errors import DataError
from tessera.worker.model.build import instantiate
from tessera.worker.privacy.bounded_figures import BoundedSums
from tessera.worker.privacy.bounded_numbers import FigureNoise
from tessera.worker.scores.answers import AnswerScorer, log_likelihoods
from tessera.worker.task.heartbeat import Stopped
from tessera.worker.training.ranks import OneRank
from tessera.worker.training.tallies import ExampleFigures
from tests.support.chat_templates import CHATML, TEMPLATES, chat_tokenizer

LLAMA = {
    "model_type": "llama", "vocab_size": 400, "hidden_size": 16, "num_hidden_layers": 1, "num_attention_heads": 2,
    "num_key_value_heads": 1, "intermediate_size": 16, "max_position_embeddings": 128,
}  # fmt: skip
TEXTS = ["yes", "no", "the dose is 100 mg a day, doctor"]
ROWS = [
    {"question": "the dose?", "choices": TEXTS, "answer": 2},
    {
        "question": [{"role": "user", "content": "a day?"}],
        "choices": {"A": "yes", "B": "no", "C": None},
        "answer": "B",
    },
    {"question": "what is it?", "choices": json.dumps(TEXTS), "answer": "yes"},
]


def opened(folder: Path, *rows: dict[str, Any], template: str = CHATML, **options: Any) -> Dataset:
    (folder / "asked.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tokenizer = chat_tokenizer(folder / "tokenizer", template)
    return load("chat", {"file": str(folder / "asked.jsonl"), "tokenizer": str(tokenizer), **options})


def shown(folder: Path, tokens: list[int]) -> str:
    return str(AutoTokenizer.from_pretrained(folder / "tokenizer").decode(tokens))


@pytest.mark.parametrize("name", TEMPLATES)
def test_each_choice_follows_the_question_as_the_template_writes_it(tmp_path: Path, name: str) -> None:
    dataset = opened(tmp_path, *ROWS, template=TEMPLATES[name], max_length=120)
    assert dataset.choices is not None
    assert [each.right for each in dataset.choices] == [2, 1, 0]
    assert [len(each.answers) for each in dataset.choices] == [3, 2, 3]
    for ids, labels, choices in zip(
        *(dataset.tensors[n] for n in ("input_ids", "labels")), dataset.choices, strict=True
    ):
        # Without what the template writes after the turn, such as a line break: training does not score it.
        scored = ids[: int((labels >= 0).nonzero().max()) + 1].tolist()
        assert scored == [*scored[: choices.shared], *choices.answers[choices.right]]
    first = dataset.choices[0]
    # A token may have the last characters of the question too.
    ends = [shown(tmp_path, list(tokens)).strip() for tokens in first.answers]
    assert all(text in end for text, end in zip(TEXTS, ends, strict=True))
    assert len({end.replace(text, "") for text, end in zip(TEXTS, ends, strict=True)}) == 1


def test_the_likelihood_of_an_answer_is_that_of_its_tokens_after_the_question() -> None:
    model, before = instantiate(LLAMA, "causal-lm", seed=0).eval(), [5, 6, 7]
    choices = Choices(0, 3, ((8, 9, 10, 11), (12,), (13, 14)))
    expected = []
    for answer in choices.answers:
        with torch.no_grad():
            scores = model(input_ids=torch.tensor([[*before, *answer]])).logits[0].log_softmax(dim=-1)
        expected.append(sum(float(scores[2 + place, token]) for place, token in enumerate(answer)))
    with torch.no_grad():
        for masks in (True, False):
            assert log_likelihoods(model, before, choices, masks=masks).tolist() == pytest.approx(expected, abs=1e-5)
    with pytest.raises(ValueError, match="no embedding"):
        log_likelihoods(model, before, Choices(0, 3, ((8,), (400,))))


def scores(dataset: Dataset, model: Any, **settings: Any) -> dict[str, float]:
    answers = AnswerScorer(model, dataset, **settings)
    figures = ExampleFigures(answers.ranges)
    answers.add_to(figures, lambda: None, OneRank())
    return figures.means(dataset.examples, figures.sums())


@pytest.mark.parametrize("last", [0, 4], ids=["rehearsed", "answering"])
def test_a_task_that_is_not_wanted_any_more_ends_between_two_tokens(tmp_path: Path, last: int) -> None:
    rows = [{"instruction": "what?", "output": "no"}] * 3
    model, made = instantiate(LLAMA, "causal-lm", seed=3), count()

    def check() -> None:
        # The rehearsal makes one token.
        if next(made) == last:
            raise Stopped

    answers = AnswerScorer(model, opened(tmp_path, *rows), max_new_tokens=64, alone=True, between_tokens=check)
    with pytest.raises(Stopped):
        answers.add_to(ExampleFigures(answers.ranges), lambda: None, OneRank())
    assert next(made) == last + 1


def accuracy(dataset: Dataset, model: Any) -> float:
    return scores(dataset, model)["choice_accuracy"]


@pytest.mark.parametrize("side", ["left", "right"])
def test_the_accuracy_is_the_share_of_questions_whose_right_answer_is_likeliest(tmp_path: Path, side: str) -> None:
    model = instantiate(LLAMA, "causal-lm", seed=3).eval()
    rows = [{"question": f"what is {n}?", "choices": TEXTS[:2], "answer": n % 2} for n in range(12)]
    dataset = opened(tmp_path, *rows, max_length=120, truncation_side=side)
    assert dataset.choices is not None
    right = 0
    for ids, choices in zip(dataset.tensors["input_ids"].tolist(), dataset.choices, strict=True):
        with torch.no_grad():
            found = log_likelihoods(model, ids[: choices.shared], choices)
        right += int(found.argmax()) == choices.right
    assert 0 < right < 12
    assert accuracy(dataset, model) == right / 12
    # Equal likelihoods do not make the first choice right.
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    same = opened(tmp_path, {"question": "a", "choices": ["yes", "yas"], "answer": 0}, max_length=120)
    assert accuracy(same, model) == 0.0


def test_a_long_question_loses_its_beginning_and_keeps_its_choices(tmp_path: Path) -> None:
    model = instantiate(LLAMA, "causal-lm", seed=3).eval()
    row = {"question": "the dose? " * 30, "choices": TEXTS, "answer": 0}
    dataset = opened(tmp_path, row, {**row, "answer": 1}, {**row, "answer": 2}, max_length=48, truncation_side="left")
    assert dataset.choices is not None
    # The likeliest one is right once.
    assert accuracy(dataset, model) == pytest.approx(1 / 3)
    (choices, *_), ids = dataset.choices, dataset.tensors["input_ids"][0].tolist()
    room = 48 - max(map(len, choices.answers))
    assert choices.shared > room
    before = [ids[0], *ids[choices.shared - room + 1 : choices.shared]]
    with torch.no_grad():
        likeliest = int(log_likelihoods(model, before, choices).argmax())
    assert accuracy(dataset.rows(torch.tensor([likeliest])), model) == 1.0
    short = opened(tmp_path, row, {**row, "choices": TEXTS[:2]}, max_length=8, truncation_side="left")
    # The third choice of the first row has no room.
    assert short.examples == 1
    assert short.report.cut_answers == [0]


def test_a_place_counts_letters_without_an_answer(tmp_path: Path) -> None:
    row = {"question": "a?", "choices": {"A": "yes", "B": None, "C": "no", "D": "maybe"}, "answer": 2}
    dataset = opened(tmp_path, row)
    assert dataset.choices is not None
    (only,) = dataset.choices
    assert (only.right, len(only.answers)) == (1, 3)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"answer": 3}, "row 1 of .* has the right answer '3': give the place"),
        ({"answer": None}, "has the right answer 'None'"),
        ({"answer": "maybe"}, "has the right answer 'maybe'"),
        # The second one by its place, and the first by its letter.
        ({"choices": {"1": "yes", "2": "no"}, "answer": 1}, "has the right answer '1'"),
        ({"choices": {"A": "yes", "B": None, "C": "no"}, "answer": 1}, "has the right answer '1'"),
        ({"choices": ["yes"]}, "has 1 choices; 2 to 26 are read"),
        ({"choices": ["yes", "yes"]}, "has an empty choice, or one twice"),
        ({"choices": ["yes", 3]}, "has int as a choice, not text"),
        ({"choices": "yes or no"}, "has no list of choices"),
        ({"question": [{"role": "assistant", "content": "a"}]}, "has the role assistant in message 0"),
    ],
)
def test_a_question_that_cannot_be_scored_is_refused_with_its_row(
    tmp_path: Path, change: dict[str, Any], said: str
) -> None:
    with pytest.raises(DataError, match=said):
        opened(tmp_path, ROWS[0], {**ROWS[0], **change})


def test_sums_leave_rounded_to_five_times_the_range_of_an_example() -> None:
    figures = ExampleFigures({"right": (0.0, 1.0), "steps": (-2.0, 2.0)})
    figures.add("right", torch.tensor([1.0] * 13 + [0.0] * 17 + [7.0]))
    # One that is not a number counts as the least, and one above the range as the largest.
    figures.add("steps", torch.tensor([0.5] * 29 + [float("nan"), 9.0]))
    assert figures.means(31, figures.sums()) == pytest.approx({"right": 14 / 31, "steps": (29 * 0.5 - 2 + 2) / 31})
    sums = BoundedSums(2)
    sums.own = figures
    sums.add(torch.zeros(31, 2), torch.zeros(31, dtype=torch.int64))
    found = sums.figures(31)
    # 14 is nearest to 15, and of steps 29 * 2.5 + 4 = 76.5 to 80.
    assert found["right"] == pytest.approx(15 / 31)
    assert found["steps"] == pytest.approx(80 / 31 - 2)
    noisy = sums.rounded(31, FigureNoise(1e-4, NoiseSource(bytes(32))))
    assert float(noisy["right"]) not in (10.0, 15.0, 20.0)
    assert float(noisy["right"]) % 5 == 0
