"""Memory and time of reading images: `python -m benchmarks.images [--examples 2000 20000] [--side 224]`.

For each number of examples, with pixels in memory, read by a thread, and read by two loaders, a process of its own
loads a table of JPEG files, once without an index and once with it, and takes one pass over its batches. A few files
are listed again and again: what is read stays in the system's cache, so that this measures decoding rather than the
disk. Memory is the most that the process and its loaders hold at one time, with what they share counted once (Pss).
"""

from __future__ import annotations

import argparse
import json
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from time import monotonic

import numpy as np
from PIL import Image

from benchmarks.measuring import MIB, OUT, PeakMemory, Results, proportional_bytes

FILES = 50
BATCH = 32
LOADERS = 2


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


def measure(table: Path, side: int, loaders: int | None) -> dict[str, float]:
    """Return the seconds of loading the table, of loading it again, and of one pass, in this process. Pixels are in
    memory if there is no number of loaders."""
    # The process that starts this one has no need of torch.
    import torch  # noqa: PLC0415

    from tessera.worker.data.loaders import LoaderProcesses  # noqa: PLC0415
    from tessera.worker.data.prepared import PreparedFolder  # noqa: PLC0415
    from tessera.worker.data.registry import load  # noqa: PLC0415
    from tessera.worker.training.batches import Batches  # noqa: PLC0415

    processes = LoaderProcesses(loaders) if loaders else None
    load("images", {"file": str(write_table(table.parent, 1, side)), "size": side})
    options = {"file": str(table), "size": side, "in_memory": loaders is None}
    times = [monotonic()]
    for _ in range(2):
        dataset = load("images", options, prepared=PreparedFolder(table.parent / "prepared"), loaders=processes)
        times.append(monotonic())
    batches = iter(Batches(dataset, BATCH, torch.device("cpu"), torch.Generator().manual_seed(0)))
    next(batches)
    times.append(monotonic())
    for _ in batches:
        pass
    times.append(monotonic())
    names = ("load_s", "load_again_s", "first_batch_s", "rest_s")
    return {name: end - begin for name, begin, end in zip(names, times, times[1:], strict=False)}


def apart(table: Path, side: int, loaders: int | None) -> dict[str, float]:
    """Measure in a process of its own. Adds the most memory that it and its loaders hold."""
    command = [sys.executable, "-m", "benchmarks.images", "--measure", str(table), "--side", str(side)]
    given = [] if loaders is None else ["--loaders", str(loaders)]
    with (
        subprocess.Popen([*command, *given], stdout=subprocess.PIPE, text=True) as process,
        PeakMemory({"all": [process.pid]}, 0.2, proportional_bytes) as memory,
    ):
        printed, _ = process.communicate()
    if process.returncode:
        raise subprocess.CalledProcessError(process.returncode, command)
    found: dict[str, float] = json.loads(printed)
    return {**found, "pss_MiB": memory.peaks["all"] / MIB}


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog="benchmarks.images", description=__doc__)
    parser.add_argument("--examples", type=int, nargs=2, default=[2000, 20_000])
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--measure", type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--loaders", type=int, help=argparse.SUPPRESS)
    given = parser.parse_args(arguments)
    if given.measure:
        print(json.dumps(measure(given.measure, given.side, given.loaders)))
        return
    few, many = [60, 600] if given.quick else given.examples
    results = Results("images", f"one pass over JPEG files of {given.side} x {given.side} in batches of {BATCH}")
    with tempfile.TemporaryDirectory(prefix="tessera-images-") as name:
        found = {}
        for examples, loaders in ((few, None), (few, 0), (few, LOADERS), (many, 0), (many, LOADERS)):
            table = write_table(Path(name), examples, given.side)
            row = apart(table, given.side, loaders)
            pixels = "memory" if loaders is None else "disk"
            results.add(examples=examples, pixels=pixels, loaders=loaders, **row)
            found[examples, loaders] = row
            shutil.rmtree(Path(name) / "prepared", ignore_errors=True)
    more = found[many, LOADERS]["pss_MiB"] - found[few, LOADERS]["pss_MiB"]
    results.aim(f"more memory for {many} than for {few} with loaders", more, 100, " MiB")
    results.aim(f"memory for {many} with loaders", found[many, LOADERS]["pss_MiB"], 2048, " MiB")
    first = found[many, LOADERS]["load_again_s"] + found[many, LOADERS]["first_batch_s"]
    results.aim(f"first of {many} in a batch once they are indexed", first, 5, " s")
    results.finish(given.out)


if __name__ == "__main__":
    main()
