"""Memory and time of reading texts: `python -m benchmarks.texts [--examples 20000 200000]`.

For each number of texts, a process of its own loads a table with a tokenizer, takes the first batch and a pass over
all. Another process does the same again, from the files that the first one made.
"""

from __future__ import annotations

import argparse
import json
import os
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import numpy as np
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace

from benchmarks.measuring import MIB, OUT, Results, apart, forget_peak, peak_bytes

WORDS = 1000
BATCH = 32
LENGTH = 100
"""Words of a text on average."""


def write_tokenizer(folder: Path) -> None:
    tokenizer = Tokenizer(WordLevel({"<end>": 0, **{f"w{place}": place + 1 for place in range(WORDS)}}, "<end>"))
    tokenizer.pre_tokenizer = Whitespace()
    folder.mkdir()
    tokenizer.save(str(folder / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<end>", "unk_token": "<end>"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))


def write_table(folder: Path, examples: int) -> Path:
    dice = np.random.default_rng(0)
    table = folder / f"{examples}.csv"
    with table.open("w", encoding="ascii") as file:
        file.write("text,label\n")
        for number in range(examples):
            words = dice.integers(0, WORDS, dice.integers(LENGTH // 2, LENGTH * 3 // 2))
            file.write(f"{' '.join(f'w{word}' for word in words)},{number % 2}\n")
    return table


def measure(table: Path) -> dict[str, float]:
    """Return the seconds and the peak memory of loading the table and of one pass, in this process."""
    # The process that starts this one has no need of torch.
    import torch  # noqa: PLC0415

    from tessera.worker.data.prepared import PreparedFolder  # noqa: PLC0415
    from tessera.worker.data.registry import load  # noqa: PLC0415
    from tessera.worker.training.batches import Batches  # noqa: PLC0415

    options = {"tokenizer": str(table.parent / "tokenizer"), "in_memory": False}
    load("text", {"file": str(write_table(table.parent, BATCH)), **options})
    forget_peak(os.getpid())
    before, began = peak_bytes(os.getpid()), monotonic()
    dataset = load("text", {"file": str(table), **options}, prepared=PreparedFolder(table.with_suffix("")))
    loaded = monotonic()
    batches = iter(Batches(dataset, BATCH, torch.device("cpu"), torch.Generator().manual_seed(0)))
    next(batches)
    first = monotonic()
    for _ in batches:
        pass
    return {
        "load_s": loaded - began,
        "first_batch_s": first - loaded,
        "pass_s": monotonic() - loaded,
        "added_MiB": (peak_bytes(os.getpid()) - before) / MIB,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.texts", description=__doc__)
    parser.add_argument("--examples", type=int, nargs=2, default=[20_000, 200_000])
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(given.measure)))
        return
    few, many = [100, 1000] if given.quick else given.examples
    results = Results("texts", f"one pass over texts of {LENGTH} words on average in batches of {BATCH}")
    with tempfile.TemporaryDirectory(prefix="tessera-texts-") as name:
        write_tokenizer(Path(name) / "tokenizer")
        rows = {}
        for examples in (few, many):
            table = write_table(Path(name), examples)
            for again in (False, True):
                rows[examples, again] = row = apart("benchmarks.texts", "--measure", str(table))
                results.add(examples=examples, tokens="from the file" if again else "made", **row)
    added = {examples: rows[examples, False]["added_MiB"] for examples in (few, many)}
    results.aim(f"more for {many} than for {few}", added[many] - added[few], 100, " MiB")
    later = rows[many, True]
    results.aim(f"first batch of {many} once tokenised", later["load_s"] + later["first_batch_s"], 5, " s")
    results.finish(given.out)


if __name__ == "__main__":
    main()
