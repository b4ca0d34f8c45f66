"""The memory of a LoRA run on an external base, in real processes."""

from pathlib import Path

import pytest

from benchmarks.large_base import SMALL, measure

MEDIUM = {**SMALL, "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 12, "vocab_size": 16_000}
MIB = 1 << 20


@pytest.mark.long
def test_a_worker_holds_its_base_once_and_the_coordinator_nothing_of_it(tmp_path: Path) -> None:
    few, many = (measure(tmp_path / str(number), config, 16) for number, config in enumerate((SMALL, MEDIUM)))
    larger = many.base_bytes - few.base_bytes
    assert larger > 250 * MIB
    # Float32 weights made first, or a second copy, would be twice as much.
    assert many.worker_bytes - few.worker_bytes < 1.5 * larger
    assert many.coordinator_bytes - few.coordinator_bytes < 0.3 * larger
    assert many.sent_bytes < 0.1 * many.base_bytes
