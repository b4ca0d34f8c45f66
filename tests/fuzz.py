"""Hostile updates by the million: `python -m tests.fuzz [--cases 1000000] [--seed 0]`.

Each case begins as a well-formed update, by one of many codecs, and is then spoilt as somebody would who knows the
format: values and keys of the header's JSON, offsets, codec names, lengths before chunks, frames, scales, places; and
bytes anywhere. It must be refused by one of our errors, or be read and merged to its end as what the model says, in
little time and memory. A case follows from the seed and its number alone: `--first N --cases 1` repeats one.
"""

from __future__ import annotations

import argparse
import io
import json
import resource
import struct
import sys
import time
import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass
from random import Random
from typing import Any

import numpy as np
import zstandard

from tessera.shared.model.blocks import Block
from tessera.shared.problems import InvalidUpdate
from tessera.shared.rounds.validation import step_squares
from tessera.shared.tensors.dtypes import NUMPY_DTYPES, DType
from tessera.shared.tensors.lazy import ArrayTensor, mean_step, to_array
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.errors import Malformed
from tessera.shared.updates.update_file import TrainedBlock, read_update, write_update

MAX_SECONDS = 2.0
"""Of CPU, for one case of a few hundred bytes."""
MAX_BYTES = 64 << 20

CODECS = (
    *("raw", "zstd", "shuffle", "shuffle+zstd", "bits", "bits+shuffle+zstd", "delta"),
    *("delta+bf16", "delta+fp16+zstd", "delta+int8", "delta+int8+zstd", "delta+int4", "delta+topk=0.25"),
    *("delta+topk=0.25+zstd", "delta+lowrank=1", "delta+lowrank=1+int8", "delta+shuffle+zstd"),
)
STAGES = ("raw", *pipeline.STAGES, "topk=0.25", "topk=1", "lowrank=1", "lowrank=99999", "zstd=3", "gzip", "", "=")
DTYPES: tuple[DType, ...] = ("F32", "F32", "BF16", "F16", "F64")
BLOCKS = {
    name: Block(tensor=name, role="mlp", shape=shape, dtype=dtype)
    for name, shape, dtype in zip("abcde", [(4, 4), (9,), (8, 2), (3,), (5,)], DTYPES, strict=True)
}
_RNG = np.random.default_rng(0)
BASES = {n: ArrayTensor(_RNG.normal(size=b.shape).astype(NUMPY_DTYPES[b.dtype]), b.dtype) for n, b in BLOCKS.items()}

# What is likeliest to be read wrong: edges of widths, other types, things that nearly are what they should be.
ODD: tuple[Any, ...] = (
    *(
        0,
        1,
        -1,
        7,
        255,
        256,
        2**31,
        2**32 - 1,
        2**53,
        2**63 - 1,
        2**63,
        2**64,
        -(2**63),
        10**40,
        1.0,
        0.5,
        -0.0,
        1e308,
    ),
    *(
        None,
        True,
        False,
        "",
        "0",
        "U8",
        "F32",
        "F64",
        "BOOL",
        "raw",
        "\ud800",
        "\0",
        "a" * 300,
        [],
        {},
        [[]],
        [0],
        [0, 0],
    ),
    *({"dtype": "U8", "shape": [0], "data_offsets": [0, 0]}, float("nan"), float("inf"), [2**40] * 8, [1] * 9),
)


@dataclass
class File:
    """An update that is being spoilt: entries and metadata as JSON values, and the bytes of each block."""

    table: dict[str, Any]
    parts: dict[str, bytes]


def seeds() -> list[File]:
    """A well-formed update for each codec, and one for each half of the blocks."""
    rng, found = np.random.default_rng(1), []
    for codec in CODECS:
        changes = []
        for name, block in BLOCKS.items():
            base = to_array(BASES[name])
            value = (base.astype(np.float64) + 0.01 * rng.normal(size=block.shape)).astype(base.dtype)
            changes.append(TrainedBlock(block, ArrayTensor(value, block.dtype), BASES[name]))
        chosen = {c.block.name: pipeline.suited(codec, c.block) for c in changes}
        file = io.BytesIO()
        write_update(file, chosen, changes)
        found.append(_taken_apart(file.getvalue()))
    return found


