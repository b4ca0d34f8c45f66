"""Choice of a codec per block so that an update fits a byte budget with little error."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from io import BytesIO
from typing import BinaryIO

import numpy as np

from tessera.shared.tensors.lazy import CHUNK, unpacked
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, WrittenUpdate, codec_for, write_update

COARSER = (
    "delta+bf16+shuffle+zstd",
    "delta+int8+zstd",
    "delta+int4+zstd",
    "delta+topk=0.05+shuffle+zstd",
    "delta+topk=0.01+shuffle+zstd",
)
"""Codecs that may replace the run's, each smaller and less exact than the previous codec."""

TRIES = 8


class OverBudget(ValueError):
    """An update that exceeds its budget with every codec."""


@dataclass(frozen=True)
class CodecEstimate:
    """Estimated size and error of a block under one codec, from a sample of the block."""

    codec: str
    nbytes: float
    error: float
    """Sum of squared errors."""


def write_within(
    file: BinaryIO, codec: str, changes: Sequence[TrainedBlock], budget: int, seed: int = 0, *, norms: bool = False
) -> WrittenUpdate:
    """Write an update of at most `budget` bytes, including the header, to a seekable file.

    Every block starts with the run's codec; while the update is too large, the block with the least error per byte
    saved moves to the next coarser one. Raises OverBudget with the smallest size reached.
    """
    ladders = [_ladder(codec, change, seed) for change in changes]
    room, over = float(budget), 0
    for attempt in range(TRIES):
        # The last attempt uses the smallest codecs.
        chosen = _fitted(ladders, room if attempt < TRIES - 1 else 0)
        file.seek(0)
        file.truncate()
        names = [change.block.name for change in changes]
        codecs = {name: rung.codec for name, rung in zip(names, chosen, strict=True)}
        written = write_update(file, codecs, changes, seed, norms=norms)
        over = file.seek(0, 2) - budget
        if over <= 0:
            return written
        # Sizes are estimates, and the header adds bytes.
        room -= (1 + attempt / 2) * over
    raise OverBudget(
        f"the update needs about {budget + over} bytes even with the smallest codecs; {budget} are allowed"
    )


def _fitted(ladders: Sequence[Sequence[CodecEstimate]], budget: float) -> list[CodecEstimate]:
    """Return one rung per ladder: start at the top and take the cheapest step down until all fit."""
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


def _price(ladder: Sequence[CodecEstimate], place: int) -> float:
    """Return the error added per byte saved by the next step down."""
    here, next_ = ladder[place], ladder[place + 1]
    return (next_.error - here.error) / (here.nbytes - next_.nbytes)


def _ladder(codec: str, change: TrainedBlock, seed: int) -> list[CodecEstimate]:
    sample = _Sample.of(change)
    rungs: list[CodecEstimate] = []
    for each in (codec, *COARSER):
        rung = sample.rung(codec_for(each, change), seed)
        if not rungs or rung.nbytes < rungs[-1].nbytes:
            rungs.append(rung)
    return rungs


@dataclass(frozen=True)
class _Sample:
    """The middle chunk of a change, as a change of its own."""

    whole: TrainedBlock
    part: TrainedBlock

    @classmethod
    def of(cls, change: TrainedBlock) -> _Sample:
        return cls(change, change.sample(change.block.numel // CHUNK // 2))

    def rung(self, codec: str, seed: int) -> CodecEstimate:
        # Low-rank codecs need the whole matrix.
        change = self.whole if pipeline.parse(codec).lowrank else self.part
        share = change.block.numel / self.whole.block.numel
        data = b"".join(pipeline.encode(codec, change, np.random.Generator(np.random.SFC64(seed))))
        tensor = EncodedTensor(change.block, codec, change.base, lambda: BytesIO(data), 0, len(data))
        missed = sum(
            float(np.square(step.astype(np.float64) - unpacked(read)).sum())
            for step, read in zip(change.steps(), tensor.steps(), strict=True)
        )
        return CodecEstimate(codec, len(data) / share, missed / share)
