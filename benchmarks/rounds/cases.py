"""One case of a round, and the sides that are compared in it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks import payloads
from benchmarks.federation import DATASET, PAIRS, Federation
from benchmarks.network import DIRECT, Network
from benchmarks.rivals.flare import Flare
from benchmarks.rivals.flower import Flower
from benchmarks.rounds.bare import Bare
from benchmarks.rounds.sides import Side, Summary, Turn
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
) -> dict[str, Summary]:
    """Each side's figures, all taken in turns."""
    folder.mkdir(parents=True, exist_ok=True)
    model = payloads.make(folder, federation.processes, case.model)
    tessera = Tessera(federation, model, case.sent, case.codec, case.dataset)
    taken: dict[str, list[Turn]] = {tessera.name: [tessera.turn(rounds)]}
    first = taken[tessera.name][0]
    down, up = (int((nbytes or 0) / case.workers) for nbytes in (first.sent, first.received))
    network = federation.network
    others: list[Side] = [Bare(folder / "bare", case.workers, down, up, network)]
    others += [RIVALS[rival](folder / rival, model, case.workers, network) for rival in rivals]
    # With one turn for each, one after the other has the machine's memory.
    for group in [[side] for side in others] if turns == 1 else [others]:
        with ExitStack() as stack:
            for side in group:
                stack.enter_context(side)
                taken[side.name] = []
            for _ in range(turns):
                for side in (tessera, *group):
                    if len(taken[side.name]) < turns:
                        some = min(rounds, RIVALS_ROUNDS) if side.name in rivals else rounds
                        taken[side.name].append(side.turn(some))
    return {name: Summary.of(found) for name, found in taken.items()}
