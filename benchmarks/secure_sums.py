"""What a secure sum costs senders, helpers and the coordinator, in one thread each.

python -m benchmarks.secure_sums                 100 MB of float32; minutes
python -m benchmarks.secure_sums --quick         1 MB, seconds: to see that it works
"""

from __future__ import annotations

import argparse
import os
import resource
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from io import BytesIO
from itertools import product
from pathlib import Path
from tempfile import TemporaryFile
from typing import BinaryIO, cast

import numpy as np

from benchmarks.measuring import OUT, Results, machine_speeds
from tessera.shared.privacy.discrete_gaussian import discrete_gaussian
from tessera.shared.privacy.noise import NoiseSource, secret_key
from tessera.shared.rounds.secure_sums import Precision, exponent_of
from tessera.shared.secure_sums.committee import SenderSet, write_mask_sums
from tessera.shared.secure_sums.envelope import make_envelope, new_seeds, own_blocks
from tessera.shared.secure_sums.keys import SealingKey, SigningKey
from tessera.shared.secure_sums.masked_update import read_ring, write_masked
from tessera.shared.secure_sums.messages import RingBlock, Terms
from tessera.shared.secure_sums.opened import MeanStep, OpenedSum
from tessera.shared.secure_sums.roster import signed_keys
from tessera.shared.tensors.lazy import CHUNK, Array, ArrayTensor, digest_of

BLOCKS = 24
SENDERS = (30, 200)
VALUES = 1 << 16
"""Of the block whose mean is compared."""
HELPERS = (4, 7)


@dataclass(frozen=True)
class Steps:
    """A block's step, made while it is read: nothing of a model is in memory."""

    values: Array
    times: int

    def steps(self) -> Iterator[Array]:
        return (self.values for _ in range(self.times))


def terms_of(helpers: int, senders: int, elements: int, *, bits: int = 32, exponent: int = -22) -> Terms:
    identities = [SigningKey.new() for _ in range(helpers)]
    keys = [signed_keys(f"site-{n}", key, SealingKey.new().public) for n, key in enumerate(identities)]
    blocks = {f"layer.{n:02}.value.weight": RingBlock(elements=elements, exponent=exponent) for n in range(BLOCKS)}
    about = {"run": "run", "round": 1, "attempt": 1, "version": digest_of(b"version"), "quorum": 5}
    about["settings"] = digest_of(b"settings")
    return Terms(helpers=keys, max_senders=senders, max_weight=1000, bits=bits, blocks=blocks, **about)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="1 MB, seconds: to see that it works")
    parser.add_argument("--out", type=Path, default=OUT, help="a folder for the results")
    given = parser.parse_args()
    times = 1 if given.quick else 4
    values = np.random.default_rng(1).normal(scale=1e-3, size=1 << 12 if given.quick else CHUNK).astype(np.float32)
    results = Results("secure_sums", "processor seconds of one core", out=given.out)
    if not given.quick:
        results.speeds = machine_speeds()
    changes = {f"layer.{n:02}.value.weight": Steps(values, times) for n in range(BLOCKS)}
    megabytes = 4 * BLOCKS * times * values.size / 1e6
    for helpers in HELPERS:
        _sender(results, terms_of(helpers, 200, times * values.size), changes, megabytes)
        for senders in SENDERS[:1] if given.quick else SENDERS:
            _helper(results, terms_of(helpers, senders, times * values.size), senders, megabytes)
    _noise(results, values.size * times)
    _accuracy(results)
    results.finish(given.out)


def _sender(results: Results, terms: Terms, changes: dict[str, Steps], megabytes: float) -> None:
    identity, helpers = SigningKey.new(), len(terms.helpers)

    def written(file: BinaryIO) -> None:
        for change in changes.values():
            file.writelines(steps.data for steps in change.steps())

    with TemporaryFile() as file:
        plain = _processor_seconds(partial(written, file))
    with TemporaryFile() as file:
        seeds = new_seeds(terms)
        masked = _processor_seconds(lambda: write_masked(file, terms, changes, 1000, seeds, 1))
        digest = digest_of(b"the file's")
        envelope = make_envelope(terms, "site", identity, 1000, list(changes), digest, seeds)
        text = envelope.model_dump_json()
        nbytes = file.seek(0, os.SEEK_END)

        def checked() -> None:
            own_blocks(envelope, terms)
            read_ring(
                lambda: cast("BinaryIO", os.fdopen(os.dup(file.fileno()), "rb")), nbytes, terms, sorted(changes)
            )

        file.seek(0)
        check = _processor_seconds(checked)
    limits = {4: (0.6, 2_000), 7: (1.6, 6_000)}[helpers]
    results.add(
        what="sender",
        helpers=helpers,
        MB=megabytes,
        cpu_s=masked,
        plain_cpu_s=plain,
        envelope_bytes=len(text),
        check_ms=1e3 * check,
    )
    results.aim(
        f"a sender's overhead for 100 MB with {helpers} helpers", (masked - plain) * 100 / megabytes, limits[0], " s"
    )
    results.aim(f"an envelope with {helpers} helpers", len(text), limits[1], " bytes")
    results.aim("the coordinator's check of an envelope and its file", 1e3 * check, 60, " ms")


