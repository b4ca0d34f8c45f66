"""The tasks of the table: models pre-trained here, and data that are made or shipped here.

A world is a task's data for one seed. Digits of pre-training, of worlds in which learning rates are chosen, and of
those that are reported are disjoint; texts are drawn anew.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from json import dumps, loads
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import save_file
from transformers.models.vit.configuration_vit import ViTConfig
from transformers.models.vit.modeling_vit import ViTForImageClassification

from benchmarks.methods.arms import ARMS
from tessera.examples.llm import __main__ as llm
from tessera.examples.llm.instructions import KINDS, texts
from tessera.examples.pairs import __main__ as clip
from tessera.examples.pairs.data import pairs
from tessera.examples.pairs.data import pretrained as pretrained_clip
from tessera.examples.processes import ROOT
from tessera.examples.reports import __main__ as reports
from tessera.examples.reports.notes import DEPARTMENTS, WORDINGS, notes, write_csv, write_tokenizer
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import divide
from tessera.worker.data.partition.schemes import Shift
from tessera.worker.data.registry import load

Table = dict[str, Any]

HELD_OUT = 0.3
PRETRAINING, CHOOSING, REPORTED = 300, 350, 500
"""Digits that pre-train a model, and that rates are chosen on; the rest is for what is reported."""
EACH = 130
"""Texts of a site."""
TESTED = 150
"""Texts of no site."""


@dataclass(frozen=True)
class World:
    """`number` is a seed; `chosen` is True if learning rates are chosen there."""

    number: int
    chosen: bool = False

    @property
    def dice(self) -> Random:
        return Random(f"{self.number} {self.chosen}")  # noqa: S311  (to be the same each time)


@dataclass(frozen=True)
class Task:
    about: str
    metric: str
    """The score, a name of an evaluation."""
    head: str
    pretrain: Callable[[Path, int], None]
    """Write a model folder of transformers, trained for this many steps."""
    steps: int
    labels: int
    world: Callable[[Path, Path, World], Table]
    """Write a world's data into a folder, beside a base; return the keys of the file's table `simulation`."""
    methods: Collection[str] = frozenset(arm.method for arm in ARMS)
    """The methods to run."""


# ---------------------------------------------------------------- images


def _digits() -> tuple[Dataset, Dataset]:
    """Return the digits to train on, in an order of their own, and the others."""
    train, test = (load("digits", {"split": split}) for split in ("train", "test"))
    return train.rows(torch.randperm(train.examples, generator=torch.Generator().manual_seed(0))), test


def _pretrained_vit(out: Path, steps: int) -> None:
    """Train a ViT on digits that lie on their side."""
    torch.manual_seed(0)
    config = {
        **loads((ROOT / "examples/digits/vit.json").read_text(encoding="utf-8")),
        "hidden_size": 48,
        "intermediate_size": 96,
        "num_hidden_layers": 3,
    }
    model = ViTForImageClassification(ViTConfig.from_dict(config))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    some = _digits()[0].rows(torch.arange(PRETRAINING)).tensors
    for _ in range(steps):
        rows = torch.randint(PRETRAINING, (32,))
        optimizer.zero_grad()
        turned = some["pixel_values"][rows].rot90(dims=(2, 3))
        model(pixel_values=turned, labels=some["labels"][rows]).loss.backward()
        optimizer.step()
    model.save_pretrained(out)


def _image_world(folder: Path, base: Path, world: World) -> Table:
    train, test = _digits()
    first, last = (
        (PRETRAINING, PRETRAINING + CHOOSING)
        if world.chosen
        else (PRETRAINING + CHOOSING, PRETRAINING + CHOOSING + REPORTED)
    )
    save_file(train.rows(torch.arange(first, last)).tensors, folder / "pool.safetensors")
    save_file(test.rows(torch.arange(TESTED)).tensors, folder / "test.safetensors")
    part = {"scheme": "dirichlet", "alpha": 0.5, "seed": world.number}
    data = {"kind": "arrays", "file": str(folder / "pool.safetensors"), "part": part, "held_out": HELD_OUT}
    return {"sites": 3, "data": data, "test": {"kind": "arrays", "file": str(folder / "test.safetensors")}}


# ---------------------------------------------------------------- images with texts


def _pretrained_clip(out: Path, steps: int) -> None:
    pretrained_clip(out, 0, steps)
    clip.write_tokenizer(out)


def _pairs_world(folder: Path, base: Path, world: World) -> Table:
    _, rest, test = pairs()
    rows = torch.arange(CHOOSING) if world.chosen else torch.arange(CHOOSING, CHOOSING + REPORTED)
    parts = divide(rest.rows(rows), Shift(scheme="shift", count=4, seed=world.number))
    named = dict(
        zip(("site-1", "site-2", "site-3", "site-4", "test"), (*parts, test.rows(torch.arange(TESTED))), strict=True)
    )
    sources: Table = {}
    for site, part in named.items():
        sources[site] = clip.write_images(folder / site, part, base)
    return _sites(sources)


# ---------------------------------------------------------------- texts


def _pretrained_bert(out: Path, steps: int) -> None:
    words = write_tokenizer(out)
    reports.pretrained(out, out, words, steps)


def _text_world(folder: Path, base: Path, world: World) -> Table:
    dice, sources = world.dice, {}
    some = {
        site: notes(EACH, wording, dice, weights)
        for (site, weights), wording in zip(reports.HOSPITALS.items(), WORDINGS, strict=True)
    }
    some["test"] = [note for wording in WORDINGS for note in notes(TESTED // len(WORDINGS), wording, dice)]
    for site, rows in some.items():
        write_csv(folder / f"{site}.csv", rows)
        sources[site] = {
            "kind": "text", "file": str(folder / f"{site}.csv"), "labels": DEPARTMENTS, "tokenizer": str(base),
            "max_length": reports.TOKENS,
        }  # fmt: skip
    return _sites(sources)


# ---------------------------------------------------------------- instructions


def _language_world(folder: Path, base: Path, world: World) -> Table:
    dice, sources = world.dice, {}
    some = {site: llm.site_texts(kind, dice, EACH) for site, kind in llm.SITES.items()}
    some["test"] = [text for kind in KINDS.values() for text in texts(kind, TESTED // len(KINDS), dice)]
    for site, rows in some.items():
        lines = (dumps({"prompt": row.instruction, "completion": f" {row.answer}"}) for row in rows)
        (folder / f"{site}.jsonl").write_text("\n".join(lines), encoding="utf-8")
        sources[site] = {
            "kind": "chat", "file": str(folder / f"{site}.jsonl"), "layout": "prompt", "tokenizer": str(base),
            "max_length": 64,
        }  # fmt: skip
    return _sites(sources)


def _sites(sources: Table) -> Table:
    """Return the keys of a simulation whose sites have data of their own; `test` has what no site has."""
    test = sources.pop("test")
    return {"sites": {site: {**source, "held_out": HELD_OUT} for site, source in sources.items()}, "test": test}


TASKS = {
    "image": Task(
        "digits at three sites that have other classes each; a ViT that knows digits lying on their side",
        "accuracy", "image-classification", _pretrained_vit, 300, 0, _image_world,
    ),
    "pairs": Task(
        "digits with their names at four sites, one of which turns them, one inverts them, and one has noise; a CLIP "
        "that knows clean ones",
        "accuracy", "contrastive", _pretrained_clip, 300, 0, _pairs_world,
        ("fedavg", "local", "lora", "promptfl", "fedvpt", "fedpgp", "fedotp", "pfeddc"),
    ),
    "text": Task(
        "the department that a note is for, at three hospitals of other wordings and frequencies; a BERT that knows "
        "the complaint of a note",
        "accuracy", "text-classification", _pretrained_bert, 250, 4, _text_world,
    ),
    "language": Task(
        "instructions of mostly one kind at each of three offices; a Llama that knows other kinds; the score is of "
        "single tokens of answers",
        "accuracy", "causal-lm", llm.pretrained, 600, 0, _language_world,
    ),
}  # fmt: skip
