"""Which codec each block of an update is sent by, so that the update fits into so many bytes with little error."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from io import BytesIO
from itertools import islice
from typing import BinaryIO

import numpy as np

from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import CHUNK, Array, ArrayTensor, unpacked
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, codec_for, write_update

COARSER = (
    "delta+bf16+shuffle+zstd",
    "delta+int8+zstd",
    "delta+int4+zstd",
    "delta+topk=0.05+shuffle+zstd",
    "delta+topk=0.01+shuffle+zstd",
)
"""What a block may be sent by in place of the run's codec, each smaller and less exact than the one before."""

TRIES = 8


class OverBudget(ValueError):
    """No codec makes the update small enough."""


@dataclass(frozen=True)
class Rung:
    """One codec of a block, and what it would come to, as a sample of the block tells."""

    codec: str
    nbytes: float
    error: float
    """The sum of squares of what it would miss."""


def write_within(file: BinaryIO, codec: str, changes: Sequence[TrainedBlock], budget: int, seed: int = 0) -> None:
    """Write an update of at most `budget` bytes, header and all. `file` must be seekable.

    The run's codec where it fits, and else, block by block, the coarser one that costs the least error for the bytes
    that it saves. Raises OverBudget, saying how small the update can be made.
    """
    ladders = [_ladder(codec, change, seed) for change in changes]
    room, over = float(budget), 0
    for attempt in range(TRIES):
        # At the last as small as it goes.
        chosen = _fitted(ladders, room if attempt < TRIES - 1 else 0)
        file.seek(0)
        file.truncate()
        names = [change.block.name for change in changes]
        write_update(file, {name: rung.codec for name, rung in zip(names, chosen, strict=True)}, changes, seed)
        over = file.seek(0, 2) - budget
        if over <= 0:
            return
        # A sample is not the block, and the header has its bytes too.
        room -= (1 + attempt / 2) * over
    raise OverBudget(f"the update can be made no smaller than about {budget + over} bytes, and {budget} are allowed")


def _fitted(ladders: Sequence[Sequence[Rung]], budget: float) -> list[Rung]:
    """From each ladder the rung that is taken: down from the first ones, the cheapest step next, until all fit."""
    places = [0] * len(ladders)
    total = sum(ladder[0].nbytes for ladder in ladders)
    steps = [(_price(ladder, 0), n) for n, ladder in enumerate(ladders) if len(ladder) > 1]
    heapify(steps)
    while total > budget and steps:
        _, n = heappop(steps)
        ladder, place = ladders[n], places[n]
        total -= ladder[place].nbytes - ladder[place + 1].nbytes
        places[n] = place + 1
        if place + 2 < len(ladder):
            heappush(steps, (_price(ladder, place + 1), n))
    return [ladder[place] for ladder, place in zip(ladders, places, strict=True)]


def _price(ladder: Sequence[Rung], place: int) -> float:
    """Error that the next step down costs per byte that it saves."""
    here, next_ = ladder[place], ladder[place + 1]
    return (next_.error - here.error) / (here.nbytes - next_.nbytes)


def _ladder(codec: str, change: TrainedBlock, seed: int) -> list[Rung]:
    sample = _Sample.of(change)
    rungs: list[Rung] = []
    for each in (codec, *COARSER):
        rung = sample.rung(codec_for(each, change), seed)
        if not rungs or rung.nbytes < rungs[-1].nbytes:
            rungs.append(rung)
    return rungs


@dataclass(frozen=True)
class _Sample:
    """The chunk in the middle of a change, as a change of its own."""

    whole: TrainedBlock
    part: TrainedBlock

    @classmethod
    def of(cls, change: TrainedBlock) -> _Sample:
        middle = change.block.numel // CHUNK // 2
        values, bases = (_nth(chunks, middle) for chunks in (change.values(), change.base.chunks()))
        block = Block(tensor="sample", role="other", shape=values.shape, dtype=change.block.dtype)
        return cls(change, TrainedBlock(block, ArrayTensor(values, block.dtype), ArrayTensor(bases, block.dtype)))

    def rung(self, codec: str, seed: int) -> Rung:
        # What works on a whole matrix cannot be tried on a piece of one.
        change = self.whole if pipeline.parse(codec).lowrank else self.part
        share = change.block.numel / self.whole.block.numel
        data = b"".join(pipeline.encode(codec, change, np.random.Generator(np.random.SFC64(seed))))
        tensor = EncodedTensor(change.block, codec, change.base, lambda: BytesIO(data), 0, len(data))
        missed = sum(
            float(np.square(step.astype(np.float64) - unpacked(read)).sum())
            for step, read in zip(change.steps(), tensor.steps(), strict=True)
        )
        return Rung(codec, len(data) / share, missed / share)


def _nth(chunks: Iterator[Array], place: int) -> Array:
    return next(islice(chunks, place, None))
