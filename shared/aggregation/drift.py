"""Client drift of one round: movement of selected blocks, disagreement among senders, and progress over rounds.

Computed from the updates themselves, chunk by chunk in one pass, in float64. A sender's step is its value minus the
version's; all selected blocks count as one long vector.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from math import fsum, sqrt

import numpy as np

from tessera.shared.tensors.lazy import CHUNK, PIECE, Array, Tensor, lockstep

BUCKETS = 4093
"""Entries of a sketch: enough for an inner product that is right to 1/sqrt(4093) of the lengths, 1.6 %.

A prime, since the entries of a matrix's column are as far apart as it is wide, which is often a power of two: they
fall into different buckets.
"""

SHIFT = 1021
"""Offset, in buckets, between the starts of consecutive blocks."""


DRIFT = "drift."
"""The prefix of a version's scalars by role. Each is a length, as a share of the length of the role's blocks."""
MOVEMENT = f"{DRIFT}movement."
"""The length of the weighted mean step."""
DISAGREEMENT = f"{DRIFT}disagreement."
"""The weighted rms over sites of a step less the mean step."""
NOISE = f"{DRIFT}noise."
"""The movement to expect from as much disagreement, if the sites' steps had independent directions."""


@dataclass(frozen=True)
class DriftLengths:
    """Squared Euclidean lengths over all the blocks looked at."""

    senders: int
    """Of the block that most sent."""
    size: float
    """Of the blocks as they were."""
    movement: float
    """Of the senders' weighted mean step."""
    disagreement: float
    """The weighted mean, over a block's senders, of the squared length of their step less the mean step."""
    noise: float
    """Expected movement if the senders' steps had equal lengths and independent directions.

    Independent steps of variance s^2 and weights p have a weighted mean of variance s^2 sum p^2, and a disagreement
    of s^2 (1 - sum p^2) in the mean: so the noise is the disagreement over N - 1, where N = 1 / sum p^2 is the number
    of senders of equal weight that would average as well (Kish 1965). A block with one sender adds nothing to it.
    """
    sketch: Array
    """The mean step in short, float64 [BUCKETS]: the inner product of two sketches is that of the steps, nearly."""


def agreement(
    model: Mapping[str, Tensor], names: Sequence[str], senders: Sequence[tuple[float, Mapping[str, Tensor]]]
) -> DriftLengths:
    """Look at the named blocks of a round's updates. Each of `senders` is a weight and the blocks that it sent. A
    block that none of them sent counts for nothing.

    The names' order is part of a sketch: only sketches of the same names in the same order can be compared.
    """
    found = [
        _of_block(model[name], having, place)
        for place, name in enumerate(names)
        if (having := [(weight, blocks[name]) for weight, blocks in senders if name in blocks])
    ]
    return DriftLengths(
        senders=max((one.senders for one in found), default=0),
        size=fsum(one.size for one in found),
        movement=fsum(one.movement for one in found),
        disagreement=fsum(one.disagreement for one in found),
        noise=fsum(one.noise for one in found),
        sketch=np.sum([np.zeros(BUCKETS), *(one.sketch for one in found)], axis=0),
    )


def drift_by_role(
    model: Mapping[str, Tensor], roles: Mapping[str, str], senders: Sequence[tuple[float, Mapping[str, Tensor]]]
) -> dict[str, float]:
    """Return the scalars of each role whose blocks two or more sites sent. `roles` has each block's role by its name.
    Blocks of length zero have no scalar."""
    scalars: dict[str, float] = {}
    for role in dict.fromkeys(roles.values()):
        seen = agreement(model, [name for name, of in roles.items() if of == role], senders)
        if seen.senders > 1 and seen.size:
            squares = {MOVEMENT: seen.movement, DISAGREEMENT: seen.disagreement, NOISE: seen.noise}
            scalars |= {kind + role: sqrt(square / seen.size) for kind, square in squares.items()}
    return scalars


def _of_block(base: Tensor, senders: Sequence[tuple[float, Tensor]], place: int) -> DriftLengths:
    whole = fsum(weight for weight, _ in senders)
    shares = [weight / whole for weight, _ in senders]
    weights = np.array(shares)
    size, movement, disagreement, sketch = 0.0, 0.0, 0.0, np.zeros(BUCKETS)
    for number, (start, *parts) in enumerate(lockstep([base, *(tensor for _, tensor in senders)])):
        mean = np.empty(start.size)
        # Piece by piece, so that the steps of all senders stay in the cache between one sum and the next.
        for first in range(0, start.size, PIECE):
            piece = slice(first, first + PIECE)
            origin = start[piece].astype(np.float64)
            steps = np.stack([part[piece] for part in parts]).astype(np.float64) - origin  # [senders, piece]
            mean[piece] = weights @ steps
            # Apart from the mean, not as a difference of sums of squares, which would cancel where they agree.
            steps -= mean[piece]
            disagreement += float(weights @ np.einsum("sp,sp->s", steps, steps))
            size += float(origin @ origin)
        movement += float(mean @ mean)
        sketch += _sketch(mean, place, number)
    once = fsum(share**2 for share in shares)
    noise = disagreement * once / (1 - once) if len(senders) > 1 else 0.0
    return DriftLengths(len(senders), size, movement, disagreement, noise, sketch)


def _sketch(values: Array, place: int, number: int) -> Array:
    """Return sums of the values with signs that follow from where they are (Charikar, Chen and Farach-Colton
    2002)."""
    # The raw words of this generator are the same on every machine and in every release of numpy.
    words = np.random.Philox(key=[place, number]).random_raw(-(-values.size // 64)).astype("<u8")
    signs = np.unpackbits(words.view(np.uint8), count=values.size)
    signed = np.zeros(-(-values.size // BUCKETS) * BUCKETS)
    np.copyto(signed[: values.size], values)
    np.negative(signed[: values.size], out=signed[: values.size], where=signs.astype(bool))
    # Further chunks and blocks begin at other buckets, or a column would come into the same few of them each time.
    return np.roll(signed.reshape(-1, BUCKETS).sum(axis=0), number * CHUNK + place * SHIFT)
