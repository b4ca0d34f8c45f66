"""One case of a round, and the sides that are compared in it."""

from __future__ import annotations

import subprocess
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import payloads
from benchmarks.federation import DATASET, PAIRS, Federation
from benchmarks.measuring import failure
from benchmarks.network import DIRECT, Network
from benchmarks.rivals.flare import Flare
from benchmarks.rivals.flower import Flower
from benchmarks.rounds.bare import Bare
from benchmarks.rounds.sides import Comparison, Side, Summary, Turn
from benchmarks.rounds.tessera import Tessera
from tessera.shared.updates.codecs.pipeline import LOSSLESS, RAW
from tessera.shared.updates.model_folder import ModelFolder

RIVALS: Mapping[str, Callable[[Path, ModelFolder, int, Network], Side]] = {"flower": Flower, "flare": Flare}
RIVALS_ROUNDS = 3
"""The most in one turn: theirs take long."""

VALUES = {"include": [{"roles": ["value"]}]}
PROMPTS = {"include": [{"names": ["prompts.*"]}]}
ADAPTERS = {"include": [{"roles": ["adapter"]}, {"roles": ["head"]}]}
"""What partial exchanges send; all else is fetched once, and then comes from the worker's cache."""


def third_of_layers(layers: int) -> dict[str, Any]:
    """Select as many layers as SAFL sends by default, the first ones, with the head."""
    return {"include": [{"layers": list(range(max(1, round(layers / 3))))}, {"roles": ["head"]}]}


@dataclass(frozen=True)
class Case:
    size: str
    workers: int
    exchange: str = "full"
    codec: str = LOSSLESS
    download_codec: str = "lossless"

    @property
    def model(self) -> str:
        return f"{self.size} lora" if self.exchange == "lora" else self.size

    @property
    def sent(self) -> dict[str, Any] | None:
        if self.exchange == "safl":
            return third_of_layers(payloads.PAYLOADS[self.model].config["num_hidden_layers"])
        return {"full": None, "value blocks": VALUES, "prompts": PROMPTS, "lora": ADAPTERS}[self.exchange]

    @property
    def dataset(self) -> str:
        return PAIRS if self.exchange == "prompts" else DATASET

    @property
    def kind(self) -> str:
        return "raw" if self.codec == RAW else self.exchange

    def __str__(self) -> str:
        return f"{self.size} x {self.workers}, {self.exchange}, {self.codec}"


@contextmanager
def federation_of(folder: Path, workers: int, network: Network = DIRECT) -> Iterator[Federation]:
    """A coordinator and that many workers, all waiting."""
    with Federation(folder, network) as federation:
        federation.start_workers(workers, payloads.write_examples(folder))
        yield federation


def measure(
    case: Case, federation: Federation, folder: Path, turns: int, rounds: int, rivals: Sequence[str] = ()
) -> Comparison:
    """Measure every side of a case, all in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    model = payloads.make(folder, federation.processes, case.model)
    tessera = Tessera(federation, model, case.sent, case.codec, case.dataset, case.download_codec)
    first = tessera.turn(rounds)
    down, up = (int((nbytes or 0) / case.workers) for nbytes in (first.sent, first.received))
    network = federation.network
    others: list[Side] = [Bare(folder / "bare", case.workers, down, up, network)]
    others += [RIVALS[rival](folder / rival, model, case.workers, network) for rival in rivals]
    return compare(tessera, first, others, turns, rounds)


def compare(tessera: Side, first: Turn, others: Sequence[Side], turns: int, rounds: int) -> Comparison:
    """Measure the other sides, in turns with Tessera's after its first. The failure of a rival leaves it out."""
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
                            some = min(rounds, RIVALS_ROUNDS) if side.name in RIVALS else rounds
                            taken[side.name].append(side.turn(some))
    found = {name: Summary.of(turns) for name, turns in taken.items() if name not in failures}
    return Comparison(found, failures)


@contextmanager
def _leaving_out(side: Side, failures: dict[str, str]) -> Iterator[None]:
    try:
        yield
    except (TimeoutError, RuntimeError, OSError, subprocess.SubprocessError) as fault:
        if side.name not in RIVALS:
            raise
        failures[side.name] = failure(fault)
