"""One case of a round, and the sides that are compared in it."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import payloads
from benchmarks.federation import DATASET, PAIRS, Federation
from benchmarks.measuring import failure
from benchmarks.network import Certificates
from benchmarks.rounds.bare import Bare
from benchmarks.rounds.beside import Beside
from benchmarks.rounds.sides import Comparison, Side, Summary, Turn
from benchmarks.rounds.tessera import Tessera
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW

BESIDE_ROUNDS = 3
"""The most of another system in one turn: they take long."""

VALUES = {"include": [{"roles": ["value"]}]}
PROMPTS = {"include": [{"names": ["prompts.*"]}]}
"""What partial exchanges send; all else is fetched once, and then comes from the worker's cache."""


@dataclass(frozen=True)
class Case:
    size: str
    workers: int
    exchange: str = "full"
    codec: str = LOSSLESS

    @property
    def sent(self) -> dict[str, Any] | None:
        return {"full": None, "value blocks": VALUES, "prompts": PROMPTS}[self.exchange]

    @property
    def dataset(self) -> str:
        return PAIRS if self.exchange == "prompts" else DATASET

    @property
    def kind(self) -> str:
        return "raw" if self.codec == RAW else self.exchange

    def __str__(self) -> str:
        return f"{self.size} x {self.workers}, {self.exchange}, {self.codec}"


@contextmanager
def federation_of(folder: Path, workers: int, certificates: Certificates | None = None) -> Iterator[Federation]:
    """A coordinator and that many workers, all waiting."""
    with Federation(folder, certificates) as federation:
        federation.start_workers(workers, payloads.write_examples(folder))
        yield federation


def measure(
    case: Case, federation: Federation, folder: Path, turns: int, rounds: int, beside: Mapping[str, str] | None = None
) -> Comparison:
    """Measure every side of a case, all in turns; `beside` has the commands of other systems by name."""
    folder.mkdir(parents=True, exist_ok=True)
    model = payloads.make(folder, federation.processes, case.size)
    tessera = Tessera(federation, model, case.sent, case.codec, case.dataset)
    first = tessera.turn(rounds)
    down, up = (int((nbytes or 0) / case.workers) for nbytes in (first.sent, first.received))
    certificates = federation.certificates
    others: list[Side] = [Bare(folder / "bare", case.workers, down, up, certificates)]
    others += [
        Beside(name, command, folder / name, model.path, case.workers, certificates)
        for name, command in (beside or {}).items()
    ]
    return compare(tessera, first, others, turns, rounds)


def compare(tessera: Side, first: Turn, others: Sequence[Side], turns: int, rounds: int) -> Comparison:
    """Measure the other sides, in turns with Tessera's after its first. Leave out another system that fails."""
    taken: dict[str, list[Turn]] = {tessera.name: [first]}
    failures: dict[str, str] = {}
    # With one turn for each, one after the other has the machine's memory.
    for group in [[side] for side in others] if turns == 1 else [others]:
        with ExitStack() as stack:
            for side in group:
                with _leaving_out(side, failures):
                    taken[side.name] = []
                    stack.enter_context(side)
            for _ in range(turns):
                for side in (tessera, *group):
                    if len(taken[side.name]) < turns and side.name not in failures:
                        with _leaving_out(side, failures):
                            some = min(rounds, BESIDE_ROUNDS) if side.may_fail else rounds
                            taken[side.name].append(side.turn(some))
    found = {name: Summary.of(turns) for name, turns in taken.items() if name not in failures}
    return Comparison(found, failures)


@contextmanager
def _leaving_out(side: Side, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, RuntimeError, OSError, subprocess.SubprocessError) as fault:
        if not side.may_fail:
            raise
        failures[side.name] = failure(fault)
