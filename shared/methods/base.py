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
from typing import TYPE_CHECKING, Any, ClassVar, Generic, Protocol, TypeVar

from pydantic import Field

from tessera.shared.aggregation.mean import Normalization, average
from tessera.shared.aggregation.robust import FEW_SENDERS, Mean, RobustRule, guarded
from tessera.shared.model.attention_stats import LayerAttention, TaskTokens
from tessera.shared.model.blocks import Block
from tessera.shared.model.selectors import EVERYTHING, NOTHING, Selector
from tessera.shared.model.spec import Fusion, LocalStart, Modality
from tessera.shared.run_settings import Privacy, Training
from tessera.shared.schema import Frozen
from tessera.shared.tensors.lazy import Array, Tensor

if TYPE_CHECKING:
    import torch


class MethodSettings(Frozen):
    """A method's own settings; unknown ones are refused."""


class UnsupportedRun(ValueError):
    """A run asks for what its method cannot do. The text says what, and what to ask for instead."""


C = TypeVar("C", bound=MethodSettings)


class Plan(Frozen):
    """What a round asks of one worker."""

    stage: str = Field(default="train", pattern=r"^[ -~]{0,64}$")
    """What the round is called where people read it."""
    fetch: Selector = EVERYTHING
    train: Selector = EVERYTHING
    upload: Selector = EVERYTHING
    server_state: tuple[str, ...] = Field(default=(), max_length=64)
    """Shell patterns for the names of the server state to fetch."""
    scalars: dict[str, float] = Field(default_factory=dict)


@dataclass(frozen=True)
class State:
    """All that the server remembers, and what a version stores: resuming is loading it."""

    round: int
    """Rounds committed so far, which is the version's number."""
    model: Mapping[str, Tensor]
    server_state: Mapping[str, Tensor] = field(default_factory=dict)
    """Server-side tensors under names of the method's choosing, such as an optimizer's moments."""
    scalars: Mapping[str, float] = field(default_factory=dict)

    def advanced(self, changed: Mapping[str, Tensor]) -> State:
        """Return the state one round on, with some blocks changed and all else as it was."""
        return replace(self, round=self.round + 1, model={**self.model, **changed})


@dataclass(frozen=True)
class Participant:
    """A worker as a method sees it when it plans."""

    name: str
    examples: int
    resources: Mapping[str, float] = field(default_factory=dict)
    """What its site declares that it may spend: `memory_bytes`, `upload_bytes_per_second`."""
    site: str = ""
    """The admitted site whose token it shows. A worker chooses its name and never its site, so whatever counts
    participants counts sites. One made without a site is a site of its own, under its own name."""
    last_round: int = 0
    """The latest round of the run that it sent an accepted update for: what it keeps of the run is as of then."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", self.site or self.name)


@dataclass(frozen=True)
class Update:
    """A site's accepted update. `blocks` has what was sent and nothing else: absent means no change.

    Where several workers of a site take part, it is what they sent together (`shared.rounds.aggregate.pooled`), under
    the name of the first of them.
    """

    worker: str
    examples: int
    blocks: Mapping[str, Tensor]
    metrics: Mapping[str, float] = field(default_factory=dict)
    site: str = ""
    """The admitted site whose token the worker showed; as `Participant.site`."""
    plan: Plan = field(default_factory=Plan)
    """What was asked of the worker."""
    staleness: int = 0
    """Versions since the one that it started from. Of several workers' updates, the most."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "site", self.site or self.worker)


@dataclass(frozen=True)
class RunInfo:
    """What both halves may know of the run."""

    blocks: tuple[Block, ...]
    rounds: int
    normalization: Normalization = "participants"
    training: Training = field(default_factory=Training)
    privacy: Privacy | None = None
    upload_budget: int | None = None
    """The most bytes of an update. Coarser codecs are taken to keep to it, so a method need not look at it."""
    upload_seconds: float | None = None
    """The most that an update may take on the line that its worker declares. The same holds."""
    robust: RobustRule = field(default_factory=Mean)
    workers_per_site: int = 1
    """Workers of a site that take part in a round. Their updates reach a method as one."""
    max_update_norm: float | None = None
    """The largest l2 norm of a step that may count, also where `merge` makes it longer than it was sent."""