def _taken_apart(data: bytes) -> File:
    (length,) = struct.unpack("<Q", data[:8])
    table = json.loads(data[8 : 8 + length])
    body = data[8 + length :]
    spans = {name: entry["data_offsets"] for name, entry in table.items() if name != "__metadata__"}
    return File(table, {name: body[start:end] for name, (start, end) in spans.items()})


def put_together(file: File) -> bytes:
    """The file with offsets and shapes that fit its parts."""
    table, end = {"__metadata__": file.table.get("__metadata__", {})}, 0
    for name, part in file.parts.items():
        table[name] = {"dtype": "U8", "shape": [len(part)], "data_offsets": [end, end + len(part)]}
        end += len(part)
    return _with_header(json.dumps(table).encode(), b"".join(file.parts.values()))


def _with_header(text: bytes, body: bytes) -> bytes:
    return struct.pack("<Q", len(text)) + text + body


# ---------------------------------------------------------------- ways to spoil


def spoilt_bytes(data: bytes, rng: Random) -> bytes:
    """A few bytes changed, put in, taken out, or said twice."""
    made = bytearray(data)
    for _ in range(rng.randint(1, 4)):
        at = rng.randrange(len(made) + 1)
        match rng.randrange(5):
            case 0 if at < len(made):
                made[at] ^= 1 << rng.randrange(8)
            case 1:
                made[at:at] = rng.randbytes(rng.randint(1, 8))
            case 2:
                del made[at : at + rng.randint(1, 16)]
            case 3:
                made[at:at] = made[at : at + rng.randint(1, 64)]
            case _:
                made[at : at + 4] = rng.choice(
                    [b"\xff\xff\xff\xff", bytes(4), b"\x00\x00\xc0\x7f", b"\x00\x00\x80\x7f"]
                )
    return bytes(made)


def spoilt_json(value: Any, rng: Random) -> Any:
    """The value with one thing in it another, added or gone."""
    if isinstance(value, dict) and value and rng.random() < 0.9:
        key = rng.choice(sorted(value))
        match rng.randrange(8):
            case 0:
                return {k: v for k, v in value.items() if k != key}
            case 1:
                return {**value, rng.choice([*map(str, ODD[:6]), "a", "dtype", "../x", "a#b"]): rng.choice(ODD)}
            case 2:
                return {(rng.choice(["b", "B", "z", "__metadata__"]) if k == key else k): v for k, v in value.items()}
            case _:
                return {**value, key: spoilt_json(value[key], rng)}
    if isinstance(value, list) and value and rng.random() < 0.7:
        at = rng.randrange(len(value))
        return [*value[:at], spoilt_json(value[at], rng), *value[at + 1 :]]
    if isinstance(value, int) and rng.random() < 0.5:
        return value + rng.choice([-8, -1, 1, 8, 2**32])
    return rng.choice(ODD)


