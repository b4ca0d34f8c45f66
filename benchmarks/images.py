"""Memory and time of reading images: `python -m benchmarks.images [--examples 2000 20000] [--side 224]`.

For each number of examples, with pixels in memory and read for each batch, a process of its own loads a table of JPEG
files and takes one pass over its batches. A few files are listed again and again: what is read stays in the system's
cache, so that this measures decoding rather than the disk.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import numpy as np
from PIL import Image

from benchmarks.measuring import MIB, OUT, Results, forget_peak, peak_bytes

FILES = 50
BATCH = 32


def write_table(folder: Path, examples: int, side: int) -> Path:
    """Write the files, and a table that lists them in turn; return its path."""
    dice = np.random.default_rng(0)
    for number in range(FILES):
        # Smooth, as photographs are: noise would take longer to decode.
        coarse = dice.integers(0, 256, (8, 8, 3), dtype=np.uint8)
        Image.fromarray(coarse).resize((side, side)).save(folder / f"{number}.jpg", quality=90)
    rows = "".join(f"{number % FILES}.jpg,{number % 2}\n" for number in range(examples))
    table = folder / f"{examples}.csv"
    table.write_text(f"image,label\n{rows}")
    return table


def measure(table: Path, side: int, *, in_memory: bool) -> dict[str, float]:
    """Return the seconds and the peak memory of loading the table and of one pass, in this process."""
    # The process that starts this one has no need of torch.
    import torch  # noqa: PLC0415

    from tessera.worker.data.registry import load  # noqa: PLC0415
    from tessera.worker.training.batches import Batches  # noqa: PLC0415

    load("images", {"file": str(write_table(table.parent, 1, side)), "size": side})
    forget_peak(os.getpid())
    before, began = peak_bytes(os.getpid()), monotonic()
    dataset = load("images", {"file": str(table), "size": side, "in_memory": in_memory})
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


def apart(table: Path, side: int, *, in_memory: bool) -> dict[str, float]:
    """Measure in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.images", "--measure", str(table), "--side", str(side)]
    done = subprocess.run(
        [*command, *(["--in-memory"] if in_memory else [])], stdout=subprocess.PIPE, text=True, check=True
    )
    found: dict[str, float] = json.loads(done.stdout)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.images", description=__doc__)
    parser.add_argument("--examples", type=int, nargs=2, default=[2000, 20_000])
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--in-memory", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(given.measure, given.side, in_memory=given.in_memory)))
        return
    few, many = [60, 600] if given.quick else given.examples
    results = Results("images", f"one pass over JPEG files of {given.side} x {given.side} in batches of {BATCH}")
    with tempfile.TemporaryDirectory(prefix="tessera-images-") as name:
        added = {}
        for examples, in_memory in ((few, True), (few, False), (many, False)):
            table = write_table(Path(name), examples, given.side)
            row = apart(table, given.side, in_memory=in_memory)
            results.add(examples=examples, pixels="memory" if in_memory else "disk", **row)
            added[examples, in_memory] = row["added_MiB"]
    results.aim(f"more for {many} than for {few} on disk", added[many, False] - added[few, False], 100, " MiB")
    results.finish(given.out)


if __name__ == "__main__":
    main()
