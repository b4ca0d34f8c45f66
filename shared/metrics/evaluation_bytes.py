"""Bytes that evaluations fetched, by round."""

from collections import Counter
from collections.abc import Iterable

from tessera.shared.api.runs import Measurement


def round_of(version: int, rounds: int) -> int:
    """Return the round, of a run of `rounds`, that counts the bytes of a version's evaluations.

    It is the round that trains from the version: a site that evaluates the version first has it when it trains. The
    last round counts those of the last version too.
    """
    return min(version + 1, rounds)


def evaluation_bytes(measurements: Iterable[Measurement], rounds: int) -> Counter[tuple[int, int]]:
    """Return the bytes that evaluations fetched, by round and attempt: the first attempt counts them."""
    fetched = Counter[tuple[int, int]]()
    for one in measurements:
        fetched[round_of(one.version, rounds), 1] += one.download_bytes
    return fetched
