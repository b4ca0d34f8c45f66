"""Choice between a lossless codec and raw blocks, by the predicted time to the end of the round.

All costs are seconds for each byte before coding. The time of a raw update is that of its line. A coded one is first
encoded, then sends fewer bytes, and then the coordinator decodes it, with the others of its round.
"""

from __future__ import annotations

import hashlib
import math
import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from io import BytesIO
from statistics import median
from typing import NamedTuple

import numpy as np

from tessera.shared.model.blocks import Block
from tessera.shared.schema import MAX_SECONDS_PER_BYTE
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor
from tessera.shared.updates.codecs import pipeline
from tessera.shared.updates.update_file import TrainedBlock

CHOSEN_BYTES = 1 << 20
"""The smallest update for which there is a choice: the time of a smaller one is that of its requests."""

WORTH_A_CHANGE = 0.9
"""The other choice is taken only if it needs less than this share of the time, so that noise changes nothing."""

MIN_DIFFERENCE_BYTES = 1 << 16
"""The smallest total size of missing blocks for which a difference is requested."""

DECODED_PASSES = 2
"""The coordinator decodes an update when it checks it, and again when it merges it."""

PROBED_BLOCKS = 4
PROBES_KEPT = 5
SAMPLE_CHUNKS = 2
TRIES = 3


@dataclass(frozen=True)
class Coding:
    """Seconds of a processor for encoding and decoding a byte, and the share of its bytes that a codec leaves."""

    encode: float
    decode: float
    ratio: float


class Prediction(NamedTuple):
    """Seconds until the end of the round."""

    raw: float
    coded: float


def predict(nbytes: int, line: float, coding: Coding) -> Prediction:
    """Return the times of `nbytes` raw and coded, on a line that takes `line` seconds for a byte.

    Costs are limited to MAX_SECONDS_PER_BYTE, and the ratio to 1; those that are no numbers count as the limit.
    """
    line, encode, decode = (_bounded(cost, MAX_SECONDS_PER_BYTE) for cost in (line, coding.encode, coding.decode))
    return Prediction(nbytes * line, nbytes * (encode + _bounded(coding.ratio, 1.0) * line + decode))


def pays(predicted: Prediction, *, pays_now: bool | None = None) -> bool:
    """Return whether coding takes less time, or, of a choice that was made before, whether it is kept or taken."""
    if pays_now is None:
        return predicted.coded < predicted.raw
    now, other = predicted.coded, predicted.raw
    if not pays_now:
        now, other = other, now
    return pays_now if other >= WORTH_A_CHANGE * now else not pays_now


def _bounded(cost: float, most: float) -> float:
    return most if math.isnan(cost) else min(max(cost, 0.0), most)


# ---------------------------------------------------------------- costs of this machine


def probe(codec: str, changes: Sequence[TrainedBlock]) -> tuple[float, float]:
    """Encode the start of the largest of one or more changes. Return the seconds of a processor for a byte, and the
    share of its bytes that the codec leaves."""
    largest = sorted(changes, key=lambda change: change.block.numel, reverse=True)[:PROBED_BLOCKS]
    samples = [change.sample(0, pipeline.PROBE) for change in largest]
    seconds, nbytes = [], 0
    for sample in samples:
        began = time.thread_time()
        nbytes += sum(map(len, pipeline.encode(codec, sample)))
        seconds.append((time.thread_time() - began) / sample.block.nbytes)
    # The first one fills the caches.
    return median(seconds), nbytes / sum(sample.block.nbytes for sample in samples)


_measuring = threading.Lock()


def typical_coding(codec: str) -> Coding:
    """Return what a codec costs this machine on float32 values that have moved as in fine-tuning, measured once."""
    # One thread measures: all tasks of a first round are leased at once, and a cache alone lets each of them measure.
    with _measuring:
        return _typical_coding(codec)