def spoilt_header(file: File, rng: Random) -> bytes:
    whole = put_together(file)
    (length,) = struct.unpack("<Q", whole[:8])
    text, body = whole[8 : 8 + length], whole[8 + length :]
    match rng.randrange(5):
        case 0:
            text = spoilt_bytes(text, rng)
        case 1:
            # Something said twice, which no JSON object in memory can hold.
            at = text.index(b'"', rng.randrange(len(text) // 2))
            text = text[:at] + b'"a":' + json.dumps(rng.choice(ODD)).encode() + b"," + text[at:]
        case 2:
            return (
                struct.pack("<Q", rng.choice([0, 1, length - 1, length + 1, 2**31, 2**63, 2**64 - 1])) + text + body
            )
        case _:
            table = json.loads(text)
            for _ in range(rng.randint(1, 3)):
                table = spoilt_json(table, rng)
            text = json.dumps(table).encode()
    return _with_header(text, body)


def spoilt_codec(file: File, rng: Random) -> bytes:
    """Other codecs for bytes that were written by this one."""
    metadata = dict(file.table["__metadata__"])
    for key in rng.sample(sorted(metadata), rng.randint(1, 3)):
        made = rng.choice([rng.choice(CODECS), "+".join(rng.choices(STAGES, k=rng.randint(1, 4))), "+" * 300])
        metadata[key] = made
    return put_together(File({**file.table, "__metadata__": metadata}, file.parts))


def spoilt_part(file: File, rng: Random) -> bytes:
    """One block's bytes changed, with a header that fits them."""
    name = rng.choice(sorted(file.parts))
    part = file.parts[name]
    framed = len(part) > 4
    match rng.randrange(7):
        case 0:
            part = spoilt_bytes(part, rng)
        case 1 if framed:
            part = struct.pack("<I", rng.choice([0, 1, 5, len(part), 2**31, 2**32 - 1])) + part[4:]
        case 2 if framed:
            part = _chunk(spoilt_bytes(part[4:], rng))
        case 3:
            part = _chunk(zstandard.compress(rng.randbytes(rng.choice([0, 4, 16, 64])) * rng.choice([1, 1, 4096])))
        case 4:
            part = _chunk(zstandard.compress(spoilt_bytes(_unpacked(part), rng)))
        case 5:
            part = _chunk(_unpacked(part)) * rng.choice([1, 2])
        case _:
            part = rng.choice(sorted(file.parts.values()))
    return put_together(File(file.table, {**file.parts, name: part}))


def _chunk(piece: bytes) -> bytes:
    return struct.pack("<I", len(piece)) + piece


def _unpacked(part: bytes) -> bytes:
    try:
        return zstandard.ZstdDecompressor().decompress(part[4:], max_output_size=1 << 16)
    except zstandard.ZstdError:
        return part[4:]


def spoilt_file(file: File, rng: Random) -> bytes:
    """The whole file's bytes, cut off or changed anywhere."""
    data = put_together(file)
    return data[: rng.randrange(len(data))] if rng.random() < 0.2 else spoilt_bytes(data, rng)


SPOIL: tuple[Callable[[File, Random], bytes], ...] = (
    spoilt_header,
    spoilt_header,
    spoilt_codec,
    spoilt_part,
    spoilt_part,
    spoilt_part,
    spoilt_file,
)


# ---------------------------------------------------------------- one case, and many


def case(files: list[File], seed: int, number: int) -> bytes:
    rng = Random(f"{seed}/{number}")
    return rng.choice(SPOIL)(rng.choice(files), rng)


def outcome(data: bytes) -> str:
    """`taken`, or the code of the refusal. Any other error, or a warning, is a find."""
    try:
        tensors = read_update(lambda: io.BytesIO(data), len(data), BLOCKS, dict(BASES))
        for name, tensor in tensors.items():
            step_squares(tensor, BASES[name])
            values = to_array(tensor)
            assert values.shape == BLOCKS[name].shape, name
            assert np.isfinite(values.astype(np.float64)).all(), name
            # Differences are added as they were sent; what is too far off for the block's type may overflow then.
            with np.errstate(over="ignore", invalid="ignore"):
                merged = to_array(mean_step(BASES[name], [(1.0, tensor), (1.0, BASES[name])]))
            assert merged.shape == values.shape, name
    except InvalidUpdate as refusal:
        return refusal.errors[0].code
    except Malformed as fault:
        return fault.code
    return "taken"


def run(cases: int, seed: int, first: int = 0) -> Counter[str]:
    """How the cases ended. Raises AssertionError naming the case for one that ended in any other way."""
    files, found = seeds(), Counter[str]()
    held = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    for number in range(first, first + cases):
        data = case(files, seed, number)
        began = time.process_time()
        try:
            found[outcome(data)] += 1
        except Exception as fault:
            raise AssertionError(f"case {number} of seed {seed} ended in {fault!r}: {data.hex()}") from fault
        seconds = time.process_time() - began
        assert seconds < MAX_SECONDS, f"case {number} of seed {seed} took {seconds:.1f} s of CPU: {data.hex()}"
        if number % 1000 == 0:
            grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - held) << 10
            assert grown < MAX_BYTES, f"before case {number} of seed {seed} memory has grown by {grown} bytes"
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--cases", type=int, default=1_000_000)
    parser.add_argument("--seed", type=int, default=time.time_ns() % 2**32)
    parser.add_argument("--first", type=int, default=0)
    asked = parser.parse_args()
    print(f"{asked.cases} cases, seed {asked.seed}", flush=True)
    warnings.simplefilter("error")
    began = time.process_time()
    found = run(asked.cases, asked.seed, asked.first)
    for kind, count in sorted(found.items()):
        print(f"{kind:22} {count:9}")
    print(f"{asked.cases} cases of {len(found)} kinds in {time.process_time() - began:.0f} s of CPU: no find")


if __name__ == "__main__":
    sys.exit(main())
