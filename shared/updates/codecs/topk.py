"""Only the largest differences: `topk=0.01` sends one percent, the largest of each run of 65,536.

A sent difference is its index in its run and its value as bfloat16, two bytes each. The site keeps the others and
adds them to the next round's differences (error feedback: Seide et al. 2014; Karimireddy et al. 2019, arXiv
1901.09847).
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from tessera.shared.tensors.lazy import Array, SparseElements, unpacked
from tessera.shared.updates.codecs.half_floats import BF16
from tessera.shared.updates.codecs.stage import F32, ArrayLayout, CodecError, Stage, floats_only

RUN = 1 << 16
U16 = np.dtype("<u2")
MAX_SHARE = 0.25
"""Above this, int8 sends all differences in as many bytes."""


@dataclass(frozen=True)
class TopK(Stage):
    name = "topk"
    lossless = False
    drops = True

    share: float

    @classmethod
    def of(cls, parameter: str | None) -> TopK:
        try:
            share = float(parameter or "")
        except ValueError:
            share = 0.0
        if not 0 < share <= MAX_SHARE:
            raise CodecError("codec-parameter", f"stage topk takes a share up to {MAX_SHARE}, as in topk=0.01")
        return cls(share)

    def layout(self, layout: ArrayLayout) -> ArrayLayout:
        return ArrayLayout(2 * sum(self._kept(floats_only(type(self), layout).size)), U16)

    def encode(self, values: Array, base: Array, rng: np.random.Generator) -> Array:
        places, kept = [], []
        for start, count in zip(range(0, values.size, RUN), self._kept(values.size), strict=True):
            run = values[start : start + RUN]
            largest = np.sort(np.argpartition(np.abs(run), run.size - count)[run.size - count :])
            places.append(largest.astype(U16))
            kept.append(run[largest].astype(BF16).view(U16))
        return np.concatenate([*places, *kept])

    def decode(self, encoded: Array, layout: ArrayLayout, base: Array) -> Array:
        return unpacked(self.packed(encoded, layout))

    def packed(self, encoded: Array, layout: ArrayLayout) -> SparseElements:
        half = encoded.size // 2
        places = encoded[:half].astype(np.int32)
        starts = np.repeat(np.arange(0, layout.size, RUN, dtype=np.int32), self._kept(layout.size))
        within = np.minimum(layout.size - starts, RUN)
        # They increase within a run; between runs they may decrease.
        if (places >= within).any() or (np.diff(places + starts) <= 0).any():
            raise CodecError(
                "places-invalid", "the indices of the largest differences are not in order, or beyond the end"
            )
        return SparseElements(layout.size, places + starts, encoded[half:].view(BF16).astype(F32))

    def _kept(self, size: int) -> list[int]:
        """Return the number of sent differences of each run."""
        return [max(1, round(self.share * min(RUN, size - start))) for start in range(0, size, RUN)]


STAGES = (TopK,)
