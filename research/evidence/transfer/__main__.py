"""Bytes, hours and memory of a round for large models: `python -m evidence.transfer`.

Prints the tables of `docs/evidence.md`; `--save` writes them there. Models are laid out from their configs without
storage, except CLIP: a minute and 4 GB of memory are enough. Nothing is downloaded and nothing trained.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Mapping, Sequence

from common.document import table_head, table_row, tidied, write_block
from evidence.transfer.memory import merge_peak_bytes, worker_memory
from evidence.transfer.models import LLAMA, MODELS, Large, table
from evidence.transfer.traffic import (
    ARMS,
    LINE,
    PRUNED,
    SITES,
    UP_CODECS,
    Arm,
    claim,
    encoded_bytes,
    line_seconds,
    possible,
    step_bytes,
    traffic,
    up_and_down,
)
from small_tasks.safl_bytes import CLAIMED, CONFIGS, blocks_of, nbytes
from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import CHUNK
from tessera.shared.updates.codecs import pipeline

COMMAND = "python -m evidence.transfer"
MEGA, GIGA = 1e6, 1e9
MERGED = (2, 10, 50)
"""Numbers of updates whose merge is measured."""
CHUNKS = 4
ALWAYS = (("head", "norm"), ("norm",))
IN_MEMORY = tuple(
    arm
    for arm in ARMS
    if arm.name in {"fedavg", "safl, third of the layers, one choice", "lora", "promptfl", "pfeddc", "fedvpt"}
)
FOUR_BITS = "lora, base in 4 bits"


def lines() -> Iterator[str]:
    """Yield the tables in Markdown, line by line."""
    yield from _traffic()
    yield from _codecs()
    yield from _claim()
    yield from _worker()
    yield from _coordinator()


def digits(value: float) -> str:
    """Return a number with three significant digits, and no exponent."""
    if value == 0:
        return "0"
    whole = f"{value:.3g}"
    return f"{float(whole):.0f}" if "e+" in whole else f"{float(whole):.10f}".rstrip("0").rstrip(".")


# ---------------------------------------------------------------- traffic


def _traffic() -> Iterator[str]:
    """Yield bytes and hours. Methods of the same bytes share a row."""
    raw = {arm.name: _moved(arm, coded=False) for arm in ARMS}
    coded = {arm.name: _moved(arm, coded=True) for arm in ARMS}
    rows: dict[tuple[object, ...], list[str]] = {}
    for name, moved in raw.items():
        rows.setdefault(tuple(moved.items()), []).append(name)
    names = [large.name for large in MODELS]
    yield f"\n### Megabytes of a round at each of {SITES} sites, up / down, float32\n"
    yield from table_head(["method", *names])
    for arms in rows.values():
        yield table_row([", ".join(arms), *(_pair(raw[arms[0]].get(name)) for name in names)])
    yield f"\n### Time of a round's bytes on a site's line of {LINE / 1e6:.0f} Mbit/s, raw / in 8 bits both ways\n"
    yield from table_head(["method", *names])
    for arms in rows.values():
        yield table_row(
            [", ".join(arms), *(_times(raw[arms[0]].get(name), coded[arms[0]].get(name)) for name in names)]
        )


def _moved(arm: Arm, *, coded: bool) -> Mapping[str, tuple[int, int]]:
    return {large.name: up_and_down(traffic(arm, large), coded=coded) for large in MODELS if possible(arm, large)}


def _pair(moved: tuple[int, int] | None) -> str:
    return "-" if moved is None else " / ".join(digits(each / MEGA) for each in moved)


def _times(raw: tuple[int, int] | None, coded: tuple[int, int] | None) -> str:
    return " / ".join(time(sum(moved)) for moved in (raw, coded) if moved is not None) or "-"


def time(moved: int) -> str:
    """Return the time of these bytes on the line, in the unit that suits it."""
    seconds = line_seconds(moved)
    if seconds < 60:
        return f"{digits(seconds)} s"
    return f"{digits(seconds / 60)} min" if seconds < 3600 else f"{digits(seconds / 3600)} h"


def _codecs() -> Iterator[str]:
    yield "\n### Megabytes of a FedAvg update, and of a version, by codec\n"
    yield from table_head(["codec", *(large.name for large in MODELS), "of float32"])
    whole = {large.name: table(large) for large in MODELS}
    for codec in UP_CODECS:
        yield _codec_row(f"up, `{codec}`", {name: encoded_bytes(codec, blocks) for name, blocks in whole.items()})
    for name, nbytes_of in (
        ("down, raw", nbytes),
        ("down, lossless difference", lambda blocks: encoded_bytes(pipeline.LOSSLESS, blocks)),
        ('down, `download_codec = "int8"`', step_bytes),
    ):
        yield _codec_row(name, {large: nbytes_of(blocks) for large, blocks in whole.items()})


def _codec_row(name: str, sizes: Mapping[str, int]) -> str:
    share = sizes[LLAMA.name] / nbytes(table(LLAMA))
    return table_row([name, *(digits(size / MEGA) for size in sizes.values()), f"{100 * share:.1f} %"])


# ---------------------------------------------------------------- the claim


def _claim() -> Iterator[str]:
    """Yield the claim for each model; once if its head changes nothing."""
    yield f"\n### SAFL: the most layers K, of all L, that save {CLAIMED:.0%}, by count\n"
    yield from table_head(
        [
            "model",
            "trains beside layers",
            "share in layers",
            "saved up by a third of the layers",
            "K: up, and both ways with one choice",
            f"K: up, {PRUNED:.1%} of rows pruned",
            f"K: both ways, {SITES} own choices",
            "L",
        ]
    )
    tables: dict[str, tuple[Block, ...]] = {large.name: table(large) for large in MODELS}
    tables |= {name: blocks_of(config) for name, config in CONFIGS.items()}
    for name, blocks in tables.items():
        before: list[str] = []
        for always in ALWAYS:
            found = claim(blocks, always)
            third = found.up[max(1, round(found.layers / 3)) - 1]
            most = [str(found.most(savings) or "none") for savings in (found.up, found.pruned, found.own_choices)]
            cells = [f"{found.in_layers:.1%}", f"{third:.1%}", *most, str(found.layers)]
            if cells != before:
                yield table_row([name, ", ".join(always), *cells])
            before = cells


# ---------------------------------------------------------------- memory


def _worker() -> Iterator[str]:
    yield "\n### Gigabytes at a training worker, float32, AdamW\n"
    yield from table_head(["model and batch", "method", "weights", "gradients", "moments", "activations", "sum"])
    for large in MODELS:
        for arm in IN_MEMORY:
            if possible(arm, large):
                yield _memory_row(large, arm, arm.name)
                if arm.name == "lora":
                    yield _memory_row(large, arm, FOUR_BITS, four_bits=True)


def _memory_row(large: Large, arm: Arm, name: str, *, four_bits: bool = False) -> str:
    held = worker_memory(arm, large, four_bits=four_bits)
    parts = (held.weights, held.gradients, held.moments, held.activations, held.total)
    return table_row([f"{large.name}, {large.described}", name, *(digits(part / GIGA) for part in parts)])


def _coordinator() -> Iterator[str]:
    yield f"\n### The coordinator's disk for a version and the updates of {SITES} sites, in gigabytes\n"
    yield from table_head(["updates", *(large.name for large in MODELS)])
    for codec in (pipeline.RAW, "delta+int8"):
        sizes = [nbytes(table(large)) + SITES * encoded_bytes(codec, table(large)) for large in MODELS]
        yield table_row([f"`{codec}`", *(digits(size / GIGA) for size in sizes)])
    peaks = ", ".join(
        f"{merge_peak_bytes(count, CHUNKS) / (4 * CHUNK):.0f} MiB of {count} updates" for count in MERGED
    )
    yield f"\nThe sums of a merge hold, for a model of any size: {peaks}."


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(prog=COMMAND, description=__doc__)
    parser.add_argument("--save", action="store_true", help="write the tables into the document too")
    given, found = parser.parse_args(arguments), list(lines())
    print(tidied(found))
    if given.save:
        write_block(COMMAND, found)


if __name__ == "__main__":
    main()
