"""A memory of each site's latest update, so that fast sites do not decide where a buffered run goes.

CA2FL (Wang et al., ICLR 2024, "Tackling the Data Heterogeneity in Asynchronous Federated Learning with Cached Update
Calibration", algorithm 2) steps along `h + mean over the senders of (d - last)`, where h is the mean of all sites'
latest steps, d a sender's step and `last` its step before. Here all means are weighted as the method weighs updates,
and the server's learning rate is the senders' share of the weight, so that an update moves the model as far as in a
round of all sites. With S the weighted sum of the latest steps and N the sum of their weights after the round, of
which the senders have K:

    step = K / N * S / N + sum over the senders of (w d - v last) / N,    next h = S / N + the same sum,

where v is the weight of `last`. A site that sends for the first time has a `last` of zero, with weight zero. If all
sites of the memory send, the step is the mean of their updates.

h is in the version, one float32 tensor for each block; the latest updates are blobs that the coordinator keeps.
"""

from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass, replace
from math import fsum

import numpy as np

from tessera.shared.methods.base import State
from tessera.shared.rounds.server_step import MEMORY, negative_step
from tessera.shared.tensors.dtypes import DType
from tessera.shared.tensors.lazy import Array, ComputedTensor, RebasedTensor, StepSource, Tensor, weighted_steps
from tessera.shared.tensors.statistics import is_statistic

WEIGHT = "memory.weight"
"""The name of a version's scalar with the sum of the weights in its memory, in the method's unit (examples)."""


@dataclass(frozen=True)
class LatestUpdate:
    """A site's latest merged update."""

    site: str
    weight: float
    """Its weight when it was merged."""
    open: Callable[[], Mapping[str, StepSource]]
    """Opens its blocks."""


def forgotten(state: State) -> State:
    """Return a state without the memory of another run."""
    server_state = {name: tensor for name, tensor in state.server_state.items() if not name.startswith(MEMORY)}
    scalars = {name: value for name, value in state.scalars.items() if name != WEIGHT}
    return replace(state, server_state=server_state, scalars=scalars)


def calibrated(state: State, merged: State, senders: Mapping[str, float], latest: Sequence[LatestUpdate]) -> State:
    """Return the next state with the calibrated step and memory, from `merged`: the next state by the mean.

    `senders` has the weights of the merged updates by site, and `latest` the site's updates before. If the version's
    memory is not of these sites, as one has withdrawn, it is computed from their updates. Running means and
    variances are merged as without a memory: by steps, a variance could become negative.
    """
    if not senders:
        return merged
    known = {each.site for each in latest}
    share, past = fsum(senders.values()), [each for each in latest if each.site in senders]
    before = fsum(each.weight for each in latest)
    total = before - fsum(each.weight for each in past) + share
    is_lost = state.scalars.get(WEIGHT, 0.0) != before
    opened = [(each, each.open()) for each in (latest if is_lost else past)]

    def steps(name: str, base: Tensor, sites: Container[str], whole: float) -> Tensor | None:
        """Return the weighted sum of the sites' latest steps of a block, divided by `whole`."""
        of_sites = [(each.weight, blocks[name]) for each, blocks in opened if each.site in sites]
        terms = [(weight / whole, RebasedTensor(base, block)) for weight, block in of_sites]
        return weighted_steps(base, terms) if terms else None

    model, memory = dict(merged.model), dict[str, Tensor]()
    for name, base in state.model.items():
        if merged.model[name] is base or is_statistic(name):
            continue
        last = state.server_state.get(MEMORY + name) if not is_lost else steps(name, base, known, before)
        block = _Block(share / total, before / total)
        sources = (negative_step(base, merged.model[name]), last, steps(name, base, senders, total))
        model[name], memory[MEMORY + name] = block.calibrated(base, merged.model[name], *sources)
    server_state = {**merged.server_state, **memory}
    return replace(merged, model=model, server_state=server_state, scalars={**merged.scalars, WEIGHT: total})


@dataclass(frozen=True)
class _Block:
    share: float
    """K / N."""
    kept: float
    """N before the round, over N after it."""

    def calibrated(
        self, base: Tensor, merged: Tensor, mean: Tensor, last: Tensor | None, past: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Return a block's next value and memory. `mean` is the senders' mean step with its sign turned, `last` the
        memory, and `past` the sum of v last / N."""
        given = tuple(each for each in (mean, last, past) if each is not None)

        def read(parts: Sequence[Array]) -> tuple[Array, Array]:
            """Return S / N and the next memory."""
            wide = iter(part.astype(np.float64, copy=False) for part in parts)
            g = next(wide)
            h = self.kept * next(wide) if last is not None else np.zeros_like(g)
            return h, h - self.share * g - (next(wide) if past is not None else 0.0)

        def moved(parts: Sequence[Array]) -> Array:
            start, *rest = parts
            h, after = read(rest)
            # Subtracted, because x - 0.0 is x for every x, while -0.0 + 0.0 is 0.0.
            new: Array = start.astype(np.float64, copy=False) - ((1 - self.share) * h - after)
            return new

        kind: DType = "F64" if base.dtype == "F64" else "F32"
        memory = ComputedTensor(base.shape, kind, given, lambda parts: read(parts)[1])
        # If all sent, their mean, bit for bit.
        new = merged if self.share == 1 else ComputedTensor(base.shape, base.dtype, (base, *given), moved)
        return new, memory
