"""SAFL training of a small BERT on synthetic notes of three hospitals, in a CSV file at each."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from random import Random

import torch
from rich.console import Console
from rich.markup import escape
from transformers import AutoTokenizer, BertConfig, BertForSequenceClassification
from transformers.utils import logging

from tessera.examples.federation import Federation, Holding
from tessera.examples.reports.notes import COMPLAINTS, DEPARTMENTS, WORDINGS, notes, write_csv, write_tokenizer
from tessera.examples.staging import DemoFailed, parser, play, run_through
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.settings import DataSource

HERE = Path(__file__).parent
HOSPITALS = {
    "north-hospital": (6, 3, 1, 1),
    "river-clinic": (1, 6, 3, 1),
    "hill-hospital": (1, 1, 6, 3),
}
"""How often each department comes there."""
LABORATORY = "reference-lab"
EACH = 300
TOKENS = 48
PRETRAINING_STEPS = 250
SEED = 0

BERT = {
    "hidden_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "intermediate_size": 96, "max_position_embeddings": TOKENS,
    "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0, "pad_token_id": 0,
}  # fmt: skip


def holdings(folder: Path) -> list[Holding]:
    """Write each site's file, and return the sites' data."""
    rng = Random(SEED)
    found = []
    for (site, weights), wording in zip(HOSPITALS.items(), WORDINGS, strict=True):
        write_csv(folder / f"{site}.csv", notes(EACH, wording, rng, weights))
        found.append(Holding(site, "notes", _source(folder, site), "train"))
    test = [note for wording in WORDINGS for note in notes(EACH // len(WORDINGS), wording, rng)]
    write_csv(folder / f"{LABORATORY}.csv", test)
    return [*found, Holding(LABORATORY, "notes-test", _source(folder, LABORATORY, "evaluate"), "evaluate")]


def _source(folder: Path, site: str, use: str = "train") -> DataSource:
    return DataSource.model_validate(
        {
            "use": use,
            "kind": "text",
            "file": str(folder / f"{site}.csv"),
            "labels": DEPARTMENTS,
            "tokenizer": str(folder / "tokenizer"),
            "max_length": TOKENS,
        }
    )


def pretrained(out: Path, tokenizer: Path, words: int, steps: int = PRETRAINING_STEPS) -> None:
    """Train a BERT on notes of no site, for another task: the complaint in a note, of 16."""
    torch.manual_seed(SEED)
    complaints = [complaint for several in COMPLAINTS.values() for complaint in several]
    model = BertForSequenceClassification(BertConfig.from_dict({**BERT, "vocab_size": words, "num_labels": 16}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    encode, rng = AutoTokenizer.from_pretrained(tokenizer), Random(SEED + 1)
    for step in range(steps):
        batch = notes(32, WORDINGS[step % len(WORDINGS)], rng)
        inputs = encode([note.text for note in batch], padding=True, truncation=True, return_tensors="pt")
        optimizer.zero_grad()
        labels = torch.tensor([complaints.index(note.complaint) for note in batch])
        model(input_ids=inputs["input_ids"], attention_mask=inputs["attention_mask"], labels=labels).loss.backward()
        optimizer.step()
    model.save_pretrained(out)


def demo(console: Console, federation: Federation, given: argparse.Namespace) -> None:
    console.print(
        f"[bold]Tessera[/]: {len(HOSPITALS)} hospitals learn from {EACH} notes each which department a note is for. "
        "The notes are synthetic, made here from templates; nobody wrote them, and nobody is described.\n",
        soft_wrap=True,
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    data = federation.folder / "data"
    data.mkdir()
    words = write_tokenizer(data / "tokenizer")
    with console.status("pre-training a small BERT"):
        torch.set_num_threads(1)
        pretrained(data / "bert", data / "tokenizer", words)

    def model() -> ModelFolder:
        labels = ("--head", "text-classification", "--labels", str(len(DEPARTMENTS)))
        return federation.make_model("--config", str(data / "bert"), "--pretrained", *labels)

    entries = run_through(console, federation, holdings(data), model, HERE / "run.toml", given.settings)
    if "accuracy" not in entries[-1].scores:
        raise DemoFailed(f"{LABORATORY} did not measure the last version")
    console.print(
        f"{LABORATORY}, on notes that no hospital has: accuracy {entries[0].scores['accuracy']:.3f} after round 1, "
        f"{entries[-1].scores['accuracy']:.3f} after round {len(entries)}. One in four would be right by chance.\n"
        f"Model and logs: {escape(str(given.out))}",
        soft_wrap=True,
    )


if __name__ == "__main__":
    sys.exit(play(demo, parser("tessera.examples.reports", __doc__).parse_args()))
