"""What a method is: two halves that share nothing but data. The defaults together are FedAvg.

The coordinator's half says what each round asks and how updates become the next version; it runs in a process without
torch. The worker's half takes part in local training; it sees one model and one site's data. The former is
made anew for each call and the latter for each task, so neither can remember anything on itself: what the server
remembers is `State`, what a site remembers is its vault.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from random import Random
from typing import TYPE_CHECKING, Generic, Protocol, TypeVar

from pydantic import Field

from shared.averaging import Divide, average
from shared.blocks import EVERYTHING, Block, Frozen, Selector
from shared.tensors import Array, Tensor

if TYPE_CHECKING:
    import torch


class MethodSettings(Frozen):
    """A method's own settings; unknown ones are refused."""


C = TypeVar("C", bound=MethodSettings)


class Plan(Frozen):
    """What a round asks of one worker."""

    stage: str = Field(default="train", max_length=64)
    """What the round is called where people read it."""
    fetch: Selector = EVERYTHING
    train: Selector = EVERYTHING
    upload: Selector = EVERYTHING
    numbers: dict[str, float] = Field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """All that the server remembers, and what a version stores: resuming is loading it."""

    round: int
    """Rounds committed so far, which is the version's number."""
    model: Mapping[str, Tensor]
    memory: Mapping[str, Tensor] = field(default_factory=dict)
    """Server-side tensors under names of the method's choosing, such as an optimizer's moments."""
    numbers: Mapping[str, float] = field(default_factory=dict)

    def advanced(self, changed: Mapping[str, Tensor]) -> State:
        """The state one round on, with some blocks changed and all else as it was."""
        return replace(self, round=self.round + 1, model={**self.model, **changed})


@dataclass(frozen=True)
class Participant:
    """A worker as a method sees it when it plans."""

    name: str
    examples: int


@dataclass(frozen=True)
class Update:
    """An accepted update. `blocks` has what was sent and nothing else: absent means no change."""

    worker: str
    examples: int
    blocks: Mapping[str, Tensor]
    numbers: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class RunFacts:
    """What both halves may know of the run."""

    blocks: tuple[Block, ...]
    rounds: int
    divide: Divide = "participants"


class CoordinatorHalf(Generic[C]):
    """Runs on the coordinator: numpy only; no clock, no network, no files."""

    def __init__(self, settings: C, run: RunFacts) -> None:
        self.settings = settings
        self.run = run

    def start(self, state: State) -> State:
        """The state before the first round: a place to add server memory."""
        return state

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        """A plan for each worker of the cohort, by name. No plans at all end the run."""
        return {worker.name: self.plan_for(state, worker) for worker in cohort}

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan()

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        """The next state. `updates` come sorted by worker; tensors are lazy and are read block by block."""
        senders = [(float(update.examples), update.blocks) for update in updates]
        return state.advanced(average(state.model, senders, self.run.divide))


class Work(Protocol):
    """One task at a worker, as the worker's half sees it."""

    plan: Plan
    blocks: Sequence[Block]
    vault: Mapping[str, Array]
    """What this site kept from its last accepted update of this run; empty the first time."""

    @property
    def model(self) -> torch.nn.Module: ...
    def read(self, block: Block) -> Array:
        """The block's present value, in its own shape and dtype."""
        ...

    def write(self, block: Block, values: Array) -> None:
        """Overwrites the block's value in the model."""
        ...


@dataclass(frozen=True)
class Phase:
    """One stretch of local training: which blocks train. `epochs` None means as many as the run says."""

    train: Selector
    epochs: int | None = None


@dataclass(frozen=True)
class Tally:
    """What local training came to."""

    examples: int
    steps: int
    loss: float


@dataclass(frozen=True)
class Harvest:
    """What training leaves: `upload` goes out, `keep` goes into the vault and has no way onto the wire."""

    upload: Mapping[str, Array]
    keep: Mapping[str, Array] = field(default_factory=dict)
    numbers: Mapping[str, float] = field(default_factory=dict)


class WorkerHalf(Generic[C]):
    """Runs at a site: torch, but no network and no other worker."""

    def __init__(self, settings: C, run: RunFacts) -> None:
        self.settings = settings
        self.run = run

    def prepare(self, work: Work) -> None:
        """Before training: insert prompts or adapters, restore what the vault holds.

        Hooks that it registers it must take off again in `harvest`: the model may serve the next round as it is.
        """

    def select(self, work: Work, batches: Iterable[Mapping[str, torch.Tensor]]) -> Selector:
        """The blocks to train and send, out of those the plan trains."""
        return work.plan.train

    def phases(self, work: Work, selected: Selector) -> Sequence[Phase]:
        return [Phase(selected)]

    def loss(self, work: Work, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """The loss of one batch, a scalar: by default the one that the transformers model computes."""
        loss: torch.Tensor = work.model(**batch).loss
        return loss

    def after_backward(self, work: Work) -> None:
        """Between the backward pass and the optimizer's step, when gradients may be corrected."""

    def harvest(self, work: Work, selected: Selector, tally: Tally) -> Harvest:
        """What to send and what to keep: by default the blocks that were both selected and asked for."""
        sent = [block for block in work.plan.upload.resolve(work.blocks) if selected.holds(block)]
        return Harvest(upload={block.name: work.read(block) for block in sent})


@dataclass(frozen=True)
class Method(Generic[C]):
    """A method, as its file declares it in `METHOD`."""

    name: str
    settings: type[C]
    coordinator: type[CoordinatorHalf[C]]
    worker: type[WorkerHalf[C]]
    source: str
    """The paper, section and equation that it follows."""
