"""Adaptation of a small CLIP to four sites' images with pFedDC. The CLIP is pre-trained here, on upright, clean
digits; each site has image files as from another scanner. Only prompts are sent."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import torch
from PIL import Image
from rich.console import Console
from rich.markup import escape
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast
from transformers.utils import logging

from tessera.examples.federation import Federation, Holding
from tessera.examples.pairs.data import NAMES, WORDS, pairs, pretrained
from tessera.examples.staging import parser, play, run_through
from tessera.shared import units
from tessera.shared.terminal import output
from tessera.shared.updates.model_folder import ModelFolder
from tessera.worker.data.dataset import Dataset
from tessera.worker.data.partition.division import divide
from tessera.worker.data.partition.schemes import Shift
from tessera.worker.settings import DataSource

HERE = Path(__file__).parent
SITES = ("alder-clinic", "birch-hospital", "cedar-institute", "dune-university")
PROMPTS = 4
HELD_OUT = 0.25
SEED = 0


def holdings(folder: Path) -> list[Holding]:
    """Write each site's images, a folder per digit, and return the sites' data."""
    parts = divide(pairs()[1], Shift(scheme="shift", count=len(SITES), seed=SEED))
    found = []
    for site, part in zip(SITES, parts, strict=True):
        source = {**write_images(folder / site, part, folder / "tokenizer"), "held_out": HELD_OUT}
        found.append(Holding(site, "digits-and-names", DataSource.model_validate(source), None))
    return found


def write_images(folder: Path, part: Dataset, tokenizer: Path) -> dict[str, object]:
    """Write a folder of images for each digit, and return the options of the data set."""
    for number, (pixels, label) in enumerate(zip(part.tensors["pixel_values"], part.tensors["labels"], strict=True)):
        file = folder / NAMES[int(label)] / f"{number}.png"
        file.parent.mkdir(parents=True, exist_ok=True)
        grey = ((pixels[0].clamp(-1, 1) + 1) * 127.5).round().to(torch.uint8)  # [8, 8], 0 to 255
        Image.fromarray(grey.numpy()).save(file)
    return {
        "kind": "imagetext", "folder": str(folder), "labels": NAMES, "size": 8, "channels": 1,
        "template": "a photo of the digit {}", "tokenizer": str(tokenizer),
    }  # fmt: skip


def write_tokenizer(folder: Path) -> None:
    """Write a tokenizer with the CLIP's words and its start and end tokens."""
    tokenizer = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="[PAD]"))
    tokenizer.pre_tokenizer = Whitespace()
    marks = [(mark, WORDS.index(mark)) for mark in ("[START]", "[END]")]
    tokenizer.post_processor = TemplateProcessing(single="[START] $A [END]", special_tokens=marks)
    fast = PreTrainedTokenizerFast(  # type: ignore[no-untyped-call]
        tokenizer_object=tokenizer, pad_token="[PAD]", eos_token="[END]"
    )
    fast.save_pretrained(folder)


def demo(console: Console, federation: Federation, given: argparse.Namespace) -> None:
    console.print(
        f"[bold]Tessera[/]: {len(SITES)} sites adapt one CLIP to their scanners: one as the CLIP knows images, one "
        "turned, one inverted, one noisy. The CLIP stays as it is; prompts train.\n",
        soft_wrap=True,
    )
    logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    data = federation.folder / "data"
    data.mkdir()
    write_tokenizer(data / "tokenizer")
    with console.status("pre-training a small CLIP"):
        torch.set_num_threads(1)
        pretrained(data / "clip", SEED)

    def model() -> ModelFolder:
        start = ("--config", str(data / "clip"), "--pretrained", "--head", "contrastive")
        prompts = ("--vision-prompts", str(PROMPTS), "--text-prompts", str(PROMPTS))
        return federation.make_model(*start, *prompts)

    entries = run_through(console, federation, holdings(data), model, HERE / "run.toml", given.settings)
    table = output.table(
        ("round", "down, a site", "up, a site", "own model's accuracy"),
        [
            (
                entry.number,
                units.size(entry.download_bytes // entry.accepted),
                units.size(entry.upload_bytes // entry.accepted),
                output.share(entry.scores.get("personal_accuracy")),
            )
            for entry in entries
        ],
        right=("round", "down, a site", "up, a site", "own model's accuracy"),
    )
    console.print()
    console.print(table)
    console.print("\nThe model itself went to each site once, before round 1, to be measured there.")
    console.print(f"Model and logs: {escape(str(given.out))}")


if __name__ == "__main__":
    sys.exit(play(demo, parser("tessera.examples.pairs", __doc__).parse_args()))
