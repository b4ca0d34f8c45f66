"""The choice of a codec by predicted time: predictions at the edges, hysteresis, and the choices of a worker."""

from __future__ import annotations

import math
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest

from tessera.shared.model.blocks import Block
from tessera.shared.schema import MAX_SECONDS_PER_BYTE
from tessera.shared.tensors.lazy import ArrayTensor
from tessera.shared.updates.codec_choice import (
    CHOSEN_BYTES,
    MIN_DIFFERENCE_BYTES,
    CodecChooser,
    Coding,
    Prediction,
    decode_delay,
    difference_pays,
    handling_seconds,
    pays,
    predict,
    probe,
    typical_coding,
)
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW
from tessera.shared.updates.update_file import TrainedBlock

NAN, INF = math.nan, math.inf
MOST = MAX_SECONDS_PER_BYTE
CODING = Coding(encode=2e-9, decode=4e-9, ratio=0.5)
SLOW, FAST = 1e-3, 0.0


def change(numel: int = 1 << 18, name: str = "block") -> TrainedBlock:
    rng = np.random.default_rng(0)
    base = (0.02 * rng.normal(size=numel)).astype(np.float32)
    value = base + np.float32(1e-4) * rng.normal(size=numel).astype(np.float32)
    block = Block(tensor=name, role="mlp", shape=(numel,), dtype="F32")
    return TrainedBlock(block, ArrayTensor(value), ArrayTensor(base))


CHANGES = [change()]


def chosen(chooser: CodecChooser, line: float | None, decode: float | None = 0.0, run: str = "run") -> str:
    return chooser.choose(run, LOSSLESS, CHANGES, line=line, contention=1.0, decode=decode)


@pytest.mark.parametrize(
    ("nbytes", "line", "coding", "raw", "coded"),
    [
        # 100 bytes: 10 ns each raw; 2 + 0.5 x 10 + 4 coded.
        (100, 1e-8, CODING, 1e-6, 1.1e-6),
        (0, 1e-8, CODING, 0.0, 0.0),
        (100, 0.0, CODING, 0.0, 6e-7),
        # A line of 0 bytes a second, or of no number.
        (1, INF, CODING, MOST, MOST / 2 + 6e-9),
        (1, NAN, CODING, MOST, MOST / 2 + 6e-9),
        (1, -1.0, CODING, 0.0, 6e-9),
        # A coordinator that lies about its decoding.
        (1, 1e-8, Coding(2e-9, INF, 0.5), 1e-8, MOST + 7e-9),
        (1, 1e-8, Coding(2e-9, NAN, 0.5), 1e-8, MOST + 7e-9),
        (1, 1e-8, Coding(2e-9, -1.0, 0.5), 1e-8, 7e-9),
        # A codec that makes the bytes more.
        (1, 1e-8, Coding(0.0, 0.0, 3.0), 1e-8, 1e-8),
    ],
)
def test_a_prediction_is_finite_for_any_costs(
    nbytes: int, line: float, coding: Coding, raw: float, coded: float
) -> None:
    assert predict(nbytes, line, coding) == pytest.approx((raw, coded), rel=1e-12, abs=0)


@pytest.mark.parametrize(
    ("raw", "coded", "now", "expected"),
    [
        (1.0, 0.99, None, True),
        (1.0, 1.0, None, False),
        (0.0, 0.0, None, False),
        (1.0, 0.95, False, False),
        (1.0, 0.89, False, True),
        (0.95, 1.0, True, True),
        (0.89, 1.0, True, False),
        (0.0, 0.0, True, True),
    ],
)
def test_a_choice_changes_only_for_a_tenth_of_the_time(
    raw: float, coded: float, now: bool | None, expected: bool
) -> None:
    assert pays(Prediction(raw, coded), pays_now=now) is expected


def test_a_probe_reads_the_start_of_the_largest_blocks() -> None:
    seconds, ratio = probe(LOSSLESS, [change(1, "smallest"), change(10, "small"), *CHANGES])
    assert seconds > 0
    assert 0.5 < ratio < 0.8


