"""A sum over many senders holds a chunk or two of all of them together."""

from __future__ import annotations

import io
import tracemalloc
from functools import partial

import numpy as np
import pytest

from tessera.shared.aggregation.mean import average
from tessera.shared.model.blocks import Block
from tessera.shared.tensors.lazy import CHUNK, ArrayTensor
from tessera.shared.updates.update_file import EncodedTensor, TrainedBlock, read_update, write_update

SENDERS = 60
CHUNK_BYTES = 4 * CHUNK


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("codec", ["raw", "bits+shuffle+zstd", "delta", "delta+int8"])
def test_the_memory_of_a_mean_does_not_grow_with_its_senders(codec: str, workers: int) -> None:
    """Each site's update has two chunks of 1 MiB, and is of one worker or the mean of two."""
    block = Block(tensor="w", role="mlp", shape=(2 * CHUNK,), dtype="F32")
    base = ArrayTensor(np.random.default_rng(0).random(2 * CHUNK, np.float32))
    file = io.BytesIO()
    write_update(file, {"w": codec}, [TrainedBlock(block, ArrayTensor(base.values + np.float32(0.5)), base)])
    data = file.getvalue()

    def sent() -> EncodedTensor:
        return read_update(partial(io.BytesIO, data), len(data), {"w": block}, {"w": base})["w"]

    def of_site() -> dict[str, EncodedTensor]:
        return average({"w": base}, [(1.0, {"w": sent()}) for _ in range(workers)], "cohort")  # type: ignore[return-value]

    senders = [(1.0, {"w": sent()} if workers == 1 else of_site()) for _ in range(SENDERS)]
    merged = average({"w": base}, senders, "cohort")["w"].chunks()
    tracemalloc.start()
    try:
        for place, chunk in enumerate(merged):
            start = base.values[place * CHUNK : (place + 1) * CHUNK]
            np.testing.assert_allclose(chunk, start + np.float32(0.5), atol=0.01)
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    # The result, its step, those of one site, and what its codec computes on the way.
    assert peak < 20 * CHUNK_BYTES