def _noise(results: Results, count: int) -> None:
    """A site's share of the noise of client-level privacy."""
    source = NoiseSource(secret_key())
    seconds = _processor_seconds(
        lambda: [discrete_gaussian(source, 1 << 20, CHUNK) for _ in range(count // CHUNK + 1)]
    )
    results.add(what="noise", values=(count // CHUNK + 1) * CHUNK, cpu_s=seconds)


def _helper(results: Results, terms: Terms, senders: int, megabytes: float) -> None:
    """A helper's share if as few helpers as may be open the sums, and it has the same share as the others."""
    helpers, opening = len(terms.helpers), terms.tolerance + 1
    own = -(-len(terms.seeds) // opening)
    sites = [f"site-{n:03}" for n in range(senders)]
    found = SenderSet(terms, (), {block: tuple(sites) for block in terms.blocks})
    seeds = {site: new_seeds(terms)[:own] for site in sites}
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    with TemporaryFile() as file:
        seconds = _processor_seconds(lambda: write_mask_sums(file, found, seeds))
    grown = (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before) / 1024
    results.add(what="helper", helpers=helpers, senders=senders, MB=megabytes, cpu_s=seconds, grown_MiB=grown)
    limit = {30: 6.0, 200: 40.0}[senders]
    results.aim(
        f"a helper's work for 100 MB of {senders} sites, {helpers} helpers", seconds * 100 / megabytes, limit, " s"
    )
    results.aim("a helper's memory", grown, 64, " MiB")


class Values(ArrayTensor):
    """Values that are compared as stored ones are: by what they are, not one by one."""

    __eq__, __hash__ = object.__eq__, object.__hash__


def _accuracy(results: Results) -> None:
    """The distance of the mean from the plain mean, for sites of different weights and steps that agree in part: of
    a block of which no step is known, and of one with a last step."""
    rng = np.random.default_rng(2)
    start = rng.normal(scale=0.05, size=VALUES).astype(np.float32)
    common = rng.normal(size=VALUES).astype(np.float32)
    for bits, senders, share in product((32, 16), (5, 100), (1e-2, 1e-3, 1e-4)):
        scale = np.float32(0.05 * share)
        steps = scale * (common + rng.normal(size=(senders, VALUES)).astype(np.float32))
        later = Values(start + scale * common, "F32")
        for first in (True, False):
            before = later if first else Values(start, "F32")
            exponent = exponent_of(later, before, Precision.of(bits, senders))
            error = _error(steps, terms_of(4, senders, VALUES, bits=bits, exponent=exponent))
            about = f"{bits} bits, {senders} sites, steps of {share:g} of the values, {'first' if first else 'later'}"
            results.add(what=f"mean, {about}", relative_error=error)
            if bits == 32 and not first:
                results.aim(f"the relative l2 error of the mean, {about}", error, 1e-3)


def _error(steps: Array, terms: Terms) -> float:
    block, weights, rings = next(iter(terms.blocks)), [], []
    for seed, own in enumerate(steps):
        weights.append((1000, 300, 70, 10, 1000)[seed % 5])
        file = BytesIO()
        write_masked(file, terms, {block: Steps(own, 1)}, weights[-1], [], seed)
        rings.append(read_ring(partial(BytesIO, file.getvalue()), len(file.getvalue()), terms, [block])[block])
    factor = terms.max_weight * 2.0 ** terms.blocks[block].exponent / sum(weights)
    (mean,) = MeanStep(OpenedSum(rings, [], terms.bits, VALUES), factor, (VALUES,)).chunks()
    expected = np.average(steps.astype(np.float64), axis=0, weights=weights)
    return float(np.linalg.norm(mean - expected) / np.linalg.norm(expected))


def _processor_seconds(act: Callable[[], object]) -> float:
    began = time.process_time()
    act()
    return time.process_time() - began


if __name__ == "__main__":
    main()