class CoordinatorHalf(Generic[C]):
    """Runs on the coordinator: numpy only; no clock, no network, no files."""

    sticky: ClassVar[bool] = False
    """Whether the server's memory counts what each site keeps. A site that took part then stays with the worker whose
    update was merged, since what that one keeps is its own; while it is away, so is the site."""

    def __init__(self, settings: C, run: RunInfo) -> None:
        self.settings = settings
        self.run = run

    def start(self, state: State) -> State:
        """Return the state before the first round: a place to add server state.

        Raises UnsupportedRun, which refuses the run, if it is not one that the method can do.
        """
        return state

    def plan(self, state: State, cohort: Sequence[Participant], rng: Random) -> Mapping[str, Plan]:
        """Return a plan for each worker of the cohort, by name. No plans at all end the run."""
        return {worker.name: self.plan_for(state, worker) for worker in cohort}

    def plan_for(self, state: State, worker: Participant) -> Plan:
        return Plan()

    def check(self, plan: Plan, examples: int, metrics: Mapping[str, float]) -> None:
        """Judge what a worker reports beside its blocks. Raises ValueError, which refuses the update."""

    def step_scale(self, metrics: Mapping[str, float]) -> float:
        """Return by how much `merge` lengthens the step of an update with these numbers, but for a factor that all
        updates of a round have in common. Norms are compared after it (`max_norm_of_median`), within a round and over
        rounds, so it depends on nothing but these numbers."""
        return 1.0

    def weight(self, update: Update) -> float:
        """Return what an update counts in the mean."""
        return float(update.examples)

    def merge(self, state: State, updates: Sequence[Update]) -> State:
        """Return the next state. `updates` come sorted by worker; tensors are lazy and are read block by block."""
        if not self.run.robust.neutral:
            blocks = [update.blocks for update in updates]
            moved, few = guarded(self.run.robust, state.model, blocks, self.run.normalization)
            return replace(state.advanced(moved), scalars={**state.scalars, FEW_SENDERS: float(len(few))})
        senders = [(self.weight(update), update.blocks) for update in updates]
        by_name = {block.name: block for block in self.run.blocks}
        return state.advanced(
            average(
                state.model, senders, self.run.normalization, lambda name: self.inclusion_probability(by_name[name])
            )
        )

    def check_robust(self) -> None:
        """Raise UnsupportedRun if there is a way past the run's robust rule.

        There is one if anything but the average of `merge` above follows from what workers send. A method that merges
        in its own way says for itself that there is none.
        """
        if type(self).merge is not CoordinatorHalf.merge:
            raise UnsupportedRun(
                "the method merges in a way of its own, which no robust rule guards: leave out robust, or choose "
                "another method"
            )

    def check_buffered(self) -> None:
        """Raise UnsupportedRun if the method cannot merge an update that started from an earlier version.

        A method that can says so itself: what one remembers of its sites may rest on their having the present one.
        """
        raise UnsupportedRun("the method merges only updates that started from the present version")

    def inclusion_probability(self, block: Block) -> float:
        """Return the probability with which a worker sends the block, for the `inverse-probability` average.

        Raises UnsupportedRun where nobody can know it, such as when the choice follows the data.
        """
        return 1.0

    def warnings(self, state: State) -> Sequence[str]:
        """Return sentences for people about what this version shows of the run, such as a layer that nobody ever
        trains."""
        return ()


def initial_state(half: CoordinatorHalf[Any], first: State) -> State:
    """Return a run's state before its first round. Raises UnsupportedRun for a run that its method cannot do."""
    if half.run.normalization == "inverse-probability":
        for block in half.run.blocks:
            half.inclusion_probability(block)
    if not half.run.robust.neutral:
        half.check_robust()
    return half.start(first)