@lru_cache(maxsize=16)
def _typical_coding(codec: str) -> Coding:
    rng = np.random.default_rng(0)
    scales = np.float32(2e-2), np.float32(1e-4)
    base, step = (np.tile(scale * rng.standard_normal(CHUNK, np.float32), SAMPLE_CHUNKS) for scale in scales)
    block = Block(tensor="sample", role="other", shape=base.shape, dtype="F32")
    change = TrainedBlock(block, ArrayTensor(base + step), ArrayTensor(base))
    encode, ratio = min(probe(codec, [change]) for _ in range(TRIES))
    data = b"".join(pipeline.encode(codec, change))

    def decode() -> None:
        for _ in pipeline.decode(codec, block, change.base, BytesIO(data), len(data)):
            pass

    return Coding(encode, _least_seconds(decode) / block.nbytes, ratio)


@lru_cache(maxsize=1)
def handling_seconds() -> float:
    """Return the time in which either end hashes and writes a byte that is sent: writing takes about as long."""
    data = bytes(CHUNK)
    return 2 * _least_seconds(lambda: hashlib.sha256(data).digest()) / len(data)


def _least_seconds(act: Callable[[], object]) -> float:
    """Return the processor time of the best of some tries, of which the first fills caches."""
    found = []
    for _ in range(TRIES):
        began = time.thread_time()
        act()
        found.append(time.thread_time() - began)
    return min(found)


def decode_delay(codec: str, updates: int, processors: int, load: float = 0.0) -> float:
    """Return the seconds by which each byte of coded updates delays the end of their round at a coordinator.

    It decodes the updates of the round at once on its processors, each of which `load` programs want, and handles
    fewer bytes of them.
    """
    typical = typical_coding(codec)
    work = DECODED_PASSES * typical.decode - (1 - typical.ratio) * handling_seconds()
    return max(0.0, work) * max(1.0, updates / processors, load)


def difference_pays(nbytes: int, line: float | None, contention: float) -> bool:
    """Return whether the difference of two versions arrives before `nbytes` of blocks would.

    The coordinator encodes it and stores it first, and this machine decodes it beside other programs. True for many
    bytes on an unmeasured line.
    """
    if line is None or nbytes < MIN_DIFFERENCE_BYTES:
        return nbytes >= MIN_DIFFERENCE_BYTES
    typical = typical_coding(pipeline.LOSSLESS)
    made = typical.encode + handling_seconds()
    return pays(predict(nbytes, line, Coding(made, contention * typical.decode, typical.ratio)))


# ---------------------------------------------------------------- choices of a worker


class CodecChooser:
    """A worker's choices for its updates, run by run, with the probes that they rest on."""

    def __init__(self) -> None:
        self._probes: dict[str, deque[tuple[float, float]]] = {}
        self._pays: dict[str, bool] = {}

    def choose(
        self,
        run: str,
        codec: str,
        changes: Sequence[TrainedBlock],
        *,
        line: float | None,
        contention: float,
        decode: float | None,
    ) -> str:
        """Return `codec`, which is lossless, or `raw` for an update of a run.

        `line` is the line's time for a byte, `contention` the time of a second of computing, and `decode` the delay
        for a byte that the coordinator reports; without its report, two decodings on this machine stand for it.
        """
        nbytes = sum(change.block.nbytes for change in changes)
        # While nothing is known of the line, few bytes are worth more than little work.
        if line is None or nbytes < CHOSEN_BYTES or codec == pipeline.RAW:
            return codec
        probes = self._probes.setdefault(run, deque(maxlen=PROBES_KEPT))
        probes.append(probe(codec, changes))
        encode, ratio = (median(figures) for figures in zip(*probes, strict=True))
        work = contention * (encode - (1 - ratio) * handling_seconds())
        coding = Coding(work, decode_delay(codec, 1, 1) if decode is None else decode, ratio)
        self._pays[run] = pays(predict(nbytes, line, coding), pays_now=self._pays.get(run))
        return codec if self._pays[run] else pipeline.RAW
