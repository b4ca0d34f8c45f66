"""Pairs of answers from files: which tokens are compared, which pairs are left out, and faults by their row."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from tessera.shared.model.preprocessing import read_files
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.load_report import Truncation
from tessera.worker.data.proposal import propose
from tessera.worker.data.registry import load
from tessera.worker.executor.stages.describe import subject_tables
from tessera.worker.model.sandbox import Sandbox
from tests.support.chat_templates import CHATML, chat_tokenizer
from tests.support.cli import tessera
from tests.worker.data.test_chat import Row, opened, refusal, tokenizer_in, turns, written
from tests.worker.task.test_run_tokenizer import tokens

ASKED, GOOD, BAD = "what is the dose?", "the dose is 100 mg.", "thank you"
IMPLICIT = {"chosen": turns(ASKED, GOOD), "rejected": turns(ASKED, BAD)}


def sides(folder: Path, dataset: Dataset, place: int = 0) -> list[tuple[str, str]]:
    """The rejected and the chosen text of a pair, each with its compared part."""
    ids, mask, answers = (dataset.tensors[name][place] for name in ("input_ids", "attention_mask", "answer_mask"))
    tokenizer = tokenizer_in(folder)
    return [
        (str(tokenizer.decode(row[real == 1])), str(tokenizer.decode(row[marks == 1])))
        for row, real, marks in zip(ids, mask, answers, strict=True)
    ]


@pytest.mark.parametrize(
    "row",
    [
        IMPLICIT,
        {"prompt": turns(ASKED), "chosen": turns(ASKED, GOOD)[1:], "rejected": turns(ASKED, BAD)[1:]},
        # As UltraFeedback has them.
        {**IMPLICIT, "prompt": ASKED},
        {**IMPLICIT, "prompt": turns(ASKED)},
        # As in a CSV file.
        {name: json.dumps(each) for name, each in IMPLICIT.items()},
    ],
    ids=["implicit", "explicit", "both", "both as messages", "json"],
)
def test_a_pair_is_its_rejected_and_its_chosen_text(tmp_path: Path, row: Row) -> None:
    dataset = opened(tmp_path, row)
    begin = f"<|im_start|>user\n{ASKED}<|im_end|>\n<|im_start|>assistant\n"
    expected = [(f"{begin}{text}<|im_end|>\n", f"{text}<|im_end|>") for text in (BAD, GOOD)]
    assert sides(tmp_path, dataset) == expected
    assert dataset.tensors["labels"].tolist() == [1]
    assert dataset.report.shown == (
        f"chosen:\n{begin}[[{GOOD}<|im_end|>]]\n\nrejected:\n{begin}[[{BAD}<|im_end|>]]\n"
    )
    assert dataset.report.sentences() == []


def test_answers_of_a_whole_conversation_are_those_after_the_shared_messages(tmp_path: Path) -> None:
    chosen, rejected = turns(ASKED, GOOD, "a day?", GOOD, BAD, GOOD), turns(ASKED, GOOD, "a day?", BAD)
    (worse, better) = sides(tmp_path, opened(tmp_path, {"chosen": chosen, "rejected": rejected}))
    assert worse[1] == f"{BAD}<|im_end|>"
    assert better[1] == f"{GOOD}<|im_end|>{GOOD}<|im_end|>"


def test_texts_need_no_template_and_other_columns_can_be_named(tmp_path: Path) -> None:
    row = {"question": ASKED, "good": " 100 mg", "bad": " thank you, doctor"}
    named = {"prompt": "question", "chosen": "good", "rejected": "bad"}
    dataset = opened(tmp_path, row, template=None, **named)
    assert sides(tmp_path, dataset) == [
        (f"<s>{ASKED}{text}</s>", f"{text}</s>") for text in (" thank you, doctor", " 100 mg")
    ]


def test_pairs_without_two_answers_that_differ_are_left_out_and_named(tmp_path: Path) -> None:
    empty: list[Row] = [
        {"prompt": turns(ASKED), "chosen": turns("", GOOD)[1:], "rejected": other}
        for other in ([], None, turns("", " ")[1:])
    ]
    same = {"chosen": turns(ASKED, GOOD), "rejected": turns(ASKED, GOOD)}
    dataset = opened(tmp_path, IMPLICIT, *empty, same, {"chosen": turns(ASKED), "rejected": turns(ASKED, BAD)})
    assert dataset.examples == 1
    assert dataset.report.sentences() == [
        "4 examples without an answer left out: rows 1, 2, 3, 5. Fill in the answers, or remove these rows.",
        "1 example with the same answer twice left out: row 4. Correct one of the two, or remove these rows.",
    ]


@pytest.mark.parametrize(("side", "kept"), [("right", [0]), ("left", [0, 1])])
def test_pairs_whose_answers_are_cut_off_are_left_out_and_named(tmp_path: Path, side: str, kept: list[int]) -> None:
    question = "what is the dose of aspirin? " * 4
    rows = [
        IMPLICIT,
        {"chosen": turns(question, GOOD), "rejected": turns(question, BAD)},
        # The last tokens that are kept are the same.
        {"chosen": turns(ASKED, GOOD + question), "rejected": turns(ASKED, BAD + question)}
        if side == "left"
        else {"chosen": turns(ASKED, question + GOOD), "rejected": turns(ASKED, question + BAD)},
    ]
    dataset = opened(tmp_path, *rows, max_length=24, truncation_side=side)
    assert dataset.report.cut_answers == [number for number in range(3) if number not in kept]
    assert dataset.examples == len(kept)


def test_a_run_s_tokenizer_makes_the_tokens_that_it_makes_of_a_site(tmp_path: Path) -> None:
    own = chat_tokenizer(tmp_path / "tokenizer", CHATML)
    file = written(tmp_path, {**IMPLICIT, "rejected": turns(ASKED, GOOD)}, IMPLICIT)
    site, run = (load("chat", {"file": file, "tokenizer": name, "max_length": 48}) for name in (str(own), "run"))
    assert (
        run.report.shown
        == f"chosen:\nuser: {ASKED}\nassistant: [[{GOOD}]]\nrejected:\nuser: {ASKED}\nassistant: [[{BAD}]]"
    )
    # Both declare the same before a run, but for the site's own vocabulary.
    assert run.schema.inputs == site.schema.inputs
    assert run.schema.inputs["input_ids"].shape == (2, 48)
    made = tokens(tmp_path, run, read_files(own), embeddings=400, sandbox=Sandbox())
    assert made.examples == site.examples == 1
    for name in ("input_ids", "attention_mask", "answer_mask", "labels"):
        assert torch.equal(made.tensors[name], site.tensors[name])
    padded = made.padded()
    assert {name: tuple(each.shape) for name, each in padded.tensors.items() if name != "labels"} == dict.fromkeys(
        ("input_ids", "attention_mask", "answer_mask"), (1, 2, 48)
    )
    on_disk = load("chat", {"file": file, "tokenizer": str(own), "max_length": 48, "in_memory": False})
    for name, rows in on_disk.padded().read(torch.tensor([0])).items():
        assert torch.equal(rows, padded.tensors[name])


def test_a_description_counts_the_tokens_of_a_pair_together(tmp_path: Path) -> None:
    dataset = opened(tmp_path, IMPLICIT, {**IMPLICIT, "chosen": turns(ASKED, GOOD * 30)}, max_length=400)
    sizes = dataset.tensors["attention_mask"].sum(dim=(1, 2))
    table = subject_tables(dataset).tables["tokens"]
    assert table.cells.tolist() == sizes.log2().long().tolist()
    assert table.cells[0] < table.cells[1]


def test_words_are_counted_of_each_text_of_a_pair(tmp_path: Path) -> None:
    # Each text has less than 48 words, and both together have more.
    row = {"chosen": turns(ASKED, "dose " * 30), "rejected": turns(ASKED, "thank " * 40)}
    dataset = load("chat", {"file": written(tmp_path, row), "tokenizer": "run", "max_length": 48})
    assert dataset.report.sentences() == []
    assert dataset.report.truncation == Truncation(2, 0, 44, 48)


HUGE = "a" * (10 << 20)


@pytest.mark.parametrize(
    ("row", "said"),
    [
        ({"chosen": turns(HUGE, GOOD), "rejected": turns(HUGE, BAD)}, "characters; 1,048,576 are read"),
        ({"chosen": GOOD, "rejected": HUGE, "prompt": ASKED}, "characters; 1,048,576 are read"),
        ({"chosen": [], "rejected": []}, "has no prompt: fill it in"),
        ({"chosen": GOOD, "rejected": BAD}, "has no prompt: fill it in"),
        ({"chosen": turns(ASKED, GOOD), "rejected": turns(GOOD, BAD)}, "has no message with which both"),
        ({**IMPLICIT, "prompt": "another question"}, "has a prompt with which chosen and rejected do not begin"),
        ({"chosen": turns(ASKED, GOOD), "rejected": [{"role": "user", "content": ASKED}] * 2},
         "where assistant is expected: after at most one system message, user and assistant take turns (column rej"),
        ({"prompt": ASKED, "chosen": turns("", GOOD)[1:], "rejected": BAD}, "(column chosen)"),
        ({"prompt": turns(ASKED), "chosen": [1], "rejected": BAD}, "(column chosen)"),
    ],
)  # fmt: skip
def test_a_row_that_is_no_pair_is_refused_by_its_number(tmp_path: Path, row: Row, said: str) -> None:
    given = {"prompt": None, **IMPLICIT}
    refused = refusal(tmp_path, given, {"prompt": None, **row})
    assert refused.startswith("chosen: row 1 of ")
    assert said in refused


@pytest.mark.parametrize("more", [{"pack": True}, {"loss_on": "all"}])
def test_pairs_are_neither_packed_nor_scored_whole(tmp_path: Path, more: dict[str, Any]) -> None:
    assert refusal(tmp_path, IMPLICIT, **more).endswith(
        "has pairs of answers, which are compared by themselves: leave it out"
    )


def test_a_table_of_pairs_is_proposed_and_shown(tmp_path: Path) -> None:
    others = [{"chosen": turns(f"{n}?", GOOD), "rejected": turns(f"{n}?", BAD)} for n in range(40)]
    file = Path(written(tmp_path, IMPLICIT, *others))
    settings = tmp_path / "data.toml"
    settings.write_text(propose(file).toml("pairs"))
    assert 'kind = "chat"' in settings.read_text()
    assert "it has the columns chosen and rejected" in settings.read_text()
    shown = tessera("data", "show", str(settings))
    assert f"rejected:\nuser: {ASKED}\nassistant: [[{BAD}]]" in shown.stdout
    assert "classes" not in shown.stdout