@dataclass(frozen=True)
class Output:
    """What a model makes of a batch."""

    loss: torch.Tensor
    """A scalar: the mean over what is scored."""
    logits: torch.Tensor | None
    """[examples, classes] or [examples, positions, classes]; None where there are no classes to tell apart."""


class TaskContext(Protocol):
    """One task at a worker, as the worker's half sees it."""

    plan: Plan
    blocks: Sequence[Block]
    """The run's blocks: what versions are made of."""
    vault: Mapping[str, Array]
    """What this site kept from its last accepted update of this run; empty the first time."""
    server_state: Mapping[str, Array]
    """The server state that the plan fetches, by name."""

    @property
    def model(self) -> torch.nn.Module: ...
    @property
    def private(self) -> Sequence[Block]:
        """The blocks of what `add_private` added: they train, and have no place in any version."""
        ...

    def read(self, block: Block) -> Array:
        """Return the block's present value, in its own shape and dtype."""
        ...

    def write(self, block: Block, values: Array) -> None:
        """Overwrite the block's value in the model."""
        ...

    def tensors(self, values: Mapping[str, Array]) -> dict[str, torch.Tensor]:
        """Return values by block name as whole tensors by tensor name, on the device; zero where no value is
        given."""
        ...

    def forward(self, batch: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor] | None = None) -> Output:
        """Return what the model makes of a batch; with `values` in place of its own tensors of those names."""
        ...

    def forward_with_features(self, batch: Mapping[str, torch.Tensor]) -> tuple[Output, torch.Tensor]:
        """Return what the model makes of a batch, and what its head is handed in the same pass, [examples, width].

        Where the head is handed tokens, that is the mean over those that are no padding. Raises ValueError if the
        model has no head of its own.
        """
        ...

    def features(self, batch: Mapping[str, torch.Tensor], values: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the features of `forward_with_features` by a model that does not train, with `values` in place of
        the model's own tensors of those names: in evaluation mode, without gradient."""
        ...

    def attention(
        self, batches: Iterable[Mapping[str, torch.Tensor]], tokens: TaskTokens
    ) -> Mapping[str, LayerAttention]:
        """Return how each layer that attends does so, by the layer's name (`shared.model.blocks`). Leaves the model
        as it was.

        Raises ValueError for attention that cannot be measured, and for tokens that cannot be told.
        """
        ...

    def gradient_norms(
        self, batches: Iterable[Mapping[str, torch.Tensor]], blocks: Sequence[Block]
    ) -> Mapping[str, float]:
        """Return the l2 norm of the mean loss's gradient by those of the blocks that are in a layer, by the layer's
        name."""
        ...

    def fisher(self, batches: Iterable[Mapping[str, torch.Tensor]], blocks: Sequence[Block]) -> Mapping[str, float]:
        """Return the mean over examples of the squared norm of such a gradient of the example's own loss."""
        ...

    def top_k(self, scores: Array, count: int, picks: int | None = None) -> Sequence[int]:
        """Return the places of the `count` candidates with the largest sums of scores [examples, candidates], of
        equals the first. Scores are in [0, 1], so that where the run is private the sums are made noisy as it says.

        Who calls it several times for one choice says how many `picks` they come to together: they then cost what
        one choice does."""
        ...

    def add_private(self, name: str, module: torch.nn.Module) -> None:
        """Add a module that stays at this site, with the values that the vault holds for it.

        It becomes a submodule of the model until the task ends.
        """
        ...

    def fuse_prompts(
        self, modalities: Sequence[Modality], fusion: Fusion, start: LocalStart, *, shared_fusion: bool = False
    ) -> None:
        """Have the model's prompts for these towers fused with prompts of this site's own until the task ends.

        Those become the private module `local`, as many as the model's, and what fuses them the private module
        `fusion`; with `shared_fusion` that is the model's own, which must be of the same kind. Raises ValueError if
        the model has no such prompts or fusion.
        """
        ...


@dataclass(frozen=True)
class Phase:
    """One stretch of local training."""

    train: Selector
    """Which of the run's blocks train."""
    epochs: int | None = None
    """As many as the run says if None."""
    private: bool = True
    """Whether what `add_private` added trains too."""
    private_learning_rate: float | None = None
    """The learning rate of what `add_private` added; the run's if None."""
    name: str = "train"


@dataclass(frozen=True)
class TrainingStats:
    """What local training came to."""

    examples: int
    steps: int
    loss: float


@dataclass(frozen=True)
class LocalResult:
    """What training leaves: `upload` goes out, `keep` goes into the vault and has no way onto the wire."""

    upload: Mapping[str, Array]
    keep: Mapping[str, Array] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)


