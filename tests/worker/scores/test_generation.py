"""Answers that a language model generates: greedy, of a bounded length, up to the token that ends the turn."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoTokenizer, GenerationConfig

from tessera.shared.api.cohort import Cohort
from tessera.shared.api.runs import Evaluation, Training
from tessera.shared.methods.base import UnsupportedRun
from tessera.shared.problems import Invalid
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.registry import load
from tessera.worker.model.build import instantiate
from tessera.worker.scores.answers import AnswerScorer
from tessera.worker.scores.text_overlap import rouge_l
from tests.support.chat_templates import ENDS, TEMPLATES, chat_tokenizer
from tests.support.coordinator import LiveCoordinator
from tests.support.federation import start_run
from tests.support.tasks import untrained
from tests.worker.scores.test_answers import LLAMA, scores

WIDE = {**LLAMA, "hidden_size": 64, "intermediate_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4}
GPT2 = {"model_type": "gpt2", "vocab_size": 400, "n_embd": 16, "n_layer": 1, "n_head": 2, "n_positions": 64}
PAIRS = [("the dose?", "100 mg a day"), ("a day?", "yes"), ("thank you", "thank you, doctor"), ("what?", "no")]


def chats(folder: Path, name: str = "chatml", **options: Any) -> Dataset:
    rows = [json.dumps({"instruction": asked, "output": answer}) for asked, answer in PAIRS]
    (folder / "chats.jsonl").write_text("\n".join(rows))
    tokenizer = chat_tokenizer(folder / "tokenizer", TEMPLATES[name])
    given = {"file": str(folder / "chats.jsonl"), "tokenizer": str(tokenizer), "max_length": 60}
    return load("chat", {**given, **options})


def taught(dataset: Dataset, steps: int = 120) -> Any:
    """A model that knows the answers by heart."""
    model = instantiate(WIDE, "causal-lm", seed=0)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for _ in range(steps):
        optimizer.zero_grad()
        model(**dataset.tensors).loss.backward()
        optimizer.step()
    return model.eval()


def greedy(model: Any, dataset: Dataset, folder: Path, end: str, most: int) -> list[str]:
    """The answers, by whole passes over all tokens so far."""
    tokenizer = AutoTokenizer.from_pretrained(folder / "tokenizer")
    ending, found = tokenizer.convert_tokens_to_ids(end), []
    for ids, labels in zip(dataset.tensors["input_ids"], dataset.tensors["labels"], strict=True):
        tokens = ids[: int((labels >= 0).nonzero()[0])].tolist()
        made: list[int] = []
        while len(made) < most:
            with torch.no_grad():
                token = int(model(input_ids=torch.tensor([tokens + made])).logits[0, -1].argmax())
            if token in (ending, model.config.eos_token_id):
                break
            made.append(token)
        found.append(tokenizer.decode(made, skip_special_tokens=True))
    return found


@pytest.mark.parametrize("name", TEMPLATES)
def test_a_model_that_knows_the_answers_ends_them_where_the_turn_ends(tmp_path: Path, name: str) -> None:
    dataset = chats(tmp_path, name)
    model = taught(dataset)
    expected = greedy(model, dataset, tmp_path, ENDS[name], 40)
    assert [text.strip() for text in expected] == [answer for _, answer in PAIRS]
    for alone in (True, False):
        found = scores(dataset, model, max_new_tokens=40, alone=alone)
        assert found == {"exact_match": 1.0, "rouge_l": 1.0}


def test_figures_are_those_of_a_plain_greedy_loop(tmp_path: Path) -> None:
    dataset = chats(tmp_path)
    model = taught(dataset, steps=15)
    # Settings of generation that a model brings change nothing.
    model.generation_config = brought = GenerationConfig(do_sample=True, temperature=5.0, repetition_penalty=3.0)
    made = greedy(model, dataset, tmp_path, ENDS["chatml"], 5)
    expected = [rouge_l(text, answer) for text, (_, answer) in zip(made, PAIRS, strict=True)]
    found = scores(dataset, model, max_new_tokens=5)
    assert found["rouge_l"] == pytest.approx(sum(expected) / 4)
    assert (
        found["exact_match"] == sum(text.strip() == answer for text, (_, answer) in zip(made, PAIRS, strict=True)) / 4
    )
    assert model.generation_config is brought


def test_an_answer_longer_than_the_limit_is_cut_off(tmp_path: Path) -> None:
    dataset = chats(tmp_path)
    model = taught(dataset)
    # Of "yes" and "no" too the first tokens alone.
    found = scores(dataset, model, max_new_tokens=1)
    assert found["exact_match"] < 1.0
    # 60 tokens of a chat and 100 new ones are more than the model takes: the question loses its beginning.
    assert 0.0 <= scores(dataset, model, max_new_tokens=100, positions=128)["exact_match"] <= 1.0


def test_an_example_that_the_model_cannot_answer_counts_as_wrong_and_fails_no_other(tmp_path: Path) -> None:
    dataset = chats(tmp_path)
    model = taught(dataset)
    ids = dataset.tensors["input_ids"].clone()
    ids[1, 0] = WIDE["vocab_size"]
    broken = replace(dataset, tensors={**dataset.tensors, "input_ids": ids})
    assert scores(broken, model, max_new_tokens=40) == {"exact_match": 0.75, "rouge_l": 0.75}


def test_a_model_that_can_answer_no_question_is_refused_rather_than_scored(tmp_path: Path) -> None:
    dataset = chats(tmp_path)
    model = taught(dataset, steps=1)
    # Such a layer is in every pass through the model.
    model.lm_head = torch.nn.Linear(3, 400)
    with pytest.raises(UnsupportedRun, match="the model cannot answer questions: RuntimeError"):
        scores(dataset, model, max_new_tokens=4)


def test_a_token_with_the_number_of_padding_is_read_without_a_mask_too(tmp_path: Path) -> None:
    dataset = chats(tmp_path)
    model = instantiate(WIDE, "causal-lm", seed=0).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.ndim > 1:
                # Each token changes those after it.
                parameter.mul_(20)
    question = [0, 5, 6, 0, 7]
    tokens = list(question)
    for _ in range(8):
        with torch.no_grad():
            tokens.append(int(model(input_ids=torch.tensor([tokens])).logits[0, -1].argmax()))
    unmasked = replace(dataset, tensors={n: t for n, t in dataset.tensors.items() if n != "attention_mask"})
    for given in (dataset, unmasked):
        assert AnswerScorer(model, given)._generated([question], [], 8) == [tokens[5:]]


def test_nothing_is_generated_unless_a_run_asks_for_it(tmp_path: Path) -> None:
    assert scores(chats(tmp_path), taught(chats(tmp_path), steps=1)) == {}
    # With every token scored, the labels do not show where answers begin.
    assert scores(chats(tmp_path, loss_on="all"), taught(chats(tmp_path), steps=1), max_new_tokens=4) == {}


@pytest.mark.parametrize(("config", "head", "most", "said"), [
    (GPT2, "causal-lm", 64, "leaves no room for a question: the model takes 64 tokens"),
    (LLAMA, "text-classification", 4, "is for language models, and the head is text-classification"),
])  # fmt: skip
def test_a_run_that_cannot_generate_is_refused(
    coordinator: LiveCoordinator, config: dict[str, Any], head: Any, most: int, said: str
) -> None:
    document, start = untrained(config, head)
    with pytest.raises(Invalid) as refused:
        start_run(
            coordinator.client(), document, start, dataset="asked", rounds=1, cohort=Cohort(size=1, quorum=1),
            training=Training(), evaluation=Evaluation(sites=True, max_new_tokens=most),
        )  # fmt: skip
    assert said in str(refused.value.errors)