def test_a_blocks_sample_has_the_bytes_of_its_chunk() -> None:
    whole = change((1 << 18) + 7)
    sample = whole.sample(1, 5)
    assert sample.block.shape == (5,)
    assert next(iter(sample.values())).tobytes() == whole.value.values[1 << 18 :][:5].tobytes()  # type: ignore[attr-defined]
    assert next(iter(sample.base.chunks())).tobytes() == whole.base.values[1 << 18 :][:5].tobytes()  # type: ignore[attr-defined]


def test_updates_delay_a_round_by_the_processors_that_they_share() -> None:
    one = decode_delay(LOSSLESS, 1, 2)
    assert decode_delay(LOSSLESS, 2, 2) == one
    assert decode_delay(LOSSLESS, 16, 2) == pytest.approx(8 * one)
    # Three programs want each processor.
    assert decode_delay(LOSSLESS, 1, 2, load=3.0) == pytest.approx(3 * one)
    assert decode_delay(LOSSLESS, 0, 2) == one


def test_what_a_machine_needs_for_a_codec_is_measured_once() -> None:
    codec = "xor+shuffle+zstd"  # which no other test measures
    with ThreadPoolExecutor(8) as pool:
        found = list(pool.map(typical_coding, [codec] * 8))
    assert len({id(coding) for coding in found}) == 1
    assert min(vars(typical_coding(LOSSLESS)).values()) > 0
    assert handling_seconds() > 0


def test_a_difference_is_requested_for_many_bytes_unless_the_line_is_faster() -> None:
    assert difference_pays(MIN_DIFFERENCE_BYTES, None, 1.0)
    assert difference_pays(MIN_DIFFERENCE_BYTES, SLOW, 1.0)
    assert not difference_pays(MIN_DIFFERENCE_BYTES, FAST, 1.0)
    assert not difference_pays(MIN_DIFFERENCE_BYTES - 1, SLOW, 1.0)
    # A processor that others have.
    assert not difference_pays(MIN_DIFFERENCE_BYTES, SLOW, 1e9)


# ---------------------------------------------------------------- choices of a worker


def test_blocks_are_coded_on_a_slow_line_and_raw_on_a_fast_one() -> None:
    assert chosen(CodecChooser(), SLOW) == LOSSLESS
    assert chosen(CodecChooser(), FAST) == RAW


def test_blocks_are_coded_while_the_line_is_unmeasured() -> None:
    assert chosen(CodecChooser(), None) == LOSSLESS


def test_few_bytes_and_no_bytes_are_coded_whatever_the_line() -> None:
    few = [change(CHOSEN_BYTES // 4 - 1)]
    for changes in ([], few):
        assert CodecChooser().choose("r", LOSSLESS, changes, line=FAST, contention=1.0, decode=0.0) == LOSSLESS


def test_a_busy_coordinator_gets_raw_blocks() -> None:
    line = 1e-5
    assert chosen(CodecChooser(), line, decode=0.0) == LOSSLESS
    assert chosen(CodecChooser(), line, decode=1e-5) == RAW


def test_a_busy_worker_sends_raw_blocks() -> None:
    chooser = CodecChooser()
    assert chooser.choose("r", LOSSLESS, CHANGES, line=1e-5, contention=1e6, decode=0.0) == RAW


def test_without_a_report_two_decodings_on_this_machine_stand_for_the_coordinators() -> None:
    assert chosen(CodecChooser(), SLOW, decode=None) == LOSSLESS
    assert chosen(CodecChooser(), FAST, decode=None) == RAW


def test_each_run_keeps_its_own_choice_between_two_that_are_equal() -> None:
    chooser = CodecChooser()
    assert chosen(chooser, SLOW, run="slow") == LOSSLESS
    assert chosen(chooser, FAST, run="fast") == RAW
    # About 0.37 of 0.1 ms is saved, of which decoding takes all but a little, or a little more.
    for decode in (3.5e-5, 3.9e-5):
        assert chosen(chooser, 1e-4, decode, "slow") == LOSSLESS
        assert chosen(chooser, 1e-4, decode, "fast") == RAW


def test_a_choice_follows_a_line_that_changes() -> None:
    chooser = CodecChooser()
    assert [chosen(chooser, line) for line in (FAST, SLOW, SLOW, FAST)] == [RAW, LOSSLESS, LOSSLESS, RAW]


def test_raw_blocks_stay_raw() -> None:
    assert CodecChooser().choose("r", RAW, CHANGES, line=SLOW, contention=1.0, decode=0.0) == RAW