class WorkerHalf(Generic[C]):
    """Runs at a site: torch, but no network and no other worker."""

    def __init__(self, settings: C, run: RunInfo) -> None:
        self.settings = settings
        self.run = run

    def private(self) -> Selector:
        """Return which of the run's blocks never leave the site. A plan that asks for one of them is refused.

        They are kept in the vault and restored from it, as is what `TaskContext.add_private` added.
        """
        return NOTHING

    def setup(self, context: TaskContext) -> None:
        """Before training or evaluating: the version is loaded, and the vault's values are in place.

        Hooks that it registers it must take off again in `collect`: the model may serve the next round as it is.
        """

    def select(self, context: TaskContext, batches: Iterable[Mapping[str, torch.Tensor]]) -> Selector:
        """Return the blocks to train and send, out of those the plan trains."""
        return context.plan.train

    def phases(self, context: TaskContext, selected: Selector) -> Sequence[Phase]:
        """Return the stretches of training, each with an optimizer of its own. None at all trains nothing."""
        return [Phase(selected)]

    def personalization_phases(self, context: TaskContext) -> Sequence[Phase]:
        """Return the local training that comes before a version is evaluated as this site's own model."""
        return ()

    def on_phase_start(self, context: TaskContext, phase: Phase) -> None:
        """Before a phase begins."""

    def loss(self, context: TaskContext, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """Return the loss of one batch, a scalar: by default the one that the transformers model computes."""
        return context.forward(batch).loss

    def after_backward(self, context: TaskContext) -> None:
        """Between the backward pass and the optimizer's step, when gradients may be corrected."""

    def collect(self, context: TaskContext, selected: Selector, stats: TrainingStats) -> LocalResult:
        """Return what to send and what to keep: by default the blocks that were both selected and asked for, and what
        is private."""
        sent = [block for block in context.plan.upload.resolve(context.blocks) if selected.holds(block)]
        kept = [*self.private().resolve(context.blocks), *context.private]
        return LocalResult(
            upload={block.name: context.read(block) for block in sent},
            keep={block.name: context.read(block) for block in kept},
        )


@dataclass(frozen=True)
class Chart:
    """Numbers of a run's versions as lines over the versions, which the run's page draws."""

    name: str
    """A noun phrase for use within a sentence: "No warm-up signals: ..."."""
    scalars: tuple[str, ...]
    """Names in `State.scalars`, or what several begin with. Each is a line, which drops the name's part before the
    first dot."""
    missing: str = "no version has any yet"
    """Why there may be nothing to draw yet, after the name and a colon."""
    requires: Mapping[str, Any] = field(default_factory=dict)
    """Settings other than the defaults without which the numbers are not measured."""
    title: str = ""
    """The heading; the name if left out."""
    description: str = ""
    """Sentences between the heading and the chart."""
    unit: str = ""


@dataclass(frozen=True)
class Method(Generic[C]):
    """A method, as its file declares it in `METHOD`."""

    name: str
    settings: type[C]
    coordinator: type[CoordinatorHalf[C]]
    worker: type[WorkerHalf[C]]
    source: str
    """The paper, section and equation that it follows."""
    charts: tuple[Chart, ...] = ()


UPDATE_NORM = "update_norm"
"""The name of an update's l2 norm among its numbers, which the coordinator measures."""


class MethodSpec(Frozen):
    """A method by name, with its settings: what a run and a task carry."""

    name: str
    settings: dict[str, Any] = {}
